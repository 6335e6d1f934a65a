"""--batch-ramp: the size of each batch, and how many steps a number of sequences makes. `config`
has train.py's flags."""
import math


def batch_sizes(config) -> tuple[range, int]:
    """The batch sizes of the ramp, and its length; both in sequences. Without a ramp there is one
    size. --batch-ramp START:INCREMENT:SEQUENCES is Megatron-LM's --rampup-batch-size (GPT-3: Brown
    et al. 2020, section 2.3)."""
    if config.batch_ramp is None:
        return range(config.batch_size, config.batch_size + 1), 1
    start, increment, sequences = map(int, config.batch_ramp.split(":"))
    return range(start, config.batch_size + 1, increment), sequences


def batch_size_at(config, sequences_trained: int) -> int:
    """Size of the next batch after training on so many sequences."""
    sizes, ramp = batch_sizes(config)
    return sizes[min(sequences_trained, ramp) * (len(sizes) - 1) // ramp]


def divide_up(n: int, divisor: int) -> int:      # model.ceil_div, without torch
    return (n + divisor - 1) // divisor


def equal_steps(config, sequences_trained: int):
    """Yield (batch size, number of steps that have it) from here on, without an end: a ramp has few
    sizes, however many steps a run has."""
    sizes, ramp = batch_sizes(config)
    increments = len(sizes) - 1
    while sequences_trained < ramp and increments > 0:
        size = batch_size_at(config, sequences_trained)
        next_size_from = divide_up((sizes.index(size) + 1) * ramp, increments)
        steps = divide_up(next_size_from - sequences_trained, size)
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


def steps_of_epochs(config, data, state: dict | None) -> int:
    """The steps of a run that trains on the data.TokenDataset --epochs times."""
    step = sequences_trained = 0
    if state is not None:
        step = state["step"]
        sequences_trained = state["tokens"] // state["model"]["seq_len"]
    epoch = sum(source.n_windows for source in data.mixture.sources.values() if source.weight > 0)
    left = config.epochs * epoch - sequences_trained
    for size, most in equal_steps(config, sequences_trained):
        count = min(max(divide_up(left, size), 0), most)
        step += count
        left -= count * size
        if left <= 0:
            return step
