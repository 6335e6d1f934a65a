"""How the tests start programs, and the data sets that these read: a plugin of pytest.

    Commands    Command, launch, torchrun: in other processes; run_train, run_data, run_sample: here
    Data sets   shards, two_sources, library, things: made once"""
import functools
import gc
import io
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

import data
import sample
import train
from base import processes
from corpus import documents, downloads, encode, file_formats, inputs, program
from corpus.prepare import prepare
from tests.harness import FORKS, ROOT

TINY = ["--n-layer", "2", "--n-head", "2", "--n-embd", "16", "--seq-len", "16", "--batch-size", "4",
        "--steps", "4", "--warmup-steps", "2", "--save-every", "2", "--eval-every", "2",
        "--eval-tokens", "64"]
NASTY = ["a  b", " \n\n \tx", "don't 've ''s", "\u00e9t\u00e9 \u6f22\u5b57 \u00a0\u2003x \u3000",
         "\r\n\r\n", "    ", "12 345 !?", "\x85\x1c \x1d\n", "\U0001f600 \U0001f469\u200d",
         documents.EOT, "\u200b ", "A", "\n", " ", "\t\v", "'"]
SHARED = ROOT.parent / "shared"         # what is downloaded elsewhere, where there is a copy
PAGES = {page.name: page.read_text() for page in
         [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]}
README = "\n".join(PAGES.values())         # the front page, then the chapters by name


def readme_commands(program) -> list[tuple[str, list[str]]]:
    """(what stands before `program`, its flags) of each command in the README and the chapters that
    python or torchrun starts. (Of a sweep its first turn; no transcripts, no --help.)"""
    blocks = README.split("```")
    commands = [block for block in blocks[1::2] if not re.match(r"console\n|\w*\n\$ ", block)]
    text = "".join(commands).replace("\\\n", " ").replace(" && ", "\n")
    text = re.sub("for lr in (\\S+) .*; do (.*); done",
                  lambda loop: loop[2].replace("$lr", loop[1]), text)
    text += "\n".join(re.findall("`((?:python|torchrun) [^`]*)`", "".join(blocks[::2])))
    found = re.findall(rf"(?m)^(.*(?:python|torchrun).* ){re.escape(program)}(?: (.*))?$", text)
    return [(before, shlex.split(flags, comments=True)) for before, flags in found
            if flags != "--help"]


# ---- Programs

def run_file(folder, cwd, environment, file, arguments):
    """What `python FILE ARGUMENTS` does, in this process, with its output in files."""
    gc.freeze()         # what is imported is not collected again and again
    for number, name in [(1, "out"), (2, "error")]:
        os.dup2(os.open(f"{folder}/{name}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), number)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False, buffering=1)
    os.chdir(cwd)
    os.environ.update({name: str(value) for name, value in environment.items()})
    for number in (signal.SIGHUP, signal.SIGINT):       # ignored under nohup, and behind `&`
        signal.signal(number, signal.SIG_DFL)
    sys.argv = list(map(str, [file, *arguments]))
    runpy.run_path(str(ROOT / file), run_name="__main__")


class Command:
    """`python FILE ARGUMENTS` in a process of its own, a fork of one that has imported torch."""

    def __init__(self, file, *arguments, cwd=ROOT, **environment):
        self.folder = tempfile.mkdtemp()
        weakref.finalize(self, shutil.rmtree, self.folder, ignore_errors=True)
        self.process = FORKS.Process(target=run_file, daemon=True, args=(
            self.folder, cwd, environment, file, arguments))
        self.process.start()
        self.pid = self.process.pid

    def poll(self):
        return self.process.exitcode

    def send_signal(self, number):
        os.kill(self.pid, number)

    def finish(self, seconds=60):
        """Wait for its end -> (exit status, standard output, standard error)."""
        self.process.join(seconds)
        texts = [Path(self.folder, name).read_text() for name in ("out", "error")]
        if self.poll() is None:
            self.process.kill()
            raise TimeoutError(f"no end in {seconds} s: {texts}")
        return self.poll(), *texts


def launch(world, *flags, file="train.py", **environment):
    """train.py on `world` ranks as torchrun would start them, but without torchrun: [Command]."""
    held = socket.socket()      # or the kernel gives the port away before rank 0 listens to it
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    held.bind(("127.0.0.1", 0))
    ranks = [Command(file, *flags, RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=world,
                     LOCAL_WORLD_SIZE=world, MASTER_ADDR="127.0.0.1",
                     MASTER_PORT=held.getsockname()[1], **environment) for rank in range(world)]
    weakref.finalize(ranks[0], held.close)
    return ranks


def torchrun(count, *arguments, cwd=None, gpus="", **options):
    """torchrun on a free port, with the environment of a user's shell, but only these GPUs."""
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "CUDA_VIS"))}
    environment |= {} if gpus is None else dict(CUDA_VISIBLE_DEVICES=gpus)
    return subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", "--rdzv-backend=c10d",
         "--rdzv-endpoint=localhost:0", f"--nproc_per_node={count}", *map(str, arguments)],
        cwd=cwd, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        start_new_session=True, **options)


