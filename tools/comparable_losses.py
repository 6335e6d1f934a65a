"""Which validation losses can be compared, and how they order runs. tools/compare.py calls it.

Two evaluations are the same test if tokenizer, validation text (with the weights of its sources)
and the sequences read of it are the same. Between runs with the same test the validation loss
decides. Between others it is bits per byte, and a line says what differs; a run that has none
stands apart. A resume may change the test: a run is judged by its evaluations that are the same
test as its last one.

The `data` of an evaluation is that of the last start or resume before it: what
runtime.evaluation.describe_data found, or None, if an older version wrote it.
"""
from collections import defaultdict
from typing import NamedTuple

from tools.metrics import Evaluations, Run, finite


# ---- What an evaluation reads: three keys to compare, and their words ------------------------

def read_sources(data: dict) -> dict[str, dict]:
    """The sources that count in the mean."""
    return {name: source for name, source in data["sources"].items() if source["weight"] > 0}


def tokenizer_key(data: dict) -> tuple:
    return data["tokenizer"], data["vocab_size"]


def tokenizer_words(data: dict) -> str:
    words = f"{data['tokenizer']} with {data['vocab_size']:,} tokens"
    if data["bytes_per_token"]:
        words += f", {data['bytes_per_token']:.2f} bytes a token"
    return words


def text_key(data: dict, one_tokenizer=True) -> tuple:
    """The text of each source is known by a sample of its tokens; where there are several
    tokenizers, by the number of its bytes."""
    key = []
    for source in read_sources(data).values():
        text = source["val_fingerprint"]
        if not one_tokenizer and source["bytes_per_token"]:
            text = f"{source['bytes_per_token'] * source['val_tokens']:.0f} bytes"
        key.append((text, source["weight"]))
    return tuple(sorted(key))


def text_words(data: dict) -> str:
    sources = read_sources(data)
    total = sum(source["weight"] for source in sources.values())
    return " + ".join(f"{source['weight'] / total:.0%} {name}" for name, source in sources.items())


def sample_key(data: dict, one_tokenizer=True) -> tuple:
    """Equal numbers of tokens of two tokenizers are different text."""
    key = []
    for source in read_sources(data).values():
        read = source["sequences"]
        if read == source["all_sequences"]:
            read = "all"
        elif not one_tokenizer:
            read = read, data["tokenizer"]
        key.append((source["val_fingerprint"], read))
    return data["seq_len"], tuple(read for _, read in sorted(key))


def sample_words(data: dict) -> str:
    sources = read_sources(data).values()
    tokens = data["seq_len"] * sum(source["sequences"] for source in sources)
    n_tokens = sum(source["val_tokens"] for source in sources)
    if tokens > n_tokens:           # windows of conversations are padded
        return f"conversations of {n_tokens:,} tokens, in windows of {data['seq_len']}"
    return f"{tokens:,} of {n_tokens:,} tokens, {data['seq_len']} at a time"


def test_key(data: dict | None) -> tuple | None:
    """Equal for evaluations that are the same test; None where it is not known."""
    if data is None:
        return None
    return tokenizer_key(data), text_key(data), sample_key(data)


def have_one_tokenizer(data: list[dict | None]) -> bool:
    """As far as they are known."""
    return len({tokenizer_key(each) for each in data if each is not None}) < 2


# ---- One run --------------------------------------------------------------------------------

class Evaluated(NamedTuple):
    """What a run is judged by."""
    run: Run
    best: dict              # row with the lowest validation loss of those that are the same test as
    last: dict              # ... the last one
    data: dict | None       # of the best
    others: list[Evaluations]       # of another test


def evaluated(run: Run) -> Evaluated | None:
    """None if the run has no validation loss."""
    if not run.evaluations:
        return None
    key = test_key(run.evaluations[-1].data)
    same = [each for each in run.evaluations if test_key(each.data) == key]
    others = [each for each in run.evaluations if test_key(each.data) != key]
    found = min(same, key=lambda each: each.best["val_loss"])
    return Evaluated(run, found.best, same[-1].last, found.data, others)


def change_of_test(found: Evaluated) -> list[str]:
    """A line if a resume changed the test."""
    if not found.others:
        return []
    reason = "read other text or tokens (--data, --eval-tokens)"
    if any(each.data is None for each in found.others):
        reason = "do not say what they read (an older version wrote them)"
    return [f"{found.run.name}: evaluations up to step {found.others[-1].last['step']} {reason}: "
            f"they are left out of its best"]


# ---- Several runs ---------------------------------------------------------------------------

def difference(what: str, known: list[Evaluated], key, words) -> list[str]:
    """A line that tells which runs differ in this, if some do."""
    groups = defaultdict(list)
    for found in known:
        groups[key(found.data)].append(found)
    if len(groups) < 2:
        return []
    parts = [f"{words(group[0].data)} ({', '.join(found.run.name for found in group)})"
             for group in groups.values()]
    return [f"different {what}: {'; '.join(parts)}"]


def order(runs: list) -> tuple[list[str], list[tuple[str, list]]]:
    """Lines on what cannot be compared, and the runs in sections (heading, runs): runs of one
    section can be compared, and its best is first. A single section has no heading."""
    judged = [found for found in map(evaluated, runs) if found is not None]
    judged.sort(key=lambda found: found.best["val_loss"])
    rest = [run for run in runs if evaluated(run) is None]
    known = [found for found in judged if found.data is not None]
    notes = [line for found in judged for line in change_of_test(found)]
    tests = defaultdict(list)
    for found in judged:
        tests[test_key(found.data)].append(found)
    if len(judged) < 2 or len(tests) == 1 and known:
        return notes, [("", [found.run for found in judged] + rest)]

    one = have_one_tokenizer([found.data for found in known])
    unknown = [found.run.name for found in tests[None]]
    if unknown:
        notes.append(f"what the evaluations of {', '.join(unknown)} read is not known (an older "
                     f"version did not write it)")
    notes += difference("tokenizers", known, tokenizer_key, tokenizer_words)
    notes += difference("validation text", known, lambda data: text_key(data, one), text_words)
    notes += difference("samples of the validation text", known,
                        lambda data: sample_key(data, one), sample_words)
    measured = [found for found in judged if finite(found.best, "bits_per_byte") is not None]
    measured.sort(key=lambda found: found.best["bits_per_byte"])
    if len(measured) > 1 and (unknown or len({test_key(found.data) for found in measured}) > 1):
        notes.append("so the order is by bits a byte, not by nats a token")
    sections = [("", [found.run for found in measured])]
    for key, group in tests.items():
        why = "conversations, or shards without meta.json"
        if key is None:
            why = "an older version wrote none"
        sections.append((f"apart, by nats a token: no bits a byte ({why})",
                         [found.run for found in group if found not in measured]))
    sections.append(("without an evaluation", rest))
    sections = [(heading, section) for heading, section in sections if section]
    if len(sections) == 1:
        sections = [("", sections[0][1])]
    return notes, sections
