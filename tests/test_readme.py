"""What README.md and docs/ promise: their commands run as printed, and their names of tests and
flags exist. README is the text of all pages.

    python -m pytest tests/test_readme.py

Slurm, and torchrun on two machines, are imitated by scripts of these names.
"""
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest

import data
import tools.schedule
from base.options import Config, parse_flags
from base.sample_flags import SampleFlags
from corpus import flags as data_flags
from models import SIZES
from runtime import checks, plain_run
from tests.harness import (PAGES, README, ROOT, TINY, Command, kinds, launch, read_metrics,
                           readme_commands, saved, wait_for_step)
from tools.plan.flags import PlanConfig

FOLDERS = ["models", "corpus", "parallelism", "base", "runtime", "tools", "tests", "docs"]


# ---------------------------------------------------------------------------------------------
# The front page
# ---------------------------------------------------------------------------------------------

def test_the_readme_says_how_long_the_code_is():
    """The book in its order, test_all.py and each folder, to a tenth."""
    page = PAGES["README.md"]
    book = re.findall(r"(?m)^\| \[(\w+\.py)\]", page)
    assert book == ["train.py", "model.py", "data.py", "parallel.py", "amp.py", "checkpoint.py",
                    "sample.py"]
    whole = {"book": [ROOT / name for name in book], "test_all.py": [ROOT / "test_all.py"],
             **{name: [file for file in (ROOT / name).rglob("*") if file.suffix in (".py", ".md")]
                for name in FOLDERS}}
    said = [("book", lines) for lines in re.findall(r"about ([\d,]+) lines", page)[:2]]
    said += [("test_all.py", lines) for lines in re.findall(r"about ([\d,]+) lines more", page)]
    said += re.findall(r"(?m)^\| \[(\w+)/\].*\| ([\d,]+) \|$", page)
    assert [name for name, _ in said] == ["book", "book", "test_all.py", *FOLDERS]
    counted = {name: sum(len(file.read_text().splitlines()) for file in files)
               for name, files in whole.items()}
    wrong = [f"{name}: {lines}, it has {counted[name]}" for name, lines in said
             if abs(int(lines.replace(",", "")) / counted[name] - 1) > 0.1]
    assert not wrong, wrong


def test_the_project_has_one_name_and_can_be_cited():
    """CITATION.cff has the keys that its format 1.2.0 requires."""
    citation = (ROOT / "CITATION.cff").read_text()
    name = PAGES["README.md"].splitlines()[0].removeprefix("# ")
    assert f'title: "{name}"' in citation.splitlines()
    assert f"the {name} authors" in (ROOT / "LICENSE").read_text()
    keys = re.findall(r"(?m)^([\w-]+):", citation)
    assert {"cff-version", "message", "title", "authors"} <= set(keys)
    assert len(set(keys)) == len(keys)


# ---------------------------------------------------------------------------------------------
# The commands of README and chapters, as printed
# ---------------------------------------------------------------------------------------------

