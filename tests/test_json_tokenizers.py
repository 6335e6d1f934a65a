"""A tokenizer.json of Hugging Face: its shards, its way through train.py, sample.py and back.

    python -m pytest tests/test_json_tokenizers.py

The package `tokenizers` encodes whole documents, and transformers opens what is exported.
"""
import itertools
import json
from dataclasses import asdict

import numpy as np
import pytest
import torch

import checkpoint
from corpus import encode
from corpus.shards import SPLITS, open_shard
from corpus.tokenizers import bytes_of_token, cut_of, get_tokenizer, name_of, read_file
from models import LlamaConfig
from tests.harness import NASTY, ROOT, TINY
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
def test_shards_have_the_tokens_that_the_package_gives_whole_documents(tmp_path, monkeypatch,
                                                                       run_data, kind):
    """Though data.py encodes them in parts of 200 characters; a text's own <|endoftext|> is
    ordinary text."""
    theirs = made(tmp_path / "tokenizer.json", kind)
    documents = ["a <|endoftext|> b", *(text for text in NASTY if text.strip())]
    documents += [TEXT[i:i + 600] for i in range(0, 18000, 600)]     # enough: none is cut in two
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(dict(text=d)) + "\n" for d in documents))
    monkeypatch.setattr(encode, "BLOCK", 200)
    status, _, error = run_data("--input", tmp_path / "a.jsonl", "--tokenizer",
                                tmp_path / "tokenizer.json", "--near-duplicates", "ignore",
                                "--out", tmp_path / "d")
    assert status == 0, error
    meta = json.loads((tmp_path / "d/meta.json").read_text())
    content = read_file(tmp_path / "tokenizer.json")
    assert meta["tokenizer"] == name_of(content) and meta["vocab_size"] == 400
    assert (tmp_path / f"d/{meta['tokenizer']}.json").read_text() == content
    ours = get_tokenizer(meta["tokenizer"], content)
    parts = [bytes_of_token(ours, token) for token in [*ours.encode_ordinary(" caf\u00e9"), 999,
                                                       ours.eot_token]]
    assert b"".join(parts) == " caf\u00e9<|endoftext|>".encode()       # no token has the id 999
    shards = [open_shard(tmp_path / f"d/{split}_000000.bin") for split in SPLITS]
    assert shards[0].dtype == np.uint16
    tokens = itertools.chain.from_iterable(shard.tolist() for shard in shards)
    runs = itertools.groupby(tokens, lambda token: token == ours.eot_token)
    found = sorted(tuple(run) for is_end, run in runs if not is_end)
    whole = sorted({tuple(theirs.encode(text, add_special_tokens=False).ids)
                    for text in documents})
    assert found == whole


@pytest.mark.parametrize("kind", PRE_TOKENIZERS)
def test_a_text_may_be_cut_before_a_space(tmp_path, kind):
    """2,000 random texts in two parts: the tokens of the whole."""
    theirs = made(tmp_path / "tokenizer.json", kind)
    cut = cut_of(name_of(read_file(tmp_path / "tokenizer.json")))
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
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt", "")
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
    huggingface.import_model(str(tmp_path / "again"), tmp_path / "back.pt", "")
    first, last = (checkpoint.load(tmp_path / name) for name in ("m.pt", "back.pt"))
    assert first["tokenizer"] == last["tokenizer"]
    assert first["tokenizer_file"] == last["tokenizer_file"]
    assert asdict(LlamaConfig(**last["model"]))["vocab_size"] == 512


def test_a_tokenizer_json_goes_with_the_import_of_what_has_no_other(tmp_path):
    """Of a GPT-2, also with as many tokens as the original, and of an export that names it; not of
    OPT, whose ids are others, nor of an export that names another."""
    path = tmp_path / "tokenizer.json"
    made(path, "GPT-NeoX")
    name = name_of(read_file(path))
    for config, expected in [
            (dict(model_type="gpt2", vocab_size=50257), (name, path)),
            (dict(model_type="opt", vocab_size=400, tokenizer=name), (name, path)),
            (dict(model_type="opt", vocab_size=400), ("opt-400", None)),
            (dict(model_type="gpt2", vocab_size=257, tokenizer="bytes"), ("bytes", None)),
            (dict(model_type="llama", vocab_size=400), (name, path))]:
        assert huggingface.find_tokenizer(tmp_path, config) == expected


def test_a_tokenizer_json_whose_tokens_are_no_bytes_is_refused(tmp_path, run_data):
    """By its path, in one line; an import tells it, and goes on without a tokenizer."""
    (tmp_path / "a.txt").write_text(TEXT)
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "</s>": 1}, unk_token="a"))
    pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
    pieces.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    made(tmp_path / "endless.json", "GPT-NeoX", "<end>")
    words.save(str(tmp_path / "words.json"))
    pieces.save(str(tmp_path / "pieces.json"))
    (tmp_path / "none.json").write_text('{"text": "a"}')
    for name, message in [("words", "its tokens are not bytes (its model is WordLevel)"),
                          ("pieces", "its tokens are not bytes"), ("none", "no tokenizer.json"),
                          ("endless", "it has no token <|endoftext|>, <|end_of_text|>, </s>")]:
        status, out, error = run_data("--input", tmp_path / "a.txt", "--out", tmp_path / "d",
                                      "--tokenizer", tmp_path / f"{name}.json")
        assert (status, out, error.count("\n")) == (2, "", 1), error
        assert f"{name}.json" in error and message in error
