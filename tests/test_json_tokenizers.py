"""A tokenizer.json of Hugging Face: its shards, its way through train.py, sample.py and back.

    python -m pytest tests/test_json_tokenizers.py

The package `tokenizers` encodes whole documents, and transformers opens what is exported.
"""
import itertools
import json
import re
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch

import checkpoint
from corpus import encode
from corpus.shards import SPLITS, open_shard, read_meta
from corpus.tiktoken_tokenizers import write_tokens
from corpus.tokenizers import get_tokenizer, name_of, read_file
from models import LlamaConfig
from tests.harness import NASTY, ROOT, TINY, write_texts
from tools import huggingface

tokenizers = pytest.importorskip("tokenizers")
LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+"
           r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")
TEXT = (ROOT / "train.py").read_text() + "".join(NASTY)
PRE_TOKENIZERS = {
    "GPT-NeoX": lambda pre: pre.ByteLevel(add_prefix_space=False),
    "with a space before": lambda pre: pre.ByteLevel(add_prefix_space=True),
    "Llama 3": lambda pre: pre.Sequence([
        pre.Split(tokenizers.Regex(LLAMA_3), "isolated"),
        pre.ByteLevel(add_prefix_space=False, use_regex=False)]),
    "SmolLM2": lambda pre: pre.Sequence([pre.Digits(individual_digits=True),
                                         pre.ByteLevel(add_prefix_space=False)])}


