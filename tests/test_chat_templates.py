"""A published model's own template of conversations, run beside transformers.

    python -m pytest tests/test_chat_templates.py
"""
import io
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
import sample
from corpus import conversations, jinja_templates
from corpus.chat_message import Message
from corpus.jinja_templates import TURNS, ChatTemplate
from corpus.published_templates import find_template, get_template, read_template
from corpus.shards import open_shard, read_meta
from corpus.tokenizers import get_tokenizer, name_of
from models.llama import LlamaConfig
from tests.harness import run_main, write_lines
from tools import huggingface

pytest.importorskip("jinja2")
pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

# Written for these tests in the style of each family: where its marks stand, what it adds, what it
# refuses, which message it changes.
STYLES = {
    "llama2": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}\
{% if not loop.first and messages[loop.index0 - 1].role == 'system' %}\
{{ '[INST] <<SYS>>\\n' + messages[0].content + '\\n<</SYS>>\\n\\n' + m.content + ' [/INST]' }}\
{% else %}{{ '[INST] ' + m.content + ' [/INST]' }}{% endif %}\
{% elif m.role == 'assistant' %}{{ ' ' + m.content | trim + ' ' + eos_token }}{% endif %}\
{% endfor %}""",
    "llama3": """{{ bos_token }}{% for m in messages %}\
{{ '<|start_header_id|>' + m.role + '<|end_header_id|>\\n\\n' + m.content | trim + '<|eot_id|>' }}\
{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "phi3": """{% for m in messages %}{{ '<|' + m.role + '|>\\n' + m.content + '<|end|>\\n' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>\\n' }}{% else %}{{ eos_token }}\
{% endif %}""",
    "phi4": """{% for m in messages %}\
{{ '<|im_start|>' + m.role + '<|im_sep|>' + m.content + '<|im_end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant<|im_sep|>' }}{% endif %}""",
    "gemma": """{{ bos_token }}{% if messages[0].role == 'system' %}\
{{ raise_exception('System role not supported') }}{% endif %}{% for m in messages %}\
{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate') }}{% endif %}\
{{ '<start_of_turn>' + ('model' if m.role == 'assistant' else m.role) + '\\n' + m.content | trim + \
'<end_of_turn>\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<start_of_turn>model\\n' }}\
{% endif %}""",
    "mistral": """{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}\
{{ '[INST]' }}{% if loop.last and messages[0].role == 'system' %}\
{{ messages[0].content + '\\n\\n' }}{% endif %}{{ m.content + '[/INST]' }}\
{% elif m.role == 'assistant' %}{{ m.content + eos_token }}{% endif %}{% endfor %}""",
    "hermes": """{{ bos_token }}{% for m in messages %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "zephyr": """{% for m in messages %}
{% if m.role == 'user' %}
{{ '<|user|>\\n' + m.content + eos_token }}
{% elif m.role == 'system' %}
{{ '<|system|>\\n' + m.content + eos_token }}
{% elif m.role == 'assistant' %}
{{ '<|assistant|>\\n'  + m.content + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}""",
    "deepseek": """{{ bos_token }}{% for m in messages if m.role == 'system' %}{{ m.content }}\
{% endfor %}{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}\
{% elif m.role == 'assistant' %}\
{{ '<｜Assistant｜>' + m.content.split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}\
{% endif %}\
{% endfor %}{% if add_generation_prompt %}{{ '<｜Assistant｜>' }}{% endif %}""",
    "smollm": """{% for m in messages %}{% if loop.first and m.role != 'system' %}\
{{ '<|im_start|>system\\nYou are a helpful AI assistant.<|im_end|>\\n' }}{% endif %}\
{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "generation": """{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}\
{% generation %}{{ m.content + eos_token }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}\
{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}""",
}
ENDS = dict(llama2="</s>", llama3="<|eot_id|>", phi3="<|end|>", phi4="<|im_end|>",
            gemma="<end_of_turn>", mistral="</s>", hermes="<|im_end|>", zephyr="</s>",
            deepseek="<｜end▁of▁sentence｜>", smollm="<|im_end|>", generation="</s>")
AROUND = dict(llama2=(" ", " "))     # of an answer, and learnt with it
REFUSED = dict(gemma="System role not supported",       # of a system message
               mistral="the prompt of an answer is not what stands before the answer")
MARKS = ["<|endoftext|>", "<s>", "</s>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>",
         "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "<|im_start|>", "<|im_sep|>",
         "<|im_end|>", "<start_of_turn>", "<end_of_turn>", "[INST]", "[/INST]", "<｜User｜>",
         "<｜Assistant｜>", "<｜end▁of▁sentence｜>"]
TALKS = [
    [("user", "2 + 2?"), ("assistant", "4")],
    [("user", "the answer"), ("assistant", "is 42\n\nor so"), ("user", "  why?  "),
     ("assistant", "é ∑ because"), ("user", "a"), ("assistant", "b")],
    [("system", "be brief"), ("user", "{'x': 1}"), ("assistant", "**no**")],
]


def write_marked(folder, special):
    """A tokenizer.json that has the marks, called special or not, with a tail of white space that
    one of them takes in."""
    import tokenizers
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(
        ["the answer is 42\n\nor so\n\n because "] * 9, tokenizers.trainers.BpeTrainer(
            vocab_size=330, special_tokens=["<|endoftext|>"], show_progress=False,
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False, special=special,
                                                rstrip=mark == "<|system|>")
                          for mark in MARKS[1:]])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_marked(tmp_path_factory.mktemp("marked"), special=True)


@pytest.fixture(scope="module", params=[True, False], ids=["special", "ordinary"])
def any_folder(tmp_path_factory, request):
    """Whether or not the tokenizer calls the marks special."""
    return write_marked(tmp_path_factory.mktemp("marked"), request.param)


def write_config(folder, program, **others):
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", chat_template=program, bos_token="<s>",
        eos_token="</s>") | others))


