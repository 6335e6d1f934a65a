"""A published model's own template of conversations: a program in Jinja, run as in transformers.

    {% for message in messages %}<|{{ message.role }}|>{{ message.content }}<|end|>{% endfor %}

The loss covers the text in the blocks {% generation %} of the program. Without such blocks it
covers what follows the prompt of each answer, up to the token that ends the answer. The prompt is
what the program writes of the messages before the answer, with add_generation_prompt:

    prompt      <|user|>2 + 2?<|end|><|assistant|>
    text        <|user|>2 + 2?<|end|><|assistant|>4<|end|>
    learnt                                        ~~~~~~~~

No content forges the end of an answer, a special token or a token of a turn: there its characters
are text. (Other added tokens, such as <think>, stay tokens.)
"""
import hashlib
import itertools
import json
import re
from datetime import datetime
from typing import Iterator, NamedTuple

from corpus.chat_message import ASSISTANT, Message
from corpus.json_tokenizers import NOTHING, TOKEN

OWN = "jinja-"              # how the name of a model's own template begins
# Noncharacters of Unicode, which `protect` refuses in a content: around a mark that is the user's
# text, and around a block {% generation %}.
AS_TEXT, END_AS_TEXT, GENERATION, END_GENERATION = "\ufdd0\ufdd1\ufdd2\ufdd3"
TURNS = [Message("user", "question 1"), Message(ASSISTANT, "answer 1"),
         Message("user", "question 2"), Message(ASSISTANT, "answer 2")]


def hash_of(file: str) -> str:
    return OWN + hashlib.sha256(file.encode()).hexdigest()[:12]


def compile_program(program: str):
    """The template of jinja2, in the environment that transformers gives it. Raises ValueError."""
    try:
        import jinja2
        from jinja2.ext import Extension, loopcontrols
        from jinja2.sandbox import ImmutableSandboxedEnvironment
    except ImportError:
        raise ValueError("the model's own template of conversations is run by the package jinja2: "
                         "pip install jinja2") from None
    if tuple(map(int, re.findall(r"\d+", jinja2.__version__)[:3])) < (3, 1, 6):
        raise ValueError("a program in Jinja can leave the sandbox of jinja2 before 3.1.6: pip "
                         "install --upgrade jinja2")

    class Generation(Extension):
        """{% generation %} ... {% endgeneration %}: what the model writes."""
        tags = {"generation"}

        def parse(self, parser):
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            call = jinja2.nodes.CallBlock(self.call_method("surround"), [], [], body)
            return call.set_lineno(line)

        def surround(self, caller):
            return GENERATION + caller() + END_GENERATION

    def refuse(message):
        raise jinja2.TemplateError(message)

    def to_json(value, ensure_ascii=False, **options):
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, loopcontrols])
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    try:
        return environment.from_string(program)
    except jinja2.TemplateError as error:
        raise ValueError(f"the model's template of conversations is no program in Jinja: {error}"
                         ) from None


class Mark(NamedTuple):
    """An added token of a tokenizer."""
    text: str
    token: int
    is_special: bool
    pattern: str                # with the white space that it takes in


class Piece(NamedTuple):
    """A part of a text: the token of a mark, or ordinary text."""
    start: int
    end: int
    value: str | int


def marks_of(encoding) -> list[Mark]:
    """The added tokens of a tokenizer."""
    marks = []
    for token, added in encoding.added.items():
        before = r"\s*" if added.lstrip else ""
        behind = r"\s*" if added.rstrip else ""
        marks.append(Mark(added.content, token, added.special,
                          before + re.escape(added.content) + behind))
    return marks


