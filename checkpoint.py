"""State to disk and back, and the directory of a run. A checkpoint has no layout.

    every rank                     rank 0                            out/
    shards of flat buffers  -->  full tensors by global name   -->  step_00000200.pt  <-+ hard link
    (tp, pp, ZeRO, 16 bit)       (fp32 masters, Adam's moments)     latest.pt  ---------+

One file holds the whole state under global names: layers numbered through, tied weights once, no
vocabulary padding. So any layout, and sample.py in one process, loads what any other layout wrote;
the price is that one host's memory must hold the model with its two moments.

    format      4: what the keys and the order of the data mean
    step        the last step done            consumed_samples  read so far: the data position
    tokens      read so far                   optimizer_steps   updates: steps that were not skipped
    config      train.py's flags              model      GPTConfig as a dict
    tokenizer   its name                      data       data.TokenDataset's phases
    scaler      its state_dict()              monitor    DivergenceMonitor as a dict
    parameters, exp_avg, exp_avg_sq           {global name: tensor}

The file appears whole or not at all (written aside, fsync, os.replace), and it holds only plain
types and tensors: it is read with weights_only=True, which runs no code from the file. A file is a
zip, whose members carry CRCs; torch.load does not look at them, `verify` does.

What is converted from Hugging Face's formats (last section) has parameters, model and tokenizer
alone: `train.py --init-from` begins a run with it.

Training waits only for the copy to rank 0's host memory. A thread there writes it (`Writer`) while
the next steps run, so for that long the host holds the state twice.
"""
import argparse
import json
import math
import os
import pickle
import re
import shutil
import socket
import sys
import tempfile
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import asdict
from functools import partial
from itertools import groupby, product
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

from data import EOT, TokenDataset, download, gpt2_files
from model import GPT, GPTConfig, parameter_count
from parallel import (FlatParameters, Grid, RunError, build_stage, comm_errors, make_buckets,
                      param_specs)

