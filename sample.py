"""Text out of a checkpoint, in one process, whatever layout trained it.

    python sample.py --ckpt out/latest.pt --prompt "def "
    echo "Once upon a time" | python sample.py --ckpt out/latest.pt --prompt -
    python sample.py --ckpt out/chat/latest.pt --chat       # if it was trained on conversations

    prompt -> tokens -> model -> logits of the last position (V,) -> / temperature -> the k largest
    -> the smallest set whose probability reaches p -> one token -> appended, and again

Temperature 0 takes the most probable token. Top-p is nucleus sampling (Holtzman et al. 2020).
Only text goes to standard output. A sample ends at <|endoftext|>, before the --stop text, or at
--max-tokens. A line of dashes separates samples.
"""
import codecs
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":      # Ctrl-C at any time, also while torch is imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# First: without torch it ends the program in one line.
from runtime.sample_flags import make_parser, parse_flags, read_lines, read_prompts

import torch

from amp import PRECISIONS
from checkpoint import load_model
from corpus.chat_templates import get_template
from corpus.messages import ASSISTANT, Message
from corpus.tokenizers import bytes_of_token, check_rows, get_tokenizer, prompt_tokens
from models.kv_cache import CachedModel
from parallelism.collectives import first_line, out_of_memory
from runtime.devices import pick_device

AT_ONCE = 16                   # samples in a batch, which bounds the memory of the cache
DASHES = "-" * 40 + "\n"       # the line between samples
ROUNDING = 1e-6                # relative error of a sum of probabilities in fp32


def filter_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float):
    """Logits (..., V) -> probabilities (..., V). Tokens that are filtered out have probability 0.

    top_k 0 and top_p 1 keep all tokens; the most probable token is always kept. top_k keeps exactly
    k, then top_p the smallest set that reaches its part of their probability; of equally probable
    tokens the lowest come first.
    """
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)                 # at most 0: no overflow
    if 0 < top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[..., -1:]                 # that is kept
        is_above = logits > least
        is_equal = logits == least
        room = top_k - is_above.sum(-1, keepdim=True)               # for equal ones
        is_kept = is_above | (is_equal & (is_equal.cumsum(-1) <= room))
        logits = logits.where(is_kept, -torch.inf)
    probabilities = (logits / temperature).softmax(dim=-1)
    if top_p < 1:
        _, token = logits.sort(descending=True, stable=True)        # the most probable first
        ordered = probabilities.gather(-1, token)
        before = ordered.cumsum(-1) - ordered                       # that of the likelier tokens
        reached = before >= top_p * (1 - ROUNDING)                  # never at the first
        ordered = ordered.masked_fill(reached, 0)
        ordered /= ordered.sum(-1, keepdim=True)
        probabilities = torch.zeros_like(logits).scatter(-1, token, ordered)
    return probabilities


