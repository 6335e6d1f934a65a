"""One message of a conversation: what its fields say, in the formats that people have.

    role, content                   OpenAI, Mistral, TRL
    from, value                     ShareGPT
    reasoning_content, thinking     what a model thinks before its answer
    weight, train, loss             OpenAI and Mistral, Axolotl, ms-swift: whether it is learnt

A field that would change what is learnt and cannot be honoured is refused. Other fields are named
to the user (records.UnreadFields).
"""
import json
from typing import NamedTuple

from corpus.refused_records import Refused, kind_of_value

ASSISTANT = "assistant"
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         "prompter": "user", ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "chatgpt": ASSISTANT,
         "bing": ASSISTANT, "bard": ASSISTANT, "bot": ASSISTANT, "ai": ASSISTANT,
         "model": ASSISTANT}
TOOL_ROLES = ("tool", "function", "ipython", "observation", "function_call", "tool_call",
              "tool_response", "function_response")
ROLE_FIELDS = ("role", "from")
CONTENT_FIELDS = ("content", "value")
ROLE_AND_CONTENT = {*ROLE_FIELDS, *CONTENT_FIELDS}
REASONING_FIELDS = {"reasoning_content", "reasoning", "thinking", "thoughts"}
LEARNT_FIELDS = {"weight", "loss_weight", "train", "training", "trainable", "loss", "loss_mask",
                 "loss_scale"}
NOT_LEARNT_FIELDS = {"mask", "masked"}
# Fields of a message, or of a record, that would change what is written.
UNWRITTEN = {"tool_calls", "function_call", "tools", "functions", "available_tools",
             "tool_schemas", "tool_definitions", "documents", "chat_template_kwargs", "images",
             "image", "videos", "video", "audios", "audio", "train_detail", "training_detail"}
READ = {*ROLE_FIELDS, *CONTENT_FIELDS, *REASONING_FIELDS, *LEARNT_FIELDS, *NOT_LEARNT_FIELDS,
        *UNWRITTEN}


class Message(NamedTuple):
    role: str
    content: str | None         # None: an answer that is to be written
    is_learnt: bool = True      # of an answer
    reasoning: str | None = None        # of an answer: what a model thinks before it


def parse_message(message, is_learnt=True) -> Message:
    """Parse a message. `is_learnt` is the default for an answer without a field that says it.
    Raises Refused."""
    if not isinstance(message, dict):
        raise Refused(f": a message is {kind_of_value(message)}, not an object")
    role = role_of(message)
    content = join_parts(pick(message, CONTENT_FIELDS))
    check_text(content, f'the "content" of a message of {role}')
    reasoning = None
    if not message.keys() <= ROLE_AND_CONTENT:          # which most messages have alone
        check_unwritten(message, UNWRITTEN, ": a message")
        said = says_learnt(message, role)
        if said is not None:
            is_learnt = said
        reasoning = reasoning_of(message, role)
    return Message(role, content, is_learnt or role != ASSISTANT, reasoning)


def unread_of(messages: list[dict], name: str) -> set[str]:
    """The fields of messages that are not read, as "messages.name"."""
    return {f"{name}.{key}" for message in messages for key, value in message.items()
            if key not in READ and not is_unsaid(value)}


def check_unwritten(fields: dict, names: set[str], owner: str) -> None:
    """Raise Refused if one of the fields with these names is not empty."""
    for name in present(names, fields):
        if not is_empty(fields[name]):
            raise Refused(f'{owner} has "{name}", which no template here writes')


def present(names: set[str], fields: dict) -> list[str]:
    """Those of the names that a record or a message has, usually none: each is not asked for."""
    return sorted(names.intersection(fields))


def role_of(message: dict) -> str:
    role = message.get("role")
    if role is None:
        role = message.get("from")
    lower = role.lower() if isinstance(role, str) else ""
    if lower in TOOL_ROLES:
        raise Refused(f': the role "{role}" is of tools, which no template here writes: leave '
                      f'such records out', f'select(any(.. | objects; (.role // .from) == '
                      f'{json.dumps(role)}) | not)')
    if lower not in ROLES:
        shown = json.dumps(role, default=str)
        raise Refused(f": the role {shown} is none of system, user, {ASSISTANT}")
    if message.get("role") is not None and message.get("from") is not None:
        if role_of({"from": message["from"]}) != ROLES[lower]:
            raise Refused(': "role" and "from" stand in one place and differ: leave one out')
    return ROLES[lower]


def pick(fields: dict, names):
    """The value of the one of these fields that is given; None if none is. Raises Refused if
    several are, and differ."""
    given = [name for name in names if fields.get(name) is not None]
    if not given:
        return None
    if any(fields[name] != fields[given[0]] for name in given[1:]):
        shown = " and ".join(f'"{name}"' for name in given)
        raise Refused(f": {shown} stand in one place and differ: leave one out")
    return fields[given[0]]


def reasoning_of(message: dict, role: str) -> str | None:
    names = [name for name in present(REASONING_FIELDS, message) if not is_empty(message[name])]
    if not names:
        return None
    if role != ASSISTANT:
        raise Refused(f': a message of {role} has "{names[0]}", which only an answer may have')
    reasoning = join_parts(pick(message, names))
    check_text(reasoning, f'the "{names[0]}" of a message of {role}')
    return reasoning


def says_learnt(message: dict, role: str) -> bool | None:
    """Whether the fields of a message say that it is learnt; None if they say nothing."""
    said = {}
    for name in present(LEARNT_FIELDS | NOT_LEARNT_FIELDS, message):
        value = message[name]
        if value is None:
            continue
        if value not in (0, 1):
            raise Refused(f': a message has "{name}" {json.dumps(value, default=str)}: an answer '
                          f'is learnt or not, so write true or false')
        if name in NOT_LEARNT_FIELDS and not isinstance(value, bool):
            raise Refused(f': a message has "{name}" {value}, of which it is not known whether 1 '
                          f'is learnt: write "train": true or false')
        if role != ASSISTANT and name not in NOT_LEARNT_FIELDS and value is True:
            raise Refused(f': a message of {role} has "{name}" true, but only answers are learnt')
        said[name] = bool(value) != (name in NOT_LEARNT_FIELDS)
    if len(set(said.values())) > 1:
        shown = " and ".join(f'"{name}" {json.dumps(message[name])}' for name in said)
        raise Refused(f": a message has {shown}, which contradict each other: leave one out")
    return next(iter(said.values()), None)


def join_parts(content):
    """A content in OpenAI's parts, [{"type": "text", "text": "2 + 2?"}, ...], as one text."""
    if not isinstance(content, list):
        return content
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else kind_of_value(part)
        if kind != "text" or not isinstance(part.get("text"), str):
            raise Refused(f": a content has a part that is {json.dumps(kind, default=str)}, "
                          f"where only text is supported")
        texts.append(part["text"])
    return "".join(texts)


def check_text(text, what: str) -> None:
    """Raise Refused if `text`, which is called `what`, is no text."""
    if not isinstance(text, str):
        raise Refused(f": {what} is {kind_of_value(text)}, not a string")
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(": half a surrogate pair is no character") from None


def is_unsaid(value) -> bool:
    """Whether a field that is not read says nothing. (False may mean "do not learn this".)"""
    return value is not False and is_empty(value)


def is_empty(value) -> bool:
    """Whether a field says nothing. LLaMA-Factory writes no tools as "[]"."""
    return value is None or value is False or value in ("", "[]", "{}") or value in ([], {})
