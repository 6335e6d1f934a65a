"""What a run survives: lost peers, kills at any moment, chains of faults, divergence.

What comes after a fault is compared with a run without it, bit for bit. Checkpoints are files or
folders."""
import itertools
import math
import os
import random
import re
import shutil
import signal
import socket
import time
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
import torch

import checkpoint
import data
import train
from base import agreement, checkpoint_files
from base.checkpoint_files import LATEST, list_checkpoints, step_file
from base.options import Config
from runtime import directory
from tests.commands import (README, TINY, Command, expect_mistake, kinds, launch, read_metrics,
                            torchrun, wait_for, wait_for_step)
from tests.harness import (CFG, ROOT, Memory, after_backward, assert_same_state, column,
                           different_rows, gridded, log_of, saved, saved_file, settings)
from tests.test_layouts import drawn

FORMS = ["file", "folder"]


# ---- Peers that hang, vanish or are slow; a second run in the same --out

SLOW_SAVES = """
import checkpoint, pathlib, time, train
from runtime import folder_writer
def late(function):
    def slowed(*args):
        while any(pathlib.Path().glob("step_00000005*")) and not pathlib.Path("lost").exists():
            time.sleep(0.05)            # in the save of step 10
        return function(*args)
    return slowed
checkpoint.full_tensor = late(checkpoint.full_tensor)
folder_writer.write_part = late(folder_writer.write_part)
train.main()
"""


@pytest.mark.fault("a rank is killed or hangs during a save", tried=6, survived=6,
                   note="the other rank ends; earlier checkpoints are whole")
@pytest.mark.parametrize("fate, form", [
    (signal.SIGKILL, "file"), pytest.param(signal.SIGSTOP, "file", marks=pytest.mark.slow),
    pytest.param(signal.SIGKILL, "folder", marks=pytest.mark.slow)])
def test_a_rank_lost_during_a_save_costs_at_most_that_save(shards, tmp_path, fate, form):
    """Of two stages the one that sends its shards, or the one that writes, is lost: the other exits
    with status 1 and one line; what is there is whole, and the same command goes on."""
    (tmp_path / "wrapper.py").write_text(SLOW_SAVES)
    flags = ["--data", shards, *TINY, "--steps", 1_000_000, "--eval-every", 0, "--save-every", 5,
             "--pp", 2, "--timeout", 10, "--checkpoint-format", form]
    folders, jobs = (tmp_path / "0", tmp_path / "1"), []      # in a job each is the victim
    for out in folders:
        out.mkdir()
        jobs.append(launch(2, *flags, "--out", out, file=tmp_path / "wrapper.py", cwd=out))
    try:
        for victim, (out, job) in enumerate(zip(folders, jobs)):
            # Of saves every 5 steps 5 is whole, 10 is not.
            wait_for_step(out, 11 if form == "file" else 10, job[0])
            job[victim].send_signal(fate)
            (out / "lost").touch()
        for victim, job in enumerate(jobs):
            status, _, error = job[1 - victim].finish()
            assert status == 1 and error.count("\n") == 1, error
    finally:
        for rank in itertools.chain(*jobs):
            rank.process.kill()
            rank.process.join()
    for out in folders:
        assert list_checkpoints(out) == [step_file(out, 5, form)]
        checkpoint_files.verify(out / LATEST[form])
        again = launch(2, *flags, "--out", out, "--steps", 6)
        assert [rank.finish()[0] for rank in again] == [0, 0]
        assert checkpoint.load(out / LATEST[form])["step"] == 6


def test_an_error_of_one_rank_is_raised_while_others_act_and_names_rank_and_machine():
    """For example too little memory: the others wait for it."""
    def fail():
        raise MemoryError("too little")
    with mock.patch.object(agreement, "all_gather_object", side_effect=3 * [[None]]), \
            pytest.raises(MemoryError, match="too little"):
        agreement.all_ranks(fail)
    ended = [("node0", None), ("node1", ("too little", 2))]
    with mock.patch.object(agreement, "all_gather_object", return_value=ended), \
            pytest.raises(agreement.RunError, match="^rank 1 on node1: too little$"):
        agreement.all_ranks(lambda: None)


