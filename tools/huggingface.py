"""Convert weights from and to Hugging Face's formats: GPT-2 (with GELU) and OPT (with ReLU).

    python -m tools.huggingface import gpt2 gpt2.pt         # a name on the hub, or a folder
    python -m tools.huggingface export out/latest.pt folder

tools/hub.py says what a folder contains. A model of GPT-2's tokens or of bytes has its tokenizer
too, in vocab.json and merges.txt: <|endoftext|> within a text is one token there, where data.py and
sample.py see 13 characters.

GPT-2 (Radford et al. 2019) and OPT (Zhang et al. 2022) compute what model.py computes. They differ
in the names of their tensors and in three details of the layout, which `to_ours` and `to_theirs`
convert:
- GPT-2 stores the matrices of its blocks transposed, as (in, out).
- OPT stores query, key and value as three tensors; we and GPT-2 stack them in one.
- OPT's table of positions begins with two rows that are never looked up.
"""
import tools        # first: python tools/huggingface.py ends in its line

import itertools
import json
import os
import re
import shutil
import sys
import tempfile
from dataclasses import asdict, fields
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F

from checkpoint import FORMAT, KEYS, load, parameter_shapes, verify, write_file
from corpus.bpe import find_merges
from corpus.formats import EOT
from corpus.tokenizers import read_own, read_ranks
from data import get_tokenizer
from model import GPTConfig
from runtime.checkpoint_files import reading
from runtime.commandline import Parser
from runtime.directory import new_run
from runtime.flops import parameter_count
from tools.hub import IS_ADAPTER, check_source, fetch, tensor_readers, weight_files

GPT2_URL = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"
GPT2_FILES = {      # tiktoken's name: transformers' name, sha256
    "vocab.bpe": ("merges.txt",
                  "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5"),
    "encoder.json": ("vocab.json",
                     "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783")}
SHARD_BYTES = 2_000_000_000         # of tensors in one exported file: what is in memory at a time
MODEL_TYPES = {"gelu": "gpt2", "relu": "opt"}      # our activation: the architecture that has it
END_OF_TEXT = {"gpt2": 50256, "bytes": 256, "opt-50272": 2}     # token of a tokenizer
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "relu": "relu"}     # theirs: ours

# What model.py has only one form of: the key in config.json, and its value where it is missing.
FIXED = {"layer_norm_epsilon": 1e-5, "scale_attn_weights": True, "tie_word_embeddings": True,
         "scale_attn_by_inverse_layer_idx": False, "do_layer_norm_before": True,
         "_remove_final_layer_norm": False, "enable_bias": True,
         "layer_norm_elementwise_affine": True}


class Family(NamedTuple):
    """How one of the two architectures is written down."""
    architecture: str                   # the class in transformers
    activation: str                     # activation_function in config.json
    dropout: list[str]                  # keys of its probabilities there
    shape: dict[str, str]               # field of GPTConfig: key in config.json
    prefix: str                         # of each tensor's name
    ends: dict[str, str]                # our module outside of the blocks: theirs
    blocks: str                         # their list of blocks
    block: dict[str, list[str]]         # our module in a block: theirs, stacked in this order
    transposed: bool                    # matrices in blocks are (in, out)
    unused_positions: int               # rows before the first position


FAMILIES = {
    "gpt2": Family(
        architecture="GPT2LMHeadModel",
        activation="gelu_new",
        dropout=["embd_pdrop", "attn_pdrop", "resid_pdrop"],
        shape={"vocab_size": "vocab_size", "seq_len": "n_positions", "n_layer": "n_layer",
               "n_head": "n_head", "n_embd": "n_embd"},
        prefix="transformer.",
        ends={"embed.token": "wte", "embed.position": "wpe", "head.norm": "ln_f"},
        blocks="h",
        block={"norm1": ["ln_1"], "attn.qkv": ["attn.c_attn"], "attn.proj": ["attn.c_proj"],
               "norm2": ["ln_2"], "mlp.up": ["mlp.c_fc"], "mlp.down": ["mlp.c_proj"]},
        transposed=True,
        unused_positions=0),
    "opt": Family(
        architecture="OPTForCausalLM",
        activation="relu",
        dropout=["attention_dropout", "dropout"],
        shape={"vocab_size": "vocab_size", "seq_len": "max_position_embeddings",
               "n_layer": "num_hidden_layers", "n_head": "num_attention_heads",
               "n_embd": "hidden_size"},
        prefix="model.decoder.",
        ends={"embed.token": "embed_tokens", "embed.position": "embed_positions",
              "head.norm": "final_layer_norm"},
        blocks="layers",
        block={"norm1": ["self_attn_layer_norm"],
               "attn.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
               "attn.proj": ["self_attn.out_proj"], "norm2": ["final_layer_norm"],
               "mlp.up": ["fc1"], "mlp.down": ["fc2"]},
        transposed=False,
        unused_positions=2),
}


