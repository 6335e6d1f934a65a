"""Which files data.py reads: those that --input names, those of folders whose kind it knows, also
behind links, or the standard library's own source."""
import json
import os
import re
import sysconfig
from collections import Counter, defaultdict
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from corpus.compressed import check_package
from corpus.content_type import how_read, is_read_by_content, is_refused, is_text
from corpus.file_kinds import AS_IT_STANDS, LINES, READ, READ_KINDS, advice_for, has_ending, kind_of
from corpus.notes_and_progress import note
from corpus.records import both_of, first_record, is_conversation, is_document

MOST_ENDINGS = 5            # that a message offers


class Skipped(NamedTuple):
    """Why an entry of a folder is skipped."""
    kind: str
    ending: str | None = None       # of a file of text, which --text-endings would read


def find_files(paths, field="text", endings=(), command_with=None) -> list[Path]:
    """These files and those in these folders, also behind links, each once. In folders, files of
    text with one of these endings are read, too. A note tells what is skipped.
    command_with(endings, is_other): the command line that reads files with these endings as well,
    into another --out. Raises ValueError or OSError."""
    files = {}              # {path without links: path}
    again = []
    texts = Counter()       # {ending: files of text that are skipped}
    for path in paths:
        check_path(path)
        found = {os.path.realpath(path): path}
        if path.is_dir():
            found, others = walk(path, field, endings, command_with)
            texts += others
        again += [path for real, path in found.items() if real in files]
        files |= {real: path for real, path in found.items() if real not in files}
    if again:
        note(f"{again[0]} is given twice, and read once" if len(again) == 1 else
             f"{len(again):,} files are given twice, such as {again[0]}: each is read once")
    if texts and command_with is not None:
        note(f"to read the files of text, too: {command_with(most_of(texts), True)}")
    for ending in endings:
        if not any(has_ending(path.name, [ending]) for path in files.values()):
            note(f"--text-endings {ending}: no file is read that ends so")
    for path in files.values():
        check_package(path)
    note_as_it_stands(files.values())
    return list(files.values())


def check_path(path: Path) -> None:
    """Raise a ValueError or an OSError if this --input cannot be read."""
    if not path.exists():
        problem = f"there is no file or folder {path}"
        if path.is_symlink():
            problem = f"{path} is a link to {os.readlink(path)}, which is not there"
        raise ValueError(problem)
    if not path.is_file() and not path.is_dir():        # reading it could wait for ever
        raise ValueError(f"{path} is no file: the text is read twice, so write it to a file and "
                         f"give that")
    if not os.access(path, os.R_OK):
        raise ValueError(f"{path} cannot be read: permission denied: change who may read it")
    if path.is_file() and kind_of(path.name) not in READ:
        check_package(path)
        if is_refused(path) and how_read(path) == ".txt":
            raise ValueError(f"{path} is not read: {advice_for(path)}")


def note_as_it_stands(paths) -> None:
    """Tell of files of text that there is a better way to read, once for each kind."""
    found = {}
    for path in paths:
        kind = kind_of(path.name)
        if kind in AS_IT_STANDS:
            found.setdefault(kind, []).append(path)
    for kind, files in found.items():
        note(f"{len(files):,} {kind} ({files[0]}) read as text, each a document as it stands: "
             f"{advice_for(files[0])}")


def most_of(texts: Counter) -> list[str]:
    return [ending for ending, _ in texts.most_common(MOST_ENDINGS)]


def why_skipped(path: Path, field: str, endings) -> Skipped | None:
    """Why a file of a folder is skipped; None if it is read."""
    if path.name.startswith("."):
        return Skipped("hidden")
    if not os.access(path, os.R_OK):                            # such as a link to nowhere
        return Skipped("unreadable")
    if not path.is_file():
        return Skipped("special file")                          # such as a named pipe
    kind = kind_of(path.name)
    if kind == ".arrow" and is_cache(path):
        return Skipped("cache of datasets")
    if kind == ".json":
        if is_document(path, field):
            return None
        return Skipped(f'.json without lines of {{"{field}": ...}}')
    if kind in (*READ, *LINES) or is_read_by_content(path, field):
        return None
    return why_not_text(path, kind, endings)


def is_cache(path: Path) -> bool:
    """Whether a table stands in a folder of datasets.save_to_disk and is none of its files."""
    try:
        state = json.loads(path.with_name("state.json").read_text(encoding="utf-8"))
        files = {file["filename"] for file in state["_data_files"]}
    except (OSError, ValueError, KeyError, TypeError):
        return False
    return path.name not in files


def why_not_text(path: Path, kind: str, endings) -> Skipped | None:
    """Why a file of a folder is not read as text; None if it is."""
    is_chosen = has_ending(path.name, endings)
    if is_refused(path) or not is_text(path):
        return Skipped(f"{kind} that is not UTF-8 text" if is_chosen
                       else kind or "without a suffix")
    if is_chosen:
        return None
    ending = kind.removeprefix(".") or path.name
    if not re.fullmatch(r"[\w+-]+", ending):            # has a comma, a space ...
        ending = None
    return Skipped(kind or "without a suffix", ending)


def walk(top: Path, field: str, endings, command_with) -> tuple[dict[str, Path], Counter]:
    """({path without links: path} of the files in a folder that are read, in the order of their
    names; {ending: how many files of text are skipped}). A file or folder that several links lead
    to is read once. Raises ValueError if there is none."""
    found = {}
    skipped = defaultdict(list)         # {kind: paths}
    texts = Counter()
    seen = set()

    def skip_folder(error: OSError) -> None:
        skipped["unreadable"].append(error.filename)

    for folder, folders, names in os.walk(top, followlinks=True, onerror=skip_folder):
        real = os.path.realpath(folder)
        if real in seen:
            folders.clear()
            continue
        seen.add(real)
        skipped["hidden"] += [os.path.join(folder, name) for name in folders if name[0] == "."]
        folders[:] = sorted(name for name in folders if name[0] != ".")
        for path in (Path(folder, name) for name in sorted(names)):
            why = why_skipped(path, field, endings)
            if why is None:
                found.setdefault(os.path.realpath(path), path)
            else:
                skipped[why.kind].append(str(path))
                texts.update([why.ending] if why.ending else [])
    kinds = sorted(skipped.items(), key=lambda item: -len(item[1]))
    told = ", ".join(f"{len(paths):,} {kind} ({os.path.relpath(paths[0], top)})"
                     for kind, paths in kinds if paths)
    if not found:
        raise ValueError(f"{top}: only {READ_KINDS} are read: "
                         f"{what_it_holds(told, kinds, texts, command_with)}")
    if told:
        note(f"{top}: {len(found):,} files are read; skipped: {told}")
    return dict(sorted(found.items(), key=lambda item: item[1])), texts


def what_it_holds(told: str, kinds, texts: Counter, command_with) -> str:
    """What a folder holds of which no file is read, and what to do."""
    if not told:
        return "it is empty"
    if texts and command_with is not None:
        advice = f"to read the files of text: {command_with(most_of(texts), False)}"
    else:
        _, paths = kinds[0]
        advice = advice_for(Path(paths[0])) or (
            "give folders or files of such, or a file of text by its name")
    return f"it holds {told}: {advice}"


def hold_conversations(files: list[Path]) -> bool:
    """Whether these files hold conversations, by the first record of each. Raises ValueError if
    some hold text."""
    texts = []
    conversations = []
    both = None
    for path in files:
        try:
            if how_read(path) == ".txt":
                texts.append(path)
                continue
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
