"""--exact: sums that do not depend on their order, terms out of range, and random pairs of layouts.

test_all.py shows that layouts have the same bits."""
import functools
from dataclasses import replace
from fractions import Fraction
from unittest import mock

import pytest
import torch
import torch.nn as nn

from model import GPTConfig
from parallelism import kernels
from parallelism.exact import ExactLookup
from parallelism.exact_sums import ExactSums, plain_exact_sum
from runtime import checks
from tests.harness import (after_backward, column, differences, different_bits, plain_gradient,
                           relative, run_steps, settings, trained, watched, whole_gradient)
from tests.test_layouts import MODELS


# ---- The arithmetic

@pytest.mark.parametrize("unit", [2.0 ** -42, 2.0 ** -10])
def test_an_exact_sum_is_the_same_in_every_order(unit):
    """200 terms in 20 orders, one by one, in parts or by rows, have the sum of Python's integers.
    Added as they are, in float64, they have several sums."""
    generator = torch.Generator().manual_seed(0)
    exponents = torch.randint(-60, 6, (200,), generator=generator)
    terms = torch.ldexp(torch.randn(200, generator=generator), exponents)
    expected = plain_exact_sum([Fraction(term) for term in terms.tolist()], Fraction(unit))
    sums = ExactSums(1, 1, torch.device("cpu"))
    plain, found = set(), set()
    for seed in range(20):
        order = torch.randperm(200, generator=torch.Generator().manual_seed(seed))
        plain.add(sum(terms[order].double().tolist()))
        parts = terms[order].split(1 + seed % 7)            # each on a rank of its own
        totals = torch.zeros(len(parts), 1, dtype=torch.float64)
        for total, part in zip(totals, parts):
            for term in part:
                sums.add(total, term.view(1), unit, 200)
        rows = torch.zeros(1, dtype=torch.float64)
        sums.add_rows(rows, terms[order].view(-1, 1), unit)
        found |= {totals.sum().item(), rows.item()}
    assert found == {float(expected)} and len(plain) > 1
    assert abs(expected - sum(map(Fraction, terms.tolist()))) <= 100 * Fraction(unit)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a_term_above_its_share_of_the_sum_is_noticed(dtype):
    """So many terms may reach 2^52 units together, half of the largest sum."""
    for value, unit, terms, inside in [
            (2.0 ** 9, 2.0 ** -32, 2 ** 10, True), (2.0 ** 10, 2.0 ** -32, 2 ** 10, False),
            (-2.0 ** 10, 2.0 ** -32, 2 ** 10, False), (2.0 ** 10, 2.0 ** -31, 2 ** 10, True),
            (torch.nan, 1.0, 1, False), (torch.inf, 1.0, 1, False), (0.0, 1.0, 1, True)]:
        sums = ExactSums(1, 1, torch.device("cpu"))
        total = torch.zeros(2, dtype=torch.float64)
        sums.add(total, torch.tensor([1.0, value], dtype=dtype), unit, terms)
        sums.add(total, torch.ones(2, dtype=dtype), 1.0, 1)
        assert sums.checked(torch.tensor(5.0)) == (5.0 if inside else torch.inf), (value, unit)
        sums.set_units(1.0, 1)
        assert sums.checked(torch.tensor(5.0)) == 5.0


def test_units_follow_the_loss_scale_and_the_number_of_targets():
    """As the table in exact_sums.py says: 64 tokens of which 24 are learnt, and a scale of 2^10."""
    sums = ExactSums(1, 1, torch.device("cpu"))
    sums.set_units(2.0 ** 10, 64, 24)
    assert sums.activation_gradient == 2.0 ** (-36 + 5)         # 2^10 / 24 is between 2^5 and 2^6
    assert (sums.gradient, sums.embedding_gradient) == (2.0 ** -30, 2.0 ** -26)


def look_up(sums, share):
    """The first row, for one of 64 tokens that may all be the same one."""
    weight = nn.Parameter(torch.zeros(3, 1))
    weight.main_grad = lambda: torch.zeros(3, 1, dtype=torch.float64)
    row = ExactLookup.apply(torch.zeros(1, 1, dtype=torch.int64), weight, sums)
    (row * share * 2 ** 52 / 64 * sums.embedding_gradient).sum().backward()


