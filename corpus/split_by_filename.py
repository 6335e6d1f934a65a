"""Splits that files have by their names: train.txt trains, valid.txt validates, and test.txt is
left out.

    c4-train.00000-of-01024.json.gz     c4-validation.00000-of-00008.json.gz
    wiki.train.tokens                   wiki.valid.tokens               wiki.test.tokens
    data/train/part1.txt                data/validation/part1.txt

- A word counts where it stands alone: latest.txt and trainings.md have none.
- Of folders the outermost decides: validation/chunk1/example_holdout_0.jsonl of SlimPajama
  validates. Folders in which all files lie tell nothing.
- Names count only if one is of train and another of validation or test.
- Programs have such names, too: train.py beside test_x.py. So names of files that are not READ
  count only if all of the same ending have one.
"""
import os
import re
from collections import Counter
from pathlib import Path

from corpus.file_kinds import READ, kind_of
from corpus.notes_and_progress import note

WORDS = dict(train="train|training", val="validation|valid|validate|val|dev|eval",
             test="test|h[eo]ld[-_. ]?out")


def follow_names(files: list[Path]) -> tuple[list[Path], set[Path]]:
    """(the files that are read, those of them that validate), by their names. A note tells what the
    names decide. The set is empty if none validates: then the split is drawn from all."""
    splits = splits_of(files)
    files_of = {split: [path for path in files if splits[path] == split]
                for split in (*WORDS, None)}
    named = files_of["val"] + files_of["test"]
    if not named or not files_of["train"]:
        if named and len(files) > 1:
            note(f"{count(named)} by name for validation or test, but none is for training, so all "
                 f"are used alike: if they are, put the other files in a folder train")
        return files, set()
    told = [f"train: {count(files_of['train'])}"]
    if files_of[None]:
        told.append(f"without such a name, these train, too: {count(files_of[None])}")
    if files_of["val"]:
        told.append(f"validation: {count(files_of['val'])}")
    if files_of["test"]:
        told.append(f"test, which is left out: {count(files_of['test'])}")
    note(f"names of files decide the split ({'; '.join(told)}): --split-names ignore uses all "
         f"files alike, with another --out")
    return [path for path in files if splits[path] != "test"], set(files_of["val"])


def count(files: list[Path]) -> str:
    noun = "file" if len(files) == 1 else "files"
    return f"{len(files):,} {noun} ({files[0]})"


def splits_of(files: list[Path]) -> dict[Path, str | None]:
    """{file: the split that its name says}."""
    parts = {path: Path(os.path.abspath(path)).parts for path in files}
    shared = os.path.commonprefix([one[:-1] for one in parts.values()])     # of tuples of names
    splits = {path: split_of_parts(parts[path][len(shared):]) for path in files}
    without = Counter(kind_of(path.name) for path in files if splits[path] is None)
    for path in files:
        kind = kind_of(path.name)
        if kind not in READ and without[kind] > 0:
            splits[path] = None
    return splits


def split_of_parts(parts) -> str | None:
    """The split that the first name with a word for one says. A name that has words for several
    says none."""
    for name in parts:
        found = [split for split, words in WORDS.items()
                 if re.search(rf"(?<![^\W_])({words})\d*(?![^\W_])", name.lower())]
        if len(found) == 1:
            return found[0]
    return None