def made(path, kind, end="<|endoftext|>"):
    """A tokenizer.json of 400 tokens, trained here."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = PRE_TOKENIZERS[kind](tokenizers.pre_tokenizers)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=400, special_tokens=[end],
                                             initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator([TEXT], trainer)
    tokenizer.enable_truncation(8)          # as some files have it
    tokenizer.save(str(path))
    tokenizer.no_truncation()
    tokenizer.encode_special_tokens = True
    return tokenizer


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_shards_have_the_tokens_that_the_package_gives_whole_documents(monkeypatch, make_data,
                                                                       kind):
    """Though data.py encodes them in parts of 200 characters; a text's own <|endoftext|> is
    ordinary text."""
    theirs = made("tokenizer.json", kind)
    documents = ["a <|endoftext|> b", *(text for text in NASTY if text.strip())]
    documents += [TEXT[i:i + 600] for i in range(0, 18000, 600)]     # enough: none is cut in two
    monkeypatch.setattr(encode, "BLOCK", 200)
    make_data(*write_documents("a.jsonl", documents), "tokenizer.json")
    meta = read_meta(Path("out"))
    content = read_file(Path("tokenizer.json"))
    assert meta["tokenizer"] == name_of(content) and meta["vocab_size"] == 400
    assert meta["tokenizer_file"] == content
    ours = get_tokenizer(meta["tokenizer"], content)
    tokens = [*ours.encode_ordinary(" caf\u00e9"), 999, ours.eot_token]
    parts = [ours.decode_single_token_bytes(token) for token in tokens]
    assert b"".join(parts) == " caf\u00e9<|endoftext|>".encode()       # no token has the id 999
    assert open_shard(Path("out/train_000000.bin")).dtype == np.uint16
    whole = sorted({tuple(theirs.encode(text, add_special_tokens=False).ids)
                    for text in documents})
    assert documents_of(Path("out"), ours.eot_token) == whole


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_a_text_may_be_cut_before_a_space(tmp_path, kind):
    """2,000 random texts in two parts: the tokens of the whole."""
    theirs = made(tmp_path / "tokenizer.json", kind)
    cut = get_tokenizer("json-", read_file(tmp_path / "tokenizer.json")).cut
    rng, tried = np.random.default_rng(0), 0
    signs = [" ", " ", "\n", "\r", "a", "B", "'s", "7", "42", ".", "(", "\u00e9", "\t", "\u3000"]
    for _ in range(2000):
        text = "".join(rng.choice(signs, 12))
        match = cut.match(text)
        if match is None:
            continue
        tried += 1
        parts = text[:match.end()], text[match.end():]
        ids = [theirs.encode(part, add_special_tokens=False).ids for part in (*parts, text)]
        assert ids[0] + ids[1] == ids[2], repr(text)
    assert tried > 1000


def test_a_tokenizer_json_goes_with_the_run_and_back(tmp_path, run_data, run_train, run_sample):
    """Import brings it along; train.py keeps it; sample.py needs nothing else; transformers opens
    the export with the same ids."""
    transformers = pytest.importorskip("transformers")
    theirs = made(tmp_path / "tokenizer.json", "Llama 3", "<|end_of_text|>")
    cfg = transformers.LlamaConfig(
        vocab_size=512, hidden_size=16, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=16)
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(cfg).save_pretrained(tmp_path / "hf")
    (tmp_path / "tokenizer.json").rename(tmp_path / "hf/tokenizer.json")
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt")
    (tmp_path / "a.txt").write_text(TEXT)
    data_flags = ["--input", tmp_path / "a.txt", "--out", tmp_path / "d"]
    assert run_data(*data_flags, "--tokenizer", tmp_path / "hf/tokenizer.json")[0] == 0
    status, out, error = run_train("--init-from", tmp_path / "m.pt", "--data", tmp_path / "d",
                                   "--out", tmp_path / "o", *TINY)
    assert status == 0, error
    (tmp_path / "o/latest.pt").rename(tmp_path / "alone.pt")
    status, sampled, error = run_sample("--ckpt", tmp_path / "alone.pt", "--prompt",
                                        "def caf\u00e9", "--max-tokens", 5)
    assert status == 0 and sampled.startswith("def caf\u00e9"), error
    huggingface.export_model(tmp_path / "alone.pt", tmp_path / "again")
    opened = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    for text in [*NASTY, TEXT[:2000]]:
        ids = theirs.encode(text, add_special_tokens=False).ids
        assert opened(text, add_special_tokens=False)["input_ids"] == ids
    assert opened.eos_token == "<|end_of_text|>"
    huggingface.import_model(str(tmp_path / "again"), tmp_path / "back.pt")
    first, last = (checkpoint.load(tmp_path / name) for name in ("m.pt", "back.pt"))
    assert first["tokenizer"] == last["tokenizer"]
    assert first["tokenizer_file"] == last["tokenizer_file"]
    assert asdict(LlamaConfig(**last["model"]))["vocab_size"] == 512


def test_a_tokenizer_json_goes_with_the_import_of_what_has_no_other(tmp_path):
    """Of a GPT-2, also with as many tokens as the original, of an OPT, and of an export that names
    it; not of an export that names another."""
    path = tmp_path / "tokenizer.json"
    made(path, "GPT-NeoX")
    name = name_of(read_file(path))
    for config, expected in [
            (dict(model_type="gpt2", vocab_size=50257), (name, path)),
            (dict(model_type="opt", vocab_size=400, tokenizer=name), (name, path)),
            (dict(model_type="opt", vocab_size=400), (name, path)),
            (dict(model_type="gpt2", vocab_size=257, tokenizer="bytes"), ("bytes", None)),
            (dict(model_type="llama", vocab_size=400), (name, path))]:
        assert huggingface.find_tokenizer(tmp_path, config) == expected


def test_a_file_that_is_no_tokenizer_or_has_no_end_is_refused(refuse_data):
    """By its path."""
    Path("a.txt").write_text(TEXT)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    made("endless.json", "GPT-NeoX", "<end>")
    words.save("words.json")            # it has no pre_tokenizer: a text is one word
    Path("none.json").write_text('{"text": "a"}')
    Path("unknown.json").write_text('{"model": {"type": "Unigram", "vocab": [["a", 0.5]]}}')
    for name, message in [("words", "the characters of its special token </s> would have"),
                          ("none", "no tokenizer.json"),
                          ("unknown", "it does not encode every text: Encountered an unknown"),
                          ("endless", "it has no token <|endoftext|>, <|end_of_text|>, </s>")]:
        assert message in refuse_data(f"{name}.json", "a.txt", "--tokenizer", f"{name}.json")


@pytest.mark.parametrize("kind, end", [("words", "</s>"), ("words", "<|im_end|>"),
                                       ("characters", "</s>"), ("pieces", "</s>")])
def test_an_unknown_token_that_ends_a_text_is_refused(tmp_path, kind, end):
    """Each word or character that the vocabulary lacks would end the document."""
    vocab = {"</s>": 3} | {"a": 0, "b": 1, end: 2}
    model = dict(words=lambda: tokenizers.models.WordLevel(vocab, unk_token=end),
                 characters=lambda: tokenizers.models.BPE(vocab, [], unk_token=end),
                 pieces=lambda: tokenizers.models.Unigram([("a", -1), ("b", -1), (end, -2)], 2))
    tokenizer = tokenizers.Tokenizer(model[kind]())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.add_special_tokens([end])
    assert tokenizer.encode("a z b").ids == [0, 2, 1]
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ValueError, match=f"its unknown token {re.escape(end)}") as refusal:
        read_file(tmp_path / "tokenizer.json")
    assert "\n" not in str(refusal.value)


def test_an_unknown_token_that_no_text_gives_may_end_a_text(tmp_path):
    """Of bytes, in a file whose texts do not come back: spaces are left out."""
    path = tmp_path / "tokenizer.json"
    made(path, "Llama 3")
    content = json.loads(path.read_text())
    content["model"]["unk_token"] = "<|endoftext|>"
    words = dict(type="Sequence", pretokenizers=[dict(type="WhitespaceSplit"), dict(
        type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)])
    for pre_tokenizer in (content["pre_tokenizer"], words):
        ours = get_tokenizer("json-", json.dumps(content | dict(pre_tokenizer=pre_tokenizer)))
        assert ours.eot_token not in ours.encode_ordinary("\ue000 <|endoftext|>")


def rewritten(path, **changes):
    """The JSON of a tokenizer.json, changed."""
    content = json.loads(path.read_text()) | changes
    path.write_text(json.dumps(content))
    return content


def around(before, behind=()):
    """A post_processor that puts special tokens [(text, id)] around a text, in a Sequence."""
    def special(token):
        return dict(SpecialToken=dict(id=token[0], type_id=0))
    single = [*map(special, before), dict(Sequence=dict(id="A", type_id=0)), *map(special, behind)]
    pair = [*single, dict(Sequence=dict(id="B", type_id=1))]
    tokens = {text: dict(id=text, ids=[number], tokens=[text])
              for text, number in [*before, *behind]}
    template = dict(type="TemplateProcessing", single=single, pair=pair, special_tokens=tokens)
    offsets = dict(type="ByteLevel", add_prefix_space=True, trim_offsets=False, use_regex=True)
    return dict(type="Sequence", processors=[offsets, template])


def llama_folder(folder, rows):
    """A Llama of random weights."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=rows, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=1, max_position_embeddings=64,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None)).save_pretrained(folder)


