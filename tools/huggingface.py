"""Convert weights from and to Hugging Face, by the package transformers: GPT-2, OPT, Galactica,
Llama, Mistral, Qwen2, Qwen3, GPT-J, GPT-NeoX, OLMo, OLMo 2, Phi, and the mixtures Mixtral, OLMoE
and Qwen3-MoE.

    python -m tools.huggingface import gpt2 gpt2.pt         # a name on the hub, or a folder
    python -m tools.huggingface export out/latest.pt folder

transformers reads and writes the files, and tools/huggingface_families.py says which parameter is
which. Both ways end with one check: the model of transformers and ours have the same logits
(`compare`). What a config says and ours cannot do is found there, or by a parameter too many.

An export has its tokenizer in tokenizer.json: the characters <|endoftext|> in a text are one token
there, where data.py and sample.py see 13. README.md is its model card (tools/model_card.py).
"""
import os
import shlex
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from base.atomic_writes import write_file
from base.checkpoint_files import verify
from base.commandline import Parser
from base.errors import WriteFailed, errors_in_one_line, named
from base.flops import parameter_count
from checkpoint import load, parameter_shapes
from corpus.bpe import find_merges
from corpus.byte_level_tokenizers import characters_of_bytes
from corpus.formats import EOT
from corpus.published_templates import entries_of, find_template, get_template, read_ends
from corpus.tokenizer_config import notes, read_object
from corpus.tokenizers import file_name, get_tokenizer, is_named, name_of, read_file
from corpus.vocab_and_merges import PAIR, has_pair
from models import make_config
from parallelism.collectives import first_line
from tools.checkpoint import state_of_weights
from tools.huggingface_families import (family_of, our_config, their_config, their_names, to_ours,
                                        to_theirs)
from tools.model_card import model_card

SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "bpe-*.tiktoken"]
SOME_OF_GPT2S = {"\u0120the": 262, "\u0120and": 290, "\u0120informants": 50254,
                 "\u0120gazed": 50255}
END_OF_OTHERS = {"opt-50272": 2}        # token of a tokenizer that is not ours
BLOCKS, POSITIONS = 2, 40               # that `compare` computes
WINDOW = 8                              # there, so that it hides some of the positions
ROUNDINGS = 10                          # of ours in fp32 beside fp64, by which logits may differ


def note(text: str) -> None:
    print(f"tools.huggingface: note: {text}", file=sys.stderr)


# ---------------------------------------------------------------------------------------------
# The model of transformers
# ---------------------------------------------------------------------------------------------


@contextmanager
def refusing(what):
    """What transformers raises in the block, in one line."""
    try:
        yield
    except MemoryError:
        raise
    except Exception as error:
        raise ValueError(f"{what} is refused: {first_line(error)}") from error


def download(name: str, patterns: list[str]) -> Path:
    """These files of a model on the hub, in the cache of huggingface_hub."""
    from huggingface_hub import errors, snapshot_download
    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        raise ValueError(f"{name} is neither a folder nor a model on the hub that you may read "
                         f"(hf auth login): {first_line(error)}") from error
    except Exception as error:          # of its HTTP package, too
        raise ConnectionError(f"there is no folder {name}, and the model cannot be downloaded "
                              f"({first_line(error)})") from error


def quiet_transformers():
    """The package, without its progress bars and warnings."""
    import transformers
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def read_config(folder: Path):
    """transformers' config, and ours."""
    transformers = quiet_transformers()
    with refusing(folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        if hasattr(config, "quantization_config"):
            raise ValueError("give the model before it was quantised")
        return config, our_config(config)


def read_model(folder: Path):
    """transformers' model, in fp32. Raises ValueError if the files lack some of it, or hold more.
    """
    with refusing(folder):
        model, loading = quiet_transformers().AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True,
            attn_implementation="eager")
        for problem in ("missing_keys", "unexpected_keys"):
            if loading[problem]:
                raise ValueError(f"{type(model).__name__} has {problem.replace('_', ' ')} there, "
                                 f"such as {min(loading[problem])}")
    return model.eval()


@torch.no_grad()
def compare(model, cfg, parameter_of) -> None:
    """Raise ValueError if transformers' model and ours have other logits than rounding explains.
    `parameter_of(name)` is our parameter. Some blocks are enough, which stay in the `model`. A
    window that the text would not reach is made shorter in both."""
    config = model.config
    blocks = model.get_submodule(family_of(config).blocks)
    del blocks[BLOCKS:]
    changes = dict(n_layer=len(blocks), dropout=0.0)
    shorter = max(0, getattr(cfg, "window", 0) - WINDOW)
    if shorter > 0:
        config.sliding_window -= shorter
        changes["window"] = cfg.window - shorter
    ours = replace(cfg, **changes).build().eval()
    for name, parameter in ours.named_parameters():
        full = parameter_of(name)
        parameter.zero_()[:len(full)] = full
    tokens = torch.randint(cfg.vocab_size, (2, min(cfg.seq_len, POSITIONS)),
                           generator=torch.Generator().manual_seed(0))
    found = ours(tokens)
    difference = (found - model(tokens, use_cache=False).logits).abs().max()
    if not difference <= ROUNDINGS * (found - ours.double()(tokens)).abs().max():
        raise ValueError(f"{type(model).__name__} and {type(ours).__name__} have other logits, by "
                         f"{difference:.1e}: one of these changes the model and is not known here, "
                         f"{config.to_diff_dict()}")


