"""The tools' tests, in the order of the tools. They share the harness of test_all.py.

    python -m pytest tools
    python -m pytest tools -m slow
"""
import functools
import http.server
import json
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from unittest import mock

import pytest
import torch

import checkpoint
import data
import sample
from test_all import (CFG, NASTY, SHARED, expect_mistake, names_in, random_gpt, relative, saved,
                      small_state, tokens_of)
# Fixtures are found by their names in this module.
from test_all import leave_nothing_behind, pool, run_train, shards
from tools import huggingface


# ---------------------------------------------------------------------------------------------
# plan.py
# ---------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------
# huggingface.py
# ---------------------------------------------------------------------------------------------


def weights_only(path, cfg, tokenizer="bytes"):
    """A checkpoint of a random model without the optimizer's state -> the model."""
    plain, shapes = random_gpt(cfg).float(), checkpoint.parameter_shapes(cfg)
    parameters = {n: p.detach()[:shapes[n][0]].clone() for n, p in plain.named_parameters()}
    torch.save(small_state(0) | dict(model=asdict(cfg), tokenizer=tokenizer, parameters=parameters,
                                     exp_avg={}, exp_avg_sq={}), path)
    return plain


def convert(capsys, *arguments):
    """python -m tools.huggingface with these arguments -> (exit status, stdout, stderr)."""
    status = 0
    with mock.patch.object(sys, "argv", ["tools.huggingface", *map(str, arguments)]):
        try:
            huggingface.main()
        except SystemExit as end:
            status = end.code
    return status, *capsys.readouterr()


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
    assert status == 0 and "without a tokenizer: token ids 0 to 255 are bytes" in text
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


@pytest.mark.filterwarnings("ignore")
def test_the_exported_tokenizer_is_gpt2s(tmp_path, capsys, monkeypatch):
    transformers = pytest.importorskip("transformers")
    if not (SHARED / "tiktoken_cache").is_dir():
        pytest.skip("needs the GPT-2 vocabulary in ../shared/tiktoken_cache")
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    weights_only(tmp_path / "a.pt", replace(CFG, vocab_size=50257, n_layer=1), "gpt2")
    assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "hf")[0] == 0
    theirs, ours = transformers.AutoTokenizer.from_pretrained(tmp_path / "hf"), (
        data.get_tokenizer("gpt2"))
    text = " ".join(NASTY)
    assert theirs(text)["input_ids"] == ours.encode(text, allowed_special="all")
    assert theirs.eos_token_id == ours.eot_token


def test_an_export_is_one_file_or_shards_of_limited_size(tmp_path, capsys):
    """Each file holds tensors of at most SHARD_BYTES, or a single larger one, and has the mode of
    any new file; the index lists every tensor once."""
    safetensors = pytest.importorskip("safetensors")
    weights_only(tmp_path / "a.pt", CFG)
    (tmp_path / "new").touch()
    assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "one")[0] == 0
    assert names_in(tmp_path / "one") == ["config.json", "model.safetensors"]
    with mock.patch.object(huggingface, "SHARD_BYTES", 20_000):
        assert convert(capsys, "export", tmp_path / "a.pt", tmp_path / "many")[0] == 0
    sizes, listed = [], {}
    for file in sorted((tmp_path / "many").glob("*.safetensors")):
        with safetensors.safe_open(file, "pt") as tensors:
            nbytes = [tensors.get_tensor(name).nbytes for name in tensors.keys()]
            listed |= dict.fromkeys(tensors.keys(), file.name)
        assert sum(nbytes) <= 20_000 or len(nbytes) == 1
        sizes.append(sum(nbytes))
    # The table of tokens is larger than the limit; no two neighbours fit one file.
    assert max(sizes) == 257 * 32 * 4 and all(a + b > 20_000 for a, b in zip(sizes, sizes[1:]))
    index = json.loads((tmp_path / "many/model.safetensors.index.json").read_text())
    assert index["weight_map"] == listed and len(set(listed.values())) == len(sizes)
    for file in [*(tmp_path / "one").iterdir(), *(tmp_path / "many").iterdir()]:
        assert file.stat().st_mode == (tmp_path / "new").stat().st_mode


