"""Splits that files have by their names: train.txt trains, valid.txt validates, and test.txt is
left out.

    c4-train.00000-of-01024.json.gz     c4-validation.00000-of-00008.json.gz
    data/train/part1.txt                data/validation/part1.txt       data/test/part1.txt

- A word counts where it stands alone: latest.txt has none.
- Of folders the outermost decides. Folders in which all files lie tell nothing.
- Names count only if one is of train and another of validation or test.
"""
import os
import re
from collections import Counter
from pathlib import Path

from corpus.notes_and_progress import note

WORDS = dict(train="train|training", val="validation|valid|validate|val|dev|eval",
             test="test|h[eo]ld[-_. ]?out")


def follow_names(files: list[Path]) -> tuple[list[Path], set[Path]]:
    """(the files that are read, those of them that validate), by their names. A note tells what the
    names decide. The set is empty if none validates: then the split is drawn from all."""
    splits = splits_of(files)
    counts = Counter(splits.values())
    if not counts["train"] or not counts["val"] + counts["test"]:
        return files, set()
    told = ", ".join(f"{split or 'without such a name, which train'}: {count:,}"
                     for split, count in counts.items() if count)
    note(f"names of files decide the splits ({told}), and those of test are left out: "
         f"--split-names ignore uses all files alike, with another --out")
    return ([path for path in files if splits[path] != "test"],
            {path for path in files if splits[path] == "val"})


def splits_of(files: list[Path]) -> dict[Path, str | None]:
    """{file: the split that its name says}."""
    parts = {path: Path(os.path.abspath(path)).parts for path in files}
    shared = os.path.commonprefix([one[:-1] for one in parts.values()])     # of tuples of names
    return {path: split_of_parts(parts[path][len(shared):]) for path in files}


def split_of_parts(parts) -> str | None:
    """The split that the first name with a word for one says. A name that has words for several
    says none."""
    for name in parts:
        found = [split for split, words in WORDS.items()
                 if re.search(rf"(?<![^\W_])({words})\d*(?![^\W_])", name.lower())]
        if len(found) == 1:
            return found[0]
    return None
