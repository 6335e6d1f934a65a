"""A run's gradients, weights and moments by their global names, in any layout.

    python -m pytest tests/test_full_tensors.py
"""
import re
from dataclasses import replace

import pytest
import torch

import checkpoint
import model
from model import GPTConfig
from models.llama import LlamaConfig
from parallelism import full_tensors
from parallelism.build import Grid, build_stage
from parallelism.full_tensors import full_gradient, full_gradients, full_state, parameter_names
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from tests.harness import (CFG, ROOT, TINY, launch, plain_gradient, relative, run_steps, settings,
                           without_saves)


def look_at_gradients(run):
    """Of each step, before the update: one gradient, and all."""
    flat, finish = run.flat, run.flat.finish_grad_sync
    looks = run.looks = []

    def finish_grad_sync():
        finish()
        looks.append((full_gradient(flat, "blocks.0.mlp.up.weight"), dict(full_gradients(flat))))
    flat.finish_grad_sync = finish_grad_sync
    without_saves(run)


def after_the_update(run):
    """What can be read after a step, on every rank."""
    flat = run.flat
    for call in (list(run.model.parameters())[-1].main_grad, lambda: full_state(flat, "x", "y")):
        with pytest.raises(RuntimeError):
            call()
    assert all(p.grad is None for p in run.model.parameters())
    if flat.zero == 3 or run.grid.tp * run.grid.pp > 1:
        with pytest.raises(RuntimeError, match="full_state"):
            run.model.state_dict()
    else:                                   # an update may still be on its way to this rank
        weights = run.model.state_dict()["blocks.0.mlp.up.weight"]
        assert full_state(flat, "master", "blocks.0.mlp.up.weight").to(weights.dtype).equal(weights)
    state = {kind: {name: full_state(flat, kind, name) for name in parameter_names(flat)}
             for kind in checkpoint.STATE.values()}
    return (run.looks, full_gradient(flat, "blocks.0.mlp.up.weight"),
            full_gradient(flat, "head.weight"), state)


@pytest.mark.parametrize("layout, flags", [                 # (dp, tp, pp)
    ((1, 1, 1), dict(dtype="fp16")), ((2, 2, 1), dict(zero=3, dtype="fp16")),
    ((2, 1, 2), dict(zero=2)), ((1, 2, 2), dict(exact=True))])
def test_gradients_weights_and_moments_can_be_read_by_global_name(pool, tmp_path, layout, flags):
    """On every rank the full gradient is that of the plain model, from the sum over the ranks to
    the next step, the tied matrix's by either name; weights and moments are those of a save.
    `main_grad` after the sum is refused, and a state_dict() that is a part or freed."""
    dp, tp, pp = layout
    cfg = replace(CFG, n_layer=4)           # one for each rank
    config = settings(tmp_path, tp=tp, pp=pp, steps=1, micro_batch=1, clip=1e-3, **flags)
    answers = pool.run(dp * tp * pp, run_steps, layout, config, cfg, after_the_update, None,
                       look_at_gradients)
    plain = plain_gradient(cfg)
    bound = 0.05 if "dtype" in flags else 1e-5
    name = "blocks.0.mlp.up.weight"
    for _, (([(one, every)], after, tied, state),), _ in answers:
        assert relative(every, plain) <= bound and one.equal(every[name])
        assert relative(after, one) <= 1e-6                 # clipping is divided out again
        assert relative(tied, every["embed.token.weight"]) <= 1e-6
        assert one.dtype == (torch.float64 if "exact" in flags else torch.float32)
        saved_state = answers[0].state
        for kind, tensors in state.items():
            assert relative(tensors, saved_state[kind]) == 0


@pytest.mark.parametrize("tied", [True, False])
def test_without_training_there_are_no_gradients_to_read(tied):
    """The weights are there, a head of its own too; gradients and moments are refused."""
    cfg = replace(CFG, n_layer=1) if tied else LlamaConfig(n_layer=1, tied=False)
    local = build_stage(cfg, Grid(1, 1, 1))
    specs = param_specs(local, cfg, Grid(1, 1, 1))
    flat = FlatParameters(specs, Grid(1, 1, 1), torch.float32, torch.float32, "cpu", training=False)
    flat.initialize(cfg, 0)
    name = "embed.token.weight" if tied else "head.weight"
    expected = model.initial_value(cfg, name, (cfg.vocab_size, cfg.n_embd), 0)
    assert full_state(flat, "master", "head.weight").equal(expected)
    with pytest.raises(RuntimeError, match="not summed"):
        full_gradient(flat, name)
    with pytest.raises(RuntimeError, match="without training"):
        full_state(flat, "exp_avg", name)


def test_the_example_that_prints_gradient_norms_runs_in_every_layout(shards, tmp_path):
    """The lines of full_tensors.py's docstring, behind finish_grad_sync in train.py, print the same
    names and, to 1e-4, norms in one process, with tp 2, and with ZeRO 3."""
    lines = re.findall(r"^    ((?:from|for|    if|        print).*)", full_tensors.__doc__, re.M)
    assert len(lines) == 4
    code = (ROOT / "train.py").read_text()
    line = "        flat.finish_grad_sync()\n"
    assert code.count(line) == 1
    example = "".join(f"        {x}\n" for x in lines)
    (tmp_path / "train.py").write_text(code.replace(line, line + example))
    printed = []
    for world, flags in [(1, []), (2, ["--tp", 2]), (2, ["--zero", 3])]:
        commands = launch(world, "--data", shards, "--out", tmp_path / f"{len(printed)}", *TINY,
                          "--steps", 1, *flags, file=tmp_path / "train.py")
        (status, out, error), *_ = [command.finish() for command in commands]
        assert status == 0, error
        printed.append({name: float(norm) for name, norm
                        in re.findall(r"^([a-z0-9_.]+\.(?:weight|bias)) (\S+)$", out, re.M)})
    assert printed[0].keys() == set(checkpoint.parameter_shapes(GPTConfig(n_layer=2)))
    assert all(norms == pytest.approx(printed[0], rel=1e-4) for norms in printed)
