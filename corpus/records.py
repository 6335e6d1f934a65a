"""The documents that are fields of records: lines of JSON, rows of Parquet. json_stream.py reads
JSON that is not by lines."""
import io
import json
import shlex
from collections import Counter
from pathlib import Path

from corpus.compressed import not_whole
from corpus.file_kinds import how_to_convert, pipe, table_kind
from corpus.json_stream import Values, open_text, start_of
from corpus.notes_and_progress import note
from corpus.refused_records import LISTS, Refused, form_of, why_no_text
from corpus.tables import open_table

START = 512             # bytes that tell what a file is
STRINGS = ("string", "large_string", "dictionary<values=string")        # Arrow's names
MOST_NAMES = 1000       # of fields that are not read: a record may have a name of its own
MOST_SHOWN = 5          # of them
UNREAD = object()       # a value of a column that is not read


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


class UnreadFields:
    """Counts the records that have fields which are not read, and these fields by their names. They
    are told once, so that nothing is ignored in silence."""

    def __init__(self):
        self.records = 0
        self.names = Counter()

    def add(self, names) -> None:
        """A record has these fields, which may be none."""
        if not names:
            return
        self.records += 1
        for name in names:
            if name in self.names or len(self.names) < MOST_NAMES:
                self.names[name] += 1

    def tell(self) -> None:
        if self.records > 0:
            names = [name for name, _ in self.names.most_common(MOST_SHOWN)]
            if len(self.names) > MOST_SHOWN:
                names.append("...")
            note(f"{self.records:,} records have fields that are not read: {', '.join(names)}")


def parse_records(path: Path, records, parse):
    """Yield the document of each (place, record) of a file. parse(record) returns it, or raises
    Refused."""
    for place, record in records:
        try:
            if isinstance(record, Refused):
                raise record
            document = parse(record)
        except Refused as error:
            document = [NotText(f"{path} {place}{error.with_command(path)}")]
        yield document


def read_json(path: Path):
    """Yield (place, record) of each record of a file of JSON. A Refused stands in place of one that
    cannot be read."""
    with open_text(path) as file:
        start = file.peek(START)[:START]
        if b"\0" in start[:4]:             # UTF-16, with a byte-order mark or without
            raise ValueError(f"{path} is not UTF-8 text: {how_to_convert(path, start)}")
        if start_of(path).is_by_lines:
            yield from read_lines(path, file)
        else:
            yield from read_values(path, file)


def read_lines(path: Path, file):
    """As `read_json`, of the lines of an open file."""
    for number, line in enumerate(file, 1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            record = Refused(f" is not JSON: {error}")
            if isinstance(error, UnicodeDecodeError):
                record = Refused(f" is not UTF-8 text: {how_to_convert(path, line)}")
            elif b"\0" in line:
                record = Refused(f" is not JSON: it has {line.count(0):,} NUL bytes, as a file has "
                                 f"that was not written to its end: "
                                 f"{pipe(path, 'tr -d ' + shlex.quote(chr(92) + '0'))} > NEW.jsonl "
                                 f"leaves them out")
        yield f"line {number}", record


def read_values(path: Path, file):
    """As `read_json`, of JSON values with whatever stands between them."""
    with io.TextIOWrapper(file, "utf-8", newline="") as wrapped:
        values = Values(wrapped.read)
        number = 0
        try:
            for record in values.records():
                number += 1
                yield f"record {number}", record
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not UTF-8 text ({error.reason}): "
                             f"{how_to_convert(path, error.object)}") from None
        except ValueError as error:
            raise ValueError(f"{path} record {number + 1} is not JSON: {error}: correct the file, "
                             f"or copy it again if it is cut off") from None


def text_of_record(record, field: str, unread: UnreadFields) -> list[str]:
    """The text in this field. `unread` counts the others. Raises Refused."""
    try:
        text = record[field].removeprefix("\ufeff")
        text.encode()               # refuses half a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError):
        raise why_no_text(record, field) from None
    if len(record) > 1:
        unread.add([name for name, value in record.items() if name != field and value is not None])
    return [text]


def first_record(path: Path) -> dict:
    """The fields of a file's first record, of Parquet the types of its columns. Empty if the file
    has none."""
    if table_kind(path) is not None:
        with open_table(path) as (schema, _):
            return dict(zip(schema.names, schema.types))
    return fields_of(start_of(path).record)


def fields_of(record) -> dict:
    """The fields of a record. A list is the messages of a conversation."""
    if isinstance(record, list) and record and isinstance(record[0], dict):
        return {LISTS[0]: record}
    return record if isinstance(record, dict) else {}


def is_conversation(record: dict) -> bool:
    """Whether records with such fields are conversations (chat_formats.py)."""
    return form_of(record) is not None and "text" not in record


def both_of(record: dict) -> str | None:
    """What to tell of records with a text and a conversation; None if these have one of them."""
    form = form_of(record)
    if form is None or "text" not in record:
        return None
    names = " and ".join(f'"{name}"' for name in form)
    return (f'has "text", which is read, and {names}: --template chatml, or plain, reads these as '
            f'conversations; --text-field text reads the text without this note')


def is_document(path: Path, field: str) -> bool:
    """Whether a .json of a folder holds texts or conversations. Otherwise it holds the settings of
    some program, as one object over several lines does that is no conversation."""
    try:
        start = start_of(path)
    except ValueError:              # it is damaged: whoever reads the file says so
        return True
    record = fields_of(start.record)
    if field in record and not start.is_alone:
        return record[field] is None or isinstance(record[field], str)
    return is_conversation(record) and all(isinstance(record.get(name, []), list)
                                           for name in LISTS)


def read_rows(path: Path, choose):
    """As `read_json`, of the rows of a table. choose(path, {column: its type}) returns the columns
    that are read, or raises ValueError. UNREAD stands for the values of the others."""
    import pyarrow
    try:
        with open_table(path) as (schema, batches):
            names = schema.names
            columns = choose(path, dict(zip(names, map(str, schema.types))))
            for name in columns:
                if names.count(name) > 1:
                    raise ValueError(f"{path} has several columns \"{name}\": rename all but one")
            others = dict.fromkeys((name for name in names if name not in columns), UNREAD)
            number = 0
            for batch in batches(columns=columns):
                for values in zip(*batch.columns):
                    number += 1
                    try:
                        read = {name: value.as_py()
                                for name, value in zip(batch.schema.names, values)}
                        row = others | read
                    except UnicodeDecodeError as error:
                        row = Refused(f" is not UTF-8 ({error.reason})")
                    yield f"row {number}", row
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:       # of the system
            raise
        raise not_whole(path, error) from None


def column_of_text(field: str, path: Path, kinds: dict[str, str]) -> list[str]:
    """The column with the texts of a table whose columns have these types. Raises ValueError."""
    if field not in kinds:
        texts = {name: name if kind.startswith(STRINGS) else None for name, kind in kinds.items()}
        problem = why_no_text(texts, field, "column")
        raise ValueError(f"{path}{problem.with_command(path)}")
    if not kinds[field].startswith(STRINGS):
        raise ValueError(f"{path}: the column \"{field}\" holds {kinds[field]}, not strings: "
                         f"give another to --text-field")
    return [field]
