"""The rows of a batch that this rank reads, as microbatches.

The next batch is loaded while the GPU computes. Stages in the middle of a pipeline load theirs too,
for its shape alone.
"""
from dataclasses import dataclass

import numpy as np
import torch

from base.options import Config
from data import Batch, Batches, TokenDataset
from model import GPTConfig, derive_seed
from parallel import Grid, cut_sequence


@dataclass
class Loader:
    """Loads batches where `batches` says that the run is in its data."""
    config: Config
    model_config: GPTConfig
    grid: Grid
    device: torch.device
    prefetched: Batch | None = None     # the batch of the next step, once it is loaded

    def next(self, batches: Batches, step: int) -> Batch:
        """The batch of this step. It is usually loaded during the step before, and loaded again if
        sequences were left out since. Moves `batches` past it."""
        batch = self.prefetched
        if batch is None or batch.step != step or batch.start != batches.consumed:
            batch = self.load(batches, step)
        batches.consumed += batch.size
        batches.sequences_trained += batch.size
        return batch

    def prefetch(self, batches: Batches, step: int) -> None:
        """Load the batch of this step, if the run has it."""
        if step <= self.config.steps:
            self.prefetched = self.load(batches, step)

    def load(self, batches: Batches, step: int) -> Batch:
        """Load the next batch of the data. `step` seeds its dropout."""
        data = batches.data
        window_ids = data.window_ids(self.config.seed, batches.consumed, batches.next_size())
        return Batch(step, batches.consumed, window_ids, data.count_targets(window_ids),
                     len(window_ids) * data.seq_len, self.microbatches(data, window_ids, step))

    def microbatches(self, dataset: TokenDataset, window_ids: np.ndarray, step: int | None) -> list:
        """This rank's rows of the batch `window_ids` (B,), as a list of microbatches: (inputs
        (b, T), targets (b, T), dropout seed, positions (b, T) of conversations or None). With --cp
        inputs and targets have this rank's T / cp positions. `positions` stays whole, because
        attention reads the keys of all."""
        grid = self.grid
        # The first microbatches of all ranks are the first dp x b windows, and so on.
        own_windows = window_ids.reshape(-1, grid.dp, self.config.micro_batch)[:, grid.dp_rank]
        microbatches = []
        for m, ids in enumerate(own_windows):
            *rows, positions = dataset.rows(ids)
            inputs, targets = [
                to_device(cut_sequence(torch.from_numpy(x), grid.cp_rank, grid.cp), self.device)
                for x in rows]
            if positions is not None:
                positions = to_device(torch.from_numpy(positions), self.device)
            microbatches.append((inputs, targets, self.dropout_seed(step, m), positions))
        return microbatches

    def dropout_seed(self, step: int | None, microbatch: int) -> int | None:
        """The seed of a microbatch's first row: it belongs to the row of the batch, so dp and the
        size of a microbatch change no mask. Ranks with the same activations must draw the same
        masks. Ranks with different positions must not: those of a cp group, and with sequence
        parallelism of a tp group. None without dropout, as in an evaluation, which is no step:
        --compile would compile again for a number that changes."""
        grid = self.grid
        if self.model_config.dropout == 0 or step is None:
            return None
        first_row = (microbatch * grid.dp + grid.dp_rank) * self.config.micro_batch
        key = [self.config.seed, step]
        if grid.cp > 1:
            key.append(grid.cp_rank)
        if grid.sequence_parallel:
            key.append(grid.tp_rank)
        return derive_seed(*key) + first_row


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor to the device; a GPU's copy runs beside its other work."""
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
