"""State to disk and back. A checkpoint has no layout.

    every rank                  rank 0                             out/
    pieces of its shards   -->  one full tensor at a time,    -->  step_00000200.pt  <-+ hard link
    (tp, pp, ZeRO)              under its global name              latest.pt  ---------+

One file holds the whole state under global names: fp32 masters and Adam's moments. Layers are
numbered over all stages, tied weights are stored once, and the vocabulary has no padding. So any
layout can load what any other layout wrote, and so can sample.py in one process. A file either
does not exist or is complete. It is written under another name, flushed to the disk, then renamed.
Reading it runs no code from it.

    format              7: the version of these keys and of the order of the data
    step                the last completed step
    tokens              number of tokens read
    consumed_samples    number of sequences trained on or left out
    optimizer_steps     number of updates
    config, model       train.py's flags, and the GPTConfig or LlamaConfig, as dicts
    data                the mixture's phases (corpus/mixtures.py)
    tokenizer           its name (optional: tokenizer_file, the content of one of your own)
    template            optional, of conversations (template_file: a model's own)
    ends                optional: tokens at which a published model's generation ends
    scaler, monitor     LossScaler and DivergenceMonitor, as dicts
    run                 {"id": random, "origin": [kind, id, step of the file that it began from]}
    parameters, exp_avg, exp_avg_sq     {global name: tensor}

A file of weights alone has no moments and is for `train.py --init-from`.

`save` writes a state, `load` reads it, and `verify` compares a file's bytes with their checksums.
For the plain program `plain_save` makes the state of an AdamW, and `plain_load` takes it back. In
any layout `copy_pieces`, `send_pieces` and `full_tensor` bring the pieces to rank 0, in threads of
runtime/checkpoint_writer.py while training goes on, and `restore` takes back each rank's slices.
base/checkpoint_folder.py has a format for larger models: a folder, of which every rank writes a
part.
"""
from collections import deque
from collections.abc import Container, Iterable, Iterator, Mapping
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from base.checkpoint_files import (check_entries, errors_as_corrupt, parameter_shapes, read_state,
                                   remove_old, step_file, verify)
from base.disk import flush_folder, link_file, retry_transient, write_file
from model import GPT
from models import make_config
from parallelism.collectives import comm_errors, on_hosts, to_host

FORMAT = 7
STATE = {"parameters": "master", "exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq"}
KEYS = {"format", "step", "consumed_samples", "tokens", "optimizer_steps", "config", "model",
        "tokenizer", "data", "scaler", "monitor", "run", *STATE}
OPTIONAL = ("tokenizer_file", "template", "template_file", "ends")


# ---- Files ----------------------------------------------------------------------------------

def save(state: dict, out: Path, keep: int, protected: Container[str] = ()) -> Path:
    """Write out/step_0000000k.pt and latest.pt. Then remove old checkpoints, except the newest
    `keep` and the files whose names are in `protected`. Raises OSError if a file cannot be written,
    for example on a full disk. Earlier files are then untouched."""
    out.mkdir(parents=True, exist_ok=True)      # somebody may have removed it
    path = step_file(out, state["step"])
    write_file(state, out / "step.pt.tmp", path)
    link_file(path, out / "latest.pt")
    flush_folder(out)
    remove_old(path, keep, protected)
    return path


@retry_transient
def load(path: Path) -> dict:
    """Load the state in a file: its tensors are mapped from disk, not yet read nor verified. Those
    of a folder are read when they are asked for. Raises CorruptCheckpoint if the file is no
    checkpoint, contradicts itself, or holds anything but tensors and plain types. Raises ValueError
    if another version of this code wrote it."""
    with errors_as_corrupt(path, "is refused"):
        state = read_state(path)
        if path.is_dir():
            from base.checkpoint_folder import add_tensors      # files need nothing of it
            state = add_tensors(state, path, STATE)
        if not isinstance(state, dict) or "format" not in state:
            raise ValueError("it is not a checkpoint of this project")
        if state["format"] == FORMAT:
            check_entries(state, KEYS, OPTIONAL, STATE)
    if state["format"] != FORMAT:               # no damage: no older file may be taken instead
        raise ValueError(f"{path} has format {state['format']}, this code reads format {FORMAT}: "
                         f"use the version of the code that wrote it")
    return state


# ---- The tensors of one process -------------------------------------------------------------