@torch.inference_mode()
def plain_generate(model, tokens: list[int], count: int, temperature: float = 1.0,
                   generator=None) -> list[int]:
    """The `count` tokens that a model puts behind `tokens`. Each is drawn from all of the window
    before it. A window that is full goes on with its newest half."""
    seq_len = model.cfg.seq_len
    window, drawn = tokens[-seq_len:], []
    for _ in range(count):
        if len(window) > seq_len:
            window = window[-max(1, seq_len // 2):]
        logits = model(torch.tensor([window]))[0, -1]               # (V,), of the last position
        if temperature == 0:
            token = logits.argmax()
        else:
            probabilities = (logits / temperature).softmax(dim=-1)
            token = torch.multinomial(probabilities, 1, generator=generator)
        drawn.append(token.item())
        window = [*window, token.item()]
    return drawn


@torch.inference_mode()
def generate(model, tokens: list[int], max_tokens: int, ends: set[int], temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, generators=(None,)):
    """Continue `tokens` once with each of the `generators`, as one batch with one cache. Yields up
    to `max_tokens` times {number of the sample: token id} for the samples that continue. Each of
    the tokens `ends` ends a sample and is not yielded.

    The model sees the last seq_len tokens of a prompt. The cache holds the keys and values of the
    tokens before, so a new token costs one position. When all seq_len positions are taken, the
    newest half of the tokens moves to the first positions and is computed again. Raises
    FloatingPointError if a logit is not finite.
    """
    seq_len = model.cfg.seq_len
    device = next(model.parameters()).device
    count = len(generators)
    ended = set()
    cached = CachedModel(model, count, min(seq_len, len(tokens) + max_tokens))
    window = torch.tensor([tokens[-seq_len:]], device=device)   # (1, T): the samples share a prompt
    new = window
    for _ in range(max_tokens):
        if window.shape[1] > seq_len:
            window = window[:, -max(1, seq_len // 2):]
            new = window
            cached.clear()
        logits = cached(new)
        if not logits.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: give another checkpoint, "
                                     "such as an older one, or another --dtype")
        logits = logits.expand(count, -1)                                   # (count, V)
        if temperature == 0:
            drawn = logits.argmax(-1).tolist()
        else:
            probabilities = filter_logits(logits, temperature, top_k, top_p).cpu()
            drawn = [torch.multinomial(row, 1, generator=generator).item()
                     for row, generator in zip(probabilities, generators)]
        ended |= {i for i, token in enumerate(drawn) if token in ends}
        yield {i: token for i, token in enumerate(drawn) if i not in ended}
        if len(ended) == count:
            return
        new = torch.tensor(drawn, device=device)[:, None]                   # (count, 1)
        window = torch.cat([window.expand(count, -1), new], dim=1)


def show(text: bytes, shown: int, is_whole=False) -> int:
    """Write what comes after the first `shown` characters of a text, of which more may come unless
    it `is_whole`. Returns how many are shown now."""
    characters, _ = codecs.utf_8_decode(text, "replace", is_whole)      # whole characters only
    sys.stdout.write(characters[shown:])
    sys.stdout.flush()
    return max(shown, len(characters))


def print_samples(model, tokenizer, ends: set[int], prompt: str, seeds: range, args) -> None:
    """Print a sample of a prompt for each seed, the first one as it is generated."""
    tokens = prompt_tokens(tokenizer, prompt, model.cfg.vocab_size)
    if len(tokens) > model.cfg.seq_len:
        print(f"sample.py: warning: the prompt has {len(tokens)} tokens, the model sees the "
              f"last {model.cfg.seq_len}", file=sys.stderr)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stop = args.stop.encode()
    texts = [b""] * len(seeds)
    ended = set()                   # the samples that have reached `stop`
    shown = 0                       # characters of the first sample on standard output
    sys.stdout.write(prompt)
    for drawn in generate(model, tokens, args.max_tokens, ends, args.temperature, args.top_k,
                          args.top_p, generators):
        for i in drawn.keys() - ended:
            texts[i] += bytes_of_token(tokenizer, drawn[i])
            if stop and stop in texts[i]:
                texts[i] = texts[i].partition(stop)[0]
                ended.add(i)
        certain = texts[0]
        if stop and 0 not in ended:         # its last bytes may be the beginning of `stop`
            certain = certain[:max(0, len(certain) - len(stop) + 1)]
        shown = show(certain, shown)
        if ended >= drawn.keys():
            break
    show(texts[0], shown, is_whole=True)
    print()
    for text in texts[1:]:
        sys.stdout.write(DASHES + prompt + text.decode(errors="replace") + "\n")


def chat(model, tokenizer, ends: set[int], template, lines, args) -> None:
    """Answer each line, which a user has written, with all of the conversation before it in the
    window. Where that is too long, its oldest question and answer are forgotten."""
    generator = torch.Generator().manual_seed(args.seed)
    seq_len = model.cfg.seq_len
    messages = []
    for line in lines:
        if not line:
            messages = []
            continue
        messages.append(Message("user", line))
        try:
            prompt = template.prompt_of(messages)
            while len(prompt) >= seq_len and len(messages) > 1:
                messages = messages[2:]
                prompt = template.prompt_of(messages)
            if len(prompt) >= seq_len:
                raise ValueError(f"this has {len(prompt)} tokens, the model sees {seq_len}")
            check_rows(tokenizer, prompt, model.cfg.vocab_size)
        except ValueError as error:
            print(f"sample.py: warning: {error}: it is left out, and a new conversation begins",
                  file=sys.stderr)
            messages = []
            continue
        answer = b""
        shown = 0                       # characters on standard output
        for drawn in generate(model, prompt, min(args.max_tokens, seq_len - len(prompt)),
                              ends | {template.end}, args.temperature, args.top_k, args.top_p,
                              [generator]):
            for token in drawn.values():        # none at the end
                answer += bytes_of_token(tokenizer, token)
            shown = show(answer, shown)
        show(answer, shown, is_whole=True)
        print(flush=True)
        messages.append(Message(ASSISTANT, answer.decode(errors="replace")))


def main() -> None:
    parser = make_parser()
    args = parse_flags(parser)
    try:
        device = pick_device(args.device)
        model, state = load_model(Path(args.ckpt))
        tokenizer = get_tokenizer(state["tokenizer"], state.get("tokenizer_file"))
        if args.chat and "template" not in state:
            raise ValueError(f"{args.ckpt} was not trained on conversations: drop --chat, or train "
                             f"it on some (docs/conversations.md)")
        ends = {tokenizer.eot_token, *state.get("ends", [])}
        if args.chat:
            template = get_template(state["template"], tokenizer, state.get("template_file"))
        prompts = [] if args.chat else read_prompts(args)
        for prompt in prompts:
            prompt_tokens(tokenizer, prompt, model.cfg.vocab_size)     # or raises ValueError
        lines = read_lines() if args.chat else []
    except (ValueError, OSError) as error:
        parser.error(str(error), getattr(error, "status", 2))
    model.to(device, PRECISIONS[args.dtype][0])
    if sys.stdout is None:
        parser.error("standard output, where the text goes, is closed: give a file or a pipe")
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    if args.chat:
        chat(model, tokenizer, ends, template, lines, args)
    seeds = range(args.seed, args.seed + (args.num_samples or 1))
    for number, prompt in enumerate(prompts):
        for first in seeds[::AT_ONCE]:
            if number > 0 or first > args.seed:
                sys.stdout.write(DASHES)
            some = range(first, min(first + AT_ONCE, seeds.stop))
            print_samples(model, tokenizer, ends, prompt, some, args)
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.exit(f"sample.py: out of memory ({first_line(error)}): lower --num-samples, try "
                 f"--device cpu, or another machine")
    except FloatingPointError as error:
        sys.exit(f"sample.py: {error}")
    except BrokenPipeError:             # `| head` has read enough
        os._exit(1)
    except OSError as error:            # nothing more is flushed to it
        print(f"sample.py: standard output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(1)