def add_one_of_four_rows(sums, share):
    """Four of 64 tokens are 256 terms, as with four strips on other ranks."""
    row = torch.full((1, 1), share * 2 ** 52 / 256 * sums.gradient)
    sums.add_rows(torch.zeros(1, dtype=torch.float64), row, sums.gradient, rows=4)


@pytest.mark.parametrize("add", [look_up, add_one_of_four_rows])
def test_a_row_has_its_share_of_the_2_to_the_52_units_of_a_sum(add):
    for share, checked in [(0.9, 5.0), (1.1, torch.inf)]:
        sums = ExactSums(1, 1, torch.device("cpu"))
        sums.set_units(1.0, 64)
        add(sums, share)
        assert sums.checked(torch.tensor(5.0)) == checked


# ---- Runs

NARROW = GPTConfig(vocab_size=257, seq_len=17, n_layer=3, n_head=8, n_embd=40)      # heads of 5
UNITS = ("activation_gradient", "gradient", "embedding_gradient", "ACTIVATION", "SOFTMAX", "LOSS",
         "NORM")


@pytest.mark.parametrize("unrounded", [None, *UNITS])
def test_every_sum_of_a_step_is_a_whole_number_of_units(tmp_path, unrounded):
    """After each addition the total is; and so are the gradients that replicas would add. If the
    terms of one kind are not rounded, this test sees it."""
    not_whole = []

    def check(total, unit):
        if not torch.equal((total / unit).round() * unit, total):
            not_whole.append(unit)

    def in_units(self, x, unit, terms):
        if unrounded is not None and unit == getattr(self, unrounded):
            return x.to(torch.promote_types(x.dtype, torch.float32)) / unit
        return round_to_units(self, x, unit, terms)

    def checked(method):
        def add(self, total, x, unit, *more):
            method(self, total, x, unit, *more)
            check(total, unit)
        return add

    def prepare(run):
        def check_gradients(step):
            for bucket in run.flat.buckets:
                check(bucket.grad, run.grid.exact.gradient)
        run.model.head.norm.weight.data *= 200      # some strips' exp(logit - largest) are tiny
        after_backward(run, check_gradients)

    round_to_units = ExactSums.in_units
    with mock.patch.multiple(ExactSums, in_units=in_units, add=checked(ExactSums.add),
                             add_rows=checked(ExactSums.add_rows)):
        watched(settings(tmp_path, steps=2, exact=True), prepare, cfg=replace(NARROW, n_layer=1))
    assert bool(not_whole) == (unrounded is not None)


def test_an_exact_run_goes_on_in_another_layout_bit_for_bit(pool, tmp_path):
    """Two steps on dp 4, two on tp 2 x pp 2 with ZeRO 1 and two in one process end where six steps
    in one process do. The learning rate is constant, because its decay would depend on --steps."""
    cfg = replace(NARROW, n_layer=2)
    flags = dict(exact=True, batch_size=4, micro_batch=1, warmup_steps=1, min_lr_ratio=1.0)
    straight = trained(pool, (1, 1, 1), tmp_path / "straight", cfg, steps=6, **flags)
    state = None
    for steps, layout, zero in [(2, (4, 1, 1), 0), (4, (1, 2, 2), 1), (6, (1, 1, 1), 0)]:
        out = tmp_path / f"{steps}"
        end = trained(pool, layout, out, cfg, state=state, steps=steps, zero=zero, **flags)
        state = out / f"step_{steps:08d}.pt"
    assert different_bits(end, straight._replace(rows=straight.rows[4:])) == ""


def test_a_term_out_of_range_skips_the_step_on_every_rank(pool, tmp_path):
    """In step 2 replica 1 has a gradient, activation or norm that is too large to add exactly."""
    runs = []
    for change in CHANGES:
        run = trained(pool, (2, 1, 1), tmp_path, replace(NARROW, n_layer=2), steps=3, exact=True,
                      prepare=functools.partial(on_replica_1, change=change))
        assert column(run.rows, "skipped") == [0, 1, 0]
        runs.append(run._replace(rows=[]))
    assert {different_bits(runs[0], other) for other in runs[1:]} == {""}


