"""The parameters of a stage: their names and shapes, and which part of each a rank has.

    full parameter      under its global name, as in a checkpoint
    this rank's part    ParamSpec.cut, by tensor parallelism (TP1) and, of experts, --ep

zero.py moves the parts into flat buffers. checkpoint.py and full_tensors.py join those of all ranks.
"""
import math
from dataclasses import dataclass, replace
from typing import Callable

import torch
import torch.nn.functional as F

from model import GPT, OF_VOCABULARY, GPTConfig


@dataclass
class ParamSpec:
    """One parameter: its global name, its shape, and how tensor parallelism cuts it (TP1)."""
    name: str
    shape: tuple                # of the full parameter, without padding
    padded_rows: int            # shape[0] with the padding
    partition_dim: int | None   # the dimension that is cut; None: every rank has all of it
    stacked: int                # how many matrices are stacked in that dimension
    tp: int
    owners: list                # (module, attribute): two if embedding and head are on one stage
    is_tied_copy: bool          # the last stage's copy of a weight tied across stages
    is_tied: bool = False       # embedding and head share it
    ep: int = 1                 # so many replicas divide its dimension 0, the experts
    sign_step: float = 0.0      # above 0: the size of its steps, against the sign of its gradient

    @property
    def local_shape(self) -> list[int]:
        shape = [self.padded_rows // self.ep, *self.shape[1:]]
        if self.partition_dim is not None:
            shape[self.partition_dim] //= self.tp
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

    def cut(self, full: torch.Tensor, grid) -> torch.Tensor:
        """Full parameter -> this rank's part."""
        if self.ep > 1:
            full = full.chunk(self.ep)[grid.ep_rank]
        if self.partition_dim is None:
            return full
        if self.padded_rows > self.shape[0]:            # the vocabulary: rows at the end are zero
            rows = self.padded_rows // self.tp
            mine = full[grid.tp_rank * rows:(grid.tp_rank + 1) * rows]
            padding = rows - len(mine)
            if padding <= 0:
                return mine                             # a view: not read
            return torch.cat([mine, mine.new_zeros(padding, *mine.shape[1:])])
        dim = self.partition_dim                                        # qkv's weight: (3C, C)
        matrices = full.unflatten(dim, (self.stacked, self.tp, -1))     # (3, tp, C / tp, C)
        mine = matrices.select(dim + 1, grid.tp_rank)                   # (3, C / tp, C)
        return mine.flatten(dim, dim + 1)                               # (3C / tp, C)

    def cut_experts(self, full: Callable, grid) -> torch.Tensor:
        """`cut` of experts, of which full(e) -> (out, in) gives one. It asks for this rank's alone,
        one after another."""
        of_one = replace(self, shape=(1, *self.shape[1:]), padded_rows=1, ep=1)
        experts = torch.arange(self.shape[0]).chunk(self.ep)[grid.ep_rank % self.ep]
        return torch.cat([of_one.cut(full(e).unsqueeze(0), grid) for e in experts.tolist()])

    def join(self, parts: list) -> torch.Tensor:
        """All parts, in their order -> full parameter."""
        if self.ep > 1:
            of_one = replace(self, ep=1)
            tp = len(parts) // self.ep
            return torch.cat([of_one.join(parts[first:first + tp])
                              for first in range(0, len(parts), tp)])
        if self.partition_dim is None:
            return parts[0]
        dim = self.partition_dim
        matrices = [part.unflatten(dim, (self.stacked, -1)) for part in parts]      # (3, C / tp, C)
        return torch.cat(matrices, dim + 1).flatten(dim, dim + 1)[:self.shape[0]]   # (3C, C)


TIED = {"head.weight": "embed.token.weight"}    # one matrix: its name in the head, its global name


def param_specs(model: GPT, model_config: GPTConfig, grid) -> list[ParamSpec]:
    """The parameters of a stage (build.build_stage). They depend on the stage alone, so any rank
    can compute the layout of another one (`checkpoint.file_order`)."""
    specs = {}
    tied = TIED if model_config.tied else {}
    for module_name, module in model.named_modules():
        for attribute, parameter in module.named_parameters(recurse=False):
            local_name = f"{module_name}.{attribute}"
            name = tied.get(local_name, local_name)
            if name in specs:
                specs[name].owners.append((module, attribute))
                continue
            rows = model_config.vocab_size if name in OF_VOCABULARY else parameter.shape[0]
            specs[name] = ParamSpec(
                name, (rows, *parameter.shape[1:]), padded_rows=parameter.shape[0],
                partition_dim=getattr(module, "partition_dim", {}).get(attribute),
                stacked=getattr(module, "stacked", 1), tp=grid.tp, owners=[(module, attribute)],
                is_tied_copy=local_name in tied and not grid.is_first,
                is_tied=name in tied.values(), ep=grid.ep if hasattr(module, "is_expert") else 1)
            if local_name.endswith("mlp.router.bias"):
                specs[name].sign_step = model_config.balance_bias
    return list(specs.values())
