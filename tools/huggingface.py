"""Convert weights from and to Hugging Face's formats: GPT-2, OPT, Galactica, Llama, Mistral, Qwen2,
Qwen3, GPT-J, GPT-NeoX, OLMo, OLMo 2, Phi, and the mixtures Mixtral, OLMoE and Qwen3-MoE.

    python -m tools.huggingface import gpt2 gpt2.pt         # a name on the hub, or a folder
    python -m tools.huggingface export out/latest.pt folder

tools/hub.py says what a folder contains. A model has its tokenizer too, in tokenizer.json: the
characters <|endoftext|> in a text are one token there, where data.py and sample.py see 13.
README.md is its model card (tools/model_card.py).

tools/huggingface_families.py says how each architecture differs in its names and in the layout of
its tensors.
"""
import json
import os
import shlex
import shutil
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch

from base.atomic_writes import write_file
from base.checkpoint_files import reading, verify
from base.commandline import Parser
from base.errors import WriteFailed, errors_in_one_line, named
from base.flops import parameter_count
from checkpoint import FORMAT, KEYS, load, parameter_shapes
from corpus.bpe import find_merges
from corpus.byte_level_tokenizers import characters_of_bytes
from corpus.formats import EOT
from corpus.published_templates import entries_of, find_template, get_template, is_own, read_ends
from corpus.tokenizer_config import notes, read_object
from corpus.tokenizers import file_name, get_tokenizer, is_named, name_of, read_file
from corpus.vocab_and_merges import PAIR, has_pair
from model import GPTConfig
from models import make_config
from runtime.directory import new_run
from tools.hub import IS_ADAPTER, check_source, fetch, note, tensor_readers, weight_files
from tools.huggingface_families import BUFFERS, Family
from tools.huggingface_formats import (config_json, family_of, kind_of, model_config, their_names,
                                       to_ours, to_theirs)
from tools.huggingface_unread_keys import notes_of_keys
from tools.huggingface_wrapped_names import HEADS, find_names
from tools.model_card import Exported, model_card

SOME_OF_GPT2S = {"\u0120the": 262, "\u0120and": 290, "\u0120informants": 50254,
                 "\u0120gazed": 50255}
SHARD_BYTES = 2_000_000_000         # of tensors in one exported file: what is in memory at a time


# ---------------------------------------------------------------------------------------------
# Import
# ---------------------------------------------------------------------------------------------


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
    config = read_object(path)
    with reading(path, "is refused"):
        return config, model_config(config)


def tell_keys(config: dict, folder: Path) -> None:
    """Print a note of each key that has a value and is not read. Raises ValueError."""
    drawing = read_object(folder / "generation_config.json")
    for line in notes_of_keys(config, drawing):
        note(f"{folder}: {line}")


def state_of_weights(cfg: GPTConfig, parameters: dict[str, torch.Tensor]) -> dict:
    """A state of weights alone, whose tokenizer is not told yet."""
    return {key: {} for key in KEYS} | dict(
        format=FORMAT, step=0, consumed_samples=0, tokens=0, optimizer_steps=0, data=None,
        run=new_run("import"), model=asdict(cfg), parameters=parameters)


def import_model(source: str, file: Path) -> None:
    """Write a checkpoint of weights alone. `source` is a folder or, if there is none of that name,
    a model on the hub."""
    if file.exists():
        raise ValueError(f"{file} exists: give a new file")
    check_source(source, file)
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = Path(source)
    if not folder.is_dir():
        folder = fetch(source, check=read_config)       # before gigabytes come
    config, cfg = read_config(folder)
    tell_keys(config, folder)
    parameters = read_parameters(folder, family_of(kind_of(config), cfg), cfg)
    tokenizer, path = find_tokenizer(folder, config)
    state = state_of_weights(cfg, parameters) | dict(tokenizer=tokenizer)
    if path is not None:
        state["tokenizer_file"] = read_file(path)
    if path is not None or is_named(tokenizer):
        state |= find_conversations(folder, tokenizer, state.get("tokenizer_file"))
    write_file(state, file.with_name(file.name + ".tmp"), file)
    print(f"{file}: {parameter_count(cfg):,} parameters. Train it further with\n"
          f"python train.py --init-from {file} --data DIR --out out/{file.stem}")
    if "template" in state:
        kind = f"the template {state['template']}"
        if is_own(state["template"]):
            kind = "its own template"
        print(f"It is a model of conversations, by {kind}:\n"
              f"python sample.py --ckpt {file} --chat")
    if path is not None:
        print(f"Make --data with its tokenizer:\n"
              f"python data.py --input FILE --tokenizer {shlex.quote(str(path))} --out DIR")
    elif not is_named(tokenizer):
        print(f"Its tokenizer is not ours: sample.py cannot read or write its tokens, and --data "
              f"must have been made with it (tokenizer {tokenizer!r} in meta.json); if it has a "
              f"tokenizer.json, put it in the folder and import again")


