"""tools/huggingface.py: models and tokenizers to transformers and back."""
import json
import os
import shutil
import sys
from contextlib import suppress
from dataclasses import replace
from fnmatch import fnmatch
from pathlib import Path
from unittest import mock

import pytest
import torch

import checkpoint
from corpus.documents import EOT
from corpus.huggingface_tokenizers import open_file, train_tokenizer
from corpus.templates import hash_of
from corpus.tokenizers import get_tokenizer
from tests.commands import NASTY, SHARED, expect_mistake, run_main
from tests.harness import CFG, names_in, no_file_above, relative, tokens_of, weights_only
from tools import huggingface, huggingface_families

transformers = pytest.importorskip("transformers")
import huggingface_hub
from safetensors.torch import load_file, save_file
from tests.test_huggingface_tokenizers import CHATML
from tests.test_transformers import THEIRS, our_config, theirs_and_ours

pytestmark = pytest.mark.filterwarnings("ignore")       # what transformers warns of is not ours


def write_form(tensors, form, folder):
    """Write tensors in two files, as other programs do."""
    if form == "wrapped":                   # by DistributedDataParallel and torch.compile
        tensors = {f"module._orig_mod.{name}": tensor for name, tensor in tensors.items()}
    stem, suffix, save = "model", ".safetensors", save_file
    if form == "pickles":
        stem, suffix, save = "pytorch_model", ".bin", torch.save
    files = {name: f"{stem}-0000{1 + i % 2}-of-00002{suffix}" for i, name in enumerate(tensors)}
    for file in set(files.values()):
        save({name: tensors[name] for name in files if files[name] == file}, folder / file)
    (folder / f"{stem}{suffix}.index.json").write_text(json.dumps(
        dict(metadata={}, weight_map=files)))


@pytest.mark.claim("Models of 15 architectures go to `transformers` and come back, bit by bit.")
@pytest.mark.parametrize("name", THEIRS)
def test_a_model_goes_to_transformers_and_comes_back(theirs_and_ours, tmp_path, name):
    """transformers opens an export with the weights that an import had, and an import reads it from
    files of three types and forms, of which each model has one."""
    folder, _, file = theirs_and_ours(name)
    huggingface.export_model(file, tmp_path / "out")
    before, after = (transformers.AutoModelForCausalLM.from_pretrained(one)
                     for one in (folder, tmp_path / "out"))
    for key in ("model_type", "router_aux_loss_coef", "sliding_window"):
        assert getattr(after.config, key, None) == getattr(before.config, key, None)
    expected = before.state_dict()
    assert after.state_dict().keys() == expected.keys()
    assert all(full.equal(expected[key]) for key, full in after.state_dict().items())
    written = load_file(tmp_path / "out/model.safetensors")
    form, dtype = [("shards", torch.bfloat16), ("pickles", torch.float16),
                   ("wrapped", torch.float32)][[*THEIRS].index(name) % 3]
    (tmp_path / form).mkdir()
    shutil.copy(tmp_path / "out/config.json", tmp_path / form)
    write_form({key: tensor.to(dtype) for key, tensor in written.items()}, form, tmp_path / form)
    huggingface.import_model(str(tmp_path / form), tmp_path / "a.pt")
    state, back = checkpoint.load(file), checkpoint.load(tmp_path / "a.pt")
    assert back["model"] == state["model"]
    for key, full in state["parameters"].items():
        assert back["parameters"][key].equal(full.to(dtype).float()), (form, key)


@pytest.mark.parametrize("activation, tokenizer, end", [
    ("gelu", "bytes", 256), ("relu", "opt-50272", 2), ("gelu", "gpt2-257", None)])
def test_an_export_pads_nothing_and_drops_as_in_training(tmp_path, activation, tokenizer, end):
    """Fine-tuned there, it would learn nothing of a token that pads. (transformers' default dropout
    is 0.1.) OPT's token 2 begins and ends."""
    cfg = replace(CFG, activation=activation, dropout=0.25)
    weights_only(tmp_path / "a.pt", cfg, tokenizer)
    huggingface.export_model(tmp_path / "a.pt", tmp_path / "hf")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "hf").to_dict()
    assert {config[key] for key in huggingface_families.DROPOUTS if key in config} == {0.25}
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [end, end, None]


# ---- Tokenizers ------------------------------------------------------------------------------

def kept_of(folder, config=transformers.GPT2Config()):
    """What an import keeps of the tokenizer in a folder."""
    state = {}
    huggingface.add_tokenizer(state, folder, config)
    return state


