"""All schedules by name, and interleaved 1F1B. parallel.py has GPipe and 1F1B, with drawings.

Interleaved 1F1B: a stage has v chunks of the layers, a, b and so on. Chunk c of stage s has
the layers of stage c p + s of a pipeline of v p stages. An op takes 1 / v of the time, so the
bubble is (p - 1) / (v m + p - 1), for v times the messages. Here two stages have two chunks each:

             F0a F1a F0b F1b F2a .   B0b B0b F3a B1b B1b F2b B0a B0a F3b B1a B1a .   B2b B2b ...
             .   F0a F1a F0b B0b B0b F1b B1b B1b F2a B0a B0a F3a B1a B1a F2b B2b B2b F3b B3b ...
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


SCHEDULES = {"gpipe": gpipe, "1f1b": one_f_one_b, "interleaved": interleaved}


def make_schedule(name: str, grid, num_microbatches: int) -> list[tuple]:
    """The ops of this rank's stage. Without a pipeline each forward is followed by its backward."""
    schedule = SCHEDULES[name] if grid.pp > 1 else one_f_one_b
    return schedule(grid.stage, grid.pp, num_microbatches, grid.chunks)


def split_in_turns(schedule: list[tuple]) -> list[list[tuple]]:
    """Group the ops of an interleaved schedule into turns; a stage exchanges messages after each
    turn. A turn is one op. Where forwards and backwards alternate, it is a forward and the backward
    after it: each stage is two forwards ahead of the next there, so that on NCCL single sends would
    wait for each other."""
    pairs = [(first[0], second[0]) for first, second in pairwise(schedule)]
    alternates = ("B", "F") in pairs
    turns = [schedule[:1]]
    for op, pair in zip(schedule[1:], pairs):
        if alternates and pair == ("F", "B"):
            turns[-1].append(op)
        else:
            turns.append([op])
    return turns