def with_tokens(path, special=(), ordinary=(), end="<|endoftext|>"):
    """`made`, and these added tokens behind the vocabulary; the package's tokenizer."""
    tokenizer = made(path, "Llama 3", end)
    tokenizer.add_special_tokens(list(special))
    tokenizer.add_tokens(list(ordinary))
    tokenizer.save(str(path))
    return tokenizer


def documents_of(folder, end):
    """The tokens of each document in the shards, without `end`, sorted."""
    tokens = []
    for split in SPLITS:
        tokens += open_shard(folder / f"{split}_000000.bin").tolist()
    assert tokens[0] == end
    runs = itertools.groupby(tokens, lambda token: token == end)
    return sorted(tuple(run) for is_end, run in runs if not is_end)


TWENTY = ["document %d of a Stra\u00dfe, " % i * 3 for i in range(40)]


def write_documents(path, texts=TWENTY):
    return [write_texts(path, texts), "--near-duplicates", "ignore", "--tokenizer"]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("begins, ends", [(["<s>", "<t>"], []), (["<s>"], ["<|endoftext|>"]),
                                          ([], ["</end>"]), (["<|endoftext|>"], [])])
def test_what_the_post_processor_puts_around_a_text(tmp_path, capsys, make_data, run_sample,
                                                    begins, ends):
    """Before each document, behind the token that separates them, and before a prompt: greedy text
    is that of transformers' generate. A token behind a text is the separator."""
    transformers = pytest.importorskip("transformers")
    folder = tmp_path / "hf"
    llama_folder(folder, 410)
    path = folder / "tokenizer.json"
    theirs = with_tokens(path, [*begins, *ends])
    numbered = [[(text, theirs.token_to_id(text)) for text in texts] for texts in (begins, ends)]
    rewritten(path, post_processor=around(*numbered))
    make_data(*write_documents("a.jsonl"), folder)
    opened = transformers.AutoTokenizer.from_pretrained(folder)
    end = theirs.token_to_id(ends[0] if ends else "<|endoftext|>")
    encoded = sorted(tuple(i for i in opened(text)["input_ids"] if i != end) for text in TWENTY)
    assert documents_of(Path("out"), end) == encoded
    ours = get_tokenizer("json-", read_file(path))
    assert ours.prefix == [number for _, number in numbered[0]]
    huggingface.import_model(str(folder), tmp_path / "m.pt")
    capsys.readouterr()
    flags = ["--ckpt", tmp_path / "m.pt", "--temperature", 0, "--max-tokens", 20, "--prompt",
             "def "]
    status, sampled, error = run_sample(*flags)
    assert status == 0, error
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = opened("def ", return_tensors="pt")["input_ids"]
    if ends:
        prompt = prompt[:, :-1]         # a model writes it itself
    drawn = model.generate(prompt, max_new_tokens=20, do_sample=False, eos_token_id=end)[0]
    drawn = [i for i in drawn[prompt.shape[1]:].tolist() if i != end]
    expected = b"".join(ours.decode_single_token_bytes(token) for token in drawn)
    assert sampled == "def " + expected.decode(errors="replace") + "\n"


