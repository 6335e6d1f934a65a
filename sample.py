"""Text out of a checkpoint, in one process, whatever layout trained it.

    python sample.py --ckpt out/latest.pt --prompt "def "
    echo "Once upon a time" | python sample.py --ckpt out/latest.pt --prompt -

    prompt -> tokens -> model -> logits of the last position (V,) -> / temperature -> the k largest
    -> the smallest set whose probability reaches p -> one token -> appended, and again

Temperature 0 takes the most probable token. Top-p is nucleus sampling (Holtzman et al. 2020).
Only text goes to standard output, as it is made; it ends at <|endoftext|>, before the --stop text,
or at --max-tokens. A line of dashes stands between samples.
"""
import argparse
import codecs
import os
import signal
import sys
from pathlib import Path

if __name__ == "__main__":      # Ctrl-C at any time, also while torch is imported
    signal.signal(signal.SIGINT, signal.SIG_DFL)

import torch

from checkpoint import load_model
from data import get_tokenizer
from parallel import out_of_memory, pick_device

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
DASHES = "-" * 40 + "\n"       # the line between samples


def filter_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float):
    """Logits (..., V) -> probabilities (..., V): what may not be drawn has probability 0.

    top_k 0 and top_p 1 leave everything; the most probable token always stays.
    """
    logits = logits.float()
    logits = (logits - logits.amax(-1, keepdim=True)) / temperature     # at most 0: no overflow
    if 0 < top_k < logits.shape[-1]:
        logits = logits.where(logits >= logits.topk(top_k).values[..., -1:], -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        before = ordered.cumsum(-1) - ordered                   # probability of all likelier ones
        dropped = before >= top_p                               # never the first: 0 < top_p
        probabilities = probabilities.masked_fill(dropped.scatter(-1, index, dropped), 0)
    return probabilities / probabilities.sum(-1, keepdim=True)


@torch.inference_mode()
def generate(model, tokens: list[int], max_tokens: int, end: int, temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, generators=(None,), ended=()):
    """Go on from `tokens` once with each of the `generators`, as one batch with one cache. Yield up
    to `max_tokens` times {number of the sample: token id} for those that go on: `end` ends one and
    is not yielded, and so does the caller who puts its number into the set `ended`.

    The model sees the last seq_len tokens of a prompt. Keys and values of what it has seen are in
    the cache, and a token costs one position. When all seq_len positions are taken, the newest half
    of the tokens moves to the first and is computed again, once in seq_len / 2 tokens or more.
    """
    seq_len, device = model.cfg.seq_len, next(model.parameters()).device
    samples, seen = list(range(len(generators))), 0
    cache = model.new_kv_cache(len(samples))
    window = torch.tensor([tokens[-seq_len:]], device=device)   # (1, T): the samples share a prompt
    for _ in range(max_tokens):
        if window.shape[1] > seq_len:
            window, seen = window[:, -max(1, seq_len // 2):], 0
        logits = model(window[:, seen:], cache=cache, start=seen)[:, -1]
        logits, seen = logits.expand(len(samples), -1), window.shape[1]             # (samples, V)
        if temperature == 0:
            drawn = logits.argmax(-1).tolist()
        else:
            probabilities = filter_logits(logits, temperature, top_k, top_p).cpu()
            drawn = [torch.multinomial(row, 1, generator=generators[i]).item()
                     for i, row in zip(samples, probabilities)]
        yield {i: token for i, token in zip(samples, drawn) if token != end}
        new = torch.tensor(drawn, device=device)[:, None]
        window = torch.cat([window.expand(len(samples), -1), new], dim=1)
        going = [row for row, i in enumerate(samples) if drawn[row] != end and i not in ended]
        if len(going) < len(samples):
            samples, window = [samples[row] for row in going], window[going]
            cache = {name: kept[:, going] for name, kept in cache.items()}
        if not samples:
            return


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.")
    parser.error = lambda message: parser.exit(2, f"sample.py: {message}\n")
    parser.add_argument("--ckpt", default="out/latest.pt", help="default: %(default)s")
    parser.add_argument("--prompt", default=None, metavar="TEXT",
                        help="text to go on from; - reads standard input; none: <|endoftext|>")
    parser.add_argument("--num-samples", type=int, metavar="N", help="samples of a prompt, one by "
                        "--seed, one by --seed + 1, ...; each line of --prompt - is then a prompt")
    parser.add_argument("--max-tokens", type=int, default=500, help="of a sample; whenever the "
                        "model's window is full, it forgets the older half (default: %(default)s)")
    parser.add_argument("--stop", default="", metavar="TEXT", help="ends a sample before this text")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0: greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0: all (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"],
                        help="auto: cuda or mps where there is one")
    parser.add_argument("--dtype", default="fp32", choices=list(DTYPES), help="type of weights and "
                        "activations; bf16 is faster where the device multiplies 16-bit numbers")
    args = parser.parse_args()
    if args.num_samples is not None and args.num_samples < 1:
        parser.error("--num-samples must be at least 1")
    if args.max_tokens < 0 or args.top_k < 0:
        parser.error("--max-tokens and --top-k must be at least 0")
    if not 0 <= args.seed < 2 ** 63:
        parser.error("--seed must be 0 to 2^63 - 1")
    if not 0 <= args.temperature < float("inf") or not 0 < args.top_p <= 1:
        parser.error("--temperature must be at least 0, --top-p above 0 and at most 1")
    try:
        device = pick_device(args.device, 0, 1)
        model, state = load_model(Path(args.ckpt))
        tokenizer = get_tokenizer(state["tokenizer"])
        prompts = [sys.stdin.read() if args.prompt == "-" else args.prompt or ""]
        if args.prompt == "-" and args.num_samples is not None:
            prompts = prompts[0].removesuffix("\n").split("\n")
        "".join(prompts).encode()                   # ValueError: bytes that are not UTF-8
        stop = args.stop.encode()
    except (ValueError, OSError) as error:
        parser.error(str(error))
    model.to(device, DTYPES[args.dtype])
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    for number, prompt in enumerate(prompts):
        tokens = tokenizer.encode_ordinary(prompt)
        if len(tokens) > model.cfg.seq_len:
            print(f"sample.py: warning: the prompt has {len(tokens)} tokens, the model sees the "
                  f"last {model.cfg.seq_len}", file=sys.stderr)
        data, ended, shown = [b""] * (args.num_samples or 1), set(), 0
        generators = [torch.Generator().manual_seed(args.seed + i) for i in range(len(data))]
        sys.stdout.write(DASHES * (number > 0) + prompt)
        for drawn in generate(model, tokens or [tokenizer.eot_token], args.max_tokens,
                              tokenizer.eot_token, args.temperature, args.top_k, args.top_p,
                              generators, ended):
            for i, token in drawn.items():
                data[i] += tokenizer.decode_single_token_bytes(token)
                if stop and stop in data[i]:
                    data[i] = data[i][:data[i].index(stop)]
                    ended.add(i)
            # The first is shown as it grows, but for a part of a character, or maybe of `stop`.
            certain = len(data[0]) - len(stop[1:]) * (0 not in ended)
            text = codecs.utf_8_decode(data[0][:max(0, certain)], "replace", False)[0]
            sys.stdout.write(text[shown:])
            sys.stdout.flush()
            shown = max(shown, len(text))
        for i, text in enumerate(part.decode(errors="replace") for part in data):
            sys.stdout.write((DASHES + prompt) * (i > 0) + text[shown * (i == 0):] + "\n")


if __name__ == "__main__":
    try:
        main()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        text = str(error) or type(error).__name__
        sys.exit(f"sample.py: out of memory ({text.splitlines()[0]}): the model needs "
                 f"more memory than this device has: try --device cpu, or another machine")
    except BrokenPipeError:             # `| head` has read enough
        os._exit(1)