# ---------------------------------------------------------------------------------------------
# One parameter
# ---------------------------------------------------------------------------------------------


def their_names(name: str, family: Family) -> list[str]:
    """Names, without the family's prefix, of the tensors that hold our parameter `name`. Raises
    ValueError if it has none."""
    module, kind = name.rsplit(".", 1)                      # kind: weight or bias
    with_layer = re.fullmatch(r"blocks\.(\d+)\.(.*)", module)
    if module in family.ends:
        return [f"{family.ends[module]}.{kind}"]
    if with_layer is None or with_layer[2] not in family.block:
        raise ValueError(f"{family.architecture} has no parameter for {name}")
    layer, module = with_layer.groups()
    return [f"{family.blocks}.{layer}.{theirs}.{kind}" for theirs in family.block[module]]


def is_transposed(name: str, tensor: torch.Tensor, family: Family) -> bool:
    return family.transposed and name.startswith("blocks.") and tensor.dim() == 2


def to_ours(name: str, tensors: list[torch.Tensor], family: Family) -> torch.Tensor:
    """Our parameter `name` in fp32, from the family's tensors in the order of `their_names`."""
    tensors = [t.T if is_transposed(name, t, family) else t for t in tensors]
    full = torch.cat([t.float() for t in tensors])
    if name == "embed.position.weight":
        full = full[family.unused_positions:]
    return full.contiguous()


def to_theirs(name: str, full: torch.Tensor, family: Family) -> dict[str, torch.Tensor]:
    """The inverse of `to_ours`: {full name: tensor in fp32}."""
    full = full.float()
    if name == "embed.position.weight":
        full = F.pad(full, (0, 0, family.unused_positions, 0))
    names = their_names(name, family)
    tensors = [t.T if is_transposed(name, t, family) else t for t in full.chunk(len(names))]
    return {family.prefix + theirs: t.contiguous() for theirs, t in zip(names, tensors)}


# ---------------------------------------------------------------------------------------------
# Import
# ---------------------------------------------------------------------------------------------


def model_config(config: dict) -> GPTConfig:
    """config.json -> GPTConfig; raises ValueError for an architecture that model.py does not have.
    """
    config = {key: value for key, value in config.items() if value is not None}     # null: default
    model_type = config.get("model_type")
    if model_type not in FAMILIES:
        raise ValueError(f"its model_type {model_type!r} is neither gpt2 nor opt")
    family = FAMILIES[model_type]
    for theirs in family.shape.values():
        if theirs not in config:
            raise ValueError(f"it lacks {theirs}")
    shape = {ours: config[theirs] for ours, theirs in family.shape.items()}

    activation = config.get("activation_function", family.activation)
    if activation not in ACTIVATIONS:
        raise ValueError(f"its activation_function is {activation!r}, model.py has only "
                         f"{', '.join(ACTIVATIONS)}")
    width = shape["n_embd"]
    supported = {**FIXED, "n_inner": 4 * width, "ffn_dim": 4 * width, "word_embed_proj_dim": width}
    for key, value in supported.items():
        if config.get(key, value) != value:
            raise ValueError(f"its {key} is {config[key]!r}, model.py has only {value!r}")
    return GPTConfig(activation=ACTIVATIONS[activation], **shape)


def read_config(folder: Path) -> tuple[dict, GPTConfig]:
    """config.json, and the GPTConfig that it describes; raises ValueError."""
    path = folder / "config.json"
    if not path.exists():
        if (folder / "adapter_config.json").exists():
            raise ValueError(f"{folder} {IS_ADAPTER}")
        advice = ""
        if any(folder.glob("*.pt")):
            advice = ": it holds checkpoints of this project, which need no import"
        raise ValueError(f"{folder} has no config.json{advice}")
    with reading(path, "is refused"):
        config = json.loads(path.read_text())
        return config, model_config(config)