def test_a_second_run_in_the_same_out_is_refused_until_the_first_is_dead(run_train, shards,
                                                                         tmp_path):
    """The refusal names the first run's machine and process. --eval-only is allowed; when the first
    has been killed, the same command goes on."""
    flags = ["--data", shards, "--out", tmp_path, *TINY]
    first = Command("train.py", *flags, "--steps", 1_000_000, "--keep", 1000)
    wait_for_step(tmp_path, 5, first)               # so a file is whole
    expect_mistake(run_train(*flags), f"another run writes to {tmp_path} ({socket.gethostname()}, "
                                      f"process {first.pid}): ")
    assert "nats" in run_train(*flags, "--eval-only")[1]
    first.send_signal(signal.SIGKILL)
    first.finish()
    path, *_ = directory.latest_valid(checkpoint_files.list_checkpoints(tmp_path))
    last = checkpoint.load(path)["step"] + 2
    assert run_train(*flags, "--steps", last)[0] == 0 and saved(tmp_path, last)["step"] == last


@pytest.mark.claim("A rank that hangs or vanishes is named.")
def test_a_peer_that_hangs_or_vanishes_is_named(shards, tmp_path):
    """The survivor of two stages exits with status 1 and one line: its step, what it waited for and
    which rank. Each stage is stopped once and killed once, in four jobs at the same time."""
    flags = ["--data", shards, *TINY, "--steps", 1_000_000, "--save-every", 0, "--eval-every", 0,
             "--pp", 2, "--timeout", 4]
    jobs = {(victim, fate): launch(2, *flags, "--out", tmp_path / f"{victim} {fate}")
            for victim in (0, 1) for fate in (signal.SIGSTOP, signal.SIGKILL)}
    try:
        for (victim, fate), job in jobs.items():
            wait_for_step(tmp_path / f"{victim} {fate}", 3, job[0])
            job[victim].send_signal(fate)
        for (victim, _), job in jobs.items():
            witness = 1 - victim
            status, _, error = job[witness].finish()            # long before the usual ten minutes
            assert "killed, or does not answer: see its own message, then give the same" in error
            assert status == 1 and re.fullmatch(
                rf"train.py: rank {witness}: stage {witness}, step \d+: (((forward|backward) of "
                rf"microbatch \d+: (receive from|send to) rank {victim} \(stage {victim}\)"
                r"(, (?=forward|backward))?)+|all-reduce with ranks \[0, 1\]): .*\n", error), error
    finally:
        for process in itertools.chain(*jobs.values()):
            process.process.kill()


def test_a_slow_disk_of_rank_0_does_not_end_a_healthy_run(shards, things, tmp_path):
    """Every write and check of a file on rank 0 takes longer than --timeout."""
    (tmp_path / "wrapper.py").write_text("""
import time, checkpoint, train
from runtime import directory
def slow(function):
    return lambda *args: time.sleep(2.5) or function(*args)
directory.verify = slow(checkpoint.verify)
checkpoint.save = slow(checkpoint.save)
train.main()
""")
    (tmp_path / "old").mkdir()
    shutil.copy(things / "whole.pt", tmp_path / "old/step_00000004.pt")
    jobs = [launch(2, "--data", shards, "--out", tmp_path / out, *TINY, "--save-every", 1,
                   "--steps", steps, "--eval-every", 0, "--timeout", 2,
                   file=tmp_path / "wrapper.py")
            for out, steps in (("new", 2), ("old", 5))]
    for status, _, error in [process.finish() for process in itertools.chain(*jobs)]:
        assert status == 0, error
    assert column(read_metrics(tmp_path / "new")[0], "step") == [1, 2]
    assert column(read_metrics(tmp_path / "old")[0], "step") == [5]