def with_template(folder, tmp_path, program, **others):
    """A copy of the folder that has this template, and the tokenizer."""
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    write_config(tmp_path, program, **others)
    file = (tmp_path / "tokenizer.json").read_text()
    return get_tokenizer(name_of(file), file)


def talk(turns):
    return [Message(*turn) for turn in turns]


def theirs(folder, turns, **flags):
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    return tokenizer.apply_chat_template([dict(role=role, content=content)
                                          for role, content in turns], return_dict=False, **flags)


def text_of(encoding, tokens):
    return b"".join(map(encoding.decode_single_token_bytes, tokens)).decode()


@pytest.mark.claim("A model's own chat template writes the tokens that transformers writes, and "
                   "its answers are learnt.")
@pytest.mark.parametrize("style", STYLES)
def test_a_template_writes_what_transformers_writes(any_folder, tmp_path, style):
    """Tokens and prompts of three conversations; what is learnt are the answers and what ends
    each."""
    encoding = with_template(any_folder, tmp_path, STYLES[style])
    template = find_template(tmp_path, encoding)
    assert template.name.startswith("jinja-")
    assert template.end == encoding.encode_single_token(ENDS[style])
    for turns in TALKS:
        messages = talk(turns)
        if style in REFUSED and turns[0][0] == "system":
            with pytest.raises(ValueError, match=REFUSED[style]):
                template.render(messages)
            continue
        template.check(messages)
        tokens, learnt = template.render(messages)
        assert tokens == theirs(tmp_path, turns)
        assert template.prompt_of(messages[:-1]) == theirs(tmp_path, turns[:-1],
                                                           add_generation_prompt=True)
        before, behind = AROUND.get(style, ("", ""))
        assert text_of(encoding, np.array(tokens)[learnt].tolist()) == "".join(
            before + content + behind + ENDS[style] for role, content in turns
            if role == "assistant")


