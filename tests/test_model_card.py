"""tools/model_card.py: what the card of an export says, beside what the run itself has recorded.

    python -m pytest tests/test_model_card.py
"""
import io
import json
import re
import shlex
import shutil
from contextlib import chdir
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch

import sample
from base.options import Config, parse_flags
from corpus.prepare import prepare
from tests.harness import (TINY, Command, meta_of, read_metrics, run_main, saved, saved_file,
                           weights_only)
from tests.test_huggingface import EXPORTED
from tools import huggingface
from tools.model_card import FLAGS_OF_A_COMMAND, code, describe_origin, in_units, read_record

# Names of data, with all that Markdown, YAML and a shell read as signs of their own.
STRANGE = 'a|b: "c" `d` ``e\n\n# <b> [x](y) *z* \\ $HOME \'f\' ```\n---\n- \u00e9'


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A folder with two sources, and out/: a run of 4 steps on both, continued to step 6 with
    another learning rate and other weights. An evaluation every 2 steps, but none after the fifth,
    which is saved."""
    folder = tmp_path_factory.mktemp("run")
    for name, lines in ((STRANGE, [f"{i} + {i} = {2 * i}\n" for i in range(50)]),
                        ("b", [f"line {i}: other words \u00e9\n" for i in range(2200)])):
        (folder / "text.txt").write_text("".join(lines))
        prepare([folder / "text.txt"], folder / name, "bytes")
    flags = ["--out", "out", *TINY, "--keep", 9, "--save-every", 1]
    for weights, more in ((f"{STRANGE}=0.7,b=0.3", []),
                          (f"{STRANGE}=1,b=1", ["--steps", 6, "--lr", 0.125])):
        done = Command("train.py", "--data", weights, *flags, *more, cwd=folder).finish(200)
        assert done[0] == 0, done
    return folder


def card_of(file, folder):
    huggingface.export_model(file, folder)
    return (folder / "README.md").read_text()


def facts_of(card):
    """{name: fact} of the lists' items."""
    return dict(re.findall("^- ([^:\n]+): (.*)$", card, re.M))


def row_of(out, step):
    return next(row for row in reversed(read_metrics(Path(out))[0]) if row["step"] == step)


@pytest.mark.claim("An export has a model card with what the checkpoint knows.")
@pytest.mark.parametrize("step, evaluated", [(2, 2), (5, 4), (6, 6)])
def test_a_card_says_what_the_run_has_recorded(run, tmp_path, monkeypatch, step, evaluated):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(run)
    card = card_of(saved_file(Path("out"), step), tmp_path / "hf")
    facts, row, last = facts_of(card), row_of(run / "out", step), row_of(run / "out", evaluated)
    assert facts[f"Training loss of step {step}"].startswith(f"{row['loss']:.4f} nats")
    found = facts[f"Validation loss after step {evaluated}"]
    assert found.startswith(f"{last['val_loss']:.4f} nats a token, perplexity ")
    assert found.endswith(f", {last['bits_per_byte']:.4f} bits a byte")
    for name in (STRANGE, "b"):
        key = meta_of(run / name)["fingerprint"]
        [source] = [line for line in card.splitlines() if key in line]
        assert source.startswith(f"- {code(name)}: its share of the sequences is ")
        if step == evaluated:           # the row has the epochs
            assert f"; read {row[f'epochs/{name}']:.3g} times" in source
        assert f"- Validation text of {code(name)}: {last[f'val_loss/{name}']:.4f} nats" in card
    assert ("is 0.7, from sequence 16 on 0.5;" in card) == (step > 4)
    assert f"has read {row['tokens']} tokens, in sequences of 16" in card
    assert facts["Steps"] == f"{step} of {4 if step < 5 else 6}"
    assert facts["Learning rate"].startswith("0.004" if step < 5 else "0.125")
    changed = facts.get("Settings that a resume has changed", "")
    assert ("after step 4, steps 6 instead of 4; lr 0.125 " in changed) == (step > 4)
    assert facts["Run"] == f"`{saved(run / 'out', step)['run']['id']}`"
    assert torch.__version__ in facts["Versions"]


