"""Tokenizers of Hugging Face and their chat templates: tokens, what is learnt, and the way from a
folder to shards, checkpoints and samples. All is compared with the package transformers."""
import collections
import itertools
import json
import random
import shutil
from pathlib import Path
from unittest import mock

import pytest
import torch

import checkpoint
import sample
from corpus import EOT
from corpus import encode
from corpus.chat_records import Message
from corpus.huggingface_tokenizers import find_tokenizer, train_tokenizer
from corpus.mixtures import optional_entries
from corpus.templates import JinjaTemplate, choose_template
from corpus.tokenizers import decode, document_start, get_tokenizer
from data import open_shard
from tests.commands import NASTY, TINY, meta_of, write_lines, write_texts
from tests.harness import ROOT
from tests.test_conversations import chat_with
from tools import huggingface

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
pytestmark = pytest.mark.filterwarnings("ignore")           # what transformers warns of is not ours

TEXTS = [f"the answer {i} is the sum of {i} and 7, is it not? caf\u00e9 {i}\n" for i in range(60)]
MARKS = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin|>"]
CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
          "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")
LLAMA2 = ("{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ '[INST] ' + "
          "m['content'] + ' [/INST]' }}{% else %}{{ ' ' + m['content'] + ' ' + eos_token }}"
          "{% endif %}{% endfor %}")


def byte_level(prefix=None):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.train_from_iterator(TEXTS, tokenizers.trainers.BpeTrainer(
        vocab_size=320, initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.add_special_tokens(MARKS)
    tokenizer.add_tokens(["<think>", "</think>"])
    if prefix is not None:
        tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{prefix} $A", special_tokens=[(prefix, tokenizer.token_to_id(prefix))])
    return tokenizer


def llama2():
    """As SentencePiece's byte-pair encoding in Llama 2: a space before each text, bytes for what is
    rare."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.Prepend("\u2581"), tokenizers.normalizers.Replace(" ", "\u2581")])
    tokenizer.decoder = tokenizers.decoders.Sequence([
        tokenizers.decoders.Replace("\u2581", " "), tokenizers.decoders.ByteFallback(),
        tokenizers.decoders.Fuse(), tokenizers.decoders.Strip(" ", 1, 0)])
    tokenizer.train_from_iterator([w for text in TEXTS for w in text.split(" ")],
                                  tokenizers.trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=[
            "<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256))]))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)])
    content = json.loads(tokenizer.to_str())
    content["added_tokens"] = content["added_tokens"][:3]       # bytes are tokens of the model
    return tokenizers.Tokenizer.from_str(json.dumps(content))


def unigram():
    """As T5's: SentencePiece's Unigram, with the special tokens among its words."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, tokenizers.trainers.UnigramTrainer(
        vocab_size=200, show_progress=False, unk_token="<unk>",
        special_tokens=["<pad>", "</s>", "<unk>"]))
    return tokenizer


def write_folder(folder, tokenizer, **config):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(
        dict(tokenizer_class="PreTrainedTokenizerFast") | config))
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    top = tmp_path_factory.mktemp("models")
    return dict(
        chatml=write_folder(top / "chatml", byte_level(), eos_token="<|im_end|>",
                            chat_template=CHATML),
        begins=write_folder(top / "begins", byte_level("<|begin|>"), bos_token="<|begin|>",
                            eos_token="<|endoftext|>"),
        llama2=write_folder(top / "llama2", llama2(), bos_token="<s>", eos_token="</s>",
                            unk_token="<unk>", chat_template=LLAMA2),
        unigram=write_folder(top / "unigram", unigram(), eos_token="</s>", unk_token="<unk>"))


KINDS = ["chatml", "begins", "llama2", "unigram"]
CHARACTERS = [*"abcdefghijklm nopqrstuvwxyz .,!?'0\n\t", *NASTY, "\u6f22", "\u200d", "e\u0301",
              " the", " answer", "<0x41>"]
SPECIAL = ["<s>", "</s>", "<|im_end|>", "<|endoftext|>", "<think>"]


@pytest.mark.claim("A tokenizer of SentencePiece's kinds or bytes gives the tokens and the text "
                   "that transformers gives.")
