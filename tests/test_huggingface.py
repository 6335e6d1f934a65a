"""tools/huggingface.py: models and tokenizers to transformers and back.

    python -m pytest tests/test_huggingface.py
"""
import functools
import json
import os
import shutil
import sys
import tempfile
from contextlib import suppress
from dataclasses import replace
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
from models.llama import LlamaConfig
from models.llama_sizes import FAMILIES
from models.moe import FAMILIES as MIXTURES, MoEConfig
from tests.harness import (CFG, NASTY, SHARED, names_in, no_file_above, readme_commands, relative,
                           saved, tokens_of, weights_only)
from tools import huggingface, huggingface_families

pytest.importorskip("transformers")
import safetensors.torch
import transformers

pytestmark = pytest.mark.filterwarnings("ignore")       # what transformers warns of is not ours
SHAPE = dict(vocab_size=350, seq_len=16, n_layer=2, n_head=2, n_embd=16)
MIXTURE = SHAPE | dict(n_expert=3, n_active=2)
EXPORTED = {                                    # model_type in config.json: a model that gets it
    "gpt2": GPTConfig(**SHAPE), "opt": GPTConfig(**SHAPE, activation="relu"),
    "llama": LlamaConfig(**SHAPE, rope_scaling=(8.0, 1.0, 4.0, 8.0)),
    "mistral": LlamaConfig(**SHAPE, window=5),
    "qwen2": LlamaConfig(**SHAPE, **FAMILIES["qwen2"], n_kv_head=1),
    "qwen3": LlamaConfig(**SHAPE | dict(n_embd=24), head_dim=16, **FAMILIES["qwen3"]),
    "olmo": LlamaConfig(**SHAPE, **FAMILIES["olmo"], tied=True),
    "olmo2": LlamaConfig(**SHAPE, **FAMILIES["olmo2"]),
    "gpt_neox": LlamaConfig(**SHAPE, hidden=40, **FAMILIES["neox"]),
    "phi": LlamaConfig(**SHAPE, hidden=40, **FAMILIES["phi"]),
    "gptj": LlamaConfig(**SHAPE, hidden=40, **FAMILIES["gptj"] | dict(rotary=0.5)),
    "galactica": LlamaConfig(**SHAPE, hidden=40, **FAMILIES["galactica"]),
    "mixtral": MoEConfig(**MIXTURE, **MIXTURES["mixtral"]),
    "olmoe": MoEConfig(**MIXTURE, **MIXTURES["olmoe"]),
    "qwen3_moe": MoEConfig(**MIXTURE, **MIXTURES["qwen3-moe"])}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """exported(model_type) -> the folder of a random model, beside its checkpoint a.pt."""
    @functools.cache
    def make(model_type):
        folder = tmp_path_factory.mktemp(model_type)
        weights_only(folder / "a.pt", EXPORTED[model_type], "own-350")
        huggingface.export_model(folder / "a.pt", folder / "hf")
        return folder / "hf"
    return make


def changed(source, folder, config, tensors):
    """A copy of a model with changes of config.json and of its tensors (None: without it)."""
    pairs = ((json.loads((source / "config.json").read_text()), config),
             (safetensors.torch.load_file(source / "model.safetensors"), tensors))
    config, tensors = ({name: x for name, x in (whole | change).items() if x is not None}
                       for whole, change in pairs)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def convert(capsys, *arguments):
    """python -m tools.huggingface with these arguments -> (exit status, stdout, stderr)."""
    status = 0
    with mock.patch.object(sys, "argv", ["tools.huggingface", *map(str, arguments)]):
        try:
            huggingface.main()
        except SystemExit as end:
            status = end.code
    return status, *capsys.readouterr()


# ---- Both ways -------------------------------------------------------------------------------

def write_form(tensors, form, folder):
    """Write tensors as other programs do."""
    if form == "wrapped":                   # by DistributedDataParallel and torch.compile
        tensors = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    if form in ("one file", "wrapped"):
        return safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    names, suffix = sorted(tensors), ".safetensors" if form == "shards" else ".bin"
    stem = "model" if form == "shards" else "pytorch_model"
    files = {name: f"{stem}-0000{1 + i % 2}-of-00002{suffix}" for i, name in enumerate(names)}
    for file in set(files.values()):
        part = {name: tensors[name] for name in names if files[name] == file}
        if form == "shards":
            safetensors.torch.save_file(part, folder / file, {"format": "pt"})
        else:
            torch.save(part, folder / file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(
        dict(metadata={}, weight_map=files)))


