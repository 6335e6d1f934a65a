"""The formats of chat data: a record of a file holds the messages of a conversation, of which
conversations.py makes tokens.

    {"prompt": "2 + 2?", "completion": "4"}     is short for
    {"messages": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}

The same as ShareGPT writes it: {"conversations": [{"from": "human", "value": "2 + 2?"}, ...]}, and
as Alpaca does: {"instruction": "Add.", "input": "2 + 2", "output": "4"}. A record may also be the
list of messages itself.
"""
import json
from pathlib import Path
from typing import Iterator

from corpus.chat_message import (ASSISTANT, UNWRITTEN, Message, check_text, check_unwritten,
                                 is_empty, is_unsaid, parse_message, pick, present, unread_of)
from corpus.records import NotText, UnreadFields, fields_of
from corpus.refused_records import (ALPACA, FORMS, LISTS, PAIR, Refused, filter_of, form_of,
                                    kind_of_value, some_fields)

SYSTEM_FIELDS = ("system", "system_prompt", "system_message", "system_instruction")
WEIGHTS = {"train", "trainable", "weight", "loss_weight"}      # of a record as a whole
MASK = "loss_mask"                              # of tokens
KTO_FIELDS = ("label", "kto_tag")               # false: a completion that nobody wants
INPUT, HISTORY, INSTRUCTION = "input", "history", "instruction"         # Alpaca's
REFUSED = {*UNWRITTEN, MASK}
NEVER_TOLD = {*SYSTEM_FIELDS, *REFUSED}         # read, or refused
READ = {*NEVER_TOLD, *WEIGHTS, *KTO_FIELDS, INPUT, HISTORY}


class Answer(str):
    """An answer that is learnt, with its reasoning, among the texts of a conversation."""


class SystemText(str):
    """The content of a system message among the texts of a conversation."""


def columns_of_messages(path: Path, kinds: dict[str, str]) -> list[str]:
    """The columns that are read of a table of conversations. Raises ValueError."""
    if form_of(kinds) is None:
        problem = why_no_messages(dict.fromkeys(kinds))
        advice = ""
        if problem.filter is None:
            advice = ": prepare text by itself, in another --out"
        raise ValueError(f"{path}{problem.with_command(path)}{advice}")
    names = {*READ, *(name for form in FORMS for name in form)}
    return [name for name in kinds if name in names]


def why_no_messages(record: dict) -> Refused:
    return Refused(f' has neither "messages" nor "prompt" and "completion", but '
                   f'{some_fields(record)}', filter_of(record))


def messages_of(record, unread: UnreadFields) -> list[Message]:
    """The messages of a record. `unread` counts its fields that are not read. Raises Refused."""
    if not isinstance(record, dict) and not fields_of(record):
        raise Refused(f" is {kind_of_value(record)}, not an object")
    record = fields_of(record)
    form = form_of(name for name, value in record.items() if value is not None) or form_of(record)
    if form is None:
        raise why_no_messages(record)
    check_others(record)
    if form == PAIR:
        given = messages_of_pair(record["prompt"], record["completion"])
    elif form == ALPACA:
        given = messages_of_alpaca(record)
    else:
        given = record[form[0]]
        if not isinstance(given, list):
            raise Refused(f': "{form[0]}" is {kind_of_value(given)}, not an array')
        given = [(message, True) for message in given]
    messages = [parse_message(message, is_learnt) for message, is_learnt in given]
    add_system(messages, record, form)
    answers = [message for message in messages if message.role == ASSISTANT]
    if not answers:
        raise Refused(f" has no answer: no message has the role {ASSISTANT}")
    if not any(answer.is_learnt for answer in answers):
        raise Refused(" has no answer that is learnt")
    unread.add(sorted(unread_names(record, form, given)))
    return messages


def check_others(record: dict) -> None:
    """Raise Refused if a field beside the messages changes what they say, or are for."""
    check_unwritten(record, REFUSED, "")
    for name in present(WEIGHTS, record):
        if record[name] not in (None, 1):
            raise Refused(f': "{name}" of a record is {json.dumps(record[name], default=str)}, and '
                          f'only an answer can say whether it is learnt: leave such records out',
                          f"select(.{name} == null or .{name} == true or .{name} == 1)")
    for name in KTO_FIELDS:
        if record.get(name) is False:
            raise Refused(f': "{name}" is false, so nobody wants this completion: leave such '
                          f'records out', f"select(.{name} != false)")


def messages_of_pair(prompt, completion) -> list:
    """(message, whether an answer is learnt) of a prompt and its completion: two texts, or two
    lists of messages. The answers of a prompt are not learnt, as in TRL."""
    if not isinstance(prompt, list):
        prompt = [dict(role="user", content=prompt)]
    if not isinstance(completion, list):
        completion = [dict(role=ASSISTANT, content=completion)]
    return [(message, False) for message in prompt] + [(message, True) for message in completion]


def messages_of_alpaca(record: dict) -> list:
    """As `messages_of_pair`. LLaMA-Factory's "history" holds earlier questions and answers."""
    pairs = record.get(HISTORY) or []
    if not (isinstance(pairs, list)
            and all(isinstance(pair, list) and len(pair) == 2 for pair in pairs)):
        raise Refused(f': "{HISTORY}" is no array of pairs, each a question and its answer')
    prompt = record[INSTRUCTION]
    if isinstance(record["output"], list):
        raise Refused(': "output" is an array, as of answers that are preferred and not: take the '
                      'first', ".output |= .[0]")
    if not is_empty(record.get(INPUT)):
        for name in (INSTRUCTION, INPUT):
            check_text(record[name], f'"{name}"')
        prompt = f"{prompt}\n\n{record[INPUT]}"
    return [message for pair in [*pairs, [prompt, record["output"]]]
            for message in messages_of_pair(*pair)]


def add_system(messages: list[Message], record: dict, form) -> None:
    """Insert the system message that a field of the record holds, if one does."""
    names = [name for name in SYSTEM_FIELDS if not is_empty(record.get(name))]
    if form[0] in LISTS and not is_empty(record.get(INSTRUCTION)):
        contents = {message.content.strip() for message in messages}
        if str(record[INSTRUCTION]).strip() not in contents:    # as Magpie repeats the question
            names.append(INSTRUCTION)
    if not names:
        return
    system = parse_message(dict(role="system", content=pick(record, names)))
    held = [message for message in messages if message.role == "system"]
    if held and held != [system]:
        raise Refused(f' has a field "{names[0]}" and a message of system: one of them is enough')
    if not held:
        messages.insert(0, system)


def unread_names(record: dict, form, given) -> set[str]:
    """The names of the fields of a record, and of its messages, that are not read."""
    others = record.keys() - NEVER_TOLD - set(form)
    if form == ALPACA:
        others -= {INPUT, HISTORY}
    elif form[0] in LISTS:
        others.discard(INSTRUCTION)
    names = {name for name in others if not is_unsaid(record[name])}
    return names | unread_of([message for message, _ in given], form[0])


def texts_of(messages) -> Iterator[str]:
    """A conversation as texts, to be hashed and compared. A NotText stays what it is."""
    for message in messages:
        if isinstance(message, NotText):
            yield message
            return
        text = message.content
        if message.reasoning is not None:
            text = f"<think>\n{message.reasoning}\n</think>\n\n{text}"
        if not message.is_learnt:
            yield f"\n\n{message.role}, not learnt:\n"
            yield text
            continue
        yield f"\n\n{message.role}:\n"
        if message.role == ASSISTANT:
            text = Answer(text)
        elif message.role == "system":
            text = SystemText(text)
        yield text