FORMAT = 5          # 4 is read too: its `data` is one fingerprint
STATE = {"parameters": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
KEYS = {"format", "step", "consumed_samples", "tokens", "optimizer_steps", "config", "model",
        "tokenizer", "data", "scaler", "monitor", *STATE}
STEP_FILE = re.compile(r"step_(\d{8})\.pt")


class CorruptCheckpoint(ValueError):
    """The file is not a whole checkpoint."""


class NoValidCheckpoint(RunError):
    """Each of a run's checkpoints is damaged."""


class SaveFailed(RunError):
    """A checkpoint that must not be missing was not written."""


def warn(text: str) -> None:
    with suppress(OSError):                 # a closed pipe does not stop the run
        print(f"train.py: warning: {text}", file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------
# Between flat buffers and full tensors
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def gather_full_state(flat: FlatParameters, cfg: GPTConfig, grid: Grid, names) -> dict | None:
    """{name: {global parameter name: full CPU tensor}} for the flat tensors `names` of all ranks,
    on rank 0; None on the others. Every rank must call it.

    Bucket by bucket, the ranks that keep something send it: the first replica's, or with ZeRO those
    of all replicas, which keep a shard each. Rank 0 knows the layout of each stage, because it is a
    function of (config, stage).
    """
    if grid.rank != 0:
        for bucket, name in product(flat.buckets, names):
            if grid.dp_rank < flat.num_shards:
                with comm_errors("save, send to rank 0"):
                    dist.send(bucket.shard[name].cpu(), 0)
        return None

    def collect(bucket, name, source):
        """The shard of rank `source`."""
        if source == 0:
            return bucket.shard[name].cpu()
        shard = torch.empty(bucket.numel // flat.num_shards,
                            dtype=flat.buckets[0].shard[name].dtype)
        with comm_errors(f"save, receive from rank {source}"):
            dist.recv(shard, source)
        return shard

    full = {name: {} for name in names}
    for stage in range(grid.pp):
        buckets = flat.buckets
        if stage > 0:
            there = Grid(grid.dp, grid.pp, grid.tp, stage * grid.tp)
            buckets = make_buckets(param_specs(build_stage(cfg, there), cfg, there), grid.dp)
        sources = grid.ranks[:flat.num_shards, stage].T.tolist()        # [tp rank][shard]
        for bucket, name in product(buckets, names):
            of_tp_ranks = [torch.cat([collect(bucket, name, source) for source in shards])
                           for shards in sources]
            for spec in bucket.specs:
                if not spec.is_tied_copy:
                    parts = [bucket.view(part, spec) for part in of_tp_ranks]
                    # A copy: training goes on, and a view would drag the bucket into the file.
                    full[name][spec.name] = spec.unshard(parts).clone()
    return full


def restore(state: dict, flat: FlatParameters) -> None:
    """Cut this rank's slices out of a loaded checkpoint's full tensors."""
    for key, flat_name in STATE.items():
        flat.load(flat_name, lambda name, shape: state[key][name])
    flat.sync_params()


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def step_file(out: Path, step: int) -> Path:
    return out / f"step_{step:08d}.pt"


def write_file(state: dict, aside: Path, path: Path) -> None:
    """Write the state aside, over what a kill may have left there; once it is whole and on the disk
    it becomes `path`. Raises OSError if it cannot be written."""
    try:
        with open(aside, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        cause = error
        while cause.__context__ is not None:        # torch's zip writer hides the disk's own words
            cause = cause.__context__
        raise OSError(f"{path} could not be written: {cause}") from error


def save(state: dict, out: Path, keep: int) -> Path:
    """Write out/step_0000000k.pt, point latest.pt at it, remove all but the newest `keep` and those
    that its monitor names.

    Raises OSError if it cannot be written (a full disk); the files before it are then untouched.
    """
    path = step_file(out, state["step"])
    write_file(state, out / "step.pt.tmp", path)
    try:
        _point_latest(path)
    except OSError as error:
        raise OSError(f"latest.pt could not become {path}: {error}") from error
    # Where this branch began may be among them: its last resort, which may be older.
    named = {Path(name).name for _, name in state["monitor"].get("checkpoints", []) if name}
    for old in [p for p in list_checkpoints(out) if STEP_FILE.fullmatch(p.name)][keep:]:
        if old.name not in named:
            old.unlink(missing_ok=True)
    return path


class Writer:
    """Writes checkpoints on a thread of its own, one at a time, beside the training."""

    def __init__(self, out: Path, keep: int):
        self.out, self.keep = out, keep
        self.thread, self.pending = ThreadPoolExecutor(1), None

    def submit(self, state: dict) -> None:
        """Begin to write, after the one before."""
        self.wait()
        self.pending = self.thread.submit(self._write, state)

    def _write(self, state: dict) -> str | None:
        try:
            save(state, self.out, self.keep)
        except OSError as error:            # the run goes on: the files before it are whole
            warn(f"{error}; earlier checkpoints are untouched")
            return str(error)               # the error itself would keep the state in memory

    def wait(self) -> str | None:
        """Until the last file is written; the error if it could not be."""
        return self.pending.result() if self.pending is not None else None

    def finish(self) -> None:
        """Wait for a file that must not be missing; raises SaveFailed."""
        error = self.wait()
        if error is not None:
            raise SaveFailed(f"the last checkpoint is lost: {error}")


def _point_latest(path: Path) -> None:
    """latest.pt becomes another name of `path`; a copy where the file system has no hard links."""
    aside = path.with_name("latest.pt.tmp")
    aside.unlink(missing_ok=True)
    try:
        os.link(path, aside)
    except OSError:
        try:
            shutil.copyfile(path, aside)
            _fsync(aside)
        except OSError:                             # the disk is full
            aside.unlink(missing_ok=True)
            raise
    os.replace(aside, path.with_name("latest.pt"))
    _fsync(path.parent)                             # the names too must survive a power cut


def _fsync(path: Path) -> None:
    if not hasattr(os, "O_DIRECTORY"):              # Windows cannot open a folder to flush it
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@contextmanager
def reading(path: Path, problem: str):
    """Any error of the block becomes a CorruptCheckpoint that names the problem: damaged bytes make
    zipfile and torch.load raise whatever they suggest."""
    if not path.is_file():
        instead = f"{path}/latest.pt" if path.is_dir() else "another, or run train.py first"
        raise FileNotFoundError(f"there is no checkpoint {path}: give {instead}")
    try:
        yield
    except (PermissionError, MemoryError):
        raise
    except pickle.UnpicklingError:
        raise CorruptCheckpoint(f"{path} {problem}: it holds more than tensors and plain "
                                f"types") from None
    except Exception as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise CorruptCheckpoint(f"{path} {problem}: {reason}") from error


def verify(path: Path) -> None:
    """Read the file once against the zip's CRCs; raises CorruptCheckpoint."""
    with reading(path, "is damaged, or no checkpoint"), zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the CRC of {bad} does not match")


def load(path: Path) -> dict:
    """The state in a file, its tensors mapped from disk, not yet read nor verified.

    Raises CorruptCheckpoint if it is no checkpoint of this project, contradicts itself, or holds
    anything but tensors and plain types.
    """
    with reading(path, "is refused"):
        state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict) or not {"format", "step"} <= set(state):
            raise ValueError("it is not a checkpoint of this project")
        if state["format"] not in (4, FORMAT):
            raise ValueError(f"it has format {state['format']}, this code reads format {FORMAT}: "
                             f"go on with the code that wrote it")
        if set(state) != KEYS:
            raise ValueError(f"its keys differ: {sorted(set(state) ^ KEYS)}")
        if not all(isinstance(state[key], dict) for key in ("config", "scaler", "monitor", *STATE)):
            raise ValueError("its parts are no dicts")
        if not isinstance(state["data"], list):
            state["data"] = [[0, {state["data"]: 1}]]
        cfg = GPTConfig(**state["model"])
        shapes = parameter_shapes(cfg)
        for key in STATE:
            # What was converted from elsewhere has weights alone.
            empty = key != "parameters" and not state["exp_avg"] and not state["exp_avg_sq"]
            if {name: tuple(t.shape) for name, t in state[key].items()} != shapes and not empty:
                raise ValueError(f"its {key} are not those of its model")
    return state


def parameter_shapes(cfg: GPTConfig) -> dict[str, tuple]:
    """The shapes of the full parameters, without padding, by global name."""
    with torch.device("meta"):
        shapes = {name: tuple(p.shape) for name, p in GPT(cfg).named_parameters()}
    return {**shapes, "embed.token.weight": (cfg.vocab_size, cfg.n_embd)}


def load_model(path: Path) -> tuple[GPT, dict]:
    """The full model in one process on the CPU, from any layout's file, and the file's state."""
    verify(path)
    state = load(path)
    model = GPT(GPTConfig(**state["model"]))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = state["parameters"][name]
            parameter.zero_()[:full.shape[0]] = full            # zero: the vocabulary padding
    return model.eval(), state


# ---------------------------------------------------------------------------------------------
# The directory of a run: one writer, a list of files, which of them to go on from, metrics
# ---------------------------------------------------------------------------------------------


@contextmanager
def lock_output_dir(out: Path):
    """`out` belongs to this process for the block, by a lock that ends with the process, however
    that ends. Raises ValueError if another process has it, OSError if it cannot be locked."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        file = open(out / "lock", "a+")
    except OSError as error:
        raise OSError(f"--out {out} is not a directory that can be written: {error.strerror}: "
                      f"give another") from error
    with file:
        try:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except ImportError:         # Windows: nothing keeps a second run out
            pass
        except BlockingIOError:
            file.seek(0)
            raise ValueError(f"another run writes to {out} ({file.read()}): stop it first, or give "
                             f"another --out") from None
        except OSError as error:
            raise OSError(f"--out {out} cannot be locked: {error.strerror}: put it on another file "
                          f"system") from error
        file.truncate(0)
        file.write(f"{socket.gethostname()}, process {os.getpid()}")
        file.flush()
        yield


def list_checkpoints(out: Path) -> list[Path]:
    """Checkpoints of a run: latest.pt, then the others, the last written first. A file with two
    names is listed under its step's."""
    files = {p: p.stat() for p in out.glob("*.pt")
             if STEP_FILE.fullmatch(p.name) or p.name == "latest.pt"}
    latest = files.get(out / "latest.pt")
    order = sorted(files, key=lambda p: (latest is not None and files[p].st_ino == latest.st_ino,
                                         files[p].st_mtime_ns, p.name), reverse=True)
    newest = {}
    for path in order:
        newest.setdefault(files[path].st_ino, path)
    return list(newest.values())


def latest_valid(files: list) -> tuple[Path | None, list[dict]]:
    """The first whole checkpoint of a list by its CRCs (None stands for none, and is whole), and an
    event for each that is damaged or gone. Raises NoValidCheckpoint."""
    events = []
    for path in files:
        try:
            if path is not None:
                verify(path)
                load(path)
            return path, events
        except (CorruptCheckpoint, FileNotFoundError) as error:
            events.append(dict(event="damaged", path=str(path), reason=str(error)))
            warn(f"{error}; passed over")
    raise NoValidCheckpoint(f"none of the {len(files)} checkpoints is whole: "
                            f"{', '.join(map(str, files))}; move them away to start over")


def find_checkpoint(out: Path, resume: str, restarted: bool, given: dict, defining: list,
                    weights: dict | None = None) -> tuple[Path | None, list[dict], bool]:
    """The checkpoint to go on from, None for a fresh run; events of damaged ones; and whether a
    branch begins there, as from an explicit PATH.

    The same command again, by hand or because torchrun `restarted` the run or its group changed,
    goes on with what the branch has written since: each file holds its flags, among them PATH and
    the `defining` ones, and the `weights` of the data's sources.
    """
    found = list_checkpoints(out)
    if resume == "never" and found and not restarted:
        raise ValueError(f"--resume never, but {out} holds {found[0].name}: give another --out")
    if resume in ("auto", "never"):
        return (*latest_valid(found), False) if found else (None, [], False)
    base, own = {}, []
    with suppress(CorruptCheckpoint, FileNotFoundError):
        base = load(Path(resume))["config"]
    for path in found if not given.get("eval_only") else []:
        with suppress(CorruptCheckpoint):
            state = load(path)
            stored, wanted = state["config"], {**state["config"], **base, **given}
            own += [path] * (weights in (None, state["data"][-1][1]) and all(
                stored.get(name) == wanted.get(name) for name in defining))
    if own:
        path, events = latest_valid([*own, Path(resume)])
        return path, events, path not in own
    verify(Path(resume))                # the user named this file: refuse it if it is damaged
    return Path(resume), [], True


def check_data(state: dict, dataset: TokenDataset, data: str, same: bool) -> None:
    """Raise ValueError unless the data has the checkpoint's tokenizer and, if it must be the `same`
    data, every source that it was trained on."""
    theirs, ours = (state["tokenizer"], state["model"]["vocab_size"]), (
        dataset.meta["tokenizer"], dataset.meta["vocab_size"])
    if theirs != ours:
        raise ValueError(f"the checkpoint's tokenizer is {theirs[0]} with {theirs[1]} tokens, but "
                         f"{data} has {ours[0]} with {ours[1]}: use --data of that tokenizer, or "
                         f"another checkpoint")
    if same and not set(state["data"][-1][1]) <= set(dataset.sources):
        raise ValueError(f"{data} is not the data this checkpoint was trained on (a fingerprint "
                         f"is missing): use the run's own --data (DIR=0 leaves out a source), or "
                         f"begin a run on this one with --init-from and another --out")


def start_branch(state: dict, path: Path, own_lr: bool) -> None:
    """An explicit --resume PATH resets the rollback history, and with a learning rate of its own
    (`own_lr`) the corrections of the learning rate."""
    lasting = step_file(path.parent, state["step"])             # latest.pt will be another file
    path = lasting if path.name == "latest.pt" and lasting.exists() else path
    state["monitor"].update(checkpoints=[[state["step"], str(path.resolve())]], rollbacks=0,
                            last_rollback_step=-1)
    if own_lr:
        state["monitor"]["lr_factor"] = 1.0
    with suppress(OSError):
        os.utime(path)          # newer than what the abandoned branch wrote later


def lines_of(out: Path) -> list[dict]:
    """What out/metrics.jsonl holds, if it is there; a run may be writing its last line."""
    lines, path = [], out / "metrics.jsonl"
    for line in path.read_bytes().splitlines() if path.exists() else ():
        with suppress(ValueError):
            lines.append(json.loads(line))
    return [line for line in lines if isinstance(line, dict) and "step" in line]


def branch_point(line: dict) -> int | None:
    """The step from which a run goes on by this event, which voids rows beyond it; else None."""
    return {"start": 0, "resume": line["step"], "rollback": line.get("to")}.get(line.get("event"))


def read_metrics(out: Path) -> tuple[list[dict], list[dict], float]:
    """(rows of steps, without void ones; events; hours at work) of out/metrics.jsonl."""
    rows, events, seconds, before = [], [], 0.0, None
    for line in lines_of(out):
        now, event = line.get("time"), line.get("event")
        last = branch_point(line) if event else line["step"] - 1
        while last is not None and rows and rows[-1]["step"] > last:
            rows.pop()
        (events if event else rows).append(line)
        if None not in (now, before) and event not in ("start", "damaged", "resume"):
            seconds += now - before
        before = now
    return rows, events, seconds / 3600


class TensorBoard:
    """Event files in out/tensorboard; what happened is text, in its folder `events`. Not by torch's
    SummaryWriter: of a full disk its thread tells in tracebacks."""

    def __init__(self, out: Path):
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.summary.writer.record_writer import RecordWriter
        self.Event, self.RecordWriter = Event, RecordWriter
        self.rows = out / "tensorboard" / f"events.out.tfevents.{time.time_ns()}"
        self.texts = self.rows.parent / "events" / self.rows.name
        self.texts.parent.mkdir(parents=True, exist_ok=True)
        for file in (self.rows, self.texts):
            self.append(file, file_version="brain.Event:2")

    def append(self, file: Path, **event) -> None:
        with open(file, "ab") as stream:
            self.RecordWriter(stream).write(self.Event(**event).SerializeToString())

    def write(self, row: dict) -> None:
        at, last = dict(step=row["step"], wall_time=row["time"]), branch_point(row)
        if last is not None:                            # hides what came before of these steps
            self.append(self.rows, **at | dict(step=last + 1), session_log=dict(status="START"))
        if "event" in row:
            text = dict(dtype="DT_STRING", string_val=[json.dumps(row).encode()])
            self.append(self.texts, **at, summary=dict(value=[dict(
                tag=row["event"], tensor=text,
                metadata=dict(plugin_data=dict(plugin_name="text")))]))
        else:
            self.append(self.rows, **at, summary=dict(value=[
                dict(tag=name, simple_value=value) for name, value in row.items()
                if name not in ("step", "time") and value is not None]))


class WandB:
    """A run of Weights & Biases, its id in out/wandb_id. It takes no step twice: steps that it has
    are not sent again after a resume or rollback, and void ones stay."""

    def __init__(self, out: Path):
        import wandb
        file = out / "wandb_id"
        known = file.read_text() if file.exists() else None
        self.run = wandb.init(id=known, resume="allow", name=str(out), dir=out)
        file.write_text(self.run.id)
        self.sent = max((line["step"] for line in lines_of(out) if known and "event" not in line),
                        default=0)
        self.texts = {}             # (step, event) -> lines: a second one would replace the first

    def write(self, row: dict) -> None:
        if "event" in row:
            self.run.config.update(row.get("config", {}), allow_val_change=True)
            at = max(row["step"], self.sent + 1)
            texts = self.texts.setdefault((at, row["event"]), [])
            texts.append(json.dumps(row))
            self.run.log({"events/" + row["event"]: "\n".join(texts)}, step=at)
        elif row["step"] > self.sent:
            self.sent = row["step"]
            self.run.log(row, step=self.sent, commit=True)


LOGS = {"tensorboard": TensorBoard, "wandb": WandB}


class Metrics:
    """out/metrics.jsonl, append-only: one object a step, and one with `event` for what happened
    besides; and the same in the `log`, names of LOGS. Only rank 0 writes."""

    def __init__(self, out: Path, rank: int, log: str | None = None):
        self.out, self.path = out, out / "metrics.jsonl" if rank == 0 else None
        self.logs = {name: None for name in LOGS if name in (log or "")}
        if rank == 0:
            with open(self.path, "a+b") as file:
                file.seek(0)
                file.truncate(file.read().rfind(b"\n") + 1)         # a line torn by a crash

    def write(self, **row) -> None:
        if self.path is None:
            return
        row = {k: None if isinstance(v, float) and not math.isfinite(v) else v
               for k, v in row.items()} | dict(time=round(time.time(), 3))
        line = json.dumps(row).encode() + b"\n"
        try:
            with open(self.path, "ab", buffering=0) as file:
                end = file.tell()
                if file.write(line) < len(line):
                    file.truncate(end)
                    raise OSError("the disk is full")
        except OSError as error:                        # costs this line, not the run
            warn(f"metrics.jsonl lacks a line: {error}")
        for name in list(self.logs):
            try:
                self.logs[name] = self.logs[name] or LOGS[name](self.out)
                self.logs[name].write(row)
            except Exception as error:                  # costs this log, not the run
                del self.logs[name]
                warn(f"--log {name} is off from here on: {type(error).__name__}: {error}")


# ---------------------------------------------------------------------------------------------
# Weights from other tools and for them: Hugging Face's GPT-2 (with GELU) and OPT (with ReLU)
#
#     python checkpoint.py --from-hf gpt2 gpt2.pt             # a name on the hub, or a folder
#     python checkpoint.py out/latest.pt --to-hf folder
#
# A folder has config.json; the tensors in model.safetensors, pytorch_model.bin, or the files that
# one of the two with .index.json lists; and GPT-2's tokenizer in vocab.json and merges.txt.
# ---------------------------------------------------------------------------------------------

# Our module: GPT-2's, OPT's; {} is the number of the block.
HF_NAMES = {
    "embed.token": ("wte", "embed_tokens"),
    "embed.position": ("wpe", "embed_positions"),
    "blocks.{}.norm1": ("h.{}.ln_1", "layers.{}.self_attn_layer_norm"),
    "blocks.{}.attn.qkv": ("h.{}.attn.c_attn", "layers.{}.self_attn.qkv_proj"),
    "blocks.{}.attn.proj": ("h.{}.attn.c_proj", "layers.{}.self_attn.out_proj"),
    "blocks.{}.norm2": ("h.{}.ln_2", "layers.{}.final_layer_norm"),
    "blocks.{}.mlp.up": ("h.{}.mlp.c_fc", "layers.{}.fc1"),
    "blocks.{}.mlp.down": ("h.{}.mlp.c_proj", "layers.{}.fc2"),
    "head.norm": ("ln_f", "final_layer_norm"),
}
HF_PREFIX = {"gpt2": "transformer.", "opt": "model.decoder."}
HF_SHAPE = {        # field of GPTConfig: its name in config.json
    "gpt2": dict(vocab_size="vocab_size", seq_len="n_positions", n_layer="n_layer",
                 n_head="n_head", n_embd="n_embd"),
    "opt": dict(vocab_size="vocab_size", seq_len="max_position_embeddings",
                n_layer="num_hidden_layers", n_head="num_attention_heads",
                n_embd="hidden_size")}
HF_ACTIVATION = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}
HF_WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
              "pytorch_model.bin.index.json")


