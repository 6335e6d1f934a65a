"""Mixed precision: the scale's floor, and sums and updates that 16 bits would lose.

The loss scale beside torch's GradScaler: test_all.py."""
from dataclasses import replace

import pytest
import torch
import torch.nn as nn

import amp
import model
from model import GPTConfig
from parallel import Grid, reduce_scatter
from parallelism import kernels
from tests.harness import CFG, assert_close, gridded, on_ranks, random_tensor, relative, staged


def test_the_scale_stays_at_its_floor_and_grows_from_there():
    """min_scale, which GradScaler lacks: no halving passes it, also of a state that is loaded."""
    scaler = amp.LossScaler(scale=5.0, growth_interval=2, min_scale=2.0)

    def scales(*overflows):
        found = []
        for found_inf in overflows:
            scaler.update(found_inf)
            found.append(scaler.scale)
        return found
    assert scales(True, True, True, False, False) == [2.5, 2.0, 2.0, 2.0, 4.0]
    state = scaler.state_dict()
    scaler = amp.LossScaler()
    scaler.load_state_dict(state)
    assert scales(True, True, False, False) == [2.0, 2.0, 2.0, 4.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_an_update_below_the_last_bit_of_a_parameter_accumulates_in_the_master(dtype):
    """Eight updates of an eighth of the last bit of 1 move a parameter to the next number of its
    type; torch's AdamW, on parameters of that type alone, leaves it at 1."""
    last_bit = torch.finfo(dtype).eps
    _, flat = staged(replace(CFG, n_layer=1), Grid(1, 1, 1), dtype)
    flat.load("master", lambda name, shape: torch.ones(shape))
    theirs = nn.Parameter(torch.ones(4, dtype=dtype))
    optimizer = torch.optim.AdamW([theirs], lr=last_bit / 8, weight_decay=0.0)
    bucket = flat.buckets[-1]
    spec = bucket.specs[0]
    seen = []
    for step in range(1, 9):
        for each in flat.buckets:
            each.grad.fill_(-1)             # AdamW adds the learning rate
        flat.adamw_step(1.0, step, lr=last_bit / 8, beta1=0.9, beta2=0.999, weight_decay=0.0)
        theirs.grad = torch.full_like(theirs, -1)
        optimizer.step()
        seen.append(bucket.view(bucket.data, spec).unique().tolist())
    assert seen[:3] == 3 * [[1.0]] and seen[-1] == [1 + last_bit]
    assert theirs.tolist() == 4 * [1.0]


@pytest.mark.parametrize("dtype, bound", [(torch.bfloat16, 0.0025), (torch.float16, 0.0004)])
def test_16_bit_gradients_of_layer_norms_and_embeddings_add_up_in_fp32(dtype, bound):
    """With 4,096 tokens in a microbatch the gradients of the LayerNorms of a training model, and of
    a token that occurs 4,096 times in a plain one, are those of fp64 for the same input and
    upstream gradient, to one rounding. PyTorch's own kernels are ten times as far off, or more."""
    cfg = GPTConfig(n_layer=1)
    local, flat = staged(cfg, Grid(1, 1, 1), dtype)
    x, dy = (random_tensor(32, 128, cfg.n_embd, seed=i).add(0.1).to(dtype) for i in (1, 2))
    pairs, torchs = {}, {}
    norms = [pair for pair in local.named_modules() if isinstance(pair[1], nn.LayerNorm)]
    for name, norm in norms:
        wide, theirs = (nn.LayerNorm(cfg.n_embd, dtype=d) for d in (torch.float64, dtype))
        wide(x.double()).backward(dy.double())
        for each in (norm, theirs):
            each(x).backward(dy)
        for kind in ("weight", "bias"):
            expected = wide.get_parameter(kind).grad
            pairs[f"{name}.{kind}"] = norm.get_parameter(kind).main_grad(), expected
            torchs[f"{name}.{kind}"] = relative(theirs.get_parameter(kind).grad, expected)
    assert len(pairs) == 6 and max(torchs.values()) > 10 * bound
    assert_close(pairs, bound)

    embed = model.Embed(cfg).to(dtype)
    kernels.use_kernels(embed)
    nn.init.zeros_(embed.token.weight)
    theirs = nn.Embedding.from_pretrained(embed.token.weight.detach(), freeze=False)
    same = torch.zeros(32, 128, dtype=torch.long)
    embed.token(same).backward(dy)
    theirs(same).backward(dy)
    expected = dy.double().sum((0, 1))
    assert relative(embed.token.weight.grad[0], expected) < bound
    assert relative(theirs.weight.grad[0], expected) > 10 * bound


@on_ranks
def test_a_16_bit_sum_of_slices_on_cpus_is_rounded_once(rank, world=8):
    """Eight ranks reduce-scatter numbers in bf16 (sequence parallelism's activations, dK and dV of
    context parallelism): the sum is that of fp64 rounded once."""
    terms = [random_tensor(world * 1000, seed=seed).bfloat16() for seed in range(world)]
    expected = sum(term.double() for term in terms).chunk(world)[rank]
    one_by_one = sum(term.chunk(world)[rank] for term in terms)
    with gridded(rank, world, tp=world, pp=1) as grid:
        total = reduce_scatter(terms[rank], grid.groups["tp"]).wait()
    assert relative(one_by_one, expected) > 2 * relative(expected.bfloat16(), expected)
    assert relative(total, expected) < 1.05 * relative(expected.bfloat16(), expected)


def test_the_gradient_norm_is_exact_over_many_elements():
    """The sum behind grad_norm, of 25M fp32 gradients, is their sum of squares in fp64, to 1e-10;
    one fp32 sum over 10M is off by 7e-4. Clipping and the monitor rely on it."""
    cfg = GPTConfig(vocab_size=50257, seq_len=16, n_layer=1, n_head=1, n_embd=384)
    _, flat = staged(cfg, Grid(1, 1, 1))
    generator = torch.Generator().manual_seed(0)
    expected = 0.0
    for bucket in flat.buckets:
        for spec in bucket.specs:
            gradient = bucket.view(bucket.grad, spec).normal_(0, 3, generator=generator)
            expected += gradient.double().square().sum().item()
    squares = {name: x.item() for name, x in flat.grad_norm_squares().items()}
    assert squares == pytest.approx(dict(squares=expected, all_squares=expected), rel=1e-10)
