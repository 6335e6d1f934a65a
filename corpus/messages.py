"""The messages of a conversation: what a record of a file holds. conversations.py makes tokens of
them.

    {"prompt": "2 + 2?", "completion": "4"}     is short for
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

The same as ShareGPT writes it: {"conversations": [{"from": "human", "value": "2 + 2?"}, ...]}.
"""
import json
from pathlib import Path
from typing import Iterator, NamedTuple

from corpus.records import LISTS, NotText, kind_of_value, read_rows

ROLES = ("system", "user", "assistant")
ASSISTANT = "assistant"
SHAREGPT_ROLES = {"human": "user", "gpt": ASSISTANT}
UNWRITTEN = ("tools", "functions")              # in a record
BESIDES = ("system", *UNWRITTEN)                # what a record may have beside its messages


class Message(NamedTuple):
    role: str
    content: str | None         # None: an answer that is to be written
    is_learnt: bool = True      # of an answer
    reasoning: str | None = None        # of an answer: what a model thinks before it


class Answer(str):
    """The content of an answer, among the texts of a conversation."""


def messages_of_line(line: bytes) -> list[Message]:
    """The messages of a line of JSON. Raises ValueError as `messages_of`."""
    try:
        record = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f" is not JSON: {error}") from None
    return messages_of(record)


def read_table(path: Path):
    """Yield the conversations of a Parquet file, or a NotText for each row that holds none."""
    def choose(kinds):
        for columns in (*([name] for name in LISTS), ["prompt", "completion"]):
            if set(columns) <= set(kinds):
                return columns + [name for name in BESIDES if name in kinds]
        raise ValueError(f'{path} has neither a column "messages" nor "prompt" and "completion": '
                         f'prepare text by itself')

    for number, row in read_rows(path, choose):
        try:
            messages = messages_of({name: value.as_py() for name, value in row.items()})
        except UnicodeDecodeError as error:
            messages = [NotText(f"{path} row {number} is not UTF-8 ({error.reason})")]
        except ValueError as error:
            messages = [NotText(f"{path} row {number}{error}")]
        yield messages


def messages_of(record) -> list[Message]:
    """The messages of a record. Raises ValueError, whose message continues "FILE line N"."""
    if not isinstance(record, dict):
        raise ValueError(f" is {kind_of_value(record)}, not an object")
    name = next((name for name in LISTS if name in record), None)
    if name is not None:
        messages = record[name]
        if not isinstance(messages, list):
            raise ValueError(f': "{name}" is {kind_of_value(messages)}, not an array')
    elif {"prompt", "completion"} <= record.keys():
        messages = messages_of_pair(record["prompt"], record["completion"])
    else:
        found = ", ".join(f'"{name}"' for name in list(record)[:5]) or "no field"
        raise ValueError(f' has neither "messages" nor "prompt" and "completion", but {found}')
    messages = [parse_message(message) for message in messages]
    for key in UNWRITTEN:
        if record.get(key) and record[key] != "[]":         # LLaMA-Factory's files write "[]"
            raise ValueError(f' has "{key}", which no template here writes')
    if record.get("system"):
        if any(message.role == "system" for message in messages):
            raise ValueError(' has a field "system" and a message of system: one of them is enough')
        messages.insert(0, parse_message(dict(role="system", content=record["system"])))
    if all(message.role != ASSISTANT for message in messages):
        raise ValueError(f" has no answer: no message has the role {ASSISTANT}")
    return messages


def messages_of_pair(prompt, completion) -> list:
    """The messages of a prompt and its completion: two texts, or two lists of messages."""
    if isinstance(prompt, list):
        if any(parse_message(one).role == ASSISTANT for one in prompt):
            raise ValueError(': the "prompt" has an answer, and every answer is learnt: write '
                             '"messages" if this one may be')
    else:
        prompt = [dict(role="user", content=prompt)]
    if not isinstance(completion, list):
        completion = [dict(role=ASSISTANT, content=completion)]
    return prompt + completion


def parse_message(message) -> Message:
    if not isinstance(message, dict):
        raise ValueError(f": a message is {kind_of_value(message)}, not an object")
    role = message.get("role", message.get("from"))
    if isinstance(role, str):
        role = SHAREGPT_ROLES.get(role, role)
    content = join_parts(message.get("content", message.get("value")))
    for key in ("tool_calls", "function_call"):
        if message.get(key):
            raise ValueError(f': a message has "{key}", which no template here writes')
    if message.get("weight") == 0:
        raise ValueError(': a message has "weight" 0, but every answer is learnt')
    if role not in ROLES:
        raise ValueError(f": the role {json.dumps(role, default=str)} is none of "
                         f"{', '.join(ROLES)}")
    if not isinstance(content, str):
        raise ValueError(f': the "content" of a message of {role} is {kind_of_value(content)}, '
                         f'not a string')
    try:
        content.encode()
    except UnicodeEncodeError:
        raise ValueError(": half a surrogate pair is no character") from None
    return Message(role, content)


def join_parts(content):
    """A content in OpenAI's parts, [{"type": "text", "text": "2 + 2?"}, ...], as one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else kind_of_value(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise ValueError(f": a content has a part that is {json.dumps(kind, default=str)}, "
                             f"where only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def texts_of(messages) -> Iterator[str]:
    """A conversation as texts, to be hashed and compared. A NotText stays what it is."""
    for message in messages:
        if isinstance(message, NotText):
            yield message
            return
        yield f"\n\n{message.role}:\n"
        yield Answer(message.content) if message.role == ASSISTANT else message.content
