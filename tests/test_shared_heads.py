"""Tensor parallelism with fewer heads of keys and values than ranks: the numbers of one process.

    python -m pytest tests/test_shared_heads.py
"""
import pytest

from base.checkpoint_files import step_file
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import MoEConfig
from tests.harness import (BOUNDS, INTERLEAVED, TWO_STEPS, assert_same_rows, different_bits,
                           differences, plain_gradient, relative, trained, whole_gradient,
                           without_saves)

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=4, n_head=8, n_embd=32)
CFGS = {
    "palm": LlamaConfig(**SHAPE, n_kv_head=1, head_dim=8, **FAMILIES["palm"]),
    "qwen2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["qwen2"]),
    "qwen3": LlamaConfig(**SHAPE, n_kv_head=2, head_dim=8, **FAMILIES["qwen3"]),
    # tp 3 divides neither the 20 channels of k and v, nor the 256 rows of tokens, of which the last
    # rank has none: PaLM 540B has tp 12, 512 channels and 256,000 tokens.
    "uneven": LlamaConfig(**SHAPE | dict(vocab_size=129, n_head=6), n_kv_head=1, head_dim=10,
                          hidden=96),
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
DEFAULT = [("palm", "tp 2, all"), ("qwen3", "tp 4, sequence"), ("uneven", "tp 3")]
SLOW = [*(("palm", layout) for layout in LAYOUTS if layout != "tp 3"),
        *((name, layout) for name in ("qwen2", "qwen3") for layout in LAYOUTS
          if layout.startswith("tp 4")),
        ("uneven", "tp 2, all"), ("olmoe", "tp 4, sequence"),
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


@pytest.mark.parametrize("name, layout, flags", [
    ("palm", (2, 2, 1), dict(dtype="fp16", zero=3)),
    pytest.param("qwen3", (1, 4, 2), dict(dtype="bf16", sequence_parallel=True),
                 marks=pytest.mark.slow)])
def test_16_bits_train_within_their_bound(pool, tmp_path, reference, name, layout, flags):
    """Losses, gradients and norms of two steps are those of fp64: in fp16 to 0.001, 0.05 and 0.01,
    in bf16, which has three bits less, to eight times that."""
    factor = 8 if flags["dtype"] == "bf16" else 1
    ours = trained(pool, layout, tmp_path, CFGS[name], whole_gradient, prepare=without_saves,
                   steps=2, **flags)
    loss, gradient, norm = differences(ours, reference(CFGS[name], dtype="fp64", steps=2))
    assert loss <= 0.001 * factor and gradient <= 0.05 * factor and norm <= 0.01 * factor


@pytest.mark.parametrize("file_format", ["file", pytest.param("folder", marks=pytest.mark.slow)])
def test_a_run_goes_on_in_layouts_that_share_a_head_in_another_way(pool, tmp_path, reference,
                                                                   file_format):
    """A single head of keys on four ranks, after step 1 on one, after step 2 on two of each of two
    stages: the rows of one process in fp64, to 1e-10."""
    cfg, flags = CFGS["palm"], dict(dtype="fp64", steps=3, lr=1e-2, warmup_steps=1)
    rows, begin = [], None
    for step, layout in [(1, (1, 4, 1)), (2, (1, 1, 1)), (3, (1, 2, 2))]:
        out = tmp_path / str(step)
        part = trained(pool, layout, out, cfg, state=begin, save_every=1, keep=9,
                       checkpoint_format=file_format, **flags)
        rows += [row for row in part.rows if row["step"] == step]
        begin = step_file(out, step, file_format)
    one = reference(cfg, **flags)
    assert_same_rows(rows, one.rows, BOUNDS["fp64"])


EXACT = {"palm": [((2, 2, 1), dict(zero=3)), ((1, 4, 1), dict(sequence_parallel=True))],
         "uneven": [((1, 2, 2), {}), ((1, 2, 1), dict(offload=True))],
         "qwen3": [((2, 4, 1), dict(zero=2, recompute=True)), ((1, 2, 1), {}), ((1, 8, 1), {})],
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