def test_two_tokens_behind_a_text_are_refused(refuse_data):
    path = Path("tokenizer.json")
    made(path, "Llama 3")
    two = [("<|endoftext|>", 0), ("<|endoftext|>", 0)]
    rewritten(path, post_processor=around([], two))
    refuse_data("behind a text", *write_documents("a.jsonl"), path)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [*PRE_TOKENIZERS, "with a beginning"])
def test_a_tokenizer_saved_again_by_transformers_has_its_name(tmp_path, kind):
    """And not one of other merges, another beginning or another number of a token."""
    transformers = pytest.importorskip("transformers")
    path = tmp_path / "one/tokenizer.json"
    path.parent.mkdir()
    made(path, kind if kind in PRE_TOKENIZERS else "Llama 3")
    if kind not in PRE_TOKENIZERS:
        with_tokens(path, ["<s>"])
        rewritten(path, post_processor=around([("<s>", 400)]))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "one")
    theirs.save_pretrained(tmp_path / "two")
    again = tmp_path / "two/tokenizer.json"
    assert again.read_text() != path.read_text()
    name = name_of(read_file(path))
    assert name_of(read_file(again)) == name
    content = json.loads(path.read_text())
    names = {name}
    model = content["model"]
    for changes in [dict(model=model | dict(merges=model["merges"][:-1])),
                    dict(normalizer=dict(type="NFC")), dict(model=model | dict(ignore_merges=True)),
                    dict(post_processor=around([("<|endoftext|>", 0)]))]:
        again.write_text(json.dumps(content | changes))
        names.add(name_of(again.read_text()))
    assert len(names) == 5


def test_an_added_token_without_a_row_counts_where_it_occurs(tmp_path, make_data, run_train,
                                                             run_sample):
    """A model of 401 rows and a tokenizer of 402 tokens: data without the last fits; data with it
    is refused by the token's name, and so is a prompt."""
    llama_folder("hf", 401)
    with_tokens(Path("hf/tokenizer.json"), ["<pad>"], ["<extra>"])
    huggingface.import_model("hf", Path("m.pt"))
    for name, texts in (("fits", TWENTY), ("not", [text + "<extra>" for text in TWENTY])):
        make_data(*write_documents("a.jsonl", texts), "hf", "--out", name)
    small = ["--batch-size", 2, "--micro-batch", 1, "--seq-len", 16, "--steps", 2]
    begin, evaluate = ["--init-from", "m.pt"], ["--resume", "m.pt", "--eval-only"]
    for number, (start, folders, expected) in enumerate([
            (begin, "fits", 0), (begin, "not", 2), (evaluate, "fits", 0), (evaluate, "not", 2),
            (begin, "fits=1,not=1", 2)]):
        status, _, error = run_train(*start, "--data", folders, "--out", f"o{number}", *small)
        assert status == expected, error
        if status == 2:
            assert error.count("\n") == 1
            assert "401, '<extra>', and the model has rows for 401 tokens" in error
    status, _, error = run_sample("--ckpt", tmp_path / "m.pt", "--prompt", "a<extra>")
    assert status == 2 and "401, '<extra>'" in error and error.count("\n") == 1


@pytest.mark.parametrize("before, behind, expected", [
    ([], ["<extra>"], 0),               # a token that the model has no row for, and no text has
    (["<extra>"], [], 2)])              # the model may have seen a token that these texts lack
def test_a_token_that_was_added_to_the_tokenizer_later(make_data, run_train, before, behind,
                                                       expected):
    llama_folder("hf", 402)
    with_tokens(Path("hf/tokenizer.json"), ["<pad>"], before)
    huggingface.import_model("hf", Path("m.pt"))
    with_tokens(Path("hf/tokenizer.json"), ["<pad>"], behind)
    make_data(*write_documents("a.jsonl"), "hf")
    status, _, error = run_train("--init-from", "m.pt", "--data", "out", "--out", "o",
                                 "--batch-size", 2, "--micro-batch", 1, "--seq-len", 16, "--steps",
                                 2)
    assert status == expected and (status == 0 or "make --data with that tokenizer" in error)


