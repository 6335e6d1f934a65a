"""The documents of a file. Two passes read them: dedup_and_split.py, encode.py.

    .txt      a document; several, if lines that are exactly <|endoftext|> stand between them. So
              is any other file of text
    .jsonl    a document on each line, in the field "text" of an object; so does .json
    .parquet  a document in each row, in the column "text"; so do .arrow, .csv, and a .json that
              is an array. The package `datasets` reads these

Lines and rows may also hold conversations (chat_records.py). Text is UTF-8. The name says how it is
read. Text and lines may be compressed: .gz, .zst, .bz2, .xz.

A NotText stands for a document that cannot be read, so that one in a thousand can be left out.
"""
import io
import json
from pathlib import Path

from base.errors import named
from corpus.chat_records import Refused, check_characters, form_of, messages_of

EOT = "<|endoftext|>"
BLOCK = 1 << 18             # bytes read at once
COMPRESSED = (".gz", ".zst", ".bz2", ".xz")
LINES = (".jsonl", ".json", ".ndjson")
TABLES = {".parquet": "parquet", ".arrow": "arrow", ".csv": "csv"}      # their readers
READ_KINDS = ".txt, .jsonl, .json (also compressed), .parquet, .arrow, .csv"


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


def kind_of(path: Path) -> str:
    """The suffix of a name in lower case, before .gz: how the file is read."""
    name = Path(path.name.lower())
    return Path(name.stem).suffix if name.suffix in COMPRESSED else name.suffix


def read_documents(path: Path, field: str | None = "text"):
    """Yield every document of a file: its text, or without a field the messages of a conversation.
    A NotText stands for one that cannot be read. Raises ValueError if the file is damaged."""
    with named(path):
        if kind_of(path) not in (*LINES, *TABLES):
            if field is None:
                raise ValueError(f"{path}: conversations are lines of JSON or rows of Parquet: "
                                 f"prepare text by itself, in another --out")
            yield from read_text(path)
            return
        for place, record in read_records(path, field):
            try:
                if isinstance(record, Refused):
                    raise record
                document = messages_of(record) if field is None else text_of(record, field)
            except Refused as error:
                document = NotText(f"{path} {place}{error}")
            yield document


def first_record(path: Path) -> dict:
    """The fields of a file's first record; empty if it has none, or is no record."""
    if kind_of(path) not in (*LINES, *TABLES):
        return {}
    _, record = next(read_records(path, None), (None, None))
    return record if isinstance(record, dict) else {}


def is_conversation(record: dict) -> bool:
    """Whether records with such fields are conversations."""
    return form_of(record) is not None and "text" not in record


# ---- Text ------------------------------------------------------------------------------------

def open_bytes(path: Path):
    """The bytes of a file, decompressed. Reading raises ValueError if it is damaged or cut off."""
    if path.suffix.lower() not in COMPRESSED:
        return open(path, "rb")
    if path.stat().st_size == 0:        # which gzip takes for an empty text
        raise not_whole(path, "it is empty")
    try:
        import fsspec                   # which torch needs, too
        file = fsspec.open(path, compression="infer").open()
    except (ImportError, ValueError):
        raise ValueError(f"{path}: a package that reads {path.suffix} is missing: pip install "
                         f"fsspec backports.zstd") from None
    return io.BufferedReader(Decompressed(path, file), BLOCK)


class Decompressed(io.RawIOBase):
    """An open file that decompresses another, whose errors name it."""

    def __init__(self, path: Path, file):
        self.path, self.file = path, file

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        try:
            data = self.file.read(len(buffer))
        except Exception as error:      # each kind of compression has its own
            raise not_whole(self.path, error) from None
        buffer[:len(data)] = data
        return len(data)


def not_whole(path: Path, reason) -> ValueError:
    reason = str(reason).partition("\n")[0]
    return ValueError(f"{path} cannot be read to its end ({reason}): it is damaged, cut off or of "
                      f"another kind than its name says: copy or download it again")


def read_text(path: Path):
    """Yield the documents of a text. Lines of <|endoftext|> cut it, and the white space around
    these lines is dropped. Without such a line the text is unchanged."""
    with io.TextIOWrapper(open_bytes(path), "utf-8-sig", newline="") as file:
        try:
            lines = []
            is_cut = False
            for line in file:
                if EOT not in line or line.strip() != EOT:
                    lines.append(line)
                    continue
                text = "".join(lines).rstrip()
                if text:
                    yield text.lstrip() if is_cut else text
                lines = []
                is_cut = True
            text = "".join(lines)
            if not is_cut or text.strip():
                yield text.strip() if is_cut else text
        except UnicodeDecodeError as error:
            yield NotText(f"{path} is not UTF-8 text ({error.reason}): if it is text, convert it, "
                          f"as by iconv -f WINDOWS-1252 -t UTF-8, or leave it out")


# ---- Records ---------------------------------------------------------------------------------

def read_records(path: Path, field: str | None):
    """Yield (place, record) of each record of a file. A Refused stands in place of one that cannot
    be read. Raises ValueError if the file is damaged."""
    if kind_of(path) in TABLES:
        yield from read_rows(path, field)
        return
    with open_bytes(path) as file:
        if file.peek(4)[:4].lstrip(b"\xef\xbb\xbf \r\n").startswith(b"["):
            yield from read_rows(path, field)
            return
        for number, line in enumerate(file, 1):
            if not line.strip(b"\xef\xbb\xbf \t\r\n"):      # or a byte-order mark alone
                continue
            try:
                record = json.loads(line)
            except (ValueError, RecursionError) as error:
                record = Refused(f" is not JSON: {error}")
            yield f"line {number}", record


def read_rows(path: Path, field: str | None):
    """As `read_records`, of the rows of a table."""
    try:
        import datasets
    except ImportError:
        raise ValueError(f"{path}: the package datasets reads it: pip install datasets") from None
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)       # its errors are ours to tell
    try:
        rows = datasets.load_dataset(TABLES.get(kind_of(path), "json"), data_files=[str(path)],
                                     split="train", streaming=True)
        if field in (rows.features or {}):
            rows = rows.select_columns([field])
        yield from ((f"row {number}", row) for number, row in enumerate(rows, 1))
    except (OSError, ValueError) as error:      # pyarrow's errors are such
        if getattr(error, "errno", None) is not None:           # of the system
            raise
        raise not_whole(path, error) from None


def text_of(record, field: str) -> str:
    """The text in this field. Raises Refused."""
    if not isinstance(record, dict):
        raise Refused(f' is not an object with a string "{field}"')
    text = record.get(field)
    if isinstance(text, str):
        check_characters(text)
        return text.removeprefix("\ufeff")
    if field in record:
        raise Refused(f': "{field}" is {type(text).__name__}, not a string')
    found = ", ".join(f'"{name}"' for name in list(record)[:5]) or "no field"
    raise Refused(f' has no field "{field}", but {found}: give the name of the one with the text '
                  f'to --text-field')
