"""The templates of corpus/conversations.py as transformers has them: programs in Jinja, in a
model's tokenizer_config.json or chat_template.jinja. tools/huggingface.py writes and reads them.
"""
import json
from pathlib import Path

from corpus.conversations import MARKS, has_marks
from corpus.formats import EOT
from corpus.tokenizers import get_tokenizer
from runtime.checkpoint_files import reading

PLAIN = """{{ 'EOT' }}{% for message in messages %}\
{{ message['role'] + ':\\n' + message['content'] }}\
{{ 'EOT' if message['role'] == 'assistant' else '\\n\\n' }}{% endfor %}\
{{ 'assistant:\\n' if add_generation_prompt else '' }}"""
CHATML = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}\
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""
CHATML_AS_TEXT = """{{ 'EOT' }}{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] }}\
{{ 'EOT\\n' if message['role'] == 'assistant' else '<|im_end|>\\n' }}{% endfor %}\
{{ '<|im_start|>assistant\\n' if add_generation_prompt else '' }}"""


def in_jinja(template: str, encoding) -> str:
    """One of ours, for a model with this tokenizer."""
    text = PLAIN
    if template == "chatml":
        text = CHATML if has_marks(encoding) else CHATML_AS_TEXT
    return text.replace("EOT", getattr(encoding, "end_of_text", EOT))


def template_of(config: Path):
    """The chat_template in a tokenizer_config.json; of several that have names, the default."""
    with reading(config, "is refused"):
        content = json.loads(config.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError(f"it is no object, but {type(content).__name__}")
        templates = content.get("chat_template")
        if isinstance(templates, list):
            templates = {one["name"]: one["template"] for one in templates}.get("default")
        return templates


def find_template(folder: Path, tokenizer: str, own: str | None) -> str | None:
    """The name of the template that a model's folder has; None if it has none, or another one.
    `own` is the content of the tokenizer's file, if it has one."""
    path = folder / "chat_template.jinja"
    config = folder / "tokenizer_config.json"
    text = None
    if path.exists():
        with reading(path, "is refused"):
            text = path.read_text(encoding="utf-8")
    elif config.exists():
        text = template_of(config)
    if not isinstance(text, str):
        return None
    encoding = get_tokenizer(tokenizer, own)
    for template in ("plain", "chatml"):
        if text == in_jinja(template, encoding):
            return template
    # Those of Qwen and SmolLM2 are longer: they add a system's message, and tools.
    return "chatml" if has_marks(encoding) and all(mark in text for mark in MARKS) else None
