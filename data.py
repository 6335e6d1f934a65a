"""Text to tokens to shards to batches.

    .txt .jsonl .py            pass 1: hash, drop duplicates, choose the split
         |                     pass 2: tokenize in bounded pieces
         v
    train_000000.bin ...       256 int32 of header, then uint16 tokens
    val_000000.bin ...         <|endoftext|> document <|endoftext|> document ...
    meta.json                  tokenizer, counts, fingerprint: written last
         |
         v
    window w of a shard        tokens [w T, w T + T]: T inputs, and the same shifted by one
    sequence s of the run      window permutation(seed, s // windows)[s % windows]

A shard has the format of llm.c and modded-nanogpt, so theirs drop in: a header of magic 20240520,
version 1 and the token count, then the tokens; without a meta.json they are taken for GPT-2's.

What holds: memory does not grow with the text (a hash a document aside); the tokens of a long
document are those of tokenizing it in one go; which documents validate is a function of (seed,
content); each epoch reads every window once; shards appear whole or not at all.

    python data.py                                  # the standard library's source, as bytes
    python data.py --dataset shakespeare            # a download, GPT-2's tokens
    python data.py --input a.txt b.jsonl --out data/mine
"""
import argparse
import codecs
import hashlib
import json
import os
import sys
import sysconfig
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import requests
import tiktoken

MAGIC, VERSION, HEADER = 20240520, 1, 256       # llm.c: the header is 256 int32
EOT = "<|endoftext|>"
PIECE = 2 ** 20                                 # bytes of a long document in memory at a time
VAL_SHARE = 20                                  # one document in 20 validates, or 1/20 of each
DATASETS = {                                    # url, sha256, what separates its documents
    "shakespeare": ("https://raw.githubusercontent.com/karpathy/char-rnn/master/data/"
                    "tinyshakespeare/input.txt",
                    "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed", None),
    "tinystories": ("https://huggingface.co/datasets/roneneldan/TinyStories/resolve/main/"
                    "TinyStoriesV2-GPT4-train.txt", None, EOT),
}


# ---------------------------------------------------------------------------------------------
# Tokenizers
# ---------------------------------------------------------------------------------------------


def get_tokenizer(name: str) -> tiktoken.Encoding:
    """"gpt2": GPT-2's BPE, 50257 tokens. "bytes": the 256 bytes and <|endoftext|>, 257 tokens."""
    if name == "bytes":
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,64}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        raise ValueError(f"there is no tokenizer {name!r}: gpt2 or bytes")
    try:
        return tiktoken.get_encoding("gpt2")
    except (requests.RequestException, OSError, ValueError) as error:
        raise OSError(
            f"GPT-2's vocabulary could not be fetched ({type(error).__name__}). Without a network, "
            "put vocab.bpe and encoder.json of "
            "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/ into a directory as "
            "6d1cbeee0f20b3d9449abfede4726ed8212e3aee and "
            "6c7ea1a7e38e3a7f062df639a5b80947f075ffe6 and set TIKTOKEN_CACHE_DIR to it; "
            "--tokenizer bytes needs no files") from error


# ---------------------------------------------------------------------------------------------
# Text: every reader yields (starts a document, piece of its text)
# ---------------------------------------------------------------------------------------------


def read_text(path: Path):
    """Pieces of a UTF-8 file, about PIECE bytes each, cut where no token is cut.

    GPT-2's pattern never matches across "non-space, then space" (each of its alternatives is
    white space alone, or at most one space and then none), and what it matches after such a place
    does not depend on what came before: tokens of the pieces are the tokens of the whole. A text
    without any such place in a whole piece is cut where the piece ends.
    """
    decoder, read, rest = codecs.getincrementaldecoder("utf-8")(), 0, ""
    with open(path, "rb") as file:
        while block := file.read(PIECE):
            pending = len(decoder.getstate()[0])
            try:
                text = rest + decoder.decode(block)
            except UnicodeDecodeError as error:
                raise ValueError(f"{path} is not UTF-8 text (byte {read - pending + error.start}): "
                                 "convert it first") from error
            read += len(block)
            cut = len(text)
            while (cut := max(text.rfind(" ", 0, cut), text.rfind("\n", 0, cut))) > 0:
                if not text[cut - 1].isspace():
                    break
            cut = cut if cut > 0 else len(text)
            yield text[:cut]
            rest = text[cut:]
    if decoder.getstate()[0]:
        raise ValueError(f"{path} is not UTF-8 text: its last character is cut off")
    if rest:
        yield rest