def test_a_norm_out_of_range_is_reported_and_leaves_the_loss_scale(tmp_path):
    """It is no overflow: a smaller scale would not help. A CPU computes an exact run in one thread:
    the number of threads chooses the kernels of products, and cuts elementwise ones."""
    def enlarge(run):
        def spoil(step):
            if step == 2:
                for bucket in run.flat.buckets:
                    bucket.shard["grad"][:] = 100 * run.progress.scaler.scale    # each is in range
        after_backward(run, spoil)
    config = settings(tmp_path, steps=4, exact=True, dtype="fp16", log_every=1)
    with mock.patch.object(torch, "set_num_threads") as set_threads:
        seen = watched(config, enlarge, cfg=NARROW)
    assert set_threads.mock_calls == [mock.call(1)]
    assert column(seen.rows, "skipped") == [0, 1, 0, 0]
    assert len(set(column(seen.rows, "loss_scale"))) == 1
    assert [event["reason"] for event in seen.events if event["event"] == "skip"] == [
        "too large for an exact sum (--exact)"]


def on_replica_1(run, change):
    def spoil(x):
        return CHANGES[change](x) if run.step == 2 else x
    if run.grid.dp_rank == 1:
        mlp = run.model.blocks["1"].mlp
        if change == "activations":
            mlp.register_forward_hook(lambda mlp, args, y: spoil(y))
        else:
            mlp.up.weight.register_hook(spoil)


CHANGES = dict(
    infinite_gradients=lambda grad: grad * torch.inf,
    large_gradients=lambda grad: grad * 2.0 ** 40,
    # Each of the 6,400 numbers is in range, their norm of 8,000 is not.
    large_norm=lambda grad: torch.full_like(grad, 100.0),
    # The next LayerNorm's input is large, and its output as large as ever.
    activations=lambda y: y * 2.0 ** 40)


@pytest.mark.parametrize("cfg", [NARROW, MODELS["olmoe"]], ids=["gpt", "mixture"])
def test_exact_sums_are_precise(pool, tmp_path, reference, cfg):
    """In fp64 the rows of an exact run, and each parameter's gradient, are those of a run without
    --exact; the first gradient is autograd's, to its units, which are 1e-8 of it."""
    flags = dict(dtype="fp64", steps=3)
    ours = trained(pool, (1, 1, 1), tmp_path, cfg, whole_gradient, exact=True, **flags)
    assert max(differences(ours, reference(cfg, **flags))) < 1e-6
    exact, plain = (torch.cat([gradient[name].double().flatten() for name in sorted(gradient)])
                    for gradient in (ours.seen[0], plain_gradient(cfg)))
    assert 1e-9 < relative(exact, plain) < 2e-8


def on_a_cpu_without_products(rank, world, *args):
    with mock.patch.object(kernels, "NO_PRODUCTS", [torch.bfloat16]):
        return run_steps(rank, world, *args)


def test_exact_runs_refuse_offload_on_a_gpu(tmp_path, shards):
    given = dict(data=str(shards), out=str(tmp_path), seq_len=16, exact=True, offload=True)
    assert checks.validate(given, None, 1, "cpu")[0].micro_batch == 2       # of 8 replicas
    with pytest.raises(ValueError, match="--offload on a GPU"):
        checks.validate(given, None, 1, "cuda")


def test_each_strip_repeats_attention_with_its_own_mask(pool, tmp_path):
    """A CPU without 16-bit products computes attention again in backward: under the mask of the
    forward, not under that of the last strip, which is another head on one rank than on two."""
    cfg = GPTConfig(257, 16, 1, 4, 32, dropout=0.3)
    one, other = (
        pool.run(tp, on_a_cpu_without_products, (1, tp, 1),
                 settings(tmp_path, steps=2, exact=True, dtype="bf16", tp=tp), cfg)[0]
        for tp in (1, 2))
    assert different_bits(other, one) == ""
