"""Which files data.py reads: those of --input whose kind it knows, also in folders and behind
links, or the standard library's own source."""
import os
import shlex
import stat
import sysconfig
from collections import Counter
from contextlib import suppress
from pathlib import Path

from corpus.compressed import check_package
from corpus.console import note
from corpus.file_kinds import READ, READ_KINDS, advice_for, kind_of
from corpus.records import both_of, first_record, is_conversation, is_document


def find_files(paths, field="text") -> list[Path]:
    """These files and those in these folders, also behind links, each once. A note tells what is
    skipped. Raises ValueError or OSError."""
    files = {}              # {path without links: path}
    again = []
    for path in paths:
        check_path(path)
        found = {os.path.realpath(path): path}
        if path.is_dir():
            found = walk(path, field)
        again += [path for real, path in found.items() if real in files]
        files |= {real: path for real, path in found.items() if real not in files}
    if again:
        note(f"{again[0]} is given twice, and read once" if len(again) == 1 else
             f"{len(again):,} files are given twice, such as {again[0]}: each is read once")
    for path in files.values():
        check_package(path)
    return list(files.values())


def check_path(path: Path) -> None:
    """Raise a ValueError or an OSError if this --input cannot be read."""
    try:
        mode = path.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        problem = f"there is no file or folder {path}"
        if path.is_symlink():
            problem = f"{path} is a link to {os.readlink(path)}, which is not there"
        elif str(path) == "-":
            problem += ": the text is read twice, so write it to a file and give that"
        raise ValueError(problem) from None
    kind = special_kind(mode)
    if kind is not None:
        raise ValueError(f"{path} is a {kind}: the text is read twice, so write it to a file and "
                         f"give that")
    if not stat.S_ISDIR(mode) and kind_of(path.name) not in READ:
        advice = advice_for(path.name).replace("FILE", shlex.quote(str(path)))
        raise ValueError(f"{path}: only {READ_KINDS} are read: {advice}")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path} cannot be read: permission denied: change who may read it")


def special_kind(mode: int) -> str | None:
    """What is neither a file nor a folder: reading it could wait for ever."""
    if stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return None
    if stat.S_ISFIFO(mode):
        return "named pipe"
    return "socket" if stat.S_ISSOCK(mode) else "device"


def why_skipped(entry: os.DirEntry, field: str) -> str | None:
    """Why an entry of a folder is skipped; None if it is read, "folder" if it is one."""
    if entry.name.startswith("."):
        return "hidden"
    try:
        mode = entry.stat().st_mode
    except OSError:
        return "link to nowhere" if entry.is_symlink() else "unreadable"
    if stat.S_ISDIR(mode):
        return "folder"
    kind = kind_of(entry.name)
    if special_kind(mode) is not None or kind not in READ:
        return special_kind(mode) or kind or "without a suffix"
    if not os.access(entry.path, os.R_OK):
        return "unreadable"
    if kind == ".json" and not is_document(Path(entry.path), field):
        return f'.json without lines of {{"{field}": ...}}'
    return None


def walk(top: Path, field: str) -> dict[str, Path]:
    """{path without links: path} of the text files in a folder, in the order of their names. A file
    or folder that several links lead to is read once. Raises ValueError if there is none."""
    found = {}
    links = []              # to files: behind the files themselves, which give the names
    skipped = Counter()
    first = {}              # {kind: the first that is skipped}
    folders = [str(top)]
    linked_folders = []     # behind the others
    seen = set()
    while folders or linked_folders:
        folder = folders.pop() if folders else linked_folders.pop(0)
        real = os.path.realpath(folder)
        if real in seen:
            continue
        seen.add(real)
        try:
            entries = sorted(os.scandir(folder), key=lambda entry: entry.name)
        except OSError:
            skipped["unreadable"] += 1
            first.setdefault("unreadable", folder)
            continue
        for entry in entries:
            kind = why_skipped(entry, field)
            if kind == "folder":
                (linked_folders if entry.is_symlink() else folders).append(entry.path)
            elif kind is not None:
                skipped[kind] += 1
                first.setdefault(kind, entry.path)
            elif entry.is_symlink():
                links.append(entry.path)
            else:
                found[os.path.join(real, entry.name)] = Path(entry.path)
    for link in links:
        found.setdefault(os.path.realpath(link), Path(link))
    kinds = [f"{count:,} {kind} ({os.path.relpath(first[kind], top)})"
             for kind, count in skipped.most_common()]
    if not found:
        holds = "it is empty"
        if kinds:
            (most, _), = skipped.most_common(1)
            holds = f"it holds {', '.join(kinds)}: {advice_for(first[most])}"
        raise ValueError(f"{top}: only {READ_KINDS} are read: {holds}")
    if kinds:
        note(f"{top}: {len(found):,} files are read; skipped: {', '.join(kinds)}")
    return dict(sorted(found.items(), key=lambda item: item[1]))


def hold_conversations(files: list[Path]) -> bool:
    """Whether these files hold conversations, by the first record of each. Raises ValueError if
    some hold text."""
    texts = []
    conversations = []
    both = None
    for path in files:
        if kind_of(path.name) == ".txt":
            texts.append(path)
            continue
        try:
            record = first_record(path)
        except (ValueError, OSError):       # whoever reads the file says what is wrong with it
            continue
        if is_conversation(record):
            conversations.append(path)
        elif "text" in record:
            texts.append(path)
            if both is None and both_of(record) is not None:
                both = f"{path} {both_of(record)}"
    if both is not None:
        note(both)
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