def find_conversations(folder: Path, tokenizer: str, own: str | None) -> dict:
    """What a checkpoint keeps of a model's folder beside its tokenizer: the template of its
    conversations, and the tokens that end a generation."""
    state = {}
    ends = read_ends(folder)
    if ends:
        state["ends"] = ends
    try:
        template = find_template(folder, get_tokenizer(tokenizer, own))
    except (ValueError, ConnectionError) as error:      # no jinja2; no tokens of GPT-2
        note(f"no template of conversations is kept: {error}")
        return state
    if template is not None:
        state["template"] = template.name
        if template.file is not None:
            state["template_file"] = template.file
    return state


def read_parameters(folder: Path, family: Family, cfg: GPTConfig) -> dict[str, torch.Tensor]:
    """All of our parameters. Raises ValueError if the folder's tensors are not those of a model
    with this config."""
    readers = {}
    for part in weight_files(folder):
        readers |= tensor_readers(part)
    try:
        names = find_names(readers, family, cfg.tied)
    except ValueError as error:
        raise ValueError(f"{folder} is refused: {error}") from None
    readers = {name: readers[original] for name, original in names.items()}
    parameters = {}
    for name, shape in parameter_shapes(cfg).items():
        parameters[name] = read_parameter(name, shape, readers, folder, family, cfg)
    check_unused(readers, parameters, folder, family)
    return parameters


def read_parameter(name: str, shape: tuple, readers: dict, folder: Path, family: Family,
                   cfg: GPTConfig) -> torch.Tensor:
    """Our parameter of this name and shape, fp32. Raises ValueError if the tensors do not make it.
    """
    theirs = their_names(name, family)
    tensors = []
    for one in theirs:
        if one not in readers:
            raise ValueError(f"{folder} has no tensor {one}{advice_on_missing(one, readers)}")
        tensor = readers[one]()
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point():
            kind = getattr(tensor, "dtype", type(tensor).__name__)
            raise ValueError(f"{folder}: {one} holds {kind}, not floating-point numbers: give the "
                             f"model before it was quantised")
        tensor = tensor.float()
        if not tensor.isfinite().all():
            raise ValueError(f"{folder}: {one} holds numbers that are not finite: give another "
                             f"copy of the model")
        tensors.append(tensor)
    try:
        full = to_ours(name, tensors, family, cfg)
        found = tuple(full.shape)
    except RuntimeError:                # they do not fit to each other
        found = " and ".join(str(tuple(tensor.shape)) for tensor in tensors)
    if found != shape:
        raise ValueError(f"{folder}: {theirs[0]} has shape {found}, not {shape}")
    return full


def advice_on_missing(name: str, readers: dict) -> str:
    """What a missing tensor may mean, for the end of a sentence."""
    if name.removesuffix(".weight") in HEADS:
        return (": the model was saved without its head: save it as the class that config.json "
                "names, or set tie_word_embeddings to true there if the embedding is the head")
    if "embed" not in name and "wte" not in name:
        return ""
    return f": its names are like {', '.join(sorted(readers)[:2])}"


def check_unused(readers: dict, parameters: dict, folder: Path, family: Family) -> None:
    """Raise ValueError if a block has a tensor that our model has no place for, or the head of a
    tied model differs from its embedding. A note tells of tensors outside of the model."""
    used = {one for name in parameters for one in their_names(name, family)}
    unused = sorted(one for one in readers if one not in used and not BUFFERS.search(one))
    in_blocks = [one for one in unused if one.startswith(f"{family.blocks}.")]
    if in_blocks:
        raise ValueError(f"{folder} has {len(in_blocks):,} tensors that config.json does not "
                         f"account for, such as {in_blocks[0]}: the model would be another")
    for head in {f"{one}.weight" for one in HEADS} & set(unused):       # of a tied model
        unused.remove(head)
        if not readers[head]().float().equal(parameters["embed.token.weight"]):
            advice = "set its tie_word_embeddings to false"
            if family.fields is None:
                advice = f"{family.architecture} has one matrix for both here"
            raise ValueError(f"{folder}: {head} differs from the embedding, but config.json ties "
                             f"them: {advice}")
    if unused:
        note(f"{folder}: {len(unused):,} tensors are left out, which are no part of the model, "
             f"such as {unused[0]}")