class ChatTemplate:
    """A model's own template. `file` is the content of its file. Raises ValueError if it cannot be
    run at all."""

    def __init__(self, file: str, encoding):
        self.name = hash_of(file)
        self.file = file
        self.encoding = encoding
        self.variables = json.loads(file)
        self.program = compile_program(self.variables.pop("chat_template"))
        added = marks_of(encoding)
        self.set_marks(added)
        self.problem = None         # why the answers cannot be told
        self.end = None             # the token that ends an answer
        try:
            self.end = self.find_end()
        except ValueError as error:
            self.problem = str(error)
        # No content may forge these, also where the tokenizer's file does not call them special:
        # the end of an answer, and what each turn has. (Others, as <think>, stay tokens there.)
        named = {*self.variables.values(), *encoding.special_tokens_set}
        one, two = self.try_to_write(TURNS[:1]), self.try_to_write(TURNS[:3])
        self.set_marks([mark for mark in added if mark.is_special or mark.token == self.end
                        or mark.text in named or 0 < one.count(mark.text) < two.count(mark.text)])
        self.encoding = encoding.with_special({mark.text for mark in self.marks})
        thinks = self.try_to_write([TURNS[0], TURNS[1]._replace(reasoning="thought 1")])
        self.writes_reasoning = "thought 1" in thinks
        self.reasonings_left_out = 0

    def set_marks(self, marks: list[Mark]) -> None:
        """Set the tokens that a text is cut at and that are protected in contents."""
        self.marks = sorted(marks, key=lambda mark: len(mark.text), reverse=True)
        texts = "|".join(re.escape(mark.text) for mark in self.marks) or "(?!)"
        as_text = f"{AS_TEXT}({texts}){END_AS_TEXT}"
        alone = f"[{AS_TEXT}{END_AS_TEXT}]"
        groups = "".join(f"|({mark.pattern})" for mark in self.marks)
        self.any_mark = re.compile(texts)
        self.places = re.compile(f"{as_text}|{alone}{groups}")

    def try_to_write(self, messages) -> str:
        """`write`, or "" if the template refuses it."""
        try:
            return self.write(messages)
        except ValueError:
            return ""

    def write(self, messages, is_prompt=False) -> str:
        """The text of a conversation; with `is_prompt` up to where a model writes the next answer.
        Marks in the contents are surrounded by noncharacters."""
        text, _ = self.write_blocks(messages, is_prompt)
        return text

    def write_blocks(self, messages, is_prompt=False) -> tuple[str, list[int]]:
        """`write`, and where in the text its blocks of generation begin and end, in turn."""
        try:
            text = self.program.render(messages=list(map(self.as_dict, messages)), tools=None,
                                       documents=None, add_generation_prompt=is_prompt,
                                       **self.variables)
        except Exception as error:          # a program may fail in any way
            raise ValueError(f"the model's own template refuses a conversation: {error}") from None
        parts = re.split(f"[{GENERATION}{END_GENERATION}]", text)
        return "".join(parts), list(itertools.accumulate(map(len, parts[:-1])))

    def as_dict(self, message: Message) -> dict:
        """A message as templates know it."""
        fields = dict(role=message.role, content=self.protect(message.content))
        if message.reasoning is not None:
            fields["reasoning_content"] = self.protect(message.reasoning)
            fields["thinking"] = fields["reasoning_content"]        # gpt-oss reads it
        return fields

    def protect(self, content: str) -> str:
        """Surround each mark of a content, so that it stays text."""
        if any(character in content for character in
               (AS_TEXT, END_AS_TEXT, GENERATION, END_GENERATION)):
            raise ValueError("a content has one of U+FDD0 to U+FDD3, which are no characters")
        return self.any_mark.sub(AS_TEXT + r"\g<0>" + END_AS_TEXT, content)

    def cut(self, text: str) -> Iterator[Piece]:
        """The marks of a text, and what stands between them. Noncharacters are in no piece."""
        done = 0
        for match in self.places.finditer(text):
            if match.start() > done:
                yield Piece(done, match.start(), text[done:match.start()])
            done = match.end()
            if match[1] is not None:                # a mark that is text
                yield Piece(match.start(1), match.end(1), match[1])
            elif match.lastindex is not None:
                mark = self.marks[match.lastindex - 2]
                at = text.index(mark.text, match.start())
                yield Piece(at, at + len(mark.text), mark.token)
        if done < len(text):
            yield Piece(done, len(text), text[done:])

    def find_end(self) -> int:
        """The token that ends an answer, found by a conversation of two. Raises ValueError."""
        text, blocks = self.write_blocks(TURNS)
        marks = [piece for piece in self.cut(text) if isinstance(piece.value, int)]
        ends = []
        starts = [start for start, _ in self.starts(TURNS, text, blocks)]
        for start, answer, limit in zip(starts, TURNS[1::2], [*starts[1:], len(text)]):
            found = text.find(answer.content, start)
            behind = [piece for piece in marks if found + len(answer.content) <= piece.start]
            if not start <= found < limit or not behind or behind[0].start >= limit:
                raise ValueError("it writes no token behind each answer")
            ends.append(behind[0].value)
        if len(set(ends)) > 1:
            raise ValueError("it ends one answer with another token than the next")
        return ends[0]

    def starts(self, messages, text: str, blocks: list[int]) -> Iterator[tuple[int, Message]]:
        """(where each answer begins in the text of a conversation, its message). Raises ValueError
        if what stands before it is not the prompt that a model would be given."""
        if blocks:
            answers = [message for message in messages if message.role == ASSISTANT]
            if len(blocks) != 2 * len(answers):
                raise ValueError("it has a block of generation more or less than answers")
            yield from zip(blocks[::2], answers)
            return
        for number, message in enumerate(messages):
            if message.role == ASSISTANT:
                prompt = self.write(messages[:number], is_prompt=True)
                if not text.startswith(prompt):
                    raise ValueError("the prompt of an answer is not what stands before the answer")
                yield len(prompt), message

    def spans(self, messages, text: str, blocks: list[int], pieces) -> Iterator[tuple[int, int]]:
        """(start, end) in the text of a conversation, of each answer that is learnt."""
        answers = list(self.starts(messages, text, blocks))
        limits = [start for start, _ in answers[1:]] + [len(text)]      # where the next one begins
        for (start, message), limit, block_end in zip(answers, limits, blocks[1::2] or limits):
            end = block_end
            if not blocks:
                end = self.end_of_answer(message, text[:limit], start, pieces)
            if message.is_learnt:
                yield start, end

    def end_of_answer(self, message, text: str, start: int, pieces) -> int:
        """Where an answer that begins at `start` ends. The text ends where the next answer begins.
        Raises ValueError."""
        content = self.protect(message.content).strip()
        found = text.find(content, start)
        marks = [piece for piece in pieces
                 if isinstance(piece.value, int) and start <= piece.start < len(text)]
        if found >= 0:              # a thought before the content may end with the same token
            marks = [piece for piece in marks if piece.start >= found + len(content)][:1]
        ends = [piece.end for piece in marks if piece.value == self.end]
        if not ends:
            raise ValueError("it does not end an answer by the token that ends others")
        return ends[0]

    def check(self, messages) -> None:
        """Raise ValueError if these messages cannot be written with what is learnt of them."""
        if self.problem is not None:
            raise ValueError(f"what is learnt cannot be told from the model's own template: "
                             f"{self.problem}: give --template plain or chatml, or another file")
        if not self.writes_reasoning and any(message.reasoning for message in messages):
            raise ValueError("an answer has a reasoning, which the model's own template does not "
                             "write: remove the field, or put it into the content")

    def render(self, messages) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, as transformers has them, and which are learnt."""
        text, blocks = self.write_blocks(messages)
        pieces = list(self.cut(text))
        self.reasonings_left_out += sum(
            message.reasoning is not None and message.reasoning.strip() not in text
            for message in messages)
        try:
            spans = list(self.spans(messages, text, blocks, pieces))
        except ValueError as error:
            raise ValueError(f"the answers of a conversation cannot be told: {error}") from None
        tokens, learnt = [], []
        for token, start, end in self.encode(pieces):
            tokens.append(token)
            learnt.append(any(start < last and end > first for first, last in spans))
        return tokens, learnt

    def encode(self, pieces) -> Iterator[tuple[int, int, int]]:
        """(token, first character, end) of each token of the pieces of a text. (The white space
        that a mark takes in does not count.)"""
        behind = NOTHING
        for kind, group in itertools.groupby(pieces, lambda piece: type(piece.value)):
            if kind is int:
                yield from ((piece.value, piece.start, piece.end) for piece in group)
                behind = TOKEN
                continue
            group = list(group)         # what is between two marks is encoded as one text
            places = [place for piece in group for place in range(piece.start, piece.end)]
            text = "".join(piece.value for piece in group)
            for token, (start, end) in zip(*self.encoding.encode_with_offsets(text, behind)):
                yield token, places[start], places[max(start, end - 1)] + 1

    def prompt_of(self, messages) -> list[int]:
        """The tokens of a conversation up to where a model writes the next answer."""
        pieces = self.cut(self.write(messages, is_prompt=True))
        return [token for token, _, _ in self.encode(pieces)]