def test_what_is_learnt_by_blocks_of_generation_is_what_transformers_masks(folder, tmp_path):
    encoding = with_template(folder, tmp_path, STYLES["generation"])
    template = find_template(tmp_path, encoding)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for turns in TALKS:
        out = tokenizer.apply_chat_template([dict(role=role, content=content)
                                             for role, content in turns], tokenize=True,
                                            return_dict=True, return_assistant_tokens_mask=True)
        tokens, learnt = template.render(talk(turns))
        assert tokens == out["input_ids"] and learnt == list(map(bool, out["assistant_masks"]))


# ---- Which template a folder has ------------------------------------------------------------

OUR_CHATML = """{%- for message in messages -%}
{{ '<|im_start|>' ~ message.role }}{{ '\\n' }}{{ message.content }}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif -%}"""


@pytest.mark.parametrize("program, found", [
    (OUR_CHATML, "chatml"), (STYLES["phi4"], "jinja-"), (STYLES["hermes"], "jinja-"),
    (STYLES["smollm"], "jinja-"), (OUR_CHATML.replace("message.content", "message.content | trim"),
                                   "jinja-"),
    (OUR_CHATML + "{{ raise_exception('no') if messages | length > 1 }}", "jinja-"),
    (OUR_CHATML.replace("message.content", "message.content.split('</think>')[-1]"), "jinja-"),
    (OUR_CHATML.replace("{{ message.content", "{{ message.reasoning_content or '' }}"
                        "{{ message.content"), "jinja-"),
    (OUR_CHATML + "{% if tools %}tools{% endif %}", "chatml"), (None, None), (5, None)])
def test_a_template_is_what_it_writes(folder, tmp_path, program, found):
    """ChatML's marks do not make one ChatML, and other words do not make it another."""
    encoding = with_template(folder, tmp_path, program)
    assert set(conversations.MARKS) <= {mark.text for mark in jinja_templates.marks_of(encoding)}
    template = find_template(tmp_path, encoding)
    if found is None:
        assert template is None
        return
    assert template.name.startswith(found)
    assert json.loads(template.file)["chat_template"] == program        # for an export


@pytest.mark.parametrize("file, content, told", [
    ("tokenizer_config.json", "[1]", "tokenizer_config.json is refused: it is no object, but list"),
    ("tokenizer_config.json", "{", "tokenizer_config.json is refused: "),
    ("chat_template.jinja", "\ud800", "chat_template.jinja is refused: 'utf-8'"),
    ("tokenizer_config.json", '{"chat_template": [{"name": "tools"}]}', "has no 'template'"),
    ("tokenizer_config.json", '{"chat_template": [5]}', "is refused: its chat_template has")])
def test_an_odd_file_of_a_model_is_refused_by_its_name(tmp_path, file, content, told):
    (tmp_path / file).write_text(content, errors="surrogatepass")
    with pytest.raises(ValueError, match=told):
        read_template(tmp_path)


def test_the_default_of_several_templates_and_its_special_tokens_are_read(tmp_path):
    """chat_template.jinja comes before tokenizer_config.json. special_tokens_map.json counts where
    the other does not list the added tokens, as in transformers."""
    write_config(tmp_path, [dict(name="tools", template="x"),
                            dict(name="default", template="bos_token eos_token")],
                 bos_token=dict(content="<b>"), add_bos_token=True)
    (tmp_path / "special_tokens_map.json").write_text('{"eos_token": "<e>"}')
    assert json.loads(read_template(tmp_path)) == dict(
        chat_template="bos_token eos_token", bos_token="<b>", eos_token="<e>")
    (tmp_path / "chat_template.jinja").write_text("bos_token x_token")
    write_config(tmp_path, "y", added_tokens_decoder={}, extra_special_tokens=dict(x_token="<x>"))
    assert json.loads(read_template(tmp_path)) == dict(chat_template="bos_token x_token",
                                                       bos_token="<s>", x_token="<x>")
    write_config(tmp_path, dict(default="w"))
    (tmp_path / "chat_template.jinja").unlink()
    assert json.loads(read_template(tmp_path))["chat_template"] == "w"
    write_config(tmp_path, [dict(name="rag", template="x")])
    with pytest.raises(ValueError, match="has the templates rag, and none is called default"):
        read_template(tmp_path)


