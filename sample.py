"""Text out of a checkpoint, in one process, whatever layout trained it.

    python sample.py --ckpt out/latest.pt --prompt "def "
    echo "Once upon a time" | python sample.py --ckpt out/latest.pt --prompt -

    prompt -> tokens -> model -> logits of the last position (V,) -> / temperature -> the k largest
    -> the smallest set whose probability reaches p -> one token -> appended, and again

Temperature 0 takes the most probable token. Top-p is nucleus sampling (Holtzman et al. 2020).
Only text goes to standard output. A sample ends at <|endoftext|>, before the --stop text, or at
--max-tokens. A line of dashes separates samples.
"""
import argparse
import codecs
import os
import signal
import sys
from functools import partial
from pathlib import Path

if __name__ == "__main__":      # Ctrl-C at any time, also while torch is imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from runtime.commandline import Parser      # first: without torch it ends the program in one line

import torch
import torch.nn as nn
import torch.nn.functional as F

from checkpoint import load_model
from data import get_tokenizer
from parallelism.collectives import first_line, out_of_memory
from runtime.devices import pick_device
from runtime.other_names import SAMPLE_ADVICE, SAMPLE_NAMES

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
AT_ONCE = 16                   # samples in a batch, which bounds the memory of the cache
DASHES = "-" * 40 + "\n"       # the line between samples
LOWEST = 1e-6                  # temperature and top-p below it would be 0 in fp32, or nearly
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
def generate(model, tokens: list[int], max_tokens: int, end: int, temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, generators=(None,)):
    """Continue `tokens` once with each of the `generators`, as one batch with one cache. Yields up
    to `max_tokens` times {number of the sample: token id} for the samples that continue. The token
    `end` ends a sample and is not yielded.

    The model sees the last seq_len tokens of a prompt. The cache holds the keys and values of the
    tokens before, so a new token costs one position. When all seq_len positions are taken, the
    newest half of the tokens moves to the first positions and is computed again.
    """
    seq_len = model.cfg.seq_len
    device = next(model.parameters()).device
    count = len(generators)
    ended = set()
    seen = 0                                                    # positions in the cache
    cache = model.new_kv_cache(count)
    window = torch.tensor([tokens[-seq_len:]], device=device)   # (1, T): the samples share a prompt
    for _ in range(max_tokens):
        if window.shape[1] > seq_len:
            window = window[:, -max(1, seq_len // 2):]
            seen = 0
        logits = model(window[:, seen:], cache=cache, start=seen)[:, -1]
        logits = logits.expand(count, -1)                                   # (count, V)
        seen = window.shape[1]
        if temperature == 0:
            drawn = logits.argmax(-1).tolist()
        else:
            probabilities = filter_logits(logits, temperature, top_k, top_p).cpu()
            drawn = [torch.multinomial(row, 1, generator=generator).item()
                     for row, generator in zip(probabilities, generators)]
        ended |= {i for i, token in enumerate(drawn) if token == end}
        yield {i: token for i, token in enumerate(drawn) if i not in ended}
        if len(ended) == count:
            return
        new = torch.tensor(drawn, device=device)[:, None]                   # (count, 1)
        window = torch.cat([window.expand(count, -1), new], dim=1)


def linear_in_halves(linear: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    """F.linear in fp32 on the CPU. It multiplies a single row with both halves of the matrix as a
    batch: MKL takes 2 to 3 times as long for the product of one matrix and one vector."""
    if x.numel() > x.shape[-1]:
        return F.linear(x, linear.weight, linear.bias)
    halves = linear.weight.view(2, -1, x.shape[-1])                         # (2, out / 2, in)
    # The stride of a transposed row is fast; that of a column takes bmm's slow path.
    column = x.reshape(1, 1, -1).expand(2, 1, -1).mT                        # (2, in, 1)
    y = torch.bmm(halves, column)                                           # (2, out / 2, 1)
    return y.view(*x.shape[:-1], -1) + linear.bias


def use_fast_rows(model) -> None:
    """Let the Linear modules of a model in fp32 on the CPU compute by `linear_in_halves`."""
    weight = model.head.weight
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return
    for module in model.modules():
        if isinstance(module, nn.Linear) and module.out_features % 2 == 0:
            module.forward = partial(linear_in_halves, module)


def print_samples(model, tokenizer, prompt: str, seeds: range, args) -> None:
    """Print a sample of a prompt for each seed, the first one as it is generated."""
    tokens = tokenizer.encode_ordinary(prompt)
    if len(tokens) > model.cfg.seq_len:
        print(f"sample.py: warning: the prompt has {len(tokens)} tokens, the model sees the "
              f"last {model.cfg.seq_len}", file=sys.stderr)
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]
    stop = args.stop.encode()
    texts = [b""] * len(seeds)
    ended = set()                   # the samples that have reached `stop`
    shown = 0                       # characters of the first sample on standard output
    sys.stdout.write(prompt)
    for drawn in generate(model, tokens or [tokenizer.eot_token], args.max_tokens,
                          tokenizer.eot_token, args.temperature, args.top_k, args.top_p,
                          generators):
        for i in drawn.keys() - ended:
            texts[i] += tokenizer.decode_single_token_bytes(drawn[i])
            if stop and stop in texts[i]:
                texts[i] = texts[i].partition(stop)[0]
                ended.add(i)
        certain = texts[0]
        if stop and 0 not in ended:         # its last bytes may be the beginning of `stop`
            certain = certain[:max(0, len(certain) - len(stop) + 1)]
        text, _ = codecs.utf_8_decode(certain, "replace", False)    # False: whole characters only
        sys.stdout.write(text[shown:])
        sys.stdout.flush()
        shown = max(shown, len(text))
        if ended >= drawn.keys():
            break
    sys.stdout.write(texts[0].decode(errors="replace")[shown:] + "\n")
    for text in texts[1:]:
        sys.stdout.write(DASHES + prompt + text.decode(errors="replace") + "\n")


def parse_flags(parser: Parser):
    """The flags, with their defaults. A mistake ends the program with status 2."""
    add = parser.add_argument_group("checkpoint and text").add_argument
    add("--ckpt", default="out/latest.pt", metavar="FILE", help="checkpoint (default %(default)s)")
    add("--prompt", default="", metavar="TEXT",
        help="text to continue; -: standard input (default: begin a document)")
    add("--num-samples", type=int, metavar="N", help="samples per prompt, with --seed, --seed + 1, "
        "...; if it is given, each line of --prompt - is a prompt (default: one sample)")
    add("--max-tokens", type=int, default=500, metavar="N", help="tokens per sample; whenever the "
        "model's window is full, it forgets the older half (default %(default)s)")
    add("--stop", default="", metavar="TEXT", help=r"end before this text (a line break is $'\n')")
    add = parser.add_argument_group("choice of the next token").add_argument
    add("--temperature", type=float, default=0.8, metavar="X",
        help="divides the logits; 0: the most probable token (default %(default)s)")
    add("--top-k", type=int, default=0, metavar="N", help="the N most probable; 0: all (default 0)")
    add("--top-p", type=float, default=1.0, metavar="X", help="the smallest set of tokens whose "
        "probability reaches X (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default %(default)s)")
    add = parser.add_argument_group("device and precision").add_argument
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"],
        help="auto: cuda or mps where available (default %(default)s)")
    add("--dtype", default="fp32", choices=list(DTYPES), help="type of weights and activations; "
        "bf16 is faster where the device multiplies 16-bit numbers (default %(default)s)")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)     # none is expected
    args = parser.parse_args()
    if args.words:
        text = " ".join(args.words)
        is_file = text.endswith(".pt") or Path(text).exists()
        parser.error(f"unknown argument {text}: give --ckpt FILE" if is_file else
                     f"unknown argument {text!r}: give --prompt TEXT")
    if args.num_samples is not None and args.num_samples < 1:
        parser.error("--num-samples must be at least 1")
    if args.max_tokens < 0 or args.top_k < 0:
        parser.error("--max-tokens and --top-k must be at least 0")
    if not 0 <= args.seed < 2 ** 63:
        parser.error("--seed must be 0 to 2^63 - 1")
    if args.temperature != 0 and not LOWEST <= args.temperature < float("inf"):
        parser.error(f"--temperature must be 0 (greedy) or at least {LOWEST:g}, and finite")
    if not LOWEST <= args.top_p <= 1:
        parser.error(f"--top-p must be at least {LOWEST:g} and at most 1 (or give --top-k 1)")
    return args


