"""Which template of conversations a published model has, and how it is kept.

A model's folder has a program in Jinja: chat_template.jinja, or an entry of tokenizer_config.json.
Its words do not tell what it writes. So it is run (jinja_templates.py) on conversations that are
known (PROBES). If it writes what one of ours writes (conversations.py), it has the name of ours.
Otherwise it is kept in a file, whose hash is its name, beside the shards and in checkpoints.
"""
import json
from pathlib import Path

from corpus.chat_message import ASSISTANT, Message
from corpus.conversations import FORMS, Template, default_template, has_marks, text_of
from corpus.jinja_templates import OWN, TURNS, ChatTemplate, hash_of
from corpus.token_streams import decode
from corpus.tokenizer_config import content_of, read_object, special_tokens
from corpus.tokenizers import document_start

# Ours as transformers writes them. START stands for what begins a document, EOT for what ends one.
PLAIN = """{{ 'START' }}{% for message in messages %}\
{{ message['role'] + ':\\n' + message['content'] }}\
{{ 'EOT' if message['role'] == 'assistant' else '\\n\\n' }}{% endfor %}\
{{ 'assistant:\\n' if add_generation_prompt else '' }}"""
CHATML = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
CHATML_AS_TEXT = """{{ 'START' }}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
{{ 'EOT\\n' if message['role'] == 'assistant' else '<|im_end|>\\n' }}{% endfor %}\
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""

PROBES = [TURNS[:1], TURNS, [Message("system", "be brief"), *TURNS], TURNS[1:],
          [Message("system", ""), Message("user", " a\n"), Message(ASSISTANT, "\n b "),
           Message("user", ""), Message("user", "c"), Message(ASSISTANT, "")],
          [TURNS[0], TURNS[1]._replace(content="<think>\nthought\n</think>\n\nanswer"), *TURNS[2:]],
          [TURNS[0], TURNS[1]._replace(reasoning="thought"), *TURNS[2:]]]


# ---- The files of a model's folder ----------------------------------------------------------

def read_template(folder: Path) -> str | None:
    """The content of the file that keeps the template of a model's folder: an object of JSON with
    the program and the special tokens that it may name. None without a template."""
    kept = list(folder.glob(f"{OWN}*.json"))    # a folder of shards
    if len(kept) == 1:
        return read_template_file(kept[0])
    path = folder / "tokenizer_config.json"
    program = read_object(path).get("chat_template")
    if isinstance(program, list):               # several that have names
        try:
            program = {one["name"]: one["template"] for one in program}
        except (KeyError, TypeError) as error:
            raise ValueError(f"{path} is refused: its chat_template has no {error}") from None
    if isinstance(program, dict):
        if "default" not in program:
            raise ValueError(f"{path} has the templates {', '.join(program)}, and none is called "
                             f"default: give one of them in a file, --template FILE.jinja")
        program = program["default"]
    path = folder / "chat_template.jinja"
    if path.exists():
        program = read_program(path)
    return template_json(program, special_tokens(folder)) if isinstance(program, str) else None


def read_program(path: Path) -> str:
    """The content of a .jinja. Raises ValueError."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is refused: {error}") from None


def template_json(program: str, tokens: dict) -> str:
    """The content of the file that keeps a template: the program and the special tokens that it
    names."""
    contents = {name: content_of(token) for name, token in tokens.items() if name in program}
    named = {name: text for name, text in contents.items()
             if isinstance(text, str) and name != "chat_template"}
    return json.dumps(dict(chat_template=program) | named, sort_keys=True)


