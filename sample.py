"""Text out of a checkpoint, in one process, whatever layout trained it.

    prompt -> tokens -> model -> logits of the last position (V,) -> / temperature -> the k largest
    -> the smallest set whose probability reaches p -> one token -> appended, and again

`generate` is this loop, for several samples of a prompt at once. With a cache of keys and values
(models/kv_cache.py) each new token costs the model one position. runtime/samples.py has prompts and
printing, runtime/chat.py the conversation of --chat.

    python sample.py --ckpt out/latest.pt --prompt "def "
    echo "Once upon a time" | python sample.py --ckpt out/latest.pt --prompt -
    python sample.py --ckpt out/chat/latest.pt --chat       # if it was trained on conversations
"""
import sys
from pathlib import Path

# Before torch: it exits with one line if torch is missing.
from base.sample_flags import parse_flags

import torch

from amp import PRECISIONS
from base.devices import pick_device
from base.errors import errors_in_one_line, errors_with_path, memory_advice
from checkpoint import load_model
from corpus.tokenizers import get_tokenizer
from models.kv_cache import CachedModel
from parallelism.kernels import use_kernels
from runtime.samples import Samples


def filter_logits(logits: torch.Tensor, temperature: float, top_k: int, top_p: float):
    """Logits (..., V) -> probabilities (..., V), which are 0 for the tokens that are filtered out.

    top_k keeps the k most probable tokens. Of these, top_p keeps the smallest set that reaches its
    part of their probability (nucleus sampling, Holtzman et al. 2020). Of equally probable tokens
    the lowest come first. top_k 0 and top_p 1 keep all."""
    logits = logits.float()
    logits = logits - logits.amax(-1, keepdim=True)                 # at most 0: no overflow
    if top_k == 0 and top_p == 1:
        return (logits / temperature).softmax(dim=-1)
    ordered, tokens = logits.sort(descending=True, stable=True)     # the most probable first
    if top_k > 0:
        ordered[..., top_k:] = -torch.inf
    probabilities = (ordered / temperature).softmax(dim=-1)
    if top_p < 1:
        sum_before = probabilities.cumsum(-1) - probabilities       # of more probable tokens
        is_enough = sum_before >= top_p * (1 - 1e-6)                # 1e-6: in spite of rounding
        probabilities = probabilities.masked_fill(is_enough, 0)
        probabilities /= probabilities.sum(-1, keepdim=True)
    return torch.zeros_like(logits).scatter(-1, tokens, probabilities)


def draw(logits: torch.Tensor, temperature: float, top_k: int, top_p: float,
         generators) -> list[int]:
    """Logits (B, V) -> a token for each row, drawn with the row's own generator, so that a sample
    does not depend on the others. With temperature 0 it is the most probable one."""
    if temperature == 0:
        return logits.argmax(-1).tolist()
    probabilities = filter_logits(logits, temperature, top_k, top_p).cpu()
    return [torch.multinomial(row, 1, generator=generator).item()
            for row, generator in zip(probabilities, generators)]


@torch.inference_mode()
def generate(model, tokens: list[int], max_tokens: int, ends: set[int], temperature: float = 1.0,
             top_k: int = 0, top_p: float = 1.0, generators=(None,)):
    """Continue `tokens` once with each of the `generators`: B samples as one batch with one cache.
    Yields up to `max_tokens` lists, with the new token of each sample, or None after it has drawn
    one of the tokens `ends`. Raises FloatingPointError if a logit is not finite."""
    seq_len = model.cfg.seq_len
    device = next(model.parameters()).device
    B = len(generators)
    cached = CachedModel(model, B, min(seq_len, len(tokens) + max_tokens))
    window = torch.tensor([tokens[-seq_len:]], device=device)   # (1, T): the samples share a prompt
    new = window                                                # what the cache does not have yet
    has_ended = [False] * B
    for _ in range(max_tokens):
        if window.shape[1] > seq_len:
            # A full window continues with its newest half. All of its positions change, so the
            # cache begins again.
            window = window[:, -max(1, seq_len // 2):]
            new = window
            cached.clear()
        logits = cached(new)                                    # (1, V), then (B, V)
        if not logits.isfinite().all():
            raise FloatingPointError("the model's logits are not finite: give another checkpoint, "
                                     "such as an older one, or another --dtype")
        drawn = draw(logits.expand(B, -1), temperature, top_k, top_p, generators)
        has_ended = [ended or token in ends for ended, token in zip(has_ended, drawn)]
        if all(has_ended):
            return
        yield [None if ended else token for ended, token in zip(has_ended, drawn)]
        new = torch.tensor(drawn, device=device)[:, None]       # (B, 1)
        window = torch.cat([window.expand(B, -1), new], dim=1)


@errors_in_one_line("sample.py")
@memory_advice("out of memory ({}): lower --num-samples, try --device cpu, or another machine")
def main() -> None:
    flags = parse_flags(sys.argv[1:])
    device = pick_device(flags.device)
    with errors_with_path(flags.ckpt):
        model, state = load_model(Path(flags.ckpt))
    use_kernels(model)
    tokenizer = get_tokenizer(state["tokenizer"], state.get("tokenizer_file"))
    if flags.chat:
        from runtime.chat import Chat       # here: it imports what writes conversations
        session = Chat(flags, state, tokenizer, model.cfg)
    else:
        session = Samples(flags, tokenizer, model.cfg)
    model.to(device, PRECISIONS[flags.dtype].parameters)
    ends = {tokenizer.eot_token, *state.get("ends", []), *session.ends}
    for tokens, max_tokens, generators in session.prompts():
        session.write(generate(model, tokens, max_tokens, ends, flags.temperature, flags.top_k,
                               flags.top_p, generators))


if __name__ == "__main__":
    main()