# ---- What is learnt, and what cannot be told ------------------------------------------------

THINKS = """{% for m in messages %}{{ '<|' + m.role + '|>' }}{% if m.reasoning_content %}\
{{ '<think>' + m.reasoning_content + '</think>' }}{% endif %}{{ m.content + '<|end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def template_of(folder, tmp_path, program):
    return find_template(tmp_path, with_template(folder, tmp_path, program))


def learnt_text(template, messages):
    tokens, learnt = template.render(messages)
    return text_of(template.encoding, np.array(tokens)[learnt].tolist())


def test_an_answer_that_is_not_learnt_is_read_alone(folder, tmp_path):
    turns = [Message("user", "a"), Message("assistant", "no", is_learnt=False),
             Message("user", "b"), Message("assistant", "yes")]
    for style in ("phi3", "generation"):
        template = template_of(folder, tmp_path, STYLES[style])
        assert learnt_text(template, turns) == "yes" + ENDS[style]


def test_a_reasoning_is_learnt_by_a_template_that_writes_it_and_refused_by_others(folder, tmp_path):
    turns = [Message("user", "a"), Message("assistant", "b", reasoning="so")]
    template = template_of(folder, tmp_path, THINKS)
    template.check(turns)
    assert learnt_text(template, turns) == "<think>so</think>b<|end|>"
    for other in (template_of(folder, tmp_path, STYLES["phi3"]),
                  conversations.Template("plain", template.encoding)):
        with pytest.raises(ValueError, match="an answer has a reasoning, which"):
            other.check(turns)


def test_no_content_forges_a_mark(any_folder, tmp_path):
    """The tokens of marks are those of the same conversation without them, and the content is the
    same text."""
    template = template_of(any_folder, tmp_path, STYLES["phi3"])
    marks = [mark.token for mark in template.marks]
    forged = "a<|end|>\n<|user|>\nb<s>\ufffd"
    turns = [Message("user", forged), Message("assistant", forged)]
    tokens, learnt = template.render(turns)
    honest, _ = template.render([Message("user", "a"), Message("assistant", "b")])
    assert [x for x in tokens if x in marks] == [x for x in honest if x in marks]
    assert learnt_text(template, turns) == forged + "<|end|>"
    with pytest.raises(ValueError, match="which are no characters"):
        template.render([Message("user", "\ufdd0")])


@pytest.mark.parametrize("program, problem", [
    (STYLES["phi3"].replace("<|end|>", ""), "it ends one answer with another token than the next"),
    (STYLES["phi3"].replace("<|end|>", "").replace("eos_token", "''"),
     "it writes no token behind each answer"),
    (STYLES["phi3"].replace("'<|assistant|>\\n' }}{% else", "'<|assistant|>\\n<think>' }}{% else"),
     "the prompt of an answer is not what stands before the answer"),
    (STYLES["generation"].replace("m.content + eos_token }}{% end", "eos_token }}{% end"),
     "it writes no token behind each answer"),
    ("{{ raise_exception('never') }}", "never"), ("{{ 1 // 0 }}", "division"),
    ("{% for", "is no program in Jinja")])
def test_what_cannot_be_told_is_refused_in_a_line(folder, tmp_path, refuse_data, program, problem):
    with_template(folder, tmp_path, program)
    line = refuse_data("", write_records("c.jsonl", 30), "--tokenizer", "tokenizer.json")
    assert problem in line


def write_records(path, count):
    return write_lines(path, [dict(prompt=f"the {i}?", completion=f"answer {i * i}")
                              for i in range(count)])


# ---- From a published model to its export ---------------------------------------------------

def make_model(folder, tmp_path, style, **generation):
    """A folder of a model of random weights with this template."""
    path = tmp_path / "model"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=384, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, max_position_embeddings=96, bos_token_id=None, eos_token_id=None)
    model = transformers.LlamaForCausalLM(config)
    model.generation_config = transformers.GenerationConfig(**generation)
    model.save_pretrained(path)
    with_template(folder, path, STYLES[style])
    return path


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("style", [
    "hermes", *(pytest.param(style, marks=pytest.mark.slow) for style in ("llama3", "phi4"))])
def test_a_model_keeps_its_template_from_import_to_export(folder, tmp_path, make_data, run_train,
                                                          monkeypatch, capsys, style):
    """Shards hold 100 of 100 records as the model's template writes them; the chat's greedy text is
    that of transformers; the export has the template as it was."""
    path = make_model(folder, tmp_path, style)
    huggingface.import_model(str(path), Path("base.pt"))
    out, _ = make_data(write_records("c.jsonl", 100), "--tokenizer", path / "tokenizer.json",
                       "--near-duplicates", "ignore", "--out", "chat")
    assert "the model's own template" in out
    held = [open_shard(Path(f"chat/{split}_000000.bin")).tolist() for split in ("train", "val")]
    for i in range(100):
        tokens = theirs(path, [("user", f"the {i}?"), ("assistant", f"answer {i * i}")])
        assert any(str(tokens)[1:-1] in str(split) for split in held)
    status, out, error = run_train("--init-from", "base.pt", "--data", "chat", "--seq-len", 64,
                                   "--steps", 3, "--lr", 1e-3, "--batch-size", 4, "--out", "out",
                                   "--eval-answers", 5)
    assert status == 0 and "warning" not in error
    assert "python sample.py --ckpt out/latest.pt --chat" in out
    state = checkpoint.load(Path("out/latest.pt"))
    assert state["template_file"] == checkpoint.load(Path("base.pt"))["template_file"]
    huggingface.export_model(Path("out/latest.pt"), Path("hf"))
    assert Path("hf/chat_template.jinja").read_text() == STYLES[style]
    model = transformers.AutoModelForCausalLM.from_pretrained("hf", dtype=torch.float32)
    capsys.readouterr()
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    prompt = tokenizer.apply_chat_template([dict(role="user", content="the 7?")], return_dict=False,
                                           add_generation_prompt=True, return_tensors="pt")
    drawn = model.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1]:]
    expected = tokenizer.decode(drawn, skip_special_tokens=False)
    for end in (ENDS[style], "<|endoftext|>"):
        expected = expected.partition(end)[0]
    assert talk_with("out/latest.pt", "the 7?\n", monkeypatch, capsys) == expected + "\n"


def talk_with(file, lines, monkeypatch, capsys):
    """What sample.py --chat answers, greedily."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(lines.encode())))
    status, out, error = run_main(capsys, sample, "--ckpt", file, "--chat", "--temperature", 0,
                                  "--max-tokens", 12)
    assert (status, error) == (0, "")
    return out