# ---- Chains of stops, layouts and faults, drawn at random

def train_until(rank, world, config, cfg, file, at, fate):
    """Train on from a file, or from the seed. After step `at` a signal saves and ends the run, or
    in it all ranks are killed. In steps 3 and 9 a rank finds infinite gradients."""
    def hurt(step):
        if step in (3, 9) and rank == step % world:
            run.flat.buckets[-1].shard["grad"][0] = math.inf
        if step == at and fate == "signal":
            run.stop.number = signal.SIGTERM
        elif step == at:
            raise ZeroDivisionError
    Path(config.out).mkdir(exist_ok=True)
    with gridded(rank, world, config.tp, config.pp, config.sequence_parallel,
                 config.pp_chunks) as grid:
        run = train.Run(config, cfg, grid, torch.device("cpu"), Memory(cfg),
                        Memory(cfg, 13, seed=1), None if file is None else checkpoint.load(file))
        after_backward(run, hurt)
        with suppress(ZeroDivisionError):
            run.log = log_of(run, directory.Metrics(Path(config.out), rank))
            run.train()
            assert all(bucket.unsharding is None for bucket in run.flat.buckets)
        run.writer.wait()


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_chain_of_random_stops_and_faults_ends_as_the_straight_run(pool, tmp_path, seed):
    """A run that is stopped, killed or damaged at random steps, and saves in either format, ends as
    one without, bit for bit."""
    rng = random.Random(seed)
    cfg = replace(CFG, n_layer=4, dropout=0.1)
    straight, chained = tmp_path / "straight", tmp_path / "chained"
    _, (dp, tp, pp), flags = drawn(rng.random(), ["gpt"], 2, cp=1, ep=1)
    world = dp * tp * pp
    config = settings(straight, steps=8, save_every=1, keep=99, dtype="fp16", tp=tp, pp=pp, **flags)
    pool.run(world, train_until, config, cfg, None, 0, None)
    chain, file, step = [], None, 0
    while step < config.steps:
        at = step + rng.randint(1, 8)
        fate = rng.choice(["signal", "kill", "damage"])
        chain.append((config, at, fate))
        assert len(chain) < 60, chain
        ours = replace(config, out=str(chained), checkpoint_format=rng.choice(FORMS))
        pool.run(world, train_until, ours, cfg, file, at, fate)
        found = list_checkpoints(chained)
        if fate == "damage" and len(found) > 3:
            for path in found[:rng.randint(1, 3)]:
                part = path / "facts.pt" if path.is_dir() else path
                part.write_bytes(part.read_bytes()[:rng.randrange(part.stat().st_size)])
        file = directory.find_start(dict(out=str(chained))).path
        if file is not None:
            step = checkpoint.load(file)["step"]
    rows = [{row["step"]: row for row in read_metrics(folder)[0]}       # the last row counts
            for folder in (straight, chained)]
    rows = [list(of.values()) for of in rows]
    assert different_rows(*rows, but=("tokens_per_second", "time")) == "", chain
    assert_same_state(saved(straight, config.steps), checkpoint.load(list_checkpoints(chained)[0]),
                      but=("config", "run", "monitor"))


# ---- Whole runs that are made to fail (slow): the table of docs/faults.md

RUN = ["--n-layer", 2, "--n-head", 2, "--n-embd", 64, "--seq-len", 64, "--batch-size", 16,
       "--warmup-steps", 20, "--save-every", 50, "--keep", 9]


def with_noise(source, folder, steps, batch, seq_len, every=1):
    """A copy of the data. One of `every` sequences that these steps read is random bytes."""
    shutil.copytree(source, folder)
    dataset = data.TokenDataset(folder, "train", seq_len)
    windows = dataset.window_ids(Config.seed, (steps[0] - 1) * batch, len(steps) * batch)
    tokens = np.memmap(folder / "train_000000.bin", np.uint16, "r+", offset=1024)
    for i, window in enumerate(windows[::every]):
        noise = np.random.default_rng(i).integers(256, size=seq_len + 1)
        tokens[window * seq_len:(window + 1) * seq_len + 1] = noise
    tokens.flush()
    return folder


