"""Pipeline parallelism: stages, the papers' schedules, and what a stage keeps.

That a pipeline gives the whole model's gradients, and torch's: test_all.py. That none can hang:
test_gpu_branches.py."""
import itertools
import weakref
from dataclasses import replace
from unittest import mock

import pytest

from parallel import Grid, Pipeline, stage_layers
from parallelism.pipeline import SCHEDULES, make_schedule, run_schedule
from tests.harness import CFG, run_steps, settings, staged, tokens_of, without_saves
from tools.schedule import bubble, clock, live_activations


def test_stages_share_the_layers_in_order_and_evenly():
    """Stages differ by one layer at most; the first has the most, the last, with the head, the
    fewest."""
    for n_layer in range(1, 20):
        for pp in range(1, n_layer + 1):
            stages = [list(stage_layers(n_layer, pp, s)) for s in range(pp)]
            sizes = [len(layers) for layers in stages]
            assert sum(stages, []) == list(range(n_layer)) and min(sizes) > 0
            assert sizes[0] == max(sizes) <= min(sizes) + 1 and sizes[-1] == min(sizes)


@pytest.mark.claim("Every schedule has the bubble and the live microbatches of its paper's "
                   "formulas.")
@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved"])
def test_schedules_have_the_papers_bubble_and_live_microbatches(name):
    """GPipe and 1F1B idle for (p - 1) / (m + p - 1) of the time, v chunks for (p - 1) / (v m + p -
    1); stage s keeps m microbatches under GPipe, min(m, p - s) under 1F1B (Narayanan et al. 2021,
    section 2.2), the first of v chunks p (1 + (p - 1) / (p v)), if there are so many (Korthikanti
    et al. 2022, section 4.2.3). No op is missing or repeated. Not in the papers, but our own: 2 / v
    less on each stage after the first of v chunks."""
    for p, m, v in itertools.product(range(1, 9), (*range(1, 17), 32), (1, 2, 3, 4)):
        if (v > 1) != (name == "interleaved") or v > 1 and (p == 1 or m % p):
            continue
        schedules = [SCHEDULES[name](s, p, m, v) for s in range(p)]
        assert bubble(clock(schedules)) == pytest.approx((p - 1) / (v * m + p - 1))
        for s, schedule in enumerate(schedules):
            live = {"gpipe": m, "1f1b": p - s,
                    "interleaved": p * (1 + (p - 1) / (p * v)) - 2 * s / v}
            assert live_activations(schedule) == pytest.approx(v * min(m, live[name]))
            assert sorted(schedule) == sorted(itertools.product("FB", range(m), range(v)))


def test_the_clock_finds_a_deadlock():
    with pytest.raises(ValueError, match="deadlock"):
        clock([[("F", 0, 0), ("F", 1, 0)], [("F", 1, 0), ("B", 1, 0), ("F", 2, 0)]])


def ops_of_a_run(rank, world, config, cfg):
    """(kind, microbatch, chunk) of each op that this stage carries out, in order."""
    with mock.patch.object(Pipeline, "run_op", autospec=True,
                           side_effect=Pipeline.run_op) as run_op:
        run_steps(rank, world, (1, 1, world), config, cfg, prepare=without_saves)
    return [call.args[1] for call in run_op.call_args_list]


@pytest.mark.parametrize("schedule, chunks", [("gpipe", 1), ("1f1b", 1), ("interleaved", 2)])
def test_a_run_executes_the_schedule_of_its_flags(pool, tmp_path, schedule, chunks):
    """On two stages, with four microbatches and chunks of one block; then an evaluation."""
    config = settings(tmp_path, steps=1, pp=2, pp_schedule=schedule, pp_chunks=chunks)
    found = pool.run(2, ops_of_a_run, config, replace(CFG, n_layer=2 * chunks))
    for stage, ops in enumerate(found):
        expected = SCHEDULES[schedule](stage, 2, 4, chunks)
        assert ops[:len(expected)] == expected
        assert {kind for kind, *_ in ops[len(expected):]} == {"F"}


@pytest.mark.parametrize("schedule, expected", [
    (SCHEDULES["gpipe"](0, 1, 8), 8), (make_schedule("gpipe", Grid(1, 1, 1), 8), 1)])
def test_backward_frees_what_its_microbatch_holds(schedule, expected):
    """Of eight microbatches GPipe holds all graphs at once; without a pipeline there is one."""
    local, flat = staged(CFG, Grid(1, 1, 1))
    losses, live = [], []

    def count(module, args, loss):
        losses.append(weakref.ref(loss))
        live.append(sum(loss() is not None for loss in losses))
    local.register_forward_hook(count)
    run_schedule(schedule, local, flat.grid,
                 [(x, x, 0, None) for x in tokens_of(CFG, 8).split(1)], flat=flat)
    assert max(live) == expected and len(live) == 8
