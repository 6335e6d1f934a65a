"""tools/huggingface.py: models and tokenizers to transformers and back.

    python -m pytest tests/test_huggingface.py
"""
import json
import os
import shutil
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import checkpoint
import sample
from corpus.documents import EOT
from corpus.huggingface_tokenizers import open_file, to_huggingface, train_tokenizer
from corpus.templates import hash_of
from corpus.tokenizers import get_tokenizer
from model import GPTConfig
from models import llama_sizes, moe
from models.llama import LlamaConfig
from models.moe import MoEConfig
from tests.commands import NASTY, SHARED, expect_mistake, readme_commands
from tests.harness import CFG, names_in, no_file_above, relative, saved, tokens_of, weights_only
from tools import huggingface, huggingface_families


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """huggingface_hub, as if the models of the folder hub/ were on the hub; the working directory
    is the folder that holds hub/. Gives the names of the files that were asked for."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(tmp_path)
    asked = []

    def snapshot_download(name, allow_patterns):
        if name == "me/away":
            raise OSError("[Errno -2] Name or service not known\n\nMore lines")
        if not Path("hub", name).is_dir():
            raise huggingface_hub.errors.RepositoryNotFoundError(
                "401 Client Error\n\nMore lines", response=mock.Mock())
        for file in Path("hub", name).iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                Path("cache", name).mkdir(parents=True, exist_ok=True)
                shutil.copy(file, Path("cache", name))
                asked.append(file.name)
        return Path("cache", name)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    return asked


def convert(capsys, *arguments):
    """python -m tools.huggingface with these arguments -> (exit status, stdout, stderr)."""
    status = 0
    with mock.patch.object(sys, "argv", ["tools.huggingface", *map(str, arguments)]):
        try:
            huggingface.main()
        except SystemExit as end:
            status = end.code
    return status, *capsys.readouterr()


@pytest.mark.claim("GPT-2 and OPT models go to `transformers` and come back.")
@pytest.mark.filterwarnings("ignore")           # what transformers warns of is not ours
@pytest.mark.parametrize("activation, saved_as", [
    ("gelu", "one file"), ("gelu", "many files"), ("relu", "one file"), ("relu", "a pickle")])
@torch.no_grad()
def test_a_model_goes_to_transformers_and_comes_back(tmp_path, capsys, activation, saved_as):
    """Saved by our command, opened and saved again by transformers, read by our command."""
    transformers = pytest.importorskip("transformers")
    cfg, others, tokenizer = replace(CFG, activation=activation), tmp_path / "theirs", "bytes"
    plain, tokens = weights_only(tmp_path / "a.pt", cfg), tokens_of(CFG, 3)
    status, text, _ = convert(capsys, "export", tmp_path / "a.pt", tmp_path / "ours")
    assert status == 0 and "with its tokenizer" in text
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours")
    assert type(theirs).__name__[:3] == {"gelu": "GPT", "relu": "OPT"}[activation]
    difference = relative(plain.double()(tokens), theirs.double().eval()(tokens).logits)
    assert difference < 1e-12
    theirs.float().save_pretrained(
        others, max_shard_size="20KB" if saved_as == "many files" else "1GB")
    if saved_as == "a pickle":
        (others / "model.safetensors").unlink()
        torch.save(theirs.state_dict(), others / "pytorch_model.bin")
        config = (others / "config.json").read_text()       # others say nothing of the tokenizer
        (others / "config.json").write_text(config.replace('"tokenizer"', '"nothing"'))
        tokenizer = "opt-257"
    status, text, _ = convert(capsys, "import", others, tmp_path / "b.pt")
    assert status == 0 and ("tokenizer is not ours: sample.py cannot" in text) == (
        saved_as == "a pickle")
    one, two = (checkpoint.load(tmp_path / name) for name in ("a.pt", "b.pt"))
    assert all(full.equal(two["parameters"][name]) for name, full in one["parameters"].items())
    assert (one["model"], tokenizer) == (two["model"], two["tokenizer"])
    if saved_as == "a pickle":
        with pytest.raises(ValueError, match="tools.huggingface export"):       # in sample.py
            get_tokenizer(tokenizer)


@pytest.mark.filterwarnings("ignore")
def test_the_exported_tokenizer_is_gpt2s(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    elif not Path(tempfile.gettempdir(), "data-gym-cache").is_dir():        # tiktoken's own
        pytest.skip("needs GPT-2's vocabulary in ../shared/tiktoken_cache or tiktoken's cache")
    weights_only(tmp_path / "a.pt", replace(CFG, vocab_size=50257, n_layer=1), "gpt2")
    assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")[0] == 0
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), (
        get_tokenizer("gpt2"))
    text = " ".join(NASTY)
    assert theirs(text)["input_ids"] == ours.encoding.encode(text, allowed_special="all")
    assert theirs.eos_token_id == ours.eot_token
    assert kept_of(tmp_path / "hf", name="gpt2") == dict(tokenizer="gpt2")
    assert kept_of(tmp_path / "hf") == dict(tokenizer="gpt2")
    content = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    content["model"]["vocab"] |= {"\u0120informants": 50255, "\u0120gazed": 50254}
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(content))
    assert kept_of(tmp_path / "hf")["tokenizer"].startswith("hf-")


def kept_of(folder, name=None, model_type="gpt2"):
    """What an import keeps of the tokenizer in a folder whose config.json names it so."""
    state = {}
    huggingface.add_tokenizer(state, folder, SimpleNamespace(
        model_type=model_type, vocab_size=50257, **{} if name is None else {"tokenizer": name}))
    return state


def test_a_gpt2_without_a_tokenizer_has_gpt2s(tmp_path):
    assert kept_of(tmp_path) == dict(tokenizer="gpt2")
    assert kept_of(tmp_path, model_type="opt") == dict(tokenizer="opt-50257")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, is_read", [
    ("llama-257", True), ("bytes", False), ("cl100k_base", False)])
def test_an_export_without_a_tokenizer_takes_one_that_is_put_in_its_folder(tmp_path, name, is_read):
    """As the import advises. What sample.py has by its name needs no file."""
    pytest.importorskip("transformers")
    kept = to_huggingface(get_tokenizer("bytes"))
    kept.tokenizer.save_pretrained(tmp_path)
    state = kept_of(tmp_path, name)
    assert state["tokenizer"] == (kept.name if is_read else name)
    assert ("tokenizer_file" in state) == is_read


SHAPE = dict(vocab_size=350, seq_len=16, n_layer=1, n_head=2, n_embd=16)
MIXTURE = SHAPE | dict(n_expert=3, n_active=2)
EXPORTED = {                                    # model_type in config.json: a model that gets it
    "gpt2": GPTConfig(**SHAPE), "opt": GPTConfig(**SHAPE, activation="relu"),
    "llama": LlamaConfig(**SHAPE),
    "mistral": LlamaConfig(**SHAPE | dict(n_embd=15), head_dim=8),      # of no multiple of n_head
    "qwen2": LlamaConfig(**SHAPE, **llama_sizes.FAMILIES["qwen2"]),
    "qwen3": LlamaConfig(**SHAPE, **llama_sizes.FAMILIES["qwen3"]),
    "olmo": LlamaConfig(**SHAPE, **llama_sizes.FAMILIES["olmo"]),
    "olmo2": LlamaConfig(**SHAPE, **llama_sizes.FAMILIES["olmo2"]),
    "gpt_neox": LlamaConfig(**SHAPE, hidden=64, **llama_sizes.FAMILIES["neox"]),
    "phi": LlamaConfig(**SHAPE, hidden=64, **llama_sizes.FAMILIES["phi"]),
    "gptj": LlamaConfig(**SHAPE, hidden=64, **llama_sizes.FAMILIES["gptj"] | dict(rotary=0.5)),
    "galactica": LlamaConfig(**SHAPE, hidden=64, **llama_sizes.FAMILIES["galactica"]),
    "mixtral": MoEConfig(**MIXTURE, **moe.FAMILIES["mixtral"]),
    "olmoe": MoEConfig(**MIXTURE, **moe.FAMILIES["olmoe"]),
    "qwen3_moe": MoEConfig(**MIXTURE, **moe.FAMILIES["qwen3-moe"])}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type", huggingface_families.FAMILIES)
def test_transformers_opens_the_tokenizer_of_every_model_type(tmp_path, capsys, model_type):
    """Bytes, and merges of one's own: any text gives our tokens, and the tokens give it back;
    <|endoftext|> in a text ends it there. An import finds the tokenizer again. For a Qwen2
    AutoTokenizer takes the vocabulary alone: a note names the class that reads the whole file."""
    transformers = pytest.importorskip("transformers")
    own = train_tokenizer([" ".join(NASTY * 2) + " the then 1234 don't I'LL\n\nx"], 300)
    texts = [*NASTY, " ".join(NASTY), "a , b .  'll", "".join(map(chr, range(0x250))), "\ue000"]
    opener = transformers.AutoTokenizer
    if model_type == "qwen2":
        opener = transformers.PreTrainedTokenizerFast
    for ours in (get_tokenizer("bytes"), own):
        name, kept, folder = ours.name, tmp_path / f"{ours.name}.pt", tmp_path / ours.name
        weights_only(kept, EXPORTED[model_type], name)
        if ours.file is not None:
            torch.save(torch.load(kept) | dict(tokenizer_file=ours.file), kept)
        huggingface.export_model(kept, folder)
        assert ("PreTrainedTokenizerFast" in capsys.readouterr().err) == (model_type == "qwen2")
        config = json.loads((folder / "config.json").read_text())
        assert huggingface_families.family_of(transformers.AutoConfig.for_model(**config)) is (
            huggingface_families.FAMILIES[model_type])
        theirs = opener.from_pretrained(folder)
        end = ours.eot_token
        assert len(theirs) == end + 1 and theirs.eos_token_id == end
        assert theirs.convert_tokens_to_ids(EOT) == end
        for text in texts:
            tokens = theirs(text, split_special_tokens=True)["input_ids"]
            assert tokens == ours.encode_ordinary(text), text
            assert theirs.decode(tokens) == text
            assert theirs(text + EOT)["input_ids"][-1] == end
        huggingface.import_model(str(folder), tmp_path / f"{name}, back.pt")
        back = checkpoint.load(tmp_path / f"{name}, back.pt")
        assert back["tokenizer"] == name
        assert get_tokenizer(name, back.get("tokenizer_file")).name == name


CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
          "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("program", [None, CHATML])
def test_a_template_goes_to_transformers_and_comes_back(tmp_path, capsys, program):
    """With the tokens that end a generation."""
    pytest.importorskip("transformers")
    own = train_tokenizer(["the answer is the sum of 7 and 8"] * 9, 300)
    own.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    own = type(own)(own.tokenizer)
    weights_only(tmp_path / "a.pt", EXPORTED["llama"], own.name)
    state = torch.load(tmp_path / "a.pt") | dict(
        tokenizer_file=own.file, template="plain" if program is None else hash_of(program), ends=[7])
    if program is not None:
        state["template_file"] = program
    torch.save(state, tmp_path / "a.pt")
    assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")[0] == 0
    status, text, _ = convert(capsys, "import", tmp_path / "hf", tmp_path / "b.pt")
    assert status == 0 and "sample.py --ckpt" in text
    back = checkpoint.load(tmp_path / "b.pt")
    for key in ("tokenizer", "template", "template_file"):
        assert back.get(key) == state.get(key), key
    assert open_file(back["tokenizer_file"]).name == own.name
    ends = {7, own.eot_token} | ({own.backend.token_to_id("<|im_end|>")} if program else set())
    assert set(back["ends"]) == ends


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("activation, tokenizer", [
    ("gelu", "bytes"), ("relu", "bytes"), ("relu", "opt-257"), ("gelu", "gpt2-257")])
def test_fine_tuning_an_export_trains_every_token_and_drops_nothing_unasked(
        tmp_path, capsys, activation, tokenizer):
    """Each row of the embedding gets a gradient, no token is padding, and the dropout is that of
    the training, where transformers' default would be 0.1."""
    transformers = pytest.importorskip("transformers")
    for dropout in (0.0, 0.25):
        folder = tmp_path / f"hf{dropout}"
        cfg = replace(CFG, activation=activation, dropout=dropout)
        weights_only(tmp_path / "a.pt", cfg, tokenizer)
        assert convert(capsys, "export", tmp_path / "a.pt", folder)[0] == 0
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
        table = theirs.get_input_embeddings()
        table.weight = torch.nn.Parameter(table.weight.detach().clone())    # not the head's
        tokens = torch.arange(cfg.vocab_size - 1).view(-1, cfg.seq_len)     # CFG: 16 x 16
        last = torch.arange(cfg.vocab_size - 16, cfg.vocab_size)[None]
        theirs(input_ids=torch.cat([tokens, last])).logits.square().sum().backward()
        assert table.padding_idx is None and table.weight.grad.abs().sum(1).min() > 0
        found = [m.p for m in theirs.modules() if isinstance(m, torch.nn.Dropout)]
        config = theirs.config.to_dict()
        found += [config[name] for name in ("dropout", "attention_dropout", "resid_pdrop",
                                            "embd_pdrop", "attn_pdrop") if name in config]
        assert len(found) >= 2 and set(found) == {dropout}
        end = 256 if tokenizer == "bytes" else None
        ids = theirs.config.bos_token_id, theirs.config.eos_token_id, theirs.config.pad_token_id
        assert ids == (end, end, None) and theirs.config.tie_word_embeddings


