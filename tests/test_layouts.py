"""Every model in every layout trains as one process does, alone and with other options.

A row is (model, flags, layout): its run is compared with that of one process, and its first
gradients with those of the plain model by autograd. The rows of `harness.COVER` have every two
values of the options that may stand together; `drawn` draws others."""
import functools
import itertools
import math
import random
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import pytest
import torch

from base.options import Config
from model import GPTConfig
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import FAMILIES as MIXTURES
from models.moe import MoEConfig
from parallel import Grid
from parallelism import kernels
from runtime import checks
from runtime.full_tensors import full_gradients
from tests.harness import (BOUNDS, CFG, COLUMNS, COVER, INTERLEAVED, TWO_STEPS, Memory,
                           assert_close, assert_same_rows, by_step, deep_enough_for,
                           differences, different_bits, dp_for, on_ranks, own_processes,
                           plain_gradient, relative, run_steps, settings, staged, trained,
                           whole_gradient, without_saves)

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=2, n_head=8, n_embd=32)
WIDE = SHAPE | dict(n_head=4, hidden=128)
MIXTURE = SHAPE | dict(hidden=16, n_kv_head=4, balance_loss=0.1)
MODELS = {
    "gpt": GPTConfig(**SHAPE),
    "llama": LlamaConfig(**SHAPE, n_kv_head=4),
    "llama, tied": LlamaConfig(**SHAPE, n_kv_head=2, tied=True),
    "qwen2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["qwen2"]),
    "qwen3": LlamaConfig(**SHAPE, n_kv_head=2, head_dim=8, **FAMILIES["qwen3"]),
    "olmo": LlamaConfig(**SHAPE, **FAMILIES["olmo"]),
    "neox": LlamaConfig(**WIDE, **FAMILIES["neox"]),
    "palm": LlamaConfig(**SHAPE, n_kv_head=1, head_dim=8, **FAMILIES["palm"]),
    "window": LlamaConfig(**SHAPE, n_kv_head=2, window=5),
    "olmo2": LlamaConfig(**SHAPE, n_kv_head=2, **FAMILIES["olmo2"]),
    "phi": LlamaConfig(**WIDE, window=5, **FAMILIES["phi"]),
    "gptj": LlamaConfig(**WIDE, **FAMILIES["gptj"]),
    "galactica": LlamaConfig(**SHAPE, hidden=128, **FAMILIES["galactica"]),
    # tp 3 divides neither the 20 channels of k and v, nor the 256 rows of tokens.
    "uneven": LlamaConfig(**SHAPE | dict(vocab_size=129, n_head=6), n_kv_head=1, head_dim=10,
                          hidden=96),
    "mixtral": MoEConfig(**MIXTURES["mixtral"] | MIXTURE),
    "shared, bias": MoEConfig(**MIXTURES["mixtral"] | MIXTURE | dict(
        balance_bias=0.01, shared_hidden=24, n_active=3, z_loss=0.01)),
    "olmoe": MoEConfig(**MIXTURES["olmoe"] | MIXTURE | dict(n_expert=8, n_active=3)),
    "qwen3-moe": MoEConfig(**MIXTURES["qwen3-moe"] | MIXTURE | dict(n_expert=8, n_active=3)),
    # Experts, and ranks, without a token.
    "few tokens": MoEConfig(**MIXTURES["mixtral"] | MIXTURE | dict(
        n_expert=64, n_active=1, normalised=False))}


@functools.cache
def gradient_of_plain(cfg):
    """harness.plain_gradient. Of a router's bias it is E counts less their sum."""
    gradients = dict(plain_gradient(cfg))
    if getattr(cfg, "balance_bias", 0) > 0:
        plain = cfg.build().initialize(Config.seed).double()
        dataset = Memory(cfg)
        tokens = torch.from_numpy(dataset.read(dataset.window_ids(Config.seed, 0, 8))[0])
        plain(tokens[:, :-1])
        loads = torch.stack([block.mlp.router.load.sum(0) for block in plain.blocks.values()])
        for layer, excess in enumerate(cfg.n_expert * loads - loads.sum(1, keepdim=True)):
            gradients[f"blocks.{layer}.mlp.router.bias"] = excess
    return gradients