@pytest.mark.claim("Models of 15 architectures go to `transformers` and come back, bit by bit.")
@pytest.mark.parametrize("model_type", EXPORTED)
def test_a_model_goes_to_transformers_and_comes_back(exported, tmp_path, model_type):
    """In files of each type and form."""
    source = exported(model_type)
    state, config = checkpoint.load(source.parent / "a.pt"), source / "config.json"
    written = safetensors.torch.load_file(source / "model.safetensors")
    opened = transformers.AutoModelForCausalLM.from_pretrained(source)
    assert huggingface_families.family_of(opened.config) is (
        huggingface_families.FAMILIES[model_type])
    for form, dtype in (("one file", torch.bfloat16), ("shards", torch.float32),
                        ("pickles", torch.float16), ("wrapped", torch.float32)):
        folder, file = tmp_path / form, tmp_path / f"{form}.pt"
        folder.mkdir()
        shutil.copy(config, folder)
        write_form({name: tensor.to(dtype) for name, tensor in written.items()}, form, folder)
        huggingface.import_model(str(folder), file)
        back = checkpoint.load(file)
        alike = {"balance_loss", "z_loss"}          # of training
        assert ({key: x for key, x in back["model"].items() if key not in alike}
                == {key: x for key, x in state["model"].items() if key not in alike})
        for name, full in state["parameters"].items():
            assert back["parameters"][name].equal(full.to(dtype).float()), (form, name)


def test_fine_tuning_an_export_trains_every_token_and_drops_nothing_unasked(tmp_path, capsys):
    """Each row of the embedding gets a gradient, no token is padding, and the dropout is that of
    the training, where transformers' default would be 0.1. OPT's token 2 begins and ends."""
    for activation, tokenizer, end in [("gelu", "bytes", 256), ("relu", "opt-50272", 2),
                                       ("gelu", "gpt2-257", None)]:
        rows = 50272 if end == 2 else 257
        cfg = replace(CFG, vocab_size=rows, activation=activation, dropout=0.25)
        weights_only(tmp_path / "a.pt", cfg, tokenizer)
        folder = tmp_path / tokenizer
        huggingface.export_model(tmp_path / "a.pt", folder)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder).train()
        table = theirs.get_input_embeddings()
        table.weight = torch.nn.Parameter(table.weight.detach().clone())    # not the head's
        theirs(input_ids=torch.arange(16)[None]).logits.square().sum().backward()
        assert table.padding_idx is None and table.weight.grad[:16].abs().sum(1).min() > 0
        found = [m.p for m in theirs.modules() if isinstance(m, torch.nn.Dropout)]
        config = theirs.config.to_dict()
        found += [config[name] for name in huggingface_families.DROPOUTS if name in config]
        assert len(found) >= 2 and set(found) == {0.25}
        assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [end, end, None]


# ---- Tokenizers ------------------------------------------------------------------------------

def kept_of(folder, name=None, model_type="gpt2"):
    """What an import keeps of the tokenizer in a folder whose config.json names it so."""
    state = {}
    huggingface.add_tokenizer(state, folder, SimpleNamespace(
        model_type=model_type, vocab_size=50257, **{} if name is None else {"tokenizer": name}))
    return state


def test_the_exported_tokenizer_is_gpt2s(tmp_path, monkeypatch):
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    elif not Path(tempfile.gettempdir(), "data-gym-cache").is_dir():        # tiktoken's own
        pytest.skip("needs GPT-2's vocabulary in ../shared/tiktoken_cache or tiktoken's cache")
    assert kept_of(tmp_path) == dict(tokenizer="gpt2")                      # without files
    assert kept_of(tmp_path, model_type="opt") == dict(tokenizer="opt-50257")
    weights_only(tmp_path / "a.pt", replace(CFG, vocab_size=50257, n_layer=1), "gpt2")
    huggingface.export_model(tmp_path / "a.pt", tmp_path / "hf")
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), (
        get_tokenizer("gpt2"))
    text = " ".join(NASTY)
    assert theirs(text)["input_ids"] == ours.encoding.encode(text, allowed_special="all")
    assert kept_of(tmp_path / "hf", "gpt2") == kept_of(tmp_path / "hf") == dict(tokenizer="gpt2")
    content = json.loads((tmp_path / "hf/tokenizer.json").read_text())
    content["model"]["vocab"] |= {"\u0120informants": 50255, "\u0120gazed": 50254}
    (tmp_path / "hf/tokenizer.json").write_text(json.dumps(content))
    assert kept_of(tmp_path / "hf")["tokenizer"].startswith("hf-")