def hf_names(name: str, family: str) -> list[str]:
    """The tensors that hold our parameter `name`: OPT has q, k and v apart."""
    module, kind = name.rsplit(".", 1)
    block = re.search(r"(?<=\.)\d+|$", module).group()
    theirs = HF_NAMES[re.sub(r"(?<=\.)\d+", "{}", module)][family == "opt"].format(block)
    return [f"{theirs.replace('qkv', x)}.{kind}" for x in ("qkv" if "qkv" in theirs else "q")]


def hf_layout(name: str, tensor: torch.Tensor, family: str) -> torch.Tensor:
    """Our tensor in the family's layout, or theirs in ours: GPT-2 stores the matrices of its blocks
    transposed."""
    return tensor.T if family == "gpt2" and "blocks" in name and tensor.dim() == 2 else tensor


def model_of_hf_config(config: dict) -> GPTConfig:
    """config.json -> GPTConfig; raises ValueError for another architecture than model.py's."""
    family = config.get("model_type")
    if family not in HF_SHAPE:
        raise ValueError(f"its model_type {family!r} is neither gpt2 nor opt")
    missing = [theirs for theirs in HF_SHAPE[family].values() if theirs not in config]
    if missing:
        raise ValueError(f"it lacks {missing[0]}")
    shape = {ours: config[theirs] for ours, theirs in HF_SHAPE[family].items()}
    usual = {"gpt2": "gelu_new", "opt": "relu"}[family]
    C, activation = shape["n_embd"], config.get("activation_function", usual)
    for key, fits in dict(
            activation_function=tuple(HF_ACTIVATION), n_inner=(None, 4 * C), ffn_dim=(4 * C,),
            word_embed_proj_dim=(None, C), layer_norm_epsilon=(1e-5,), scale_attn_weights=(True,),
            scale_attn_by_inverse_layer_idx=(False,), tie_word_embeddings=(True,),
            do_layer_norm_before=(True,), _remove_final_layer_norm=(False,), enable_bias=(True,),
            layer_norm_elementwise_affine=(True,)).items():
        if config.get(key, fits[0]) not in fits:
            raise ValueError(f"its {key} is {config[key]!r}, model.py has only "
                             f"{' or '.join(map(repr, fits))}")
    return GPTConfig(activation=HF_ACTIVATION[activation], **shape)


