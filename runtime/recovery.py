"""Recovery from divergence: what a run does about it. train.py calls these after a step.
"""
import math

from data import TokenDataset
from parallelism.collectives import all_gather_object
from parallelism.zero import FlatParameters
from runtime.options import FLAGS_THAT_CHANGE_THE_LOSS, Config


def losses_stay_comparable(config: Config, data: TokenDataset, state: dict) -> bool:
    """Whether losses from before a resume or a rollback can be compared with later ones: only under
    the same flags. Exception: if the peak learning rate has more than tripled, probably by mistake,
    the old losses stay: they are the only evidence of it."""
    stored = state["config"]
    if config.lr > 3 * stored["lr"]:
        return True
    same_flags = all(stored[name] == getattr(config, name) for name in FLAGS_THAT_CHANGE_THE_LOSS)
    return same_flags and state["data"][-1][1] == data.phases[-1][1]


def locate_nonfinite(local_loss: float, flat: FlatParameters) -> dict:
    """Find where a number is not finite; every rank must call it. Reports the first rank with a
    non-finite loss or, if there is none, with a non-finite gradient, and its last parameter with
    one, which backward reaches first. Gradients have already been summed over the replicas, so
    another replica may be the source. If all numbers are finite but their squares are not, `what`
    is "norm"."""
    parameter = None
    for bucket in flat.buckets:
        for spec, shard_slice, _ in bucket.shard_ranges:
            if not bucket.shard["grad"][shard_slice].isfinite().all():
                parameter = spec.name
    found = all_gather_object((local_loss, parameter))
    for rank, (loss, name) in enumerate(found):
        if not math.isfinite(loss):
            return dict(what="loss", rank=rank, parameter=name)
    for rank, (_, name) in enumerate(found):
        if name is not None:
            return dict(what="gradient", rank=rank, parameter=name)
    return dict(what="norm", rank=None, parameter=None)
