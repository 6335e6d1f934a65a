"""The text around sample.py's generate: prompts go in, and what is drawn is printed.

`Samples` continues prompts, and `Chat` (chat.py) answers the lines of a user. sample.py uses both
alike:

    prompts()       yields the tokens of a prompt, the most tokens to draw, and a generator for each
                    sample
    write(drawn)    prints what is drawn for that prompt. `drawn` yields a list at a time: the next
                    token of each sample, or None where the sample has ended.

Only text goes to standard output. All else that a user is told goes to standard error.
"""
import sys

import torch

from base.errors import warn
from corpus.tokenizers import decode

AT_ONCE = 16                    # The samples in a batch. It bounds the memory of the cache.
DASHES = "-" * 40 + "\n"        # the line between samples


def show(text: str, shown: int) -> int:
    """Write what comes after the first `shown` characters of a text, and return how many are shown
    now."""
    sys.stdout.write(text[shown:])
    sys.stdout.flush()
    return max(shown, len(text))


def read_prompts(args) -> list[str]:
    """The prompts. Raises ValueError for text that is not UTF-8."""
    text = args.prompt
    try:
        if args.prompt == "-":
            if sys.stdin is None:
                raise ValueError("--prompt - reads standard input, which is closed")
            text = sys.stdin.read()
        (args.stop + text).encode()
    except UnicodeError as error:
        raise ValueError(f"the text of --prompt or --stop is not UTF-8 ({error.reason}): convert "
                         f"it, as by iconv -f WINDOWS-1252 -t UTF-8") from None
    if args.prompt == "-" and args.num_samples is not None:
        return text.removesuffix("\n").split("\n")
    return [text]


def check_rows(encoding, tokens: list[int], rows: int) -> None:
    """Raise ValueError if a model of so many `rows` has none for one of the tokens of a prompt."""
    if max(tokens) >= rows:
        text = decode(encoding, [max(tokens)])
        raise ValueError(f"the prompt has the token {max(tokens)}, {text!r}, and the model has "
                         f"rows for {rows:,} tokens: leave it out of the prompt")


class Samples:
    """--num-samples of each prompt, AT_ONCE as a batch, whose first is printed as it grows."""
    ends = frozenset()                  # tokens that end a sample, besides those of the checkpoint

    def __init__(self, args, tokenizer, model_config):
        """Raises ValueError if the model has no row for a token of a prompt."""
        self.args, self.tokenizer, self.seq_len = args, tokenizer, model_config.seq_len
        self.tokens_of_prompts = []
        for text in read_prompts(args):
            tokens = [*tokenizer.prefix, *tokenizer.encode_ordinary(text)] or [tokenizer.eot_token]
            check_rows(tokenizer, tokens, model_config.vocab_size)
            self.tokens_of_prompts.append((text, tokens))
        self.prompt = ""                # the prompt of the batch that is drawn now
        self.streams = []               # of the samples in that batch: their tokens become text
        self.is_first = True            # whether nothing is printed yet

    def prompts(self):
        count = self.args.num_samples or 1
        seeds = range(self.args.seed, self.args.seed + count)
        for prompt, tokens in self.tokens_of_prompts:
            self.prompt = prompt
            if len(tokens) > self.seq_len:
                warn(f"the prompt has {len(tokens)} tokens, the model sees the last {self.seq_len}",
                     "sample.py")
            for first in range(0, count, AT_ONCE):
                generators = [torch.Generator().manual_seed(seed)
                              for seed in seeds[first:first + AT_ONCE]]
                self.streams = [self.tokenizer.stream(tokens) for _ in generators]
                yield tokens, self.args.max_tokens, generators

    def write(self, drawn) -> None:
        stop = self.args.stop
        texts = [""] * len(self.streams)
        open_samples = set(range(len(texts)))       # those that have not reached `stop`
        shown = 0                       # characters of the first sample on standard output
        self.begin_sample()

        def extend(i: int, text: str) -> None:
            texts[i] += text
            if stop and stop in texts[i]:
                texts[i] = texts[i].partition(stop)[0]
                open_samples.discard(i)
        for tokens in drawn:
            for i in [i for i in open_samples if tokens[i] is not None]:
                extend(i, self.streams[i].add(tokens[i]))
            certain = texts[0]
            if stop and 0 in open_samples:      # its last characters may be the beginning of `stop`
                certain = certain[:max(0, len(certain) - len(stop) + 1)]
            shown = show(certain, shown)
            if all(tokens[i] is None for i in open_samples):
                break
        for i in list(open_samples):
            extend(i, self.streams[i].end())
        show(texts[0], shown)
        print()
        for text in texts[1:]:
            self.begin_sample()
            print(text)
        sys.stdout.flush()

    def begin_sample(self) -> None:
        """Write the prompt, behind a line of dashes if another sample is before it."""
        if not self.is_first:
            sys.stdout.write(DASHES)
        self.is_first = False
        sys.stdout.write(self.prompt)
