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
from parallelism import full_tensors
from parallelism.build import Grid, build_stage
from parallelism.full_tensors import full_gradient, full_gradients, full_state, parameter_names
from parallelism.parameters import param_specs
from parallelism.zero import FlatParameters
from tests.harness import (CFG, ROOT, TINY, launch, plain_gradient, relative, run_steps, settings,
                           without_saves)


def refusal(call, *args):
    """The message of the exception, one line, that the call raises."""
    with pytest.raises((ValueError, RuntimeError)) as refused:
        call(*args)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def look_at_gradients(run):
    """Before and after the update, the same; before the sum and in the next step, a refusal."""
    flat, name = run.flat, "blocks.0.mlp.up.weight"
    zero, finish = flat.zero_grad, flat.finish_grad_sync
    looks = run.looks = []

    def zero_grad(*args):
        zero(*args)
        looks.append(refusal(full_gradient, flat, name))

    def finish_grad_sync():
        looks.append(refusal(lambda: list(full_gradients(flat))))
        if flat.zero >= 2:                  # every backward's sum has emptied this rank's part
            refusal(list(run.model.parameters())[-1].main_grad)
        finish()
        looks.append((full_gradient(flat, name), dict(full_gradients(flat))))
    flat.zero_grad, flat.finish_grad_sync = zero_grad, finish_grad_sync
    without_saves(run)


def after_the_update(run):
    """What can be read after a step, on every rank."""
    flat = run.flat
    parameters = list(run.model.named_parameters())
    name, parameter = parameters[-1]
    said = [refusal(parameter.main_grad), refusal(full_gradient, flat, "blocks.0.mlp.up.wieght"),
            refusal(full_state, flat, "weights", "embed.token.weight")]
    assert all(p.grad is None for _, p in parameters)
    if flat.zero == 3 or run.grid.tp * run.grid.pp > 1:
        assert "full_state(flat, 'master', name)" in refusal(run.model.state_dict)
    else:                                   # an update may still be on its way to this rank
        weights = run.model.state_dict()["blocks.0.mlp.up.weight"]
        assert full_state(flat, "master", "blocks.0.mlp.up.weight").to(weights.dtype).equal(weights)
    if run.grid.world > 1:
        said.append(refusal(full_gradient, flat, f"blocks.{run.grid.rank}.norm1.bias"))
    state = {kind: {name: full_state(flat, kind, name) for name in parameter_names(flat)}
             for kind in checkpoint.STATE.values()}
    return (run.looks, said, full_gradient(flat, "blocks.0.mlp.up.weight"),
            full_gradient(flat, "head.weight"), state)


@pytest.mark.parametrize("layout, flags", [                 # (dp, tp, pp)
    ((1, 1, 1), dict(dtype="fp16")), ((2, 2, 1), dict(zero=3, dtype="fp16")),
    ((2, 1, 2), dict(zero=2)), ((1, 2, 2), dict(exact=True))])
def test_gradients_weights_and_moments_can_be_read_by_global_name_or_are_refused(
        pool, tmp_path, layout, flags):
    """On every rank the full gradient is that of the plain model, from the sum over the ranks to
    the next step, the tied matrix's by either name; weights and moments are those of a save. At
    another time, by another name, or by different names on different ranks it is refused in one
    line; so is `main_grad` after the sum, and a state_dict() that is a part or freed."""
    dp, tp, pp = layout
    cfg = replace(CFG, n_layer=4)           # one for each rank
    config = settings(tmp_path, tp=tp, pp=pp, steps=1, micro_batch=1, clip=1e-3, **flags)
    answers = pool.run(dp * tp * pp, run_steps, layout, config, cfg, after_the_update, None,
                       look_at_gradients)
    plain = plain_gradient(cfg)
    bound = 0.05 if "dtype" in flags else 1e-5
    name = "blocks.0.mlp.up.weight"
    for _, ((looks, said, after, tied, state),), _ in answers:
        early, earlier, (one, every) = looks
        assert "not summed over the ranks yet" in early and "after finish_grad_sync" in earlier
        assert relative(every, plain) <= bound and one.equal(every[name])
        assert relative(after, one) <= 1e-6                 # clipping is divided out again
        assert relative(tied, every["embed.token.weight"]) <= 1e-6
        assert one.dtype == (torch.float64 if "exact" in flags else torch.float32)
        assert "call full_tensors.full_gradient(flat, '" in said[0]
        assert "did you mean 'blocks.0.mlp.up.weight'" in said[1]
        assert "none of master, exp_avg, exp_avg_sq" in said[2]
        assert len(answers) == 1 or "norm1.bias') at once" in said[3]
        saved_state = answers[0].state
        for kind, tensors in state.items():
            assert relative(tensors, saved_state[kind]) == 0


def test_without_training_there_are_no_gradients_to_read():
    """The weights are there; gradients and moments are refused in a line."""
    cfg = replace(CFG, n_layer=1)
    local = build_stage(cfg, Grid(1, 1, 1))
    specs = param_specs(local, cfg, Grid(1, 1, 1))
    flat = FlatParameters(specs, Grid(1, 1, 1), torch.float32, torch.float32, "cpu", training=False)
    flat.initialize(cfg, 0)
    expected = model.initial_value(cfg, "embed.token.weight", (257, 32), 0)
    assert full_state(flat, "master", "embed.token.weight").equal(expected)
    assert "without training" in refusal(full_gradient, flat, "embed.token.weight")
    assert "without training" in refusal(full_state, flat, "exp_avg", "embed.token.weight")


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
