"""--tp-overlap: two halves of a microbatch in turn compute what one process does, and the sums of
one half travel behind the products of the other.

    python -m pytest tests/test_halves.py

What it cannot be combined with: tests/test_runtime.py. What a plan counts: tests/test_plan.py.
"""
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from model import mask_of_packed
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from parallelism import tensor
from parallelism.build import Grid
from parallelism.halves import compute_in_halves
from parallelism.pipeline import recompute_blocks
from tests.harness import (BOUNDS, CFG, INTERLEAVED, TWO_STEPS, differences, gradient_pairs,
                           gridded, on_ranks, plain_gradient, random_gpt, random_tensor, relative,
                           stage_of, tokens_of, trained, whole_gradient, without_saves)
from tools.plan.traffic import rings_of_block

SHAPE = dict(vocab_size=257, seq_len=16, n_layer=5, n_head=4, n_embd=32, hidden=128)
CFGS = {"gpt": CFG, "llama": LlamaConfig(**SHAPE, n_kv_head=2),     # serial
        **{name: LlamaConfig(**SHAPE, **FAMILIES[name])     # parallel, one norm, norm after
           for name in ("neox", "gptj", "olmo2")}}
SHARED = LlamaConfig(**SHAPE, n_kv_head=1)          # ranks share a head of keys and exchange it


@pytest.mark.claim("Two halves of a microbatch in turn train as one process does.")
@pytest.mark.parametrize("name, layout, flags", [
    ("gpt", (1, 2, 2), dict(pp_schedule="zb-h1", zero=1)),
    ("olmo2", (2, 2, 1), dict(zero=3, recompute=True)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ("gpt", (1, 4, 1), dict(micro_batch=8)), ("gpt", (1, 2, 2), INTERLEAVED),
        ("gpt", (1, 2, 1), dict(cp=2, recompute=True)), ("llama", (2, 2, 1), dict(zero=2)),
        ("llama", (1, 2, 2), dict(pp_schedule="1f1b", recompute=True)),
        ("llama", (1, 2, 1), dict(cp=2, micro_batch=4)), ("llama", (1, 2, 1), dict(compile=True)),
        ("neox", (1, 2, 2), {}), ("gptj", (1, 2, 1), dict(recompute=True)),
        ("olmo2", (1, 2, 2), dict(pp_schedule="zb-h1")), ("shared", (1, 2, 1), {})])])
def test_halves_train_as_one_process(pool, tmp_path, reference, name, layout, flags):
    """Loss, gradient and norm of two steps in fp64 are those of one process without halves, and the
    first gradients those of the plain model by autograd: relative difference at most 1e-10."""
    cfg = CFGS.get(name, SHARED)
    ours = trained(pool, layout, tmp_path, cfg, whole_gradient, prepare=without_saves,
                   dtype="fp64", tp_overlap=True, **TWO_STEPS, **flags)
    assert max(differences(ours, reference(cfg, dtype="fp64", **TWO_STEPS))) <= BOUNDS["fp64"]
    assert relative(ours.seen[0], plain_gradient(cfg)) <= BOUNDS["fp64"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_halves_train_in_16_bits(pool, tmp_path, reference, dtype):
    """Losses, gradients and norms of two steps are those of fp64, to 0.001, 0.05 and 0.01."""
    ours = trained(pool, (2, 2, 1), tmp_path, CFG, whole_gradient, prepare=without_saves,
                   dtype=dtype, tp_overlap=True, steps=2, zero=3)
    loss, gradient, norm = differences(ours, reference(CFG, dtype="fp64", steps=2))
    assert loss <= 0.001 and gradient <= 0.05 and norm <= 0.01


@on_ranks
def test_a_mask_is_cut_with_its_rows(rank, world=2):
    """Loss and gradients of three rows of packed texts, which halves divide unequally, are those of
    the plain model."""
    cfg = replace(CFG, n_layer=2)
    plain = random_gpt(cfg)
    tokens, targets = tokens_of(cfg, 3), tokens_of(cfg, 3, seed=1)
    positions = torch.stack([torch.arange(16) % length for length in (16, 5, 9)])
    assert mask_of_packed(positions).sum(dim=(1, 2, 3)).unique().numel() == 3
    with gridded(rank, world, tp=world, pp=1) as grid:
        local, flat = stage_of(plain, grid)
        compute_in_halves(local)
        losses = [gpt(tokens, targets, positions=positions) for gpt in (local, plain)]
        flat.prepare_grad_sync(local, True)
        sum(losses).backward()
        flat.finish_grad_sync()
        pairs = gradient_pairs(flat, plain)
    assert relative(*losses) <= 1e-10
    for name, pair in pairs.items():
        assert relative(*pair) <= 1e-10, name


class Events(list):
    """What a model of this grid does, in its order: "product", ("starts", n), ("ends", n)."""

    def __init__(self, monkeypatch):
        super().__init__()
        monkeypatch.setattr(tensor, "sum_over_ranks", self.start)
        monkeypatch.setattr(tensor, "linear", self.product)
        self.started = 0

    def start(self, x, grid):
        work = Sum(self, self.started, x)
        self.append(("starts", self.started))
        self.started += 1
        return work

    def product(self, x, weight, bias=None):
        self.append("product")
        return torch.nn.functional.linear(x, weight, bias)

    def hides(self, n):
        """Whether products stand between start and end of sum n."""
        return "product" in self[self.index(("starts", n)):self.index(("ends", n))]


class Sum:
    """A sum under way. It writes when it is awaited: who reads or frees x before reads zeros."""

    def __init__(self, events, number, x):
        self.events, self.number, self.x, self.value = events, number, x, x.clone()
        x.zero_()

    def wait(self):
        self.events.append(("ends", self.number))
        return self.x.copy_(self.value)


@pytest.mark.claim("With --tp-overlap three of four half sums in a block's forward travel behind "
                   "products.")
@pytest.mark.parametrize("name", CFGS)
@pytest.mark.parametrize("recompute", [False, True])
def test_sums_of_one_half_travel_behind_products_of_the_other(monkeypatch, name, recompute):
    """Mechanism: of a block's four sums all but the last, and without halves none. No sum is left
    under way, where recomputation ends early, either. The result does not depend on the order. A
    plan counts as many sums."""
    plain = random_gpt(replace(CFGS[name], n_layer=1))
    x, dy = random_tensor(2, 16, 32, seed=0), random_tensor(2, 16, 32, seed=1)
    results = []
    for in_halves in (False, True):
        local, _ = stage_of(plain, Grid(1, 1, tp=2))
        block = local.blocks["0"]
        if in_halves:
            compute_in_halves(local)
        if recompute:
            recompute_blocks(local)
        events = Events(monkeypatch)
        leaf = x.clone().requires_grad_()
        y = block(leaf)
        hidden = [events.hides(n) for n in range(events.started)]
        assert hidden == ([True, True, True, False] if in_halves else [False, False])
        y.backward(dy)
        ends = [event for event in events if event[0] == "ends"]
        assert sorted(ends) == [("ends", n) for n in range(events.started)]
        if name != "olmo2":             # (whose last norm needs the last sum again)
            flags = SimpleNamespace(recompute=recompute, sequence_parallel=False,
                                    parts_in_turn=1 + in_halves)
            assert rings_of_block(flags) == events.started * 2 / (1 + in_halves)
        results.append((y.detach(), leaf.grad))
    assert relative(results[1], results[0]) <= 1e-10
