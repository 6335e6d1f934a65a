"""Buckets: where a rank's parameters, gradients, masters and moments lie in memory, and how many
bytes they take. zero.py fills and communicates them; tools/plan/ counts them.

The buckets of a rank are the tied matrix, the other parameters of the ends of the model, and two
for each block. Backward completes them from the right; every rank communicates in that order.

    | tied | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp |                 a tied matrix
    | embed | ends | 0.attn | 0.mlp | ... | n.attn | n.mlp | head |         a head of its own
    | ... | 0.attn | 0.mlp | 0.router | 0.experts | ...                     a mixture of experts
"""
import torch

from model import ceil_div
from parallelism.parameters import ParamSpec


class Bucket:
    """Parameters that are communicated together, laid out flat, padded to equal shards for all
    replicas. `name` is as drawn above: tied, ends, 0.attn ...

    group           the kind of group (parallel.GROUPS) whose ranks have these parameters: replicas,
                    or of experts same_experts
    ranks           how many ranks it has
    num_shards, shard_rank      the number of ZeRO's shards, and which this rank has
    is_wide         its data is of the masters' type: a router's, because rounding would choose
                    other experts
    grows_in_forward    it has the token matrix, whose gradient the head computes in forward
    data            (numel,) the parameters are views into it; ZeRO 3 frees and restores its memory
    grad            (numel,) their gradients; with ZeRO 2 and 3, None from a sync to the next one
    shard           {name: (numel / num_shards,)} of what this rank updates:
                    data    a view of `data`; in ZeRO 3 its own memory
                    grad    a view of `grad`; from ZeRO 2 on its own memory, a sum of backwards
                    master  the same tensor as data if types and devices are equal
                    exp_avg, exp_avg_sq     on the master's device
    shard_ranges    the parts of parameters in the shard: [(spec, shard_slice, param_slice)], where
                    shard[name][shard_slice] belongs to parameter.flatten()[param_slice]
    pending_grads   number of gradients that backward (with ZB-H1: W) has not computed yet
    unsharding      the all-gather of `data` under way, or None
    """

    def __init__(self, name: str, specs: list[ParamSpec], replicas: int, num_shards: int,
                 shard_rank: int):
        ep = specs[0].ep
        self.group = "replicas" if ep == 1 else "same_experts"
        self.ranks = replicas // ep
        self.num_shards = max(1, num_shards // ep)
        self.shard_rank = shard_rank // ep
        self.is_wide = name.endswith(".router")
        self.grows_in_forward = name in ("tied", "head")
        self.name = name
        self.specs = specs
        self.data = None
        self.grad = None
        self.shard = {}
        self.pending_grads = 0
        self.unsharding = None

        self.offsets = {}
        end = 0
        for spec in specs:
            self.offsets[spec.name] = end
            end += ceil_div(spec.numel, 32) * 32        # aligned to 64 bytes, in 16 bits too
        self.numel = ceil_div(end, 32 * self.ranks) * 32 * self.ranks

        length = self.numel // self.num_shards
        first = self.shard_rank * length
        self.shard_ranges = []
        for spec in specs:
            offset = self.offsets[spec.name]
            low = max(offset, first)
            high = min(offset + spec.numel, first + length)
            if low < high:
                shard_slice = slice(low - first, high - first)
                param_slice = slice(low - offset, high - offset)
                self.shard_ranges.append((spec, shard_slice, param_slice))

    def view(self, flat: torch.Tensor, spec: ParamSpec) -> torch.Tensor:
        """The part of `data` or `grad` that belongs to a parameter, in the parameter's shape."""
        offset = self.offsets[spec.name]
        return flat[offset:offset + spec.numel].view(spec.local_shape)


def make_buckets(specs: list[ParamSpec], replicas: int, num_shards: int,
                 shard_rank: int) -> list[Bucket]:
    """The buckets drawn above. No other waits for the tied gradient, which is complete last."""
    contents = {"tied": [], "embed": [], "ends": []}
    for spec in specs:
        match spec.name.split("."):
            case ["blocks", number, "norm1" | "attn", *_]:
                bucket = f"{number}.attn"
            case ["blocks", number, "mlp", "router" | "experts" as part, *_]:
                bucket = f"{number}.{part}"
            case ["blocks", number, *_]:
                bucket = f"{number}.mlp"
            case ["embed", "token", _]:
                bucket = "tied" if spec.is_tied else "embed"
            case ["head", "weight"]:
                bucket = "head"             # the last of all: its gradient is the first one
            case _:
                bucket = "ends"
        contents.setdefault(bucket, []).append(spec)
    return [Bucket(name, group, replicas, num_shards, shard_rank)
            for name, group in contents.items() if group]


def is_owner(spec: ParamSpec, grid, num_shards: int) -> bool:
    """Whether the numbers that a rank has of this parameter count as its own: in the global norm,
    in a checkpoint and in a full tensor. Each number of the model has one owner."""
    # Without ZeRO all ranks of the bucket's group hold the same.
    has_first_copy = grid.replica // spec.ep < max(1, num_shards // spec.ep)
    is_replicated = spec.partition_dim is None and grid.tp_rank > 0
    return has_first_copy and not is_replicated and not spec.is_tied_copy


def state_bytes(buckets: list[tuple[Bucket, int]], dtypes: tuple, zero: int, offload: bool,
                exact: bool = False) -> tuple[dict, dict]:
    """Bytes of one rank's state, as the table in zero.py says: {kind: bytes} on its device and,
    if `offload` keeps a part there, on the host. `buckets` are this rank's, as [(bucket, how many
    like it)]. `dtypes`: of parameters and masters. `exact` gradients are float64."""
    dtype, master_dtype = dtypes
    grad_dtype = torch.float64 if exact else master_dtype
    sizes = dict.fromkeys(("parameters", "gradients", "masters", "moments"), 0)
    longest = 0
    for bucket, count in buckets:
        numel, shard = count * bucket.numel, count * bucket.numel // bucket.ranks
        data_dtype = master_dtype if bucket.is_wide else dtype
        master = master_dtype.itemsize * (shard if zero >= 1 else numel)
        sizes["parameters"] += data_dtype.itemsize * (shard if zero >= 3 else numel)
        sizes["gradients"] += grad_dtype.itemsize * (shard if zero >= 2 else numel)
        sizes["moments"] += 2 * master
        if offload or data_dtype != master_dtype:       # else a parameter is its own master
            sizes["masters"] += master
        longest = max(longest, bucket.numel // bucket.ranks if zero >= 1 else bucket.numel)
    if not offload:
        return sizes, {}
    on_host = dict(masters=sizes.pop("masters"), moments=sizes.pop("moments"),
                   staging=2 * master_dtype.itemsize * longest)
    return sizes, on_host