@pytest.mark.parametrize("kind", KINDS)
def test_tokens_and_text_are_those_of_transformers(folders, kind):
    """Of 500 random strings, half of them with the characters of special tokens: these are text.
    (To transformers some are tokens of a Unigram model.) What begins a text is the prefix. The text
    comes token by token, and also behind a part of it nothing is raised or written twice; nor of
    tokens that are no text, or not in the vocabulary."""
    theirs = transformers.AutoTokenizer.from_pretrained(folders[kind])
    ours = find_tokenizer(folders[kind])
    rng = random.Random(0)
    for number in range(500):
        some = CHARACTERS + SPECIAL * (number % 2)
        text = "".join(rng.choices(some, k=rng.randrange(30)))
        tokens = ours.encode_ordinary(text)
        assert not ours.special & set(tokens)
        if kind != "unigram" or number % 2 == 0 and "</s>" not in text:
            assert tokens == theirs.encode(text, add_special_tokens=False,
                                           split_special_tokens=True), text
        whole = theirs.decode(tokens)
        assert decode(ours, tokens) == whole, text
        head = theirs.decode(tokens[:9])
        if whole.startswith(head):          # no character has tokens on both sides
            stream = ours.stream(tokens[:9])
            assert head + "".join(map(stream.add, tokens[9:])) + stream.end() == whole, text
        drawn = [rng.randrange(ours.n_vocab + 9) for _ in range(30)]
        stream = ours.stream(drawn[:number % 5])
        parts = [*map(stream.add, drawn), stream.end()]
        whole = ours.backend.decode(drawn, skip_special_tokens=False)
        assert sum(map(len, parts)) <= len(whole) + 60
    assert ours.prefix + ours.encode_ordinary("a b") == theirs.encode("a b")
    assert (ours.end_of_text, ours.n_vocab) == (theirs.eos_token, len(theirs))


@pytest.mark.parametrize("kind", KINDS)
def test_a_long_text_is_cut_where_its_parts_give_the_tokens_of_the_whole(folders, kind):
    """All but Llama 2's, which writes a space before each text, have such places."""
    ours = find_tokenizer(folders[kind])
    text = "".join(random.Random(0).choices([*CHARACTERS, *SPECIAL, " word"], k=40_000))
    with mock.patch.object(encode, "BLOCK", 4000):
        _, (_, *pieces) = zip(*encode.split_document([text], 10 ** 9, ours.find_cut))
    assert "".join(pieces) == text
    assert sum(map(ours.encode_ordinary, pieces), []) == ours.encode_ordinary(text)
    assert (len(pieces) == 1) == (kind == "llama2")


def test_the_ends_of_generation_config_stay_with_the_shards(folders, tmp_path, run_data, run_train,
                                                            run_sample, monkeypatch):
    """Also where other data is made with the tokenizer of these; a sample ends at each of them."""
    shutil.copytree(folders["begins"], tmp_path / "m")
    tokenizer = find_tokenizer(tmp_path / "m")
    ends = [5, *tokenizer.encode_ordinary("e")]
    (tmp_path / "m/generation_config.json").write_text(json.dumps(dict(eos_token_id=ends)))
    text = write_texts(tmp_path / "t.jsonl", TEXTS)
    for source, out in (("m", "d"), ("d", "more")):
        assert run_data("--input", text, "--tokenizer", tmp_path / source, "--out",
                        tmp_path / out)[0] == 0
        assert meta_of(tmp_path / out)["ends"] == ends
    assert run_train("--data", tmp_path / "more", "--out", tmp_path / "o", *TINY)[0] == 0
    file = tmp_path / "o/latest.pt"
    assert checkpoint.load(file)["ends"] == ends
    monkeypatch.setattr(sample, "generate", lambda model, tokens, most, found, *_: [
        pytest.fail("ends") if found != {*ends, tokenizer.eot_token} else [7]])
    assert run_sample("--ckpt", file, "--prompt", "a")[0] == 0