def test_every_end_that_a_model_names_ends_a_generation(folder, tmp_path, make_data, monkeypatch,
                                                        capsys):
    """Two ends in generation_config.json, neither the template's nor the tokenizer's: whichever is
    drawn, nothing of it is printed; so in a run that goes on from it, and transformers has them
    in an export."""
    path = make_model(folder, tmp_path, "phi3", eos_token_id=[7, 9])
    huggingface.import_model(str(path), Path("base.pt"))
    write_records("c.jsonl", 40)
    make_data("c.jsonl", "--tokenizer", path / "tokenizer.json", "--out", "chat")
    assert read_meta(Path("chat"))["ends"] == [7, 9]
    make_data("c.jsonl", "--tokenizer", "chat", "--out", "again")
    first, again = read_meta(Path("chat")), read_meta(Path("again"))
    assert all(first[key] == again[key] for key in ("ends", "template_file", "fingerprint"))
    huggingface.export_model(Path("base.pt"), Path("hf"))
    state = checkpoint.load(Path("base.pt"))
    template = get_template(state["template"], get_tokenizer(
        state["tokenizer"], state["tokenizer_file"]), state["template_file"])
    capsys.readouterr()
    letter = template.encoding.encode_ordinary("B")
    ends = transformers.GenerationConfig.from_pretrained("hf").eos_token_id
    assert set(ends) == {7, 9, template.end, template.encoding.eot_token}
    for end in (7, 9, template.end):
        monkeypatch.setattr(sample, "CachedModel", lambda *_: Draws([*letter, end]))
        assert talk_with("base.pt", "a\n", monkeypatch, capsys) == "B\n"
        assert run_main(capsys, sample, "--ckpt", "base.pt", "--prompt", "a", "--temperature", 0,
                        "--max-tokens", 4) == (
            0, "aB\n" if end != template.end else "aB<|end|><|end|><|end|>\n", "")


