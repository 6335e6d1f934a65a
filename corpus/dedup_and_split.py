"""Pass 1: the hash and size of each document. They drop duplicates and choose the split.

- 24 bytes are kept of each document, 112 more to find near-duplicates.
- Which documents validate is a function of (seed, text), unless files are given that do.
- Of equal documents the first is kept, or one that validates by its file.
- A document that cannot be read is left out, if it is one in a thousand.
"""
import hashlib
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus import EOT, note, progress
from corpus.chat_records import Answer, Refused, SystemText, texts_of
from corpus.documents import read_documents
from corpus.near_duplicates import BANDS, MOST_BYTES, MinHash, is_repeated, occurs_in

MOST_NOT_TEXT = 1000        # one document in so many may be left out
VAL_ONE_IN = 20             # documents, or bytes of each document where there are fewer


class Index(NamedTuple):
    """What pass 1 finds in files."""
    files: list[Path]
    field: str | None           # of a record, that has the text; None: conversations
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
    min_hash = None if near_duplicates == "ignore" else MinHash()
    table, validates, keys, unreadable = measure(files, seed, field, validation, min_hash)
    digest = hashlib.sha256(table)
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
    counts = dict(documents=0, skipped=skipped - unreadable,
                  duplicates=len(table) - skipped - len(kept))
    if unreadable:
        counts["unreadable"] = unreadable
    if min_hash is not None:
        keys = keys[order]
        repeated = is_repeated(keys[kept])
        counts["near_duplicates"] = int(repeated.sum())
        if near_duplicates == "drop":
            kept = kept[~repeated]
    counts["documents"] = len(kept)
    sizes = table["size"][kept]
    if validation:
        train_sizes = np.where(validates[kept], 0, sizes)
        if not 0 < train_sizes.sum() < sizes.sum():
            raise ValueError("the files of one split hold no text that those of the other do not "
                             "hold: --split-names ignore uses all files alike")
    else:
        train_sizes = choose_split(table["digest"][kept], sizes, may_cut=field is not None)
    if near_duplicates == "keep":
        note_near_duplicates(keys[kept], train_sizes, counts)
    cuts = np.full(len(table), -1)
    cuts[order[kept]] = train_sizes
    return Index(files, field, digest.hexdigest(), cuts, int(sizes.sum()), counts)


def choose_split(digests, sizes, may_cut=True) -> np.ndarray:
    """The bytes of each document that train. About 5% of the documents validate. If these hold more
    than a quarter of the text, each gives only its end, together 5% of all. With fewer than 20
    documents, each gives its last 5%. Conversations are never cut, and those with the same text
    before the last answer are in the same split."""
    if len(sizes) < VAL_ONE_IN and may_cut:
        train_sizes = sizes - np.maximum(sizes // VAL_ONE_IN, 1)
        if train_sizes.max(initial=0) < 4:                  # bytes of the longest character
            raise ValueError("the input holds no text, or less than 5 bytes: give it more")
        return train_sizes
    score, other_score = digests.view("<u8").reshape(-1, 2).T          # 8 of the 16 bytes each
    if len(score) < 2:
        raise ValueError("the input holds fewer than two different conversations: one trains, and "
                         "one validates: give it more")
    if score.min() == score.max():          # all have the same prompt
        score = other_score
    validates = score < 2**64 // VAL_ONE_IN
    validates |= score == score.min()                       # both splits receive documents
    validates &= score != score.max()
    wanted = int(sizes.sum()) // VAL_ONE_IN
    drawn = int(sizes[validates].sum())
    if drawn <= 5 * wanted or not may_cut:
        return np.where(validates, 0, sizes)
    shares = np.maximum(sizes * (wanted / drawn), 1).astype(np.int64)
    return np.where(validates, sizes - shares, sizes)


def measure(files, seed: int, field: str | None, validation, min_hash: MinHash | None):
    """(digest and size in bytes of each document, whether it validates by its file, its keys by
    `min_hash`, how many cannot be read). The size is 0 without text. The digest of a
    conversation begins with the one of its text before the last answer, by which the split is
    chosen."""
    count_bytes = progress("reading")
    salt = seed.to_bytes(16, "little")      # one hash finds duplicates and chooses the split
    table, validates, keys = bytearray(), bytearray(), bytearray()
    unreadable = []
    marks = 0                               # <|endoftext|> as ordinary text
    for path, document in ((path, document) for path in files
                           for document in read_documents(path, field)):
        validates.append(path in validation)
        digest = hashlib.blake2b(digest_size=16, salt=salt)
        before_answer = b""
        beginning = ""                      # of the text, which is compared with others
        size, has_text = 0, False
        for text in texts_of(document):
            if isinstance(text, Refused):
                unreadable.append(text)
                check_unreadable(unreadable, len(table) // 24 + 1)
                has_text = False            # nor is what stands before it used
                break
            if isinstance(text, Answer):
                before_answer = digest.digest()[:8]
            raw = text.encode()
            digest.update(raw)
            size += len(raw)
            has_text = has_text or not text.isspace()
            marks += text.count(EOT)
            is_compared = min_hash is not None and not isinstance(text, SystemText)
            if is_compared and len(beginning) < MOST_BYTES:
                beginning += text
            count_bytes(len(raw))
        table += (before_answer + digest.digest())[:16]
        table += (size if has_text else 0).to_bytes(8, "little")
        if min_hash is not None:
            keys += min_hash.keys(beginning).tobytes()
    check_unreadable(unreadable, len(table) // 24, at_end=True)
    if marks > 0 and field is not None:
        note(f"{EOT} stands {marks:,} times within a line or a field, where it is ordinary text: "
             f"in a .txt, a line of its own ends a document")
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    keys = np.frombuffer(keys, np.uint64).reshape(-1, BANDS)
    return table, np.frombuffer(validates, bool), keys, len(unreadable)


def check_unreadable(unreadable: list[Refused], documents: int, at_end=False) -> None:
    """Of so many documents these could not be read: one in a thousand is left out, with a note; a
    ValueError if they are more, at the end or once most documents are so."""
    count = len(unreadable)
    tolerated = documents // MOST_NOT_TEXT if at_end else max(10, documents // 2)
    told = "; ".join(map(str, unreadable[:2]))
    if count > tolerated and count == documents:        # such as a field of another name
        raise ValueError(str(unreadable[0]))
    if count > tolerated:
        raise ValueError(f"{told} ({count:,} of {documents:,} documents; only one in "
                         f"{MOST_NOT_TEXT:,} is tolerated)")
    if count and at_end:
        note(f"{count:,} of {documents:,} documents are left out: {told}")


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
