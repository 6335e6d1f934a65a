"""The documents that are fields of records: lines of JSON, rows of Parquet."""
import codecs
import io
import json
import re
from pathlib import Path

from corpus.compressed import not_whole, open_bytes
from corpus.file_kinds import kind_of_start, pipe, table_kind, why_not_text
from corpus.tables import open_table

MARKS = {codecs.BOM_UTF8: "utf-8", codecs.BOM_UTF32_LE: "utf-32-le",    # before UTF-16's, which
         codecs.BOM_UTF32_BE: "utf-32-be", codecs.BOM_UTF16_LE: "utf-16-le",    # begins as this
         codecs.BOM_UTF16_BE: "utf-16-be"}
STRINGS = ("string", "large_string", "dictionary<values=string")        # Arrow's names
LISTS = ("messages", "conversations")       # fields of a conversation; the second is ShareGPT's


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


def open_text(path: Path):
    """(the file behind its byte-order mark, its encoding)."""
    file = open_bytes(path)
    start = file.peek(4)
    for mark, encoding in MARKS.items():
        if start.startswith(mark):
            file.read(len(mark))
            return file, encoding
    return file, "utf-8"


def read_lines(path: Path, file, encoding: str, parse):
    """Yield the documents of a file of JSON by lines. parse(line) returns one; a ValueError says
    what is wrong with the line."""
    try:
        is_first = True
        for number, line in enumerate(lines_of(file, encoding), 1):
            if not line.strip():
                continue
            if is_first:
                check_first_line(path, line.strip())
                is_first = False
            try:
                document = parse(line)
            except ValueError as error:
                document = [NotText(f"{path} line {number}{error}")]
            yield document
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not {encoding.upper()} text ({error.reason}): it may be cut "
                         f"off: copy it again") from None


def text_of_line(line: bytes, field: str) -> list[str]:
    try:
        text = json.loads(line)[field].removeprefix("\ufeff")
        text.encode()               # refuses half a surrogate pair
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ValueError(why_no_text(line, field)) from None
    return [text]


def lines_of(file, encoding: str):
    """Yield the lines of a file in UTF-8."""
    if encoding == "utf-8":
        yield from file
        return
    with io.TextIOWrapper(file, encoding, newline="\n") as wrapped:
        for line in wrapped:
            yield line.encode()


def first_record(path: Path) -> dict:
    """The fields of a file's first record, of Parquet the types of its columns. Empty if the file
    has none."""
    if table_kind(path) is not None:
        with open_table(path) as (schema, _):
            return dict(zip(schema.names, schema.types))
    file, encoding = open_text(path)
    try:
        with file:
            line = next((line for line in lines_of(file, encoding) if line.strip()), b"")
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def is_conversation(record: dict) -> bool:
    """Whether records with such fields are conversations (messages.py)."""
    names = set(record)
    has_messages = names & set(LISTS) or {"prompt", "completion"} <= names
    return bool(has_messages) and "text" not in names


def is_document(record: dict, field: str) -> bool:
    """Whether a .json whose first record is this one holds texts or conversations. Otherwise it
    holds the settings of some program."""
    if field in record:
        return record[field] is None or isinstance(record[field], str)
    return is_conversation(record) and all(isinstance(record.get(name, []), list)
                                           for name in LISTS)


