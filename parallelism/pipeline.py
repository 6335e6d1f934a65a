"""What interleaved 1F1B (schedules.py) adds to parallel.Pipeline, which runs GPipe and 1F1B: a rank
has v chunks of the layers, so that the bubble is about 1 / v, for v times the messages."""
import copy

import torch
import torch.nn as nn

from model import GPT
from parallel import Pipeline, chunk_layers
from parallelism.schedules import make_schedule, split_in_turns


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


class Interleaved(Pipeline):
    def __init__(self, model, grid, *args):
        super().__init__(model, grid, *args)
        self.chunks = model_chunks(model, grid)

    def turns(self, schedule):
        return split_in_turns(schedule)

    def may_receive_early(self, turn, next_turn):
        return False                # in a ring of chunks all stages would wait


def run_pipeline(name: str, model: GPT, grid, batch: list, flat=None) -> torch.Tensor:
    """Run this stage's part of the schedule with this name. Without `flat` only forwards."""
    schedule = make_schedule(name, grid, len(batch))
    if flat is None:
        schedule = [op for op in schedule if op[0] == "F"]
    return run_schedule(schedule, model, grid, batch, flat)


def run_schedule(schedule: list[tuple], model: GPT, grid, batch: list, flat=None) -> torch.Tensor:
    """Run this stage's list of ops -> the sum of the losses (parallel.Pipeline)."""
    kind = Interleaved if grid.chunks > 1 else Pipeline
    pipeline = kind(model, grid, batch, model.activation_like, flat)
    pipeline.run(schedule)
    return pipeline.loss