def files_of_index(path: Path) -> list[Path]:
    """The files that an index lists, beside it; a file that is no index stands for itself."""
    if path.suffix != ".json":
        return [path]
    with reading(path, "is refused"):
        names = sorted(set(json.loads(path.read_text())["weight_map"].values()))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file beside it")
    return [path.with_name(name) for name in names]


def read_hf(folder: Path) -> dict:
    """The tensors of a folder: {name without the model's prefix: function that reads it}."""
    found = next((folder / name for name in HF_WEIGHTS if (folder / name).exists()), None)
    if found is None:
        raise ValueError(f"{folder} has none of {', '.join(HF_WEIGHTS)}")
    tensors, files = {}, files_of_index(found)
    if files[0].suffix != ".bin":
        from safetensors import safe_open
    for file in files:
        is_zip = zipfile.is_zipfile(file)           # torch's are, but for old ones
        if is_zip:
            verify(file)
        with reading(file, "is refused"):
            if file.suffix == ".bin":
                whole = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
                readers = {name: partial(whole.__getitem__, name) for name in whole}
            else:
                whole = safe_open(file, framework="pt")
                readers = {name: partial(whole.get_tensor, name) for name in whole.keys()}
            for name, reader in readers.items():
                tensors[re.sub(r"^(transformer|(model\.)?decoder)\.", "", name)] = reader
    return tensors