def read_file(path: Path):
    """A file is a document."""
    starts = True
    for text in read_text(path):
        yield starts, text
        starts = False


def read_separated(path: Path):
    """Documents between lines of <|endoftext|>."""
    rest = ""
    for text in read_text(path):
        *whole, rest = (rest + text).split(EOT)
        yield from ((True, document.strip()) for document in whole)
    yield True, rest.strip()


def read_jsonl(path: Path):
    """A line is a document: a JSON object whose field "text" holds it."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(f"{path}, line {number}: not a JSON object with a field \"text\" "
                                 f"({type(error).__name__})") from error
            if not isinstance(text, str):
                raise ValueError(f"{path}, line {number}: the field \"text\" is no string")
            # JSON can spell half a surrogate pair, which UTF-8 cannot: it becomes U+FFFD.
            yield True, text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def own_files(names) -> list:
    """(path, reader) of --input; refuses what is missing, empty or of another kind."""
    sources = []
    for path in map(Path, names):
        if not path.is_file():
            raise FileNotFoundError(f"--input {path}: there is no such file")
        if path.stat().st_size == 0:
            raise ValueError(f"--input {path} is empty")
        if path.suffix not in (".txt", ".jsonl"):
            raise ValueError(f"--input {path}: .txt (a document) or .jsonl (one a line)")
        sources.append((path, read_jsonl if path.suffix == ".jsonl" else read_file))
    return sources


def standard_library() -> list:
    """(path, reader) of the .py files of the running Python, tests and packages left out."""
    root = Path(sysconfig.get_path("stdlib"))
    skip = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__"}
    files = [p for p in sorted(root.rglob("*.py"))
             if not skip & set(p.relative_to(root).parts) and p.stat().st_size > 0]
    return [(p, read_file) for p in files]


def fetch(url: str, path: Path, sha256: str | None = None, tries: int = 5) -> None:
    """Download url to path: streamed, resumed by Range after a break, its length and, where known,
    its checksum verified. Raises ConnectionError after `tries` breaks."""
    part = path.with_name(path.name + ".part")
    for attempt in range(tries):
        try:
            have = part.stat().st_size if part.exists() else 0
            headers = {"Range": f"bytes={have}-"} if have else {}
            with requests.get(url, headers=headers, stream=True, timeout=30) as answer:
                if answer.status_code == 416:           # nothing after what we have: start over
                    part.unlink()
                    continue
                answer.raise_for_status()
                have = have if answer.status_code == 206 else 0
                length = answer.headers.get("Content-Length")
                total = have + int(length) if length else None
                with open(part, "ab" if have else "wb") as file:
                    for block in answer.iter_content(2 ** 20):
                        file.write(block)
                        have += len(block)
                        print(f"\r{path.name}: {have / 1e6:.1f}" +
                              (f" of {total / 1e6:.1f}" if total else "") + " MB",
                              end="", file=sys.stderr, flush=True)
            print(file=sys.stderr)
            if total is not None and have != total:
                raise requests.ConnectionError(f"{have} of {total} bytes came")
            if sha256 is not None:
                with open(part, "rb") as file:
                    if hashlib.file_digest(file, "sha256").hexdigest() != sha256:
                        part.unlink()
                        raise requests.ConnectionError("the checksum is wrong")
            os.replace(part, path)
            return
        except requests.RequestException as error:
            problem = error
            if attempt + 1 < tries:
                time.sleep(2 ** attempt / 2)
    raise ConnectionError(f"{url} could not be downloaded ({type(problem).__name__}); a text of "
                          "your own goes in with --input FILE, and python data.py alone needs no "
                          "network")


# ---------------------------------------------------------------------------------------------
# Text to shards
# ---------------------------------------------------------------------------------------------


def survey(sources, seed: int) -> tuple[np.ndarray, int]:
    """Pass 1: how many bytes of each document train, in reading order; the rest of it validates.

    All of them, or none if the document's seeded hash says so (one in 20); fewer than 20 documents
    each keep their last 5% for validation. -1: not used, because empty or seen before. Returns
    that and the number of duplicates.
    """
    digests, sizes = [], []
    for path, reader in sources:
        for starts, text in reader(path):
            if starts:
                hasher = hashlib.blake2b(digest_size=16, key=seed.to_bytes(8, "little"))
                digests.append(b"")
                sizes.append(0)
            data = text.encode()
            hasher.update(data)
            digests[-1] = hasher.digest()
            sizes[-1] += len(data)

    first = {}                                          # digest -> first document with it
    for document, digest in enumerate(digests):
        if sizes[document]:
            first.setdefault(digest, document)
    if not first:
        raise ValueError("the input holds no text at all")
    train_bytes = np.full(len(sizes), -1)
    used = np.array([first[digest] for digest in sorted(first)])
    train_bytes[used] = np.array(sizes)[used]
    if len(used) < VAL_SHARE:
        train_bytes[used] -= train_bytes[used] // VAL_SHARE
    else:
        train_bytes[used[:len(used) // VAL_SHARE]] = 0  # the smallest digests: a fair draw
    return train_bytes, np.count_nonzero(sizes) - len(used)


class ShardWriter:
    """Tokens of one split into shards of at most `shard_tokens`, under names that no reader looks
    at until `publish`."""

    def __init__(self, directory: Path, split: str, shard_tokens: int):
        self.directory, self.split, self.shard_tokens = directory, split, shard_tokens
        self.digest, self.tokens, self.text_bytes = hashlib.sha256(), 0, 0
        self.shards, self.file, self.room = [], None, 0

    def write(self, tokens: np.ndarray) -> None:
        """tokens (N,) of any integer type."""
        tokens = tokens.astype("<u2")
        self.digest.update(tokens)
        self.tokens += len(tokens)
        while len(tokens):
            if self.room == 0:
                self.close()
                name = f"{self.split}_{len(self.shards):06d}.bin"
                self.shards.append(name)
                self.file = open(self.directory / f".{name}.tmp", "wb")
                self.file.write(bytes(4 * HEADER))
                self.room = self.shard_tokens
            self.file.write(tokens[:self.room])
            written = min(len(tokens), self.room)
            self.room -= written
            tokens = tokens[written:]

    def close(self) -> None:
        """Complete the open shard: its header, now that the count is known."""
        if self.file is not None:
            header = np.zeros(HEADER, dtype="<i4")
            header[:3] = MAGIC, VERSION, self.shard_tokens - self.room
            self.file.seek(0)
            self.file.write(header)
            self.file.flush()
            os.fsync(self.file.fileno())
            self.file.close()
            self.file = None

    def publish(self) -> None:
        for name in self.shards:
            os.replace(self.directory / f".{name}.tmp", self.directory / name)


def write_shards(sources, directory: Path, tokenizer_name: str, seed: int,
                 shard_tokens: int) -> dict:
    """Both passes: sources to train_*.bin, val_*.bin and meta.json in `directory`. Returns what
    meta.json holds. Raises ValueError for what is no text, OSError for what cannot be written."""
    tokenizer = get_tokenizer(tokenizer_name)
    train_bytes, duplicates = survey(sources, seed)
    writers = {split: ShardWriter(directory, split, shard_tokens) for split in ("train", "val")}
    separator = np.array([tokenizer.eot_token])
    waiting = []                                        # (split, starts a document, text)

    def encode(job):
        return tokenizer.encode_to_numpy(job[2], disallowed_special=())

    def flush(pool):
        for (split, starts, text), tokens in zip(waiting, pool.map(encode, waiting)):
            writers[split].write(np.concatenate([separator, tokens]) if starts else tokens)
            writers[split].text_bytes += len(text.encode())
        waiting.clear()

    def clean():
        for leftover in directory.glob(".*.tmp"):       # also of a run that was killed
            leftover.unlink()

    clean()
    try:
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            document, size = -1, 0
            for path, reader in sources:
                for starts, text in reader(path):
                    if starts:
                        document, started = document + 1, set()
                        left = train_bytes[document]
                    if left < 0:
                        continue
                    data = text.encode()
                    head = data[:left].decode(errors="ignore")      # a cut falls between characters
                    left = max(0, left - len(data))
                    for split, part in (("train", head), ("val", text[len(head):])):
                        if part:
                            waiting.append((split, split not in started, part))
                            started.add(split)
                    size += len(data)
                    if size > 8 * PIECE or len(waiting) > 4096:
                        flush(pool)
                        size = 0
            flush(pool)
        for writer in writers.values():
            writer.close()
            if writer.tokens == 0:
                raise ValueError(f"there is too little text for a {writer.split} split")
        (directory / "meta.json").unlink(missing_ok=True)
        for split, writer in writers.items():
            for old in directory.glob(f"{split}_*.bin"):
                old.unlink()
            writer.publish()
    finally:
        clean()
        for writer in writers.values():
            writer.close()
    train, val = writers["train"], writers["val"]
    meta = dict(tokenizer=tokenizer_name, vocab_size=tokenizer.n_vocab, seed=seed,
                documents=int((train_bytes >= 0).sum()), duplicates=int(duplicates),
                train_tokens=train.tokens, val_tokens=val.tokens,
                train_bytes=train.text_bytes, val_bytes=val.text_bytes,
                bytes_per_token=val.text_bytes / val.tokens,
                fingerprint=train.digest.hexdigest()[:32] + val.digest.hexdigest()[:32])
    aside = directory / ".meta.json.tmp"
    aside.write_text(json.dumps(meta, indent=1) + "\n")
    os.replace(aside, directory / "meta.json")
    return meta


# ---------------------------------------------------------------------------------------------
# Shards to batches
# ---------------------------------------------------------------------------------------------


class TokenDataset:
    """The windows of one split ("train" or "val") of a directory of shards, read by memmap.

    meta        tokenizer, vocab_size, bytes_per_token (None: unknown), fingerprint
    n_tokens    in all shards
    n_windows   of seq_len + 1 tokens, the last of one being the first of the next
    """

    def __init__(self, directory, split: str, seq_len: int):
        self.seq_len, directory = seq_len, Path(directory)
        self.paths = sorted(directory.glob(f"*{split}*.bin"))
        if not self.paths:
            command = "python data.py" + ("" if directory == Path("data/python") else
                                          f" --input FILE --out {directory}")
            raise FileNotFoundError(f"no {split} shards in {directory}: make them with `{command}`")
        self.shards = [self._open(path) for path in self.paths]
        self.n_tokens = sum(map(len, self.shards))
        windows = [max(0, (len(shard) - 1) // seq_len) for shard in self.shards]
        self.starts = np.cumsum([0, *windows])          # first window of each shard, and the end
        self.n_windows = int(self.starts[-1])
        if self.n_windows == 0:
            raise ValueError(f"{directory}: the {split} split has {self.n_tokens} tokens, less than "
                             f"one window of {seq_len} + 1: lower --seq-len or add text")
        self.meta = self._read_meta(directory)
        self.epoch, self.permutation = None, None

    @staticmethod
    def _open(path: Path) -> np.memmap:
        size = path.stat().st_size
        header = np.fromfile(path, dtype="<i4", count=HEADER)
        if len(header) < HEADER or header[0] != MAGIC or header[1] != VERSION:
            raise ValueError(f"{path} is no token shard: its header is not {MAGIC}, {VERSION}")
        count = int(header[2])
        if size != 4 * HEADER + 2 * count:
            raise ValueError(f"{path} is damaged: {count} tokens need {4 * HEADER + 2 * count} "
                             f"bytes, the file has {size}: make it again with data.py")
        return np.memmap(path, dtype="<u2", mode="r", offset=4 * HEADER, shape=(count,))

    def _read_meta(self, directory: Path) -> dict:
        path = directory / "meta.json"
        if not path.exists():                           # llm.c's shards: GPT-2's tokens
            names = [(p.name, len(s)) for p, s in zip(self.paths, self.shards)]
            return dict(tokenizer="gpt2", vocab_size=50257, bytes_per_token=None,
                        fingerprint=hashlib.sha256(repr(names).encode()).hexdigest())
        try:
            meta = json.loads(path.read_bytes())
            return {key: meta[key] for key in ("tokenizer", "vocab_size", "bytes_per_token",
                                               "fingerprint")}
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path} is damaged ({type(error).__name__}): make it again with "
                             "data.py") from error

    def order(self, seed: int, first: int, count: int) -> np.ndarray:
        """Window numbers (count,) of sequences first ... of an endless stream in which epoch e is
        the permutation of all windows drawn from (seed, e)."""
        sequences = np.arange(first, first + count)
        out = np.empty(count, dtype=np.int64)
        for epoch in range(first // self.n_windows, (first + count - 1) // self.n_windows + 1):
            if epoch != self.epoch:
                self.permutation = np.random.default_rng([seed, epoch]).permutation(self.n_windows)
                self.epoch = epoch
            inside = sequences // self.n_windows == epoch
            out[inside] = self.permutation[sequences[inside] % self.n_windows]
        return out

    def windows(self, indices) -> np.ndarray:
        """Window numbers (B,) -> tokens (B, seq_len + 1), int64."""
        rows = []
        for index in indices:
            shard = int(np.searchsorted(self.starts, index, side="right")) - 1
            start = (index - self.starts[shard]) * self.seq_len
            rows.append(self.shards[shard][start:start + self.seq_len + 1])
        return np.stack(rows).astype(np.int64)

    def check(self, part: int, parts: int) -> None:
        """Look for a token beyond the vocabulary in the part-th of `parts` shares of all tokens;
        raises ValueError."""
        vocab_size = self.meta["vocab_size"]
        for path, shard in zip(self.paths, self.shards):
            for start in range(part * PIECE, len(shard), parts * PIECE):
                piece = shard[start:start + PIECE]
                if piece.max() >= vocab_size:
                    where = int((piece >= vocab_size).argmax())
                    raise ValueError(f"{path}: token {start + where} is {piece[where]}, beyond the "
                                     f"vocabulary of {vocab_size} ({self.meta['tokenizer']})")


# ---------------------------------------------------------------------------------------------
# Command line
# ---------------------------------------------------------------------------------------------


def main() -> None:
    parser = argparse.ArgumentParser(description="Turn text into token shards.",
                                     allow_abbrev=False)
    parser.error = lambda message: parser.exit(2, f"data.py: {message}\n")
    parser.add_argument("--dataset", default="python", choices=["python", *DATASETS],
                        help="python: the standard library's source, no network (default)")
    parser.add_argument("--input", nargs="+", metavar="FILE",
                        help="own text: .txt (a document) or .jsonl (field \"text\" of each line)")
    parser.add_argument("--tokenizer", choices=["gpt2", "bytes"],
                        help="default: gpt2, and bytes for the dataset python")
    parser.add_argument("--out", metavar="DIR", help="default: data/<dataset>")
    parser.add_argument("--seed", type=int, default=0, help="of the validation split (default 0)")
    parser.add_argument("--shard-tokens", type=int, default=100_000_000, metavar="N",
                        help="tokens a shard (default %(default)s)")
    args = parser.parse_args()
    if args.shard_tokens < 1 or not 0 <= args.seed < 2 ** 63:
        parser.error("--shard-tokens must be at least 1, --seed at least 0")
    if args.input and not args.out:
        parser.error("--input needs --out DIR")
    tokenizer = args.tokenizer or ("gpt2" if args.input or args.dataset != "python" else "bytes")
    out = Path(args.out or f"data/{args.dataset}")
    try:
        sources = own_files(args.input) if args.input else []
        get_tokenizer(tokenizer)                        # before a long download
        try:
            out.mkdir(parents=True, exist_ok=True)
            (out / ".writable").touch()
            (out / ".writable").unlink()
        except OSError as error:
            raise OSError(f"--out {out} is not a directory that can be written: "
                          f"{error.strerror}") from error
        if not args.input and args.dataset == "python":
            sources = standard_library()
        elif not args.input:
            url, sha256, separator = DATASETS[args.dataset]
            text = out / url.rsplit("/", 1)[1]
            if not text.exists():
                fetch(url, text, sha256)
            sources = [(text, read_separated if separator else read_file)]
        meta = write_shards(sources, out, tokenizer, args.seed, args.shard_tokens)
    except ConnectionError as error:
        parser.exit(1, f"data.py: {error}\n")
    except (ValueError, OSError) as error:
        parser.error(str(error))
    print(f"{meta['documents']:,} documents ({meta['duplicates']:,} duplicates dropped) in {out}: "
          f"{meta['train_tokens']:,} training and {meta['val_tokens']:,} validation tokens of "
          f"{tokenizer}, {meta['bytes_per_token']:.2f} bytes each")
    where = "" if out == Path("data/python") else f" --data {out}"
    print(f"now:  python train.py{where}")
    print(f"or:   torchrun --nproc_per_node=8 train.py --tp 2 --pp 2{where}")


if __name__ == "__main__":
    main()