ADDED = ["\u0111em", "stra\u00dfe", "<tool>", "\u6f22\u5b57", "\u00e9l\u00e8ve", "\u0120em"]


@pytest.mark.parametrize("special", [False, True])
def test_added_tokens_are_plain_text(tmp_path, special):
    """A thousand random texts come back from their tokens, in parts too. Special ones are ordinary
    text in a text, and decode to themselves."""
    path = tmp_path / "tokenizer.json"
    with_tokens(path, *([ADDED] if special else [[], ADDED]))
    ours = get_tokenizer("json-", read_file(path))
    for token in ADDED:
        number = ours.encode_single_token(token)
        assert number >= 400 and ours.decode_single_token_bytes(number) == token.encode()
        assert special != (number in ours.encode_ordinary(f"a {token} b"))
    rng = np.random.default_rng(0)
    signs = [*ADDED, " ", "\n", "a", "em", "\u00df", "\u0111", "\u00e9", "<", "tool>", "  ", "x y"]
    for _ in range(1000):
        text = "".join(rng.choice(signs, 10))
        ids = ours.encode_ordinary(text)
        assert b"".join(ours.decode_single_token_bytes(token) for token in ids) == text.encode()
        match = ours.cut.match(text)
        if match is not None:
            parts = text[:match.end()], text[match.end():]
            assert sum(map(ours.encode_ordinary, parts), []) == ids


def test_a_special_token_of_the_trainer_is_plain_text(tmp_path):
    """It is in the vocabulary and among the added tokens, and no merge makes it."""
    path = tmp_path / "tokenizer.json"
    made(path, "Llama 3", "</s>")
    content = json.loads(path.read_text())
    content["model"]["vocab"]["stra\u00dfe"] = 400
    content["added_tokens"].append(content["added_tokens"][0] | dict(id=400, content="stra\u00dfe"))
    ours = get_tokenizer("json-", json.dumps(content))
    assert ours.decode_single_token_bytes(400) == "stra\u00dfe".encode()


def test_an_added_token_that_is_a_byte_is_refused(tmp_path):
    """The number of "\u00e9" is that of the byte 0xe9 of other characters."""
    path = tmp_path / "tokenizer.json"
    with_tokens(path, [], ["\u00e9"])
    with pytest.raises(ValueError, match="has the number of the bytes"):
        read_file(path)


@pytest.mark.parametrize("added", [
    dict(content="<t>", rstrip=True), dict(content="new york"), dict(content="<t>", lstrip=True),
    dict(content=" york", single_word=True), dict(content="  ", normalized=True)])
def test_no_cut_goes_through_an_added_token(tmp_path, added):
    """Random texts in parts give the tokens of the whole."""
    path = tmp_path / "tokenizer.json"
    token = tokenizers.AddedToken(added.pop("content"), **added)
    theirs = with_tokens(path, [], [token])
    ours = get_tokenizer("json-", read_file(path))
    rng = np.random.default_rng(0)
    signs = [token.content, "<t>", " ", "new", " york", "a", "\n", "  "]
    cuts = 0
    for _ in range(1000):
        text = "".join(rng.choice(signs, 8))
        match = ours.cut.match(text)
        if match is not None:
            cuts += 1
            ids = [theirs.encode(part, add_special_tokens=False).ids
                   for part in (text[:match.end()], text[match.end():], text)]
            assert ids[0] + ids[1] == ids[2], repr(text)
    assert cuts > 200


def test_a_text_that_parts_would_change_is_encoded_whole(tmp_path):
    """Words that reach over a space, a normalizer that strips, a text that does not come back."""
    path = tmp_path / "tokenizer.json"
    made(path, "Llama 3")
    content = json.loads(path.read_text())
    whole = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=False)
    model = content["model"]
    model = model | dict(vocab=model["vocab"] | {"\u0120b": 400, "a\u0120b": 401},
                         merges=[["\u0120", "b"], ["a", "\u0120b"]])
    strip = dict(type="Strip", strip_left=True, strip_right=True)
    removed = dict(type="Sequence", pretokenizers=[
        dict(type="Split", pattern=dict(String="!"), behavior="Removed", invert=False), whole])
    for changes in (dict(pre_tokenizer=whole, model=model), dict(normalizer=strip),
                    dict(pre_tokenizer=removed), dict(pre_tokenizer=dict(type="Whitespace"))):
        assert get_tokenizer("json-", json.dumps(content | changes)).cut is None
    with pytest.raises(ValueError, match="dropout"):
        get_tokenizer("json-", json.dumps(content | dict(model=model | dict(dropout=0.1))))


