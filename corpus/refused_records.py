"""What a user is told of a record that is refused: what is wrong with it, and the command of jq
that makes records which can be read. records.py and chat_formats.py raise `Refused`.
"""
import json
import shlex
from pathlib import Path

from corpus.file_kinds import pipe
from corpus.json_stream import start_of

LISTS = ("messages", "conversations", "conversation")     # fields of a conversation
PAIR, ALPACA = ("prompt", "completion"), ("instruction", "output")
FORMS = (*((name,) for name in LISTS), PAIR, ALPACA)
# Names of other pairs, which are not guessed: a message gives the command that renames them.
PROMPTS = ("prompt", "instruction", "question", "query", "problem", "input", "user", "human")
COMPLETIONS = ("completion", "response", "answer", "output", "solution", "target", "chosen",
               "assistant", "gpt", "bot")
CONTEXTS = ("context", "input")


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


def form_of(names) -> tuple | None:
    """The names of those fields that hold a conversation; None if none do."""
    names = set(names)
    return next((form for form in FORMS if names.issuperset(form)), None)


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
    if form_of(record) is not None:
        return (f'"{field}", but {found}: these are conversations, which --template plain, or '
                f'another, reads without --text-field (docs/conversations.md)')
    if (filter_of(record) or "").startswith("{"):
        return (f'"{field}", but {found}: for conversations name the fields "prompt" and '
                f'"completion", or "messages" (docs/conversations.md)')
    if not any(isinstance(value, str) for value in record.values()):
        return f'"{field}", but {found}, and none is a string, as the text must be'
    return f'"{field}", but {found}: give the name of the one with the text to --text-field'