def test_the_exported_tokenizer_is_gpt2s(tmp_path, monkeypatch, capsys):
    """An import knows it again by its words. Without a file that can be read it is told by name."""
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    try:
        get_tokenizer("gpt2")
    except ConnectionError as error:
        pytest.skip(str(error))
    assert kept_of(tmp_path) == dict(tokenizer="gpt2")
    (tmp_path / "tokenizer.model").write_bytes(b"\x0e")
    assert kept_of(tmp_path, transformers.OPTConfig()) == dict(tokenizer="opt-50272")
    assert f".save_pretrained('{tmp_path}') makes one of" in capsys.readouterr().err
    weights_only(tmp_path / "a.pt", replace(CFG, vocab_size=50257, n_layer=1), "gpt2")
    folder = tmp_path / "hf"
    huggingface.export_model(tmp_path / "a.pt", folder)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)(" ".join(NASTY))["input_ids"]
    assert tokens == get_tokenizer("gpt2").encoding.encode(" ".join(NASTY), allowed_special="all")
    assert kept_of(folder) == dict(tokenizer="gpt2")
    content = json.loads((folder / "tokenizer.json").read_text())
    content["model"]["vocab"] |= {"\u0120informants": 50255, "\u0120gazed": 50254}
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert kept_of(folder)["tokenizer"].startswith("hf-")


@pytest.mark.parametrize("name", huggingface_families.FAMILIES)
def test_transformers_opens_the_tokenizer_of_every_model(tmp_path, capsys, name):
    """Any text gives our tokens, and the tokens give it back; <|endoftext|> in a text ends it
    there. An import finds the tokenizer again, the template of conversations and the tokens that
    end a generation. For a Qwen2 AutoTokenizer takes the vocabulary alone: a note names the class
    that reads the whole file."""
    opener = "PreTrainedTokenizerFast" if name == "qwen2" else "AutoTokenizer"
    ours = train_tokenizer([" ".join(NASTY * 2) + " the then 1234 don't I'LL\n\nx"], 300)
    ours.backend.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    ours = type(ours)(ours.tokenizer)
    template = dict(template=hash_of(CHATML), template_file=CHATML)
    weights_only(tmp_path / "a.pt", our_config(name, vocab_size=350), ours.name)
    state = torch.load(tmp_path / "a.pt") | template | dict(tokenizer_file=ours.file, ends=[7])
    torch.save(state, tmp_path / "a.pt")
    huggingface.export_model(tmp_path / "a.pt", tmp_path / "hf")
    assert ("PreTrainedTokenizerFast" in capsys.readouterr().err) == (name == "qwen2")
    theirs = getattr(transformers, opener).from_pretrained(tmp_path / "hf")
    for text in [*NASTY, " ".join(NASTY), "a , b .  'll", "".join(map(chr, range(0x250)))]:
        tokens = theirs(text, split_special_tokens=True)["input_ids"]
        assert tokens == ours.encode_ordinary(text) and theirs.decode(tokens) == text
        assert theirs(text + EOT)["input_ids"][-1] == ours.eot_token
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "b.pt")
    state = checkpoint.load(tmp_path / "b.pt")
    assert state["tokenizer"] == open_file(state["tokenizer_file"]).name == ours.name
    assert set(state["ends"]) == {7, ours.eot_token, ours.backend.token_to_id("<|im_end|>")}
    assert template.items() <= state.items()


# ---- What is refused -------------------------------------------------------------------------

LAYER = "transformer.h.1.ln_1"
REFUSED = [     # a model, changes of config.json, changes of the tensors, words of the answer
    ("gpt2", dict(model_type="phi3"), {}, "model_type 'phi3' opt, gpt2"),
    ("gpt2", dict(model_type="nothing"), {}, "`nothing` does not recognize"),
    ("gpt2", dict(activation_function="mish"), {}, "activation_function 'mish'"),
    ("gpt2", dict(n_layer="2"), {}, "'n_layer'"),
    ("gpt2", dict(n_inner=99), {}, "mismatched keys"),
    ("gpt2", dict(layer_norm_epsilon=0.1, resid_pdrop=0.5), {}, "{'layer_norm_epsilon': 0.1}\n"),
    ("gpt2", dict(quantization_config=dict(quant_method="gptq")), {}, "quantization_config"),
    ("gpt2", {}, {f"{LAYER}.bias": None}, f"missing keys {LAYER}.bias"),
    ("gpt2", {}, {f"{LAYER}.gate": torch.ones(3)}, f"unexpected keys {LAYER}.gate"),
    ("gpt2", {}, {f"{LAYER}.bias": torch.full((48,), torch.nan)}, "not finite"),
    ("gpt2", {}, {f"{LAYER}.weight": torch.ones(48, dtype=torch.int8)},
     f"model.safetensors {LAYER}.weight torch.int8"),
    ("qwen2", dict(use_sliding_window=True, sliding_window=4), {}, "sliding_window 4"),
    ("llama", dict(rope_parameters=dict(rope_type="yarn", factor=4.0)), {}, "rope_type 'yarn'"),
    ("llama", dict(rope_parameters=None, rope_scaling=dict(type="dynamic", factor=2.0)), {},
     "rope_type 'dynamic'"),
    ("olmo2", dict(tie_word_embeddings=True), {}, "lm_head.weight"),
    ("mixtral", dict(num_experts_per_tok=6), {}, "n_active 6 n_expert 5")]