def describe(folder, **files):
    """Write the files beside a tokenizer.json: {name without .json: object}."""
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content))


@pytest.mark.parametrize("tokens, files, end", [
    (["<eos>"], dict(tokenizer_config=dict(eos_token="<eos>")), "<eos>"),
    (["<eos>"], dict(special_tokens_map=dict(eos_token=dict(content="<eos>"))), "<eos>"),
    (["<eos>"], dict(config=dict(eos_token_id=400)), "<eos>"),
    (["<eos>", "</s>"], dict(tokenizer_config=dict(eos_token="<eos>")), "<eos>"),
    (["<|eot_id|>", "<|end_of_text|>"], dict(tokenizer_config=dict(
        eos_token="<|eot_id|>", chat_template="{{ messages }}")), "<|end_of_text|>"),
    (["<|im_end|>", "<|endoftext|>"], dict(tokenizer_config=dict(eos_token="<|im_end|>")),
     "<|endoftext|>"),
    (["</s>"], dict(config=dict(eos_token_id=2)), "</s>")])
def test_the_end_of_a_text_is_what_the_folder_says(make_data, tokens, files, end):
    """Not an answer's end, nor a number that is a word's; it goes with the tokenizer's file, which
    transformers' package opens."""
    with_tokens(Path("tokenizer.json"), tokens, end="<first>")
    describe(Path(), **files)
    make_data(*write_documents("a.jsonl"), ".")
    meta = read_meta(Path("out"))
    ours = get_tokenizer(meta["tokenizer"], meta["tokenizer_file"])
    assert ours.end_of_text == end and name_of(meta["tokenizer_file"]) == meta["tokenizer"]
    opened = tokenizers.Tokenizer.from_str(meta["tokenizer_file"])
    documents_of(Path("out"), opened.token_to_id(end))


def test_what_the_config_says_is_told_or_refused(make_data, refuse_data):
    """add_bos_token without a beginning; an added token that transformers would find in a text."""
    made("tokenizer.json", "Llama 3")
    flags = [*write_documents("a.jsonl"), "tokenizer.json"]
    describe(Path(), tokenizer_config=dict(add_bos_token=True, eos_token="<none>"))
    _, error = make_data(*flags)
    assert "puts nothing before a text, although" in error
    assert "has no token '<none>'" in error
    describe(Path(), tokenizer_config=dict(added_tokens_decoder={"400": dict(content="york")}))
    refuse_data("adds the token 'york'", *flags)
    describe(Path(), tokenizer_config={}, added_tokens=dict(york=400))
    refuse_data("added_tokens.json has the token", *flags)


def test_a_folder_is_read_if_it_holds_a_tokenizer(make_data, refuse_data):
    """A tokenizer.json with a byte-order mark, or one .tiktoken; else what it holds is named. In an
    export a tokenizer.json is beside the file of one's own, whose name the checkpoint has."""
    made("tokenizer.json", "Llama 3")
    name = name_of(read_file(Path("tokenizer.json")))
    for folder in ("json", "own", "export", "none", "two"):
        Path(folder).mkdir()
    Path("json/tokenizer.json").write_text("\ufeff" + Path("tokenizer.json").read_text())
    own = write_tokens([bytes([i]) for i in range(256)] + [b"th"])
    Path("own/mine.tiktoken").write_text("".join(reversed(own.splitlines(True))))
    Path(f"export/{name_of(own)}.tiktoken").write_text(own)
    Path("tokenizer.json").rename("export/tokenizer.json")
    Path("none/model.safetensors").touch()
    for number in "12":
        Path(f"two/{number}.tiktoken").write_text(own)
    flags = write_documents("a.jsonl")
    for folder, expected in (("json", name), ("own", name_of(own)), ("export", name_of(own))):
        make_data(*flags, folder, "--out", f"of {folder}")
        assert read_meta(Path(f"of {folder}"))["tokenizer"] == expected
    refuse_data("but model.safetensors", *flags, "none")
    refuse_data("holds 2 tokenizers", *flags, "two")
