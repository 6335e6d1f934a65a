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
SHARD = ("mkdir -p NEW && python -c \"import numpy as np; t = np.memmap('FILE', '<u2', 'r'); "
         "[open(f'NEW/gpt2_STEM_{i:06d}.bin', 'wb').write(np.array([20240520, 1, len(p)] "
         "+ 253 * [0], '<i4').tobytes() + p.tobytes()) for i, p in enumerate(t[j:j + 10**8] for j "
         "in range(0, len(t), 10**8))]\" makes shards of nanoGPT's tokens in a folder NEW, which "
         "train.py --data NEW reads")
WARC = ("python -c \"import json, sys, warcio, trafilatura; [print(json.dumps(dict(text=t))) for r "
        "in warcio.ArchiveIterator(open('FILE', 'rb')) if r.rec_type in ('response', 'conversion') "
        "for b in [r.content_stream().read().decode(errors='replace')] for t in [b if r.rec_type "
        "== 'conversion' else trafilatura.extract(b)] if t]\" > NEW.jsonl makes a .jsonl of its "
        "texts, after pip install warcio trafilatura lxml_html_clean")
LLMC = [magic.to_bytes(4, "little") for magic in (20240520, 20240801)]
LLMC_ADVICE = "it needs no data.py: give its folder to train.py --data"
LFS_POINTER = b"version https://git-lfs"
ARROW_FILE = b"ARROW1"
STREAM_START = b"\xff\xff\xff\xff"          # of Arrow
STREAM_END = STREAM_START + bytes(4)
KINDS = (
    Kind(".gz", b"\x1f\x8b", "it is compressed by gzip", "gunzip it first"),
    Kind(".zst", b"\x28\xb5\x2f\xfd", "it is compressed by zstd", "unzstd it first"),
    Kind(".xz", b"\xfd7zXZ\0", "it is compressed by xz", "unxz it first"),
    Kind(".bz2", b"BZh", "it is compressed by bzip2", "bunzip2 it first"),
    Kind(".xlsx", b"PK\x03\x04", "it is a workbook of Excel", PANDAS.format("excel")),
    Kind(".docx .odt .epub .pptx", b"PK\x03\x04", "it is a document in a zip archive",
         "pandoc -t plain FILE -o NEW.txt makes a .txt of it"),
    Kind(".zip", b"PK\x03\x04", "it is a zip archive",
         "unzip FILE -d NEW, and give the folder NEW"),
    Kind(".7z", b"7z\xbc\xaf", "it is a 7z archive", "7z x FILE -oNEW, and give the folder NEW"),
    Kind(".tar .tgz", b"ustar", "it is a tar archive",
         "unpack it first (mkdir NEW && tar -xf FILE -C NEW), and give the folder NEW", at=257),
    Kind(".parquet", b"PAR1", "it is Parquet", "give it a name that ends in .parquet"),
    Kind(".arrow", ARROW_FILE, "it is Arrow", "give it a name that ends in .arrow"),
    Kind(".warc .wet .wat", b"WARC/", "it is a WARC archive", WARC),
    Kind(".sqlite .sqlite3 .db", b"SQLite format 3\0", "it is a database of SQLite",
         "sqlite3 FILE \"select json_object('text', COLUMN) from TABLE\" > NEW.jsonl makes a "
         ".jsonl of a column (sqlite3 FILE .schema lists them)"),
    Kind(".csv", b"", "", PANDAS.format("csv")),
    Kind(".tsv", b"", "", PANDAS.format("table")),
    Kind(".pdf", b"%PDF", "it is a PDF", "pdftotext FILE NEW.txt makes a .txt of it"),
    Kind(".html .htm", b"", "", "its tags are text, too; trafilatura < FILE > NEW.txt makes a .txt "
         "of its text alone"),
    Kind(".ipynb", b"", "", "it is JSON with outputs; jupyter nbconvert --to markdown FILE makes a "
         ".md of it"),
    Kind(".rtf", b"", "", "its marks are text, too; pandoc -t plain FILE -o NEW.txt makes a .txt "
         "of its text alone"),
    Kind(".doc", b"\xd0\xcf\x11\xe0", "it is a document of Office",
         "soffice --headless --convert-to txt FILE makes a .txt of it"),
    Kind(".png .jpg .jpeg .gif", b"\x89PNG", "it is a picture", "leave it out"),
    Kind(".png .jpg .jpeg .gif", b"\xff\xd8\xff", "it is a picture", "leave it out"),
    Kind(".png .jpg .jpeg .gif", b"GIF8", "it is a picture", "leave it out"),
    Kind(".bin", LLMC[0], "it holds tokens of llm.c", LLMC_ADVICE),
    Kind(".bin", LLMC[1], "it holds tokens of llm.c", LLMC_ADVICE),
    Kind(".bin", b"", "", SHARD),
    Kind(".npy", b"\x93NUMPY", "it is an array of NumPy",
         "give the text from which it was made"),
    Kind("", LFS_POINTER, "it is a pointer of Git LFS in place of the file",
         "run `git lfs pull` in the repository that it is from"),
    Kind("", b"<!DOCTYPE", "it is a web page in place of the file", "download it again"),
    Kind("", b"<html", "it is a web page in place of the file", "download it again"))
