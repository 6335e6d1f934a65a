"""Conversations as tokens, and which of them are learnt: have a loss.

A template writes the messages as one text. A model learns what it has to write itself, which is
underlined here: what follows the prompt of each answer, up to the token that ends the answer. The
prompt is what the template writes of the messages before the answer, as a model is asked.

    plain       <|endoftext|>user:
                2 + 2?

                assistant:
                4<|endoftext|>
                ~~~~~~~~~~~~~~

`plain` is for models that are trained here. A model of Hugging Face has a template of its own, a
program in Jinja, which `transformers` runs:

    prompt      <|user|>2 + 2?<|end|><|assistant|>
    tokens      <|user|>2 + 2?<|end|><|assistant|>4<|end|>
    learnt                                        ~~~~~~~~

A conversation is refused where this cannot be told: it does not begin with a prompt, the template
leaves out a content or an earlier thought, or a content has a token of the template.
"""
import hashlib
from pathlib import Path

from corpus.chat_records import ASSISTANT, Message
from corpus.huggingface_tokenizers import HuggingFaceTokenizer, load
from corpus.tokenizers import decode, document_start

OWN = "jinja-"              # how the name of a model's own template begins
# `plain` as transformers has it. START stands for what begins a document, EOT for what ends one.
PLAIN = """{{ 'START' }}{% for message in messages %}\
{{ message['role'] + ':\\n' + message['content'] }}\
{{ 'EOT' if message['role'] == 'assistant' else '\\n\\n' }}{% endfor %}\
{{ 'assistant:\\n' if add_generation_prompt else '' }}"""
TURNS = [Message("user", "question 1"), Message(ASSISTANT, "answer 1"),
         Message("user", "question 2"), Message(ASSISTANT, "answer 2")]


class PlainTemplate:
    """`plain` for a tokenizer of tiktoken. Its special tokens are in no text."""
    name = "plain"
    program = None

    def __init__(self, encoding):
        self.encoding = encoding
        self.end = encoding.eot_token

    def render(self, messages) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, and which are learnt. Raises ValueError."""
        if any(message.reasoning for message in messages):
            raise ValueError("an answer has a reasoning, which --template plain does not write: "
                             "remove the field, or put it into the content")
        tokens = document_start(self.encoding)
        learnt = [False] * len(tokens)
        between = ""                    # is encoded as one text, as transformers does it
        for message in messages:
            between += f"{message.role}:\n"
            if message.role != ASSISTANT:
                between += f"{message.content}\n\n"
                continue
            prompt = self.encoding.encode_ordinary(between)
            answer = [*self.encoding.encode_ordinary(message.content), self.end]
            tokens += prompt + answer
            learnt += [False] * len(prompt) + [message.is_learnt] * len(answer)
            between = ""
        behind = self.encoding.encode_ordinary(between)
        return tokens + behind, learnt + [False] * len(behind)

    def prompt_of(self, messages) -> list[int]:
        """The tokens of a conversation up to where a model writes the next answer."""
        tokens, _ = self.render([*messages, Message(ASSISTANT, "")])
        return tokens[:-1]


class JinjaTemplate:
    """A program in Jinja for a tokenizer of Hugging Face: a model's own, or `plain`."""

    def __init__(self, program: str, encoding: HuggingFaceTokenizer):
        self.program = program
        self.encoding = encoding
        self.name = hash_of(program) if program != plain_program(encoding) else "plain"
        added = encoding.backend.get_added_tokens_decoder().values()
        self.marks = [token.content for token in added if token.special]
        self.end = None                 # the token that ends an answer
        self.problem = None             # why no answer can be learnt
        try:
            written = self.write(TURNS)
            self.marks = [token.content for token in added
                          if token.special or token.content in written]
            self.find_end([encoding.backend.token_to_id(mark) for mark in self.marks])
        except ValueError as error:
            self.problem = str(error)

    def find_end(self, marks: list[int]) -> None:
        """Find the token that ends an answer, by a conversation of two. Raises ValueError."""
        first = self.encoding.encode_with_special(self.write(TURNS[:2]))
        ends = [token for token in first[len(self.prompt_of(TURNS[:1])):] if token in marks]
        if not ends:
            raise ValueError("it writes no token behind an answer")
        self.end = ends[-1]             # for `render`
        tokens, learnt = self.render(TURNS)
        text = decode(self.encoding, [token for token, is_in in zip(tokens, learnt) if is_in])
        if tokens.count(self.end) < 2 or "question" in text or text.count("answer") != 2:
            raise ValueError("it does not end each answer by one token")

    def write(self, messages, is_prompt=False) -> str:
        """The text of a conversation. Raises ValueError if the program fails or a content has one
        of its marks."""
        fields = []
        for message in messages:
            for mark in self.marks:
                if mark in message.content or mark in (message.reasoning or ""):
                    raise ValueError(f"a content has {mark}, a token that the template writes")
            fields.append(dict(role=message.role, content=message.content))
            if message.reasoning is not None:
                fields[-1]["reasoning_content"] = message.reasoning
        try:
            return self.encoding.tokenizer.apply_chat_template(
                fields, chat_template=self.program, tokenize=False,
                add_generation_prompt=is_prompt)
        except Exception as error:          # a program may fail in any way; jinja2 may be missing
            raise ValueError(f"the model's own template refuses a conversation: {error}") from None

    def prompt_of(self, messages) -> list[int]:
        """The tokens of a conversation up to where a model writes the next answer."""
        return self.encoding.encode_with_special(self.write(messages, is_prompt=True))

    def check(self) -> None:
        """Raise ValueError if what is learnt cannot be told of any conversation."""
        if self.problem is not None:
            raise ValueError(f"what is learnt cannot be told from the model's own template: "
                             f"{self.problem}: give another to --template")

    def render(self, messages) -> tuple[list[int], list[bool]]:
        """The tokens of a conversation, as transformers has them, and which are learnt. Raises
        ValueError."""
        self.check()
        if messages[0].role == ASSISTANT:
            raise ValueError("it begins with an answer, which has no prompt: leave that out")
        text = self.write(messages)
        tokens = self.encoding.encode_with_special(text)
        learnt = [False] * len(tokens)
        answers = [(message, self.write(messages[:number], is_prompt=True))
                   for number, message in enumerate(messages) if message.role == ASSISTANT]
        limits = [len(prompt) for _, prompt in answers[1:]] + [len(text)]
        for (message, prompt), limit in zip(answers, limits):
            before = self.encoding.encode_with_special(prompt)
            if tokens[:len(before)] != before:
                raise ValueError("the prompt of an answer is not what stands before the answer")
            if self.end not in tokens[len(before):]:
                raise ValueError("an answer does not end by the token that ends others")
            check_written([message.reasoning or "", message.content], text[len(prompt):limit])
            end = tokens.index(self.end, len(before)) + 1
            learnt[len(before):end] = [message.is_learnt] * (end - len(before))
        check_written([message.content for message in messages], text)
        return tokens, learnt


