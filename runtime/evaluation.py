"""Evaluation: the loss on fixed validation windows, also in bits per byte.

A loss in nats per token depends on the tokenizer: a token of GPT-2 stands for about four bytes.

    bits per byte = nats per token / ln 2 / bytes per token
"""
import hashlib
import math

import numpy as np
import torch

from base.options import Config
from corpus.mixtures import NO_WINDOW, Source
from data import Batches, TokenDataset
from model import GPT
from parallelism.pipeline import run_pipeline
from runtime.loader import Loader
from runtime.signals import StopSignal
from runtime.step_stats import sum_across_ranks

DEFAULT_SEQUENCES = 128         # of each source
MICROBATCHES = 64               # on each rank, for each all-reduce
SAMPLED_BLOCKS, BLOCK_TOKENS = 64, 256          # of each shard, for its fingerprint


def evaluate(model: GPT, data: TokenDataset, loader: Loader, batches: Batches,
             stop: StopSignal, may_end: bool = False) -> dict:
    """Evaluate the model -> the fields of a row of metrics.jsonl: `val_loss`, the weighted mean of
    the sources of `data`, and the same as `bits_per_byte`, None where the text's bytes are unknown;
    with several also both, and the epochs of the training data, of each, up to `batches`. The run's
    `loader` divides the data among the ranks. If one has a signal, all have stop.agreed then. A
    long evaluation that `may_end` ends there, without fields: the run saves at once."""
    sources = list(data.mixture.sources.values())
    losses = [evaluate_source(model, data, source, loader, stop, may_end) for source in sources]
    if None in losses:
        return {}
    mean = data.mixture.average(losses)
    row = dict(val_loss=mean, bits_per_byte=bits_per_byte(mean, data.meta["bytes_per_token"]))
    if len(sources) > 1:
        for source, loss in zip(sources, losses):
            row[f"val_loss/{source.name}"] = loss
            row[f"bits_per_byte/{source.name}"] = bits_per_byte(loss,
                                                                source.meta["bytes_per_token"])
        epochs = batches.data.mixture.epochs(batches.consumed)
        row.update({f"epochs/{name}": count for name, count in epochs.items()})
    return row


@torch.no_grad()
def evaluate_source(model: GPT, data: TokenDataset, source: Source, loader: Loader,
                    stop: StopSignal, may_end: bool) -> float | None:
    """Mean loss in nats on fixed validation windows, the same in every layout. None if a signal
    came before its last part, and it `may_end`."""
    grid, config = loader.grid, loader.config
    model.eval()
    count = eval_sequences(config, data.seq_len, source.n_windows)
    at_once = grid.dp * config.micro_batch              # a microbatch for each dp rank
    evenly_spaced = np.linspace(0, source.n_windows - 1, count).astype(np.int64)
    window_ids = np.append(source.first + evenly_spaced, np.full(-count % at_once, NO_WINDOW))
    targets = data.count_targets(window_ids)
    if config.exact:
        grid.exact.set_units(1.0, count * data.seq_len, targets)
    total = 0.0
    part = MICROBATCHES * at_once           # in parts, so that --timeout applies to each part
    for first in range(0, len(window_ids), part):
        microbatches = loader.microbatches(data, window_ids[first:first + part], step=None)
        loss_sum = run_pipeline(config.pp_schedule, model, grid, microbatches)
        if grid.tp_rank > 0:                # all tp ranks have the same loss: count it once
            loss_sum.zero_()
        if config.exact:
            loss_sum = grid.exact.checked(loss_sum)
        # Every rank calls it, also one without a loss: it carries the signals (StopSignal).
        total += sum_across_ranks(dict(loss=loss_sum), grid, config.timeout, stop)["loss"]
        if may_end and stop.agreed and first + part < len(window_ids):
            total = None
            break
    model.train()
    return None if total is None else total / targets


def eval_sequences(config: Config, seq_len: int, n_windows: int) -> int:
    """Number of validation sequences that an evaluation reads of a source of so many windows."""
    if config.eval_tokens is not None:
        return min(n_windows, math.ceil(config.eval_tokens / seq_len))
    return n_windows if config.eval_only else min(n_windows, DEFAULT_SEQUENCES)


def bits_per_byte(loss: float, bytes_per_token: float | None) -> float | None:
    """A loss in nats per token in another unit; None where the text's bytes are unknown. Of a
    mixture both arguments are weighted means over the sources."""
    return loss / math.log(2) / bytes_per_token if bytes_per_token else None


def perplexity(loss: float) -> float:
    """exp of a loss in nats per token; inf where a float holds no such number."""
    return math.exp(loss) if loss < 700 else math.inf


def describe_data(data: TokenDataset, config: Config) -> dict:
    """What a run is evaluated on, its validation `data`, for the event of a start or a resume: two
    evaluations can be compared if tokenizer, seq_len, and each source's weight, validation shards
    and sequences are equal."""
    sources = {
        source.name: dict(
            weight=source.weight, bytes_per_token=source.meta["bytes_per_token"],
            fingerprint=source.meta["fingerprint"],
            val_fingerprint=sampled_fingerprint(source.windows.arrays()),
            val_tokens=sum(map(len, source.windows.shards)), all_sequences=source.n_windows,
            sequences=eval_sequences(config, data.seq_len, source.n_windows))
        for source in data.mixture.sources.values()}
    return dict(tokenizer=data.meta["tokenizer"], vocab_size=data.meta["vocab_size"],
                bytes_per_token=data.meta["bytes_per_token"], seq_len=data.seq_len,
                sources=sources)


def sampled_fingerprint(arrays) -> str:
    """A hash of each array's length and of parts evenly spaced in it. Unlike a hash of all tokens
    it takes no time; unlike that in meta.json it does not depend on the training shards."""
    digest = hashlib.sha256()
    for array in arrays:
        digest.update(f"{len(array)} ".encode())
        for start in np.linspace(0, len(array), SAMPLED_BLOCKS, endpoint=False).astype(int):
            digest.update(array[start:start + BLOCK_TOKENS].tobytes())
    return digest.hexdigest()[:16]
