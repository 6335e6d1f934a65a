"""All schedules by name, and interleaved 1F1B, whose bubble is about 1 / v of that of 1F1B, for v
times the messages. parallel.py has GPipe, 1F1B and the `Pipeline` that runs them.

Interleaved 1F1B: a stage has v chunks of the layers, a, b and so on. Chunk c of stage s has
the layers of stage c p + s of a pipeline of v p stages. An op takes 1 / v of the time, so the
bubble is (p - 1) / (v m + p - 1). Here two stages have two chunks each:

             F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b ...
             .   F0a F1a F0b B0b B0b F1b B1b B1b F2a B0a B0a F3a B1a B1a F2b B2b B2b F3b B3b ...
"""
import copy
from itertools import pairwise

import torch
import torch.nn as nn

from model import GPT
from parallel import Pipeline, chunk_layers, gpipe, in_turn, one_f_one_b


def interleaved(stage: int, stages: int, num_microbatches: int, chunks: int) -> list[tuple]:
    """Narayanan et al. 2021, section 2.2: groups of `stages` microbatches pass through chunk 0,
    then 1 and so on. The first microbatches have to reach the last chunk, and each later stage adds
    two turns: an activation travels there, and its gradient back."""
    forwards = [("F", i, chunk) for first in range(0, num_microbatches, stages)
                for chunk in range(chunks)
                for i in range(first, min(first + stages, num_microbatches))]
    backwards = [("B", i, chunks - 1 - chunk) for _, i, chunk in forwards]
    return in_turn(forwards, backwards, ahead=(chunks - 1) * stages + 2 * (stages - 1 - stage))


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def make_schedule(name: str, grid, num_microbatches: int) -> list[tuple]:
    """The ops of this rank's stage. Without a pipeline each forward is followed by its backward."""
    schedule = SCHEDULES[name] if grid.pp > 1 else one_f_one_b
    return schedule(grid.stage, grid.pp, num_microbatches, grid.chunks)


class Interleaved(Pipeline):
    """A Pipeline of several chunks. Messages start after a turn: one op, or, where forwards and
    backwards alternate, a forward and the backward after it. (There each stage is two forwards
    ahead of the next: on NCCL, sends after single ops would wait for each other.)"""

    def __init__(self, model: GPT, grid, *args):
        super().__init__(model, grid, *args)
        self.chunks = model_chunks(model, grid)

    def split_in_turns(self, schedule):
        pairs = [(first[0], second[0]) for first, second in pairwise(schedule)]
        alternates = ("B", "F") in pairs
        turns = [schedule[:1]]
        for op, pair in zip(schedule[1:], pairs):
            if alternates and pair == ("F", "B"):
                turns[-1].append(op)
            else:
                turns.append([op])
        return turns

    def may_receive_early(self, turn, next_turn):
        return False                # the two neighbors may be the same stage


def model_chunks(model: GPT, grid) -> list[GPT]:
    """The chunks of this rank's model, as models that share its modules."""
    chunks = []
    for number, layers in enumerate(chunk_layers(model.cfg.n_layer, grid)):
        chunk = copy.copy(model)
        chunk._modules = dict(
            embed=model.embed if number == 0 else None,
            blocks=nn.ModuleDict({str(layer): model.blocks[str(layer)] for layer in layers}),
            head=model.head if number == grid.chunks - 1 else None)
        chunks.append(chunk)
    return chunks


def run_pipeline(name: str, model: GPT, grid, batch: list, loss_factor: float = 1.0,
                 flat=None) -> torch.Tensor:
    """Run this stage's part of the schedule with this name -> the sum of the losses. Without `flat`
    only forwards."""
    schedule = make_schedule(name, grid, len(batch))
    if flat is None:
        schedule = [op for op in schedule if op[0] == "F"]
    return run_schedule(schedule, model, grid, batch, loss_factor, flat)


def run_schedule(schedule: list[tuple], model: GPT, grid, batch: list, loss_factor: float = 1.0,
                 flat=None) -> torch.Tensor:
    """Run this stage's list of ops -> the sum of the losses (parallel.Pipeline)."""
    if flat is not None:        # the head has already multiplied its gradients by its own factor
        assert getattr(model.head, "loss_factor", loss_factor) == loss_factor, "two loss factors"
    kind = Interleaved if grid.chunks > 1 else Pipeline
    pipeline = kind(model, grid, batch, loss_factor, flat)
    pipeline.run(schedule)
    return pipeline.loss