@pytest.mark.parametrize("kind", KINDS)
def test_shards_have_the_tokens_of_whole_documents(folders, make_data, kind):
    """Of a tokenizer that is the same from the file beside them, and saved again."""
    _, error = make_data(write_texts("t.jsonl", TEXTS), "--tokenizer", folders[kind],
                         "--near-duplicates", "ignore")
    ours = find_tokenizer(folders[kind])
    tokens = [token for split in ("train", "val")
              for token in open_shard(Path(f"out/{split}_000000.bin")).tolist()]
    starts = [i for i, token in enumerate(tokens) if token == ours.eot_token]
    assert sorted(tokens[a:b] for a, b in zip(starts, [*starts[1:], len(tokens)])) == sorted(
        [*document_start(ours), *ours.encode_ordinary(text)] for text in TEXTS)
    assert (f"{ours.end_of_text}, the eos_token" in error) == (ours.end_of_text != "<|endoftext|>")
    transformers.AutoTokenizer.from_pretrained(folders[kind]).save_pretrained("again")
    meta = meta_of("out")
    for other in (get_tokenizer(meta["tokenizer"], Path("out", meta["tokenizer_file"]).read_text()),
                  find_tokenizer("again")):
        assert (other.name, other.prefix) == (ours.name, ours.prefix)
        assert other.encode_ordinary(TEXTS[0]) == ours.encode_ordinary(TEXTS[0])


@pytest.mark.parametrize("change, words", [
    (lambda folder: (folder / "tokenizer_config.json").write_text(json.dumps(
        dict(tokenizer_class="PreTrainedTokenizerFast"))), "no eos_token"),
    (lambda folder: (folder / "tokenizer.json").write_text("{}"), "opens no tokenizer"),
    (lambda folder: (folder / "tokenizer.json").rename(folder / "tokenizer.model"),
     "sentencepiece AutoTokenizer.from_pretrained('m').save_pretrained('m')")])
def test_what_is_no_tokenizer_is_refused_in_a_line(tmp_path, refuse_data, change, words):
    folder = write_folder(Path("m"), llama2(), eos_token="</s>")
    change(folder)
    Path("a.txt").write_text("text " * 99)
    refuse_data(words, "a.txt", "--tokenizer", folder)


def test_a_tokenizer_of_ones_own_is_byte_pair_encoding(run_data, tmp_path):
    """Of conversations, too: it has so many tokens, gives each text back, and makes other data."""
    chat = write_lines(tmp_path / "c.jsonl", [dict(prompt=text, completion="a") for text in TEXTS])
    assert run_data("--input", chat, "--train-tokenizer", 300, "--out", tmp_path / "own")[0] == 0
    own, meta = find_tokenizer(tmp_path / "own"), meta_of(tmp_path / "own")
    assert meta["vocab_size"] == own.n_vocab == 300 and len(own.encode_ordinary(" the")) == 1
    for text in NASTY:
        assert decode(own, own.encode_ordinary(text)) == text
    again = run_data("--input", chat, "--tokenizer", tmp_path / "own", "--out", tmp_path / "d")
    assert again[0] == 0
    assert meta_of(tmp_path / "d")["fingerprint"] == meta["fingerprint"]


def plain_bpe(words, alphabet, n_tokens):
    """Byte-pair encoding of {word: how often}, as in Sennrich et al.: the tokens in their order."""
    words = [(list(word), count) for word, count in words.items()]
    number = {character: i for i, character in enumerate(alphabet)}
    while len(number) < n_tokens:
        pairs = collections.Counter()
        for word, count in words:
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], -number[pair[0]], -number[pair[1]]))
        number.setdefault("".join(best), len(number))
        for word, _ in words:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == best:
                    word[at:at + 2] = ["".join(best)]
                at += 1
    return list(number)


@pytest.mark.claim("`--train-tokenizer` makes the tokens of plain byte-pair encoding.")
def test_trained_tokens_are_those_of_plain_byte_pair_encoding():
    """Of a program and of random texts of three letters, also where a text has fewer."""
    split = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False).pre_tokenize_str
    rng = random.Random(0)
    texts = [((ROOT / "train.py").read_text(), 400), ("".join(NASTY) * 3, 330)]
    texts += [("".join(rng.choices("ab c", k=rng.randrange(1, 200))), 257 + rng.randrange(60))
              for _ in range(30)]
    for text, n_tokens in texts:
        vocabulary = train_tokenizer([text], n_tokens).tokenizer.get_vocab()
        words = collections.Counter(word for word, _ in split(text))
        alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
        assert sorted(vocabulary, key=vocabulary.get) == [
            *plain_bpe(words, alphabet, n_tokens - 1), EOT]


# ---- Templates

TALK = [Message("user", "2 + 2?"), Message("assistant", "4"), Message("user", "more\n"),
        Message("assistant", "5, caf\u00e9")]


