"""Kinds of file that people have, by their names: how data.py reads one, or what to do with it.
Only tables and compressed files are known by their bytes, too.
"""
import codecs
import shlex
from pathlib import Path

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
ARROW_FILE = b"ARROW1"
STREAM_START = b"\xff\xff\xff\xff"          # of Arrow
STREAM_END = STREAM_START + bytes(4)
COMPRESSED = {".gz": b"\x1f\x8b", ".zst": b"\x28\xb5\x2f\xfd"}      # all but .parquet and .arrow
READ = (".txt", ".jsonl", ".json", ".parquet", ".arrow")
LINES = (".ndjson", ".jsonlines")       # read as .jsonl
READ_KINDS = ".txt, .jsonl, .json (also .gz and .zst), .parquet and .arrow"


def by_suffix(advice: dict[str, str]) -> dict[str, str]:
    """{suffix: advice} of {suffixes: advice}."""
    return {suffix: text for suffixes, text in advice.items() for suffix in suffixes.split()}


AS_IT_STANDS = by_suffix({      # read as .txt is, and how a better file is made
    ".csv": PANDAS.format("csv"), ".tsv": PANDAS.format("table"),
    ".html .htm": "its tags are text, too; trafilatura < FILE > NEW.txt makes a .txt of its text "
                  "alone",
    ".ipynb": "it is JSON with outputs; jupyter nbconvert --to markdown FILE makes a .md of it",
    ".rtf": "its marks are text, too; pandoc -t plain FILE -o NEW.txt makes a .txt of its text "
            "alone"})
NOT_READ = by_suffix({          # kinds that are refused, and what to do with them
    ".xz": "unxz it first", ".bz2": "bunzip2 it first",
    ".xlsx": PANDAS.format("excel"),
    ".docx .odt .epub .pptx": "pandoc -t plain FILE -o NEW.txt makes a .txt of it",
    ".doc": "soffice --headless --convert-to txt FILE makes a .txt of it",
    ".pdf": "pdftotext FILE NEW.txt makes a .txt of it",
    ".zip": "unzip FILE -d NEW, and give the folder NEW",
    ".7z": "7z x FILE -oNEW, and give the folder NEW",
    ".tar .tgz": "unpack it first (mkdir NEW && tar -xf FILE -C NEW), and give the folder NEW",
    ".warc .wet .wat": WARC,
    ".sqlite .sqlite3 .db": "sqlite3 FILE \"select json_object('text', COLUMN) from TABLE\" > "
                            "NEW.jsonl makes a .jsonl of a column (sqlite3 FILE .schema lists "
                            "them)",
    ".png .jpg .jpeg .gif": "leave it out",
    ".bin": f"tokens of llm.c's format need no data.py: give their folder to train.py --data; "
            f"{SHARD}",
    ".npy": "give the text from which it was made"})
ALSO_TEXT = (".bin", ".db")     # of these, endings that files of text have, too


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
        start = file.read(4)
    for suffix, first_bytes in COMPRESSED.items():
        if start.startswith(first_bytes):
            return suffix
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
    bare = whole.removesuffix(Path(whole).suffix) if whole.endswith(tuple(COMPRESSED)) else whole
    return any(one.endswith(f".{ending}") for one in (whole, bare) for ending in endings)


def advice_for(path: Path) -> str | None:
    """What to do with a file of this name; None if it is read."""
    advice = (AS_IT_STANDS | NOT_READ).get(kind_of(path.name))
    if advice is None:
        return None
    return advice.replace("FILE", shlex.quote(str(path))).replace("STEM", path.stem)


def pipe(path: Path, command: str) -> str:
    """A command of a shell that reads this file, decompressed."""
    name = shlex.quote(str(path))
    compression = compression_of(path)
    if compression is not None:
        program = "gunzip" if compression == ".gz" else "unzstd"
        return f"{program} -c < {name} | {command}"         # it refuses files of other names
    return f"{command} {name}"


def how_to_convert(path: Path, start: bytes) -> str:
    """What to do with a file that begins so and is not UTF-8."""
    encoding = "WINDOWS-1252"
    if start.startswith((codecs.BOM_UTF32_LE, codecs.BOM_UTF32_BE)):    # begins as UTF-16's does
        encoding = "UTF-32"
    elif start.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        encoding = "UTF-16"
    elif start[1:4] == bytes(3):
        encoding = "UTF-32LE"
    elif start[:3] == bytes(3):
        encoding = "UTF-32BE"
    elif start[:1] == b"\0":
        encoding = "UTF-16BE"
    elif b"\0" in start:
        encoding = "UTF-16LE"
    command = pipe(path, f"iconv -f {encoding} -t UTF-8")
    return f"if it is text, convert it, as by {command} > NEW{kind_of(path.name)}, or leave it out"
