"""Tokenizers whose tokens are text, and GPT-2's older pair of files: beside transformers.

    python -m pytest tests/test_text_tokenizers.py

Each kind is made here by the package `tokenizers`. test_json_tokenizers.py has those of bytes.
"""
import io
import itertools
import json
import random
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import checkpoint
import sample
from corpus import encode
from corpus.byte_level_tokenizers import ByteLevelTokenizer
from corpus.chat_message import Message
from corpus.conversations import Template
from corpus.json_tokenizers import TEXT as BEHIND_TEXT
from corpus.published_templates import find_template
from corpus.shards import SPLITS, open_shard, read_meta
from corpus.token_streams import decode
from corpus.tokenizers import document_start, find_file, get_tokenizer, name_of, read_file
from runtime.sample_and_chat import Samples
from tests.harness import NASTY, ROOT, run_main, write_texts
from tests.test_chat_templates import STYLES, TALKS, talk, theirs
from tools import huggingface

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")       # what transformers warns of is not ours

TEXT = (ROOT / "train.py").read_text()[:20000] + "[INST] the answer </s> " * 9 + "".join(NASTY)
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]


def trained(tokenizer, trainer, **options):
    options = dict(vocab_size=700, show_progress=False) | options
    tokenizer.train_from_iterator(TEXT.split("\n"), trainer(**options))
    return tokenizer


def around(tokenizer, template, *texts):
    """With what the template puts around a text."""
    tokens = [(text, tokenizer.token_to_id(text)) for text in texts]
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=template, special_tokens=tokens)
    return tokenizer


def sentencepiece(form):
    """Byte-pair encoding with bytes for what the vocabulary lacks, as Llama 2's: with a normalizer
    ("llama2"), or as transformers writes Mistral's ("mistral")."""
    pre, decoders = tokenizers.pre_tokenizers, tokenizers.decoders
    words = trained(tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>")),
                    tokenizers.trainers.BpeTrainer, special_tokens=["<unk>", "<s>", "</s>", *BYTES],
                    limit_alphabet=60)
    words.pre_tokenizer = pre.Metaspace(prepend_scheme="always", split=True)
    words = trained(words, tokenizers.trainers.BpeTrainer, limit_alphabet=60,
                    special_tokens=["<unk>", "<s>", "</s>", *BYTES])
    content = json.loads(words.to_str())
    content["added_tokens"] = content["added_tokens"][:3]
    content["model"] |= dict(byte_fallback=True, fuse_unk=True)
    content["pre_tokenizer"] = None
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(content))
    if form == "llama2":
        tokenizer.normalizer = tokenizers.normalizers.Sequence([
            tokenizers.normalizers.Prepend("\u2581"),
            tokenizers.normalizers.Replace(" ", "\u2581")])
    else:
        tokenizer.pre_tokenizer = pre.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(),
                                           decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    return around(tokenizer, "<s> $A", "<s>")


def unigram():
    """As T5's: </s> behind each text, runs of spaces are one, and what is rare is unknown."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.Unigram())
    tokenizer.normalizer = tokenizers.normalizers.Sequence([
        tokenizers.normalizers.NFKC(),
        tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace(prepend_scheme="always")
    tokenizer.decoder = tokenizers.decoders.Metaspace(prepend_scheme="always")
    trained(tokenizer, tokenizers.trainers.UnigramTrainer, vocab_size=400, unk_token="<unk>",
            special_tokens=["<pad>", "</s>", "<unk>"])
    return around(tokenizer, "$A </s>", "</s>")


def wordpiece():
    """As BERT's, in lower case."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = tokenizers.normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = tokenizers.decoders.WordPiece()
    trained(tokenizer, tokenizers.trainers.WordPieceTrainer,
            special_tokens=["[PAD]", "[UNK]", "[CLS]", "[SEP]"])
    return around(tokenizer, "[CLS] $A [SEP]", "[CLS]", "[SEP]")


def byte_level(add_prefix_space=False):
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return trained(tokenizer, tokenizers.trainers.BpeTrainer, special_tokens=["<|endoftext|>"],
                   initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet())


def with_spaces():
    """As Phi's and GPT-NeoX's: runs of spaces are added tokens."""
    tokenizer = byte_level()
    tokenizer.add_tokens([" " * count for count in range(24, 1, -1)])
    return tokenizer