def read_parameters(folder: Path, config, cfg) -> dict[str, torch.Tensor]:
    """All of our parameters. Raises ValueError if they do not make transformers' model."""
    model, family = read_model(folder), family_of(config)
    tensors = dict(model.named_parameters())
    theirs = {name: their_names(name, family) for name in parameter_shapes(cfg)}

    def parameter_of(name):
        return to_ours(name, [tensors[one].detach() for one in theirs[name]], family, cfg)
    with refusing(folder):
        odd = set(tensors) ^ {one for names in theirs.values() for one in names}
        if odd:
            raise ValueError(f"{min(odd)} is a parameter of transformers' model or of ours alone")
        compare(model, cfg, parameter_of)
        del model                                   # a tensor is freed when it is converted
        parameters = {}
        for name, shape in parameter_shapes(cfg).items():
            parameters[name] = parameter_of(name)
            for one in theirs[name]:
                del tensors[one]
            if parameters[name].shape != shape or not parameters[name].isfinite().all():
                raise ValueError(f"{name} has another shape than {shape}, or is not finite")
    return parameters


# ---------------------------------------------------------------------------------------------
# Import
# ---------------------------------------------------------------------------------------------


def import_model(source: str, file: Path) -> None:
    """Write a checkpoint of weights alone. `source` is a folder or, if there is none of that name,
    a model on the hub."""
    if file.exists():
        raise ValueError(f"{file} exists: give a new file")
    if Path(source).is_file():
        raise ValueError(f"{source} is a file: give the folder of a model. A checkpoint of this "
                         f"project needs no import")
    is_folder = Path(source).is_dir()
    folder = Path(source) if is_folder else download(source, SMALL_FILES)
    config, cfg = read_config(folder)
    if not is_folder:                               # now the gigabytes
        download(source, SMALL_FILES + ["*.safetensors"])
        if not list(folder.glob("*.safetensors")):
            download(source, SMALL_FILES + ["pytorch_model*.bin"])
    state = state_of_weights(cfg, read_parameters(folder, config, cfg))
    state["tokenizer"], path = find_tokenizer(folder, read_object(folder / "config.json"))
    if path is not None:
        state["tokenizer_file"] = read_file(path)
    if path is not None or is_named(state["tokenizer"]):
        add_conversations(state, folder)
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_file(state, file.with_name(file.name + ".tmp"), file)
    print(f"{file}: {parameter_count(cfg):,} parameters. Train it further with\n"
          f"python train.py --init-from {file} --data DIR --out out/{file.stem}")
    if "template" in state:
        print(f"It is a model of conversations:\npython sample.py --ckpt {file} --chat")
    if path is not None:
        print(f"Make --data with its tokenizer:\n"
              f"python data.py --input FILE --tokenizer {shlex.quote(str(path))} --out DIR")
    elif not is_named(state["tokenizer"]):
        print(f"Its tokenizer is not ours: sample.py cannot read or write its tokens, and --data "
              f"must have been made with it (tokenizer {state['tokenizer']!r} in meta.json); if it "
              f"has a tokenizer.json, put it in the folder and import again")


def add_conversations(state: dict, folder: Path) -> None:
    """What a checkpoint keeps of a model's folder beside its tokenizer: the template of its
    conversations, and the tokens that end a generation."""
    ends = read_ends(folder)
    if ends:
        state["ends"] = ends
    try:
        encoding = get_tokenizer(state["tokenizer"], state.get("tokenizer_file"))
        template = find_template(folder, encoding)
    except (ValueError, ConnectionError) as error:      # no jinja2; no tokens of GPT-2
        return note(f"no template of conversations is kept: {error}")
    if template is not None:
        state["template"] = template.name
        if template.file is not None:
            state["template_file"] = template.file


def find_tokenizer(folder: Path, config: dict) -> tuple[str, Path | None]:
    """The name of a model's tokenizer, and its file if that is one of ours and has no other name.
    Our exports name it in config.json. OPT numbers GPT-2's tokens differently, and other models of
    GPT-2's architecture have added some: theirs get a name that no other tokenizer has."""
    name = config.get("tokenizer")
    if not isinstance(name, str):
        name = f"{config['model_type']}-{config['vocab_size']}"
        if name == "gpt2-50257" and has_gpt2s_tokens(folder):
            name = "gpt2"
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
    vocabularies = [read_object(folder / "vocab.json"),
                    read_object(folder / "tokenizer.json").get("model", {}).get("vocab", {})]
    return all(isinstance(one, dict) and SOME_OF_GPT2S.items() <= one.items()
               for one in vocabularies if one)


# ---------------------------------------------------------------------------------------------
# Export
# ---------------------------------------------------------------------------------------------