def test_a_tokenizer_that_is_put_in_the_folder_is_kept(tmp_path, capsys):
    """As the import advises. Of a tokenizer.model alone a note says how to convert it."""
    kept = to_huggingface(get_tokenizer("bytes"))
    kept.tokenizer.save_pretrained(tmp_path / "hf")
    assert kept_of(tmp_path / "hf", "llama-257")["tokenizer"] == kept.name
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e")
    assert kept_of(tmp_path, "llama-257") == dict(tokenizer="llama-257")
    assert f".save_pretrained('{tmp_path}')" in capsys.readouterr().err


CHATML = ("{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + "
          "'<|im_end|>\n' }}{% endfor %}{% if add_generation_prompt %}"
          "{{ '<|im_start|>assistant\n' }}{% endif %}")


@pytest.mark.parametrize("model_type", EXPORTED)
def test_transformers_opens_the_tokenizer_of_every_model_type(tmp_path, capsys, model_type):
    """Any text gives our tokens, and the tokens give it back; <|endoftext|> in a text ends it
    there. An import finds the tokenizer again, the template of conversations and the tokens that
    end a generation. For a Qwen2 AutoTokenizer takes the vocabulary alone: a note names the class
    that reads the whole file."""
    own = train_tokenizer([" ".join(NASTY * 2) + " the then 1234 don't I'LL\n\nx"], 300)
    own.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    own = type(own)(own.tokenizer)
    opener = transformers.AutoTokenizer
    if model_type == "qwen2":
        opener = transformers.PreTrainedTokenizerFast
    for ours, template in ((get_tokenizer("bytes"), {"template": "plain"}),
                           (own, {"template": hash_of(CHATML), "template_file": CHATML})):
        kept, folder, back = (tmp_path / f"{ours.name}{end}" for end in (".pt", "", ", back.pt"))
        weights_only(kept, EXPORTED[model_type], ours.name)
        if ours.file is not None:
            template["tokenizer_file"] = ours.file
        torch.save(torch.load(kept) | template | dict(ends=[7]), kept)
        huggingface.export_model(kept, folder)
        assert ("PreTrainedTokenizerFast" in capsys.readouterr().err) == (model_type == "qwen2")
        theirs = opener.from_pretrained(folder)
        for text in [*NASTY, " ".join(NASTY), "a , b .  'll", "".join(map(chr, range(0x250)))]:
            tokens = theirs(text, split_special_tokens=True)["input_ids"]
            assert tokens == ours.encode_ordinary(text) and theirs.decode(tokens) == text
            assert theirs(text + EOT)["input_ids"][-1] == ours.eot_token
        huggingface.import_model(str(folder), back)
        state = checkpoint.load(back)
        assert state["tokenizer"] == ours.name and {7, ours.eot_token} <= set(state["ends"])
        for key in ("template", "template_file"):
            assert state.get(key) == template.get(key)
        if ours is own:
            assert open_file(state["tokenizer_file"]).name == own.name
            assert own.backend.token_to_id("<|im_end|>") in state["ends"]


# ---- What is refused -------------------------------------------------------------------------

