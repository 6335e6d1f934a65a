"""tools/model_card.py: what the card of an export says, beside what the run itself has recorded."""
import io
import json
import re
import shlex
import shutil
from contextlib import chdir
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

import sample
from base.options import OF_TRAINING, Config, parse_flags
from corpus.prepare import prepare
from tests.commands import TINY, Command, read_metrics, run_main
from tests.harness import saved, saved_file, weights_only
from tests.test_transformers import our_config
from tools import huggingface

huggingface_hub = pytest.importorskip("huggingface_hub")

# The name of the data, with all that Markdown, YAML and a shell read as signs of their own.
STRANGE = 'a|b: "c" `d` ``e\n\n# <b> [x](y) *z* \\ $HOME \'f\' ```\n---\n- \u00e9'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with out/: a run of 4 steps, continued to step 6 with another learning rate. An
    evaluation every 2 steps, but none after the fifth, which is saved."""
    folder = tmp_path_factory.mktemp("run")
    (folder / "text.txt").write_text("".join(f"line {i}: words \u00e9\n" for i in range(3000)))
    prepare([folder / "text.txt"], folder / STRANGE, "bytes")
    flags = ["--data", STRANGE, "--out", "out", *TINY, "--keep", 9, "--save-every", 1]
    for more in ([], ["--steps", 6, "--lr", 0.125]):
        done = Command("train.py", *flags, *more, cwd=folder).finish(200)
        assert done[0] == 0, done
    return folder


def card_of(file, folder):
    """The card's text, and its two blocks of facts."""
    huggingface.export_model(file, folder)
    card = (folder / "README.md").read_text()
    return card, *map(json.loads, re.findall("^```json\n(.*?)\n```$", card, re.M | re.S))


@pytest.mark.claim("An export has a model card with what the checkpoint knows.")
@pytest.mark.parametrize("step, evaluated", [(2, 2), (5, 4), (6, 6)])
def test_a_card_says_what_the_run_has_recorded(run, tmp_path, monkeypatch, step, evaluated):
    monkeypatch.chdir(run)
    card, model, facts = card_of(saved_file(Path("out"), step), tmp_path / "hf")
    rows = {row["step"]: row for row in read_metrics(Path("out"))[0]}
    assert facts["training loss"] == rows[step]["loss"] and facts["of step"] == evaluated
    assert facts["validation loss"] == rows[evaluated]["val_loss"]
    assert facts["bits a byte"] == rows[evaluated]["bits_per_byte"]
    assert (facts["tokens"], facts["data"]) == (rows[step]["tokens"], STRANGE)
    state = saved(run / "out", step)
    assert facts["run"] == state["run"]["id"] and model["n_embd"] == state["model"]["n_embd"]
    given = asdict(Config(**parse_flags(shlex.split(facts["command"])[2:])))
    assert all(given[name] == state["config"][name] for name in (*OF_TRAINING, "data"))
    assert [len(re.findall(f"^ *{mark}", card, re.M)) for mark in ("#", "```")] == [5, 6]
    assert huggingface_hub.ModelCard(card).data.to_dict() == dict(
        library_name="transformers", pipeline_tag="text-generation", tags=["plainscale", "gpt2"])


@pytest.mark.parametrize("change", [
    lambda text: b"", lambda text: text[:text.rindex(b'{"step": 6, ') + 20],
    lambda text: text.replace(b'"tokens": ', b'"tokens": 1')])
def test_a_card_without_its_rows_leaves_them_out(run, tmp_path, change):
    """Of a run without rows, with a torn one, and of another run."""
    shutil.copy(run / "out/latest.pt", tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes(change((run / "out/metrics.jsonl").read_bytes()))
    with chdir(tmp_path):
        _, _, facts = card_of(Path("latest.pt"), Path("hf"))
    assert not {"training loss", "validation loss"} & facts.keys()


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name, tokenizer, more, flags", [
    ("gpt2", "bytes", {}, ["--prompt", "The"]), ("qwen2", "bytes", {}, ["--prompt", "The"]),
    ("mixtral", "bytes", {}, ["--prompt", "The"]), ("opt", "opt-257", {}, None),
    ("llama", "bytes", dict(template="plain"), ["--chat"])])
def test_the_cards_code_runs_and_gives_the_greedy_text_of_sample_py(
        tmp_path, monkeypatch, capsys, name, tokenizer, more, flags):
    """Also of weights alone, of which the card claims no training; of a tokenizer that
    AutoTokenizer does not open; of a model of conversations; and without a tokenizer."""
    file = tmp_path / "a.pt"
    weights_only(file, our_config(name, vocab_size=257), tokenizer)
    torch.save(torch.load(file) | more, file)
    card, _ = card_of(file, tmp_path / "hf")
    assert (" of 5 experts in each layer)" in card) == (name == "mixtral")
    assert "Not recorded: the checkpoint holds weights alone." in card and "train.py" not in card
    capsys.readouterr()
    with chdir(tmp_path / "hf"):
        exec(re.search("```python\n(.*?)```", card, re.S)[1], {})
    text = capsys.readouterr().out
    if flags is not None:
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
        expected = run_main(capsys, sample, "--ckpt", file, *flags, "--temperature", 0,
                            "--max-tokens", 32)
        assert expected == (0, text, "") and len(text) > 5
    huggingface.import_model(str(tmp_path / "hf"), tmp_path / "b.pt")
    assert more.items() <= torch.load(tmp_path / "b.pt").items()