def check_first_line(path: Path, line: bytes) -> None:
    """Raise ValueError if a .jsonl file is something else."""
    is_json = line.startswith((b"{", b"["))
    if line.count(0) > len(line) // 50 or (not is_json and kind_of_start(line) is not None):
        raise ValueError(f"{path} has no lines of JSON: {why_not_text(path, line, line)}")
    if line.startswith(b"["):
        of_messages = re.match(rb'\[\s*(\[?)\s*\{\s*"(role|content|from|value)"', line)
        each = "'.[]'"
        if of_messages:
            each = "'.[] | {messages: .}'" if of_messages[1] else "'{messages: .}'"
        raise ValueError(f"{path} is a JSON array, not an object on each line: "
                         f"{pipe(path, f'jq -c {each}')} > NEW.jsonl makes a .jsonl of it")
    try:
        json.loads(line)
    except json.JSONDecodeError as error:
        if line.startswith(b"{") and error.pos >= len(line.decode(errors="replace")):
            raise ValueError(f"{path} line 1 ends within a JSON object, and each line must hold a "
                             f"whole one: {pipe(path, 'jq -c .')} > NEW.jsonl makes a .jsonl of "
                             f"it, unless it is cut off") from None
    except (ValueError, RecursionError):
        pass                    # why_no_text says it


def kind_of_value(value) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number",
             list: "an array", dict: "an object", str: "a string"}
    return names.get(type(value), type(value).__name__)         # Parquet has others, such as bytes


def why_no_text(line: bytes, field: str) -> str:
    """What is wrong with a line of JSON, after its place."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f' is not JSON with a string "{field}": {error}'
    if not isinstance(value, dict):
        return f' is {kind_of_value(value)}, not an object with a string "{field}"'
    if field not in value:
        texts = [name for name, one in value.items() if isinstance(one, str)]
        return f" has no field {other_fields(field, value, texts)}"
    if not isinstance(value[field], str):
        return f': "{field}" is {kind_of_value(value[field])}, not a string'
    return f': "{field}" has half a surrogate pair, which is no character: correct the line'


# Those of Alpaca, ShareGPT and preference data.
CONVERSATION_FIELDS = {"instruction", "prompt", "response", "chosen", "question", "answer", *LISTS}


def other_fields(field: str, names, texts) -> str:
    """"text", but what there is instead, and what to do. `texts`: those that hold strings."""
    found = ", ".join(f'"{name}"' for name in list(names)[:5]) or "no field"
    if CONVERSATION_FIELDS & set(names):
        return (f'"{field}", but {found}: for conversations rename the fields to "prompt" and '
                f'"completion", or to "messages" (docs/conversations.md)')
    if not texts:
        return f'"{field}", but {found}, and none is a string, as the text must be'
    return f'"{field}", but {found}: give the name of the one with the text to --text-field'


def read_rows(path: Path, choose):
    """Yield (number, {column: value of Arrow}) for each row of a table. choose({column: its
    type}) returns the columns that are read, or raises ValueError."""
    import pyarrow
    try:
        with open_table(path) as (schema, batches):
            names = schema.names
            columns = choose(dict(zip(names, map(str, schema.types))))
            for name in columns:
                if names.count(name) > 1:
                    raise ValueError(f"{path} has several columns \"{name}\": rename all but one")
            number = 0
            for batch in batches(columns=columns):
                for values in zip(*batch.columns):
                    number += 1
                    yield number, dict(zip(batch.schema.names, values))
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None) is not None:       # of the system
            raise
        raise not_whole(path, error) from None


def read_texts(path: Path, field: str):
    """Yield the documents of a Parquet file, which are the texts of a column."""
    def choose(kinds):
        if field not in kinds:
            texts = [name for name, kind in kinds.items() if kind.startswith(STRINGS)]
            raise ValueError(f"{path} has no column {other_fields(field, kinds, texts)}")
        if not kinds[field].startswith(STRINGS):
            raise ValueError(f"{path}: the column \"{field}\" holds {kinds[field]}, not strings: "
                             f"give another to --text-field")
        return [field]

    for number, row in read_rows(path, choose):
        yield [text_of_row(row[field], path, number, field)]


def text_of_row(row, path: Path, number: int, field: str) -> str | NotText:
    try:
        text = row.as_py()
    except UnicodeDecodeError as error:
        return NotText(f'{path} row {number}: "{field}" is not UTF-8 ({error.reason})')
    if text is None:
        return NotText(f'{path} row {number}: "{field}" is null, not a string')
    return text.removeprefix("\ufeff")