def save_pair(folder, **config):
    """OPT's vocab.json and merges.txt: other numbers than GPT-2's, and </s> around texts."""
    model = json.loads(byte_level().to_str())["model"]
    words = [token for token in model["vocab"] if token != "<|endoftext|>"]
    random.Random(0).shuffle(words)
    tokens = ["<s>", "<pad>", "</s>", "<unk>", *words, "<|endoftext|>"]
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(tokens)}))
    lines = ["#version: 0.2", *(" ".join(merge) for merge in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    config = dict(tokenizer_class="GPT2Tokenizer", bos_token=dict(
        __type="AddedToken", content="</s>", lstrip=False, normalized=True, rstrip=False,
        single_word=False), eos_token="</s>", unk_token="</s>", pad_token="<pad>",
        add_bos_token=True) | config
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def bytes_that_make_it():
    """Of bytes, whose merges make </s>, which ends a text."""
    content = json.loads(byte_level().to_str())
    content["added_tokens"] = [content["added_tokens"][0] | dict(content="</s>", id=700)]
    model = content["model"]
    model["vocab"] = {token: number for token, number in model["vocab"].items()
                      if token not in ("<|endoftext|>", "</s>", "</s", "</")}
    model["merges"] = [merge for merge in model["merges"] if {*merge, "".join(merge)} <= {
        *model["vocab"]}] + [["<", "/"], ["</", "s"], ["</s", ">"]]
    model["vocab"] |= {"</": 701, "</s": 702, "</s>": 700}
    content["pre_tokenizer"] |= dict(use_regex=False)
    return tokenizers.Tokenizer.from_str(json.dumps(content))


KINDS = {"llama2": lambda: sentencepiece("llama2"), "mistral": lambda: sentencepiece("mistral"),
         "unigram": unigram, "wordpiece": wordpiece, "spaces": with_spaces, "opt": None}
ENDS = dict(wordpiece="[SEP]", spaces="<|endoftext|>")      # of the others: </s>


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory):
    """folder_of(kind): a folder with a tokenizer of this kind."""
    made = {}

    def folder(kind):
        if kind not in made:
            made[kind] = tmp_path_factory.mktemp(kind)
            if kind == "opt":
                save_pair(made[kind])
            else:
                tokenizer = (KINDS | {"bytes that make it": bytes_that_make_it})[kind]()
                tokenizer.enable_truncation(8)          # as some files have it
                tokenizer.save(str(made[kind] / "tokenizer.json"))
        return made[kind]
    return folder


def opened(folder):
    file = read_file(find_file(folder))
    return get_tokenizer(name_of(file), file)


SPECIAL = ["</s>", "<s>", "<unk>", "[SEP]", "[CLS]", "<|endoftext|>", "<pad>"]
SIGNS = ["a", "the", " the", "  ", " ", "\n", "\t", "\u2581", "\ufeff", "\x00", "\U0001f600",
         "\u6f22", "\u00e9", "e\u0301", "\ufb01", "\u3000", "def", "():", "1234", "It's", " .",
         "<0x0A>", "\U0001f469\u200d\U0001f4bb"]
FORGED = ("llama2", "mistral", "unigram")       # transformers forges </s>, which is in TEXT
RANGES = [(32, 127), (0xa0, 0x2000), (0x3000, 0xd000), (0x1f300, 0x1f700)]


def random_texts(count, signs=SIGNS):
    draw = random.Random(0)
    return ["".join(draw.choice(signs) if draw.random() < 0.7
                    else chr(draw.randrange(*draw.choice(RANGES)))
                    for _ in range(draw.randint(0, 14))) for _ in range(count)]


@pytest.mark.claim("A tokenizer of SentencePiece's kinds, WordPiece or bytes gives the tokens and "
                   "the text that transformers gives.")
@pytest.mark.parametrize("kind, count", [
    *((kind, 100) for kind in KINDS),
    *(pytest.param(kind, 2000, marks=pytest.mark.slow) for kind in KINDS)])
def test_tokens_and_text_are_those_of_transformers(folder_of, kind, count):
    """Of random texts: the tokens, and what is printed token by token behind a part of them; of any
    tokens, too, whose bytes are no characters. Then transformers makes all bytes of a run wrong,
    and here the whole characters before the first wrong one stay, as they are printed by then."""
    ours = opened(folder_of(kind))
    opener = transformers.AutoTokenizer.from_pretrained(folder_of(kind))
    opener.backend_tokenizer.no_truncation()
    draw = random.Random(1)

    def whole(tokens):
        return opener.decode(tokens, skip_special_tokens=False)

    def streamed(tokens, before):
        stream = ours.stream([*ours.prefix, *before])
        return "".join(map(stream.add, tokens)) + stream.end()
    for text in random_texts(count, SIGNS if kind in FORGED else SIGNS + SPECIAL):
        tokens = ours.encode_ordinary(text)
        assert tokens == opener(text, add_special_tokens=False,
                                split_special_tokens=True)["input_ids"], repr(text)
        middle = draw.randint(0, len(tokens))
        while not whole(tokens).startswith(whole(tokens[:middle])):     # within a character
            middle -= 1
        before, behind = tokens[:middle], tokens[middle:]
        assert whole(before) + streamed(behind, before) == whole(tokens), repr(text)
        others = [draw.randrange(1, ours.n_vocab) for _ in range(6)]
        others += [draw.randrange(3, 259) for _ in range(4)]        # bytes of SentencePiece's kind
        others += ours.encode_ordinary(draw.choice("\u6f22\n\U0001f600"), BEHIND_TEXT)
        others = [token for token in others if token != 3 + ord(" ")]   # no text gives this byte
        draw.shuffle(others)
        assert streamed(others, []) == decode(ours, others)
        if kind not in ("llama2", "mistral"):
            assert decode(ours, others) == whole(others)
            continue
        mark = opener.convert_ids_to_tokens(0)          # which is not among them
        assert decode(ours, others) == whole(with_marks(others)).replace(mark, "")
    assert ours.cut is None or isinstance(ours, ByteLevelTokenizer)


def with_marks(tokens):
    """A 0 between the whole characters and the first wrong byte, in each run of SentencePiece's
    bytes: tokens 3 to 258."""
    marked = []
    for is_byte, run in itertools.groupby(tokens, lambda token: 3 <= token < 259):
        run = list(run)
        try:
            bytes(token - 3 for token in run if is_byte).decode()
        except UnicodeDecodeError as error:
            run.insert(error.start, 0)
        marked += run
    return marked


@pytest.mark.parametrize("kind", ["llama2", "mistral"])
def test_a_character_of_several_bytes_is_printed_with_its_last(folder_of, capsys, kind):
    """A newline at once. No token is drawn behind the one that completes --stop."""
    ours = opened(folder_of(kind))
    text = "\n\u6f22\U0001f600\n\n" + "\u6f22\u5b57" * 5
    tokens = ours.encode_ordinary(text, BEHIND_TEXT)
    stream = ours.stream(ours.encode_ordinary("a"))
    expected = [shown for character in text
                for shown in [*[""] * (len(character.encode()) - 1), character]]
    assert [stream.add(token) for token in tokens] == expected
    assert stream.end() == ""
    args = SimpleNamespace(prompt="a", stop="\u5b57", num_samples=1, max_tokens=64, seed=0)
    samples = Samples(args, ours, SimpleNamespace(vocab_size=ours.n_vocab, seq_len=64))
    next(samples.prompts())
    drawn = iter([[token] for token in tokens])
    samples.write(drawn)
    assert capsys.readouterr().out == "a" + text.partition(args.stop)[0] + "\n"
    assert len(list(drawn)) == len(("\u6f22\u5b57" * 4).encode())


@pytest.mark.parametrize("kind", [*KINDS, "bytes that make it"])
def test_no_text_forges_a_special_token(folder_of, kind):
    """Where transformers would: its characters in a text, as they are and as we hide them."""
    ours = opened(folder_of(kind))
    forbidden = {ours.eot_token, *ours.prefix}
    texts = [before + token + behind for token in SPECIAL for before, behind in [
        ("", ""), (" ", " "), ("a", "b"), ("\u2581", "\u2581"), ("\n", "\n")]]
    for text in texts:
        for behind in ("nothing", "a token", "text"):
            assert not forbidden & {*ours.encode_ordinary(text, behind)}, repr(text)
            assert not forbidden & {*ours.encode_with_offsets(text, behind)[0]}, repr(text)
    if kind in FORGED:                  # transformers does
        opener = transformers.AutoTokenizer.from_pretrained(folder_of(kind))
        forged = opener("</s>", add_special_tokens=False, split_special_tokens=True)["input_ids"]
        assert ours.eot_token in forged


@pytest.mark.parametrize("kind", KINDS)
def test_a_tokenizer_saved_again_by_transformers_has_its_name(folder_of, tmp_path, kind):
    """And not one with other scores, merges, words, steps or another decoder."""
    transformers.AutoTokenizer.from_pretrained(folder_of(kind)).save_pretrained(tmp_path)
    first, again = (read_file(find_file(folder)) for folder in (folder_of(kind), tmp_path))
    assert name_of(first) == name_of(again)
    content = json.loads(first)
    model = content["model"]
    changes = [dict(normalizer=dict(type="NFC"))]
    if "merges" in model:
        changes.append(dict(model=model | dict(merges=model["merges"][:-1])))
    if kind in ("llama2", "mistral", "unigram", "wordpiece"):
        changes.append(dict(decoder=dict(type="Fuse")))
    if kind == "unigram":
        last, score = model["vocab"][-1]
        scores = [*model["vocab"][:-1], [last, score - 0.1]]
        changes.append(dict(model=model | dict(vocab=scores)))
    names = {name_of(json.dumps(content | change)) for change in [{}, *changes]}
    assert len(names) == len(changes) + 1


DOCUMENTS = [*(text for text in NASTY if text.strip()), "a </s> b <s>", *(
    TEXT[i:i + 900] for i in range(0, 18000, 900)), *("document %d of a Stra\u00dfe " % i * 3
                                                      for i in range(30))]


@pytest.mark.parametrize("kind", ["llama2", "unigram", "opt"])
def test_shards_have_the_tokens_of_whole_documents(folder_of, monkeypatch, make_data, kind):
    """Though files are read in blocks of 200 characters. Documents begin as the tokenizer's own
    template says, and are counted in bytes per token."""
    monkeypatch.setattr(encode, "BLOCK", 200)
    monkeypatch.setattr("corpus.formats.BLOCK", 200)
    make_data(write_texts("a.jsonl", DOCUMENTS), "--near-duplicates", "ignore", "--tokenizer",
              folder_of(kind))
    meta = read_meta(Path("out"))
    ours = opened(folder_of(kind))
    assert meta["tokenizer"] == ours.name
    start = document_start(ours)
    opener = transformers.AutoTokenizer.from_pretrained(folder_of(kind))
    opener.backend_tokenizer.no_truncation()
    expected, found = [], []
    for text in set(DOCUMENTS) - {"a </s> b <s>"}:      # which a Unigram of transformers forges
        tokens = opener(text, split_special_tokens=True)["input_ids"]
        expected.append([token for token in tokens if token not in start])
    for split in SPLITS:
        tokens = open_shard(Path("out", f"{split}_000000.bin")).tolist()
        assert tokens[:len(start)] == start
        for token in tokens:
            if token == start[0]:
                found.append([])
            elif token not in start:
                found[-1].append(token)
    forged = ours.encode_ordinary("a </s> b <s>")
    assert sorted(found) == sorted([*expected, forged])
    meta = json.loads(Path("out/meta.json").read_text())
    assert meta["bytes_per_token"] == meta["text_bytes"]["val"] / meta["tokens"]["val"]


def test_a_class_that_encodes_otherwise_is_told(folder_of, tmp_path, make_data):
    """LlamaTokenizer of transformers omits a space that the normalizer of the file writes."""
    shutil.copy(folder_of("llama2") / "tokenizer.json", tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    _, told = make_data(write_texts("a.jsonl", DOCUMENTS), "--tokenizer", tmp_path)
    tokens = [opener.encode(" a", add_special_tokens=False) for opener in (
        transformers.AutoTokenizer.from_pretrained(tmp_path),
        transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path))]
    assert (tokens[0] != tokens[1]) == ("by the class LlamaTokenizer" in told)
    assert opened(tmp_path).encode_ordinary(" a") == tokens[1] != tokens[0]


# ---- Models -----------------------------------------------------------------------------------

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
             max_position_embeddings=64, pad_token_id=None)
