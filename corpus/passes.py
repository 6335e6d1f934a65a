"""Two passes over the documents: choose the split, then encode. data.py calls them.

    pass 1: index_documents   hash and size of each document: drop duplicates, choose the split
    pass 2: tokenise          pieces of text -> tokens of both splits, in the order of the documents

- Memory is bounded: 24 bytes are kept for each document, 112 more to find near-duplicates. A line
  of .jsonl is read as a whole.
- Of equal documents the first is kept. split.py chooses which validate.
- The token <|endoftext|> stands before each document; the same characters in a text are text.
- Conversations (conversations.py) are documents whose tokens a template decides.
"""
import hashlib
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from corpus.bpe import train_bpe
from corpus.compressed import BLOCK
from corpus.conversations import Answer, check_contents, render, texts_of
from corpus.disk import change_of
from corpus.formats import EOT, read_documents
from corpus.messages import note, progress
from corpus.near_duplicates import MOST_BYTES, KeyTable, is_repeated, occurs_in
from corpus.problems import NotText, check_problems
from corpus.shards import BEGINS, LEARNT, SPLITS
from corpus.split import choose_split
from corpus.tokenizers import CUT, MOST_TOKENS, cut_of, write_tokens

TOKENIZER_BYTES = 10**8     # of text, which a tokenizer of one's own is trained on


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
    table, problems = measure_documents(files, seed, field, keys)
    has_text = table["size"] > 0
    _, first = np.unique(table["digest"], return_index=True)
    kept = np.sort(first[has_text[first]])
    skipped = len(table) - int(has_text.sum())
    counts = dict(documents=0, skipped=skipped - len(problems),
                  duplicates=len(table) - skipped - len(kept))
    if problems:
        counts["unreadable"] = len(problems)
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
    problems = []
    marks = 0                               # <|endoftext|> as ordinary text
    for blocks in read_texts(files, field):
        digest = hashlib.blake2b(digest_size=16, salt=salt)
        before_answer = b""
        size = 0
        has_text = False
        beginning = []
        for text in blocks:
            if isinstance(text, NotText):
                problems.append(text)
                check_problems(problems, len(table) // 24 + 1)
                has_text = False
                break
            if isinstance(text, Answer):
                before_answer = digest.digest()[:8]
            raw = text.encode()
            digest.update(raw)
            if keys is not None and size < MOST_BYTES:
                beginning.append(text)
            size += len(raw)
            has_text = has_text or not text.isspace()
            if "|" in text:             # is found 40 times faster
                marks += text.count(EOT)
            count_bytes(len(raw))
        table += (before_answer + digest.digest())[:16]
        table += (size if has_text else 0).to_bytes(8, "little")
        if keys is not None:
            keys.add("".join(beginning))
    table = np.frombuffer(table, [("digest", "S16"), ("size", "<i8")])
    check_problems(problems, len(table), at_end=True)
    if marks > 0 and field is not None:
        note(f"{EOT} stands {marks:,} times within a line or a field, where it is ordinary text: "
             f"in a .txt, a line of its own ends a document")
    return table, problems


def read_texts(files, field: str | None):
    """Yield every document, as an iterable of strings."""
    for path in files:
        for document in read_documents(path, field):
            yield document if field is not None else texts_of(document)


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


def split_document(blocks, cut: int, place=CUT):
    """Yield (split, text): a document up to the last whole character before byte `cut` trains, the
    rest validates. "" begins each, then come pieces of at most BLOCK characters, cut at the last
    `place`. A text without such a place, which is not prose, is cut anywhere and may take a few
    tokens more."""
    rest = {}
    for block in blocks:
        if isinstance(block, NotText):      # pass 1 could read it
            raise block
        raw = block.encode()
        head = raw[:max(cut, 0)].decode(errors="ignore")
        cut -= len(raw)
        for split, text in (("train", head), ("val", block[len(head):])):
            if not text:
                continue
            if split not in rest:
                yield split, ""
            text = rest.get(split, "") + text
            start = 0
            while len(text) - start > BLOCK:
                match = place.match(text, start, start + BLOCK)
                end = match.end() if match else start + BLOCK
                yield split, text[start:end]
                start = end
            rest[split] = text[start:]
    yield from rest.items()


class Encoded(NamedTuple):
    """Tokens of some documents of one split."""
    split: str
    tokens: np.ndarray          # (n,), uint16, or uint32 for more than 65,536
    size: int                   # bytes of text
    flags: np.ndarray | None = None     # of conversations: shards.LEARNT + BEGINS, uint8 (n,)


def tokenise(index: Index, encoding, template: str | None = None):
    """Pass 2: yield an Encoded of some documents, or conversations, at a time, in order. Raises
    ValueError at the end if the files have changed since pass 1."""
    if template is None:
        parts = encode_pieces(pieces_of(index, cut_of(encoding.name)), encoding)
    else:
        parts = encode_conversations(index, encoding, template)
    done = 0
    for part in parts:
        done += part.size
        yield part
    for path, change in zip(index.files, index.changes):
        if change_of(path) != change:
            raise ValueError(f"{path} changed while it was read: run data.py again")
    if done != index.size:
        raise ValueError("the input changed while it was read: run data.py again")


def pieces_of(index: Index, place=CUT):
    """Yield (split, text) of the documents that are kept, as `split_document` does."""
    for blocks, cut in zip(read_texts(index.files, index.field), index.cuts.tolist()):
        if cut >= 0:
            yield from split_document(blocks, cut, place)


def train_tokenizer(index: Index, n_tokens: int) -> str:
    """A byte-pair encoding of the documents that train, or of each n-th where they are more than is
    needed. Returns the content of its file."""
    is_read = np.zeros(len(index.cuts), bool)
    is_read[np.flatnonzero(index.cuts > 0)[::1 + index.size // TOKENIZER_BYTES]] = True
    chosen = index._replace(cuts=np.where(is_read, index.cuts, -1))
    count_bytes = progress("training the tokenizer")

    def texts():
        for split, text in pieces_of(chosen):
            if split == "train":
                count_bytes(len(text.encode()))
                yield text
    return write_tokens(train_bpe(texts(), n_tokens - 1))       # the last is <|endoftext|>


def bytes_per_token(index: Index, encoding) -> float:
    """Of the text that validates, or of its beginning."""
    size = 0
    n_tokens = 0
    for split, text in pieces_of(index):
        if split == "val" and text:
            size += len(text.encode())
            n_tokens += len(encoding.encode_ordinary(text))
        if size > TOKENIZER_BYTES // 10:
            break
    return size / n_tokens


def usable_cores() -> int:
    cores = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):        # not all of the machine's, as in a container
        cores = len(os.sched_getaffinity(0))
    return cores


def encode_pieces(pieces, encoding):
    """Yield an Encoded of some pieces of text (split, text) at a time, in order."""
    def work(split, texts):
        tokens = [encoding.encode_to_numpy(text, disallowed_special=()) if text
                  else [encoding.eot_token] for text in texts]
        tokens = np.concatenate(tokens, dtype=dtype_of(encoding), casting="unsafe")
        return Encoded(split, tokens, len("".join(texts).encode()))
    yield from in_threads(work, in_groups(pieces))


def encode_conversations(index: Index, encoding, template: str):
    """Yield an Encoded of some conversations at a time, in order."""
    def work(split, conversations):
        tokens, flags, size = [], [], 0
        for messages in conversations:
            if isinstance(messages[0], NotText):        # pass 1 could read it
                raise messages[0]
            check_contents(messages, template, encoding)
            new, learnt = render(messages, template, encoding)
            tokens += new
            flags.append(LEARNT * np.array(learnt, "u1"))
            flags[-1][0] |= BEGINS
            size += sum(len(text.encode()) for text in texts_of(messages))
        return Encoded(split, np.array(tokens, dtype_of(encoding)), size, np.concatenate(flags))

    conversations = (messages for path in index.files for messages in read_documents(path, None))
    kept = (("train" if cut else "val", messages)
            for messages, cut in zip(conversations, index.cuts.tolist()) if cut >= 0)
    yield from in_threads(work, in_groups(kept))


def dtype_of(encoding) -> str:
    return "<u2" if encoding.n_vocab <= MOST_TOKENS else "<u4"


def in_groups(documents):
    """(split, text or conversation) one by one -> (split, [some of them]), in order."""
    groups = {split: [] for split in SPLITS}
    for split, document in documents:
        groups[split].append(document)
        if len(document) > BLOCK // 8 or len(groups[split]) > 100:
            yield split, groups[split]
            groups[split] = []
    yield from ((split, last) for split, last in groups.items() if last)


def in_threads(work, jobs):
    """Yield work(*job) of each, in order. Threads work, as tiktoken releases Python's lock. Few
    jobs wait at a time, which bounds memory."""
    cores = usable_cores()
    waiting = deque()
    with ThreadPoolExecutor(cores) as pool:
        for job in jobs:
            waiting.append(pool.submit(work, *job))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
