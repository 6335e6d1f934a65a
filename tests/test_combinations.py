"""Options together: what test_all.py shows one by one holds where two of them meet.

    python -m pytest tests/test_combinations.py

The rows of `harness.COVER` have every two values of ZeRO stage, tp, pp, cp, schedule,
recomputation, sequence parallelism and precision that may stand together. Some rows are trained
with --ep, too. Compared with one process, and compiled blocks with plain ones.
"""
import functools
import itertools
import math
from contextlib import suppress
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import MoEConfig
from parallelism import kernels
from parallelism.full_tensors import full_gradients
from runtime import layout_checks
from tests.harness import (BOUNDS, CFG, COLUMNS, COVER, TWO_STEPS, assert_same_rows, column,
                           deep_enough_for, differences, dp_for, on_ranks, own_processes,
                           plain_gradient, relative, run_steps, settings, trained, whole_gradient,
                           without_saves)


# ---------------------------------------------------------------------------------------------
# Every two options together
# ---------------------------------------------------------------------------------------------

def ranks_of(row):
    return dp_for(row) * row["tp"] * row["pp"] * row["cp"]


def test_the_rows_have_every_two_values_that_may_be_combined():
    """By the checks of the flags, on eight ranks at most; ZeRO where there is something to share,
    1F1B where there is a pipeline."""
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
                layout_checks.check_layout(deep_enough_for(row), ranks_of(row), 8,
                                    settings("", micro_batch=1, **row))
                allowed |= pairs(row)
    assert allowed == set.union(*map(pairs, COVER))


def run_of(row, pool, out, look, cfg, **changes):
    microbatch = 4 if row["pp_schedule"] == "gpipe" else 2      # of GPipe two, of others four
    dp = dp_for(row)
    config = settings(out, micro_batch=microbatch // dp, **row, **changes)
    return pool.run(ranks_of(row), run_steps, (dp, row["tp"], row["pp"]), config, cfg, look, None,
                    without_saves)[0]


@pytest.mark.claim("Any two of ZeRO stage, tp, pp, cp, schedule, recomputation, sequence "
                   "parallelism and precision, combined, train as one process does.")
@pytest.mark.parametrize("row, steps", [
    *((row, 2) for row in COVER),
    *(pytest.param(row, 6, marks=pytest.mark.slow) for row in COVER if row["dtype"] == "fp64")],
    ids=lambda x: "-".join(map(str, x.values())) if isinstance(x, dict) else str(x))
def test_every_combination_trains_as_one_process(pool, tmp_path, reference, row, steps):
    """In two steps losses, each parameter's gradients and norms are those of one process, and the
    first gradients those of the plain model by autograd, to the BOUNDS; so is the final state in
    fp64, also after six steps. In 16 bits the losses are those of fp64 to 0.001, also after an
    update that is large enough to show in the second one, the norms to 0.03, and the first
    gradients to 0.05, because a loss does not show what Adam's division hides."""
    dtype = row["dtype"]
    half = dtype not in BOUNDS
    cfg = deep_enough_for(row)
    changes = TWO_STEPS
    if dtype == "fp32" or steps == 6:
        changes = dict(steps=steps)
    ours = run_of(row, pool, tmp_path, whole_gradient, cfg, **changes)
    masters = torch.float64 if dtype == "fp64" else torch.float32
    assert {x.dtype for x in ours.state["master"].values()} == {masters}
    one = reference(cfg, dtype="fp64" if half else dtype, **changes)
    loss, gradient, norm = differences(ours, one)           # gradient: of all steps
    first_gradient = relative(ours.seen[0], plain_gradient(cfg))
    if half:
        assert loss <= 0.001 and norm <= 0.03 and first_gradient <= 0.05
    else:
        assert max(loss, gradient, norm, first_gradient) <= BOUNDS[dtype]
    if dtype == "fp64":
        assert relative(ours.state, one.state) <= BOUNDS[dtype]


# The rows of four ranks, and of eight one with tp beside pp, and one with cp beside four stages. In
# fp64: with other precisions rounding chooses other experts.
WITH_EP = {"-".join(map(str, row.values())): row for row in (
    row | dict(ep=2, dtype="fp64") for row in COVER
    if ranks_of(row) == 4 or row in (COVER[6], COVER[21]))}
MIXTURE = MoEConfig(257, 16, 1, 8, 32, n_kv_head=4, hidden=16, n_expert=8, n_active=3,
                    shared_hidden=24, balance_bias=0.01, balance_loss=0.1)


def test_rows_with_ep_have_every_other_value_beside_it():
    for name in set(COLUMNS) - {"dtype"}:
        assert {row[name] for row in WITH_EP.values()} == {row[name] for row in COVER}, name


@pytest.mark.slow
@pytest.mark.parametrize("row", WITH_EP)
def test_every_combination_with_ep_trains_as_one_process(pool, tmp_path, reference, row):
    """Of a mixture with a shared expert and a router's bias: losses, gradients and norms of two
    steps, and the final state."""
    row = WITH_EP[row]
    cfg = replace(MIXTURE, n_layer=deep_enough_for(row).n_layer)
    ours = run_of(row, pool, tmp_path, whole_gradient, cfg, **TWO_STEPS)
    one = reference(cfg, dtype="fp64", **TWO_STEPS)
    assert max(differences(ours, one)) <= BOUNDS["fp64"]
    assert relative(ours.state["master"], one.state["master"]) <= BOUNDS["fp64"]


@pytest.mark.slow
@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 2), dict(dtype="bf16", pp_schedule="1f1b")),
    ((2, 1, 1), dict(dtype="fp16", zero=1, recompute=True))])