MODELS = {
    "llama2": lambda rows, end: transformers.LlamaForCausalLM(transformers.LlamaConfig(
        vocab_size=rows, intermediate_size=64, initializer_range=0.3, eos_token_id=end, **SHAPE)),
    "mistral": lambda rows, end: transformers.MistralForCausalLM(transformers.MistralConfig(
        vocab_size=rows, intermediate_size=64, initializer_range=0.3, num_key_value_heads=1,
        sliding_window=None, eos_token_id=end, **SHAPE)),
    "opt": lambda rows, end: transformers.OPTForCausalLM(transformers.OPTConfig(
        vocab_size=rows, ffn_dim=128, word_embed_proj_dim=32, init_std=0.3, eos_token_id=end,
        **SHAPE)),
    "spaces": lambda rows, end: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(
        vocab_size=rows, intermediate_size=128, initializer_range=0.3, eos_token_id=end, **SHAPE))}
MODELS["unigram"] = MODELS["wordpiece"] = MODELS["llama2"]


def save_model(folder, tokenizer_folder, kind):
    """A model of random weights, with its tokenizer."""
    tokenizer = opened(tokenizer_folder)
    torch.manual_seed(0)
    MODELS[kind](tokenizer.n_vocab + 5, tokenizer.eot_token).save_pretrained(folder)
    for path in tokenizer_folder.iterdir():
        shutil.copy(path, folder)
    return tokenizer


