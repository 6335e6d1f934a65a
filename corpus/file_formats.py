"""The kinds of file: bytes that may be compressed, and rows of tables. A file that is damaged or
cut off is refused by its name: none is read in part."""
import importlib
import io
import sys
import zlib
from contextlib import contextmanager
from pathlib import Path

from corpus.chat_records import Refused

BLOCK = 1 << 18             # bytes read at once
ZSTD = "compression.zstd" if sys.version_info >= (3, 14) else "backports.zstd"
COMPRESSED = {".gz": "gzip", ".zst": ZSTD}      # their modules
TABLES = (".parquet", ".arrow")
RECORDS = (".jsonl", ".json", ".ndjson", *TABLES)       # all other files are text
READ_KINDS = ".txt, .jsonl, .json (also compressed), .parquet, .arrow"
TEXT_TABLES = {".csv": ",", ".tsv": r"\t"}      # what stands between columns; they are refused
FIRST_BYTES = {             # of files that are no text, whatever their names say
    (b"\xff\xfe", b"\xfe\xff"): "UTF-16: convert it, as by iconv -f UTF-16 -t UTF-8",
    (b"PK\3\4",): "a zip archive, as .zip, .docx and .epub are: unpack it, or save it as text",
    (b"{\\rtf", b"\xd0\xcf\x11\xe0"): "of a word processor: save it as text",
    (b"%PDF-",): "a PDF: convert it, as by pdftotext",
    (b"\x1f\x8b",): "compressed by gzip: give it a name that ends in .gz",
    (b"\x28\xb5\x2f\xfd",): "compressed by zstd: give it a name that ends in .zst"}
ARROW_END = b"\xff\xff\xff\xff\0\0\0\0"      # of a stream


def kind_of(path: Path) -> str:
    """The suffix of a name in lower case, before .gz: how the file is read."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


@contextmanager
def open_bytes(path: Path):
    """The bytes of a file, decompressed. Raises ValueError: it is damaged, cut off or no text."""
    suffix = path.suffix.lower()
    module = import_optional(path, COMPRESSED.get(suffix, "io"))
    options = {}
    if suffix == ".zst":
        options["options"] = {module.DecompressionParameter.window_log_max: 31}     # of --long=31
    with refuse_damaged(path, EOFError, zlib.error, getattr(module, "ZstdError", EOFError)):
        if suffix in COMPRESSED and path.stat().st_size == 0:
            raise EOFError("it is empty")       # gzip would take it for an empty text
        with io.BufferedReader(module.open(path, "rb", **options), BLOCK) as file:
            for beginnings, kind in FIRST_BYTES.items():
                if file.peek(8).startswith(beginnings):
                    raise Refused(f"{path} is {kind}; or leave it out")
            yield file


def import_optional(path: Path, package: str):
    """The package or module that reads a file. Raises ValueError if it is missing."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{path}: the package {package} reads it: pip install {package}"
                         ) from None


@contextmanager
def refuse_damaged(path: Path, *errors):
    """What a package raises for a damaged file, an OSError or one of these, as a ValueError."""
    try:
        yield
    except (*errors, OSError) as error:
        if getattr(error, "errno", None) is not None:           # of the system
            raise
        reason = str(error).partition("\n")[0]
        raise ValueError(f"{path} cannot be read to its end ({reason}): it is damaged, cut off or "
                         f"of another kind than its name says: copy or download it again"
                         ) from None


def read_table(path: Path, column: str | None):
    """Yield the rows of a table, {column: value}, of this column if there. Raises ValueError."""
    pyarrow = import_optional(path, "pyarrow")
    from pyarrow import ipc, parquet
    with refuse_damaged(path, pyarrow.ArrowException), open(path, "rb") as file:
        if kind_of(path) == ".parquet":
            table = parquet.ParquetFile(file, page_checksum_verification=True)
            columns = [column] if column in table.schema_arrow.names else None
            batches = table.iter_batches(256, columns=columns, use_threads=False)
        else:           # a stream of Arrow has no checksums: one without its end is refused
            file.seek(max(0, path.stat().st_size - len(ARROW_END)))
            if file.read() != ARROW_END:
                raise OSError("it has no end of a stream")
            file.seek(0)
            batches = ipc.open_stream(file)
        for batch in batches:
            batch.validate(full=True)
            yield from batch.to_pylist()
