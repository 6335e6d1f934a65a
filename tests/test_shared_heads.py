"""Tensor parallelism with fewer heads of keys and values than ranks: the numbers of one process.

    python -m pytest tests/test_shared_heads.py
"""
from dataclasses import replace

import pytest
import torch

from models.llama import FAMILIES, LlamaConfig
from models.moe import MoEConfig
from tests.harness import (BOUNDS, INTERLEAVED, TWO_STEPS, differences, different_bits,
                           plain_gradient, relative, trained, whole_gradient, without_saves)

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=5, n_head=8, n_embd=32)
CFGS = {
    "palm": LlamaConfig(**SHAPE, n_kv_head=1, head_dim=8, **FAMILIES["palm"]),
    "qwen2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["qwen2"]),
    "qwen3": LlamaConfig(**SHAPE, n_kv_head=2, head_dim=8, **FAMILIES["qwen3"]),
    # The 20 channels of k and v are no multiple of tp.
    "uneven": LlamaConfig(**SHAPE | dict(n_head=6), n_kv_head=1, head_dim=10, hidden=96),
    "olmoe": MoEConfig(**SHAPE | dict(n_layer=2), n_kv_head=2, hidden=16, n_expert=4, n_active=2,
                       norm_all_heads=True)}

# dp, tp, pp and flags. Each ZeRO stage and schedule, and all that attention has to do with.
LAYOUTS = {
    "tp 2": ((1, 2, 1), {}),
    "tp 3": ((1, 3, 1), {}),
    "tp 4": ((1, 4, 1), {}),
    "tp 4, sequence": ((1, 4, 1), dict(sequence_parallel=True)),
    "tp 4, zero 1": ((2, 4, 1), dict(zero=1)),
    "tp 2, 1f1b, zero 2": ((2, 2, 2), dict(pp_schedule="1f1b", zero=2)),
    "tp 4, zero 2": ((2, 4, 1), dict(zero=2)),
    "tp 4, zero 3, recompute": ((2, 4, 1), dict(zero=3, recompute=True)),
    "tp 4, zb-h1": ((1, 4, 2), dict(pp_schedule="zb-h1")),
    "tp 4, interleaved": ((1, 4, 2), dict(INTERLEAVED, micro_batch=1)),
    "tp 4, cp": ((1, 4, 1), dict(cp=2)),
    "tp 4, offload": ((1, 4, 1), dict(offload=True)),
    "tp 2, all": ((1, 2, 2), dict(cp=2, zero=1, sequence_parallel=True, recompute=True,
                                  pp_schedule="1f1b")),
    "tp 4, all": ((1, 4, 1), dict(cp=2, zero=3, sequence_parallel=True, recompute=True))}
DEFAULT = [("palm", "tp 2, all"), ("palm", "tp 4, zb-h1"), ("qwen3", "tp 4, all")]
SLOW = [*(("palm", layout) for layout in LAYOUTS if layout != "tp 3"),
        *((name, layout) for name in ("qwen2", "qwen3") for layout in LAYOUTS
          if layout.startswith("tp 4")),
        ("uneven", "tp 3"), ("uneven", "tp 2, all"), ("olmoe", "tp 4, sequence"),
        ("olmoe", "tp 4, all")]


@pytest.mark.claim("Tensor-parallel ranks that share a head of keys train as one process.")
@pytest.mark.parametrize("name, layout", [
    *DEFAULT, *(pytest.param(*row, marks=pytest.mark.slow) for row in SLOW if row not in DEFAULT)])
def test_ranks_that_share_a_head_train_as_one_process(pool, tmp_path, reference, name, layout):
    """Loss, every gradient and norm of two steps in fp64 are those of one process, and the first
    gradients those of the plain model by autograd: relative difference at most 1e-10."""
    shape, flags = LAYOUTS[layout]
    ours = trained(pool, shape, tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                   dtype="fp64", **TWO_STEPS, **flags)
    one = reference(CFGS[name], dtype="fp64", **TWO_STEPS)
    assert max(differences(ours, one)) <= BOUNDS["fp64"]
    assert relative(ours.seen[0], plain_gradient(CFGS[name])) <= BOUNDS["fp64"]


EXACT = {"palm": [((1, 4, 2), dict(zero=0)), ((2, 2, 1), dict(zero=3)),
                  ((1, 8, 1), dict(sequence_parallel=True))],
         "qwen3": [((2, 4, 1), dict(zero=2, recompute=True)), ((1, 2, 1), {})],
         "qwen2": [((1, 8, 1), dict(dtype="bf16")), ((1, 4, 1), dict(dtype="bf16"))],
         "olmoe": [((1, 4, 1), {}), ((1, 2, 1), {}), ((1, 8, 1), dict(sequence_parallel=True))]}


@pytest.mark.parametrize("name", [
    "palm", *(pytest.param(name, marks=pytest.mark.slow) for name in EXACT if name != "palm")])
def test_exact_layouts_that_share_heads_have_the_bits_of_one_process(pool, tmp_path, name):
    """With as many heads of keys as ranks, with fewer, and with a head on one rank."""
    def run(layout, **flags):
        return trained(pool, layout, tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                       micro_batch=2, exact=True, steps=2, **flags)
    common = {"dtype": EXACT[name][0][1].get("dtype", "fp32")}
    one = run((1, 1, 1), **common)
    for layout, flags in EXACT[name]:
        assert different_bits(run(layout, **common | flags), one) == "", (layout, flags)
