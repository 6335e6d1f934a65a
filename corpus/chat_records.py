"""Conversations in records: an object of JSON, or a row, holds the messages of one.

    {"prompt": "2 + 2?", "completion": "4"}     is short for
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

TRL's prompt and completion may be lists of such messages: then the answers of the prompt are not
learnt. ShareGPT writes {"conversations": [{"from": "human", "value": "2 + 2?"}, ...]}, and Alpaca
{"instruction": "Add.", "input": "2 + 2", "output": "4"}.

    reasoning_content       of an answer: what a model thinks before it
    train, loss, weight     of an answer: false or 0 if it is not learnt

A field that would change what is written or learnt, and that no template here writes, is refused.
"""
from typing import Iterator, NamedTuple

ASSISTANT = "assistant"
ROLES = {"system": "system", "developer": "system", "user": "user", "human": "user",
         ASSISTANT: ASSISTANT, "gpt": ASSISTANT, "model": ASSISTANT}
PAIR, ALPACA = ("prompt", "completion"), ("instruction", "output")
FORMS = (("messages",), ("conversations",), PAIR, ALPACA)
REASONING = ("reasoning_content", "reasoning", "thinking")
LEARNT = ("train", "loss", "weight")
# Fields of a message or of a record that would change what is written or learnt.
REFUSED = ("tools", "tool_calls", "functions", "function_call", "documents", "images", "image",
           "videos", "audios", "chat_template_kwargs", "loss_mask", "mask", "history", "system",
           "system_prompt")
NOTHING = (None, False, "", "[]", "{}", [], {})     # what such a field has where it says nothing


class Refused(ValueError):
    """What is wrong with a record, as words behind "FILE line N"; in place of a document, with
    both."""


class Message(NamedTuple):
    role: str
    content: str
    is_learnt: bool = True      # of an answer
    reasoning: str | None = None        # of an answer: what a model thinks before it


class Answer(str):
    """An answer that is learnt, with its reasoning, among the texts of a conversation."""


class SystemText(str):
    """The content of a system message among the texts of a conversation."""


def form_of(record) -> tuple | None:
    """The names of those fields that hold a conversation; None if none do."""
    return next((form for form in FORMS if all(record.get(name) is not None for name in form)),
                None)


def messages_of(record) -> list[Message]:
    """The messages of a record. Raises Refused."""
    form = form_of(record) if isinstance(record, dict) else None
    if form is None:
        raise Refused(f' has neither "messages" nor "prompt" and "completion", but '
                      f'{names_of(record)}: name the fields so (docs/conversations.md)')
    check_fields(record)
    if record.get("label") is False or any(record.get(name) not in (None, 1) for name in LEARNT):
        raise Refused(" says that it is not learnt, and only an answer can say it: leave such "
                      "records out")
    if form == ALPACA:
        texts = [record["instruction"], record.get("input")]
        messages = messages_of_pair("\n\n".join(str(text) for text in texts if text),
                                    record["output"])
    elif form == PAIR:
        messages = messages_of_pair(record["prompt"], record["completion"])
    else:
        messages = messages_of_list(record[form[0]])
    if not any(message.role == ASSISTANT and message.is_learnt for message in messages):
        raise Refused(f" has no answer that is learnt: no message of {ASSISTANT}")
    return messages


def names_of(record) -> str:
    """The fields of a record, for a message. Raises Refused if two answers are among them."""
    names = record if isinstance(record, dict) else ()
    if "chosen" in names and "rejected" in names:
        raise Refused(' has "chosen" and "rejected": preferences are not learnt here. To learn the '
                      'chosen answers, rename "chosen" to "completion", or to "messages" if it '
                      'holds the whole conversation')
    return ", ".join(f'"{name}"' for name in list(names)[:5]) or "nothing"


def messages_of_pair(prompt, completion) -> list[Message]:
    """Of two texts, or of two lists of messages."""
    if not isinstance(prompt, list):
        prompt = [dict(role="user", content=prompt)]
    if not isinstance(completion, list):
        completion = [dict(role=ASSISTANT, content=completion)]
    before = [message._replace(is_learnt=message.role != ASSISTANT)
              for message in messages_of_list(prompt)]
    return before + messages_of_list(completion)


def messages_of_list(messages) -> list[Message]:
    if not isinstance(messages, list):
        raise Refused(f": the messages are {type(messages).__name__}, not an array")
    return [parse_message(message) for message in messages]


def parse_message(message) -> Message:
    """Raises Refused."""
    if not isinstance(message, dict):
        raise Refused(f": a message is {type(message).__name__}, not an object")
    check_fields(message)
    given = first_of(message, ("role", "from"))
    role = ROLES.get(str(given).lower())
    if role is None:
        raise Refused(f": the role {given!r} is none of system, user, {ASSISTANT}: leave such "
                      f"records out")
    said = [message[name] for name in LEARNT if message.get(name) is not None]
    if any(value not in (0, 1) or value != said[0] or (role != ASSISTANT and value is True)
           for value in said):
        raise Refused(f": a message of {role} has {' and '.join(LEARNT)} that are {said}: an "
                      f"answer is learnt or not, so write true or false")
    reasoning = first_of(message, REASONING) or None
    if reasoning is not None:
        reasoning = text_of_parts(reasoning)
        if role != ASSISTANT:
            raise Refused(f": a message of {role} has a reasoning, which only an answer may have")
    return Message(role, text_of_parts(first_of(message, ("content", "value"))),
                   role != ASSISTANT or not said or bool(said[0]), reasoning)


def check_fields(fields: dict) -> None:
    """Raise Refused if a field is not empty that would change what is written."""
    for name in REFUSED:
        if fields.get(name) not in NOTHING:
            raise Refused(f' has "{name}": tool calls, images and the like are not supported: '
                          f'leave such records out')


def first_of(fields: dict, names):
    """The value of the first of these fields that is given."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


def text_of_parts(content) -> str:
    """A text, or OpenAI's list of parts, [{"type": "text", "text": "2 + 2?"}, ...], as one text."""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text"
                                         for part in content):
        content = "".join(str(part.get("text")) for part in content)
    if not isinstance(content, str):
        raise Refused(f": a content is {type(content).__name__}, not a string")
    check_characters(content)
    return content


def check_characters(text: str) -> None:
    """Raise Refused if a text has half a surrogate pair, which JSON can write."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise Refused(": half a surrogate pair is no character") from None


def texts_of(document) -> Iterator:
    """A document as texts, to be hashed and compared: the texts that it has, or of a conversation
    what its messages say. A Refused stays."""
    for message in document:
        if not isinstance(message, Message):
            yield message
            continue
        text = message.content
        if message.reasoning is not None:
            text = f"<think>\n{message.reasoning}\n</think>\n\n{text}"
        yield f"\n\n{message.role}{'' if message.is_learnt else ', not learnt'}:\n"
        kinds = {(ASSISTANT, True): Answer, ("system", True): SystemText}
        yield kinds.get((message.role, message.is_learnt), str)(text)
