"""tools/compare.py: the table and the picture of runs."""
import math
import re
from pathlib import Path

import pytest

from tests.commands import run_main, write_lines
from tools import comparable_losses, compare, svg_picture


def write_run(out, *lines):
    """A metrics.jsonl of (hour, step, fields)."""
    write_lines(f"{out}/metrics.jsonl", [
        dict(more, time=3600 * hour, step=step, tokens=100 * step, lr=0.1 - 0.01 * step,
             tokens_per_second=7e3) for hour, step, more in lines])


def test_compare_tabulates_runs_without_their_void_rows(capsys, tmp_path, monkeypatch):
    """A run that was rolled back and resumed, and one without a validation loss."""
    monkeypatch.chdir(tmp_path)
    flags = dict(out="a", lr=4e-3, seed=1, skip_steps=None, plain=True)
    write_run(
        "a", (0, 0, dict(event="start", config=flags)), (0.1, 1, dict(loss=8, val_loss=1)),
        (0.2, 2, dict(loss=1)), (0.3, 3, dict(loss=1e6)), (0.3, 3, dict(event="rollback", to=1)),
        (0.4, 2, dict(loss=4, val_loss=2.5)), (0.5, 3, dict(loss=2)),
        (0.5, 4, dict(loss=None, val_loss=None)), (25, 2, dict(event="damaged")),
        (25, 2, dict(event="resume", config=flags)), (25.1, 3, dict(loss=2, val_loss=1.25)),
        (25.2, 4, dict(loss=1)), (25.2, 4, dict(event="end")))
    write_run("b", (0, 0, dict(event="start", config=dict(
        flags, out="b", lr=1e-3, skip_steps="2:3", resume="never", plain=False))),
        (1, 1, dict(loss=8)), (2, 2, dict(loss=80)))
    write_run("none")
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    status, text, error = run_main(capsys, compare, "b", "none", "a", "nowhere")
    assert status == 0 and error.count("\n") == 2
    assert "none has no metrics.jsonl with the loss of a step" in error
    assert [line.split() for line in text.splitlines()[-2:]] == [
        "1.0000 1 1.2500 3 4 400 7,000 9.00e-02 a, lr 0.004, plain, 1 rollback, 1 damaged, "
        "1 resume".split(),
        "- - - - 2 200 7,000 9.00e-02 b, lr 0.001, skip-steps 2:3".split()]
    for words, out in [("nothing to compare", "none"),
                       ("with the loss of a step", "a/metrics.jsonl")]:
        status, text, error = run_main(capsys, compare, out)
        assert (status, text) == (2, "") and words in error, error


