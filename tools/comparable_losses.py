"""Which validation losses can be compared, and how they order runs.

Two evaluations are the same test if tokenizer, validation text (with the weights of its sources)
and the sequences read of it are the same. Between runs with the same test the validation loss
decides. Between others it is bits per byte, and a line says what each has read. A run that has no
bits per byte stands apart. A resume may change the test: a run is judged by its evaluations that
are the same test as its last one.
"""
from typing import NamedTuple

from tools.metrics import Run, finite

APART = "not comparable with these: no bits a byte, or no evaluation"


def read_sources(data: dict) -> dict[str, dict]:
    """The sources that count in the mean."""
    return {name: source for name, source in data["sources"].items() if source["weight"] > 0}


def test_of(data: dict | None) -> tuple | None:
    """Equal for evaluations that are the same test; None where it is not known. `data`: what
    runtime.evaluation.describe_data found."""
    if data is None:
        return None
    read = [(source["val_fingerprint"], source["weight"], source["sequences"])
            for source in read_sources(data).values()]
    return data["tokenizer"], data["vocab_size"], data["seq_len"], tuple(sorted(read))


def in_words(data: dict | None) -> str:
    """What an evaluation has read."""
    if data is None:
        return "what metrics.jsonl does not say"
    sources = read_sources(data)
    total = sum(source["weight"] for source in sources.values())
    names = " + ".join(f"{source['weight'] / total:.0%} {name}" for name, source in sources.items())
    sequences = sum(source["sequences"] for source in sources.values())
    return (f"{sequences:,} windows of {data['seq_len']} tokens of {names} by {data['tokenizer']} "
            f"with {data['vocab_size']:,} tokens")


class Evaluated(NamedTuple):
    """What a run is judged by."""
    run: Run
    data: dict | None       # of the last evaluation
    best: dict              # row with the lowest validation loss of those of the same test
    last: dict              # row
    others: list            # (data, row) of another test


def evaluated(run: Run) -> Evaluated | None:
    """None if the run has no validation loss."""
    evaluations = run.evaluations()
    if not evaluations:
        return None
    data, last = evaluations[-1]
    same = [row for of, row in evaluations if test_of(of) == test_of(data)]
    others = [(of, row) for of, row in evaluations if test_of(of) != test_of(data)]
    return Evaluated(run, data, min(same, key=lambda row: row["val_loss"]), last, others)


def order(runs: list[Run]) -> tuple[list[str], list[tuple[str, list[Run]]]]:
    """Lines on what cannot be compared, and the runs in sections (heading, runs): runs of one
    section can be compared, and its best is first."""
    judged = sorted(filter(None, map(evaluated, runs)), key=lambda found: found.best["val_loss"])
    rest = [run for run in runs if evaluated(run) is None]
    notes = [f"{found.run.name}: evaluations up to step {found.others[-1][1]['step']} read "
             f"{in_words(found.others[-1][0])}: they are left out of its best"
             for found in judged if found.others]
    tests = {}
    for found in judged:
        tests.setdefault(test_of(found.data), []).append(found)
    if len(tests) < 2:              # all can be compared
        return notes, [("", [found.run for found in judged] + rest)]
    parts = [f"{in_words(group[0].data)} ({', '.join(found.run.name for found in group)})"
             for group in tests.values()]
    notes.append(f"the evaluations read {'; '.join(parts)}")
    measured = [found for found in judged if finite(found.best, "bits_per_byte") is not None]
    measured.sort(key=lambda found: found.best["bits_per_byte"])
    if len(measured) > 1:
        notes.append("so the order is by bits a byte, not by nats a token")
    apart = [found.run for found in judged if found not in measured] + rest
    return notes, [section for section in (("", [found.run for found in measured]), (APART, apart))
                   if section[1]]
