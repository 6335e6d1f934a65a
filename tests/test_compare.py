"""tools/compare.py: the table and the chart of runs.

    python -m pytest tests/test_compare.py
"""
import json
import math
import re
import tracemalloc
from pathlib import Path

import pytest

from tests.harness import run_main
from tools import comparable_losses, compare, loss_picture, matplotlib_svg, metrics


@pytest.fixture
def run_compare(capsys, monkeypatch):
    """run_compare(*arguments, columns=80) -> (exit status, standard output, standard error)"""
    def run(*arguments, columns=80):
        monkeypatch.setenv("COLUMNS", str(columns))
        return run_main(capsys, compare, *arguments)
    return run


def write_lines(out, lines):
    """A metrics.jsonl of (hour, step, fields)."""
    out.mkdir()
    text = [json.dumps(dict(more, time=3600 * hour, step=step, tokens=100 * step,
                            lr=0.1 - 0.01 * step, tokens_per_second=7e3)) + "\n"
            for hour, step, more in lines]
    (out / "metrics.jsonl").write_text("".join(text))


def test_compare_plots_and_tabulates_runs_without_their_void_rows(run_compare, tmp_path,
                                                                  monkeypatch):
    """A run that was rolled back and resumed, one without a validation loss, and a directory
    without a step. Each line of the first has an hour and a step; its last is being written."""
    monkeypatch.chdir(tmp_path)
    flags = dict(out="a", lr=4e-3, seed=1, skip_steps=None)
    write_lines(Path("a"), [
        (0, 0, dict(event="start", config=flags)), (0.1, 1, dict(loss=8, val_loss=1)),
        (0.2, 2, dict(loss=1)), (0.3, 3, dict(loss=1e6)), (0.3, 3, dict(event="rollback", to=1)),
        (0.4, 2, dict(loss=4, val_loss=2.5)), (0.5, 3, dict(loss=2)), (0.5, 4, dict(loss=None)),
        (25, 2, dict(event="damaged")), (25, 2, dict(event="resume", config=flags)),
        (25.1, 3, dict(loss=2, val_loss=1.25)), (25.2, 4, dict(loss=1)), (25.2, 4, dict(
            event="end"))])
    write_lines(Path("b"), [
        (0, 0, dict(event="start", config=dict(flags, out="b", lr=1e-3, skip_steps="2:3"))),
        (1, 1, dict(loss=8)), (2, 2, dict(loss=80))])
    write_lines(Path("none"), [])
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 9, "lo')
    runs = [(name, compare.read_metrics(Path(name))) for name in "ab"]
    assert compare.chart(runs, width=9, height=4) == [
        "   8.0000 |  a b    ",
        "   4.0000 |    a    ",
        "   2.0000 |    A a  ",
        "   1.0000 |  A   A a",
        "          +---------",
        "        a |    < >  ",
        "   tokens  0     400", ""]
    status, text, error = run_compare("b", "none", "a", "nowhere", columns=52)
    assert status == 0 and error.count("\n") == 2 and "none/metrics.jsonl has no step" in error
    assert "nowhere is not the --out of a run" in error
    assert 50 < max(map(len, text.splitlines()[:20])) <= 52
    assert [line.split() for line in text.splitlines()[-2:]] == [
        "a 1.0000 1 1.2500 3 4 400 0h42m 7,000 9.00e-02 a, lr 0.004, 1 rollback, 1 damaged, "
        "1 resume".split(),
        "b - - - - 2 200 2h00m 7,000 9.00e-02 b, lr 0.001, skip-steps 2:3".split()]
    status, text, error = run_compare("none")
    assert (status, text) == (2, "") and error.splitlines()[-1].startswith(
        "tools.compare: nothing to compare")
    status, _, error = run_compare()
    assert status == 2 and error.count("\n") == 1 and "OUT" in error
    many = [f"c{i}" for i in range(30)]             # more runs than letters
    for name in many:
        write_lines(Path(name), [(0, 1, dict(loss=8))])
    status, text, error = run_compare(*many)
    assert (status, error) == (0, "") and len(text.splitlines()) == 20 + 30


