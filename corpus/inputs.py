"""Which files data.py reads, and which of them validate.

It reads the files that --input names, those of folders, or the standard library's own source. Of a
folder the known kinds are read, or else its files of text, such as .md and .py. Names of files may
say the split: train.txt trains, valid.txt validates, and test.txt is left out.

    c4-train.00000-of-01024.json.gz     c4-validation.00000-of-00008.json.gz
    data/train/part1.txt                data/validation/part1.txt       data/test/part1.txt

- A word counts where it stands alone: latest.txt has none.
- Of folders the outermost decides. Folders in which all files lie tell nothing.
- Names count only if one is of train and another of validation or test.
"""
import codecs
import os
import re
import shlex
import sysconfig
from collections import Counter
from contextlib import suppress
from pathlib import Path

from corpus import counted, note
from corpus.chat_records import form_of
from corpus.documents import first_record, is_conversation
from corpus.file_formats import BLOCK, READ_KINDS, RECORDS, TEXT_TABLES, kind_of, open_bytes

WORDS = dict(train="train|training", val="validation|valid|validate|val|dev|eval",
             test="test|h[eo]ld[-_. ]?out")


def find_files(paths, field="text") -> list[Path]:
    """These files and those in these folders, each once. A note tells what is skipped. Raises
    ValueError."""
    files = {}              # {path without links: path}
    for path in paths:
        if not path.exists():
            raise ValueError(f"there is no file or folder {path}")
        if not path.is_file() and not path.is_dir():        # reading it could wait for ever
            raise ValueError(f"{path} is no file: the text is read twice, so write it to a file "
                             f"and give that")
        if kind_of(path) in TEXT_TABLES:
            raise ValueError(
                f"{path} is a table: python -c \"import csv, json, sys; csv.field_size_limit(2**31 "
                f"- 1); sys.stdin.reconfigure(encoding='utf-8-sig', newline=''); [print(json.dumps("
                f"row)) for row in csv.DictReader(sys.stdin, delimiter='"
                f"{TEXT_TABLES[kind_of(path)]}')]\" < {shlex.quote(str(path))} > NEW.jsonl || rm "
                f"NEW.jsonl makes lines of it, and --text-field names the column with the text")
        found = walk(path, field) if path.is_dir() else [path]
        for one in found:
            files.setdefault(os.path.realpath(one), one)
    return list(files.values())


def walk(top: Path, field: str) -> list[Path]:
    """The files in a folder that are read, in the order of their names. Raises ValueError if there
    is none."""
    paths = [path for path in sorted(top.rglob("*")) if not path.is_dir()
             and not any(part.startswith(".") for part in path.relative_to(top).parts)]
    found = [path for path in paths if is_read(path, field)]
    as_text = ""
    if not found:
        found = [path for path in paths if is_text(path)]
        as_text = f" as text ({tell_kinds(found)})"
    read = set(found)
    skipped = tell_kinds(path for path in paths if path not in read)
    if not found:
        raise ValueError(f"{top} holds {skipped or 'nothing'}: only {READ_KINDS} are read, and "
                         f"files of text where there are none of these")
    told = f"{top}: {counted(len(found), 'file')} read{as_text}"
    if skipped:
        told += f"; skipped: {skipped}: name a file of text in --input, and it is read, too"
    if skipped or as_text:
        note(told)
    return found


def tell_kinds(paths) -> str:
    """How many files there are of each kind, such as "12 .md, 3 .py"."""
    counts = Counter(kind_of(path) or path.name for path in paths)
    return ", ".join(f"{count:,} {kind}" for kind, count in counts.most_common(8))


def is_read(path: Path, field: str) -> bool:
    """Whether a file of a folder is of a kind that is read."""
    if not path.is_file() or path.name.startswith("cache-"):    # a link to nowhere; of `datasets`
        return False
    if kind_of(path) == ".json":        # otherwise it holds the settings of some program
        with suppress(ValueError):
            record = first_record(path)
            return isinstance(record.get(field), str) or is_conversation(record)
        return False
    return kind_of(path) in (".txt", *RECORDS)


def is_text(path: Path) -> bool:
    """Whether a file of a folder begins as text, and is none of records or settings."""
    if not path.is_file() or kind_of(path) in (".json", *TEXT_TABLES):
        return False
    with suppress(OSError, ValueError), open_bytes(path) as file:
        start = codecs.getincrementaldecoder("utf-8")().decode(file.read(BLOCK))
        return "\0" not in start
    return False


def hold_conversations(files: list[Path]) -> bool:
    """Whether these files hold conversations, by the first record of each. Raises ValueError if
    some hold text."""
    records = {path: first_record(path) for path in files}
    conversations = [path for path in files if is_conversation(records[path])]
    texts = [path for path in files if "text" in records[path] or kind_of(path) not in RECORDS]
    if any(form_of(records[path]) is not None for path in texts):
        note('records have "text", which is read, and conversations: --template plain reads these')
    if texts and conversations:
        raise ValueError(f"{conversations[0]} holds conversations, {texts[0]} holds text: prepare "
                         f"each by itself, in another --out")
    return bool(conversations)


def standard_library() -> list[Path]:
    """The interpreter's own .py files, without tests and without files that cannot be read."""
    excluded = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    root = Path(sysconfig.get_paths()["stdlib"])
    files = []
    for path in sorted(root.rglob("*.py")):
        if not excluded & set(path.relative_to(root).parts):
            with suppress(OSError, ValueError):
                path.read_text(encoding="utf-8")
                files.append(path)
    return files


# ---- Splits by the names of files -----------------------------------------------------------

def follow_names(files: list[Path]) -> tuple[list[Path], set[Path]]:
    """(the files that are read, those of them that validate), by their names. A note tells what the
    names decide. The set is empty if none validates: then the split is drawn from all."""
    parts = {path: Path(os.path.abspath(path)).parts for path in files}
    shared = os.path.commonprefix([one[:-1] for one in parts.values()])     # of tuples of names
    splits = {path: split_of_parts(parts[path][len(shared):]) for path in files}
    counts = Counter(splits.values())
    if not counts["train"] or not counts["val"] + counts["test"]:
        return files, set()
    told = ", ".join(f"{split or 'without such a name, which train'}: {count:,}"
                     for split, count in counts.items() if count)
    note(f"names of files decide the splits ({told}), and those of test are left out: "
         f"--split-names ignore uses all files alike, with another --out")
    return ([path for path in files if splits[path] != "test"],
            {path for path in files if splits[path] == "val"})


def split_of_parts(parts) -> str | None:
    """The split that the first name with a word for one says. A name that has words for several
    says none."""
    for name in parts:
        found = [split for split, words in WORDS.items()
                 if re.search(rf"(?<![^\W_])({words})\d*(?![^\W_])", name.lower())]
        if len(found) == 1:
            return found[0]
    return None