def wait_for(out, find, process, seconds=120):
    """What find(rows, events) says of metrics.jsonl, once that is true; `process` is a Command or a
    Popen."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and process.poll() is None:
        with suppress(FileNotFoundError, ValueError):
            if found := find(*read_metrics(out)):
                return found
        time.sleep(0.02)
    raise AssertionError((process.finish if isinstance(process, Command) else
                          process.communicate)())


def wait_for_step(out, step, process):
    wait_for(out, lambda rows, _: rows and rows[-1]["step"] >= step, process)


def run_main(capsys, module, *flags):
    """`python PROGRAM.py FLAGS`, in this process -> (exit status, stdout, stderr)."""
    with mock.patch.object(sys, "argv", [f"{module.__name__}.py", *map(str, flags)]):
        try:
            status = module.main() or 0
        except SystemExit as stop:
            status = stop.code
    return status, *capsys.readouterr()


@pytest.fixture
def run_data(capsys):
    """run_data(*flags) -> (exit status, standard output, standard error) of data.py."""
    return functools.partial(run_main, capsys, SimpleNamespace(__name__="data", main=program.main))


@pytest.fixture
def make_data(run_data, tmp_path, monkeypatch):
    """make_data(*input, *flags) -> (standard output, standard error) of data.py, which succeeds: in
    tmp_path, in bytes, to "out"."""
    monkeypatch.chdir(tmp_path)

    def make(*given):
        status, out, error = run_data("--tokenizer", "bytes", "--out", "out", "--input", *given)
        assert status == 0, error
        return out, error
    return make


@pytest.fixture
def refuse_data(run_data, tmp_path, monkeypatch):
    """refuse_data(words, *input, *flags): data.py writes no file and changes none, and ends with
    exit status 2 and one line, behind its notes, that has all of these words."""
    monkeypatch.chdir(tmp_path)

    def files_here(given):
        return {path: path.is_file() and str(path) not in map(str, given) and path.read_bytes()
                for path in Path().rglob("*") if not path.is_dir()}

    def refuse(words, *given):
        if not str(given[0]).startswith("--"):
            given = "--tokenizer", "bytes", "--out", "out", "--input", *given
        before = files_here(given)
        status, out, error = run_data(*given)
        *notes, line = error.splitlines(keepends=True)
        assert (status, out) == (2, "") and line.startswith("data.py: "), error
        assert all(note.startswith("note: ") for note in notes), error
        assert all(word in line for word in words.split()), line
        assert "Errno" not in line and files_here(given) == before
        return line
    return refuse


@pytest.fixture
def run_train(capsys):
    """run_train(*flags, **environment) -> (exit status, stdout, stderr) of train.main here. With a
    WORLD_SIZE above 1 this is rank 0, without the others: for mistakes, which it alone tells."""
    def run(*flags, **environment):
        if "WORLD_SIZE" in environment:
            ranks = environment["WORLD_SIZE"]
            environment = dict(RANK=0, LOCAL_WORLD_SIZE=ranks, MASTER_ADDR="127.0.0.1",
                               MASTER_PORT=29500) | environment
        with mock.patch.dict(os.environ, {k: str(v) for k, v in environment.items()}), \
                mock.patch.object(signal, "signal"), mock.patch.object(processes.time, "sleep"), \
                mock.patch.object(processes, "join_group"), \
                mock.patch.object(processes.dist, "destroy_process_group"):
            return run_main(capsys, train, *flags)
    return run


@pytest.fixture
def run_sample(things, monkeypatch, capsys):
    """run_sample(*flags) -> (exit status, standard output, standard error) of sample.py."""
    def run(*flags, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        return run_main(capsys, sample, "--ckpt", things / "whole.pt", *flags)
    return run


def read_metrics(out):
    """(rows of steps, events), each in the order of the file."""
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [r for r in rows if "event" not in r], [r for r in rows if "event" in r]


def kinds(events):
    return [event["event"] for event in events]


def expect_mistake(result, *words, program="train.py", status=2):
    """The program has ended with this exit status and one line, which has all of the words."""
    found, out, error = result
    assert (found, out) == (status, ""), (out, error)
    assert error.startswith(f"{program}: ") and error.count("\n") == 1, error
    assert all(word in error for word in words), (words, error)


# ---- Data sets

def shard(tokens, magic=20240520, version=1, count=None):
    """The bytes of a shard, whose header can be wrong."""
    header = np.array([magic, version, len(tokens) if count is None else count], "<i4").tobytes()
    return header.ljust(1024, b"\0") + np.array(tokens, "<u2").tobytes()


def texts_of(directory, *splits):
    """The documents of a split in tokens that are bytes; of two splits, document by document."""
    found = []
    for split in splits:
        tokens = np.concatenate([np.fromfile(file, "<u2", offset=1024)
                                 for file in sorted(Path(directory).glob(f"{split}_*.bin"))])
        before, *documents = np.split(tokens, np.flatnonzero(tokens == 256))
        assert not len(before)
        found.append([bytes(document[1:].tolist()).decode() for document in documents])
    return ["".join(parts) for parts in zip(*found, strict=True)]


def write_lines(path, records):
    """A file of JSON by lines, and its folder."""
    Path(path).parent.mkdir(exist_ok=True)
    Path(path).write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def write_texts(path, texts, field="text"):
    return write_lines(path, [{field: text} for text in texts])


def meta_of(folder):
    return json.loads(Path(folder, "meta.json").read_text())


def set_block(monkeypatch, size):
    """The characters read, and encoded, at once."""
    for module in (documents, downloads, encode, file_formats):
        monkeypatch.setattr(module, "BLOCK", size)


def dataset(directory, files, **changes):
    """A TokenDataset of these shards, {name: tokens}, with `changes` of meta.json."""
    directory.mkdir(exist_ok=True)
    for name, tokens in files.items():
        (directory / f"{name}.bin").write_bytes(shard(tokens))
    meta = dict(tokenizer="bytes", vocab_size=257, bytes_per_token=1.0, fingerprint="f")
    (directory / "meta.json").write_text(json.dumps(meta | changes))
    return data.TokenDataset(directory, "train", 4)


@pytest.fixture(scope="session")
def shards(tmp_path_factory):
    """A directory of token shards made by data.py."""
    folder = tmp_path_factory.mktemp("shards")
    (folder / "text.txt").write_text("".join(f"line {i}: some words é\n" for i in range(3000)))
    prepare([folder / "text.txt"], folder / "d", "bytes")
    return folder / "d"


@pytest.fixture(scope="module")
def two_sources(tmp_path_factory):
    """Directories a, of 40 windows of 16 tokens and 2 to validate on, and b, of more than 128."""
    folder = tmp_path_factory.mktemp("sources")
    for name, lines in (("a", [f"{i} + {i} = {2 * i}\n" for i in range(50)]),
                        ("b", [f"line {i}: other words é\n" for i in range(2200)])):
        (folder / f"{name}.txt").write_text("".join(lines))
        prepare([folder / f"{name}.txt"], folder / name, "bytes")
    return folder


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    """Shards of the standard library's source in bytes, as `python data.py` makes them."""
    folder = tmp_path_factory.mktemp("library") / "python"
    prepare(inputs.standard_library(), folder, "bytes")
    return folder