def assert_as_one_process(ours, one, cfg, dtype):
    """Losses, every gradient and norm of all steps, the norm of the activations, what the routers
    did, the first gradients beside autograd, and in fp64 the final state."""
    loss, gradient, norm = differences(ours, one)
    first = relative(ours.seen[0], gradient_of_plain(cfg))
    if dtype not in BOUNDS:             # of mixtures rounding chooses other experts
        assert loss <= 0.001 and norm <= 0.03, f"(loss, norm) differ by {loss, norm}"
        assert first <= 0.05 or isinstance(cfg, MoEConfig), f"a gradient differs by {first}"
        return
    found = loss, gradient, norm, first
    assert max(found) <= BOUNDS[dtype], (
        f"(loss, gradient, norm, first gradient by autograd) differ by {found}")
    for name in one.rows[-1].keys() & {"activation_norm", "router_loss", "dead_experts", "load/0"}:
        pair = [by_step([row for row in run.rows if name in row], name) for run in (ours, one)]
        assert_close({name: pair}, BOUNDS[dtype])
    if dtype == "fp64":
        assert_close({"a weight": (ours.state["master"], one.state["master"])}, BOUNDS[dtype])


# ---- GPTs: every two options together

def ranks_of(row):
    return dp_for(row) * row["tp"] * row["pp"] * row["cp"]


def test_the_rows_have_every_two_values_that_may_be_combined():
    """By the checks of the flags, on eight ranks at most."""
    def pairs(row):
        return set(itertools.combinations([(name, row[name]) for name in COLUMNS], 2))
    allowed = set()
    for values in itertools.product(*({row[name] for row in COVER} for name in COLUMNS)):
        row = dict(zip(COLUMNS, values))
        row["pp_chunks"] = 2 if row["pp_schedule"] == "interleaved" else 1
        replicas = dp_for(row) * row["cp"]
        shares = replicas > 1 or (replicas == 1 and row["zero"] == 0)
        if shares and (row["pp"] > 1 or row["pp_schedule"] != "1f1b"):
            with suppress(ValueError):
                checks.check_layout(deep_enough_for(row), ranks_of(row), 8,
                                           settings("", micro_batch=1, **row))
                allowed |= pairs(row)
    assert allowed == set.union(*map(pairs, COVER))


@pytest.mark.claim("Any two of ZeRO stage, tp, pp, cp, schedule, recomputation, sequence "
                   "parallelism and precision, combined, train as one process does.")
@pytest.mark.parametrize("row", [
    row if row["dtype"] == "fp64" or row["zero"] == 3 else pytest.param(row, marks=pytest.mark.slow)
    for row in COVER], ids=lambda row: "-".join(map(str, row.values())))
def test_every_combination_trains_as_one_process(pool, tmp_path, reference, row):
    dtype, cfg, dp = row["dtype"], deep_enough_for(row), dp_for(row)
    flags = dict(steps=2) if dtype == "fp32" else TWO_STEPS
    microbatch = 4 if row["pp_schedule"] == "gpipe" else 2      # of GPipe two, of others four
    ours = trained(pool, (dp, row["tp"], row["pp"]), tmp_path, cfg, whole_gradient,
                   prepare=without_saves, micro_batch=microbatch // dp, **flags, **{
                       name: x for name, x in row.items() if name not in ("tp", "pp")})
    one = reference(cfg, dtype=dtype if dtype in BOUNDS else "fp64", **flags)
    masters = torch.float64 if dtype == "fp64" else torch.float32
    assert {x.dtype for x in ours.state["master"].values()} == {masters}
    assert_as_one_process(ours, one, cfg, dtype)


# ---- The other models, and layouts that are drawn