def find_tokenizer(folder: Path, config: dict) -> tuple[str, Path | None]:
    """The name of a model's tokenizer, and its file if that is one of ours and has no other name.
    """
    name = tokenizer_name(config)
    if name == "gpt2" and not has_gpt2s_tokens(folder):
        name = f"gpt2-{config['vocab_size']}"           # another's, of the same size
    path = folder / "tokenizer.json"
    if name.startswith("bpe-"):                         # our exports have its file
        path = folder / file_name(name)
    elif not path.exists() and has_pair(folder):
        path = folder / PAIR[0]
    if is_named(name) or not path.exists():
        return name, None
    try:
        file = read_file(path)
        name = name_of(file)
        for line in notes(path, get_tokenizer(name, file)):
            note(line)
        return name, path
    except ValueError as error:
        note(str(error))
        return name, None


def has_gpt2s_tokens(folder: Path) -> bool:
    """Whether the files of a tokenizer in the folder, if any, have GPT-2's ids, by some of them."""
    def vocabulary_of(file):
        content = read_object(folder / file)
        return content["model"]["vocab"] if file == "tokenizer.json" else content
    try:
        return all(SOME_OF_GPT2S.items() <= vocabulary_of(file).items()
                   for file in ("tokenizer.json", "vocab.json") if (folder / file).exists())
    except (ValueError, KeyError, AttributeError, TypeError):       # another kind of tokenizer
        return False


def tokenizer_name(config: dict) -> str:
    """Our exports name it. OPT numbers GPT-2's tokens differently, and other models of GPT-2's
    architecture have added some: theirs get a name that no other tokenizer has."""
    if isinstance(config.get("tokenizer"), str):
        return config["tokenizer"]
    if config["model_type"] == "gpt2" and config["vocab_size"] == 50257:
        return "gpt2"
    return f"{config['model_type']}-{config['vocab_size']}"


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------


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


def write_tensors(parameters: dict[str, torch.Tensor], family: Family, cfg: GPTConfig,
                  folder: Path) -> None:
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
            tensors |= to_theirs(name, full, family, cfg)
        try:
            save_file(tensors, folder / file, metadata={"format": "pt"})
        except SafetensorError as error:
            raise WriteFailed(f"{file} could not be written: {error}") from error
        shutil.copymode(folder / "config.json", folder / file)      # save_file's is 600
        file_of |= dict.fromkeys(tensors, file)
    if len(shards) > 1:
        index = dict(metadata={}, weight_map=file_of)
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def write_tokenizer(encoding, cfg: GPTConfig, folder: Path, own: str | None,
                    template=None) -> None:
    """Write a tokenizer as transformers opens it for any architecture: tokenizer.json. `own` is the
    content of its file, if it has one. With the `template` of conversations an answer's end is the
    end of a text."""
    # This class reads tokenizer.json as it is. Others split words by a pattern of their own.
    config = dict(model_max_length=cfg.seq_len, eos_token=encoding.end_of_text,
                  tokenizer_class="PreTrainedTokenizerFast")
    if encoding.name.startswith("json-"):
        content = own
        if len(encoding.prefix) == 1:
            config["bos_token"] = encoding.tokenizer.id_to_token(encoding.prefix[0])
    else:
        content = json.dumps(tokenizer_json(encoding))
        if own is not None:
            (folder / file_name(encoding.name)).write_text(own)
        config |= dict(bos_token=EOT, unk_token=EOT, pad_token=EOT)
    (folder / "tokenizer.json").write_text(content, encoding="utf-8")
    if template is not None:
        config |= entries_of(template)
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tokenizer_json(encoding) -> dict:
    """The content of tokenizer.json for a tokenizer with GPT-2's pattern."""
    ranks = encoding.ranks()
    characters = characters_of_bytes()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    vocab = {written[token]: number for token, number in ranks.items()}
    merges = [f"{written[left]} {written[right]}" for left, right in find_merges(ranks)]
    end = dict(id=encoding.eot_token, content=EOT, special=True, single_word=False, lstrip=False,
               rstrip=False, normalized=False)
    in_words = dict(type="ByteLevel", add_prefix_space=False, trim_offsets=True, use_regex=True)
    return dict(
        version="1.0", truncation=None, padding=None, added_tokens=[end], normalizer=None,
        pre_tokenizer=in_words, post_processor=None, decoder=in_words,
        model=dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="",
                   end_of_word_suffix="", fuse_unk=False, byte_fallback=False,
                   vocab=vocab | {EOT: encoding.eot_token}, merges=merges))