def test_a_long_run_in_16_bits_has_the_losses_of_fp64(pool, tmp_path, reference, layout, flags):
    """Over 60 steps, within 0.05 nats, on two ranks."""
    cfg = replace(CFG, n_layer=2)
    changes = dict(steps=60, lr=4e-3)
    ours = trained(pool, layout, tmp_path, cfg, prepare=without_saves, **changes, **flags)
    one = reference(cfg, dtype="fp64", **changes)
    losses, expected = (np.array(column(steps, "loss")) for steps in (ours.rows, one.rows))
    assert abs(losses - expected).max() <= 0.05 and losses[-1] < losses[0] - 0.5


# ---------------------------------------------------------------------------------------------
# --compile, and 16 bits on a CPU
# ---------------------------------------------------------------------------------------------

LLAMA = LlamaConfig(257, 16, 2, 4, 32, n_kv_head=2, qk_norm=True)
PHI = LlamaConfig(257, 16, 2, 4, 32, window=5, **FAMILIES["phi"])       # and a bias of the logits


def compiled_steps(rank, world, layout, config, cfg, backend):
    """(rows of a run; after each step the number of its compiled graphs, and the gradients)"""
    def look(run):
        graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        return graphs, dict(full_gradients(run.flat))
    with mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=backend)):
        return run_steps(rank, world, layout, config, cfg, look)[:2]


@pytest.mark.claim("Compiled blocks train as uncompiled ones do, in every layout.")
@pytest.mark.parametrize("model, layout, flags, dropout, graphs, backend", [
    (LLAMA, (1, 1, 1), {}, 0.0, 5, "aot_eager"),
    pytest.param(CFG, (1, 2, 1), dict(tp=2, sequence_parallel=True, zero=3, recompute=True), 0.1,
                 13, "aot_eager", marks=pytest.mark.slow),
    pytest.param(PHI, (1, 2, 1), dict(tp=2), 0.0, 9, "aot_eager", marks=pytest.mark.slow),
    pytest.param(CFG, (1, 1, 1), dict(cp=2), 0.0, 8, "aot_eager", marks=pytest.mark.slow),
    pytest.param(LLAMA, (1, 1, 1), dict(dtype="bf16"), 0.0, 5, "inductor", marks=pytest.mark.slow),
    pytest.param(CFG, (1, 1, 2), dict(zero=2, pp=2, dtype="fp16"), 0.0, 4, "inductor",
                 marks=pytest.mark.slow)])
def test_compiled_blocks_train_as_they_are(tmp_path, model, layout, flags, dropout, graphs,
                                           backend):
    """Losses and norms are those without --compile, to 1e-5, in 16 bits to eps (fused operations
    round in other places), and the first gradients, to 1e-5 and 5%. The first step compiles the
    graphs: one that all blocks share, one each for positions and last norm, and two for the loss;
    more where masks are drawn or ranks communicate. (A compiler leaves tensors behind that are
    none, and code compiled for other instructions crashes: hence processes of its own.)"""
    config = settings(tmp_path, steps=4, **flags)
    cfg = replace(model, n_layer=2 * layout[2], dropout=dropout)
    with own_processes(TORCHINDUCTOR_CACHE_DIR=str(tmp_path)) as fresh:
        (plain, expected), (compiled, seen) = (
            fresh.run(math.prod(layout) * config.cp, compiled_steps, layout,
                      replace(config, compile=c), cfg, backend, seconds=400)[-1]
            for c in (False, True))
    assert [count for count, _ in seen[:3]] == 3 * [graphs]
    half = config.dtype in ("bf16", "fp16")
    assert_same_rows(compiled, plain, torch.finfo(torch.bfloat16).eps if half else 1e-5)
    (_, theirs), (_, ours) = expected[0], seen[0]
    assert relative(ours, theirs) <= (0.05 if half else 1e-5)


class Products(TorchDispatchMode):
    """Keeps the types of what is multiplied in the block."""
    types = frozenset()

    def __torch_dispatch__(self, function, _, args=(), kwargs=None):
        if "mm" in str(function) or "attention" in str(function):
            self.types |= {args[0].dtype}
        return function(*args, **kwargs or {})


@pytest.mark.parametrize("world, flags", [(1, dict(recompute=True)), (2, {})])
@on_ranks
def test_a_cpu_without_products_in_16_bits_multiplies_in_fp32(rank, world, tmp_path, flags):
    """Losses and norms are those of bf16 products, to 2e-3: results still have 16 bits."""
    config = settings(tmp_path, steps=2, tp=world, dtype="bf16", **flags)
    cfg = replace(CFG, n_layer=2, dropout=0.1)
    runs = []
    for missing in ([], [torch.bfloat16]):
        with mock.patch.object(kernels, "NO_PRODUCTS", missing), Products() as seen:
            runs.append((run_steps(rank, world, (1, world, 1), config, cfg)[0], seen.types))
    (native, with_16), (rows, without) = runs
    assert torch.bfloat16 in with_16 and without == {torch.float32}
    assert_same_rows(rows, native, 2e-3)