def test_weights_from_the_hub_are_trained_on_evaluated_and_sampled(run_train, shards, tmp_path,
                                                                   capsys, monkeypatch):
    """Several files and their index are downloaded from a server on this machine."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    weights_only(Path("a.pt"), CFG)
    with mock.patch.object(huggingface, "SHARD_BYTES", 100_000):
        assert convert(capsys, "export", "a.pt", "hub/me/tiny/resolve/main")[0] == 0
    handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory="hub")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{httpd.server_port}")
        status, text, _ = convert(capsys, "import", "me/tiny", "b.pt")
        assert "neither a folder nor" in convert(capsys, "import", "me/none", "c.pt")[2]
        httpd.shutdown()
    assert status == 0 and "python train.py --init-from b.pt" in text
    flags = ["--data", shards, "--out", "o", "--batch-size", 4]
    status, text, _ = run_train(*flags, "--resume", "b.pt", "--eval-only")
    assert status == 0 and text.startswith("b.pt, step 0, on ")
    assert run_train(*flags, "--init-from", "b.pt", "--steps", 2)[0] == 0
    assert saved(Path("o"), 2)["model"]["n_embd"] == CFG.n_embd
    expect_mistake(run_train("--data", shards, "--out", "p", "--resume", "b.pt"),
                   "b.pt holds weights alone: begin a run with --init-from b.pt and another")
    with mock.patch.object(sys, "argv", ["sample.py", "--ckpt", "b.pt", "--max-tokens", "5"]):
        sample.main()


@pytest.mark.parametrize("flag", ["--init-from", "--resume"])
@pytest.mark.parametrize("name, command", [
    ("gpt2", "import gpt2 gpt2.pt"), ("facebook/opt-1.3b", "import facebook/opt-1.3b opt-1.3b.pt")])
def test_train_py_names_the_import_for_a_model_of_the_hub(run_train, shards, tmp_path, monkeypatch,
                                                          flag, name, command):
    monkeypatch.chdir(tmp_path)
    expect_mistake(run_train("--data", shards, flag, name),
                   f"no checkpoint {name}: give another, or run train.py first; a model from "
                   f"Hugging Face must be imported first: python -m tools.huggingface {command}")


BROKEN = [      # changes of config.json and of the tensors (None: it is missing), and the answer
    (dict(model_type="llama"), {}, "its model_type 'llama' is neither gpt2 nor opt"),
    (dict(model_type="opt", hidden_size=32, max_position_embeddings=16, num_hidden_layers=5,
          num_attention_heads=8, do_layer_norm_before=False), {}, "its do_layer_norm_before is F"),
    (dict(activation_function="gelu"), {}, "its activation_function is 'gelu'"),
    (dict(n_inner=99), {}, "its n_inner is 99, model.py has only 128"),
    (dict(n_layer=None), {}, "config.json is refused: it lacks n_layer"),
    (dict(model_type=None), {}, "config.json is refused: its model_type None"),
    ({}, {"transformer.h.2.ln_1.bias": None}, "has no tensor h.2.ln_1.bias"),
    ({}, {"transformer.wpe.weight": torch.zeros(3, 32)}, "has shape (3, 32), not (16, 32)")]


def test_conversions_refuse_in_one_line_and_overwrite_nothing(tmp_path, capsys, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(data.time, "sleep", lambda _: None)     # between tries
    monkeypatch.chdir(tmp_path)
    weights_only(Path("a.pt"), CFG)
    for folder in ("hf", "evil", "gap", "torn"):
        assert convert(capsys, "export", "a.pt", folder)[0] == 0
    for folder in ("evil", "gap", "torn"):
        Path(folder, "model.safetensors").unlink()
    Path("evil/model.safetensors.index.json").write_text('{"weight_map": {"wte": "../a.pt"}}')
    Path("gap/model.safetensors.index.json").write_text('{"weight_map": {"wte": "one"}}')
    damaged = bytearray(Path("a.pt").read_bytes())
    Path("half.pt").write_bytes(damaged[:-99])
    damaged[len(damaged) // 2] ^= 1
    Path("torn/pytorch_model.bin").write_bytes(damaged)
    whole = json.loads(Path("hf/config.json").read_text()), {}
    for name, full in checkpoint.load(Path("a.pt"))["parameters"].items():
        whole[1].update(huggingface.to_theirs(name, full, huggingface.FAMILIES["gpt2"]))
    for number, (*changes, _) in enumerate(BROKEN):
        config, tensors = ({name: x for name, x in (one | change).items() if x is not None}
                           for one, change in zip(whole, changes))
        Path(f"{number}").mkdir()
        Path(f"{number}/config.json").write_text(json.dumps(config))
        torch.save(tensors, f"{number}/pytorch_model.bin")
    before = names_in(tmp_path)
    for arguments, status, message in [
            *((["import", f"{number}", "b.pt"], 2, broken[2])
              for number, broken in enumerate(BROKEN)),
            (["export", "a.pt", "."], 2, " exists: give a new folder"),
            (["export", "half.pt", "new"], 2, "half.pt is damaged"),
            (["import", ".", "a.pt"], 2, "a.pt exists: give a new file"),
            (["import", ".", "b.pt"], 2, ". has no config.json"),
            (["import", "evil", "b.pt"], 2, "../a.pt is not a file beside it"),
            (["import", "gap", "b.pt"], 2, "gap lacks one"),
            ([], 2, "required: import|export"), (["import", "hf"], 2, "required: FILE.pt"),
            (["convert", "a.pt", "b"], 2, "invalid choice: 'convert'"),
            (["import", "torn", "b.pt"], 2, "pytorch_model.bin is damaged"),
            (["import", "no/such", "b.pt"], 1, "cannot reach http://127.0.0.1:9")]:
        result = convert(capsys, *arguments)
        assert result[0] == status and message in result[2], result
        assert result[2].startswith("tools.huggingface: ") and result[2].count("\n") == 1, result
    with mock.patch.object(huggingface, "verify", side_effect=KeyboardInterrupt):
        assert convert(capsys, "export", "a.pt", "new") == (1, "", "")
    with mock.patch.dict(sys.modules, {"safetensors": None, "safetensors.torch": None}):
        for arguments in (["export", "a.pt", "new"], ["import", "hf", "b.pt"]):
            assert "pip install safetensors" in convert(capsys, *arguments)[2]
    assert names_in(tmp_path) == before


# ---------------------------------------------------------------------------------------------
# compare.py
# ---------------------------------------------------------------------------------------------


# ---------------------------------------------------------------------------------------------
# follow.py
# ---------------------------------------------------------------------------------------------
