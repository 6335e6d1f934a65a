"""What the programs have in common: their help, and one line for a mistake."""
import importlib
import re

import pytest

from tests.commands import expect_mistake, run_main
from tests.harness import names_in


@pytest.mark.parametrize("program", [
    "corpus.program", "train", "sample", "tools.schedule", "tools.plan.__main__", "tools.ladder",
    "tools.sweep"])
def test_help_is_in_groups_and_says_the_form_of_each_value(capsys, program):
    """Each flag but --help has a heading of its own subject, and N, X, {a,b} ... for a value, not
    its own name."""
    _, text, _ = run_main(capsys, importlib.import_module(program), "--help")
    _, general, *groups = re.split(r"(?m)^\w.*:$", text)
    assert re.findall("--[a-z-]+", general) == ["--help"] and groups
    forms = dict(re.findall(r"(?m)^  (--[a-z0-9-]+) ([^ \n]+)", text))
    assert len(forms) >= 4
    for flag, form in forms.items():
        assert form != flag.strip("-").replace("-", "_").upper(), flag


@pytest.mark.parametrize("program, flags, words", [
    ("bench.__main__", "gpu", "no CUDA device here: cpu"), ("bench.__main__", "", "kind"),
    ("bench.__main__", "cpu memory", "no part 'memory': it has race"),
    ("bench.__main__", "gpu --ranks 4", "flag of eight and cpu"),
    ("follow", "o --to wandb", "o has no metrics.jsonl"),
    ("follow", "damaged --to wandb", "damaged has no metrics.jsonl with a whole"),
    ("follow", "--to wandb", "OUT"), ("compare", "o --svg a.png", "ends in .svg"),
    ("sweep", "--lr 1e-3", "nothing to sweep"), ("sweep", "--beta2 0.9,2", "--beta2: 2.0 must"),
    ("sweep", "--zero 0,1,9", "--zero: invalid choice: 9"),
    ("sweep", "--lr 1,2 --stepz 10", "did you mean --steps?"),
    ("sweep", "--lr 1,2 --resume a.pt", "--resume is for one run"),
    ("sweep", "--lr 1,2 --data nowhere", "nowhere"),
    *(("schedule", *row) for row in [
        ("--pp 0", "--pp"), ("--schedule 1f1b", "--pp-schedule?"),
        ("--pp 2 --pp-schedule interleaved --pp-chunks 2 --microbatches 3", "multiples --pp 2")]),
    *(("plan.__main__", *row) for row in [
        ("", "--world --gpu v100-16g"), ("--world 8 --gpu h100 --tokens nan", "--tokens: nan 1"),
        ("--world 8 --gpu h100 --tokens 1e9 --steps 5", "--steps --tokens"),
        ("--world 8 --gpu h300", "--gpu: h300 v100-16g"),
        ("--world 8 --gpu a100", "a100-40g a100-80g"),
        ("--world 3 --tp 2 --gpu h100", "--world 3 tp 2 x pp 1"),
        ("--world 7 --gpu h100 --search", "batch size 16 7 x h100 --batch-size --world"),
        ("--world 2 --gpu h100 --model gpt3-175b --dtype bf16 --search --zero 1 --recompute",
         " GB larger --offload"),
        ("--world 1 --gpu v100-32g --dtype bf16", "V100 bf16"),
        ("--world 8 --gpu h100 --model gpt3-6.7", "gpt3-6.7b?")])])
def test_a_mistake_is_one_line_and_makes_nothing(tmp_path, monkeypatch, capsys, program, flags,
                                                 words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "damaged").mkdir()
    (tmp_path / "damaged/metrics.jsonl").write_text('{"step": 9, "lo')
    module = importlib.import_module(f"tools.{program}")
    expect_mistake(run_main(capsys, module, *flags.split()), *words.split(),
                   program=f"tools.{program.removesuffix('.__main__')}")
    assert names_in(tmp_path) == ["damaged"]
