"""Train several runs of train.py, some at a time, for tools.sweep and tools.ladder.

A run that has ended is not repeated, one that was killed is resumed, and one that fails or diverges
does not end the others. Each run's console goes to console.txt in its --out.

If the program that started them is killed alone, its runs go on. Given meanwhile, the same command
reports them as failed; given after they have ended, it continues.
"""
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from base.commandline import flag, flag_name, words_of
from base.options import OF_TRAINING, Config
from data import TokenDataset
from runtime.signals import NAMES
from tools.metrics import Run, read_metrics

TRAIN = str(Path(__file__).resolve().parents[1] / "train.py")
SIGNALS = {getattr(signal, name) for name in NAMES if hasattr(signal, name)}    # Windows lacks two
# Flags that do not change what a run computes, and those that do.
OF_OPERATION = {"save_every", "keep", "check_every", "eval_every", "max_rollbacks",
                "checkpoint_format", "out", "resume", "log", "log_every", "eval_only", "timeout"}
COMPARED = set(OF_TRAINING) - OF_OPERATION


def jobs_flag(group=None):
    return flag(1, "runs that train at a time; with several each has one thread", low=1,
                group=group)


def launch_flag():
    return flag(None, "what starts train.py (default: this python), such as 'torchrun --standalone "
                "--nproc_per_node=8'", form="COMMAND")


class Job(NamedTuple):
    """A run to train: its --out, and the flags of train.py besides."""
    out: Path
    flags: dict

    def words(self) -> list[str]:
        """The arguments of train.py."""
        return words_of(self.flags | dict(out=self.out))


def has_ended(run: Run, flags: dict) -> bool:
    """Whether a run has made all the steps for which these flags ask, and saved the last."""
    last = run.events[-1] if run.events else dict(event=None)
    if last["event"] != "end" or last["step"] < flags.get("steps", 0):
        return False
    return "epochs" not in flags or run.config.get("epochs") == flags["epochs"]


def check_jobs(jobs: list[Job], data: TokenDataset) -> None:
    """Raise ValueError if the folder of a job holds a run of other flags or another data set.
    More steps than the run has made are no other flags."""
    sources = {key: source.weight for key, source in data.mixture.sources.items()}
    for job in jobs:
        run = read_metrics(job.out)
        if not run.config:
            continue
        wanted = Config(**job.flags)
        given = dict(lr=run.config["lr"]) | job.flags       # the default may depend on weights
        given = vars(wanted) | dict(lr=given["lr"])
        if wanted.epochs is not None or wanted.steps > run.config["steps"]:
            given["steps"] = run.config["steps"]
        differing = [f"{flag_name(name)} {run.config[name]}, not {given[name]}"
                     for name in sorted(COMPARED & run.config.keys())
                     if run.config[name] != given[name]]
        if differing:
            raise ValueError(f"{job.out} holds a run with {'; '.join(differing)}: give another "
                             f"--out, or the flags of that run")
        known = [event["data"] for event in run.events if event.get("data")]
        if known and sources != {source["fingerprint"]: source["weight"]
                                 for source in known[-1]["sources"].values()}:
            raise ValueError(f"{job.out} holds a run of another data set, {run.config['data']}: "
                             f"give that --data, or another --out")


def train_all(program: str, chains: list[list[Job]], launch: str | None, at_once: int) -> list[str]:
    """Train chains of jobs, `at_once` at a time, each job after the one before it in its chain, by
    the command `launch`. A chain ends with a failure; these are returned, in words. A signal ends
    the runs, which save, and the program."""
    trainer = Trainer(shlex.split(launch or shlex.quote(sys.executable)), at_once)
    before = {number: signal.signal(number, signal.default_int_handler) for number in SIGNALS
              if signal.getsignal(number) != signal.SIG_IGN}        # as nohup makes one
    try:
        with ThreadPoolExecutor(at_once) as pool:
            try:
                failures = list(filter(None, pool.map(trainer.train_chain, chains)))
            except KeyboardInterrupt:
                trainer.stopping.set()
                for process in list(trainer.processes):
                    process.terminate()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if trainer.stopping.is_set():
        print(f"{program}: stopped: give the same command to continue", file=sys.stderr)
        sys.exit(130)
    return failures


class Trainer:
    def __init__(self, launch: list[str], at_once: int):
        self.launch = launch
        # Several threads of each run would wait for each other.
        self.environment = os.environ | (dict(OMP_NUM_THREADS="1") if at_once > 1 else {})
        self.stopping = threading.Event()
        self.processes = set()

    def train_chain(self, chain: list[Job]) -> str | None:
        for job in chain:
            run = read_metrics(job.out)
            if self.stopping.is_set():
                return None
            if has_ended(run, job.flags):
                continue
            reason = None
            if run.events and run.events[-1]["event"] == "stop":
                reason = run.events[-1].get("reason")       # it would diverge again
            if reason is None:
                print(f"train    {job.out}\n", end="", flush=True)      # in one write
                reason = self.train(job)
            if reason is not None:
                print(f"failed   {job.out}: {reason}\n", end="", flush=True)
                return f"{job.out}: {reason}"
        return None

    def train(self, job: Job) -> str | None:
        """One run of train.py -> why it failed, or None."""
        job.out.mkdir(parents=True, exist_ok=True)
        with open(job.out / "console.txt", "a+b") as console:
            begin = console.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                [*self.launch, TRAIN, *job.words()], env=self.environment,
                stdin=subprocess.DEVNULL, stdout=console, stderr=subprocess.STDOUT)
            self.processes.add(process)
            status = process.wait()
            self.processes.discard(process)
            if -status in SIGNALS:
                self.stopping.set()
            if status == 0 or self.stopping.is_set():
                return None
            console.seek(begin)
            return why_it_ended(console.read().decode(errors="replace"), status)


def why_it_ended(text: str, status: int) -> str:
    """The signal that killed train.py or, as torchrun says at the end of `text`, a rank; else the
    last line by which train.py says why it ends; without one, the last line of all."""
    number = -status if status < 0 else status - 128        # as a shell and srun say it
    names = [known.name for known in signal.Signals if known == number]
    names += re.findall(r"Signal \d+ \((?!SIGTERM)(SIG\w+)\) received", text)
    if names or status < 0:
        name = names[-1] if names else f"signal {number}"
        return f"killed ({name})" + (": out of memory?" if name == "SIGKILL" else "")
    lines = [line for line in text.splitlines() if line.strip()]
    errors = [line for line in lines
              if line.startswith("train.py: ") and not line.startswith("train.py: warning")]
    return [f"status {status}", *lines[-1:], *errors[-1:]][-1].removeprefix("train.py: ")