WEB_PAGES = KINDS[-2:]
AS_IT_STANDS = (".csv", ".tsv", ".html", ".htm", ".ipynb", ".rtf")      # of text; there is better

READ = (".txt", ".jsonl", ".json", ".parquet", ".arrow")
LINES = (".ndjson", ".jsonlines")       # read as .jsonl
COMPRESSED = (".gz", ".zst")            # all but .parquet and .arrow
START = 512                             # bytes, which tell the kind of a file
READ_KINDS = ".txt, .jsonl, .json (also .gz and .zst), .parquet and .arrow"


def table_kind(path: Path) -> str | None:
    """.parquet or .arrow, by the first and last bytes of a file or by its name; None for others."""
    with open(path, "rb") as file:
        start = file.read(8)
        file.seek(max(file.seek(0, 2) - 8, 0))
        end = file.read()
    if start.startswith(b"PAR1") and end.endswith(b"PAR1"):
        return ".parquet"
    if (start.startswith(ARROW_FILE) and end.endswith(ARROW_FILE)) or (
            start.startswith(STREAM_START) and end == STREAM_END):
        return ".arrow"
    suffixes = {".parquet": ".parquet", ".arrow": ".arrow", ".feather": ".arrow"}
    return suffixes.get(path.suffix.lower())


def compression_of(path: Path) -> str | None:
    """.gz or .zst, by the first bytes of a file or by its name; None for others."""
    with open(path, "rb") as file:
        kind = kind_of_start(file.read(4))
    if kind is not None and kind.suffixes in COMPRESSED:
        return kind.suffixes
    suffix = path.suffix.lower()
    return suffix if suffix in COMPRESSED else None


def kind_of(name: str) -> str:
    """The suffix of a name in lower case, before .gz or .zst: how the file is read."""
    path = Path(name.lower())
    if path.suffix in COMPRESSED and Path(path.stem).suffix not in ("", ".parquet", ".arrow"):
        return Path(path.stem).suffix
    return path.suffix


def has_ending(name: str, endings) -> bool:
    """Whether a name, before .gz or .zst, or as a whole, ends in one of these endings, as md for
    a.MD and a.md.gz, or is one, as LICENSE. The endings are in lower case."""
    whole = f".{name.lower()}"
    bare = whole.removesuffix(Path(whole).suffix) if whole.endswith(COMPRESSED) else whole
    return any(one.endswith(f".{ending}") for one in (whole, bare) for ending in endings)


def advice_for(path: Path) -> str:
    """What to do with a file of this name, which is not read."""
    suffix = kind_of(path.name)
    for kind in KINDS:
        if suffix in kind.suffixes.split():
            return kind.advice.replace("FILE", shlex.quote(str(path))).replace("STEM", path.stem)
    return "give folders or files of such, or a file of text by its name"


def kind_of_start(start: bytes) -> Kind | None:
    """The kind of the files that begin so; None if these bytes do not tell."""
    for kind in KINDS:
        if kind.first_bytes and start[kind.at:].startswith(kind.first_bytes):
            return kind
    return None


def pipe(path: Path, command: str) -> str:
    """A command of a shell that reads this file, decompressed."""
    name = shlex.quote(str(path))
    compression = compression_of(path)
    if compression is not None:
        program = "gunzip" if compression == ".gz" else "unzstd"
        return f"{program} -c < {name} | {command}"         # it refuses files of other names
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
    if compression_of(path) is not None:
        return f"{kind.clause} once it is decompressed: decompress it, and then: {kind.advice}"
    return f"{kind.clause}: {kind.advice}".replace("FILE", shlex.quote(str(path)))


def why_not_text(path: Path, start: bytes, raw: bytes) -> str:
    """What a file is that begins with `start` and of which `raw` is not text, and what to do."""
    return what_it_holds(path, start) or guess_encoding(path, raw)


def guess_encoding(path: Path, raw: bytes) -> str:
    """The encoding that a file probably has of which these bytes are not UTF-8, and what to do."""
    odd, even = raw[1::2].count(0), raw[::2].count(0)
    controls = sum(raw.count(byte) for byte in range(1, 32) if byte not in b"\t\n\v\f\r\x1b")
    if odd + even <= len(raw) // 50 and controls > len(raw) // 20:
        return "it is not text: leave it out"
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
