"""The gradient noise scale: up to which size a batch is worth its work (McCandlish et al. 2018, "An
Empirical Model of Large-Batch Training", appendix A.1). runtime/monitors.py measures it every
--noise-scale steps.

The gradient of a batch of B sequences is the true one, G, plus noise:

    E |G_B|^2 = |G|^2 + tr(Sigma) / B               noise scale = tr(Sigma) / |G|^2

Two batch sizes give both unknowns. The large one is the whole batch, whose norm clipping computes
anyway. The small one is the rows of one dp rank, before the sum over all; with dp 1 it is the first
microbatch. One step's estimates are far off, so each is averaged over the measured steps before the
division.

On such a step the sums over the replicas start after backward, when the parts are measured: no
second backward, but from ZeRO 2 on a rank then holds its whole gradient, and with context
parallelism a copy of it.
"""
import torch

from parallelism.collectives import all_reduce, sum_dtype

MEMORY = 0.95               # of the averages: they are those of about 20 measured steps


class NoiseScale:
    """The averages of a train.Run, from this start of its processes on. `small_squares`: of the
    step, |gradient|^2 of the small batches, summed over them, as `flat` holds it."""

    def __init__(self):
        self.tr_sigma = 0.0         # both are too small at first, but by the same factor
        self.squared_norm = 0.0
        self.small_squares = None

    def before_step(self, run) -> None:
        """On a measured step the all-reduces start after backward."""
        run.flat.sync_at_end = run.is_due(run.config.noise_scale)

    def after_microbatch(self, run, microbatch: int) -> None:
        """With dp 1: measure the first microbatch."""
        if run.flat.sync_at_end and run.grid.dp == 1 and microbatch == 0:
            self.small_squares = local_squares(run.flat)

    def after_backward(self, run) -> None:
        """Otherwise: measure the rows of each dp rank."""
        if run.flat.sync_at_end and run.grid.dp > 1:
            self.small_squares = local_squares(run.flat)
        if run.flat.sync_at_end:
            total = run.sum_across_ranks(dict(squares=self.small_squares))
            self.small_squares = total["squares"]

    def after_step(self, run, batch, stats, row: dict) -> None:
        """Add a measured step, unless it was skipped, and complete its row of metrics.jsonl."""
        if not run.flat.sync_at_end or stats.skipped:
            return
        dp = run.grid.dp
        parts = dp if dp > 1 else len(batch.microbatches)
        # Each was divided by the tokens of the whole batch; there are dp of them.
        small_squares = self.small_squares * (parts / stats.loss_scale) ** 2 / dp
        self.observe(small_squares, stats.grad_norm ** 2, batch.size / parts, batch.size)
        sequences = self.sequences
        tokens = None if sequences is None else sequences * run.model_config.seq_len
        row.update(noise_scale=sequences, noise_scale_tokens=tokens)

    def observe(self, small_squares: float, big_squares: float, small: float, big: float) -> None:
        """Average in |G_small|^2 and |G_big|^2, of batches of so many sequences."""
        squared_norm = (big * big_squares - small * small_squares) / (big - small)
        tr_sigma = (small_squares - big_squares) / (1 / small - 1 / big)
        self.squared_norm += (1 - MEMORY) * (squared_norm - self.squared_norm)
        self.tr_sigma += (1 - MEMORY) * (tr_sigma - self.tr_sigma)

    @property
    def sequences(self) -> float | None:
        """The noise scale; None before the first measurement, or while noise hides the gradient."""
        return self.tr_sigma / self.squared_norm if self.squared_norm > 0 else None


@torch.no_grad()
def local_squares(flat) -> torch.Tensor:
    """The squares of the gradient of this dp rank's rows, before the sum over dp, summed on this
    rank so that the sum over its ranks has each parameter once."""
    grid, counted, replicated, of_heads = flat.grid, [], [], []
    for bucket in flat.buckets:
        grad = bucket.grad
        if grid.cp > 1:                     # each context-parallel rank has a part
            grad = all_reduce(grad.clone(), grid.groups["cp"]).wait()
        if bucket.name == "tied":           # both ends of a pipeline have a part
            grad = all_reduce(grad.clone(), grid.groups["embedding"]).wait()
        for spec in bucket.specs:
            if not spec.is_tied_copy:
                kind = replicated if spec.partition_dim is None else counted
                if spec.grad_covers_own_heads and not grid.sequence_parallel:
                    kind = of_heads
                kind.append(bucket.view(grad, spec).flatten())
    in_parts = replicated if grid.sequence_parallel else of_heads
    if in_parts:                            # each tensor-parallel rank has a part
        total = all_reduce(torch.cat(in_parts), grid.groups["tp"]).wait()
        replicated = [total] if grid.sequence_parallel else [*replicated, total]
    if grid.tp_rank == 0:
        counted += replicated
    pieces = [piece for x in counted for piece in x.split(2 ** 20)]
    dtype = sum_dtype(counted[0].device)
    squares = torch.stack(torch._foreach_norm(pieces, 2, dtype=dtype)).square().sum()
    return squares if grid.cp_rank == 0 else torch.zeros_like(squares)
