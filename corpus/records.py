"""The documents that are fields of records: lines of JSON, rows of Parquet. json_stream.py reads
JSON that is not by lines."""
import codecs
import io
import json
import shlex
from collections import Counter
from pathlib import Path

from corpus.compressed import not_whole, open_bytes
from corpus.console import note
from corpus.file_kinds import how_to_convert, pipe, table_kind
from corpus.json_stream import Start, Values
from corpus.tables import open_table

START = 512             # bytes that tell what a file is
STRINGS = ("string", "large_string", "dictionary<values=string")        # Arrow's names
MOST_NAMES = 1000       # of fields that are not read: a record may have a name of its own
MOST_SHOWN = 5          # of them
UNREAD = object()       # a value of a column that is not read
LISTS = ("messages", "conversations", "conversation")     # fields of a conversation
PAIR, ALPACA = ("prompt", "completion"), ("instruction", "output")
FORMS = (*((name,) for name in LISTS), PAIR, ALPACA)
# Names of other pairs, which are not guessed: a message gives the command that renames them.
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "user", "human")
COMPLETIONS = ("completion", "response", "answer", "output", "solution", "target", "chosen",
               "assistant", "gpt", "bot")
CONTEXTS = ("context", "input")


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


class Refused(ValueError):
    """What is wrong with a record: its text continues "FILE line N". `filter` is the filter of jq
    that makes records of the file which can be read."""

    def __init__(self, text: str, filter: str | None = None):
        super().__init__(text)
        self.filter = filter

    def with_command(self, path: Path) -> str:
        if self.filter is None:
            return str(self)
        return f"{self}: {command_of(path, self.filter)}"


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


def open_text(path: Path):
    """The bytes of a file behind its byte-order mark."""
    file = open_bytes(path)
    if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


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


def start_of(path: Path) -> Start:
    """How a file of JSON begins."""
    file = open_text(path)
    with io.TextIOWrapper(file, "utf-8", errors="replace", newline="") as wrapped:
        return Values(wrapped.read).start()


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


def form_of(names) -> tuple | None:
    """The names of those fields that hold a conversation; None if none do."""
    names = set(names)
    return next((form for form in FORMS if names.issuperset(form)), None)


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


def kind_of_value(value) -> str:
    names = {type(None): "null", bool: "true or false", int: "a number", float: "a number",
             list: "an array", dict: "an object", str: "a string"}
    return names.get(type(value), type(value).__name__)         # Parquet has others, such as bytes


def why_no_text(record, field: str, noun="field") -> Refused:
    """What is wrong with a record that has no text in this field."""
    if not isinstance(record, dict):
        return Refused(f' is {kind_of_value(record)}, not an object with a string "{field}"')
    if field not in record:
        return Refused(f" has no {noun} {other_fields(field, record)}", filter_of(record))
    if not isinstance(record[field], str):
        return Refused(f': "{field}" is {kind_of_value(record[field])}, not a string')
    return Refused(f': "{field}" has half a surrogate pair, which is no character: correct the '
                   f'line')


def filter_of(record: dict) -> str | None:
    """The filter of jq that makes conversations of records with such fields, or takes the records
    out of an object that holds all of them; None if these do not tell."""
    if form_of(record) is not None:             # it is a conversation as it is
        return None
    prompt = next((name for name in PROMPTS if name in record), None)
    completion = next((name for name in COMPLETIONS if name in record), None)
    lists = [name for name, value in record.items()
             if isinstance(value, list) and value and isinstance(value[0], dict)]
    if completion == "chosen" and isinstance(record["chosen"], list):
        return "{messages: .chosen}"            # of preference data
    if prompt is not None and completion is not None:
        context = next((name for name in CONTEXTS if name in record and name != prompt), None)
        value = f".{prompt}"
        if context is not None:
            value = f'([.{prompt}, .{context} | select(. != null and . != "")] | join("\\n\\n"))'
        return f"{{prompt: {value}, completion: .{completion}}}"
    if len(lists) == 1:
        return f".{json.dumps(lists[0])}[]"
    return None


def command_of(path: Path, filter: str) -> str:
    """The command that writes a .jsonl of what this filter of jq makes of a file's records."""
    quoted = shlex.quote(filter)
    if path.suffix.lower() == ".parquet":
        read = f"pandas.read_parquet({str(path)!r}).to_json({'/dev/stdout'!r}, "
        code = f"import pandas; {read}orient='records', lines=True)"
        return f"python -c {shlex.quote(code)} | jq -c {quoted} > NEW.jsonl"
    if not start_of(path).is_array:
        return f"{pipe(path, f'jq -c {quoted}')} > NEW.jsonl"
    quoted = shlex.quote(f".[] | {filter}")
    return f"{pipe(path, f'jq -c {quoted}')} > NEW.jsonl"


def some_fields(record: dict) -> str:
    return ", ".join(f'"{name}"' for name in list(record)[:5]) or "no field"


def other_fields(field: str, record: dict) -> str:
    """"text", but what there is instead, and what to do."""
    found = some_fields(record)
    if form_of(record) is not None or (filter_of(record) or "").startswith("{"):
        return (f'"{field}", but {found}: for conversations name the fields "prompt" and '
                f'"completion", or "messages" (docs/conversations.md)')
    if not any(isinstance(value, str) for value in record.values()):
        return f'"{field}", but {found}, and none is a string, as the text must be'
    return f'"{field}", but {found}: give the name of the one with the text to --text-field'


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
