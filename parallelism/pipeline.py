"""What two schedules (schedules.py) add to parallel.Pipeline, which runs GPipe and 1F1B:

    interleaved     a rank has v chunks of the layers: the bubble is about 1 / v, for v times the
                    messages
    ZB-H1           gradients of weights wait for gaps: the bubble is about 1 / 3
"""
import copy
from functools import partial

import torch
import torch.nn as nn

from model import GPT
from parallel import Pipeline, TensorParallel, chunk_layers, gather_positions
from parallelism.kernels import expert_linear, expert_weight_grad, matmul
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
        return split_in_turns(schedule, self.grid.chunks)

    def may_receive_early(self, turn, next_turn):
        return False                # in a ring of chunks all stages would wait


class ZeroBubble(Pipeline):
    """B does not compute the gradients of the weights that `multiply` multiplies by. It keeps their
    factors, (module, product, dy, x, its other arguments), and W multiplies them."""

    def __init__(self, model, *args):
        super().__init__(model, *args)
        self.postponed = []         # of each B without its W, the factors
        for module in model.modules():
            if isinstance(module, TensorParallel):
                module.multiply = partial(self.multiply, module)

    def turns(self, schedule):
        return split_in_turns(schedule, chunks=1)

    def multiply(self, module: TensorParallel, product, x: torch.Tensor, *args) -> torch.Tensor:
        """Replaces `TensorParallel.multiply`."""
        if not torch.is_grad_enabled():
            return product(x, module.weight, *args)
        y = product(x, module.weight.detach(), *args)

        def keep_factors(dy):           # what a hook returned would replace dy
            self.postponed[-1].append((module, product, dy, x.detach(), args))
        y.register_hook(keep_factors)
        return y

    def B(self, m, chunk, dy):
        self.postponed.append([])
        return super().B(m, chunk, dy)

    @torch.no_grad()
    def W(self, m, chunk, _):
        factors = self.postponed.pop(0)
        while factors:                                  # each product frees its own
            module, *factors_of_one = factors.pop(0)
            module.weight.grad = weight_grad(module, *factors_of_one)
            self.flat.grad_ready(module.weight)


def weight_grad(module: TensorParallel, product, dy: torch.Tensor, x: torch.Tensor,
                args: tuple) -> torch.Tensor:
    """The gradient of the weight in product(x, weight, *args)."""
    if product is expert_linear:
        return expert_weight_grad(dy, x, module.weight, *args)
    if len(x) < len(dy):        # with sequence parallelism x has this rank's positions alone
        x = gather_positions(x, module.grid).wait()
    return matmul(dy.flatten(0, 1).t(), x.flatten(0, 1))


def run_pipeline(name: str, model: GPT, grid, batch: list, flat=None) -> torch.Tensor:
    """Run this stage's part of the schedule with this name. Without `flat` only forwards."""
    schedule = make_schedule(name, grid, len(batch))
    if flat is None:
        schedule = [op for op in schedule if op[0] == "F"]
    return run_schedule(schedule, model, grid, batch, flat)


def run_schedule(schedule: list[tuple], model: GPT, grid, batch: list, flat=None) -> torch.Tensor:
    """Run this stage's list of ops -> the sum of the losses (parallel.Pipeline)."""
    kind = Pipeline
    if ("W", 0, 0) in schedule:
        kind = ZeroBubble
    elif grid.chunks > 1:
        kind = Interleaved
    pipeline = kind(model, grid, batch, model.activation_like, flat)
    pipeline.run(schedule)
    return pipeline.loss