@pytest.fixture(scope="session")
def things(shards, tmp_path_factory):
    """A folder with things that are wrong, by the names that the mistakes below call them; and a
    whole checkpoint."""
    folder = tmp_path_factory.mktemp("things")
    (folder / "precious").write_text("a file")
    tokens = np.arange(100_000) % 257       # two blocks of check, one for each of two ranks
    beyond = np.append(tokens, 257)
    for name, of_train, of_val, changes in [
            ("beyond", beyond, tokens, {}), ("beyond_val", tokens, beyond, {}),
            ("torn", tokens, tokens, {}), ("other", tokens, tokens, dict(fingerprint="other")),
            ("opt", tokens, tokens, dict(tokenizer="opt-257")),
            ("toy", tokens, tokens, dict(vocab_size=300))]:
        dataset(folder / name, dict(train_0=of_train, val_0=of_val), **changes)
    os.truncate(folder / "torn/train_0.bin", 2000)
    dataset(folder / "lost", dict(train_000000=tokens, val_000000=tokens))
    (folder / "lost/meta.json").unlink()
    whole = Command("train.py", "--data", shards, "--out", folder / "run", *TINY).finish(200)
    assert whole[0] == 0, whole
    (folder / "run" / "latest.pt").rename(folder / "whole.pt")
    state = torch.load(folder / "whole.pt")
    state["format"] = 6
    torch.save(state, folder / "six.pt")
    (folder / "sixth").mkdir()
    shutil.copy(folder / "run" / "step_00000002.pt", folder / "sixth")
    shutil.copy(folder / "six.pt", folder / "sixth" / "latest.pt")
    (folder / "torn.pt").write_bytes((folder / "whole.pt").read_bytes()[:-5000])
    return folder