def tokenizer_of(encoding, own: str | None):
    """A tokenizer as the package `tokenizers` has it. `own` is the content of its file."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    if encoding.name.startswith("json-"):
        return Tokenizer.from_str(own)
    ranks, characters = encoding.ranks(), characters_of_bytes()
    written = {token: "".join(characters[byte] for byte in token) for token in ranks}
    tokenizer = Tokenizer(models.BPE(
        vocab={written[token]: number for token, number in ranks.items()},
        merges=[(written[left], written[right]) for left, right in find_merges(ranks)]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOT])
    return tokenizer


def write_tokenizer(encoding, cfg, folder: Path, own: str | None, template) -> None:
    """Write a tokenizer as transformers opens it for any architecture. With the `template` of
    conversations an answer's end is the end of a text."""
    from transformers import PreTrainedTokenizerFast
    tokens = dict(eos_token=encoding.end_of_text)
    if not encoding.name.startswith("json-"):
        tokens |= dict(bos_token=EOT, unk_token=EOT, pad_token=EOT)
        if own is not None:
            (folder / file_name(encoding.name)).write_text(own)
    elif len(encoding.prefix) == 1:
        tokens["bos_token"] = encoding.tokenizer.id_to_token(encoding.prefix[0])
    if template is not None:
        tokens |= entries_of(template)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer_of(encoding, own),
                            model_max_length=cfg.seq_len, **tokens).save_pretrained(folder)


def export_model(file: Path, folder: Path) -> None:
    """Write a folder that transformers opens; it appears only when it is complete."""
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    verify(file)
    state = load(file)
    cfg = make_config(**state["model"])
    tokenizer = state["tokenizer"]
    own = state.get("tokenizer_file")
    encoding, template = None, None
    start, end = None, END_OF_OTHERS.get(tokenizer)
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
        start = encoding.prefix[0] if encoding.prefix else None
    if end is not None and end >= cfg.vocab_size:
        raise ValueError(f"the tokenizer {tokenizer} has {end + 1} tokens, but the model's "
                         f"vocabulary {cfg.vocab_size}")
    # Without pad_token_id, OPT would learn nothing of token 1.
    config = their_config(cfg, tokenizer=tokenizer, eos_token_id=end, pad_token_id=None,
                          bos_token_id=end if start is None else start, dtype="float32")
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with named(folder), tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
        aside = Path(temporary, "folder")           # its mode is the usual one, temporary's is 700
        aside.mkdir()
        architecture = write_model(state["parameters"], config, cfg, ends, aside)
        if encoding is not None:
            write_tokenizer(encoding, cfg, aside, own, template)
        model_card(file, folder, state, cfg, config.model_type, encoding is not None).save(
            aside / "README.md")
        os.rename(aside, folder)
    text = f"with its tokenizer, {tokenizer}"
    if encoding is None:
        text = f"without a tokenizer: an export cannot write {tokenizer!r}"
    elif config.model_type == "qwen2" and not encoding.name.startswith("json-"):
        note("AutoTokenizer encodes for any Qwen2 with Qwen's own pattern of words: open the "
             "tokenizer by PreTrainedTokenizerFast")
    print(f"{folder}: {parameter_count(cfg):,} parameters as {architecture}, {text}")


def write_model(parameters, config, cfg, ends: set[int], folder: Path) -> str:
    """Write config, weights and the `ends` of a generation, then read some blocks back and compare
    them. Returns transformers' class."""
    from safetensors import SafetensorError
    family = family_of(config)
    with torch.device("meta"):
        model = quiet_transformers().AutoModelForCausalLM.from_config(config)
    if len(ends) > 1:       # config.json has the end of an answer alone
        model.generation_config.eos_token_id = sorted(ends)
    tensors = {}
    for name, full in parameters.items():
        tensors |= to_theirs(name, full, family, cfg)
    try:
        model.save_pretrained(folder, state_dict=tensors)
    except SafetensorError as error:
        raise WriteFailed(f"the weights could not be written: {error}") from error
    del tensors
    compare(read_model(folder), cfg, parameters.__getitem__)
    return type(model).__name__


# ---------------------------------------------------------------------------------------------
# The command line
# ---------------------------------------------------------------------------------------------


@errors_in_one_line("tools.huggingface")
def main() -> None:
    name, usage = "tools.huggingface", "python -m tools.huggingface"
    parser = Parser(name, f"{usage} import NAME_OR_DIR FILE.pt\n       {usage} export FILE.pt DIR",
                    "Convert weights from and to Hugging Face.")
    parser.add_argument("command", choices=("import", "export"), help="import: write a checkpoint "
                        "of weights alone, for train.py --init-from and sample.py. export: write a "
                        "folder that transformers opens")
    parser.add_argument("source", metavar="FROM", help="a model: its name on the hub, or a folder; "
                        "or a checkpoint of this project")
    parser.add_argument("target", type=Path, metavar="TO", help="the new file, or the new folder")
    args = parser.parse_args()
    try:
        if args.command == "import":
            import_model(args.source, args.target)
        else:
            export_model(Path(args.source), args.target)
    except ImportError:
        parser.error("this needs transformers: pip install transformers")
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
