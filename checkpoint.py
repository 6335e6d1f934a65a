"""State to disk and back. A checkpoint has no layout.

    every rank                  rank 0                             out/
    copies of its shards   -->  one full tensor at a time,    -->  step_00000200.pt  <-+ hard link
    (tp, pp, ZeRO)              under its global name              latest.pt  ---------+

One file holds the whole state under global names: fp32 masters and Adam's moments. Layers are
numbered over all stages, tied weights are stored once, and the vocabulary has no padding. So any
layout can load what any other layout wrote, and so can sample.py in one process.

    format      7: the version of these keys and of the order of the data
    step        the last completed step       consumed_samples  sequences trained on or left out
    tokens      number of tokens read         optimizer_steps   number of updates
    config      train.py's flags              model      its GPTConfig or LlamaConfig, as a dict
    tokenizer   its name (tokenizer_file: its content, of one's own)
    template    of conversations, if it was trained on some (template_file: a model's own)
    ends        tokens at which a published model's generation ends
                                              data       mixtures.Mixture's phases
    scaler      its state_dict()              monitor    DivergenceMonitor as a dict
    run         {"id": the run's random id, "origin": [kind, id, step of the file it began from]}
    parameters, exp_avg, exp_avg_sq           {global name: tensor}

A file either does not exist or is complete: it is written under another name, flushed to the disk,
then renamed. Reading it runs no code from it. It is a zip whose members carry CRCs; torch.load does
not check them, `verify` does. A file of weights alone (no moments) is for `train.py --init-from`.

Training waits only while each rank copies its own shards to host memory. Then a thread of each rank
sends them to rank 0 and a thread there writes the file (`Writer`), while the next steps run. So a
rank needs memory for its shards once more, and rank 0 also for two full tensors (the parts of one,
and their union), whatever the size of the model.
"""
import os
import shutil
import zipfile
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from functools import cached_property, partial
from pathlib import Path
from typing import Callable

import torch
import torch.distributed as dist

from model import GPT, VOCAB_MATRICES, GPTConfig
from models import make_config
from parallelism.buckets import Bucket, make_buckets
from parallelism.build import Grid, build_stage
from parallelism.collectives import (PeerError, comm_errors, on_hosts, out_of_memory,
                                     to_host)
from parallelism.cpu_kernels import use_kernels
from parallelism.tensor import ParamSpec, param_specs
from parallelism.zero import FlatParameters
from runtime.checkpoint_files import (first_cause, name_for_torch, reading, remove_old,
                                      retry_transient, step_file, what_is_left)
from runtime.processes import RunError, warn