PROMPTS = ["def ", "", " ", "\nx", "the \u6f22", "\U0001f600"]


@pytest.mark.parametrize("kind", [
    kind if kind in ("llama2", "opt") else pytest.param(kind, marks=pytest.mark.slow)
    for kind in MODELS])
def test_a_tokenizer_goes_with_a_model_there_and_back(folder_of, tmp_path, capsys, make_data,
                                                      run_train, run_sample, kind):
    """Import, shards, training, greedy text as that of transformers' generate, and export: the
    same tokenizer."""
    ours = save_model(tmp_path / "hf", folder_of(kind), kind)
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt")
    make_data(write_texts("a.jsonl", DOCUMENTS), "--near-duplicates", "ignore", "--tokenizer",
              tmp_path / "hf")
    status, _, error = run_train("--init-from", "m.pt", "--data", "out", "--out", "o",
                                 "--seq-len", 64, "--batch-size", 4, "--steps", 3)
    assert status == 0, error
    huggingface.export_model(Path("o/latest.pt"), tmp_path / "again")
    huggingface.import_model("again", tmp_path / "back.pt")
    first, last = (checkpoint.load(tmp_path / name) for name in ("m.pt", "back.pt"))
    assert first["tokenizer"] == last["tokenizer"] == ours.name
    opener = transformers.AutoTokenizer.from_pretrained(tmp_path / "again")
    opener.backend_tokenizer.no_truncation()
    for text in [*NASTY, *PROMPTS, TEXT[:500]]:
        assert opener(text, add_special_tokens=False,
                      split_special_tokens=True)["input_ids"] == ours.encode_ordinary(text)
    model = transformers.AutoModelForCausalLM.from_pretrained("again", dtype=torch.float32)
    capsys.readouterr()
    for prompt in PROMPTS:
        status, sampled, error = run_sample("--ckpt", "o/latest.pt", "--temperature", 0,
                                            "--max-tokens", 20, "--prompt", prompt)
        assert status == 0, error
        tokens = [*ours.prefix, *opener(prompt, add_special_tokens=False)["input_ids"]]
        tokens = tokens or [ours.eot_token]
        whole = model.generate(torch.tensor([tokens]), max_new_tokens=20, do_sample=False,
                               eos_token_id=ours.eot_token)[0].tolist()
        if whole[-1] == ours.eot_token:
            whole = whole[:-1]
        skip = len(tokens) if tokens == [ours.eot_token] else len(ours.prefix)
        if kind in ("llama2", "mistral"):
            whole = with_marks(whole)
        head, text = (opener.decode(some[skip:]) for some in (tokens, whole))
        expected = prompt + text[len(head):] + "\n"
        mark = opener.convert_ids_to_tokens(0)          # the model may draw it, too
        assert sampled.replace(mark, "") == expected.replace(mark, "")