LAYER = "transformer.h.1.ln_1"
REFUSED = [     # a model, changes of config.json, changes of the tensors, the answer
    ("gpt2", dict(model_type="phi3"), {}, "its model_type 'phi3' is none of opt, gpt2"),
    ("gpt2", dict(model_type="nothing"), {}, "The checkpoint you are trying to load has model typ"),
    ("gpt2", dict(activation_function="mish"), {}, "its activation_function is 'mish', and not one"),
    ("gpt2", dict(n_layer="2"), {}, "Validation error for field 'n_layer'"),
    ("gpt2", dict(n_inner=99), {}, "mismatched keys there, such as"),
    ("gpt2", dict(layer_norm_epsilon=0.1, resid_pdrop=0.5), {},
     "GPT2Config in {'layer_norm_epsilon': 0.1}\n"),
    ("gpt2", dict(scale_attn_by_inverse_layer_idx=True), {},
     "GPT2Config in {'scale_attn_by_inverse_layer_idx': True"),
    ("gpt2", dict(quantization_config=dict(quant_method="gptq")), {}, "its quantization_config is"),
    ("gpt2", {}, {f"{LAYER}.bias": None}, f"missing keys there, such as {LAYER}.bias"),
    ("gpt2", {}, {f"{LAYER}.gate": torch.ones(3)}, f"unexpected keys there, such as {LAYER}.gate"),
    ("gpt2", {}, {f"{LAYER}.bias": torch.full((16,), torch.nan)}, "is not finite"),
    ("gpt2", {}, {f"{LAYER}.weight": torch.ones(16, dtype=torch.int8)},
     f"model.safetensors is refused: {LAYER}.weight is torch.int8, and not of floating point"),
    ("phi", dict(qk_layernorm=True), {}, "missing keys there, such as model.layers.0.self_attn"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4), {}, "its sliding_window is 4: no q"),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0)), {}, "its rope_type is 'yar"),
    ("llama", dict(rope_parameters=None, rope_scaling=dict(type="dynamic", factor=2.0)), {},
     "its rope_type is 'dynamic'"),
    ("olmo", dict(clip_qkv=8.0), {}, "its clip_qkv is 8.0: no olmo here has one"),
    ("olmo2", dict(tie_word_embeddings=True), {}, "lm_head.weight is a parameter of transformers'"),
    ("mixtral", dict(num_experts_per_tok=6), {}, "n_active 6 is not between 1 and n_expert 3"),
    ("qwen3_moe", dict(mlp_only_layers=[0]), {}, "missing keys there")]


class MakesAFolder:
    """When it is loaded from a pickle, unless its code is refused."""

    def __reduce__(self):
        return os.mkdir, ("ran",)