def test_the_readmes_commands_run_as_printed_with_fewer_steps(tmp_path):
    """data.py, train.py on eight ranks with 3 steps, and sample.py; the sample begins with the
    prompt, and there is no warning. (.ci/run makes the environment, and starts the eight by
    torchrun.) The line for one process is the same but for train.py, and the first loss is, too."""
    [line], [alone] = (block.strip().splitlines() for block in README.split("```")[1:4:2])
    assert alone == line.replace("torchrun --nproc_per_node=8 train.py --tp 2 --pp 2",
                                 "python train.py").replace("--ckpt out/latest.pt ", "")
    *_, (_, make), (_, ranks, *run), (_, *draw) = map(shlex.split, line.split(" && "))
    assert [ranks, *run] == ["--nproc_per_node=8", "train.py", "--tp", "2", "--pp", "2"]
    ends = [Command(make, cwd=tmp_path).finish(200)]
    ends += [rank.finish(200) for rank in launch(8, *run[1:], "--steps", 3, "--eval-every", 0,
                                                 cwd=tmp_path)]
    ends += [Command(*draw, cwd=tmp_path).finish(200)]
    ends += [Command("train.py", "--steps", 1, "--out", "one", cwd=tmp_path).finish(200)]
    ends += [Command(*draw[:1], *draw[3:], cwd=tmp_path).finish(200)]
    assert all(status == 0 and "warn" not in error.lower() for status, _, error in ends), ends
    made, trained, *_, sampled, alone, sampled_too = (text for _, text, _ in ends)
    assert "torchrun --nproc_per_node=8 train.py --tp 2 --pp 2" in made
    assert "step 3/3" in trained and "dp 2 x pp 2 x tp 2" in trained
    assert sampled.startswith("def ") and sampled_too == sampled
    assert re.search(r"step 1/1  (loss \S+)", alone)[1] in trained


def test_the_readme_names_only_tests_and_flags_that_exist():
    tests = set(re.findall(r"(?:`|::)(test_\w+)`", README))
    files = [ROOT / "test_all.py", *ROOT.glob("tests/test_*.py")]
    defined = re.findall(r"def (test_\w+)", "".join(file.read_text() for file in files))
    assert len(tests) > 10 and tests <= set(defined)
    elsewhere = PAGES["flags.md"].split("## Names in other projects")[1]
    own = re.sub(r"(?m)^(\| `--.*?\|).*", r"\1", elsewhere)
    flags = set(re.findall(r"--[a-z][a-z0-9-]*", README.replace(elsewhere, own)))
    names = [field.name for kind in (Config, PlanConfig, data_flags.DataFlags, SampleFlags)
             for field in fields(kind)]
    known = {f"--{name.replace('_', '-')}" for name in names}
    tool_files = [str(file.relative_to(ROOT)) for file in ROOT.glob("tools/**/*.py")]
    for file in ["parallel.py", "checkpoint.py", *tool_files]:
        known |= set(re.findall(r"--[a-z][a-z0-9-]*", (ROOT / file).read_text()))
    assert not {f for f in flags if f not in known and not f.startswith((
        "--help", "--nproc", "--nnodes", "--node", "--rdzv", "--master", "--ntasks", "--gpus",
        "--job", "--cpus", "--max-restarts", "--tasks", "--include", "--num", "--time", "--signal",
        "--logdir", "--requeue", "--open-mode", "--kill-on", "--shutdown-timeout"))}


def test_the_readmes_slurm_script_requeues_until_the_run_has_ended(shards, tmp_path):
    """Slurm is imitated: a signal, as before the time limit, asks for one more start, which goes on
    to the end and asks for no other."""
    script = next(block for block in README.split("```")[1::2] if "#SBATCH" in block)
    out = tmp_path / "out"
    run = [sys.executable, ROOT / "train.py", "--data", shards, "--out", out, *TINY,
           "--save-every", 0]
    for name, body in [("scontrol", f'echo "$@" >> {tmp_path}/asked; echo node0; echo node1'),
                       ("torchrun", f"exec {shlex.join(map(str, run))} --steps $STEPS"),
                       ("srun", f'shift 2; "$@" & echo $! > {tmp_path}/pid; wait $!')]:
        (tmp_path / name).write_text(f"#!/bin/bash\n{body}\n")
        (tmp_path / name).chmod(0o755)

    def start(steps):
        return subprocess.Popen(
            ["bash", "-c", script], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
            env=dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}", SLURM_JOB_ID="7",
                     SLURM_JOB_NODELIST="node[0-1]", STEPS=str(steps)))
    job = start(1_000_000)
    wait_for_step(out, 3, job)
    os.kill(int((tmp_path / "pid").read_text()), signal.SIGTERM)
    text, _ = job.communicate(timeout=60)
    last = read_metrics(out)[0][-1]["step"] + 5
    text += start(last).communicate(timeout=60)[0]
    assert (tmp_path / "asked").read_text().splitlines() == [
        "show hostnames node[0-1]", "requeue 7", "show hostnames node[0-1]"], text
    assert kinds(read_metrics(out)[1]) == ["start", "stop", "resume", "end"]
    assert saved(out, last)["step"] == last