@pytest.mark.fault("41 batches are noise", tried=1, survived=1,
                   note="validation loss -0.1%; without rollback +3.4%")
@pytest.mark.fault("activations overflow in fp16", tried=1, survived=1,
                   note="validation loss +2.1%; without rollback the run fails")
@pytest.mark.slow
@pytest.mark.parametrize("fault, run_flags, most", [
    ("bad data", ["--steps", 400], 1.02),
    ("overflow", ["--steps", 300, "--dtype", "fp16"], 1.05)])    # slow on a CPU
def test_a_run_made_to_diverge_ends_near_the_healthy_one(library, tmp_path, fault, run_flags, most):
    """By 41 batches of noise, or by activations that overflow in fp16 from step 150 on."""
    healthy, on, off = (tmp_path / name for name in ("healthy", "on", "off"))
    flags = ["--data", library, *RUN, *run_flags]
    assert Command("train.py", "--out", healthy, *flags).finish(600)[0] == 0
    assert kinds(read_metrics(healthy)[1]) == ["start", "end"]
    if fault == "bad data":
        flags += ["--data", with_noise(library, tmp_path / "noisy", range(200, 241), 16, 64)]
    runs = []
    for out in (on, off):
        out.mkdir()
        shutil.copy(saved_file(healthy, 100), out)
        state = torch.load(saved_file(healthy, 150))
        if fault == "overflow":             # a matrix goes wrong just before step 150
            state["parameters"]["blocks.1.mlp.up.weight"] *= 1e5
        checkpoint.save(state, out, keep=9)
        runs.append(Command("train.py", "--out", out, *flags, "--rollback", out.name))
    (status, *_), (failed, _, error) = (run.finish(600) for run in runs)
    goal, helped, alone = (read_metrics(out)[0][-1].get("val_loss", math.inf)
                           for out in (healthy, on, off))
    events = read_metrics(on)[1]
    assert {"spike", "rollback"} <= set(kinds(events))
    assert all(e["to"] > 0 for e in events if e["event"] == "rollback")
    assert "spike" in kinds(read_metrics(off)[1]) and "rollback" not in kinds(read_metrics(off)[1])
    assert status == 0 and helped < goal * most and alone > helped * 1.02
    assert failed == ("diverged" in error) == (fault == "overflow")


@pytest.mark.claim("Healthy runs never roll back.")
@pytest.mark.slow
def test_healthy_runs_never_roll_back(run_train, library, tmp_path):
    """With noise in one sequence of twenty, which no rollback can help, and at a high rate. (Two
    more: the healthy runs of the test before.)"""
    noisy = with_noise(library, tmp_path / "noisy", range(1, 301), 8, 64, every=20)
    assert run_train("--data", noisy, "--out", tmp_path / "o", *RUN, "--steps", 300, "--lr", 1.2e-2,
                     "--batch-size", 8)[0] == 0
    assert kinds(read_metrics(tmp_path / "o")[1]) == ["start", "end"]


@pytest.mark.fault("a rank is killed at a random moment", tried=10, survived=10,
                   note="bit-equal at the end")