def fetch_hf(source: str, folder: Path, hub: str) -> None:
    """Download a model from the hub, first its config.json. Raises ValueError if it is not there,
    ConnectionError if that cannot be known."""
    import requests
    address = f"{hub}/{source}/resolve/main/"

    def is_there(name):
        reply = requests.head(address + name, allow_redirects=True, timeout=30)
        if not reply.ok and reply.status_code not in (401, 403, 404):
            raise ConnectionError(f"{address}{name}: {reply.status_code} {reply.reason}")
        return reply.ok
    try:
        if not is_there("config.json"):
            raise ValueError(f"{source} is neither a folder nor a public model on {hub}")
        weights = next((name for name in HF_WEIGHTS if is_there(name)), None)
    except requests.RequestException as error:
        raise ConnectionError(f"cannot reach {hub}: {error}") from error
    if weights is None:
        raise ValueError(f"{address} has none of {', '.join(HF_WEIGHTS)}")
    download(address + "config.json", folder / "config.json")
    read_hf_config(folder)                          # before gigabytes come in vain
    download(address + weights, folder / weights)
    for file in files_of_index(folder / weights):
        download(address + file.name, file)


def read_hf_config(folder: Path) -> tuple[dict, GPTConfig]:
    """config.json as it is, and what it is for us; raises ValueError."""
    path = folder / "config.json"
    if not path.exists():
        raise ValueError(f"{folder} has no config.json")
    with reading(path, "is refused"):
        config = json.loads(path.read_text())
        return config, model_of_hf_config(config)