def test_an_imported_opt_keeps_its_end_of_text_and_trains_its_padding(tmp_path, capsys):
    """OPT's own tokens: 2 begins and ends a text. 1 pads it, where nothing is learnt anyway."""
    pytest.importorskip("transformers")
    cfg = replace(CFG, vocab_size=50272, activation="relu")
    weights_only(tmp_path / "a.pt", cfg, "opt-50272")
    assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")[0] == 0
    config = json.loads((tmp_path / "hf/config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [2, 2, None]


@pytest.mark.parametrize("change, message", [
    (dict(activation="relu2"), "no architecture of transformers that is known here"),
    (dict(n_kv_head=2), "no architecture of transformers that is known here")])
def test_an_export_refuses_what_has_no_name_there(change, message):
    """As where a student has added it to model.py."""
    pytest.importorskip("transformers")

    @dataclass(frozen=True)
    class Wider(GPTConfig):
        n_kv_head: int = None

        def __post_init__(self):
            pass
    for cfg in (Wider(**change), LlamaConfig(**SHAPE, **llama_sizes.FAMILIES["palm"])):
        with pytest.raises(ValueError, match=message):
            huggingface_families.their_config(cfg)


@pytest.mark.parametrize("change, message", [
    (dict(parameters={"blocks.0.gate.weight": torch.zeros(2, 2)}), "blocks.0.gate.weight"),
    (dict(tokenizer="gpt2"), "has 50257 tokens, but the model's vocabulary 257")])
def test_an_export_refuses_what_would_be_another_model_there(tmp_path, capsys, monkeypatch, change,
                                                             message):
    pytest.importorskip("transformers")
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    weights_only(tmp_path / "a.pt", CFG)
    load = huggingface.load
    monkeypatch.setattr(huggingface, "load", lambda path: load(path) | change)
    result = convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")
    assert result[0] == 2 and message in result[2] and result[2].count("\n") == 1
    assert names_in(tmp_path) == ["a.pt"]


def test_an_export_whose_logits_differ_is_refused(tmp_path, capsys, monkeypatch):
    """As where model.py computes another thing than its config says."""
    pytest.importorskip("transformers")
    weights_only(tmp_path / "a.pt", CFG)
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate="none": x.relu())
    status, _, error = convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")
    assert status == 2 and "GPT2LMHeadModel and GPT have other logits, by" in error
    assert error.count("\n") == 1 and names_in(tmp_path) == ["a.pt"]


LLAMA = LlamaConfig(vocab_size=257, seq_len=16, n_layer=2, n_head=4, n_embd=32, tied=True)


@pytest.mark.parametrize("imported, name, cfg", [
    ("gpt2", "gpt2", CFG), ("smollm2", "smollm2", LLAMA), ("base", "chat", LLAMA)])
def test_the_chapters_conversions_run_as_printed(tmp_path, capsys, monkeypatch, imported, name,
                                                 cfg):
    """Out to a folder, and in from a folder of the name that the chapter gives to the hub."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    Path("out", name).mkdir(parents=True)
    weights_only(Path("out", name, "latest.pt"), cfg)
    back, out = [flags for _, flags in readme_commands("tools.huggingface")
                 if f"{imported}.pt" in flags or f"out/{name}/latest.pt" in flags]
    assert convert(capsys, *out)[0] == 0
    Path(back[1]).parent.mkdir(exist_ok=True)
    Path(out[-1]).rename(back[1])
    assert convert(capsys, *back)[0] == 0 and Path(back[-1]).exists()


def test_weights_from_the_hub_are_trained_on_evaluated_and_sampled(hub, run_train, shards, capsys):
    pytest.importorskip("transformers")
    weights_only(Path("a.pt"), CFG)
    assert convert(capsys, "export", "a.pt", "hub/me/tiny")[0] == 0
    status, text, error = convert(capsys, "import", "me/tiny", "b.pt")
    assert status == 0 and "python train.py --init-from b.pt" in text, error
    flags = ["--data", shards, "--out", "o", "--batch-size", 4]
    status, text, _ = run_train(*flags, "--resume", "b.pt", "--eval-only")
    assert status == 0 and text.startswith("b.pt, step 0, on ")
    assert run_train(*flags, "--init-from", "b.pt", "--steps", 2)[0] == 0
    assert saved(Path("o"), 2)["model"]["n_embd"] == CFG.n_embd
    expect_mistake(run_train("--data", shards, "--out", "p", "--resume", "b.pt"),
                   "b.pt holds weights alone: begin a run with --init-from b.pt instead of --re")
    Path("q").mkdir()
    shutil.copy("b.pt", "q/latest.pt")
    expect_mistake(run_train("--data", shards, "--out", "q"),
                   "alone: begin a run with --init-from q/latest.pt and another --out")
    assert run_train(*flags[:2], "--init-from", "q/latest.pt", "--out", "p", "--steps", 1)[0] == 0
    with mock.patch.object(sys, "argv", ["sample.py", "--ckpt", "b.pt", "--max-tokens", "5"]):
        sample.main()


@pytest.mark.parametrize("flag", ["--init-from", "--resume"])
@pytest.mark.parametrize("name", ["gpt2", "facebook/opt-1.3b"])
def test_train_py_names_the_import_for_a_model_of_the_hub(run_train, shards, tmp_path, monkeypatch,
                                                          flag, name):
    monkeypatch.chdir(tmp_path)
    expect_mistake(run_train("--data", shards, flag, name),
                   f"no checkpoint {name}: give a file of train.py, such as out/latest.pt; "
                   f"`python -m tools.huggingface import {name} {Path(name).name}.pt` makes one of "
                   f"weights, for --init-from and sample.py")


BROKEN = [      # changes of config.json, changes of the tensors (None: it is missing), the answer
    (dict(model_type="phi3"), {}, "its model_type 'phi3' is none of opt, gpt2"),
    (dict(model_type="nothing"), {}, "The checkpoint you are trying to load has model type `noth"),
    (dict(activation_function="gelu"), {}, "activation 'gelu_erf' is neither 'gelu' nor 'relu'"),
    (dict(activation_function="mish"), {}, "its activation_function is 'mish', and not one of"),
    (dict(n_layer="2"), {}, "Validation error for field 'n_layer'"),
    (dict(n_inner=99), {}, "You set `ignore_mismatched_sizes` to `False`"),
    (dict(layer_norm_epsilon=0.1), {}, "GPT have other logits, by"),
    (dict(scale_attn_by_inverse_layer_idx=True), {}, "'scale_attn_by_inverse_layer_idx': True"),
    (dict(add_cross_attention=True), {}, "GPT2LMHeadModel has missing keys there, such as"),
    (dict(quantization_config=dict(quant_method="gptq")), {}, "give the model before it was quant"),
    ({}, {"transformer.h.2.ln_1.bias": None}, "missing keys there, such as transformer.h.2.ln_1.b"),
    ({}, {"transformer.h.2.ln_1.gate": torch.ones(3)}, "unexpected keys there, such as transfo"),
    ({}, {"lm_head.weight": torch.ones(257, 32)}, "lm_head.weight is a parameter of transform"),
    ({}, {"transformer.h.4.ln_1.bias": torch.full((32,), torch.nan)}, "is not finite")]


class MakesAFolder:
    """When it is loaded from a pickle, unless its code is refused."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_conversions_refuse_in_one_line_and_overwrite_nothing(tmp_path, capsys, monkeypatch):
    safetensors = pytest.importorskip("safetensors.torch")
    pytest.importorskip("transformers")
    monkeypatch.chdir(tmp_path)
    weights_only(Path("a.pt"), CFG)
    for folder in ("hf", "gap", "code"):
        assert convert(capsys, "export", "a.pt", folder)[0] == 0
    for folder in ("gap", "code"):
        Path(folder, "model.safetensors").unlink()
    damaged = bytearray(Path("a.pt").read_bytes())
    Path("half.pt").write_bytes(damaged[:-99])
    torch.save(MakesAFolder(), "code/pytorch_model.bin")
    whole = (json.loads(Path("hf/config.json").read_text()),
             safetensors.load_file("hf/model.safetensors"))
    for number, (*changes, _) in enumerate(BROKEN):
        config, tensors = ({name: x for name, x in (one | change).items() if x is not None}
                           for one, change in zip(whole, changes))
        Path(f"{number}").mkdir()
        Path(f"{number}/config.json").write_text(json.dumps(config))
        safetensors.save_file(tensors, f"{number}/model.safetensors", metadata={"format": "pt"})
    before = names_in(tmp_path)
    for arguments, message in [
            *((["import", f"{number}", "b.pt"], broken[2]) for number, broken in enumerate(BROKEN)),
            (["export", "a.pt", "."], " exists: give a new folder"),
            (["export", "half.pt", "new"], "half.pt is damaged"),
            (["import", ".", "a.pt"], "a.pt exists: give a new file"),
            (["import", ".", "b.pt"], "config.json"),
            (["import", "a.pt", "b.pt"], "a.pt is a file: give the folder of a model"),
            (["import", "gap", "b.pt"], "gap is refused: Error no file named model.safetensors"),
            ([], "required: command, FROM, TO"), (["import", "hf"], "required: TO"),
            (["convert", "a.pt", "b"], "invalid choice: 'convert'"),
            (["import", "code", "b.pt"], "code is refused: ")]:
        result = convert(capsys, *arguments)
        assert result[0] == 2 and message in result[2], result
        assert result[2].startswith("tools.huggingface: ") and result[2].count("\n") == 1, result
    with mock.patch.object(huggingface, "verify", side_effect=KeyboardInterrupt):
        assert convert(capsys, "export", "a.pt", "new") == (1, "", "")
    with mock.patch.dict(sys.modules, {"transformers": None}):
        for arguments in (["export", "a.pt", "new"], ["import", "hf", "b.pt"]):
            assert "pip install transformers" in convert(capsys, *arguments)[2]
    assert names_in(tmp_path) == before


@pytest.mark.parametrize("name, files, status, message", [
    ("none", [], 2, "me/none is neither a folder nor a model on the hub that you may read (hf auth "
     "login): 401 Client Error\n"),
    ("other", ["config.json", "model.safetensors"], 2, "Unrecognized model in cache/me/other"),
    ("away", [], 1, "there is no folder me/away, and the model cannot be downloaded ([Errno -2]")])
def test_a_model_that_the_hub_does_not_give_is_named(hub, capsys, name, files, status, message):
    """In one line, before any tensor is downloaded."""
    for file in files:
        Path("hub/me", name).mkdir(parents=True, exist_ok=True)
        Path("hub/me", name, file).write_text("{}")
    found, out, error = convert(capsys, "import", f"me/{name}", "b.pt")
    assert (found, out, error.count("\n")) == (status, "", 1) and message in error, error
    assert "model.safetensors" not in hub


def test_a_disk_that_is_full_during_a_conversion_is_no_mistake(tmp_path, capsys):
    """Exit status 1, not 2, and one line."""
    pytest.importorskip("transformers")
    file, folder = tmp_path / "a.pt", tmp_path / "a"
    weights_only(file, CFG)
    with no_file_above(20_000):
        status, _, error = convert(capsys, "export", file, folder)
    assert status == 1 and "the weights could not be written" in error, error
    assert error.count("\n") == 1 and not folder.exists()
    assert convert(capsys, "export", file, folder)[0] == 0
    with no_file_above(20_000):
        status, _, error = convert(capsys, "import", folder, tmp_path / "b.pt")
    assert status == 1 and "b.pt could not be written" in error, error
    assert error.count("\n") == 1 and not (tmp_path / "b.pt").exists()


def test_a_model_of_pickles_is_downloaded(hub, capsys):
    safetensors = pytest.importorskip("safetensors.torch")
    weights_only(Path("a.pt"), CFG)
    assert convert(capsys, "export", "a.pt", "hub/me/pickles")[0] == 0
    tensors = safetensors.load_file("hub/me/pickles/model.safetensors")
    Path("hub/me/pickles/model.safetensors").unlink()
    torch.save(tensors, "hub/me/pickles/pytorch_model.bin")
    assert convert(capsys, "import", "me/pickles", "b.pt")[0] == 0
    one, two = (checkpoint.load(Path(file))["parameters"] for file in ("a.pt", "b.pt"))
    assert all(full.equal(two[name]) for name, full in one.items())
