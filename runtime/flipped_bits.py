"""Flipped bits: ranks that must hold the same bits compare them before each save, every
--check-every steps, and before they act on a divergence.

A bit that flips in memory, or a processor that errs, changes one copy in silence. The copies that
must be equal, by the group of ranks that hold them:

    replicas     ZeRO 0: parameters, masters, moments; ZeRO 1 and 2: the gathered parameters
    same_experts the same of experts that --ep divides
    tp           the same of LayerNorms, biases after g and positions; with ZeRO, of their shards
                 (on GPUs often not: FlatParameters.tp_copies_are_equal)
    embedding    the same of the token matrix, tied on both ends of a pipeline

Other ZeRO shards and, where there is one replica, the parts that tensor parallelism cuts have no
copy. Once a wrong gradient is in the sum, all replicas share it. Checkpoints were compared before
they were written: from the last one the run repeats its steps, and ends with an undisturbed run's
bits.
"""
from collections import Counter
from itertools import chain
from pathlib import Path

import torch

from base.agreement import all_gather_object
from base.checkpoint_files import list_checkpoints
from base.errors import RunError
from base.options import Config
from model import ceil_div
from parallelism.collectives import to_host
from parallelism.zero import FlatParameters
from runtime import run_state

# Kinds of groups, the one that names a parameter best first: replicas share all gradients, so one
# tensor alone differs.
KINDS = ("replicas", "same_experts", "tp", "embedding")
PIECE = 2 ** 18                         # words that are hashed at once


def hash_bits(x: torch.Tensor) -> torch.Tensor:
    """The sum, modulo 2^64, of a flat tensor's words of 8 bytes, each times its own odd number. One
    flipped bit always changes it. (A word's upper half is first mixed into its lower one: two
    highest bits would cancel.)"""
    words = x.view(torch.int64)
    odd = torch.arange(1, 2 * min(len(words), PIECE), 2, device=x.device)
    total = words.new_zeros(())
    for number, piece in enumerate(words.split(PIECE)):
        total += ((piece ^ (piece >> 32)) * odd[:len(piece)]).sum() * (2 * number + 1)
    return total


def shared_hashes(flat: FlatParameters) -> dict[str, dict]:
    """{kind of group: {(parameter, tensor): hash}}; a group's ranks have the same keys in turn."""
    copies = []                     # [(kind, parameter, its tensor: a name, a buffer, where in it)]
    for bucket in flat.buckets:
        names = ["exp_avg", "exp_avg_sq", "master", "data"]             # cause before effect
        if bucket.shard["master"] is bucket.shard["data"]:
            names.remove("master")
        for spec, part, _ in bucket.shard_ranges:
            has_copies = {bucket.group: flat.zero == 0, "embedding": bucket.name == "tied",
                          "tp": flat.tp_copies_are_equal and spec.partition_dim is None}
            copies += [(kind, spec.name, name, bucket.shard[name], part)
                       for name in names for kind in KINDS if has_copies.get(kind)]
        if flat.zero in (1, 2):
            for spec in bucket.specs:
                first = bucket.offsets[spec.name]
                part = slice(first, first + spec.numel)
                copies.append((bucket.group, spec.name, "data", bucket.data, part))
    shared = {kind: {} for kind in KINDS}
    for kind, parameter, name, tensor, part in copies:
        if flat.grid.groups[kind] is not None:
            end = ceil_div(part.stop, 32) * 32          # whole words: the padding is zero
            value = hash_bits(tensor[part.start:end])   # on the host, with --offload
            shared[kind][parameter, name] = value.to(flat.buckets[0].data.device)
    return shared


def find_difference(flat: FlatParameters, config: Config) -> dict | None:
    """The first tensor whose copies differ, the same on every rank; each must call it. `ranks` have
    another copy than the majority of their group; without one all of the group are named. Ranks
    exchange a number for each of their groups and, only if these differ, all hashes."""
    grid = flat.grid
    if config.check_every == 0 or grid.world == 1:
        return None
    flat.wait_params()
    shared = shared_hashes(flat)
    own = [(kind, tuple(grid.members(kind)),            # and a number of all their hashes
            to_host(hash_bits(torch.stack([*hashes.values()])), config.timeout).item())
           for kind, hashes in shared.items() if hashes]
    found = dict.fromkeys(chain(*all_gather_object(own)))               # what ranks tell alike once
    numbers = Counter((kind, ranks) for kind, ranks, _ in found)        # different ones of a group
    unequal = [group for group, count in numbers.items() if count > 1]
    if not unequal:
        return None
    first = min((kind for kind, _ in unequal), key=KINDS.index)
    tables = all_gather_object({key: value.item() for key, value in shared[first].items()})
    wrong = []                      # [(parameter, tensor, rank)]
    for ranks in [ranks for kind, ranks in unequal if kind == first]:
        for key in tables[ranks[0]]:
            [(value, count)] = Counter(tables[rank][key] for rank in ranks).most_common(1)
            wrong += [(*key, rank) for rank in ranks if count < len(ranks)
                      and (2 * count <= len(ranks) or tables[rank][key] != value)]
    parameter, tensor, _ = wrong[0]
    return dict(ranks=sorted({rank for *_, rank in wrong}), parameter=parameter, tensor=tensor)


def go_back_if_found(run) -> bool:
    """Whether copies differ. The run has then gone back to its last checkpoint. RunError if one of
    these machines was named before."""
    difference = find_difference(run.flat, run.config)
    if difference is None:
        return False
    step = run.progress.step
    host_of = {rank: run.grid.hosts[rank] for rank in difference["ranks"]}
    hosts = sorted(set(host_of.values()))
    ranks = " or ".join(f"rank {rank} on {host}" for rank, host in host_of.items())
    reason = f"{ranks} has a wrong {difference['parameter']} ({difference['tensor']})"
    run.log.event("replicas", step=step, hosts=hosts, **difference)
    accused = run.progress.monitor.accused
    if again := [host for host in hosts if host in accused]:
        run.log.event("stop", step=step, reason=reason)
        raise RunError(f"step {step}: {reason}, as before on {', '.join(again)}: leave this "
                       f"machine out, then give the same command")
    run_state.go_back(run, lambda: list_checkpoints(Path(run.config.out)) or [None])
    run.progress.monitor.accused = [*accused, *hosts]    # the restored state does not have it
    back = run.progress.step
    run.log.event("rollback", f"replicas {reason}: back to step {back}", reason=reason, to=back,
                  step=step)
    return True