def named_tensors(model: GPT, optimizer: torch.optim.AdamW) -> Iterator[tuple]:
    """Yields (key of the file, global name, tensor). The tensors are views of the parameters and
    moments, without the padding of the vocabulary."""
    shapes = parameter_shapes(model.cfg)
    for name, parameter in model.named_parameters():        # tied weights once
        rows = shapes[name][0]
        moments = optimizer.state[parameter]
        yield "parameters", name, parameter.detach()[:rows]
        yield "exp_avg", name, moments["exp_avg"][:rows]
        yield "exp_avg_sq", name, moments["exp_avg_sq"][:rows]


def plain_save(model: GPT, optimizer: torch.optim.AdamW, facts: dict, out: str,
               keep: int) -> None:
    """`save` of a model and its optimizer. `facts` are the entries of the file except the tensors
    and the number of updates, which Adam counts."""
    adam = next(iter(optimizer.state.values()))     # all parameters have the same count
    state = {**facts, "optimizer_steps": int(adam["step"]), **{key: {} for key in STATE}}
    for key, name, tensor in named_tensors(model, optimizer):
        state[key][name] = tensor.cpu().clone()     # torch.save would write a view's whole memory
    save(state, Path(out), keep)


@torch.no_grad()
def plain_load(model: GPT, optimizer: torch.optim.AdamW, path: Path) -> None:
    """Fill the model and the optimizer from a checkpoint that any layout wrote."""
    state = load(path)
    for parameter in model.parameters():
        optimizer.state[parameter] = dict(
            step=torch.tensor(float(state["optimizer_steps"])),
            exp_avg=torch.zeros_like(parameter), exp_avg_sq=torch.zeros_like(parameter))
    for key, name, tensor in named_tensors(model, optimizer):
        tensor.copy_(state[key][name])


def load_model(path: Path) -> tuple[GPT, dict]:
    """Load the full model into one process on the CPU. Returns it and the file's state."""
    verify(path)
    state = load(path)
    model = make_config(**state["model"]).build()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            full = state["parameters"][name]
            parameter.zero_()[:full.shape[0]] = full            # zero: the vocabulary padding
    return model.eval(), state


# ---- The tensors of any layout --------------------------------------------------------------
#
# A piece is what the file takes from one rank of one tensor (parallelism/pieces.py).

def copy_pieces(owned: Iterable[tuple], names: Iterable[str], timeout: float) -> deque:
    """Copy this rank's pieces to host memory, in the order of the file: of the flat tensors `names`
    those of pieces.owned_slices. DistError if a GPU hangs for `timeout` seconds."""
    owned = list(owned)
    # A copy from CUDA is pinned memory, which may take twice the space. Its clone is not.
    return deque(to_host(bucket.shard[name][shard_slice], timeout).clone()
                 for name in names for bucket, _, shard_slice, _ in owned)


def send_pieces(copies: deque, grid, step: int) -> None:
    """Send them to rank 0 and free each once it is sent: a message waits until rank 0 asks for it.
    If rank 0 dies, the connection breaks. The tag is the step of the save."""
    while copies:
        with comm_errors("save, send to rank 0"):
            dist.isend(copies.popleft(), 0, grid.groups["save"], step).wait(timedelta(days=1))


def full_tensor(scattered, dtype: torch.dtype, copies: deque, grid, step: int) -> torch.Tensor:
    """On rank 0: the full tensor of a pieces.Scattered, from the rank's own `copies` and from what
    the others send."""
    spec = scattered.spec
    parts = torch.empty(spec.num_parts, spec.numel, dtype=dtype)
    receives = []                       # [(operation, handle)] under way
    for rank, part, numbers in scattered.pieces:
        space = parts[part, numbers]
        if rank == 0:
            space.copy_(copies.popleft())
            continue
        operation = f"save, receive from rank {rank}{on_hosts([rank], grid.hosts)}"
        with comm_errors(operation):
            receives.append((operation, dist.irecv(space, rank, grid.groups["save"], step)))
    for operation, receive in receives:
        with comm_errors(operation):
            receive.wait()
    return spec.join(parts.view(-1, *spec.local_shape).unbind())


def restore(state: dict, flat) -> None:
    """Load this rank's slices of a checkpoint's full tensors into a zero.FlatParameters. Takes the
    tensors out of `state`."""
    for key, flat_name in STATE.items():
        load_shards(state.pop(key), flat, flat_name)
    flat.sync_params()
    flat.wait_params()


def load_shards(tensors: Mapping, flat, kind: str) -> None:
    """Fill this rank's shard[kind] of each bucket from full tensors, of which it reads only these
    slices. A file's position table may be longer than the model's."""
    if isinstance(tensors, dict):
        flat.load(kind, lambda name, shape: tensors[name][:shape[0]])
    else:
        tensors.load_shards(flat, kind)         # a checkpoint_folder.FolderTensors