def described(tokenizer="bytes", vocab=257, size=1.0, seq_len=16, **sources):
    """What an event says on data: each source is (validation text, its tokens, sequences read)."""
    found = {}
    for name, (text, tokens, sequences) in sources.items():
        found[name] = dict(weight=1, bytes_per_token=size, fingerprint=text, val_tokens=tokens,
                           val_fingerprint=f"{text} {tokens}", sequences=sequences,
                           all_sequences=(tokens - 1) // seq_len)
    return dict(tokenizer=tokenizer, vocab_size=vocab, bytes_per_token=size, seq_len=seq_len,
                sources=found)


def write_step(name, loss, data):
    """A run on this data of a step with this validation loss."""
    start = dict(event="start", config=dict(out=name))
    row = dict(loss=5.0, val_loss=loss)
    if data is not None:
        start["data"] = data
        if loss is not None and data["bytes_per_token"]:
            row["bits_per_byte"] = loss / math.log(2) / data["bytes_per_token"]
    write_run(name, (0, 0, start), (1, 1, row))


BYTES = described(d=("text", 4001, 128))
GPT2 = described("gpt2", 50257, 4.0, d=("text", 1000.25, 62))
SHORT = described(d=("text", 4001, 8))
OTHER = described(d=("novel", 7001, 128))
MIXED = described(d=("text", 4001, 128), e=("novel", 7001, 128))
WEB = described("gpt2", 50257, None, web=("web", 900, 20))
CHAT = described("bytes", 257, None, d=("chat", 332, 24))
OF_D = "windows of 16 tokens of 100% d by bytes with 257 tokens"
APART = comparable_losses.APART


@pytest.mark.parametrize("runs, order, words", [
    ([("a", 3.0, BYTES), ("b", 2.0, BYTES)], "b a", []),
    ([("a", 3.4, BYTES), ("b", 6.4, GPT2)], "b a",
     [f"128 {OF_D} (a); 62 windows of 16 tokens of 100% d by gpt2 with 50,257 tokens (b)",
      "so the order is by bits a byte, not by nats a token"]),
    ([("a", 3.0, BYTES), ("b", 2.0, OTHER), ("c", 1.0, MIXED)], "c b a",
     ["50% d + 50% e by bytes", f" (c); 128 {OF_D} (b); 128 {OF_D} (a)", "so the order"]),
    ([("a", 3.0, BYTES), ("b", 2.0, CHAT)], "a b", [f"24 {OF_D} (b); 128 {OF_D} (a)\n", APART]),
    ([("a", 3.0, BYTES), ("b", 2.0, WEB), ("c", 1.0, WEB)], "a c b", [APART]),
    ([("a", 3.0, BYTES), ("b", 2.0, None), ("c", None, BYTES)], "a b c",
     ["what metrics.jsonl does not say (b); 128 windows", APART]),
    ([("a", 3.0, None), ("b", 2.0, None)], "b a", []),
    ([("b", 2.0, WEB), ("a", 1.0, WEB)], "a b", [])])
def test_nats_order_only_what_is_the_same_test(tmp_path, monkeypatch, runs, order, words):
    """Of one text 3.4 nats a byte are worse than 6.4 a token of GPT-2's. Lines say what differs."""
    monkeypatch.chdir(tmp_path)
    for name, loss, data in runs:
        write_step(name, loss, data)
    text = compare.compare(compare.read_runs([name for name, *_ in runs]))
    table = [line.split() for line in text.splitlines() if " 7,000 " in line]
    assert " ".join(line[-1] for line in table) == order
    assert all(line in text for line in words) and ("note" in text) == bool(words), text
    assert ("so the order" in text) == any("so the order" in line for line in words), text


@pytest.mark.parametrize("before, words", [
    (dict(data=SHORT), f"read 8 {OF_D}: they are left out"), ({}, "metrics.jsonl does not say")])
def test_a_runs_best_is_of_one_test(tmp_path, monkeypatch, before, words):
    """What was evaluated before a resume with other --eval-tokens, or on data that is not known,
    does not count, and a line says so."""
    monkeypatch.chdir(tmp_path)
    write_run(
        "a", (5, 0, dict(event="start", config={}) | before), (6, 1, dict(loss=4, val_loss=1.0)),
        (4, 2, dict(loss=3)), (4, 2, dict(event="resume", config={}, data=BYTES)),
        (4.5, 3, dict(loss=2, val_loss=2.5)), (4.5, 4, dict(loss=2, val_loss=2.25)),
        (4.5, 5, dict(loss=2, val_loss=math.nan)))
    with open("a/metrics.jsonl", "a") as file:      # what is no row
        file.write('[]\nnull\n{"step": "7", "time": 1, "loss": 1, "tokens": 1, "lr": 1}\n')
    text = compare.compare(compare.read_runs(["a", "a/", "./a"]))
    assert "a: evaluations up to step 1 " in text and words in text
    assert text.splitlines()[-1].split()[:6] == "2.2500 4 2.2500 4 5 500".split()


def test_a_picture_names_the_best_run_and_what_differs(capsys, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    outs = [f"<{i}>" for i in range(9)]
    for i, out in enumerate(outs):
        write_run(out, (0, 0, dict(event="start", config=dict(out=out, lr=i / 8, seed=1))),
                  (1, 1, dict(loss=8, val_loss=50 - i)), (2, 2, dict(loss=5)))
    status, text, error = run_main(capsys, compare, "--svg", "a.svg", *outs)
    assert (status, error) == (0, "") and text.endswith("\nwrote a.svg\n")
    svg = Path("a.svg").read_text()
    legend = re.findall(r">&lt;(\d+)&gt;, lr ([\d.]+)</text>", svg)
    assert legend == [(str(i), str(i / 8)) for i in range(8, -1, -1)]
    assert "prefers-color-scheme:dark" in svg and "<title>" in svg
    monkeypatch.setattr(svg_picture, "find_spec", lambda name: None)
    status, _, error = run_main(capsys, compare, "--svg", "a.svg", *outs)
    assert status == 2 and "pip install matplotlib" in error and error.count("\n") == 1
