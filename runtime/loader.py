"""The rows of a batch that this rank reads, as microbatches.

The next batch is loaded while the GPU computes, and its windows are announced to the disk before.
"""
import numpy as np
import torch

from data import Batch, TokenDataset, split_microbatches
from model import derive_seed
from parallelism.context import cut_sequence
from runtime import rollback


class Loader:
    """Loads the batches of `run`, a train.Run.

    prefetched      the batch of the next step, once it is loaded
    """

    def __init__(self, run):
        self.run = run
        self.prefetched = None

    def next(self) -> Batch:
        """The batch of this step. It is usually loaded during the step before, and loaded again if
        it has sequences that are to be left out."""
        rollback.skip_excluded(self.run)
        run, batch = self.run, self.prefetched
        if batch is None or batch.step != run.step or batch.start != run.batches.consumed:
            batch = self.load(run.step)
        run.batches.move_past(batch)
        return batch

    def prefetch(self) -> None:
        """Load the batch of the next step, if there is one."""
        if self.run.step < self.run.config.steps:
            self.prefetched = self.load(self.run.step + 1)

    def load(self, step: int) -> Batch:
        """Load the next batch of the data. `step` seeds its dropout."""
        window_ids = self.run.batches.next_window_ids()
        microbatches = self.microbatches(self.run.train_data, window_ids, step)
        return Batch(step, self.run.batches.consumed, window_ids, microbatches)

    def microbatches(self, dataset: TokenDataset, window_ids: np.ndarray, step: int) -> list:
        """This rank's rows of the batch `window_ids` (B,), as a list of microbatches: (inputs
        (b, T), targets (b, T), dropout seed, positions (b, T) of conversations or None). With --cp
        inputs and targets have this rank's T / cp positions. `positions` stays whole, because
        attention reads the keys of all."""
        grid = self.run.grid
        # The stages in the middle of a pipeline need no tokens, only conversations' positions.
        reads_rows = grid.is_first or grid.is_last or dataset.has_conversations
        own_windows = split_microbatches(window_ids, self.run.config.micro_batch, grid.dp_rank,
                                         grid.dp)                               # (m, b)
        microbatches = []
        for m, ids in enumerate(own_windows):
            inputs, targets, positions = None, None, None
            if reads_rows:
                inputs, targets, positions = as_tensors(dataset.rows(ids))
                inputs = cut_sequence(inputs, grid.cp_rank, grid.cp)
                targets = cut_sequence(targets, grid.cp_rank, grid.cp)
                inputs, targets, positions = (to_device(x, self.run.device)
                                              for x in (inputs, targets, positions))
            microbatches.append((inputs, targets, self.dropout_seed(step, m), positions))
        return microbatches

    def dropout_seed(self, step: int, microbatch: int) -> int | None:
        """The seed of a microbatch's first row: it belongs to the row of the batch, so dp and the
        size of a microbatch change no mask. Ranks with the same activations must draw the same
        masks. Ranks with different positions must not: those of a cp group, and with sequence
        parallelism of a tp group. None without dropout: --compile would compile again for a number
        that changes."""
        grid = self.run.grid
        if self.run.model_config.dropout == 0:
            return None
        first_row = (microbatch * grid.dp + grid.dp_rank) * self.run.config.micro_batch
        key = [self.run.config.seed, step]
        if grid.cp > 1:
            key.append(grid.cp_rank)
        if grid.sequence_parallel:
            key.append(grid.tp_rank)
        return derive_seed(*key) + first_row


def as_tensors(rows: tuple) -> list:
    """Arrays to tensors. None stays None."""
    return [None if x is None else torch.from_numpy(x) for x in rows]


def to_device(x: torch.Tensor | None, device: torch.device) -> torch.Tensor | None:
    """Copy a CPU tensor to the device; a GPU's copy runs beside its other work."""
    if x is None:
        return None
    if device.type == "cuda":
        x = x.pin_memory()
    return x.to(device, non_blocking=True)