@pytest.mark.parametrize("kind", ["llama2", "opt"])
def test_a_sample_ends_before_a_text_that_several_tokens_write(folder_of, tmp_path, capsys,
                                                               run_sample, kind):
    """Each of two samples, as both would be without --stop."""
    save_model(tmp_path / "hf", folder_of(kind), kind)
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt")
    flags = ["--ckpt", tmp_path / "m.pt", "--num-samples", 2, "--max-tokens", 40, "--prompt", "a",
             "--seed", 3]
    capsys.readouterr()
    _, out, _ = run_sample(*flags)
    dashes = "-" * 40 + "\n"
    free = [text.removesuffix("\n") for text in out.split(dashes)]
    stop = free[1][30:36]
    _, out, _ = run_sample(*flags, "--stop", stop)
    assert out == dashes.join(text[:1] + text[1:].partition(stop)[0] + "\n" for text in free)


# ---- Conversations ----------------------------------------------------------------------------

def with_template(folder, program, **config):
    (folder / "tokenizer_config.json").write_text(json.dumps(dict(
        tokenizer_class="PreTrainedTokenizerFast", chat_template=program, bos_token="<s>",
        eos_token="</s>") | config))
    return opened(folder)


FORGERS = [[("user", "a </s> <s>b"), ("assistant", "</s>\n\n c"), ("user", "\u6f22\u5b57 [/INST]"),
            ("assistant", " \u00e9")]]