def from_hf(source: str, file: Path, hub: str) -> None:
    """Write a checkpoint of weights alone, from a folder or, if there is none of that name, from
    the hub, whose files come to a folder beside `file`."""
    if file.exists():
        raise ValueError(f"{file} exists: give a new file")
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(source)
    if not folder.is_dir():
        folder = file.with_name(source.replace("/", "--") + ".hf")
        fetch_hf(source, folder, hub)
    config, cfg = read_hf_config(folder)
    family = config["model_type"]
    tensors, parameters = read_hf(folder), {}
    for name, shape in parameter_shapes(cfg).items():
        theirs = hf_names(name, family)
        if missing := [one for one in theirs if one not in tensors]:
            raise ValueError(f"{folder} has no tensor {missing[0]}")
        full = torch.cat([hf_layout(name, tensors[one]().float(), family) for one in theirs])
        if family == "opt" and name == "embed.position.weight":
            full = full[2:]                         # OPT's first two rows are never looked up
        if tuple(full.shape) != shape:
            raise ValueError(f"{folder}: {theirs[0]} has shape {tuple(full.shape)}, not {shape}")
        parameters[name] = full.contiguous()
    # OPT numbers GPT-2's pieces otherwise, and others have added some.
    tokenizer = config.get("tokenizer") or (
        "gpt2" if (family, cfg.vocab_size) == ("gpt2", 50257) else f"{family}-{cfg.vocab_size}")
    state = {key: {} for key in KEYS} | dict(
        format=FORMAT, step=0, consumed_samples=0, tokens=0, optimizer_steps=0, data=None,
        model=asdict(cfg), tokenizer=tokenizer, parameters=parameters)
    write_file(state, file.with_name(file.name + ".tmp"), file)
    print(f"{file}: {parameter_count(cfg):,} parameters. Train on with\n"
          f"python train.py --init-from {file} --data DIR --out out/{file.stem}")
    if tokenizer not in ("gpt2", "bytes"):
        print(f"Its tokenizer is not ours: sample.py cannot read or write its tokens, and --data "
              f"must have been made with it (tokenizer {tokenizer!r} in meta.json)")


