"""Pass 1: the hash and size of each document. They drop duplicates and choose the split.

- Memory is bounded: 24 bytes are kept for each document, 112 more to find near-duplicates. A line
  of .jsonl is read as a whole.
- Of equal documents the first is kept. split.py chooses which validate.
- A document that cannot be read is left out, if it is one in a thousand.
"""
import hashlib
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.console import note, progress
from corpus.file_changes import change_of
from corpus.formats import EOT, read_documents
from corpus.messages import Answer, SystemText, texts_of
from corpus.near_duplicates import MOST_BYTES, KeyTable, is_repeated, occurs_in
from corpus.records import NotText
from corpus.split import choose_split
from corpus.unread_fields import UnreadFields

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
                    near_duplicates="ignore") -> Index:
    """Pass 1: hash and measure every document, drop duplicates, choose the split. near_duplicates:
    "drop", "keep" (they are counted) or "ignore"."""
    changes = [change_of(path) for path in files]
    keys = None if near_duplicates == "ignore" else KeyTable(usable_cores())
    table, unreadable = measure_documents(files, seed, field, keys)
    has_text = table["size"] > 0
    _, first = np.unique(table["digest"], return_index=True)
    kept = np.sort(first[has_text[first]])
    skipped = len(table) - int(has_text.sum())
    counts = dict(documents=0, skipped=skipped - len(unreadable),
                  duplicates=len(table) - skipped - len(kept))
    if unreadable:
        counts["unreadable"] = len(unreadable)
    if keys is not None:
        keys = keys.finish()
        repeated = is_repeated(keys[kept])
        counts["near_duplicates"] = int(repeated.sum())
        if near_duplicates == "drop":
            kept = kept[~repeated]
    counts["documents"] = len(kept)
    sizes = table["size"][kept]
    train_sizes, is_cut = choose_split(table["digest"][kept], sizes, may_cut=field is not None)
    if near_duplicates == "keep":
        note_near_duplicates(keys[kept], train_sizes, counts)
    cuts = np.full(len(table), -1)
    cuts[kept] = train_sizes
    digest = hashlib.sha256(table)
    if is_cut:                  # earlier versions made other shards of this text
        digest.update(b"cut")
    if near_duplicates == "drop":
        digest.update(b"without near-duplicates")
    return Index(files, field, changes, digest.hexdigest(), cuts, int(sizes.sum()), counts)


def measure_documents(files, seed: int, field: str | None, keys: KeyTable | None):
    """(digest and size in bytes of each document, those that cannot be read). The size is 0 without
    text. `keys` receives the beginning of each. The digest of a conversation begins with the one of
    its text before the last answer, by which the split is chosen."""
    count_bytes = progress("reading")
    salt = seed.to_bytes(16, "little")      # one hash finds duplicates and chooses the split
    table = bytearray()
    unreadable = []
    marks = 0                               # <|endoftext|> as ordinary text
    unread = UnreadFields()
    for blocks in read_texts(files, field, unread):
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
    return table, unreadable


def read_texts(files, field: str | None, unread: UnreadFields | None = None):
    """Yield every document, as an iterable of strings. `unread` counts the fields that are not
    read."""
    for path in files:
        for document in read_documents(path, field, unread):
            yield document if field is not None else texts_of(document)


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