def check_written(contents, text: str) -> None:
    """Raise ValueError if a text does not have these contents, one behind the other."""
    position = 0
    for content in map(str.strip, contents):
        position = text.find(content, position) + len(content)
        if position < len(content):
            raise ValueError(f"the template leaves out or changes {content[:40]!r}: leave the "
                             f"field or the conversation out")


# ---- Names and files -------------------------------------------------------------------------

def hash_of(program: str) -> str:
    return OWN + hashlib.sha256(program.encode()).hexdigest()[:12]


def plain_program(encoding) -> str:
    """`plain` in Jinja for a model with this tokenizer."""
    start = "".join(decode(encoding, [token]) for token in document_start(encoding))
    return PLAIN.replace("START", start).replace("EOT", encoding.end_of_text)


def get_template(name: str, encoding, program: str | None = None):
    """The template of this name for a tokenizer. `program`: of a model's own. Raises ValueError for
    another name."""
    if program is not None and name == hash_of(program):
        return JinjaTemplate(program, encoding)
    if name != "plain":
        raise ValueError(f"there is no template {name!r} here, only plain")
    if isinstance(encoding, HuggingFaceTokenizer):
        return JinjaTemplate(plain_program(encoding), encoding)
    return PlainTemplate(encoding)


def choose_template(given: str | None, encoding):
    """The template that --template gives, or else that of the tokenizer, or plain. Raises
    ValueError, also if what is learnt cannot be told of it."""
    if isinstance(encoding, HuggingFaceTokenizer):
        program = program_of(given, encoding) if given != "plain" else None
        template = JinjaTemplate(program or plain_program(encoding), encoding)
        template.check()
        return template
    if given not in (None, "plain"):
        raise ValueError(f"--template {given} is a model's, whose tokens {encoding.name} has not: "
                         f"give --tokenizer DIR, the folder of the model, or --template plain")
    return PlainTemplate(encoding)


def program_of(given: str | None, encoding: HuggingFaceTokenizer) -> str | None:
    """The program in a .jinja, in the folder of a model, or else of the tokenizer, if it has one.
    Raises ValueError."""
    if given is not None and Path(given).is_file():
        return Path(given).read_text("utf-8")
    tokenizer = encoding.tokenizer if given is None else load(given).tokenizer
    if given is None and tokenizer.chat_template is None:
        return None
    try:
        return tokenizer.get_chat_template()
    except ValueError as error:                 # it has none, or several of which none is default
        raise ValueError(f"{given or encoding.name}: {str(error).partition('.')[0]}: give one, "
                         f"--template FILE.jinja") from None