def changed(source, folder, config, tensors):
    """A copy of a model with changes of config.json and of its tensors (None: without one)."""
    config = json.loads((source / "config.json").read_text()) | config
    tensors = load_file(source / "model.safetensors") | tensors
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None},
              folder / "model.safetensors")


def test_conversions_refuse_in_one_line_and_overwrite_nothing(theirs_and_ours, tmp_path, capsys,
                                                              monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, (name, config, tensors, _) in enumerate(REFUSED):
        changed(theirs_and_ours(name)[0], Path(str(number)), config, tensors)
    whole, _, file = theirs_and_ours("gpt2")
    shutil.copy(file, "a.pt")
    Path("half.pt").write_bytes(Path("a.pt").read_bytes()[:-99])
    weights_only(Path("bytes.pt"), replace(CFG, vocab_size=100), "bytes")
    for name in ("gap", "code", "cut", "nested", "shard"):
        Path(name).mkdir()
        shutil.copy(whole / "config.json", name)
    tensors = load_file(whole / "model.safetensors")
    torch.save(dict(a=Path()), "code/pytorch_model.bin")
    torch.save(dict(state_dict=tensors, epoch=3), "nested/pytorch_model.bin")
    torch.save(tensors, "cut/pytorch_model.bin")
    os.truncate("cut/pytorch_model.bin", 9999)
    write_form(tensors, "shards", Path("shard"))
    os.truncate("shard/model-00002-of-00002.safetensors", 9999)
    before = names_in(tmp_path)
    capsys.readouterr()         # what transformers said of the models
    for command, words in [
            *((f"import {number} b.pt", refused[3]) for number, refused in enumerate(REFUSED)),
            ("export a.pt .", "exists"), ("export half.pt new", "half.pt damaged"),
            ("export bytes.pt new", "257 tokens 100"), ("import . a.pt", "a.pt exists"),
            ("import . b.pt", "config.json"), ("import a.pt b.pt", "a.pt file folder"),
            ("import https://huggingface.co/gpt2 b.pt", "gpt2 neither"),
            ("import gap b.pt", "gap model.safetensors"),
            ("import code b.pt", "code/pytorch_model.bin Weights only load"),
            ("import nested b.pt", "state_dict is dict"),
            ("import cut b.pt", "cut/pytorch_model.bin"),
            ("import shard b.pt", "2.safetensors deserializing")]:
        expect_mistake(run_main(capsys, huggingface, *command.split()), *words.split(" "),
                       program="tools.huggingface")
    with mock.patch.object(huggingface, "verify", side_effect=KeyboardInterrupt):
        assert run_main(capsys, huggingface, "export", "a.pt", "new") == (1, "", "")
    with mock.patch.dict(sys.modules, {"transformers": None}):
        for arguments in (["export", "a.pt", "new"], ["import", whole, "b.pt"]):
            assert "pip install transformers" in run_main(capsys, huggingface, *arguments)[2]
    with no_file_above(20_000):             # a full disk is no mistake
        ended = run_main(capsys, huggingface, "export", "a.pt", "new")
    expect_mistake(ended, "the weights could not be written", program="tools.huggingface", status=1)
    # As where model.py computes another thing than its config says.
    monkeypatch.setattr(torch.nn.functional, "gelu", lambda x, approximate="none": x.relu())
    expect_mistake(run_main(capsys, huggingface, "export", "a.pt", "new"),
                   "GPT2LMHeadModel and GPT have other logits", program="tools.huggingface")
    assert names_in(tmp_path) == before


@pytest.mark.claim("A conversion ends with equal logits, or is refused.")
@pytest.mark.parametrize("name, changes", [
    ("gpt2", dict(activation="relu")), ("opt", dict(activation="gelu")),
    ("llama", dict(norm_eps=1e-5)), ("llama", dict(rope_theta=5e5)),
    ("llama 3.1", dict(rope_scaling=())), ("mistral, window", dict(window=6)),
    ("gpt_neox", dict(residual="serial")), ("gpt_neox", dict(activation="gelu")),
    ("gptj", dict(rotary=0.25)), ("olmoe", dict(normalised=True))])
def test_the_check_sees_a_config_that_is_another(theirs_and_ours, name, changes):
    """The parameters fit both models. The logits tell."""
    folder, *_ = theirs_and_ours(name)
    config, cfg = huggingface.read_config(folder)
    with pytest.raises(ValueError, match="have other logits"):
        huggingface.read_parameters(folder, config, replace(cfg, **changes))


@pytest.mark.parametrize("name, changes", [
    ("llama", dict(residual="parallel")), ("mixtral", dict(balance_bias=0.01)),
    ("mixtral", dict(shared_hidden=16))])
def test_an_export_refuses_what_has_no_name_there(name, changes):
    with pytest.raises(ValueError, match="no architecture of transformers that is known here"):
        huggingface_families.their_config(our_config(name, **changes))


@pytest.mark.slow
@pytest.mark.parametrize("name", huggingface_families.FAMILIES)
@torch.no_grad()
def test_a_key_of_config_json_that_is_changed_is_honoured_or_refused(theirs_and_ours, tmp_path,
                                                                     name):
    """Each key in turn, but for texts and lists: an import has transformers' logits, or there is
    none."""
    source, theirs, _ = theirs_and_ours(name)
    tokens, tried = tokens_of(our_config(name), 2), 0
    for key, value in theirs.config.to_dict().items():
        if value is None:
            other = 4
        elif isinstance(value, dict):
            other = value | dict(rope_theta=77.0)
        elif isinstance(value, (bool, int, float)):
            other = not value if isinstance(value, bool) else 2 * value + 1
        else:
            continue
        tried += 1
        changed(source, tmp_path / key, {key: other}, {})
        with suppress(ValueError):
            huggingface.import_model(str(tmp_path / key), tmp_path / key / "a.pt")
            ours, _ = checkpoint.load_model(tmp_path / key / "a.pt")
            theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / key)
            text = tokens[:, :ours.cfg.seq_len]
            assert relative(ours(text), theirs(text).logits) < 2e-6, (key, other)
    assert tried >= 15