def read_template_file(path: Path) -> str:
    """The content of the file that keeps a template, from a folder of a model, its .jinja, or such
    a file itself. Raises ValueError, OSError."""
    if path.is_dir():
        content = read_template(path)
        if content is None:
            raise ValueError(f"{path} has no chat_template.jinja, and no chat_template in a "
                             f"tokenizer_config.json: give another --template")
        return content
    if path.suffix == ".json":
        if path.name == "tokenizer_config.json":
            return read_template_file(path.parent)
        content = read_object(path)
        if not isinstance(content.get("chat_template"), str):
            raise ValueError(f"{path} has no chat_template: give another --template")
        return template_json(content["chat_template"], content)
    return template_json(read_program(path), special_tokens(path.parent))


def read_ends(folder: Path) -> list[int]:
    """The tokens at which a folder of a model, or of shards, says that a generation ends."""
    for name, key in (("generation_config.json", "eos_token_id"), ("config.json", "eos_token_id"),
                      ("meta.json", "ends")):
        ends = read_object(folder / name).get(key)
        ends = [ends] if type(ends) is int else ends
        if isinstance(ends, list) and all(type(token) is int for token in ends):
            return sorted(set(ends))
    return []


# ---- Names ----------------------------------------------------------------------------------

def in_jinja(template: str, encoding) -> str:
    """One of ours as transformers has it, for a model with this tokenizer."""
    program = PLAIN
    if template == "chatml":
        program = CHATML if has_marks(encoding) else CHATML_AS_TEXT
    start = text_of([(token, False) for token in document_start(encoding)], encoding)
    return program.replace("START", start).replace("EOT", encoding.end_of_text)


def entries_of(template) -> dict:
    """A template's entries for tokenizer_config.json: a model's own is as it was."""
    entries = {}
    if template.end is not None:
        entries["eos_token"] = decode(template.encoding, [template.end])
    if template.file is not None:
        return entries | json.loads(template.file)
    return entries | dict(chat_template=in_jinja(template.name, template.encoding))


def is_own(name: str) -> bool:
    """Whether the name is of a template that is kept in a file."""
    return name.startswith(OWN)


def name_of(file: str, encoding) -> str:
    """The name of the template in a file: ours, if it writes what ours writes. Raises ValueError
    without jinja2, or if it cannot be run."""
    for form in FORMS:
        if json.loads(file)["chat_template"] == in_jinja(form, encoding):
            return form
    own = ChatTemplate(file, encoding)
    for form in FORMS:
        if all(writes_alike(own, Template(form, encoding), messages) for messages in PROBES):
            return form
    return own.name


def writes_alike(own, ours: Template, messages) -> bool:
    """Whether two templates write the same text of a conversation, and the same prompt."""
    prompt = [*messages, Message(ASSISTANT, None)]
    try:
        return (own.write(messages) == text_of(ours.parts(messages), ours.encoding)
                and own.write(messages, True) == text_of(ours.parts(prompt), ours.encoding))
    except ValueError:
        return False


def get_template(name: str, encoding, file: str | None = None):
    """The template of this name for a tokenizer. `file` is the content of a model's file; of one
    that writes what ours writes, it is kept for an export. Raises ValueError for another name."""
    if file is not None and name == hash_of(file):
        return ChatTemplate(file, encoding)
    if name not in FORMS:
        raise ValueError(f"there is no template {name!r} here, only {', '.join(FORMS)}")
    return Template(name, encoding, file)


def find_template(folder: Path, encoding):
    """The template that a model's folder has; None without one. Raises ValueError."""
    file = read_template(folder)
    return None if file is None else get_template(name_of(file, encoding), encoding, file)


def choose_template(given: str | None, encoding, folder: Path | None):
    """The template that --template gives, or else that of the tokenizer's `folder`, or the default.
    Raises ValueError if there is none, or what is learnt cannot be told of it; OSError."""
    if given in FORMS:
        return Template(given, encoding)
    template = None
    if given is not None:
        file = read_template_file(Path(given))
        template = get_template(name_of(file, encoding), encoding, file)
    elif folder is not None:
        template = find_template(folder, encoding)
    if template is None:
        template = Template(default_template(encoding), encoding)
    template.check([])
    return template