ROWS = [        # what a model has of its own under the layouts that cut it; (dp, tp, pp), flags
    ("llama", (2, 1, 2), dict(pp_schedule="1f1b", zero=2)),
    ("llama", (1, 2, 1), dict(sequence_parallel=True)),
    ("qwen3", (1, 2, 2), dict(pp_schedule="1f1b")),
    ("gptj", (1, 2, 1), dict(sequence_parallel=True)),
    ("window", (1, 1, 1), dict(cp=2)),
    ("olmo2", (2, 2, 1), dict(zero=3, recompute=True)),
    # Ranks that share a head of keys.
    ("palm", (1, 2, 2), dict(cp=2, zero=1, sequence_parallel=True, recompute=True,
                             pp_schedule="1f1b")),
    ("qwen3", (1, 4, 1), dict(sequence_parallel=True)),
    ("uneven", (1, 3, 1), {}),
    # Mixtures, whose experts are divided over replicas, too.
    ("few tokens", (2, 2, 1), dict(ep=2)),
    ("shared, bias", (1, 1, 2), dict(pp_schedule="1f1b")),
    ("shared, bias", (4, 1, 1), dict(ep=2, zero=3, recompute=True)),
    ("olmoe", (1, 2, 1), dict(sequence_parallel=True)),
    # Models that are not GPTs, in 16 bits.
    ("qwen3", (2, 2, 1), dict(dtype="fp16", zero=3)),
    ("shared, bias", (2, 1, 1), dict(dtype="bf16", ep=2, zero=1))]