def test_the_cards_command_has_the_flags_of_the_run(run, tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(run)
    card = card_of(Path("out/latest.pt"), tmp_path / "hf")
    commands = re.search("^(````+)\n(.*)\n\\1$", card, re.M | re.S)[2]
    train, export = commands.split("\npython -m ")
    given = asdict(Config(**parse_flags(shlex.split(train)[2:])))
    stored = saved(run / "out", 6)["config"]
    assert all(given[name] == stored[name] for name in FLAGS_OF_A_COMMAND)
    assert "--out" not in train and "--micro-batch" not in train
    assert shlex.split(export) == ["tools.huggingface", "export", "out/latest.pt",
                                   str(tmp_path / "hf")]


def test_strange_names_stay_names(run, tmp_path, monkeypatch):
    """A parser of Markdown reads the sections that the card of plain names has, and one of YAML the
    fields of the hub."""
    markdown_it = pytest.importorskip("markdown_it")
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.chdir(run)
    card = card_of(Path("out/latest.pt"), tmp_path / "hf")
    read = hub.ModelCard(card)
    assert read.data.to_dict() == dict(library_name="transformers", pipeline_tag="text-generation",
                                       tags=["plainscale", "gpt2"])
    tokens = markdown_it.MarkdownIt().parse(read.text)
    headings = [tokens[i + 1].content for i, token in enumerate(tokens)
                if token.type == "heading_open"]
    assert headings == ["A language model of 10,960 parameters", "Model", "Training data",
                        "Procedure", "Results", "Tokenizer", "How to use", "Limits", "Provenance"]
    inline = [child for token in tokens if token.type == "inline" for child in token.children]
    assert {child.type for child in inline} == {"text", "code_inline"}
    shown = STRANGE.replace("\n", "\\n")
    assert [child.content for child in inline].count(shown) == 2        # data, results
    assert code("x\udc80\t`") == "`` x\\udc80\\t` ``"


@pytest.mark.parametrize("change, is_known", [
    ("missing", False), ("a folder", False), ("torn", False), ("another run's", False),
    ("damaged lines", True)])
def test_a_card_without_its_rows_says_so(run, tmp_path, change, is_known):
    """The last loss is also in the checkpoint. Data that are elsewhere have no epochs."""
    pytest.importorskip("safetensors")
    shutil.copy(run / "out/latest.pt", tmp_path)
    text = (run / "out/metrics.jsonl").read_bytes()
    if change == "torn":
        text = text[:text.rindex(b'{"step": 6, ') + 20]
    elif change == "another run's":
        text = text.replace(b'"seed": 1337', b'"seed": 1338')
    elif change == "damaged lines":
        text = text.replace(b"\n", b'\n\xff\n[]\n{"step": 6}\n{"step": 6, "lo\n')
    if change == "a folder":
        (tmp_path / "metrics.jsonl").mkdir()
    elif change != "missing":
        (tmp_path / "metrics.jsonl").write_bytes(text)
    with chdir(tmp_path):
        card = card_of(Path("latest.pt"), Path("hf"))
    facts, row = facts_of(card), row_of(run / "out", 6)
    assert facts["Training loss of step 6"].startswith(f"{row['loss']:.4f} nats")
    assert facts.get("Validation loss") == (None if is_known else "not recorded")
    assert ("Validation loss after step 6" in facts) == is_known
    assert ("not recorded" in facts["Versions"]) == (not is_known)
    assert "How many epochs these are is not recorded." in card


def test_a_plain_run_has_a_card(run, tmp_path, monkeypatch):
    """Its checkpoints keep no losses: both are from metrics.jsonl."""
    pytest.importorskip("safetensors")
    monkeypatch.chdir(run)
    done = Command("train.py", "--plain", "--data", "b", "--out", "plain", *TINY, cwd=run)
    assert done.finish(200)[0] == 0
    facts, row = facts_of(card_of(Path("plain/latest.pt"), tmp_path / "hf")), row_of("plain", 4)
    assert facts["Training loss of step 4"].startswith(f"{row['loss']:.4f} nats")
    assert facts["Validation loss after step 4"].startswith(f"{row['val_loss']:.4f} nats")


def test_the_perplexity_of_a_loss_beyond_a_float_is_infinite():
    assert in_units(dict(val_loss=1e3), "") == "1000.0000 nats a token, perplexity inf"


@pytest.mark.parametrize("origin, flags, expected", [
    (["seed", None, 0], dict(seed=5), "with weights drawn from seed 5"),
    (["resume", "ab", 7], dict(resume="x.pt"), "as a branch of `x.pt`, step 7 of the run `ab`"),
    (["resume", "ab", 7], dict(resume="auto"), "as a branch of a file, step 7 of the run `ab`"),
    (["init-from", "ab", 0], dict(init_from="y.pt"),
     "with the weights of `y.pt`, step 0 of the run `ab`"),
    (["import", None, 0], {}, "with weights that were imported")])
def test_a_card_says_where_a_run_began(origin, flags, expected):
    assert describe_origin(dict(run=dict(id="c", origin=origin), config=flags), None) == expected


def line(step, **fields):
    return dict(step=step, time=0, tokens=100 * step, **fields)


START = line(0, event="start", config=dict(seed=1), data=None)
BACK = line(3, event="rollback", to=1)


@pytest.mark.parametrize("lines, expected", [
    # (step of the file, its last loss): the last validation loss, None: no record
    ([START, line(1, loss=4.0, val_loss=3.5), line(2, loss=3.0)], 3.5),
    ([START, line(1, loss=4.0), line(2, loss=3.0)], "no evaluation"),
    ([line(1, loss=4.0), line(2, loss=3.0)], None),                     # without a start
    ([START, line(2, loss=2.9, val_loss=2.8)], None),                   # another loss
    ([START | dict(config=dict(seed=2)), line(2, loss=3.0)], None),     # other flags
    ([START, line(2, loss=3.0) | dict(tokens=1)], None),                # another batch size
    # The file was saved before a rollback, then after one.
    ([START, line(2, loss=3.0, val_loss=2.5), BACK, line(2, loss=2.9, val_loss=2.4)], 2.5),
    ([START, line(1, loss=4.0, val_loss=3.5), line(2, loss=8.0, val_loss=7.5), BACK,
      line(2, loss=3.0)], 3.5),
    # The step is made again after a crash, and evaluated.
    ([START, line(2, loss=3.0), line(1, event="resume", config=dict(seed=1)),
      line(2, loss=3.0, val_loss=2.5)], 2.5),
])
def test_a_record_is_that_of_the_files_own_run_and_step(tmp_path, lines, expected):
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
    state = dict(step=2, tokens=200, config=dict(seed=1), monitor=dict(losses=[4.0, 3.0], bad=0))
    record = read_record(tmp_path / "latest.pt", state)
    if expected is None:
        assert record is None
    elif expected == "no evaluation":
        assert record.evaluated is None and record.row["loss"] == 3.0
    else:
        assert (record.evaluated["val_loss"], record.row["loss"]) == (expected, 3.0)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("model_type, tokenizer, template", [
    ("gpt2", "bytes", None), ("opt", "bytes", None), ("qwen2", "bytes", None),
    ("mixtral", "bytes", None), ("llama", "bytes", "plain"), ("opt", "opt-257", None)])
def test_the_cards_code_runs_and_gives_the_greedy_text_of_sample_py(
        tmp_path, monkeypatch, capsys, model_type, tokenizer, template):
    """Also of weights alone, of which the card claims no training; of a mixture of experts; of a
    tokenizer that AutoTokenizer does not open; of a model of conversations; and the code for a
    tokenizer that is elsewhere."""
    pytest.importorskip("transformers")
    file = tmp_path / "a.pt"
    weights_only(file, replace(EXPORTED[model_type], vocab_size=257, seq_len=64), tokenizer)
    if template is not None:
        torch.save(torch.load(file) | dict(template=template), file)
    card = card_of(file, tmp_path / "hf")
    assert card.count("Not recorded: the checkpoint holds weights alone.") == 2
    assert "nats" not in card and "train.py" not in card
    facts = facts_of(card)
    if model_type == "mixtral":
        assert facts["Experts"] == "3 in each layer, of which a token uses 2"
    capsys.readouterr()
    with chdir(tmp_path / "hf"):
        exec(re.search("```python\n(.*?)```", card, re.S)[1], {})
    text = capsys.readouterr().out
    if tokenizer != "bytes":
        assert text.startswith("tensor(")
        return
    flags = ["--prompt", "The"]
    if template is not None:
        flags = ["--chat"]
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    expected = run_main(capsys, sample, "--ckpt", file, *flags, "--temperature", 0,
                        "--max-tokens", 32)
    assert expected == (0, text, "") and len(text) > 5