@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_killed_five_times_ends_bit_equal(shards, tmp_path, form):
    """The straight run's state after step 150, of two replicas under ZeRO 1, which diverges once.
    Each time every checkpoint that has a name is whole."""
    noisy = with_noise(shards, tmp_path / "noisy", range(100, 110), 4, 16)
    rng, out = random.Random(0), tmp_path / "out"
    flags = ["--data", noisy, *TINY, "--steps", 150, "--save-every", 5, "--eval-every", 0, "--zero",
             1, "--timeout", 60, "--checkpoint-format", form, "--out"]
    assert [rank.finish(300)[0] for rank in launch(2, *flags, tmp_path / "straight")] == [0, 0]
    for step in (20, 50, 70, 100, 130):
        victim, other = rng.sample(launch(2, *flags, out), 2)
        wait_for_step(out, step, victim)
        time.sleep(rng.uniform(0, 0.05))        # a step takes 3 to 10 ms
        victim.process.kill()
        other.process.terminate()               # as torchrun does
        other.process.join(10)
        for rank in (victim, other):
            rank.process.kill()
            rank.process.join()
        for path in list_checkpoints(out):
            checkpoint_files.verify(path)
    assert [rank.finish(300)[0] for rank in launch(2, *flags, out)] == [0, 0]
    assert kinds(read_metrics(out)[1]).count("resume") >= 4
    assert_same_state(*(checkpoint.load(step_file(folder, 150, form))
                        for folder in (tmp_path / "straight", out)))


@contextmanager
def machines(out, *flags):
    """Yields (start, lose). start() is a torchrun of one process, one of two machines, by the
    README's command; lose(it): its processes are gone at once, as if by a power failure."""
    line = next(x for x in README.split("```")[1::2] if "--nnodes=1:2" in x).replace("\\\n", " ")
    line = line.replace(" --numa-binding=node", "")       # which needs GPUs
    options = re.search(r"torchrun (.*?) train\.py", line)[1]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        host = free.getsockname()
    options = options.replace("HOST:29500", f"localhost:{host[1]}").replace("node=8", "node=1")
    running = []

    def start():
        with mock.patch.dict(os.environ, re.findall(r"(TORCH_\w+)=(\S+)", line)):
            running.append(torchrun(1, *options.split(), ROOT / "train.py", *flags, "--out", out))
        while running[-1].poll() is None:       # the first one, HOST, listens before others start
            with suppress(ConnectionRefusedError), socket.create_connection(host):
                return running[-1]
            time.sleep(0.1)

    def lose(machine):
        workers = Path(f"/proc/{machine.pid}/task/{machine.pid}/children").read_text().split()
        for number in [machine.pid, *map(int, workers)]:
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
        machine.communicate()
    try:
        yield start, lose
    finally:
        for machine in running:
            if machine.poll() is None:
                lose(machine)


@pytest.mark.fault("one of two machines is lost, with `--exact`; later another joins", tried=1,
                   survived=1, note="bit-equal at the end, with one rank and then two")
@pytest.mark.slow
def test_a_run_goes_on_with_the_machines_that_are_left_and_has_the_same_bits(shards, tmp_path):
    """Of two machines with a process each, one is lost. The other goes on from the last checkpoint,
    with half of the replicas, until a machine joins again."""
    flags = ["--data", shards, *TINY, "--steps", 400, "--save-every", 20, "--eval-every", 10,
             "--exact", "--micro-batch", 1, "--timeout", 20]
    out = tmp_path / "out"
    with machines(out, *flags) as (start, lose):
        first, second = start(), start()
        wait_for_step(out, 50, first)
        lose(second)
        [resumed] = wait_for(out, lambda _, events: [
            event for event in events if event["event"] == "resume"], first)
        assert resumed["environment"]["hosts"] == [socket.gethostname()]
        wait_for_step(out, resumed["step"] + 5, first)
        third = start()
        texts = [machine.communicate(timeout=300) for machine in (first, third)]
        assert first.returncode == 0 and third.returncode == 0, texts
    worlds = [len(event["environment"]["hosts"]) for event in read_metrics(out)[1]
              if event["event"] in ("start", "resume")]
    assert worlds == [2, 1, 2]
    assert Command("train.py", *flags, "--out", tmp_path / "one").finish(300)[0] == 0
    assert_same_state(saved(tmp_path / "one", 400), saved(out, 400), ("config", "run"))
