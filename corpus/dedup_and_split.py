"""Pass 1: the hash and size of each document. They drop duplicates and choose the split.

- Memory is bounded: 24 bytes are kept for each document, 112 more to find near-duplicates. A line
  of .jsonl is read as a whole.
- split_by_hash.py chooses which validate, unless files are given that do.
- Of equal documents the first is kept, or one that validates by its file.
- A document that cannot be read is left out, if it is one in a thousand.
"""
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.chat_formats import Answer, SystemText, texts_of
from corpus.file_changes import change_of
from corpus.formats import EOT, read_documents
from corpus.near_duplicates import MOST_BYTES, KeyTable, is_repeated, occurs_in
from corpus.notes_and_progress import note, progress
from corpus.records import NotText, UnreadFields
from corpus.split_by_hash import choose_split

MOST_NOT_TEXT = 1000        # one document in so many may be left out


class Index(NamedTuple):
    """What pass 1 finds in files."""
    files: list[Path]
    field: str | None           # of a record, that has the text; None: conversations
    changes: list               # of each file: when it was changed last
    digest: str                 # of all documents
    cuts: np.ndarray            # int64 (documents,): the number of bytes of each that train; the
                                # rest validates. -1: a document that is dropped, as a duplicate,
                                # without text, or not readable
    size: int                   # bytes that are kept
    counts: dict[str, int]      # documents that are kept, duplicates, ...


def index_documents(files, seed: int, field: str | None = "text",
                    near_duplicates="ignore", validation=frozenset()) -> Index:
    """Pass 1: hash and measure every document, drop duplicates, choose the split. near_duplicates:
    "drop", "keep" (they are counted) or "ignore". `validation`: the files that validate, while all
    others train; without them the split is drawn. Raises ValueError."""
    changes = [change_of(path) for path in files]
    keys = None if near_duplicates == "ignore" else KeyTable(usable_cores())
    table, unreadable, counts_of_files = measure_documents(files, seed, field, keys)
    digest = hashlib.sha256(table)
    validates = np.repeat([path in validation for path in files], counts_of_files)
    if near_duplicates == "drop":
        digest.update(b"without near-duplicates")
    if validation:
        digest.update(b"validates by file" + validates.tobytes())
    # From here on, those that validate by their file come first, so they are kept.
    order = np.argsort(~validates, kind="stable")
    table, validates = table[order], validates[order]
    has_text = table["size"] > 0
    _, kept = np.unique(table["digest"], return_index=True)     # of equal documents the first
    kept = np.sort(kept[has_text[kept]])
    skipped = len(table) - int(has_text.sum())
    counts = dict(documents=0, skipped=skipped - len(unreadable),
                  duplicates=len(table) - skipped - len(kept))
    if unreadable:
        counts["unreadable"] = len(unreadable)
    if validation:
        kept = drop_seen(table, validates, kept, field, counts)
    if keys is not None:
        keys = keys.finish()[order]
        repeated = is_repeated(keys[kept])
        counts["near_duplicates"] = int(repeated.sum())
        if near_duplicates == "drop":
            kept = kept[~repeated]
    counts["documents"] = len(kept)
    sizes = table["size"][kept]
    if validation:
        train_sizes = split_by_file(sizes, validates[kept])
    else:
        train_sizes = choose_split(table["digest"][kept], sizes, may_cut=field is not None)
    if near_duplicates == "keep":
        note_near_duplicates(keys[kept], train_sizes, counts)
    cuts = np.full(len(table), -1)
    cuts[order[kept]] = train_sizes
    return Index(files, field, changes, digest.hexdigest(), cuts, int(sizes.sum()), counts)


def drop_seen(table, validates, kept, field: str | None, counts: dict) -> np.ndarray:
    """`kept` without conversations that train and have a question of one that validates, unless all
    have. A note counts them, and documents that were dropped as equal to one that validates."""
    digests = table["digest"]
    has_text = table["size"] > 0
    trains = ~validates & has_text
    seen = int(np.isin(digests[trains], digests[validates & has_text]).sum())
    if seen > 0:
        counts["train_in_validation"] = seen
        note(f"{seen:,} documents of files that train stand in files that validate, too: they do "
             f"not train")
    if field is not None:
        return kept
    questions = digests[kept].view("<u8")[::2]
    asked = np.isin(questions, questions[validates[kept]]) & ~validates[kept]
    count = int(asked.sum())
    if not 0 < count < int((~validates[kept]).sum()):
        return kept
    counts["questions_in_validation"] = count
    note(f"{count:,} conversations that train have the text before the last answer of one that "
         f"validates: they are dropped")
    return kept[~asked]