def export_model(file: Path, folder: Path) -> None:
    """Write a folder that transformers opens; it appears only when it is complete."""
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    verify(file)
    state = load(file)
    cfg = make_config(**state["model"])
    tokenizer = state["tokenizer"]
    own = state.get("tokenizer_file")
    encoding = None
    template = None
    end = None
    ends = set(state.get("ends", []))
    if own is not None or tokenizer in ("gpt2", "bytes"):
        encoding = get_tokenizer(tokenizer, own)        # downloads it, or fails, before the weights
        end = encoding.eot_token
        ends.add(end)
        if "template" in state:
            template = get_template(state["template"], encoding, state.get("template_file"))
            if template.end is not None:
                end = template.end
                ends.add(end)
    config = config_json(cfg, tokenizer, end)
    if encoding is not None and encoding.prefix:
        config["bos_token_id"] = encoding.prefix[0]
    family = family_of(kind_of(config), cfg)
    for name in state["parameters"]:
        their_names(name, family)
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with named(folder), tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
        aside = Path(temporary, "folder")           # its mode is the usual one, temporary's is 700
        aside.mkdir()
        (aside / "config.json").write_text(json.dumps(config, indent=1))
        if len(ends) > 1:       # config.json has the end of an answer alone
            (aside / "generation_config.json").write_text(json.dumps(dict(
                eos_token_id=sorted(ends), bos_token_id=config["bos_token_id"])))
        write_tensors(state["parameters"], family, cfg, aside)
        tokenizer_class = None
        if encoding is not None:
            tokenizer_class = "AutoTokenizer"
            write_tokenizer(encoding, cfg, aside, own, template)
            if config["model_type"] == "qwen2" and not encoding.name.startswith("json-"):
                tokenizer_class = "PreTrainedTokenizerFast"
                note(f"AutoTokenizer of transformers encodes for any Qwen2 with Qwen's pattern of "
                     f"words and in NFC: PreTrainedTokenizerFast.from_pretrained({str(folder)!r}) "
                     f"gives the tokens of the training")
        exported = Exported(cfg, config["model_type"], family.architecture, tokenizer_class)
        (aside / "README.md").write_text(model_card(file, folder, state, exported), "utf-8",
                                         "backslashreplace")
        os.rename(aside, folder)
    text = f"with its tokenizer, {tokenizer}"
    if encoding is None:
        text = f"without a tokenizer: an export cannot write {tokenizer!r}"
    print(f"{folder}: {parameter_count(cfg):,} parameters as {family.architecture}, {text}")


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


@errors_in_one_line("tools.huggingface")
def main() -> None:
    name, usage = "tools.huggingface", "python -m tools.huggingface"
    parser = Parser(name, f"{usage} import NAME_OR_DIR FILE.pt\n       {usage} export FILE.pt DIR",
                    "Convert weights from and to Hugging Face.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="import|export")
    command = commands.add_parser("import", prog=name, usage=f"{usage} import NAME_OR_DIR FILE.pt",
                                  help="write a checkpoint of weights alone, "
                                  "for train.py --init-from and sample.py")
    command.add_argument("source", metavar="NAME_OR_DIR",
                         help="a model: its name on the hub, or a folder")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="the checkpoint to write")
    command = commands.add_parser("export", prog=name, usage=f"{usage} export FILE.pt DIR",
                                  help="write a folder that transformers opens: a GPT with GELU "
                                  "as GPT-2, with ReLU as OPT")
    command.add_argument("file", type=Path, metavar="FILE.pt", help="a checkpoint of this project")
    command.add_argument("folder", type=Path, metavar="DIR", help="the folder to write")
    args = parser.parse_args()
    try:
        if args.command == "import":
            import_model(args.source, args.file)
        else:
            export_model(args.file, args.folder)
    except ImportError:
        parser.error("this needs safetensors: pip install safetensors")
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
