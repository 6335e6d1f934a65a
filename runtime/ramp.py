"""Steps and sequences where the batch size ramps: how many of one a number of the other is. The
batches themselves are data.py's. checks, console and rollback call it."""
import math

from data import TokenDataset, batch_size_at, batch_sizes
from model import ceil_div


def equal_steps(config, sequences_trained: int):
    """Yield (batch size, number of steps that have it) from here on, without an end: a ramp has few
    sizes, however many steps a run has."""
    sizes, ramp = batch_sizes(config)
    increments = len(sizes) - 1
    while sequences_trained < ramp and increments > 0:
        size = batch_size_at(config, sequences_trained)
        next_size_from = ceil_div((sizes.index(size) + 1) * ramp, increments)
        steps = ceil_div(next_size_from - sequences_trained, size)
        yield size, steps
        sequences_trained += steps * size
    yield sizes[-1], math.inf


def sequences_after(config, sequences_trained: int, steps: int) -> int:
    """Sequences trained on after `steps` more steps."""
    for size, most in equal_steps(config, sequences_trained):
        count = min(steps, most)
        sequences_trained += count * size
        steps -= count
        if steps == 0:
            return sequences_trained


def steps_of_epochs(config, data: TokenDataset, state: dict | None) -> int:
    """The steps of a run that trains on the data --epochs times."""
    step = 0
    sequences_trained = 0
    if state is not None:
        step = state["step"]
        sequences_trained = state["tokens"] // state["model"]["seq_len"]
    epoch = sum(source.n_windows for source in data.sources.values() if source.weight > 0)
    left = config.epochs * epoch - sequences_trained
    for size, most in equal_steps(config, sequences_trained):
        count = min(max(ceil_div(left, size), 0), most)
        step += count
        left -= count * size
        if left <= 0:
            return step