def run_row(pool, out, reference, name, layout, flags, **common):
    flags = TWO_STEPS | dict(micro_batch=4 // layout[0]) | common | flags
    cfg = replace(MODELS[name], n_layer=layout[2] * flags.get("pp_chunks", 1) + 1)
    same = {key: flags[key] for key in ("dtype", "exact", "batch_size") if key in flags}
    if "exact" not in flags and same["dtype"] not in BOUNDS:
        same["dtype"] = "fp64"
    if "exact" in flags:
        same["micro_batch"] = flags["micro_batch"]
    ours = trained(pool, layout, out, cfg, whole_gradient, prepare=without_saves, **flags)
    return ours, reference(cfg, **TWO_STEPS, **same), cfg


@pytest.mark.claim("Llamas, their relatives and mixtures of experts train in every layout as in "
                   "one process.")
@pytest.mark.parametrize("name, layout, flags", ROWS)
def test_models_train_in_every_layout_as_in_one_process(pool, tmp_path, reference, name, layout,
                                                        flags):
    ours, one, cfg = run_row(pool, tmp_path, reference, name, layout, dict(dtype="fp64") | flags)
    assert_as_one_process(ours, one, cfg, flags.get("dtype", "fp64"))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_router_computes_with_its_fp32_masters(dtype):
    """Many small steps of its bias are not rounded."""
    local, _ = staged(MODELS["shared, bias"], Grid(1, 1, 1), dtype)
    block = local.blocks["0"]
    assert (block.norm1.weight.dtype, block.mlp.router.weight.dtype) == (dtype, torch.float32)


def drawn(seed, names=tuple(MODELS), most=8, **fixed):
    """(a model's name, a layout of at most `most` ranks, flags) that train.py does not refuse."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(names)
        dp, tp, pp, cp = (rng.choice(x) for x in ([1, 2, 4], [1, 2, 4], [1, 1, 2], [1, 1, 2]))
        schedule = rng.choice([dict(pp_schedule="gpipe"), dict(pp_schedule="1f1b"), INTERLEAVED])
        flags = dict(cp=cp, zero=rng.randrange(4), recompute=rng.random() < 0.5,
                     sequence_parallel=rng.random() < 0.5, ep=rng.choice([1, 2, 4]),
                     micro_batch=rng.choice([1, 2, 4]), offload=rng.random() < 0.2)
        flags |= (schedule if pp > 1 else {}) | fixed
        cp = flags["cp"]                    # it may be fixed
        cfg = replace(MODELS[name], n_layer=pp * flags.get("pp_chunks", 1) + 1)
        world = dp * tp * pp * cp
        with suppress(ValueError):
            checks.check_layout(cfg, world, 8, settings("", tp=tp, pp=pp, **flags))
            if 1 < world <= most and (flags["zero"] == 0 or dp * cp > 1):
                return name, (dp, tp, pp), flags


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_random_models_in_random_layouts_train_as_one_process(pool, tmp_path, reference, seed):
    name, layout, flags = drawn(seed)
    ours, one, cfg = run_row(pool, tmp_path, reference, name, layout, flags, dtype="fp64")
    assert_as_one_process(ours, one, cfg, "fp64")


EXACT = [
    ("palm", (2, 2, 1), dict(zero=3)),
    ("shared, bias", (2, 2, 1), dict(ep=2, zero=2, sequence_parallel=True)),
    ("olmo2", (1, 8, 1), {}),           # each rank has one strip of heads
    *(pytest.param(row, marks=pytest.mark.slow) for row in [
        ("qwen3", (1, 2, 2), dict(zero=0, pp_schedule="1f1b")),
        ("olmoe", (1, 2, 1), dict(sequence_parallel=True)), *range(1, 5)])]


@pytest.mark.claim("With `--exact` Llamas and mixtures have the bits of one process in every "
                   "layout.")
@pytest.mark.parametrize("row", EXACT, ids=str)
def test_exact_models_have_the_bits_of_one_process(pool, tmp_path, reference, row):
    """Rows and final state of two steps, in half of the drawn layouts in 16 bits."""
    small = dict(exact=True, batch_size=4, micro_batch=1)
    if isinstance(row, int):
        row = drawn(row, cp=1, **small, dtype=("fp32", "bf16", "fp64", "fp16")[row % 4])
    ours, one, _ = run_row(pool, tmp_path, reference, *row, **small)
    assert different_bits(ours, one) == ""


# ---- --compile, and 16 bits on a CPU

def compiled_steps(rank, world, layout, config, cfg, backend):
    """(rows of a run; after each step the number of its compiled graphs, and the gradients)"""
    def look(run):
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, dict(full_gradients(run.flat))
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        return run_steps(rank, world, layout, config, cfg, look)[:2]


@pytest.mark.claim("Compiled blocks train as uncompiled ones do, in every layout.")
@pytest.mark.parametrize("model, layout, flags, dropout, graphs, backend", [
    ("qwen3", (1, 1, 1), {}, 0.0, 5, "aot_eager"),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ("gpt", (1, 2, 1), dict(tp=2, sequence_parallel=True, zero=3, recompute=True), 0.1, 13,
         "aot_eager"),
        ("qwen3-moe", (2, 1, 1), dict(ep=2, recompute=True), 0.0, None, "aot_eager"),
        ("qwen3", (1, 1, 1), dict(dtype="bf16"), 0.0, 5, "inductor")])])
def test_compiled_blocks_train_as_they_are(tmp_path, model, layout, flags, dropout, graphs,
                                           backend):
    """Losses and norms to 1e-5, in 16 bits to eps, and the first gradients."""
    config = settings(tmp_path, steps=4, **flags)
    cfg = replace(MODELS[model], dropout=dropout)
    with own_processes(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as fresh:
        (plain, expected), (compiled, seen) = (
            fresh.run(math.prod(layout), compiled_steps, layout, replace(config, compile=c), cfg,
                      backend, seconds=400)[0] for c in (False, True))
    assert graphs is None or [count for count, _ in seen[:3]] == 3 * [graphs]
    half = config.dtype == "bf16"
    assert_same_rows(compiled, plain, torch.finfo(torch.bfloat16).eps if half else 1e-5)
    (_, theirs), (_, ours) = expected[0], seen[0]
    assert relative(ours, theirs) <= (0.05 if half else 1e-5)


@on_ranks
def test_a_cpu_without_products_in_16_bits_multiplies_in_fp32(rank, world=2, *, tmp_path):
    """Losses and norms are those of bf16 products, to 2e-3: results still have 16 bits."""
    config = settings(tmp_path, steps=2, tp=world, dtype="bf16", recompute=True)
    cfg = replace(CFG, n_layer=1, dropout=0.1)
    runs = []
    for missing in ([], [torch.bfloat16]):
        with mock.patch.object(kernels, "NO_PRODUCTS", missing):
            runs.append(run_steps(rank, world, (1, world, 1), config, cfg).rows)
    native, rows = runs
    assert rows != native
    assert_same_rows(rows, native, 2e-3)