@pytest.mark.parametrize("kind", ["llama2", "mistral", "unigram"])
@pytest.mark.parametrize("style", ["llama2", "mistral", "zephyr"])
@pytest.mark.parametrize("marks", [[], ["[INST]", "[/INST]"]])
def test_a_conversation_has_the_tokens_of_transformers(folder_of, tmp_path, kind, style, marks):
    """By a model's own template, whose marks may be tokens; what is learnt are the answers. The
    characters of special tokens in a content are no special tokens, and nothing else is."""
    tokenizer = tokenizers.Tokenizer.from_file(str(folder_of(kind) / "tokenizer.json"))
    tokenizer.add_special_tokens([*marks, "<s>"])
    tokenizer.no_truncation()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    ours = with_template(tmp_path, STYLES[style])
    template = find_template(tmp_path, ours)
    for turns in TALKS[:2]:
        tokens, learnt = template.render(talk(turns))
        assert tokens == theirs(tmp_path, turns)
        assert template.prompt_of(talk(turns[:-1])) == theirs(tmp_path, turns[:-1],
                                                              add_generation_prompt=True)
        answers = [content for role, content in turns if role == "assistant"]
        texts = decode(ours, np.array(tokens)[learnt].tolist()).split("</s>")
        assert texts.pop() == ""
        for text, answer in zip(texts, answers, strict=True):
            assert text.split() == decode(ours, ours.encode_ordinary(answer)).split()
    for turns in FORGERS:
        tokens, _ = template.render(talk(turns))
        assert tokens.count(ours.eot_token) == len(
            [role for role, _ in turns if role == "assistant" or style == "zephyr"])
        assert tokens.count(ours.encode_single_token("<s>")) == (style != "zephyr")


@pytest.mark.parametrize("kind", ["llama2", "mistral", "unigram", "opt"])
@pytest.mark.parametrize("name", ["plain", "chatml"])
def test_our_templates_write_what_their_export_writes(folder_of, tmp_path, kind, name):
    """The tokens of `apply_chat_template`, where an answer does not begin or end with white space.
    An answer is the text that gives its tokens again."""
    ours = save_model(tmp_path / "hf", folder_of(kind), kind)
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt")
    state = torch.load(tmp_path / "m.pt") | dict(template=name)
    torch.save(state, tmp_path / "m.pt")
    huggingface.export_model(tmp_path / "m.pt", tmp_path / "again")
    template = Template(name, ours)
    for turns in TALKS:
        tokens, _ = template.render(talk(turns))
        assert tokens == theirs(tmp_path / "again", turns)
        prompt = template.prompt_of([*talk(turns), Message("user", "go on")])
        for answer in ("yes, it is", " 4", "\n\n5"):
            drawn = ours.encode_ordinary(answer, BEHIND_TEXT)
            stream = ours.stream(prompt)
            text = "".join(map(stream.add, drawn)) + stream.end()
            if kind != "unigram":           # it has no token of some characters
                assert text == answer


