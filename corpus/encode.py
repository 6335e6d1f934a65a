"""Pass 2: the documents that an index keeps -> tokens of both splits, in their order.

- Memory is bounded: a text is encoded in pieces, and few of them wait for a thread.
- The token <|endoftext|> stands before each document, and behind it what the tokenizer puts before
  a text, such as <|begin_of_text|>; the same characters in a text are text.
- Conversations (templates.py) are documents whose tokens a template decides.
"""
import os
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from corpus.chat_records import Refused, texts_of
from corpus.dedup_and_split import Index, check_unreadable
from corpus.documents import read_documents
from corpus.huggingface_tokenizers import train_tokenizer
from corpus.shards import BEGINS, LEARNT, SPLITS
from corpus.tokenizers import MOST_TOKENS, document_start, end_of_word

TOKENIZER_BYTES = 10**8     # of text, which a tokenizer of one's own is trained on
BLOCK = 1 << 18             # characters encoded at once


def split_document(texts, cut: int, find_cut):
    """Yield (split, text): a document up to the last whole character before byte `cut` trains, the
    rest validates. "" begins each, then come pieces of at most BLOCK characters. find_cut(text,
    start, end) says where a piece that begins at `start` ends; None: not before `end`."""
    rest = {}                   # {split: its text that is not yielded yet}
    for text in texts:
        if isinstance(text, Refused):       # pass 1 could read it
            raise text
        raw = text.encode()
        head = raw[:max(cut, 0)].decode(errors="ignore")
        cut -= len(raw)
        for split, part in (("train", head), ("val", text[len(head):])):
            if not part:
                continue
            if split not in rest:
                yield split, ""
            part = rest.get(split, "") + part
            start, end = 0, 0
            while len(part) - start > BLOCK and end is not None:
                end = find_cut(part, start, start + BLOCK)
                if end is not None:
                    yield split, part[start:end]
                    start = end
            rest[split] = part[start:]
    yield from rest.items()


class Encoded(NamedTuple):
    """Tokens of some documents of one split."""
    split: str
    tokens: np.ndarray          # (n,), uint16, or uint32 for more than 65,536
    size: int                   # bytes of text
    flags: np.ndarray | None = None     # of conversations: shards.LEARNT + BEGINS, uint8 (n,)


def tokenise(index: Index, encoding, template=None):
    """Pass 2: yield an Encoded of some documents, or conversations, at a time, in order. Raises
    ValueError at the end if the files have changed since pass 1. `template`: of conversations."""
    if template is None:
        parts = encode_pieces(pieces_of(index, encoding.find_cut), encoding)
    else:
        parts = encode_conversations(index, encoding, template)
    done = 0
    for part in parts:
        done += part.size
        yield part
    if done != index.size:
        raise ValueError("the input changed while it was read: run data.py again")


def pieces_of(index: Index, find_cut):
    """Yield (split, text) of the documents that are kept, as `split_document` does."""
    for document, cut in documents_of(index):
        yield from split_document(texts_of(document), cut, find_cut)


def documents_of(index: Index):
    """Yield (document, the bytes of it that train) of those that are kept."""
    documents = (document for path in index.files
                 for document in read_documents(path, index.field))
    for document, cut in zip(documents, index.cuts.tolist()):
        if cut >= 0:
            yield document, cut


def train_on(index: Index, n_tokens: int):
    """A tokenizer trained on the documents that train. Of more than TOKENIZER_BYTES these are each
    n-th, and of a long one its beginning."""
    is_read = np.zeros(len(index.cuts), bool)
    is_read[np.flatnonzero(index.cuts > 0)[::1 + index.size // TOKENIZER_BYTES]] = True
    cuts = np.where(is_read, np.minimum(index.cuts, TOKENIZER_BYTES), -1)
    pieces = pieces_of(index._replace(cuts=cuts), end_of_word)
    return train_tokenizer((text for split, text in pieces if split == "train"), n_tokens)


def encode_pieces(pieces, encoding):
    """Yield an Encoded of some pieces of text (split, text) at a time, in order."""
    start = document_start(encoding)

    def work(split, texts):
        tokens = [encoding.encode_to_numpy(text) if text else start for text in texts]
        tokens = np.concatenate(tokens, dtype=dtype_of(encoding), casting="unsafe")
        return Encoded(split, tokens, len("".join(texts).encode()))
    yield from in_threads(work, in_groups(pieces))


def encode_conversations(index: Index, encoding, template):
    """Yield an Encoded of some conversations at a time, in order."""
    refused = []                # what is wrong with each that the template refuses

    def work(split, conversations):
        tokens, flags, size = [], [np.zeros(0, "u1")], 0
        for messages in conversations:
            if isinstance(messages[0], Refused):        # pass 1 could read it
                raise messages[0]
            size += sum(len(text.encode()) for text in texts_of(messages))
            try:
                new, learnt = template.render(messages)
            except ValueError as error:
                refused.append(Refused(f"{messages.place}: {error}"))
                check_unreadable(refused, index.counts["documents"])
                continue
            tokens += new
            flags.append(LEARNT * np.array(learnt, "u1"))
            flags[-1][0] |= BEGINS
        return Encoded(split, np.array(tokens, dtype_of(encoding)), size, np.concatenate(flags))

    kept = (("train" if cut else "val", messages) for messages, cut in documents_of(index))
    yield from in_threads(work, in_groups(kept))
    check_unreadable(refused, index.counts["documents"], at_end=True)


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
    cores = os.cpu_count() or 1
    waiting = deque()
    with ThreadPoolExecutor(cores) as pool:
        for job in jobs:
            waiting.append(pool.submit(work, *job))
            if len(waiting) > 2 * cores:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