def test_conversions_refuse_in_one_line_and_overwrite_nothing(exported, tmp_path, capsys,
                                                              monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (model_type, config, tensors, _) in enumerate(REFUSED):
        changed(exported(model_type), Path(str(number)), config, tensors)
    whole = exported("gpt2")
    shutil.copy(whole.parent / "a.pt", "a.pt")
    Path("half.pt").write_bytes(Path("a.pt").read_bytes()[:-99])
    weights_only(Path("gpt2.pt"), CFG, "gpt2")
    for name in ("gap", "code", "cut", "nested", "shard"):
        Path(name).mkdir()
        shutil.copy(whole / "config.json", name)
    tensors = safetensors.torch.load_file(whole / "model.safetensors")
    torch.save(MakesAFolder(), "code/pytorch_model.bin")
    torch.save(dict(state_dict=tensors, epoch=3), "nested/pytorch_model.bin")
    torch.save(tensors, "cut/pytorch_model.bin")
    os.truncate("cut/pytorch_model.bin", 9999)
    write_form(tensors, "shards", Path("shard"))
    os.truncate("shard/model-00002-of-00002.safetensors", 9999)
    Path("model.gguf").write_bytes(b"GGUF")
    before = names_in(tmp_path)
    for arguments, message in [
            *((["import", number, "b.pt"], refused[3]) for number, refused in enumerate(REFUSED)),
            (["export", "a.pt", "."], " exists: give a new folder"),
            (["export", "half.pt", "new"], "half.pt is damaged"),
            (["export", "gpt2.pt", "new"], "has 50257 tokens, but the model's vocabulary 257"),
            (["import", ".", "a.pt"], "a.pt exists: give a new file"),
            (["import", ".", "b.pt"], "config.json"),
            (["import", "a.pt", "b.pt"], "a.pt is a file: give the folder of a model"),
            (["import", "model.gguf", "b.pt"], "model.gguf is a file: give the folder of a model"),
            (["import", "https://huggingface.co/gpt2", "b.pt"], "gpt2 is neither a folder nor a mo"),
            (["import", "gap", "b.pt"], "gap is refused: Error no file named model.safetensors"),
            (["import", "code", "b.pt"], "code/pytorch_model.bin is refused: "),
            (["import", "nested", "b.pt"], "n is refused: state_dict is dict, and not of floating"),
            (["import", "cut", "b.pt"], "cut/pytorch_model.bin is refused: "),
            (["import", "shard", "b.pt"], "2.safetensors is refused: Error while deserializing"),
            ([], "required: command, FROM, TO"), (["convert", "a.pt", "b"], "invalid choice: 'con")]:
        result = convert(capsys, *arguments)
        assert result[0] == 2 and message in result[2], result
        assert result[2].startswith("tools.huggingface: ") and result[2].count("\n") == 1, result
    with mock.patch.object(huggingface, "verify", side_effect=KeyboardInterrupt):
        assert convert(capsys, "export", "a.pt", "new") == (1, "", "")
    with mock.patch.dict(sys.modules, {"transformers": None}):
        for arguments in (["export", "a.pt", "new"], ["import", whole, "b.pt"]):
            assert "pip install transformers" in convert(capsys, *arguments)[2]
    assert names_in(tmp_path) == before


@pytest.mark.claim("A conversion ends with equal logits, or is refused.")
@pytest.mark.parametrize("model_type, changes", [
    ("llama", dict(norm_eps=1e-6)), ("llama", dict(rope_theta=5e5)), ("llama", dict(rope_scaling=())),
    ("mistral", dict(window=0)), ("mistral", dict(window=6)), ("gpt_neox", dict(residual="serial")),
    ("gpt_neox", dict(rotary=0.5)), ("gpt_neox", dict(activation="gelu_erf")),
    ("gptj", dict(rotary=0.25)), ("galactica", dict(activation="gelu")),
    ("olmoe", dict(normalised=True))])
def test_the_check_sees_a_config_that_is_another(exported, model_type, changes):
    """The parameters fit both models. The logits tell."""
    config, cfg = huggingface.read_config(exported(model_type))
    with pytest.raises(ValueError, match="have other logits"):
        huggingface.read_parameters(exported(model_type), config, replace(cfg, **changes))


def test_an_export_whose_logits_differ_is_refused(exported, tmp_path, capsys, monkeypatch):
    """As where model.py computes another thing than its config says."""
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate="none": x.relu())
    status, _, error = convert(capsys, "export", exported("gpt2").parent / "a.pt", tmp_path / "hf")
    assert status == 2 and "GPT2LMHeadModel and GPT have other logits, by" in error
    assert error.count("\n") == 1 and names_in(tmp_path) == []


@pytest.mark.parametrize("cfg", [
    LlamaConfig(**SHAPE, **FAMILIES["palm"]), MoEConfig(**MIXTURE, balance_bias=0.01),
    MoEConfig(**MIXTURE, shared_hidden=16)])
def test_an_export_refuses_what_has_no_name_there(cfg):
    with pytest.raises(ValueError, match="no architecture of transformers that is known here"):
        huggingface_families.their_config(cfg)


def other_values(key, value):
    """What a key of config.json might have instead."""
    if isinstance(value, dict):
        return [value | dict(rope_theta=77.0), value | dict(rope_type="linear", factor=2.0)]
    if isinstance(value, bool):
        return [not value]
    if isinstance(value, (int, float)):
        return [2 * value + 1]
    if isinstance(value, str) and "act" in key:
        return ["relu" if value != "relu" else "gelu"]
    return [4, True] if value is None else []


@pytest.mark.slow
@pytest.mark.parametrize("model_type", EXPORTED)
@torch.no_grad()
def test_a_key_of_config_json_that_is_changed_is_honoured_or_refused(exported, tmp_path,
                                                                     model_type):
    """Each key in turn: an import has transformers' logits, or there is none."""
    source, count = exported(model_type), 0
    of_files = {"model_type", "vocab_size", "architectures", "dtype", "tokenizer", "id2label",
                "label2id", "transformers_version"}
    tokens = tokens_of(EXPORTED[model_type], 2)
    for key, value in transformers.AutoConfig.from_pretrained(source).to_dict().items():
        for other in other_values(key, value) if key not in of_files else []:
            folder, count = tmp_path / f"{count}", count + 1
            changed(source, folder, {key: other}, {})
            with suppress(ValueError):
                huggingface.import_model(str(folder), folder / "a.pt")
                ours, _ = checkpoint.load_model(folder / "a.pt")
                theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
                text = tokens[:, :ours.cfg.seq_len]
                assert relative(ours(text), theirs(text).logits) < 2e-6, (key, other)
    assert count >= 15


