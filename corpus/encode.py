"""Pass 2: the documents that an index keeps -> tokens of both splits, in their order.

- Memory is bounded: a text is encoded in pieces, and few of them wait for a thread.
- The token <|endoftext|> stands before each document, and behind it what the tokenizer puts before
  a text, such as <|begin_of_text|>; the same characters in a text are text.
- Conversations (conversations.py) are documents whose tokens a template decides.
"""
from collections import deque
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np

from corpus.bpe import train_bpe
from corpus.chat_formats import texts_of
from corpus.compressed import BLOCK
from corpus.dedup_and_split import Index, check_unreadable, read_texts, usable_cores
from corpus.file_changes import change_of
from corpus.formats import read_documents
from corpus.notes_and_progress import note, progress
from corpus.records import NotText
from corpus.shards import BEGINS, LEARNT, SPLITS
from corpus.tiktoken_tokenizers import CUT, MOST_TOKENS, write_tokens
from corpus.tokenizers import document_start

TOKENIZER_BYTES = 10**8     # of text, which a tokenizer of one's own is trained on


def split_document(blocks, cut: int, place=CUT):
    """Yield (split, text): a document up to the last whole character before byte `cut` trains, the
    rest validates. "" begins each, then come pieces of at most BLOCK characters, cut at the last
    `place`. A text without such a place, which is not prose, is cut anywhere and may take a few
    tokens more. Without a `place` each part of the document is one piece."""
    rest = {}                   # {split: the parts of its text that are not yielded yet}
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
                rest[split] = []
            rest[split].append(text)
            if place is None:
                continue
            text = "".join(rest[split])
            start = 0
            while len(text) - start > BLOCK:
                match = place.match(text, start, start + BLOCK)
                end = match.end() if match else start + BLOCK
                yield split, text[start:end]
                start = end
            rest[split] = [text[start:]]
    for split, parts in rest.items():
        yield split, "".join(parts)


class Encoded(NamedTuple):
    """Tokens of some documents of one split."""
    split: str
    tokens: np.ndarray          # (n,), uint16, or uint32 for more than 65,536
    size: int                   # bytes of text
    flags: np.ndarray | None = None     # of conversations: shards.LEARNT + BEGINS, uint8 (n,)


def tokenise(index: Index, encoding, template=None):
    """Pass 2: yield an Encoded of some documents, or conversations, at a time, in order. Raises
    ValueError at the end if the files have changed since pass 1. `template`: of conversations, as
    published_templates.get_template returns it."""
    if template is None:
        parts = encode_pieces(pieces_of(index, encoding.cut), encoding)
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
    for (_, blocks), cut in zip(read_texts(index.files, index.field), index.cuts.tolist()):
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


def encode_pieces(pieces, encoding):
    """Yield an Encoded of some pieces of text (split, text) at a time, in order."""
    start = document_start(encoding)

    def work(split, texts):
        tokens = [encoding.encode_to_numpy(text) if text
                  else start for text in texts]
        tokens = np.concatenate(tokens, dtype=dtype_of(encoding), casting="unsafe")
        return Encoded(split, tokens, len("".join(texts).encode()))
    yield from in_threads(work, in_groups(pieces))


def encode_conversations(index: Index, encoding, template):
    """Yield an Encoded of some conversations at a time, in order."""
    refused = []                # what is wrong with each that the template refuses

    def work(split, conversations):
        tokens, flags, size = [], [np.zeros(0, "u1")], 0
        for messages in conversations:
            if isinstance(messages[0], NotText):        # pass 1 could read it
                raise messages[0]
            size += sum(len(text.encode()) for text in texts_of(messages))
            try:
                template.check(messages)
                new, learnt = template.render(messages)
            except ValueError as error:
                refused.append(NotText(f"the conversation {beginning_of(messages)}: {error}"))
                check_unreadable(refused, index.counts["documents"])
                continue
            tokens += new
            flags.append(LEARNT * np.array(learnt, "u1"))
            flags[-1][0] |= BEGINS
        return Encoded(split, np.array(tokens, dtype_of(encoding)), size, np.concatenate(flags))

    conversations = (messages for path in index.files for messages in read_documents(path, None))
    kept = (("train" if cut else "val", messages)
            for messages, cut in zip(conversations, index.cuts.tolist()) if cut >= 0)
    yield from in_threads(work, in_groups(kept))
    check_unreadable(refused, index.counts["documents"], at_end=True)
    if template.reasonings_left_out > 0:
        note(f"{template.reasonings_left_out:,} answers have a reasoning that the model's own "
             f"template leaves out where other messages follow")


def beginning_of(messages) -> str:
    """How a conversation can be found in its file."""
    text = " ".join(message.content for message in messages).strip()
    return f"that begins {text[:60]!r}"


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
