"""Of the buckets in parallel.py, section 4: which rank owns what, and how many bytes they take."""
import torch

from parallel import Bucket
from parallelism.parameters import ParamSpec


def is_owner(spec: ParamSpec, grid, num_shards: int) -> bool:
    """Whether the numbers that a rank has of this parameter count as its own: in the global norm,
    in a checkpoint and in a full tensor. Each number of the model has one owner."""
    # Without ZeRO all ranks of the bucket's group hold the same.
    has_first_copy = grid.replica // spec.ep < max(1, num_shards // spec.ep)
    is_replicated = spec.partition_dim is None and grid.tp_rank > 0
    return has_first_copy and not is_replicated and not spec.is_tied_copy


def state_bytes(buckets: list[tuple[Bucket, int]], dtypes: tuple, zero: int, offload: bool,
                grad_dtype: torch.dtype | None = None) -> tuple[dict, dict]:
    """Bytes of one rank's state, as the table in parallel.py says: {kind: bytes} on its device and,
    if `offload` keeps a part there, on the host. `buckets` are this rank's, as [(bucket, how many
    like it)]. `dtypes`: of parameters and masters; `grad_dtype` (None: as the masters)."""
    dtype, master_dtype = dtypes
    grad_dtype = grad_dtype or master_dtype
    sizes = dict.fromkeys(("parameters", "gradients", "masters", "moments"), 0)
    longest = 0
    for bucket, count in buckets:
        numel, shard = count * bucket.numel, count * bucket.numel // bucket.ranks
        data_dtype = master_dtype if bucket.is_wide else dtype
        master = master_dtype.itemsize * (shard if zero >= 1 else numel)
        sizes["parameters"] += data_dtype.itemsize * (shard if zero >= 3 else numel)
        sizes["gradients"] += grad_dtype.itemsize * (shard if zero >= 2 else numel)
        sizes["moments"] += 2 * master
        if offload or data_dtype != master_dtype:        # else a parameter is its own master
            sizes["masters"] += master
        longest = max(longest, bucket.numel // bucket.ranks if zero >= 1 else bucket.numel)
    if not offload:
        return sizes, {}
    on_host = dict(masters=sizes.pop("masters"), moments=sizes.pop("moments"),
                   staging=2 * master_dtype.itemsize * longest)
    return sizes, on_host
