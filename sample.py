"""Text out of a checkpoint, in one process, whatever layout trained it.

    python sample.py --ckpt out/latest.pt --prompt "def "
    echo "Once upon a time" | python sample.py --ckpt out/latest.pt --prompt -

    prompt -> tokens -> model -> logits of the last position (V,) -> / temperature -> the k largest
    -> the smallest set whose probability reaches p -> one token -> appended, and again

Temperature 0 takes the most probable token. Top-p is nucleus sampling (Holtzman et al. 2020).
Only text goes to standard output, as it is made; it ends at <|endoftext|> or --max-tokens.
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


def filter_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float):
    """Logits (V,) -> probabilities (V,): what may not be drawn has probability 0.

    top_k 0 and top_p 1 leave everything; the most probable token always stays.
    """
    logits = (logits.float() - logits.float().max()) / temperature      # at most 0: no overflow
    if 0 < top_k < logits.numel():
        logits = logits.where(logits >= logits.topk(top_k).values[-1], -torch.inf)
    probabilities = logits.softmax(dim=-1)
    if top_p < 1:
        ordered, index = probabilities.sort(descending=True)
        before = ordered.cumsum(0) - ordered                    # probability of all likelier ones
        probabilities[index[1:][before[1:] >= top_p]] = 0
    return probabilities / probabilities.sum()


@torch.inference_mode()
def generate(model, tokens: list[int], max_tokens: int, end: int, temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, generator: torch.Generator | None = None):
    """Yield up to `max_tokens` token ids that follow `tokens`; `end` stops and is not yielded.

    The model sees the last seq_len tokens. As long as they are all there are, keys and values of
    those before the last are in a cache; from then on each token moves all others to another
    position, and everything is computed again.
    """
    tokens, seq_len = list(tokens), model.cfg.seq_len
    cache, seen, device = model.new_kv_cache(1), 0, next(model.parameters()).device
    for _ in range(max_tokens):
        if len(tokens) > seq_len:
            seen = 0
        new = torch.tensor([tokens[-seq_len:][seen:]], device=device)           # (1, T)
        logits = model(new, cache=cache, start=seen)[0, -1]                     # (V,)
        seen += new.shape[1]
        if temperature == 0:
            token = logits.argmax().item()
        else:
            probabilities = filter_logits(logits, temperature, top_k, top_p).cpu()
            token = torch.multinomial(probabilities, 1, generator=generator).item()
        if token == end:
            return
        tokens.append(token)
        yield token


def main() -> None:
    parser = argparse.ArgumentParser(description="Sample text from a checkpoint.")
    parser.error = lambda message: parser.exit(2, f"sample.py: {message}\n")
    parser.add_argument("--ckpt", default="out/latest.pt", help="default: %(default)s")
    parser.add_argument("--prompt", default=None, metavar="TEXT",
                        help="text to go on from; - reads standard input; none: <|endoftext|>")
    parser.add_argument("--max-tokens", type=int, default=500, help="default: %(default)s")
    parser.add_argument("--temperature", type=float, default=0.8,
                        help="0: greedy (default: %(default)s)")
    parser.add_argument("--top-k", type=int, default=0, help="0: all (default: %(default)s)")
    parser.add_argument("--top-p", type=float, default=1.0, help="1: all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="default: %(default)s")
    parser.add_argument("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"],
                        help="auto: cuda or mps where there is one")
    args = parser.parse_args()
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
        prompt = sys.stdin.read() if args.prompt == "-" else args.prompt or ""
        prompt.encode()                             # ValueError: bytes that are not UTF-8
    except (ValueError, OSError) as error:
        parser.error(str(error))
    model.to(device)

    tokens = tokenizer.encode_ordinary(prompt)
    if len(tokens) > model.cfg.seq_len:
        print(f"sample.py: warning: the prompt has {len(tokens)} tokens, the model sees the last "
              f"{model.cfg.seq_len}", file=sys.stderr)
    # A token can be a part of a character: the decoder waits for the rest.
    decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
    generator = torch.Generator().manual_seed(args.seed)
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    sys.stdout.write(prompt)
    for token in generate(model, tokens or [tokenizer.eot_token], args.max_tokens,
                          tokenizer.eot_token, args.temperature, args.top_k, args.top_p,
                          generator):
        sys.stdout.write(decoder.decode(tokenizer.decode_single_token_bytes(token)))
        sys.stdout.flush()
    sys.stdout.write(decoder.decode(b"", final=True) + "\n")


if __name__ == "__main__":
    try:
        main()
    except (MemoryError, RuntimeError) as error:
        if not out_of_memory(error):
            raise
        sys.exit(f"sample.py: out of memory ({str(error).splitlines()[0]}): the model needs "
                 f"more memory than this device has: try --device cpu, or another machine")
    except BrokenPipeError:             # `| head` has read enough
        os._exit(1)