# ---- The hub ---------------------------------------------------------------------------------

@pytest.mark.parametrize("error, status, words", [
    (huggingface_hub.errors.RepositoryNotFoundError("401 Error\n\nMore", response=mock.Mock()), 2,
     "me/m folder hub hf auth login 401 Error"),
    (OSError("[Errno -2] Name or service not known"), 1, "me/m downloaded [Errno -2]")])
def test_a_model_that_the_hub_does_not_give_is_named(tmp_path, capsys, error, status, words):
    with mock.patch("huggingface_hub.snapshot_download", side_effect=error):
        ended = run_main(capsys, huggingface, "import", "me/m", tmp_path / "b.pt")
    expect_mistake(ended, *words.split(), program="tools.huggingface", status=status)


@pytest.mark.parametrize("form, weights", [
    ("shards", "model*.safetensors"), ("pickles", "pytorch_model*.bin")])
def test_an_import_downloads_the_config_and_then_the_weights_once(tmp_path, capsys, form, weights):
    """Not another program's copy of them."""
    hub, a, b = tmp_path / "hub", tmp_path / "a.pt", tmp_path / "b.pt"
    weights_only(a, CFG)
    huggingface.export_model(a, hub)
    (hub / "model.safetensors").rename(hub / "consolidated.safetensors")
    write_form(load_file(hub / "consolidated.safetensors"), form, hub)
    with mock.patch("huggingface_hub.snapshot_download", return_value=hub) as download:
        status, text, error = run_main(capsys, huggingface, "import", "me/m", b)
    assert status == 0 and f"python train.py --init-from {b}" in text
    asked = [call.kwargs["allow_patterns"] for call in download.call_args_list]
    assert asked[0] == huggingface.SMALL_FILES and asked[-1][-1] == weights
    assert not any(fnmatch("consolidated.safetensors", pattern) for pattern in sum(asked, []))
    before, after = (checkpoint.load(file)["parameters"] for file in (a, b))
    assert all(full.equal(after[name]) for name, full in before.items())