def test_the_readmes_loop_of_two_machines_ends_after_ctrl_c(tmp_path):
    """torchrun is imitated: it survives Ctrl-C for a moment and fails. A failure alone starts it
    again; Ctrl-C ends the loop."""
    block = next(x for x in README.split("```")[1::2] if "until torchrun --nnodes=2" in x)
    (tmp_path / "torchrun").write_text(f"""#!/bin/bash
        echo start >> {tmp_path}/starts
        test $(wc -l < {tmp_path}/starts) -gt 1 || exit 1
        trap 'kill $!; sleep 0.5; exit 1' INT
        touch {tmp_path}/waits; sleep 60 & wait""")
    (tmp_path / "torchrun").chmod(0o755)
    path = f"{tmp_path}:{os.environ['PATH']}"
    shell = subprocess.Popen(["bash", "-c", block.replace("sleep 5", "sleep 0.1")],
                             env=dict(os.environ, PATH=path), start_new_session=True,
                             preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL))
    while not (tmp_path / "waits").exists():
        assert shell.poll() is None
        time.sleep(0.02)
    os.killpg(shell.pid, signal.SIGINT)
    assert shell.wait(20) != 0
    assert (tmp_path / "starts").read_text() == "start\n" * 2


def test_the_readmes_layouts_are_not_refused(shards):
    """All train.py commands, with the model and the number of ranks that they name."""
    commands = readme_commands("train.py")
    for before, flags in commands:
        if "--plain" in flags:
            plain_run.check_flags(parse_flags(flags), world=1)
        given = dict(parse_flags(flags), data=str(shards), seq_len=16)
        world = math.prod(map(int, re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", before)))
        config, cfg = checks.validate(given, None, world, "cuda")
        if "n_layer" not in given:
            assert cfg.n_layer == SIZES[config.model]["n_layer"]
    assert len(commands) == 31


KINDS = ("tp", "pp", "cp", "pp_schedule", "pp_chunks", "zero", "sequence_parallel", "recompute",
         "offload", "dtype", "exact", "resume", "init_from")


@pytest.mark.slow
def test_the_readmes_training_commands_make_a_step_with_a_tiny_model(shards, tmp_path):
    """Each layout, precision and beginning of a train.py command once, on as many ranks, all on the
    CPU. (--compile and --plain have tests of their own.) Those that begin from a checkpoint find
    one of eight steps."""
    tiny = ["--data", shards, "--n-layer", 4, "--n-head", 2, "--n-embd", 16, "--seq-len", 16,
            "--device", "cpu", "--eval-every", 0, "--timeout", 300]
    first, = launch(1, *tiny, "--batch-size", 4, "--steps", 8, "--out", tmp_path / "first")
    assert first.finish(200)[0] == 0
    made = []
    for number, (before, flags) in enumerate(readme_commands("train.py")):
        steps = 1 if "--resume" not in flags else 9
        for flag in ("--resume", "--init-from"):
            if flag in flags:
                flags[flags.index(flag) + 1] = tmp_path / "first" / "latest.pt"
        world = math.prod(map(int, re.findall(r"--(?:nnodes|nproc_per_node)=(\d+)", before)))
        flags = [flag for flag in flags if flag not in ("--compile", "--plain")]
        given = parse_flags(list(map(str, flags)))
        kind = [world, *(given.get(name) for name in KINDS)]
        if kind in made:
            continue
        made.append(kind)
        ranks = launch(world, *flags, *tiny, "--steps", steps, "--out", tmp_path / str(number))
        ends = [rank.finish(500) for rank in ranks]
        assert {status for status, *_ in ends} == {0}, (flags, ends)
        assert f"step {steps}/{steps}" in ends[0][1], ends[0]


def test_the_readmes_other_commands_are_not_refused(tmp_path, monkeypatch, capsys):
    """data.py takes the flags of its commands, and tools.schedule draws what the pages show.
    (Other tools: a file of tests for each.)"""
    monkeypatch.chdir(tmp_path)
    for tokenizer in ("PATH/tokenizer.json", "data/own/bpe-0123456789ab.tiktoken"):
        Path(tokenizer).parent.mkdir(parents=True)
        Path(tokenizer).touch()
    made = [data_flags.parse_flags(flags) for _, flags in readme_commands("data.py")]
    assert [str(args.out) for args in made] == [
        "data/python", "data/python", "data/mine", "data/fineweb", "data/tinystories",
        "data/shakespeare", "data/words", "data/chat", "data/mine", "data/own", "data/more",
        "data/fineweb-10bt", "data/c4",
        "data/$source", "data/part-00", "data/part-01", "data/mine-bytes",
        "data/smollm2", "data/python", "data/mine"]
    drawings = readme_commands("tools.schedule")
    assert len(drawings) == 4
    for _, flags in drawings:
        monkeypatch.setattr(sys, "argv", ["schedule.py", *flags])
        tools.schedule.main()
        assert capsys.readouterr().out.split("\n\n")[1] in README


@pytest.mark.slow
def test_the_quick_start_ends_at_the_readmes_validation_loss(library, tmp_path):
    """In one process; layouts differ by less. To 0.01 with the library of Python 3.11, whose loss
    the README gives. Others end near 1.62: the 0.05 allowed to them is no measured spread."""
    loss = float(re.search(r"validation: (\S+) nats", README)[1])
    first, = launch(1, "--data", library, "--out", tmp_path)
    assert first.finish(1500)[0] == 0
    expected, bound = (loss, 0.01) if sys.version_info[:2] == (3, 11) else (1.62, 0.05)
    assert abs(read_metrics(tmp_path)[0][-1]["val_loss"] - expected) <= bound


def test_the_readme_prints_the_text_of_a_spike(shards, tmp_path):
    """The README's lines print the text that the shard has where a run with an absurd learning rate
    diverged."""
    shutil.copytree(shards, tmp_path / "data" / "python")
    status, _, error = Command("train.py", *TINY, "--seq-len", 128, "--lr", 1e19,
                               "--max-rollbacks", 0, cwd=tmp_path).finish()
    assert status == 1 and "are used up; the run has diverged" in error
    assert "begin again in another --out, with a lower --lr" in error      # it has no checkpoint
    recipe = next(block for block in README.split("```")[1::2] if "spike" in block)
    recipe = recipe.replace("python - ", f"{shlex.quote(sys.executable)} - ")
    def print_spike():
        return subprocess.run(["bash", "-c", recipe], cwd=tmp_path, capture_output=True, text=True)
    text = print_spike()
    [spike] = [event for event in read_metrics(tmp_path / "out")[1] if event["event"] == "spike"]
    windows = data.TokenDataset(shards, "train", 128).window_ids(1337, 0, 4 * spike["step"])
    tokens = np.fromfile(shards / "train_000000.bin", np.uint16, offset=1024)
    texts = [tokens[128 * i:128 * i + 129] for i in windows.tolist()]
    assert text.stdout == "".join(
        f"---- window {window}\n{bytes(part.tolist()).decode(errors='replace')}\n"
        for window, part in zip(windows, texts)), text.stderr
    assert spike["windows"] == windows.tolist() and len(texts) >= 4
    (tmp_path / "out" / "metrics.jsonl").write_text('{"step": 1}\n')
    assert print_spike().stderr == "out/metrics.jsonl has no spike\n"
