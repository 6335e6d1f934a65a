"""Kinds of file that people have: how one is known, by its name or its first bytes, and what to do
with a kind that data.py does not read."""
import shlex
from pathlib import Path
from typing import NamedTuple


class Kind(NamedTuple):
    suffixes: str               # of names
    first_bytes: bytes          # of every such file; none if they do not tell
    clause: str                 # "it is ...", where a file of another name begins so
    advice: str                 # what to do
    at: int = 0                 # where the first bytes stand


PANDAS = ("python -c \"import pandas; pandas.read_{}('FILE').to_json('NEW.jsonl', "
          "orient='records', lines=True)\" makes a .jsonl of it, whose column text is read")
LFS_POINTER = b"version https://git-lfs"
KINDS = (
    Kind(".gz", b"\x1f\x8b", "it is compressed by gzip",
         "gunzip it first, or name it .txt.gz or .jsonl.gz"),
    Kind(".zst", b"\x28\xb5\x2f\xfd", "it is compressed by zstd",
         "unzstd it first, or name it .txt.zst or .jsonl.zst"),
    Kind(".xz", b"\xfd7zXZ\0", "it is compressed by xz", "unxz it first"),
    Kind(".bz2", b"BZh", "it is compressed by bzip2", "bunzip2 it first"),
    Kind(".zip", b"PK\x03\x04", "it is a zip archive", "unzip it first"),
    Kind(".7z", b"7z\xbc\xaf", "it is a 7z archive", "unpack it first"),
    Kind(".tar", b"ustar", "it is a tar archive", "unpack it first (tar -xf)", at=257),
    Kind(".tgz", b"", "", "unpack it first (tar -xf)"),
    Kind(".parquet", b"PAR1", "it is Parquet", "give it a name that ends in .parquet"),
    Kind(".arrow", b"ARROW1", "it is Arrow", PANDAS.format("feather")),
    Kind(".csv", b"", "", PANDAS.format("csv")),
    Kind(".tsv", b"", "", PANDAS.format("table")),
    Kind(".ndjson .jsonlines", b"", "", "rename it to .jsonl"),
    Kind(".pdf", b"%PDF", "it is a PDF", "pdftotext FILE NEW.txt makes a .txt of it"),
    Kind(".html .htm .docx .doc .epub .rtf", b"", "", "save its text as .txt"),
    Kind(".bin", b"", "", "tokens need no data.py: give their folder to train.py --data"),
    Kind(".npy", b"\x93NUMPY", "it is an array of NumPy",
         "give the text from which it was made"),
    Kind("", LFS_POINTER, "it is a pointer of Git LFS in place of the file",
         "run `git lfs pull` in the repository that it is from"),
    Kind("", b"<!DOCTYPE", "it is a web page in place of the file", "download it again"),
    Kind("", b"<html", "it is a web page in place of the file", "download it again"))

READ = (".txt", ".jsonl", ".json", ".parquet")
COMPRESSED = (".gz", ".zst")            # all but .parquet
START = 512                             # bytes, which tell the kind of a file
READ_KINDS = ".txt, .jsonl, .json (also .gz and .zst) and .parquet"


def kind_of(name: str) -> str:
    """The suffix of a name in lower case, before .gz or .zst: how the file is read."""
    path = Path(name.lower())
    if path.suffix in COMPRESSED and Path(path.stem).suffix not in ("", ".parquet"):
        return Path(path.stem).suffix
    return path.suffix


def advice_for(name: str) -> str:
    """What to do with a file of this name, which is not read."""
    suffix = kind_of(name)
    for kind in KINDS:
        if suffix in kind.suffixes.split():
            return kind.advice
    return "if it is text, copy it to a name that ends in .txt"


def kind_of_start(start: bytes) -> Kind | None:
    """The kind of the files that begin so; None if these bytes do not tell."""
    for kind in KINDS:
        if kind.first_bytes and start[kind.at:].startswith(kind.first_bytes):
            return kind
    return None


def pipe(path: Path, command: str) -> str:
    """A command of a shell that reads this file, decompressed."""
    name = shlex.quote(str(path))
    if path.suffix.lower() in COMPRESSED:
        program = "gunzip" if path.suffix.lower() == ".gz" else "unzstd"
        return f"{program} -c {name} | {command}"
    return f"{command} {name}"


def what_it_is(path: Path, other_than="") -> str | None:
    """What the first bytes of a file say that it is, as a clause; None if they say nothing, or what
    this suffix says."""
    with open(path, "rb") as file:
        kind = kind_of_start(file.read(START))
    if kind is not None:
        if other_than in kind.suffixes.split():
            return None
        return f"{kind.clause}: {kind.advice}".replace("FILE", shlex.quote(str(path)))
    if path.suffix == ".bin" and path.with_suffix(".idx").exists():
        return "it holds Megatron-LM's tokens, as the .idx beside it says"
    return None


def what_it_holds(path: Path, start: bytes) -> str | None:
    """What a text is that begins with these bytes, as a clause; None if they do not tell. They are
    decompressed where the file is compressed."""
    kind = kind_of_start(start)
    if kind is None:
        return None
    if path.suffix.lower() in COMPRESSED:
        return f"{kind.clause} once it is decompressed: decompress it, and then: {kind.advice}"
    return f"{kind.clause}: {kind.advice}".replace("FILE", shlex.quote(str(path)))


def why_not_text(path: Path, start: bytes, raw: bytes) -> str:
    """What a file is that begins with `start` and of which `raw` is not text, and what to do."""
    return what_it_holds(path, start) or guess_encoding(path, raw)


def guess_encoding(path: Path, raw: bytes) -> str:
    """The encoding that a file probably has of which these bytes are not UTF-8, and what to do."""
    odd, even = raw[1::2].count(0), raw[::2].count(0)
    if odd + even <= len(raw) // 50:
        encoding = "WINDOWS-1252"
        problem = ""
    else:
        if odd + even > len(raw) // 2 and min(odd, even) > len(raw) // 8:
            encoding = "UTF-32"
        elif 2 * min(odd, even) > max(odd, even):
            return f"{(odd + even) / len(raw):.0%} of it are NUL bytes: leave it out"
        else:
            encoding = "UTF-16LE" if odd > even else "UTF-16BE"
        problem = f"it looks like {encoding} without a byte-order mark: "
    command = pipe(path, f"iconv -f {encoding} -t UTF-8")
    return f"{problem}convert it, as by {command} > NEW{kind_of(path.name)}, or leave it out"