def hf_tensors(parameters, family: str) -> dict[str, torch.Tensor]:
    """The tensors that hold these of our parameters, (name, full tensor) each, by their full names.
    """
    tensors = {}
    for name, full in parameters:
        full = hf_layout(name, full.float(), family)
        if family == "opt" and name == "embed.position.weight":
            full = F.pad(full, (0, 0, 2, 0))
        theirs = hf_names(name, family)
        for one, tensor in zip(theirs, full.chunk(len(theirs))):
            tensors[HF_PREFIX[family] + one] = tensor.contiguous()
    return tensors


def to_hf(file: Path, folder: Path) -> None:
    """Write a folder that transformers opens; one block at a time is in memory."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    verify(file)
    state = load(file)
    cfg = GPTConfig(**state["model"])
    family = "gpt2" if cfg.activation == "gelu" else "opt"
    architecture = {"gpt2": "GPT2LMHeadModel", "opt": "OPTForCausalLM"}[family]
    ids = {}
    if state["tokenizer"] in ("gpt2", "bytes"):     # whose last token is <|endoftext|>
        ids = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), cfg.vocab_size - 1)
    config = dict(
        model_type=family, architectures=[architecture], tokenizer=state["tokenizer"],
        activation_function="gelu_new" if family == "gpt2" else "relu", dtype="float32",
        **ids, **{theirs: getattr(cfg, ours) for ours, theirs in HF_SHAPE[family].items()})
    if family == "opt":
        config |= dict(ffn_dim=4 * cfg.n_embd, word_embed_proj_dim=cfg.n_embd)
    vocabulary = gpt2_files() if state["tokenizer"] == "gpt2" else {}
    folder.absolute().parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=folder.absolute().parent) as aside:
        aside, files = Path(aside, "folder"), {}
        aside.mkdir()
        by_block = groupby(state["parameters"].items(),
                           key=lambda item: re.match(r"blocks\.\d+|", item[0]).group())
        for number, (_, parameters) in enumerate(by_block):
            tensors, part = hf_tensors(parameters, family), f"model-{number:05d}.safetensors"
            try:
                save_file(tensors, aside / part, metadata={"format": "pt"})
            except SafetensorError as error:
                raise OSError(f"{folder} could not be written: {error}") from error
            files |= dict.fromkeys(tensors, part)
        index = dict(metadata={}, weight_map=files)
        (aside / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))
        (aside / "config.json").write_text(json.dumps(config, indent=1))
        for name, path in vocabulary.items():
            theirs = {"encoder.json": "vocab.json", "vocab.bpe": "merges.txt"}[name]
            shutil.copyfile(path, aside / theirs)
        if vocabulary:
            (aside / "tokenizer_config.json").write_text(json.dumps(dict(
                tokenizer_class="GPT2Tokenizer", model_max_length=cfg.seq_len, bos_token=EOT,
                eos_token=EOT, unk_token=EOT, pad_token=EOT)))
        os.rename(aside, folder)
    print(f"{folder}: {parameter_count(cfg):,} parameters as {architecture}"
          + ", without a tokenizer" * (state["tokenizer"] != "gpt2"))


def main() -> None:
    parser = argparse.ArgumentParser(description="Convert weights from and to Hugging Face.")
    parser.error = lambda message, status=2: parser.exit(status, f"checkpoint.py: {message}\n")
    parser.add_argument("file", type=Path, metavar="FILE.pt", help="a checkpoint of this project")
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--from-hf", metavar="DIR_OR_NAME", help="write FILE.pt from a folder with "
                     "GPT-2 or OPT, or from that name on the hub")
    way.add_argument("--to-hf", type=Path, metavar="DIR", help="write FILE.pt's weights as GPT-2, "
                     "or with ReLU as OPT")
    args, hub = parser.parse_args(), os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        if args.from_hf is not None:
            from_hf(args.from_hf, args.file, hub)
        else:
            to_hf(args.file, args.to_hf)
    except ImportError:
        parser.error("this needs safetensors: pip install safetensors")
    except KeyboardInterrupt:
        sys.exit(1)
    except (ValueError, OSError) as error:
        parser.error(str(error), 1 if isinstance(error, ConnectionError) else 2)


if __name__ == "__main__":
    main()
