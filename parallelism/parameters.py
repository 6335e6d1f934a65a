"""The parameters of a stage: their names and shapes, and which part of each a rank has.

    full parameter      under its global name, as in a checkpoint
    this rank's part    ParamSpec.cut, by tensor parallelism and, of experts, --ep
"""
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Callable

import torch

from model import GPT, OF_VOCABULARY, GPTConfig, ceil_div


@dataclass
class ParamSpec:
    """One parameter: its global name, its shape, and how tensor parallelism cuts it. In the
    dimension that is cut, matrices are stacked, the sections. A rank has a piece of each:

        sections 4, 2; 2 ranks      q0 q1 | q2 q3 | k | v       rank 0: q0 q1 k     rank 1: q2 q3 v

    The stack may be repeated, `groups` times. Then each group is cut among tp / groups ranks."""
    name: str
    shape: tuple                # of the full parameter, without padding
    partition_dim: int | None   # the dimension that is cut; None: every rank has all of it
    sections: tuple             # the sizes of the sections there
    widths: tuple               # those of a rank's pieces, with the padding after a section's end
    tp: int
    owners: list                # (module, attribute): two if embedding and head are on one stage
    is_tied_copy: bool          # the last stage's copy of a weight tied across stages
    is_tied: bool = False       # embedding and head share it
    ep: int = 1                 # so many replicas divide its dimension 0, the experts
    sign_step: float = 0.0      # above 0: the size of its steps, against the sign of its gradient
    groups: int = 1

    @property
    def local_shape(self) -> list[int]:
        shape = [self.shape[0] // self.ep, *self.shape[1:]]
        if self.partition_dim is not None:
            shape[self.partition_dim] = sum(self.widths)
        return shape

    @property
    def numel(self) -> int:
        return math.prod(self.local_shape)

    @property
    def grad_covers_own_heads(self) -> bool:
        """Whole on every rank, but each rank's gradient covers only its own heads."""
        return self.name.endswith(("attn.q_norm.weight", "attn.k_norm.weight"))

    @property
    def decays(self) -> bool:
        """Weight decay is for matrices, not vectors (Loshchilov and Hutter 2019, algorithm 2)."""
        return len(self.shape) >= 2

    @property
    def num_parts(self) -> int:
        return self.ep if self.partition_dim is None else self.ep * self.tp

    def part_of(self, grid) -> int:
        """The number of a rank's part. With ep the parts of one ep rank follow one another."""
        if self.num_parts == 1:
            return 0
        return grid.ep_rank % self.ep * self.tp + grid.tp_rank

    def pieces(self, tp_rank: int) -> Iterator[tuple]:
        """A rank's piece of each section: (where it begins in the full tensor, its size, its width
        in the rank's part). From size to width it is padding."""
        group, part = divmod(tp_rank, self.tp // self.groups)
        start = group * sum(self.sections)
        for section, width in zip(self.sections, self.widths):
            low = min(part * width, section)
            yield start + low, min(width, section - low), width
            start += section

    def cut(self, full: torch.Tensor, grid) -> torch.Tensor:
        """Full parameter -> this rank's part: a view, which reads nothing, if it is all of the
        parameter or one piece, without padding."""
        if self.ep > 1:
            full = full.chunk(self.ep)[grid.ep_rank]
        if self.partition_dim is None or sum(self.widths) == full.shape[self.partition_dim]:
            return full
        mine = []
        for first, size, width in self.pieces(grid.tp_rank):
            mine.append(full.narrow(self.partition_dim, first, size))
            if size < width:                                            # of dimension 0 only
                mine.append(full.new_zeros(width - size, *full.shape[1:]))
        return mine[0] if len(mine) == 1 else torch.cat(mine, self.partition_dim)

    def cut_experts(self, full: Callable, grid) -> torch.Tensor:
        """`cut` of experts, of which full(e) -> (out, in) gives one. It asks for this rank's alone,
        one after another."""
        of_one = replace(self, shape=(1, *self.shape[1:]), ep=1)
        experts = torch.arange(self.shape[0]).chunk(self.ep)[grid.ep_rank % self.ep]
        return torch.cat([of_one.cut(full(e).unsqueeze(0), grid) for e in experts.tolist()])

    def join(self, parts: list) -> torch.Tensor:
        """All parts, in their order -> full parameter."""
        if self.ep > 1:
            of_one = replace(self, shape=(self.shape[0] // self.ep, *self.shape[1:]), ep=1)
            tp = len(parts) // self.ep
            return torch.cat([of_one.join(parts[first:first + tp])
                              for first in range(0, len(parts), tp)])
        dim = self.partition_dim
        if dim is None:
            return parts[0]
        full = parts[0].new_empty(self.shape)
        for tp_rank, part in enumerate(parts):
            for (first, size, _), piece in zip(self.pieces(tp_rank), part.split(self.widths, dim)):
                full.narrow(dim, first, size).copy_(piece.narrow(dim, 0, size))
        return full


TIED = {"head.weight": "embed.token.weight"}    # one matrix: its name in the head, its global name


def param_specs(model: GPT, model_config: GPTConfig, grid) -> list[ParamSpec]:
    """The parameters of a stage, whose modules are still whole (build.build_stage). They depend on
    the stage alone."""
    specs = {}
    tied = TIED if model_config.tied else {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            local_name = f"{module_name}.{attribute}"
            name = tied.get(local_name, local_name)
            if name in specs:
                specs[name].owners.append((module, attribute))
                continue
            shape = list(parameter.shape)
            if name in OF_VOCABULARY:
                shape[0] = model_config.vocab_size
            dim = getattr(module, "partition_dim", {}).get(attribute)
            groups, sections, widths = 1, (), ()
            if hasattr(module, "sections"):
                groups, sections, widths = module.groups, module.sections, module.widths
            elif dim is not None:
                count = module.stacked
                sections = (shape[dim] // count,) * count
                widths = (ceil_div(parameter.shape[dim] // count, grid.tp),) * count
            specs[name] = ParamSpec(
                name, tuple(shape), dim, sections, widths, grid.tp, owners=[(module, attribute)],
                is_tied_copy=local_name in tied and not grid.is_first,
                is_tied=name in tied.values(), ep=grid.ep if hasattr(module, "is_expert") else 1,
                groups=groups)
            if local_name.endswith("mlp.router.bias"):
                specs[name].sign_step = model_config.balance_bias
    return list(specs.values())
