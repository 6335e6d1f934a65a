"""Train several runs of train.py, some at a time. tools.ladder and tools.sweep call it.

A run that has ended is not repeated. One that was killed gets the same command again, and train.py
resumes it. One that fails or diverges does not end the others.

Each run's console goes to console.txt in its --out. A process holds the file launcher.lock there,
which the program that started it shares. So if that program is killed alone, its runs go on, and
the same command given again waits for them.
"""
import os
import signal
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

from base.commandline import flag_name, words_of
from base.options import OF_TRAINING, Config
from data import TokenDataset
from tools.metrics import Run, read_metrics

TRAIN = str(Path(__file__).resolve().parents[1] / "train.py")
# Flags that change what a run computes.
COMPARED = set(OF_TRAINING) - {"save_every", "keep", "check_every", "eval_every", "eval_answers",
                               "max_rollbacks"}
STOPS = (signal.SIGINT, signal.SIGTERM)


class Job(NamedTuple):
    """A run to train: its --out, and the flags of train.py besides."""
    out: Path
    flags: dict

    def words(self) -> list[str]:
        """The arguments of train.py."""
        return words_of(self.flags | dict(out=self.out))


class Failure(NamedTuple):
    out: Path
    reason: str


class Stopped(Exception):
    """A signal has ended the runs: the same command continues them."""


# ---- What a run has done ---------------------------------------------------------------------

def has_ended(run: Run, steps: int | None = None) -> bool:
    """Whether a run has made its steps and saved the last, or all of these `steps`."""
    if not run.events or run.events[-1]["event"] != "end":
        return False
    return steps is None or run.events[-1]["step"] >= steps


def divergence(run: Run) -> str | None:
    """Why a run gave up, as one that has diverged does; None for others. Without a change it would
    give up again."""
    if run.events and run.events[-1]["event"] == "stop":
        return run.events[-1].get("reason")
    return None


def check_jobs(jobs: list[Job], data: TokenDataset) -> None:
    """Raise ValueError if the folder of a job holds a run of other flags or another data set.
    More steps than the run has made are no other flags."""
    for job in jobs:
        run = read_metrics(job.out)
        if not run.config:
            continue
        wanted = Config(**job.flags)
        given = vars(wanted) | dict(lr=wanted.lr or run.config["lr"])
        if wanted.epochs is not None or wanted.steps > run.config["steps"]:
            given["steps"] = run.config["steps"]
        differing = [f"{flag_name(name)} {run.config[name]}, not {given[name]}"
                     for name in sorted(COMPARED)
                     if name in run.config and run.config[name] != given[name]]
        if differing:
            raise ValueError(f"{job.out} holds a run with {'; '.join(differing)}: give another "
                             f"--out, or the flags of that run")
        known = [event["data"] for event in run.events if event.get("data")]
        sources = {key: source.weight for key, source in data.mixture.sources.items()}
        if known and sources != {source["fingerprint"]: source["weight"]
                                 for source in known[-1]["sources"].values()}:
            raise ValueError(f"{job.out} holds a run of another data set, {run.config['data']}: "
                             f"give that --data, or another --out")


# ---- Training --------------------------------------------------------------------------------

@contextmanager
def launcher_lock(out: Path, stopping: threading.Event):
    """Hold OUT/launcher.lock, as soon as nobody else does; gives the descriptor of the file, which
    a child must inherit."""
    out.mkdir(parents=True, exist_ok=True)
    with open(out / "launcher.lock", "a") as file:
        with suppress(ImportError):         # Windows has no flock
            import fcntl
            is_waiting = False
            while not stopping.is_set():
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if not is_waiting:
                        print(f"wait     another process trains {out}", flush=True)
                    is_waiting = True
                    time.sleep(0.2)
        yield file.fileno()


class Trainer:
    """Trains jobs, `at_once` at a time, by a command such as [python] or [torchrun, ...]."""

    def __init__(self, launch: list[str], at_once: int):
        self.launch = launch
        self.at_once = at_once
        self.environment = dict(os.environ)
        if at_once > 1:         # several threads of each run would wait for each other
            self.environment["OMP_NUM_THREADS"] = "1"
        self.stopping = threading.Event()
        self.processes = set()

    def train(self, chains: list[list[Job]]) -> list[Failure]:
        """Train chains of jobs, each job after the one before it in its chain. A chain ends with a
        failure. Raises Stopped after a signal; the runs have saved then."""
        before = signal.signal(signal.SIGTERM, signal.default_int_handler)
        try:
            with ThreadPoolExecutor(self.at_once) as pool:
                try:
                    found = list(pool.map(self.train_chain, chains))
                except KeyboardInterrupt:
                    self.stopping.set()
                    for process in list(self.processes):
                        process.terminate()
        finally:
            signal.signal(signal.SIGTERM, before)
        if self.stopping.is_set():
            raise Stopped
        return [failure for failure in found if failure is not None]

    def train_chain(self, chain: list[Job]) -> Failure | None:
        for job in chain:
            failure = self.train_job(job)
            if failure is not None or self.stopping.is_set():
                return failure
        return None

    def train_job(self, job: Job) -> Failure | None:
        with launcher_lock(job.out, self.stopping) as descriptor:
            run = read_metrics(job.out)
            if self.stopping.is_set() or has_ended(run, job.flags.get("steps")):
                return None
            reason = divergence(run)
            if reason is None:
                print(f"train    {job.out}", flush=True)
                reason = self.start(job, descriptor)
            if reason is None:
                return None
            print(f"failed   {job.out}: {reason}", flush=True)
            return Failure(job.out, reason)

    def start(self, job: Job, descriptor: int) -> str | None:
        """One run of train.py -> why it failed, or None."""
        command = [*self.launch, TRAIN, *job.words()]
        with open(job.out / "console.txt", "a+b") as console:
            begin = console.seek(0, os.SEEK_END)
            process = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL,
                                       stdout=console, stderr=subprocess.STDOUT,
                                       pass_fds=[descriptor])
            self.processes.add(process)
            status = process.wait()
            self.processes.discard(process)
            if -status in STOPS:
                self.stopping.set()
                return None
            if status == 0:
                return None
            console.seek(begin)
            return last_message(console.read().decode(errors="replace"), status)


def last_message(text: str, status: int) -> str:
    """The last line by which train.py says why it ends; without one, the last line of all."""
    lines = [line for line in text.splitlines() if line.strip()]
    own = [line for line in lines
           if line.startswith("train.py: ") and not line.startswith("train.py: warning")]
    return [f"status {status}", *lines[-1:], *own[-1:]][-1].removeprefix("train.py: ")