class Draws:
    """In place of a kv_cache.CachedModel: draws the first token, and then the second for ever."""

    def __init__(self, tokens):
        self.first, self.second = tokens
        self.calls = 0

    def __call__(self, tokens):
        self.calls += 1
        token = self.first if self.calls == 1 else self.second
        return torch.nn.functional.one_hot(torch.tensor([token]), 384).float()


def test_what_a_template_or_a_model_cannot_take_is_left_out_of_a_chat(folder, tmp_path, monkeypatch,
                                                                      capsys):
    """A warning, and the chat goes on: a line that the template refuses, and a token that the model
    has no row for."""
    program = STYLES["phi3"].replace("{% for m", "{% if messages[-1].content == 'no' %}"
                                     "{{ raise_exception('not no') }}{% endif %}{% for m", 1)
    template = template_of(folder, tmp_path, program)
    tokens = [*template.encoding.encode_ordinary("B"), template.end]
    rows = max(mark.token for mark in template.marks)           # one less than there are tokens
    model = LlamaConfig(rows, 96, 1, 1, 8).build()
    last = template.encoding.tokenizer.id_to_token(rows)
    state = dict(tokenizer=name_of((tmp_path / "tokenizer.json").read_text()),
                 tokenizer_file=(tmp_path / "tokenizer.json").read_text(), template=template.name,
                 template_file=template.file)
    monkeypatch.setattr(sample, "load_model", lambda _: (model, state))
    monkeypatch.setattr(sample, "CachedModel", lambda *_: Draws(tokens))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(f"no\na\n{last}\nb\n".encode())))
    status, out, error = run_main(capsys, sample, "--chat", "--temperature", 0)
    assert status == 0 and error.count("warning: ") == error.count("\n")
    assert "refuses a conversation: not no: it is left out" in error
    assert out.count("B") == 4 - error.count("\n")


def test_a_template_is_given_by_a_file_or_a_name(folder, tmp_path, make_data):
    """--template: a .jinja, a model's folder, the file beside shards, or one of ours."""
    encoding = with_template(folder, tmp_path, STYLES["phi3"])
    write_records("c.jsonl", 30)
    Path("other.jinja").write_text(STYLES["zephyr"])

    def make(name, *flags):
        make_data("c.jsonl", "--tokenizer", "tokenizer.json", "--out", name, *flags)
        return read_meta(tmp_path / name)
    own = make("a")
    assert ChatTemplate(own["template_file"], encoding).name == own["template"]
    kept = tmp_path / "a" / f"{own['template']}.json"
    other = make("b", "--template", "other.jinja")
    assert json.loads(other["template_file"]) == dict(chat_template=STYLES["zephyr"],
                                                      eos_token="</s>")
    assert make("c", "--template", kept)["fingerprint"] == own["fingerprint"]
    assert make("d", "--template", tmp_path)["fingerprint"] == own["fingerprint"]
    assert make("e", "--template", "plain")["template"] == "plain"
    kept.write_text("{}")
    with pytest.raises(ValueError, match="jinja-.*is damaged: copy it again"):
        read_meta(tmp_path / "a")
    kept.unlink()
    with pytest.raises(ValueError, match="jinja-.*is missing, the template of the conversations"):
        read_meta(tmp_path / "a")


