"""Which files data.py reads: those that --input names, those of folders whose kind it knows, or the
standard library's own source."""
import os
import sysconfig
from collections import Counter
from contextlib import suppress
from pathlib import Path

from corpus.chat_records import form_of
from corpus.documents import (LINES, READ_KINDS, TABLES, first_record, is_conversation,
                              kind_of)
from corpus.notes_and_progress import note


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
        for one in walk(path, field) if path.is_dir() else [path]:
            files.setdefault(os.path.realpath(one), one)
    return list(files.values())


def walk(top: Path, field: str) -> list[Path]:
    """The files in a folder that are read, in the order of their names. Raises ValueError if there
    is none."""
    found = []
    skipped = Counter()
    for path in sorted(top.rglob("*")):
        if path.is_dir() or any(part.startswith(".") for part in path.relative_to(top).parts):
            continue
        if is_read(path, field):
            found.append(path)
        else:
            skipped[kind_of(path) or path.name] += 1
    told = ", ".join(f"{count:,} {kind}" for kind, count in skipped.most_common(8))
    advice = "other files of text are read where --input names each"
    if not found:
        raise ValueError(f"{top} holds {told or 'nothing'}, and only {READ_KINDS} are read: "
                         f"{advice}")
    if told:
        note(f"{top}: {len(found):,} files are read; skipped: {told}: {advice}")
    return found


def is_read(path: Path, field: str) -> bool:
    """Whether a file of a folder is read."""
    if not path.is_file() or path.name.startswith("cache-"):    # a link to nowhere; of `datasets`
        return False
    if kind_of(path) == ".json":        # otherwise it holds the settings of some program
        with suppress(ValueError):
            record = first_record(path)
            return isinstance(record.get(field), str) or is_conversation(record)
        return False
    return kind_of(path) in (".txt", *LINES, *TABLES)


def hold_conversations(files: list[Path]) -> bool:
    """Whether these files hold conversations, by the first record of each. Raises ValueError if
    some hold text."""
    records = {path: first_record(path) for path in files}
    conversations = [path for path in files if is_conversation(records[path])]
    texts = [path for path in files
             if "text" in records[path] or kind_of(path) not in (*LINES, *TABLES)]
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
