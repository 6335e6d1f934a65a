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


def sequences_after(config, sequences_trained: int, steps: int) -> int:
    """Sequences trained on after `steps` more steps."""
    _, ramp = batch_sizes(config)
    while steps > 0 and sequences_trained < ramp:
        sequences_trained += batch_size_at(config, sequences_trained)
        steps -= 1
    return sequences_trained + steps * config.batch_size


def steps_of_epochs(config, data, state: dict | None) -> int:
    """The steps of a run that trains on the data.TokenDataset --epochs times."""
    step = trained = 0
    if state is not None:
        step, trained = state["step"], state["tokens"] // state["model"]["seq_len"]
    epoch = sum(source.n_windows for source in data.mixture.sources.values() if source.weight > 0)
    end, (_, ramp) = config.epochs * epoch, batch_sizes(config)
    while trained < min(end, ramp):
        trained += batch_size_at(config, trained)
        step += 1
    return step + math.ceil(max(0, end - trained) / config.batch_size)