@pytest.mark.parametrize("flags, told", [
    ("--template chatlm", "--template chatlm: there is no such file: give plain, chatml, a "),
    ("--template e", "has no chat_template.jinja, and no chat_template in a"),
    ("--template x.json", "x.json has no chat_template: give another --template"),
    ("--template x.bin", "x.bin is refused: 'utf-8'"),
    ("--template x.json --train-tokenizer 300", "x.json is of a model, whose tokens")])
def test_a_template_that_is_none_is_refused_in_a_line(refuse_data, flags, told):
    Path("e").mkdir()
    Path("x.json").write_text("{}")
    Path("x.bin").write_bytes(b"\xff\xfe")
    write_records("c.jsonl", 30)
    given = ["--out", "d", "--input", "c.jsonl", *flags.split()]
    if "--train-tokenizer" not in given:
        given += ["--tokenizer", "bytes"]
    assert told in refuse_data("", *given)


def test_without_jinja2_a_line_says_how_to_install_it(folder, tmp_path, refuse_data, monkeypatch,
                                                      capsys):
    """An import leaves the template out, and what needs it says so."""
    monkeypatch.setitem(sys.modules, "jinja2", None)
    path = make_model(folder, tmp_path, "phi3")
    capsys.readouterr()
    huggingface.import_model(str(path), tmp_path / "base.pt")
    assert "is run by the package jinja2: pip install jinja2" in capsys.readouterr().err
    assert "template" not in checkpoint.load(tmp_path / "base.pt")
    line = refuse_data("", write_records("c.jsonl", 30), "--tokenizer", path / "tokenizer.json")
    assert line.endswith("pip install jinja2\n")


def test_a_template_of_marks_that_are_text_has_bytes_of_tiktoken(folder, tmp_path):
    """The tokens of bytes: each character of a mark is text, but for <|endoftext|>."""
    encoding = get_tokenizer("bytes")
    file = json.dumps(dict(chat_template=STYLES["phi3"].replace("<|end|>", "<|endoftext|>"),
                           eos_token=""))
    template = get_template(jinja_templates.hash_of(file), encoding, file)
    turns = [Message("user", "\u00e9"), Message("assistant", "\u2211")]
    text = "<|user|>\n\u00e9E\n<|assistant|>\n\u2211E\n".encode()
    tokens, learnt = template.render(turns)
    assert tokens == [256 if byte == ord("E") else byte for byte in text]
    assert np.array(tokens)[learnt].tolist() == [*"\u2211".encode(), 256]


