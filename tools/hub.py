"""A model in Hugging Face's form: what a name or a path is, its download from the hub, and the
tensors of its files. tools/huggingface.py calls these functions.

A folder contains config.json and the tensors: in model.safetensors, in pytorch_model.bin, or in the
files listed by one of the two with .index.json.
"""
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import torch

from base.checkpoint_files import reading, verify
from base.errors import FAILURES, named
from parallelism.collectives import first_line

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin",
           "pytorch_model.bin.index.json")
# What is downloaded, as patterns of huggingface_hub. Of both kinds of weights the first is enough.
SMALL_FILES = ("config.json", "generation_config.json", "adapter_config.json", "tokenizer.json",
               "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
               "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja")
SAFETENSORS = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
PICKLES = ("pytorch_model.bin", "pytorch_model-*.bin", "pytorch_model.bin.index.json")
FILE_KINDS = (".pt", ".pth", ".ckpt", ".safetensors", ".bin", ".gguf", ".json")
IS_ADAPTER = ("holds an adapter (LoRA), not a model: merge it into its base model, as PEFT's "
              "merge_and_unload does, and import that")


def note(text: str) -> None:
    print(f"tools.huggingface: note: {text}", file=sys.stderr)


def read_object(path: Path) -> dict:
    """The object in a file of JSON, or an empty one without the file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is refused: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is refused: it is no object, but {type(content).__name__}")
    return content


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


def fetch(name: str, check: Callable[[Path], object]) -> Path:
    """The folder of a model in the cache of huggingface_hub, which downloads what is missing: the
    small files first and, when `check` has not refused the folder, the tensors. Raises ValueError
    if the hub does not have the model, or not for this user, ConnectionError if it cannot be
    reached."""
    folder = download(name, SMALL_FILES)
    check(folder)
    for weights in (SAFETENSORS, PICKLES):
        download(name, [*SMALL_FILES, *weights])
        if any((folder / file).exists() for file in WEIGHTS):
            break
    return folder


def download(name: str, patterns: Iterable[str]) -> Path:
    try:
        from huggingface_hub import constants, errors, snapshot_download
    except ImportError:
        raise ValueError(f"there is no folder {name}, and a model of the hub needs the package "
                         f"huggingface_hub: pip install huggingface_hub") from None
    try:
        return Path(snapshot_download(name, allow_patterns=list(patterns)))
    except errors.GatedRepoError:
        raise ValueError(f"{name} is gated: accept its licence on its page of the hub, log in by "
                         f"`hf auth login`, and import it again") from None
    except errors.RepositoryNotFoundError:
        raise ValueError(f"{name} is neither a folder nor a model on the hub that you may read: if "
                         f"it is private, log in by `hf auth login`") from None
    except Exception as error:          # of its HTTP package too, which is another in each version
        has_path = getattr(error, "filename", None) is not None
        if has_path or getattr(error, "errno", None) in FAILURES:       # of the disk
            with named(constants.HF_HUB_CACHE):
                raise
        raise ConnectionError(f"there is no folder {name}, and the model cannot be downloaded "
                              f"({first_line(error)}): give the folder of a copy, or try again "
                              f"with a network") from error


def files_of_index(index: Path) -> list[Path]:
    """The files that an index lists, which stand beside it."""
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} is refused: its weight_map is no object of names and files")
    names = sorted(set(map(str, weight_map.values())))
    for name in names:
        if Path(name).name != name:
            raise ValueError(f"{index} is refused: {name} is not a file beside it")
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
            note(f"{file}: the tensors in {place} are taken")
    return readers


def tensors_of(content: object) -> tuple[dict, str]:
    """(the tensors by their names, their place) in what a pickle holds: itself, or the largest
    collection in it, such as that of `state_dict` or `model`. Raises ValueError."""
    if not isinstance(content, dict):
        raise ValueError(f"it holds no names of tensors, but {type(content).__name__}")
    places, counts = {"": content}, {"": 0}

    def search(one: dict, place: str):
        names = [name for name, x in one.items() if isinstance(x, torch.Tensor)]
        if all(isinstance(name, str) for name in names):        # an optimizer's are numbers
            places[place] = one
            counts[place] = len(names)
        for name, inner in one.items():
            if isinstance(inner, dict):
                search(inner, f"{place}.{name}".lstrip("."))
    search(content, "")
    most = [place for place, count in counts.items() if count == max(counts.values())]
    if len(most) > 1 and counts[most[0]] > 0:
        raise ValueError(f"it holds several models, {' and '.join(most)}: save one of them alone")
    return places[most[0]], most[0]