# ---- The hub, the disk, the chapter ----------------------------------------------------------

@pytest.fixture
def hub(tmp_path, monkeypatch):
    """huggingface_hub, as if the models of the folder hub/ were on the hub; the working directory
    is the folder that holds hub/. Gives the names of the files that were asked for."""
    import huggingface_hub
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


@pytest.mark.parametrize("form", ["shards", "pickles"])
def test_weights_from_the_hub_are_trained_on_evaluated_and_sampled(hub, run_train, shards, capsys,
                                                                   form):
    """What generation_config.json says of drawing tokens is told as flags."""
    weights_only(Path("a.pt"), CFG)
    huggingface.export_model(Path("a.pt"), Path("hub/me/tiny"))
    tensors = safetensors.torch.load_file("hub/me/tiny/model.safetensors")
    Path("hub/me/tiny/model.safetensors").rename("hub/me/tiny/consolidated.safetensors")
    write_form(tensors, form, Path("hub/me/tiny"))
    Path("hub/me/tiny/generation_config.json").write_text('{"do_sample": true, "top_k": 5}')
    capsys.readouterr()
    status, text, error = convert(capsys, "import", "me/tiny", "b.pt")
    assert (status, error) == (0, "tools.huggingface: note: its generation_config.json draws tokens "
                               "as sample.py --top-k 5 does\n")
    assert "python train.py --init-from b.pt" in text and "consolidated.safetensors" not in hub
    flags = ["--data", shards, "--out", "o", "--batch-size", 4]
    status, text, _ = run_train(*flags, "--resume", "b.pt", "--eval-only")
    assert status == 0 and text.startswith("b.pt, step 0, on ")
    assert run_train(*flags, "--init-from", "b.pt", "--steps", 2)[0] == 0
    assert saved(Path("o"), 2)["model"]["n_embd"] == CFG.n_embd
    with mock.patch.object(sys, "argv", ["sample.py", "--ckpt", "b.pt", "--max-tokens", "5"]):
        sample.main()


def test_a_disk_that_is_full_during_a_conversion_is_no_mistake(exported, tmp_path, capsys):
    """Exit status 1, not 2, and one line."""
    folder, new = exported("mixtral"), tmp_path / "new"
    for arguments, message in [(["export", folder.parent / "a.pt", new], "the weights could not be"),
                               (["import", folder, new], "new could not be written")]:
        with no_file_above(20_000):
            status, _, error = convert(capsys, *arguments)
        assert status == 1 and message in error and error.count("\n") == 1, error
        assert not new.exists()


LLAMA = LlamaConfig(vocab_size=257, seq_len=16, n_layer=2, n_head=4, n_embd=32, tied=True)


@pytest.mark.parametrize("imported, name, cfg", [
    ("gpt2", "gpt2", CFG), ("smollm2", "smollm2", LLAMA), ("base", "chat", LLAMA)])
def test_the_chapters_conversions_run_as_printed(tmp_path, capsys, monkeypatch, imported, name,
                                                 cfg):
    """Out to a folder, and in from a folder of the name that the chapter gives to the hub."""
    monkeypatch.chdir(tmp_path)
    Path("out", name).mkdir(parents=True)
    weights_only(Path("out", name, "latest.pt"), cfg)
    back, out = [flags for _, flags in readme_commands("tools.huggingface")
                 if f"{imported}.pt" in flags or f"out/{name}/latest.pt" in flags]
    assert convert(capsys, *out)[0] == 0
    Path(back[1]).parent.mkdir(exist_ok=True)
    Path(out[-1]).rename(back[1])
    assert convert(capsys, *back)[0] == 0 and Path(back[-1]).exists()