def learnt_text(template, messages):
    tokens, learnt = template.render(messages)
    return decode(template.encoding, [token for token, is_in in zip(tokens, learnt) if is_in])


@pytest.mark.claim("A model's own chat template writes the tokens that transformers writes, and "
                   "its answers are learnt.")
@pytest.mark.parametrize("kind, learnt", [
    ("chatml", "4<|im_end|>5, caf\u00e9<|im_end|>"), ("llama2", "4 </s> 5, caf\u00e9 </s>"),
    ("begins", "4<|endoftext|>5, caf\u00e9<|endoftext|>")])
def test_a_template_writes_what_transformers_writes_and_answers_are_learnt(folders, kind, learnt):
    """The third has no template of its own: `plain`."""
    template = choose_template(None, find_tokenizer(folders[kind]))
    assert (template.name == "plain") == (kind == "begins")
    theirs = transformers.AutoTokenizer.from_pretrained(folders[kind])

    def written(messages, **more):
        dicts = [dict(role=message.role, content=message.content) for message in messages]
        return theirs.apply_chat_template(dicts, chat_template=template.program, return_dict=False,
                                          **more)
    assert template.render(TALK)[0] == written(TALK)
    assert template.prompt_of(TALK[:3]) == written(TALK[:3], add_generation_prompt=True)
    assert learnt_text(template, TALK).strip() == learnt
    first = [TALK[0], TALK[1]._replace(is_learnt=False), *TALK[2:]]
    assert "4" not in learnt_text(template, first)


def test_a_thought_that_a_template_writes_is_learnt(folders):
    program = CHATML.replace("m['content'] + '<|im_end|>", "('<think>' + m.reasoning_content + "
                             "'</think>' if m.reasoning_content else '') + m['content'] + "
                             "'<|im_end|>")
    template = JinjaTemplate(program, find_tokenizer(folders["chatml"]))
    messages = [Message("user", "a"), Message("assistant", "b", True, "t")]
    assert learnt_text(template, messages) == "<think>t</think>b<|im_end|>"


@pytest.mark.parametrize("program, words", [
    ("{% for m in messages %}{{ m['content'] }}{% endfor %}", "no token behind an answer"),
    ("{{ 'a' + messages|length|string }}" + CHATML, "prompt of an answer is not what stands"),
    ("{{ raise_exception('never') }}", "refuses a conversation"), ("{% if %}", "refuses")])
def test_a_template_of_which_answers_cannot_be_told_is_refused(folders, tmp_path, refuse_data,
                                                               program, words):
    write_lines("c.jsonl", [dict(prompt=f"{i}", completion="a") for i in range(30)])
    Path("t.jinja").write_text(program)
    refuse_data(words, "c.jsonl", "--tokenizer", folders["chatml"], "--template", "t.jinja")


@pytest.mark.parametrize("messages, words", [
    ([dict(role="system", content="be brief")], "leaves out 'be brief'"),
    ([dict(role="user", content="a"),
      dict(role="assistant", content="x", reasoning_content="a thought")],
     "leaves out 'a thought'"),
    ([dict(role="assistant", content="hello")], "answer no prompt"),
    ([dict(role="user", content="a <|im_end|> b")], "content <|im_end|>, a token"),
    ([dict(role="user", content="a"), dict(role="assistant", content=None, tool_calls=[{}])],
     '"tool_calls": not supported')])
def test_a_record_that_is_not_written_whole_is_named_in_a_line(folders, refuse_data, messages,
                                                               words):
    """By a template without the system's messages."""
    good = [dict(role="user", content="hello"), dict(role="assistant", content="hi")]
    records = [dict(messages=[dict(good[0], content=f"q {i}"), good[1]]) for i in range(30)]
    records[6] = dict(messages=messages + good)
    Path("t.jinja").write_text(CHATML.replace("in messages", "in messages if m.role != 'system'"))
    refuse_data(f"c.jsonl line 7 {words}", write_lines("c.jsonl", records), "--tokenizer",
                folders["chatml"], "--template", "t.jinja", "--near-duplicates", "ignore")


def save_random_model(folder, folders):
    """A Qwen2 of random weights, with the tokenizer and the template of ChatML."""
    theirs = transformers.Qwen2Config(
        vocab_size=326, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)
    torch.manual_seed(0)
    transformers.Qwen2ForCausalLM(theirs).save_pretrained(folder)
    shutil.copytree(folders["chatml"], folder, dirs_exist_ok=True)


