"""Weights from other tools and for them: Hugging Face's GPT-2 (with GELU) and OPT (with ReLU).

    python -m tools.huggingface import gpt2 gpt2.pt         # a name on the hub, or a folder
    python -m tools.huggingface export out/latest.pt folder

A folder has config.json; the tensors in model.safetensors, pytorch_model.bin, or the files that
one of the two with .index.json lists; and GPT-2's tokenizer in vocab.json and merges.txt.
"""
import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import zipfile
from dataclasses import asdict
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.nn.functional as F

from checkpoint import FORMAT, KEYS, load, parameter_shapes, reading, verify, write_file
from data import EOT, download, gpt2_files
from model import GPTConfig, parameter_count

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


class OneLineParser(argparse.ArgumentParser):
    def error(self, message: str, status: int = 2):     # argparse's own prints the usage too
        self.exit(status, f"tools.huggingface: {message}\n")


def main() -> None:
    parser = OneLineParser(prog="python -m tools.huggingface",
                           description="Convert weights from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    command = commands.add_parser("import", help="write a checkpoint of weights alone, for "
                                  "train.py --init-from and sample.py")
    command.add_argument("source", metavar="NAME_OR_DIR",
                         help="a GPT-2 or OPT model: its name on the hub, or a folder")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="the checkpoint to write")
    command = commands.add_parser("export", help="write a folder that transformers opens: a model "
                                  "with GELU as GPT-2, with ReLU as OPT")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="a checkpoint of this project")
    command.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    args = parser.parse_args()
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        if args.command == "import":
            from_hf(args.source, args.file, hub)
        else:
            to_hf(args.file, args.folder)
    except ImportError:
        parser.error("this needs safetensors: pip install safetensors")
    except KeyboardInterrupt:
        sys.exit(1)
    except ConnectionError as error:
        parser.error(str(error), status=1)
    except (ValueError, OSError) as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
