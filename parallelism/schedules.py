"""Two more schedules than parallel.py's GPipe and 1F1B, which has their drawings.

Interleaved 1F1B: a stage has v chunks of the layers, a, b and so on. Chunk c of stage s has
the layers of stage c p + s of a pipeline of v p stages. An op takes 1 / v of the time, so the
bubble is (p - 1) / (v m + p - 1), for v times the messages. Here two stages have two chunks each:

             F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b ...
             .   F0a F1a F0b B0b B0b F1b B1b B1b F2a B0a B0a F3a B1a B1a F2b B2b B2b F3b B3b ...

ZB-H1: B leaves out the gradients of the linear layers' weights, for which no stage waits; W
computes them later. If F, B and W take one unit each and m >= p, the bubble is
(p - 1) / (3 m + p - 1). Each stage keeps the activations of p microbatches, until their W. With
sequence parallelism it keeps more: the dy that wait for W hold all positions.

    ZB-H1    F0 F1 F2 .  .  B0 W0 F3 B1 W1 F4 B2 W2 B3 W3 B4 W4
             .  F0 F1 .  B0 F2 B1 W0 F3 B2 W1 F4 B3 W2 B4 W3 W4
             .  .  F0 B0 F1 B1 F2 B2 W0 F3 B3 W1 F4 B4 W2 W3 W4
"""
from itertools import pairwise

import parallel


def gpipe(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    return parallel.gpipe(stage, stages, num_microbatches)


def one_f_one_b(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    return parallel.one_f_one_b(stage, stages, num_microbatches)


def interleaved(stage: int, stages: int, num_microbatches: int, chunks: int) -> list[tuple]:
    """Narayanan et al. 2021, section 2.2: groups of `stages` microbatches pass through chunk 0,
    then 1 and so on. The first microbatches have to reach the last chunk, and each later stage adds
    two turns: an activation travels there, and its gradient back."""
    forwards = [("F", m, chunk) for first in range(0, num_microbatches, stages)
                for chunk in range(chunks)
                for m in range(first, min(first + stages, num_microbatches))]
    backwards = [("B", m, chunks - 1 - chunk) for _, m, chunk in forwards]
    return parallel.in_turn(forwards, backwards,
                            ahead=(chunks - 1) * stages + 2 * (stages - 1 - stage))


def zb_h1(stage: int, stages: int, num_microbatches: int, chunks: int = 1) -> list[tuple]:
    """ZB-H1 (Qi et al. 2024, section 2.1): 1F1B, with each W postponed by `stage`
    microbatches. Earlier stages wait for the first gradients, so later stages run B before W."""
    ops = []
    for op, m, chunk in one_f_one_b(stage, stages, num_microbatches):
        ops.append((op, m, chunk))
        if op == "B" and m >= stage:
            ops.append(("W", m - stage, chunk))
    return ops + [("W", m, 0) for m in range(max(0, num_microbatches - stage), num_microbatches)]


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved, "zb-h1": zb_h1}


def make_schedule(name: str, grid, num_microbatches: int) -> list[tuple]:
    """The ops of this rank's stage. Without a pipeline each forward is followed by its backward."""
    schedule = SCHEDULES[name] if grid.pp > 1 else one_f_one_b
    return schedule(grid.stage, grid.pp, num_microbatches, grid.chunks)


def split_in_turns(schedule: list[tuple], chunks: int) -> list[list[tuple]]:
    """Group the ops into turns; a stage exchanges messages after each turn. A turn is one op, after
    any W: messages travel meanwhile. Where an interleaved schedule alternates, it is a forward and
    the backward after it: each stage is two forwards ahead of the next there, so that on NCCL
    single sends would wait for each other."""
    pairs = [(first[0], second[0]) for first, second in pairwise(schedule)]
    joined = [("F", "B")] if chunks > 1 and ("B", "F") in pairs else []
    turns = [schedule[:1]]
    for op, pair in zip(schedule[1:], pairs):
        if pair in joined or pair[0] == "W":
            turns[-1].append(op)
        else:
            turns.append([op])
    return turns