def test_compare_shows_the_load_of_a_mixtures_experts(run_compare, tmp_path, monkeypatch):
    """Of the last valid step, below the table, for mixtures alone. The rolled-back step has other
    numbers; one of the last step is not finite."""
    monkeypatch.chdir(tmp_path)
    first = {"load/0": 1.25, "load/1": 3.5, "load/10": 2.0, "dead_experts": 7, "router_loss": 0.02}
    later = {"load/0": 1.5, "load/1": 1.125, "load/10": 2.25, "dead_experts": 1,
             "router_loss": None}
    write_lines(Path("mixture"), [
        (0, 1, dict(loss=8, val_loss=4, **first)), (1, 2, dict(loss=7, **later)),
        (2, 3, dict(loss=9, **first)), (2, 3, dict(event="rollback", to=2))])
    write_lines(Path("dense"), [(0, 1, dict(loss=8, val_loss=3))])
    _, text, _ = run_compare("mixture", "dense")
    *_, heading, experts = text.splitlines()
    assert heading.startswith("   largest load  in block  dead experts  router loss  run: of each ")
    assert experts.split() == "b 2.25 10 1 - mixture: 1.50 1.12 2.25".split()
    _, text, _ = run_compare("dense")
    assert "load" not in text and "expert" not in text


def described(tokenizer="bytes", vocab=257, size=1.0, seq_len=16, **sources):
    """What an event says on data: each source is (validation text, its tokens, sequences read)."""
    found = {}
    for name, (text, tokens, sequences) in sources.items():
        found[name] = dict(weight=1, bytes_per_token=size, fingerprint=text, val_tokens=tokens,
                           val_fingerprint=f"{text} {tokens}", sequences=sequences,
                           all_sequences=(tokens - 1) // seq_len)
    return dict(tokenizer=tokenizer, vocab_size=vocab, bytes_per_token=size, seq_len=seq_len,
                sources=found)


def write_run(name, *losses, data="unknown", kind="start"):
    """A run on this data with these validation losses, one for each step."""
    start = dict(event=kind, config=dict(out=name))
    if data != "unknown":
        start["data"] = data
    lines = [(0, 0, start)]
    for step, loss in enumerate(losses, 1):
        row = dict(loss=5.0, val_loss=loss)
        if data != "unknown" and loss is not None and data["bytes_per_token"]:
            row["bits_per_byte"] = loss / math.log(2) / data["bytes_per_token"]
        lines.append((step, step, row))
    write_lines(Path(name), lines)


BYTES = described(d=("text", 4001, 128))
GPT2 = described("gpt2", 50257, 4.0, d=("text", 1000.25, 62))
SHORT = described(d=("text", 4001, 8))
OTHER = described(d=("novel", 7001, 128))
WEB = described("gpt2", 50257, None, web=("web", 900, 20))
CHAT = described("bytes", 257, None, d=("chat", 332, 24))
MIXED = described(d=("text", 4001, 128), e=("novel", 7001, 128))


OF_D = "windows of 16 tokens of 100% d by bytes with 257 tokens"
APART = "apart, by nats a token: no bits a byte (conversations, or shards without meta.json)"


@pytest.mark.parametrize("runs, order, words", [
    ([("a", 3.0, BYTES), ("b", 2.0, BYTES)], "b a", []),
    ([("a", 3.4, BYTES), ("b", 6.4, GPT2)], "b a",
     [f"note     the evaluations read 128 {OF_D} (a); 62 windows of 16 tokens of 100% d by gpt2 "
      "with 50,257 tokens (b)", "note     so the order is by bits a byte, not by nats a token",
      "note     the chart's unit is bits a byte"]),
    ([("a", 3.0, BYTES), ("b", 2.0, OTHER), ("c", 1.0, OTHER)], "c b a",
     [f"note     the evaluations read 128 {OF_D} (c, b); 128 {OF_D} (a)\nnote     so the order"]),
    ([("a", 3.0, BYTES), ("b", 2.0, SHORT)], "b a",
     [f"note     the evaluations read 8 {OF_D} (b); 128 {OF_D} (a)\nnote     so the order"]),
    ([("a", 3.0, BYTES), ("b", 2.0, MIXED)], "b a",
     ["note     the evaluations read 256 windows of 16 tokens of 50% d + 50% e by bytes",
      "note     so the order"]),
    ([("a", 3.0, BYTES), ("b", 2.0, CHAT)], "a b",
     [f"note     the evaluations read 24 {OF_D} (b); 128 {OF_D} (a)\n", APART]),
    ([("a", 3.0, BYTES), ("b", 2.0, WEB), ("c", 1.0, WEB)], "a c b",
     [APART, "note     the chart's unit is nats a token, in which different tokenizers cannot be"]),
    ([("a", 3.0, BYTES), ("b", 2.0, "unknown"), ("c", None, BYTES)], "a b c",
     ["note     the evaluations read what metrics.jsonl does not say (b); 128 windows", APART,
      "without an evaluation"]),
    ([("a", 3.0, "unknown"), ("b", 2.0, "unknown")], "b a", []),
    ([("b", 2.0, WEB), ("a", 1.0, WEB)], "a b", [])])
def test_compare_orders_by_nats_only_what_is_the_same_test(tmp_path, monkeypatch, runs, order,
                                                           words):
    """Of one text the run on bytes with 3.4 nats a token is worse than that on GPT-2's tokens with
    6.4. Lines say what differs, or why a run stands apart."""
    monkeypatch.chdir(tmp_path)
    for name, loss, data in runs:
        write_run(name, loss, data=data)
    text = compare.compare(compare.read_runs([name for name, *_ in runs]))
    table = [line.split() for line in text.splitlines() if "h00m" in line]
    assert "".join(line[0] for line in table) == "abc"[:len(runs)]
    assert " ".join(line[-1] for line in table) == order
    for line in words:
        assert f"\n{line}" in text, text
    assert ("note" in text or "apart" in text) == bool(words), text
    assert ("so the order" in text) == any("so the order" in line for line in words), text


def test_compare_reads_what_is_not_finite_or_not_a_step(tmp_path, monkeypatch):
    """A first loss of null, NaN as another program writes it, rows without their fields: what is
    left is drawn and ordered. A run of one step is a line, too."""
    monkeypatch.chdir(tmp_path)
    nan, inf = math.nan, math.inf
    write_lines(Path("a"), [(0, 1, dict(loss=None, val_loss=None)), (1, 2, dict(loss=nan)),
                            (2, 3, dict(loss=4, val_loss=inf)), (3, 4, dict(loss=3, val_loss=2)),
                            (4, 5, dict(loss=inf, val_loss=nan, bits_per_byte=nan))])
    with open("a/metrics.jsonl", "a") as file:
        file.write('{"step": 6, "time": 14400}\n[]\nnull\n{"step": 7, "time": 14400, "loss": 1}\n')
    write_lines(Path("b"), [(0, 1, dict(loss=9, val_loss=nan))])
    write_lines(Path("c"), [(0, 1, dict(loss=nan)), (1, 2, dict(loss=None))])
    one, two = compare.compare(compare.read_runs(["b", "c", "a"])).splitlines()[-2:]
    assert one.split()[:6] == "a 2.0000 4 2.0000 4 5".split() and one.split()[7] == "4h00m"
    assert two.split()[:5] == "b - - - -".split()
    assert compare.compare(compare.read_runs(["b"])).splitlines()[0].split() == ["9.0000", "|", "a"]


def test_compare_draws_bits_per_byte_where_tokenizers_differ(tmp_path, monkeypatch):
    """Five nats in a token of one byte, or of four, are 7.21 bits a byte, or 1.80."""
    monkeypatch.chdir(tmp_path)
    for name, data in (("a", BYTES), ("b", GPT2)):
        write_run(name, *[5.0] * 64, data=data)
    chart = compare.compare(compare.read_runs(["a", "b"])).splitlines()
    assert [chart[row].split()[0] for row in (0, 15)] == ["7.2135", "1.8034"]


def test_a_runs_best_is_of_one_test_and_a_clock_set_back_is_no_time(run_compare, tmp_path,
                                                                    monkeypatch):
    """A resume with other --eval-tokens: what was evaluated before does not count, and a line says
    so; nor what was evaluated on data that is not known. The clock is set back by two hours."""
    monkeypatch.chdir(tmp_path)
    def lines(before):
        start = dict(event="start", config={})
        if before is not None:
            start["data"] = before
        return [(5, 0, start), (6, 1, dict(loss=4, val_loss=1.0)), (4, 2, dict(loss=3)),
                (4, 2, dict(event="resume", config={}, data=BYTES)),
                (4.5, 3, dict(loss=2, val_loss=2.5)), (4.5, 4, dict(loss=2, val_loss=2.25)),
                (4.5, 5, dict(loss=2, val_loss=math.nan))]
    for name, before, words in [("a", SHORT, f"read 8 {OF_D}: they are left out"),
                                ("b", None, "read what metrics.jsonl does not say: they")]:
        write_lines(Path(name), lines(before))
        text = compare.compare(compare.read_runs([name, f"{name}/", f"./{name}"]))
        assert f"note     {name}: evaluations up to step 1 {words}" in text
        assert text.splitlines()[-1].split()[:7] == "a 2.2500 4 2.2500 4 5 500".split()
        assert text.splitlines()[-1].split()[7] == "1h30m" and text.count("h30m") == 1
    status, _, error = run_compare("a/metrics.jsonl")
    assert status == 2 and "a/metrics.jsonl is a file: give the --out of a run" in error


# ---------------------------------------------------------------------------------------------
# Long runs
# ---------------------------------------------------------------------------------------------

def test_a_long_run_is_read_in_columns(tmp_path, monkeypatch):
    """A step takes 48 bytes. The rows that a resume in the middle made void are left out. Of equal
    losses the first is the best."""
    monkeypatch.setattr(metrics, "BLOCK", 2 ** 16)
    lines = [(s, s, dict(loss=5.0, val_loss=4.0)) for s in range(1, 5001)]
    lines += [(5001, 5001, dict(loss=5.0, val_loss=1.0)), (5001, 4003, dict(event="resume"))]
    lines += [(s, s, dict(loss=5.0, val_loss=4 - (s in (8191, 9000)))) for s in range(4004, 20_001)]
    write_lines(tmp_path / "a", lines)
    tracemalloc.start()
    run = metrics.read_metrics(tmp_path / "a")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 * 48 * 20_000 + 2 ** 20, peak
    assert run.steps["step"].tolist() == [*range(1, 20_001)]
    best = comparable_losses.evaluated(run).best
    assert (run.last["step"], run.max_lr, best["step"]) == (20_000, 0.1 - 0.01, 8191)


@pytest.mark.parametrize("block", [1, 7, 2 ** 20])
@pytest.mark.parametrize("content", [b"", b"a", b"a\n", b"a\nbc\n\nd", b"\n" * 9])
def test_lines_are_read_backwards(tmp_path, monkeypatch, block, content):
    monkeypatch.setattr(metrics, "BLOCK", block)
    (tmp_path / "a").write_bytes(content)
    assert [*metrics.lines_backwards(tmp_path / "a")] == content.split(b"\n")[::-1]


# ---------------------------------------------------------------------------------------------
# The picture
# ---------------------------------------------------------------------------------------------

def test_a_picture_has_means_of_the_losses_and_validation_points(tmp_path, monkeypatch):
    """Of 1/50 of the longest run's tokens; a shorter run's line ends where it does. What has no
    loss is left out."""
    monkeypatch.chdir(tmp_path)
    write_lines(Path("a"), [(s, s, dict(loss=s)) for s in range(1, 201)])
    losses = [2.0, 4.0, None, math.nan, 0, 3.0]
    write_lines(Path("b"), [(s, s, dict(loss=loss)) for s, loss in enumerate(losses, 1)]
                + [(7, 7, dict(loss=5.0, val_loss=4.5))])
    runs = compare.read_runs(["a", "b"])
    a, b = loss_picture.curves(runs, "loss")
    assert a == ([400 * k + 200 for k in range(50)], [4 * k + 2.5 for k in range(50)])
    assert b == ([200, 600], [3.0, 4.0])
    assert loss_picture.curves(runs, "val_loss") == [([], []), ([600], [4.5])]


def test_a_picture_says_how_far_layouts_differ(tmp_path, monkeypatch):
    """Only runs that should have the same losses have a strip, over the steps that they share."""
    monkeypatch.chdir(tmp_path)
    for name, losses, config in [
            ("a", [4.0, 2.0, None, 1.0], dict(tp=1)),
            ("b", [4.0, 2.0, 3.0, 1.001, 0.5], dict(tp=2)),
            ("c", [4.0, 2.0], dict(lr=0.1)), ("d", [None, None, 1.0], dict(tp=1))]:
        write_lines(Path(name), [(0, 0, dict(event="start", config=config))]
                    + [(s, s, dict(loss=loss)) for s, loss in enumerate(losses, 1)])
    a, b, c, d = compare.read_runs(["a", "b", "c", "d"])
    [strip] = loss_picture.strips([a, b])
    assert strip.words == "without --exact: at most 1.0e-03" and strip.members == [0, 1]
    assert strip.curves[0].losses == [0, 0, pytest.approx(1e-3)]
    assert strip.curves[0].tokens == [95, 195, 395]
    assert loss_picture.strips([a, c]) == loss_picture.strips([a, d]) == []
    assert loss_picture.strips([a]) == []
    assert loss_picture.layouts([a, b]) == ["1 process", "tp 2"]
    assert loss_picture.layouts([a, d]) == []


def test_the_colors_of_a_sweep_rise_with_the_first_flag(tmp_path, monkeypatch):
    """A dash is a value of the second. Of layouts a dash means --exact, a color the layout; runs
    that differ in more have the colors in turn."""
    def of(names, flags, *configs):
        runs = [metrics.Run(name, events=[dict(event="start", config=config)])
                for name, config in zip(names, configs)]
        return loss_picture.looks(runs, names, flags)
    monkeypatch.setattr(loss_picture, "strips", lambda runs: [])
    sweep = [dict(lr=lr, beta2=beta2) for lr in (4, 1, 2) for beta2 in (0.95, 0.9)]
    first, *_, last = loss_picture.RISING
    assert of("abcdef", ["lr", "beta2"], *sweep) == [
        (color, dash) for color in (last, first, loss_picture.RISING[3]) for dash in ("--", "-")]
    assert of("ab", ["lr"], dict(lr=2), dict(lr=1)) == [(last, "-"), (first, "-")]
    ours = loss_picture.COLORS
    assert of("abcdefgh", ["model"], *[dict(model=name) for name in "abcdefgh"]) == [
        *[(color, "-") for color in ours], (ours[0], "--")]
    monkeypatch.setattr(loss_picture, "strips", lambda runs: [1])
    assert of(["tp 2", "pp 2", "tp 2, exact"], ["tp", "exact"], {}, {}, dict(exact=True)) == [
        (ours[0], "-"), (ours[1], "-"), (ours[0], "--")]


def test_a_picture_names_the_best_run_first_and_the_flags_that_differ(run_compare, tmp_path,
                                                                      monkeypatch):
    """Below the axes: the legend. More than 28 runs: a line says so."""
    pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    for i in range(30):
        write_lines(Path(f"<{i}>"), [
            (0, 0, dict(event="start", config=dict(out=f"<{i}>", lr=i / 8, seed=1))),
            (1, 1, dict(loss=8, val_loss=50 - i)), (2, 2, dict(loss=5))])
    status, text, error = run_compare("--svg", "a.svg", *[f"<{i}>" for i in range(30)])
    assert (status, error) == (0, "") and text.endswith(
        "\nnote     a.svg has the first 28 of 30 runs\nwrote a.svg\n")
    svg = Path("a.svg").read_text()
    legend = re.findall(r">&lt;(\d+)&gt;, lr ([\d.]+)</text>", svg)
    assert legend == [(str(i), str(i / 8)) for i in range(29, 1, -1)]
    monkeypatch.setattr(matplotlib_svg, "find_spec", lambda name: None)
    status, _, error = run_compare("--svg", "a.svg", "<1>", "<2>")
    assert status == 2 and error == (
        "tools.compare: --svg needs a package that is missing: pip install matplotlib\n")
