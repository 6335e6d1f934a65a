"""Failures, and scaling laws."""
import math

RESTART = 300.0         # seconds from a failure until a checkpoint is read
PF_DAY = 1e15 * 86400    # FLOPs


def goodput(pause: float, write: float, read: float, nodes: float, mtbf_hours: float) -> dict:
    """The fraction of time that makes progress, where each node fails every `mtbf_hours`, with the
    best interval between checkpoints (Daly 2006, equations 20 and 37; Young's of 1974,
    sqrt(2 M pause), is its first term).

    Training pauses for `pause` seconds; then threads write for `write` seconds, one checkpoint at a
    time. A failure costs the restart, the `read` seconds, and the progress since the last whole
    checkpoint, which is a write's time older than the last.
    """
    M = mtbf_hours * 3600 / nodes           # seconds between two failures of the job
    root = min(1.0, math.sqrt(pause / (2 * M)))
    interval = max(write, 2 * M * root * (1 + root / 3 + root ** 2 / 9) - pause)
    lost = RESTART + read + write
    progress = (interval / M * math.exp(-(lost + interval + pause) / M)
                / -math.expm1(-(interval + pause) / M))
    return dict(failure_hours=M / 3600, pause_seconds=pause, write_seconds=write,
                read_seconds=read, interval_seconds=interval, goodput=progress)


def chinchilla_loss(parameters: float, tokens: float) -> float:
    """Loss in nats per token that a good run of this size reaches on text of the web: the law that
    Hoffmann et al. 2022 fitted, equation 10 (their tokenizer, 32000 tokens)."""
    return 1.69 + 406.4 / parameters ** 0.34 + 410.7 / tokens ** 0.28


def compute_optimal(flops: float) -> dict[str, float]:
    """Parameters N of the model with the lowest loss that 6 N D = `flops` can buy, by three laws:

    chinchilla      20 tokens per parameter (Hoffmann et al. 2022, table 3, and Chinchilla itself)
    chinchilla_law  the minimum of `chinchilla_loss` (equation 4 there, with rounded constants)
    kaplan          1.3e9 PF-days^0.73 (Kaplan et al. 2020, table 6), without embeddings: too large
    """
    return dict(
        chinchilla=math.sqrt(flops / 6 / 20), kaplan=1.3e9 * (flops / PF_DAY) ** 0.73,
        chinchilla_law=(0.34 * 406.4 / (0.28 * 410.7) * (flops / 6) ** 0.28) ** (1 / 0.62))