def split_by_file(sizes, validates) -> np.ndarray:
    """The bytes of each document that train: all or none. Raises ValueError if a split is empty."""
    for name, is_in in (("train", ~validates), ("validation", validates)):
        if sizes[is_in].sum() < 5:
            raise ValueError(f"the files named {name} hold no text that the others do not hold: "
                             f"--split-names ignore uses all files alike")
    return np.where(validates, 0, sizes)


def measure_documents(files, seed: int, field: str | None, keys: KeyTable | None):
    """(digest and size in bytes of each document, those that cannot be read, how many documents
    each file has). The size is 0 without text. `keys` receives the beginning of each. The digest of
    a conversation begins with the one of its text before the last answer, by which the split is
    chosen."""
    count_bytes = progress("reading")
    salt = seed.to_bytes(16, "little")      # one hash finds duplicates and chooses the split
    table = bytearray()
    unreadable = []
    marks = 0                               # <|endoftext|> as ordinary text
    counts_of_files = [0] * len(files)
    unread = UnreadFields()
    for number, blocks in read_texts(files, field, unread):
        counts_of_files[number] += 1
        digest = hashlib.blake2b(digest_size=16, salt=salt)
        before_answer = b""
        size = 0
        has_text = False
        beginning = []              # what is compared: without a system message
        compared = 0
        for text in blocks:
            if isinstance(text, NotText):
                unreadable.append(text)
                check_unreadable(unreadable, len(table) // 24 + 1)
                has_text = False
                break
            if isinstance(text, Answer):
                before_answer = digest.digest()[:8]
            raw = text.encode()
            digest.update(raw)
            if keys is not None and compared < MOST_BYTES and not isinstance(text, SystemText):
                beginning.append(text)
                compared += len(raw)
            size += len(raw)
            has_text = has_text or not text.isspace()
            if "|" in text:             # is found 40 times faster
                marks += text.count(EOT)
            count_bytes(len(raw))
        table += (before_answer + digest.digest())[:16]
        table += (size if has_text else 0).to_bytes(8, "little")
        if keys is not None and field is not None:
            keys.add("".join(beginning))
        elif keys is not None:
            prompt = "".join(text for text in beginning if not isinstance(text, Answer))
            keys.add_conversation("".join(beginning), prompt)
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    check_unreadable(unreadable, len(table), at_end=True)
    unread.tell()
    if marks > 0 and field is not None:
        note(f"{EOT} stands {marks:,} times within a line or a field, where it is ordinary text: "
             f"in a .txt, a line of its own ends a document")
    return table, unreadable, counts_of_files


def read_texts(files, field: str | None, unread: UnreadFields | None = None):
    """Yield (number of the file, document as an iterable of strings). `unread` counts the fields
    that are not read."""
    for number, path in enumerate(files):
        for document in read_documents(path, field, unread):
            yield number, document if field is not None else texts_of(document)


def check_unreadable(unreadable: list[NotText], documents: int, at_end=False) -> None:
    """Of so many documents these could not be read: one in a thousand is left out, with a note; a
    ValueError if they are more, at the end or once most documents are so."""
    count = len(unreadable)
    most = documents // MOST_NOT_TEXT if at_end else max(10, documents // 2)
    if count > most:
        first_of_a_kind = {}            # {the message without its numbers: the first such problem}
        for problem in map(str, unreadable):
            first_of_a_kind.setdefault(re.sub(r"\d+", "", problem), problem)
        shown = [*first_of_a_kind.values()][:3]
        named = "; ".join(shown)
        if count > len(shown):
            named += "; ..."
        raise ValueError(f"{named} ({count:,} of {documents:,} documents; only one in "
                         f"{MOST_NOT_TEXT:,} is tolerated)")
    if count and at_end:
        named = "; ".join(map(str, unreadable[:3]))
        note(f"{count:,} of {documents:,} documents are left out: {named}")


def note_near_duplicates(keys, train_sizes, counts: dict) -> None:
    """Tell how many documents validate that have a near-duplicate in training. Where all documents
    train and validate, each in part, there are none."""
    validates = train_sizes == 0
    seen = int(occurs_in(keys[validates], keys[~validates]).sum())
    counts["val_near_duplicates"] = seen
    if seen > 0:
        note(f"{seen:,} of {validates.sum():,} validation documents have a near-duplicate in "
             f"training, so the validation loss is too good: --near-duplicates drop keeps the "
             f"first of those that are alike ({counts['near_duplicates']:,} less)")


def usable_cores() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):        # not all of the machine's, as in a container
        cores = len(os.sched_getaffinity(0))
    return cores