def import_model(source: str, file: Path, hub: str) -> None:
    """Write a checkpoint of weights alone. `source` is a folder or, if there is none of that name,
    a model on the hub, which is downloaded to a folder beside `file`."""
    if file.exists():
        raise ValueError(f"{file} exists: give a new file")
    check_source(source, file)
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(source)
    if not folder.is_dir():
        folder = file.with_name(source.replace("/", "--") + ".hf")
        fetch(source, folder, hub, check=read_config)   # before gigabytes come
    config, cfg = read_config(folder)
    family = FAMILIES[config["model_type"]]
    readers = {}
    for part in weight_files(folder):
        readers |= tensor_readers(part)
    parameters = {}
    for name, shape in parameter_shapes(cfg).items():
        theirs = their_names(name, family)
        for one in theirs:
            if one not in readers:
                raise ValueError(f"{folder} has no tensor {one}")
        full = to_ours(name, [readers[one]() for one in theirs], family)
        if tuple(full.shape) != shape:
            raise ValueError(f"{folder}: {theirs[0]} has shape {tuple(full.shape)}, not {shape}")
        parameters[name] = full
    tokenizer = tokenizer_name(config)
    state = {key: {} for key in KEYS} | dict(
        format=FORMAT, step=0, consumed_samples=0, tokens=0, optimizer_steps=0, data=None,
        run=new_run("import"), model=asdict(cfg), tokenizer=tokenizer, parameters=parameters)
    own = folder / f"{tokenizer}.tiktoken"          # our exports have it
    if own.exists():
        state["tokenizer_file"] = read_own(folder, tokenizer)
    write_file(state, file.with_name(file.name + ".tmp"), file)
    print(f"{file}: {parameter_count(cfg):,} parameters. Train on with\n"
          f"python train.py --init-from {file} --data DIR --out out/{file.stem}")
    if tokenizer not in ("gpt2", "bytes") and not own.exists():
        print(f"Its tokenizer is not ours: sample.py cannot read or write its tokens, and --data "
              f"must have been made with it (tokenizer {tokenizer!r} in meta.json)")


def tokenizer_name(config: dict) -> str:
    """Our exports name it. OPT numbers GPT-2's tokens differently, and other models of GPT-2's
    architecture have added some: theirs get a name that no other tokenizer has."""
    if "tokenizer" in config:
        return config["tokenizer"]
    if config["model_type"] == "gpt2" and config["vocab_size"] == 50257:
        return "gpt2"
    return f"{config['model_type']}-{config['vocab_size']}"


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------


def config_json(cfg: GPTConfig, tokenizer: str, end: int | None = None) -> dict:
    """The inverse of `model_config`. `tokenizer` is our own key; `end` its token of
    <|endoftext|>, where it is one of one's own. Raises ValueError for what neither architecture
    has."""
    if cfg.activation not in MODEL_TYPES:
        raise ValueError(f"activation {cfg.activation!r} is neither GPT-2's (gelu) nor OPT's "
                         f"(relu): opened as one of them it would be another model")
    family = FAMILIES[MODEL_TYPES[cfg.activation]]
    for field in fields(cfg):
        value = getattr(cfg, field.name)
        if field.name not in ("activation", "dropout", *family.shape) and value != field.default:
            raise ValueError(f"{family.architecture} has no {field.name} {value}: opened there it "
                             f"would be another model")
    end = END_OF_TEXT.get(tokenizer, end)
    if end is not None and end >= cfg.vocab_size:
        raise ValueError(f"the tokenizer {tokenizer} has {end + 1} tokens, but the model's "
                         f"vocabulary {cfg.vocab_size}")
    # Where a key is missing, transformers takes its own default: dropout 0.1, OPT's tokens.
    config = dict(model_type=MODEL_TYPES[cfg.activation], architectures=[family.architecture],
                  tokenizer=tokenizer, activation_function=family.activation, dtype="float32",
                  tie_word_embeddings=True, bos_token_id=end, eos_token_id=end)
    # transformers' OPT learns nothing of the token of pad_token_id, GPT-2's tokenizer has none.
    config["pad_token_id"] = None
    config |= dict.fromkeys(family.dropout, cfg.dropout)
    for ours, theirs in family.shape.items():
        config[theirs] = getattr(cfg, ours)
    if family.activation == "relu":
        config |= dict(ffn_dim=4 * cfg.n_embd, word_embed_proj_dim=cfg.n_embd)
    return config