FORMAT = 7
STATE = {"parameters": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
KEYS = {"format", "step", "consumed_samples", "tokens", "optimizer_steps", "config", "model",
        "tokenizer", "data", "scaler", "monitor", "run", *STATE}
OPTIONAL = ("tokenizer_file", "template", "template_file", "ends")


# ---------------------------------------------------------------------------------------------
# In one process
# ---------------------------------------------------------------------------------------------


def plain_save(model: GPT, optimizer: torch.optim.AdamW, facts: dict, out: Path) -> None:
    """Write out/step_0000000k.pt and latest.pt. `facts` are the entries of the file but for the
    tensors and the number of updates, which is Adam's."""
    tensors = {key: {} for key in STATE}
    for name, parameter in model.named_parameters():            # tied weights once
        rows = model.cfg.vocab_size if name in VOCAB_MATRICES else len(parameter)
        adam = optimizer.state[parameter]
        for key, tensor in zip(STATE, (parameter, adam["exp_avg"], adam["exp_avg_sq"])):
            tensors[key][name] = tensor.detach()[:rows].cpu().clone()       # without the padding
    aside = out / "step.pt.tmp"
    with open(aside, "wb") as file:
        torch.save(facts | tensors | dict(optimizer_steps=int(adam["step"])), file)
        file.flush()
        os.fsync(file.fileno())     # on the disk, before the name says that it is whole
    os.replace(aside, step_file(out, facts["step"]))
    os.link(step_file(out, facts["step"]), aside)       # a second name of the same file
    os.replace(aside, out / "latest.pt")


@torch.no_grad()
def plain_load(model: GPT, optimizer: torch.optim.AdamW, path: Path) -> dict:
    """Fill the model and the optimizer from a file that any layout wrote. Returns its other
    entries."""
    state = torch.load(path, map_location="cpu", weights_only=True)     # runs no code from the file
    full, exp_avg, exp_avg_sq = (state.pop(key) for key in STATE)
    for name, parameter in model.named_parameters():
        adam = dict(step=torch.tensor(float(state["optimizer_steps"])),
                    exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
        rows = len(full[name])                                          # the others are padding
        parameter[:rows] = full[name]
        adam["exp_avg"][:rows] = exp_avg[name]
        adam["exp_avg_sq"][:rows] = exp_avg_sq[name]
        optimizer.state[parameter] = adam
    return state


# ---------------------------------------------------------------------------------------------
# Between flat buffers and full tensors
# ---------------------------------------------------------------------------------------------


@torch.no_grad()
def copy_shards(flat: FlatParameters, names, timeout: float) -> deque:
    """Copy to host memory the parts of parameters that the file takes from this rank, for each of
    the flat tensors `names`, in the order of the file. Without ZeRO the replicas hold the same, and
    the file takes the first one's. PeerError if a GPU hangs for `timeout` seconds."""
    copies = deque()
    if flat.grid.replica >= flat.num_shards:
        return copies
    for name in names:
        for bucket in flat.buckets:
            for spec, shard_slice, _ in bucket.shard_ranges:
                is_replicated = spec.partition_dim is None and flat.grid.tp_rank > 0
                if not spec.is_tied_copy and not is_replicated:
                    # (A copy from CUDA is pinned, which may take twice the memory; its clone not.)
                    copies.append(to_host(bucket.shard[name][shard_slice], timeout).clone())
    return copies


def send_shards(copies: deque, grid: Grid, tag: int) -> None:
    """Send the copies to rank 0, in order, and free each once it is sent. A message waits until
    rank 0 asks for it; if rank 0 dies, the connection breaks. The tag is the step of the save."""
    while copies:
        with comm_errors("save, send to rank 0"):
            dist.isend(copies.popleft(), 0, grid.groups["save"], tag).wait(timedelta(days=1))


def file_order(model_config: GPTConfig, grid: Grid, num_shards: int) -> list[tuple]:
    """The parameters of all stages as [(spec, bucket, ranks[tp rank][shard] that hold them)]: a
    function of the model and the layout."""
    order = []
    for stage in range(grid.pp):
        at_stage = grid.ranks[:, stage].flatten(0, 1)                   # (replica, tp rank)
        place = Grid(grid.dp, grid.pp, grid.tp, int(at_stage[0, 0]), chunks=grid.chunks,
                     cp=grid.cp)
        ranks = at_stage[:num_shards].T.tolist()
        specs = param_specs(build_stage(model_config, place), model_config, place)
        for bucket in make_buckets(specs, grid.replicas):
            for spec in bucket.specs:
                if not spec.is_tied_copy:
                    holders = ranks[:1] if spec.partition_dim is None else ranks
                    order.append((spec, bucket, holders))
    return order


def receive_parameter(spec: ParamSpec, bucket: Bucket, ranks: list, dtype: torch.dtype,
                      copies: deque, grid: Grid, tag: int) -> torch.Tensor:
    """On rank 0: the next full parameter, joined from the parts that `ranks` send with this tag and
    from the rank's own `copies`."""
    length = bucket.numel // len(ranks[0])
    shards, receives = [], []
    for row in ranks:
        shard = torch.empty(spec.numel, dtype=dtype)
        for i, rank in enumerate(row):
            first = i * length - bucket.offsets[spec.name]          # of rank's shard of the bucket
            part = shard[max(0, first):max(0, first + length)]
            if len(part) > 0 and rank == 0:
                part.copy_(copies.popleft())
            elif len(part) > 0:
                operation = f"save, receive from rank {rank}{on_hosts([rank], grid.hosts)}"
                with comm_errors(operation):
                    receive = dist.irecv(part, rank, grid.groups["save"], tag)
                receives.append((operation, receive))
        shards.append(shard.view(spec.local_shape))
    for operation, receive in receives:
        with comm_errors(operation):
            receive.wait()
    return spec.join(shards)


class LateStorage(torch.UntypedStorage):
    """Bytes that exist only while torch.save writes them. It is a storage of the device `meta`,
    which has no memory; torch.save calls `cpu` for the bytes of a storage that is not on the CPU,
    and drops them when they are in the file."""

    def cpu(self):
        return self.read().untyped_storage()


class Streamed:
    """Stands in a state for a tensor that exists only while torch.save writes it: `read()` returns
    the tensor, contiguous from the start of its storage. torch.save pickles all objects first, then
    writes their storages, one by one. The file is the same, byte for byte."""

    def __init__(self, shape: tuple, dtype: torch.dtype, read: Callable):
        self.like = torch.empty(shape, dtype=dtype, device="meta")
        self.read = read

    def __reduce__(self):
        """What torch.Tensor.__reduce_ex__ returns for a tensor on the CPU: how to build it again
        (a function), and from what (its arguments), of which pickle then asks the storage."""
        storage = LateStorage(self.like.nbytes, device="meta")
        storage.read = self.read
        typed = torch.storage.TypedStorage(wrap_storage=storage, dtype=self.like.dtype,
                                           _internal=True)
        typed._fake_device = "cpu"          # what the file says of its device
        offset = 0
        shape, stride = tuple(self.like.shape), self.like.stride()
        requires_grad = False
        hooks = OrderedDict()
        return (torch._utils._rebuild_tensor_v2,
                (typed, offset, shape, stride, requires_grad, hooks))


def restore(state: dict, flat: FlatParameters) -> None:
    """Load this rank's slices of a checkpoint's full tensors into the flat buffers. Takes the
    tensors out of `state`: they are memory of the mapped file."""
    for key, flat_name in STATE.items():
        tensors = state.pop(key)
        flat.load(flat_name, lambda name, shape: tensors[name])
    flat.sync_params()
    flat.wait_params()


# ---------------------------------------------------------------------------------------------
# Writing
# ---------------------------------------------------------------------------------------------


def write_file(content: dict | Path, aside: Path, path: Path) -> None:
    """Write a state, or copy a file, to the file `aside` and, once it is whole and on the disk,
    rename it to `path`. Raises OSError if it cannot be written, PeerError if a rank that sends
    its shards is gone; too little memory is raised as it is."""
    try:
        with open(aside, "wb") as file:
            if isinstance(content, Path):
                with open(content, "rb") as source:
                    shutil.copyfileobj(source, file)
            else:
                torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(aside, path)
    except (OSError, RuntimeError) as error:
        aside.unlink(missing_ok=True)
        cause = first_cause(error)
        if isinstance(cause, PeerError) or out_of_memory(cause):
            raise cause
        raise OSError(f"{path} could not be written: {cause}") from error


def save(state: dict, out: Path, keep: int) -> Path:
    """Write out/step_0000000k.pt and latest.pt. Then remove old checkpoints, except the newest
    `keep` and those that the state's monitor names.

    Raises OSError if a file cannot be written (a full disk); earlier files are then untouched.
    """
    out.mkdir(parents=True, exist_ok=True)      # somebody may have removed it
    path = step_file(out, state["step"])
    latest = out / "latest.pt"
    aside = out / "latest.pt.tmp"
    write_file(state, out / "step.pt.tmp", path)
    aside.unlink(missing_ok=True)
    with suppress(OSError):
        os.link(path, aside)
    if aside.exists():
        os.replace(aside, latest)
    else:                                       # the file system has no hard links
        write_file(path, aside, latest)
    if hasattr(os, "O_DIRECTORY"):              # Windows cannot open a folder to flush it
        folder = os.open(out, os.O_RDONLY)
        try:
            os.fsync(folder)                    # the names too must survive a power failure
        finally:
            os.close(folder)

    # The monitor names the files that a rollback may go back to, among them the run's first.
    named = {file for _, file, _ in state["monitor"].get("checkpoints", [])}
    remove_old(out, keep, named)
    return path


class Writer:
    """Writes checkpoints in a thread of each rank, one at a time. Rank 0 waits at most `timeout`
    seconds for each part that another rank sends."""

    def __init__(self, out: Path, keep: int, model_config: GPTConfig, flat: FlatParameters,
                 timeout: float):
        self.out = out
        self.keep = keep
        self.model_config = model_config
        self.flat = flat
        self.grid = flat.grid
        self.timeout = timeout
        self.thread = ThreadPoolExecutor(1)
        self.pending = None         # the Future of the last write

    @cached_property
    def order(self) -> list[tuple]:
        return file_order(self.model_config, self.grid, self.flat.num_shards)

    def submit(self, facts: dict) -> None:
        """Copy this rank's shards, then start to write the state: `facts` and the tensors. Every
        rank must call it. Call `wait` before."""
        copies = copy_shards(self.flat, STATE.values(), self.timeout)
        task = self._write if self.grid.rank == 0 else self._send
        self.pending = self.thread.submit(task, facts, copies)

    def _send(self, facts: dict, copies: deque) -> None:
        send_shards(copies, self.grid, facts["step"])

    def _write(self, facts: dict, copies: deque) -> str | None:
        dtype = self.flat.buckets[0].shard["master"].dtype
        full = (receive_parameter(*place, dtype, copies, self.grid, facts["step"])
                for _ in STATE for place in self.order)
        tensors = {key: {spec.name: Streamed(spec.shape, dtype, partial(next, full))
                         for spec, *_ in self.order} for key in STATE}
        try:
            save(facts | tensors, self.out, self.keep)
            return None
        except OSError as error:            # the run goes on: earlier files are whole
            reason = str(error)             # (the exception itself would keep a tensor in memory)
        warn(f"{reason}; {what_is_left(self.out)}")
        for _ in full:                      # the others send the rest too
            pass
        return reason

    def wait(self, required: bool = False) -> str | None:
        """Wait for the last write, however slow the disk is; returns why it failed, on rank 0.
        Raises PeerError if another rank is gone; RunError if rank 0 could not write a checkpoint
        that is `required`."""
        error = None if self.pending is None else self.pending.result()
        if required and error is not None:
            raise RunError(f"the last checkpoint is lost: {error}: see that {self.out} can be "
                           f"written and has space for it, then give the same command")
        return error

    def close(self) -> None:
        """Wait for the last write when the run ends by an error. If that is the loss of rank 0,
        nobody receives: the others wait for `timeout` seconds."""
        if self.pending is not None:
            timeout = None if self.grid.rank == 0 else self.timeout
            with suppress(PeerError, TimeoutError):
                self.pending.result(timeout)


# ---------------------------------------------------------------------------------------------
# Reading
# ---------------------------------------------------------------------------------------------


@retry_transient
def verify(path: Path) -> None:
    """Read the file once and compare its bytes with the zip's CRCs. Raises CorruptCheckpoint."""
    with reading(path, "is damaged, cut off, or no checkpoint"), zipfile.ZipFile(path) as archive:
        bad = archive.testzip()
        if bad is not None:
            raise ValueError(f"the CRC of {bad} does not match")
        for entry in archive.infolist():
            if entry.external_attr != 0:        # a directory's bit: torch.load would not read it
                raise ValueError(f"the attributes of {entry.filename} are not 0")


@retry_transient
def load(path: Path) -> dict:
    """Load the state in a file. Its tensors are mapped from disk, not yet read nor verified.

    Raises CorruptCheckpoint if the file is no checkpoint, contradicts itself, or holds anything but
    tensors and plain types; ValueError if another version of this code wrote it.
    """
    with reading(path, "is refused"):
        with name_for_torch(path) as name:
            state = torch.load(name, map_location="cpu", mmap=True, weights_only=True)
        if not isinstance(state, dict) or "format" not in state:
            raise ValueError("it is not a checkpoint of this project")
    if state["format"] != FORMAT:               # not damaged: it must not be passed over
        raise ValueError(f"{path} has format {state['format']}, this code reads format {FORMAT}: "
                         f"use the version of the code that wrote it")
    with reading(path, "is refused"):
        if set(state) - set(OPTIONAL) != KEYS:
            raise ValueError(f"its keys differ: {sorted((set(state) - set(OPTIONAL)) ^ KEYS)}")
        weights_only = not state["exp_avg"] and not state["exp_avg_sq"]
        shapes = parameter_shapes(make_config(**state["model"]))
        for key in STATE:
            found = {name: tuple(tensor.shape) for name, tensor in state[key].items()}
            if found != shapes and (key == "parameters" or not weights_only):
                raise ValueError(f"its {key} are not those of its model")
    return state


def parameter_shapes(model_config: GPTConfig) -> dict[str, tuple]:
    """{global name: shape} of the full parameters, without the padding of the vocabulary."""
    with torch.device("meta"):
        model = model_config.build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    of_vocabulary = (model_config.vocab_size, model_config.n_embd)
    return shapes | {name: of_vocabulary for name in VOCAB_MATRICES if name in shapes}


def load_model(path: Path) -> tuple[GPT, dict]:
    """Load the full model into one process on the CPU. Returns it and the file's state."""
    verify(path)
    state = load(path)
    model = make_config(**state["model"]).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = state["parameters"][name]
            parameter.zero_()[:full.shape[0]] = full            # zero: the vocabulary padding
    use_kernels(model)
    return model.eval(), state