def read_prompts(args) -> list[str]:
    """The prompts. Raises ValueError for text that is not UTF-8."""
    prompts = [args.prompt]
    if args.prompt == "-":
        if sys.stdin is None:
            raise ValueError("--prompt - reads standard input, which is closed")
        prompts = [sys.stdin.read()]
        if args.num_samples is not None:
            prompts = prompts[0].removesuffix("\n").split("\n")
    (args.stop + "".join(prompts)).encode()
    return prompts


def main() -> None:
    parser = Parser("sample.py", "python sample.py [FLAG ...]", "Sample text from a checkpoint.",
                    SAMPLE_NAMES, SAMPLE_ADVICE)
    args = parse_flags(parser)
    try:
        device = pick_device(args.device)
        model, state = load_model(Path(args.ckpt))
        tokenizer = get_tokenizer(state["tokenizer"], state.get("tokenizer_file"))
        prompts = read_prompts(args)
    except (ValueError, OSError) as error:
        parser.error(str(error), getattr(error, "status", 2))
    model.to(device, DTYPES[args.dtype])
    use_fast_rows(model)
    if sys.stdout is None:
        parser.error("standard output, where the text goes, is closed: give a file or a pipe")
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    seeds = range(args.seed, args.seed + (args.num_samples or 1))
    for number, prompt in enumerate(prompts):
        for first in seeds[::AT_ONCE]:
            if number > 0 or first > args.seed:
                sys.stdout.write(DASHES)
            some = range(first, min(first + AT_ONCE, seeds.stop))
            print_samples(model, tokenizer, prompt, some, args)
    sys.stdout.flush()


if __name__ == "__main__":
    try:
        main()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.exit(f"sample.py: out of memory ({first_line(error)}): lower --num-samples, try "
                 f"--device cpu, or another machine")
    except BrokenPipeError:             # `| head` has read enough
        os._exit(1)
    except OSError as error:            # nothing more is flushed to it
        print(f"sample.py: standard output cannot be written: {error.strerror}", file=sys.stderr)
        os._exit(1)