def split_into_shards(parameters: dict[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Consecutive parameters whose fp32 tensors take up to SHARD_BYTES; a larger one is alone."""
    shards, size = [{}], 0
    for name, full in parameters.items():
        nbytes = 4 * full.numel()
        if shards[-1] and size + nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = full
        size += nbytes
    return shards


def write_tensors(parameters: dict[str, torch.Tensor], family: Family, folder: Path) -> None:
    """model.safetensors or, if one shard does not hold the model, several files and their index.
    One shard at a time is in memory: `parameters` are mapped from a checkpoint."""
    from safetensors import SafetensorError
    from safetensors.torch import save_file
    shards = split_into_shards(parameters)
    file_of = {}                                    # for the index
    for number, shard in enumerate(shards, 1):
        file = "model.safetensors"
        if len(shards) > 1:
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        tensors = {}
        for name, full in shard.items():
            tensors |= to_theirs(name, full, family)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"{file} could not be written: {error}") from error
        shutil.copymode(folder / "config.json", folder / file)      # save_file's is 600
        file_of |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = dict(metadata={}, weight_map=file_of)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def characters_of_bytes() -> list[str]:
    """The character that stands for each byte in GPT-2's vocabulary: itself if it is printed, the
    others in order from 256 on (Radford et al. 2019, bytes_to_unicode in their code)."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
               *range(ord("\u00ae"), ord("\u00ff") + 1)}
    others = itertools.count(256)
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


def write_tokenizer(name: str, cfg: GPTConfig, folder: Path, own: str | None) -> None:
    """Write our tokenizer as one of GPT-2's kind: its vocabulary from tiktoken's cache, the bytes
    and no merges, or the tokens of `own`, the content of its file."""
    if name == "gpt2":
        from tiktoken.load import read_file_cached
        for file, (theirs, sha256) in GPT2_FILES.items():
            (folder / theirs).write_bytes(read_file_cached(GPT2_URL + file, sha256))
    elif own is not None:
        ranks = read_ranks(own)
        characters = characters_of_bytes()
        written = {token: "".join(characters[byte] for byte in token) for token in ranks}
        vocab = {written[token]: number for token, number in ranks.items()} | {EOT: len(ranks)}
        (folder / "vocab.json").write_text(json.dumps(vocab))
        (folder / "merges.txt").write_text("".join(
            f"{written[left]} {written[right]}\n" for left, right in find_merges(ranks)))
        (folder / f"{name}.tiktoken").write_text(own)
    else:
        token_of = {character: byte for byte, character in enumerate(characters_of_bytes())}
        (folder / "vocab.json").write_text(json.dumps(token_of | {EOT: END_OF_TEXT["bytes"]}))
        (folder / "merges.txt").write_text("")
    config = dict(tokenizer_class="GPT2Tokenizer", model_max_length=cfg.seq_len, bos_token=EOT,
                  eos_token=EOT, unk_token=EOT, pad_token=EOT)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def export_model(file: Path, folder: Path) -> None:
    """Write a folder that transformers opens; it appears only when it is complete."""
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    verify(file)
    state = load(file)
    cfg = GPTConfig(**state["model"])
    tokenizer = state["tokenizer"]
    own = state.get("tokenizer_file")
    has_tokenizer = tokenizer in ("gpt2", "bytes") or own is not None
    end = None
    if has_tokenizer:           # downloads it, or fails, before the weights are written
        end = get_tokenizer(tokenizer, own).eot_token
    config = config_json(cfg, tokenizer, end)
    family = FAMILIES[config["model_type"]]
    for name in state["parameters"]:
        their_names(name, family)
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
        aside = Path(temporary, "folder")           # its mode is the usual one, temporary's is 700
        aside.mkdir()
        (aside / "config.json").write_text(json.dumps(config, indent=1))
        write_tensors(state["parameters"], family, aside)
        if has_tokenizer:
            write_tokenizer(tokenizer, cfg, aside, own)
        os.rename(aside, folder)
    text = f"with its tokenizer, {tokenizer}"
    if not has_tokenizer:
        text = f"without a tokenizer: {tokenizer!r} is not ours"
    print(f"{folder}: {parameter_count(cfg):,} parameters as {family.architecture}, {text}")


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


def main() -> None:
    name, usage = "huggingface.py", "python -m tools.huggingface"
    parser = Parser(name, f"{usage} import NAME_OR_DIR FILE.pt\n       {usage} export FILE.pt DIR",
                    "Convert weights from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    command = commands.add_parser("import", prog=name, usage=f"{usage} import NAME_OR_DIR FILE.pt",
                                  help="write a checkpoint of weights alone, "
                                  "for train.py --init-from and sample.py")
    command.add_argument("source", metavar="NAME_OR_DIR",
                         help="a GPT-2 or OPT model: its name on the hub, or a folder")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="the checkpoint to write")
    command = commands.add_parser("export", prog=name, usage=f"{usage} export FILE.pt DIR",
                                  help="write a folder that transformers opens: a model with GELU "
                                  "as GPT-2, with ReLU as OPT")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="a checkpoint of this project")
    command.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    args = parser.parse_args()
    hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co")
    try:
        if args.command == "import":
            import_model(args.source, args.file, hub)
        else:
            export_model(args.file, args.folder)
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
