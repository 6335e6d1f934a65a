"""From the files that people have to the shards that data.py reads; `python data.py` is program.py.

    program     the flags of data.py, what it makes and prints
    prepare     two passes over the documents: text to shards

    inputs      which files are read, and which of them validate by their names
    documents   the documents of a file
    file_formats        bytes that may be compressed, rows of tables
    chat_records        conversations in records: messages, prompt and completion, ShareGPT, Alpaca

    dedup_and_split     pass 1: which documents are kept, and which of them validate
    near_duplicates     MinHash of the documents
    encode      pass 2: tokens

    tokenizers  text to tokens and back        huggingface_tokenizers      those of transformers
    templates   conversations as tokens, and what is learnt of them

    shards      the files of a data set        mixtures    several sources in one run
    conversations       their windows          downloads   files from the network

Here: what stands between documents, and what is told on standard error."""
import sys
import time

from base.errors import one_line

EOT = "<|endoftext|>"           # stands between documents


def note(text: str) -> None:
    print(f"note: {one_line(text)}", file=sys.stderr, flush=True)


def counted(count: int, noun: str) -> str:
    """A number of things: "1 file", "2 files"."""
    return f"{count:,} {noun}" + ("s" if count != 1 else "")


def progress(label: str, total: int | None = None, done: int = 0):
    """Return count_bytes(n), to be called when n more bytes are done. Every five seconds it prints
    how many are, of `total` if that is known, to standard error."""
    of_total = f" of {total / 1e6:,.1f}" if total else ""
    printed = time.monotonic()

    def count_bytes(count: int) -> None:
        nonlocal done, printed
        done += count
        if time.monotonic() - printed >= 5:
            print(f"{label}: {done / 1e6:,.1f}{of_total} MB", file=sys.stderr, flush=True)
            printed = time.monotonic()
    return count_bytes