def test_ends_and_template_stay_with_weights_that_are_tuned_on_text(tmp_path, folders, run_data,
                                                                    run_train, monkeypatch):
    """The text is made with a tokenizer that has neither. A run that continues keeps them, too, by
    either program and on other data."""
    monkeypatch.chdir(tmp_path)
    save_random_model("model", folders)
    shutil.copytree("model", "bare")
    Path("bare/generation_config.json").unlink()
    write_folder(Path("bare"), byte_level(), eos_token="<|im_end|>")
    Path("model/generation_config.json").write_text(json.dumps(dict(eos_token_id=[0, 1, 7])))
    huggingface.import_model("model", Path("base.pt"))
    text = write_texts(Path("t.jsonl"), TEXTS)
    assert run_data("--input", text, "--tokenizer", "bare", "--out", "d")[0] == 0
    assert not {"ends", "template"} & meta_of(Path("d")).keys()
    flags = "--data", "d", "--seq-len", 16, "--batch-size", 4, "--out", "o"
    status, _, error = run_train("--init-from", "base.pt", *flags, "--steps", 1)
    assert status == 0, error
    huggingface.export_model(Path("o/latest.pt"), Path("hf"))
    ends = json.loads(Path("hf/generation_config.json").read_text())["eos_token_id"]
    assert {0, 1, 7} < set(ends)
    tokenizer = transformers.AutoTokenizer.from_pretrained("hf")
    assert tokenizer.chat_template == CHATML
    for step, flags_of_program in ((2, ["--plain"]), (3, [])):
        assert run_train(*flags, *flags_of_program, "--steps", step)[0] == 0
        state = checkpoint.load(Path("o/latest.pt"))
        assert (state["step"], state["ends"]) == (step, [0, 1, 7])
        assert state["template_file"] == CHATML


def test_several_sources_have_the_ends_of_all_and_one_template_with_its_own_file():
    own, plain = dict(template="jinja-1", template_file="{{ 1 }}"), dict(template="plain")
    assert optional_entries([dict(ends=[7, 1]), dict(ends=None) | own, dict(ends=[0, 1])]) == dict(
        ends=[0, 1, 7]) | own
    assert optional_entries([plain, own]) == plain
    assert optional_entries([dict(template=None), {}]) == {}


def test_a_model_is_imported_tuned_talked_to_and_exported(tmp_path, folders, run_data,
                                                          run_train, monkeypatch, capsys):
    """The four commands of docs/conversations.md and the export, with a Qwen2 of random weights:
    transformers' greedy answer is that of sample.py."""
    monkeypatch.chdir(tmp_path)
    save_random_model("hub/model", folders)
    huggingface.import_model("hub/model", Path("base.pt"))
    chat = write_lines("chat.jsonl", [dict(prompt=f"the {i}?", completion=f"answer {i}")
                                      for i in range(100)])
    assert run_data("--input", chat, "--tokenizer", "hub/model/tokenizer.json", "--out",
                    "data/chat")[0] == 0
    status, out, _ = run_train(
        "--init-from", "base.pt", "--data", "data/chat", "--seq-len", 48, "--steps", 30, "--lr",
        1e-2, "--warmup-steps", 2, "--batch-size", 8, "--out", "out/chat")
    assert status == 0 and "python sample.py --ckpt out/chat/latest.pt --chat" in out
    _, answer, _ = chat_with(monkeypatch, capsys, "out/chat/latest.pt", "the 7?\n",
                             "--max-tokens", 12)
    assert answer.strip() != ""
    huggingface.export_model(Path("out/chat/latest.pt"), Path("out/chat/hf"))
    card = Path("out/chat/hf/README.md").read_text()
    assert "of the answers alone" in card and "--init-from base.pt" in card
    tokenizer = transformers.AutoTokenizer.from_pretrained("out/chat/hf")
    tuned = transformers.AutoModelForCausalLM.from_pretrained("out/chat/hf", dtype=torch.float32)
    prompt = tokenizer.apply_chat_template(
        [dict(role="user", content="the 7?")], add_generation_prompt=True, return_dict=False,
        return_tensors="pt")
    drawn = tuned.generate(prompt, max_new_tokens=12, do_sample=False)[0, prompt.shape[1]:]
    assert tokenizer.decode(drawn, skip_special_tokens=True) == answer.removesuffix("\n")
