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

`save` writes and `load` reads a state. For the plain program `plain_save` makes the state of an
AdamW, and `plain_load` takes it back. Of a run in any layout runtime/checkpoint_writer.py moves the
pieces to rank 0, and `restore` takes back each rank's slices. base/checkpoint_folder.py has a
format for larger models: a folder, of which every rank writes a part.
"""
from collections.abc import Container, Iterator, Mapping
from pathlib import Path

import torch

from base.checkpoint_files import errors_as_corrupt, read_state, remove_old, step_file, verify
from base.disk import flush_folder, link_file, retry_transient, write_file
from model import GPT, OF_VOCABULARY, GPTConfig
from models import make_config

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
            check_entries(state)
    if state["format"] != FORMAT:               # no damage: no older file may be taken instead
        raise ValueError(f"{path} has format {state['format']}, this code reads format {FORMAT}: "
                         f"use the version of the code that wrote it")
    return state


def check_entries(state: dict) -> None:
    """Raise ValueError if the keys of a checkpoint, or the names and shapes of its tensors, are not
    those of its model. A file of weights alone has no moments."""
    difference = (set(state) - set(OPTIONAL)) ^ KEYS
    if difference:
        raise ValueError(f"its keys differ: {sorted(difference)}")
    shapes = parameter_shapes(make_config(**state["model"]))
    for key in STATE:
        tensors = getattr(state[key], "like", state[key])       # those of a folder are not read
        found = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
        if found != shapes and (key == "parameters" or state["exp_avg"] or state["exp_avg_sq"]):
            raise ValueError(f"its {key} are not those of its model")


def parameter_shapes(model_config: GPTConfig) -> dict[str, tuple]:
    """{global name: shape} of the full parameters, without the padding of the vocabulary."""
    with torch.device("meta"):
        model = model_config.build()
    shapes = {name: tuple(p.shape) for name, p in model.named_parameters()}
    return shapes | {name: (model_config.vocab_size, *shapes[name][1:]) for name in OF_VOCABULARY
                     if name in shapes}


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


def plain_save(model: GPT, optimizer: torch.optim.AdamW, facts: dict, out: Path,
               keep: int) -> None:
    """`save` of a model and its optimizer. `facts` are the entries of the file except the tensors
    and the number of updates, which Adam counts."""
    adam = next(iter(optimizer.state.values()))     # all parameters have the same count
    state = {**facts, "optimizer_steps": int(adam["step"]), **{key: {} for key in STATE}}
    for key, name, tensor in named_tensors(model, optimizer):
        state[key][name] = tensor.cpu().clone()     # torch.save would write a view's whole memory
    save(state, out, keep)


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


# ---- The tensors of any layout: each rank reads its slices ----------------------------------

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