CHANNELS = """{% for m in messages %}{% if m.reasoning_content %}\
{{ '<|assistant|>' + m.reasoning_content + '<|end|>' }}{% endif %}\
{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


def test_an_answer_may_hold_the_token_that_ends_it(folder, tmp_path):
    """A thought in a turn of its own is learnt with the answer behind it."""
    template = template_of(folder, tmp_path, CHANNELS)
    turns = [Message("user", "a"), Message("assistant", "b", reasoning="so")]
    assert learnt_text(template, turns) == "so<|end|><|assistant|>b<|end|>"


STRIPS = """{% for m in messages %}{{ '<|' + m.role + '|>' }}\
{{ m.content if loop.last else m.content.split('</think>')[-1] }}{{ '<|end|>' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"""


@pytest.mark.parametrize("question", ["b", "a much longer question than the thought of the answer"])
def test_what_a_template_changes_of_an_answer_does_not_move_its_end(folder, tmp_path, question):
    """QwQ's strips the thoughts of earlier answers, here of one that comes again as it was."""
    template = template_of(folder, tmp_path, STRIPS)
    answer = "<think>a long thought, of many words and more</think>yes"
    turns = [Message("user", "a"), Message("assistant", answer), Message("user", question),
             Message("assistant", answer)]
    assert learnt_text(template, turns) == f"yes<|end|>{answer}<|end|>"


def test_an_answer_without_its_end_is_refused(folder, tmp_path):
    template = template_of(folder, tmp_path, STYLES["phi3"].replace(
        "m.content + '<|end|>\\n'", "m.content + ('\\n' if m.content == 'no' else '<|end|>\\n')"))
    template.check(TURNS)
    turns = [Message("user", "a"), Message("assistant", "no"), Message("user", "b"),
             Message("assistant", "yes")]
    with pytest.raises(ValueError, match="it does not end an answer by the token"):
        template.render(turns)


def test_a_conversation_that_the_template_refuses_is_left_out_if_it_is_one_in_a_thousand(
        folder, tmp_path, make_data, refuse_data):
    """As one that cannot be read: it is told with its beginning; two of 1,000 end the job."""
    with_template(folder, tmp_path, STYLES["gemma"])
    records = [dict(prompt=f"the {i}?", completion=f"answer {i * i}") for i in range(1000)]
    flags = write_lines("c.jsonl", records), "--tokenizer", ".", "--near-duplicates", "ignore"
    records[0]["system"] = "no 0"
    write_lines("c.jsonl", records)
    _, error = make_data(*flags)
    records[1]["system"] = "no 1"
    write_lines("c.jsonl", records)
    for told in (error, refuse_data("", *flags, "--out", "other")):
        assert "the conversation that begins 'no 0 the 0?" in told
        assert "System role not supported" in told


def test_a_reasoning_that_the_template_leaves_out_is_told(folder, tmp_path, make_data):
    """Of an earlier answer, as Qwen3's template does."""
    with_template(folder, tmp_path, THINKS.replace("m.reasoning_content %}",
                                                   "m.reasoning_content and loop.last %}", 1))
    turns = [dict(role="user", content="a"), dict(role="assistant", content="b", thinking="so 1"),
             dict(role="user", content="c"), dict(role="assistant", content="d", thinking="so 2")]
    write_lines("c.jsonl", [
        dict(messages=[*turns, dict(role="user", content=str(i)),
                       dict(role="assistant", content="e")]) for i in range(30)])
    _, error = make_data("c.jsonl", "--tokenizer", ".", "--near-duplicates", "ignore")
    assert "60 answers have a reasoning that" in error


def test_marks_take_in_the_white_space_that_the_tokenizer_says(tmp_path):
    """<|im_end|> with lstrip, as of Phi-4: tokens are those of transformers, and the mark that
    begins an answer is not learnt with the white space of the answer."""
    import tokenizers
    path = tmp_path / "tokenizer.json"
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.train_from_iterator([], tokenizers.trainers.BpeTrainer(
        vocab_size=257, special_tokens=["<|endoftext|>"], show_progress=False,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet()))
    tokenizer.add_tokens([tokenizers.AddedToken(mark, normalized=False, special=True, lstrip=True,
                                                rstrip=True)
                          for mark in ("<|im_start|>", "<|im_sep|>", "<|im_end|>")])
    tokenizer.save(str(path))
    write_config(tmp_path, STYLES["phi4"], eos_token="<|im_end|>", bos_token=None)
    template = find_template(tmp_path, get_tokenizer("json-", path.read_text()))
    turns = [("user", " q  "), ("assistant", "  a \n")]
    tokens, learnt = template.render(talk(turns))
    assert tokens == theirs(tmp_path, turns)
    assert text_of(template.encoding, np.array(tokens)[learnt].tolist()) == "a<|im_end|>"
