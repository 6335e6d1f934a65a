"""Conversations: messages -> tokens, and which of them are learnt: have a loss.

A template writes the messages as one text. A model learns what it has to write itself, which is
underlined here: the contents of the answers, and the token that ends each.

    plain       <|endoftext|>user:
                2 + 2?

                assistant:
                4<|endoftext|>
                ~~~~~~~~~~~~~~

    chatml      <|im_start|>user
                2 + 2?<|im_end|>
                <|im_start|>assistant
                4<|im_end|>
                ~~~~~~~~~~~

ChatML (OpenAI 2023) is the template of Qwen's, SmolLM2's and other instruct models. Its two marks
are tokens of their tokenizers, which no content can forge. Where a tokenizer lacks them they are
ordinary text: a content that has one is refused, <|endoftext|> begins a conversation and ends each
answer.
"""
from itertools import groupby

from corpus.chat_message import ASSISTANT, Message
from corpus.json_tokenizers import MARKS, NOTHING, TEXT, TOKEN
from corpus.token_streams import decode
from corpus.tokenizers import document_start


def plain(messages, encoding):
    """Yield texts, and tokens of which one ends a text: (text or token, whether it is learnt). A
    message without content is an answer that the model is to write: its content is not yielded."""
    yield from ((token, False) for token in document_start(encoding))
    for role, content, is_learnt, _ in messages:
        if role != ASSISTANT:
            yield f"{role}:\n{content}\n\n", False
            continue
        yield f"{role}:\n", False
        if content is not None:
            yield content, is_learnt
            yield encoding.eot_token, is_learnt


def chatml(messages, encoding):
    """As `plain`."""
    start, end = MARKS
    if has_marks(encoding):
        start, end = (encoding.encode_single_token(mark) for mark in MARKS)
    else:
        yield from ((token, False) for token in document_start(encoding))
    for role, content, is_learnt, _ in messages:
        yield start, False
        if role != ASSISTANT:
            yield f"{role}\n{content}", False
            yield end, False
            yield "\n", False
            continue
        yield f"{role}\n", False
        if content is not None:
            yield content, is_learnt
            yield end_of_answer("chatml", encoding), is_learnt
            yield "\n", False


FORMS = {"plain": plain, "chatml": chatml}


def has_marks(encoding) -> bool:
    return set(MARKS) <= encoding.special_tokens_set


def default_template(encoding) -> str:
    return "chatml" if has_marks(encoding) else "plain"


def end_of_answer(template: str, encoding) -> int:
    """The token that ends each answer."""
    if template == "chatml" and has_marks(encoding):
        return encoding.encode_single_token(MARKS[1])
    return encoding.eot_token


def text_of(parts, encoding) -> str:
    """The text of texts and tokens."""
    return "".join(part if isinstance(part, str) else decode(encoding, [part])
                   for part, _ in parts)


class Template:
    """One of FORMS for a tokenizer. (jinja_templates.ChatTemplate is a model's own.)"""

    def __init__(self, name: str, encoding, file: str | None = None):
        self.name = name
        self.file = file            # of a model whose own template writes the same
        self.encoding = encoding
        self.end = end_of_answer(name, encoding)
        self.reasonings_left_out = 0

    def parts(self, messages):
        """(text or token, whether it is learnt), one after the other."""
        return FORMS[self.name](messages, self.encoding)

    def check(self, messages) -> None:
        """Raise ValueError if an answer has a reasoning, or a content has a mark of ChatML where
        these are text."""
        if any(message.reasoning for message in messages):
            raise ValueError(f"an answer has a reasoning, which --template {self.name} does not "
                             f"write: remove the field, or put it into the content")
        if self.name != "chatml" or has_marks(self.encoding):
            return
        for message in messages:
            for mark in MARKS:
                if mark in message.content:
                    raise ValueError(f"a content has {mark}, which --template chatml writes as "
                                     f"text, because the tokenizer has no such token: give "
                                     f"--template plain")

    def render(self, messages) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and which are learnt. What stands between two answers is
        encoded as one text, as transformers does it. (An answer is encoded by itself, as a model
        writes it: its tokens can differ from those of the whole text where it begins with white
        space.)"""
        tokens, learnt = [], []
        parts = self.parts(messages)
        behind = NOTHING
        for (kind, is_learnt), group in groupby(parts, lambda part: (type(part[0]), part[1])):
            new = [value for value, _ in group]
            if kind is str:
                new = self.encoding.encode_ordinary("".join(new), behind)
            behind = TOKEN if kind is int else TEXT
            tokens += new
            learnt += [is_learnt] * len(new)
        return tokens, learnt

    def prompt_of(self, messages) -> list[int]:
        """The tokens of a conversation up to where a model writes the next answer."""
        tokens, _ = self.render([*messages, Message(ASSISTANT, None)])
        return tokens