def test_a_chat_prints_what_transformers_prints(folder_of, tmp_path, monkeypatch, capsys):
    """By Llama 2's template: the text of all tokens, without that of the prompt."""
    save_model(tmp_path / "hf", folder_of("llama2"), "llama2")
    with_template(tmp_path / "hf", STYLES["llama2"])
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "m.pt")
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"hello\n")))
    status, out, error = run_main(capsys, sample, "--ckpt", tmp_path / "m.pt", "--chat",
                                  "--temperature", 0, "--max-tokens", 8)
    assert status == 0, error
    opener = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    prompt = opener.apply_chat_template([dict(role="user", content="hello")],
                                        add_generation_prompt=True, return_dict=False)
    whole = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False)[0].tolist()
    head, text = (opener.decode(some, skip_special_tokens=True) for some in (prompt, whole))
    assert out == text[len(head):] + "\n"


# ---- GPT-2's pair -----------------------------------------------------------------------------

FLAGS = dict(single_word=False, lstrip=False, rstrip=False, normalized=False)

@pytest.mark.parametrize("config, others", [
    (dict(), {}), (dict(add_bos_token=False), {}), (dict(add_prefix_space=True), {}),
    (dict(add_eos_token=True), {}),
    (dict(), dict(special_tokens_map=dict(bos_token="<s>", eos_token=dict(
        content="</s>", lstrip=False, rstrip=True, normalized=False, single_word=False)))),
    (dict(bos_token="<|endoftext|>", eos_token="<|endoftext|>", unk_token="<|endoftext|>",
          add_bos_token=False), dict(added_tokens={"\u00e9t\u00e9 x": 704, "        ": 705})),
    (dict(added_tokens_decoder={
        "2": dict(content="</s>", special=True, **FLAGS),
        "704": dict(content="<tool>", special=False, **FLAGS | dict(rstrip=True))}), {})])
def test_a_pair_gives_the_tokens_that_transformers_gives(tmp_path, config, others):
    save_pair(tmp_path, **config)
    for name, content in others.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours = opened(tmp_path)
    opener = transformers.GPT2Tokenizer.from_pretrained(tmp_path)
    signs = [*SIGNS, *SPECIAL, "<tool>", "\u00e9t\u00e9 x", "        "]
    for text in random_texts(200, signs):
        assert [*ours.prefix, *ours.encode_ordinary(text), *ours.suffix] == opener(
            text, split_special_tokens=True)["input_ids"], repr(text)
    assert ours.eot_token == opener.eos_token_id


def test_config_json_may_name_several_ends(tmp_path):
    """Where no file of the tokenizer names one, the first of them that the vocabulary has is the
    special token."""
    save_pair(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    for ends, expected in ((2, [2, 703]), ([2, 5], [2, 703]), ([9999, 2, 5], [2, 703]),
                           ([], [703]), ([9999], [703])):
        (tmp_path / "config.json").write_text(json.dumps(dict(eos_token_id=ends)))
        added = json.loads(read_file(find_file(tmp_path)))["added_tokens"]
        assert [token["id"] for token in added if token["special"]] == expected, ends


def test_a_gpt2_with_its_pair_is_gpt2_and_an_opt_without_one_has_no_tokenizer(tmp_path):
    gpt2, opt = dict(model_type="gpt2", vocab_size=50257), dict(model_type="opt", vocab_size=50272)
    assert huggingface.find_tokenizer(tmp_path, opt) == ("opt-50272", None)
    save_pair(tmp_path)
    name = opened(tmp_path).name
    assert huggingface.find_tokenizer(tmp_path, opt) == (name, tmp_path / "vocab.json")
    assert huggingface.find_tokenizer(tmp_path, gpt2) == (name, tmp_path / "vocab.json")
    (tmp_path / "vocab.json").write_text(json.dumps(huggingface.SOME_OF_GPT2S))
    assert huggingface.find_tokenizer(tmp_path, gpt2) == ("gpt2", None)
