"""A model in Hugging Face's form: what a name or a path is, its download from the hub, and the
tensors of its files. tools/huggingface.py imports them.

A folder contains config.json and the tensors: in model.safetensors, in pytorch_model.bin, or in the
files listed by one of the two with .index.json.
"""
import json
import re
import sys
import zipfile
from functools import partial
from pathlib import Path
from typing import Callable

import torch

from base.checkpoint_files import reading, verify
from corpus.downloads import download
from tools.huggingface_names import tensors_of

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")
FILE_KINDS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".gguf", ".json")
IS_ADAPTER = ("holds an adapter (LoRA), not a model: merge it into its base model, as PEFT's "
              "merge_and_unload does, and import that")


def check_source(source: str, file: Path) -> None:
    """Raise a ValueError that says what `source` is if it is neither a folder nor a name such as
    gpt2 or facebook/opt-125m."""
    path = Path(source)
    if path.is_dir():
        return
    is_name = re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", source)
    on_the_hub = re.match(r"https?://[^/]+/(.+?)/?(/(tree|blob|resolve)/.*)?$", source)
    if on_the_hub:
        raise ValueError(f"give the model's name alone: import {on_the_hub[1]} {file}")
    if path.suffix in FILE_KINDS and not path.exists():
        raise ValueError(f"there is no file {source}, and a folder or a name on the hub is needed")
    if path.suffix == ".gguf":
        raise ValueError(f"{source} is a file of llama.cpp, with its own rounding: give the model "
                         f"that it was made of, by its name on the hub or its folder")
    if path.suffix in (".pt", ".pth", ".ckpt") and path.exists():
        raise ValueError(f"{source} is a file: a checkpoint of this project needs no import, "
                         f"train.py --init-from {source} and sample.py --ckpt {source} read it "
                         f"(`export {source} DIR` is the other way); another program's: let that "
                         f"program write a folder of Hugging Face")
    if path.exists():
        raise ValueError(f"{source} is a file: give the folder that holds it, config.json and any "
                         f"other files of the model: import {path.parent} {file}")
    if not is_name:
        raise ValueError(f"there is no folder {source}, and a model's name on the hub is like gpt2 "
                         f"or facebook/opt-125m")


def fetch(source: str, folder: Path, hub: str, check: Callable[[Path], object]) -> None:
    """Download a model from the hub to `folder`: config.json first, and when `check` has not
    refused it, the tensors. Raises ValueError if the hub does not have the model, ConnectionError
    if the hub cannot be reached."""
    import requests
    address = f"{hub}/{source}/resolve/main/"

    def is_there(name):
        reply = requests.head(address + name, allow_redirects=True, timeout=30)
        if reply.status_code in (401, 403):
            raise ValueError(f"there is no folder {source}, and the model on {hub} needs an "
                             f"account there (it is private or gated) or does not exist: `hf "
                             f"download {source} --local-dir DIR` where you are logged in, then "
                             f"give DIR")
        if not reply.ok and reply.status_code != 404:
            raise ConnectionError(f"{address}{name}: {reply.status_code} {reply.reason}")
        return reply.ok

    try:
        if not is_there("config.json"):
            if is_there("adapter_config.json"):
                raise ValueError(f"{source} on {hub} {IS_ADAPTER}")
            raise ValueError(f"{source} is neither a folder nor a public model on {hub}, which "
                             f"has a config.json")
        weights = next(filter(is_there, WEIGHTS), None)
    except requests.RequestException as error:
        raise ConnectionError(f"there is no folder {source}, and {hub} cannot be reached: give the "
                              f"folder of a copy, or try again with a network ({error})") from error
    if weights is None:
        raise ValueError(f"{address} has none of {', '.join(WEIGHTS)}")
    download(address + "config.json", folder / "config.json")
    check(folder)
    download(address + weights, folder / weights)
    for file in weight_files(folder):
        download(address + file.name, file)
    for name in ("tokenizer.json", "vocab.json", "tokenizer_config.json", "chat_template.jinja",
                 "special_tokens_map.json", "generation_config.json"):
        if is_there(name):
            download(address + name, folder / name)


def files_of_index(index: Path) -> list[Path]:
    """The files that an index lists, which stand beside it."""
    with reading(index, "is refused"):
        weight_map = json.loads(index.read_text()).get("weight_map")
        if not isinstance(weight_map, dict):
            raise ValueError("its weight_map is no object of names and files")
        names = sorted(set(map(str, weight_map.values())))
        for name in names:
            if Path(name).name != name:
                raise ValueError(f"{name} is not a file beside it")
    return [index.with_name(name) for name in names]


def weight_files(folder: Path) -> list[Path]:
    """The files of a folder's tensors; if it has several formats, those of the first in WEIGHTS."""
    for name in WEIGHTS:
        path = folder / name
        if path.exists():
            return files_of_index(path) if path.suffix == ".json" else [path]
    raise ValueError(f"{folder} has none of {', '.join(WEIGHTS)}")


def tensor_readers(file: Path) -> dict[str, Callable[[], torch.Tensor]]:
    """{name in the file: function that reads the tensor}, so that a model is never in memory twice.
    A note tells of a collection of tensors within a pickle. Raises ValueError."""
    if not file.exists():
        raise ValueError(f"{file.parent} lacks {file.name}")
    if file.suffix == ".safetensors":
        from safetensors import safe_open
        with reading(file, "is refused"):
            tensors = safe_open(file, framework="pt")
            readers = {name: partial(tensors.get_tensor, name) for name in tensors.keys()}
    else:
        is_zip = zipfile.is_zipfile(file)           # since PyTorch 1.6
        if is_zip:
            verify(file)
        with reading(file, "is refused"):
            content = torch.load(file, map_location="cpu", mmap=is_zip, weights_only=True)
            tensors, place = tensors_of(content)
            readers = {name: partial(tensors.get, name) for name in tensors}
        if place:
            print(f"tools.huggingface: note: {file}: the tensors in {place} are taken",
                  file=sys.stderr)
    return readers
