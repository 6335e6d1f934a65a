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
import copy
import os
import shlex
import sys
import tempfile
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

import torch

from base.checkpoint_files import verify
from base.commandline import Parser
from base.disk import write_file
from base.errors import DiskFailed, errors_in_one_line, errors_with_path, first_line
from base.flops import parameter_count
from checkpoint import FORMAT, KEYS, load, parameter_shapes
from corpus import EOT
from corpus.huggingface_tokenizers import (HuggingFaceTokenizer, byte_level_tokenizer,
                                           import_transformers, load as load_tokenizer)
from corpus.templates import get_template, hash_of, plain_program, program_of
from corpus.tokenizers import get_tokenizer, is_named
from models import make_config
from runtime.directory import new_run
from tools.huggingface_families import (family_of, our_config, their_config, their_names, to_ours,
                                        to_theirs, unusual_keys)
from tools.model_card import model_card

SMALL_FILES = ["*.json", "*.jinja", "merges.txt", "tokenizer.model"]
TOKENIZER_FILES = "tokenizer.json", "vocab.json", "tokenizer.model"
SOME_OF_GPT2S = {"\u0120informants": 50254, "\u0120gazed": 50255}
END_OF_OTHERS = {"opt-50272": 2}        # token of a tokenizer that is not ours
WRAPPERS = {r"^((module|_orig_mod)\.)+": ""}       # names that DDP and torch.compile leave
BLOCKS, POSITIONS, TOKENS = 2, 40, 512  # that `compare` computes
ROUNDINGS = 10                          # of ours in fp32 beside fp64, by which logits may differ


def note(text: str) -> None:
    print(f"tools.huggingface: note: {text}", file=sys.stderr)


# ---- The model of transformers ---------------------------------------------------------------

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


def read_config(folder: Path):
    """transformers' config, and ours."""
    transformers = import_transformers()
    with refusing(folder):
        config = transformers.AutoConfig.from_pretrained(folder, local_files_only=True)
        return config, our_config(config)


def read_model(folder: Path):
    """transformers' model, in fp32. Raises ValueError if the files lack some of it or hold more."""
    refuse_integers(folder)
    with refusing(folder):
        model, loading = import_transformers().AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, output_loading_info=True, local_files_only=True,
            attn_implementation="eager", key_mapping=WRAPPERS, ignore_mismatched_sizes=True)
        for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if loading[problem]:
                raise ValueError(f"{type(model).__name__} has {problem.replace('_', ' ')} there, "
                                 f"such as {min(loading[problem])}")
    return model.eval()


def refuse_integers(folder: Path) -> None:
    """Raise ValueError for a quantised matrix, which transformers would read as a plain one."""
    from transformers.modeling_utils import load_state_dict
    for file in [*folder.glob("model*.safetensors"), *folder.glob("pytorch_model*.bin")]:
        with refusing(file):
            for name, tensor in load_state_dict(file, map_location="meta").items():
                is_mask = name.endswith((".bias", "_bias", "_ids"))
                if not is_mask and not (torch.is_tensor(tensor) and tensor.is_floating_point()):
                    dtype = getattr(tensor, "dtype", type(tensor).__name__)
                    raise ValueError(f"{name} is {dtype}, and not of floating point")


@torch.no_grad()
def compare(model, cfg, parameter_of) -> None:
    """Raise ValueError if transformers' model and ours have other logits than rounding explains.
    `parameter_of(name)` is our parameter. Some blocks and tokens are enough, which stay in the
    `model`."""
    config = model.config
    unusual = unusual_keys(config)
    blocks = model.get_submodule(family_of(config).blocks)
    del blocks[BLOCKS:]
    changes = dict(n_layer=len(blocks), vocab_size=min(cfg.vocab_size, TOKENS), dropout=0.0)
    model.resize_token_embeddings(changes["vocab_size"])
    our_model = replace(cfg, **changes).build().eval()
    for name, parameter in our_model.named_parameters():
        full = parameter_of(name)[:len(parameter)]
        parameter.zero_()[:len(full)] = full
    tokens = torch.randint(changes["vocab_size"], (2, min(cfg.seq_len, POSITIONS)),
                           generator=torch.Generator().manual_seed(0))
    logits = our_model(tokens)
    difference = (logits - model(tokens, use_cache=False).logits).abs().max()
    rounding = (logits - our_model.double()(tokens)).abs().max()
    if not difference <= ROUNDINGS * rounding:
        raise ValueError(f"{type(model).__name__} and {type(our_model).__name__} have other "
                         f"logits, by {difference:.1e}, where {rounding:.1e} is rounding. Its "
                         f"config differs from {type(config).__name__} in {unusual}")


def read_parameters(folder: Path, config, cfg) -> dict[str, torch.Tensor]:
    """All of our parameters. Raises ValueError if they do not make transformers' model."""
    model, family = read_model(folder), family_of(config)
    tensors = {name: parameter.detach() for name, parameter in model.named_parameters()}
    shapes = parameter_shapes(cfg)
    names_of = {name: their_names(name, family) for name in shapes}

    def parameter_of(name):
        full = to_ours(name, [tensors[key] for key in names_of[name]], family, cfg)
        if full.shape != shapes[name] or not full.isfinite().all():
            raise ValueError(f"{name} has another shape than {shapes[name]}, or is not finite")
        return full
    with refusing(folder):
        odd = set(tensors) ^ {key for names in names_of.values() for key in names}
        if odd:
            raise ValueError(f"{min(odd)} is a parameter of transformers' model or of ours alone")
        compare(model, cfg, parameter_of)
        del model                                   # a tensor is freed when it is converted
        parameters = {}
        for name in shapes:
            parameters[name] = parameter_of(name)
            for key in names_of[name]:
                del tensors[key]
    return parameters


# ---- Import ----------------------------------------------------------------------------------

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
        download(source, SMALL_FILES + ["model*.safetensors"])
        if not list(folder.glob("model*.safetensors")):
            download(source, SMALL_FILES + ["pytorch_model*.bin"])
    state = {key: {} for key in KEYS} | dict(       # of weights alone
        format=FORMAT, step=0, consumed_samples=0, tokens=0, optimizer_steps=0, data=None,
        run=new_run("import"), model=asdict(cfg),
        parameters=read_parameters(folder, config, cfg))
    with refusing(folder):
        add_ends(state, folder, config)
    add_tokenizer(state, folder, config)
    file.absolute().parent.mkdir(parents=True, exist_ok=True)
    write_file(state, file.with_name(file.name + ".tmp"), file)
    print(f"{file}: {parameter_count(cfg):,} parameters. Train it further with\n"
          f"python train.py --init-from {file} --data DIR --out out/{file.stem}")
    if "template" in state:
        print(f"It is a model of conversations:\npython sample.py --ckpt {file} --chat")
    if "tokenizer_file" in state:
        print(f"Make --data with its tokenizer:\n"
              f"python data.py --input FILE --tokenizer {shlex.quote(str(folder))} --out DIR")
    elif not is_named(state["tokenizer"]):
        print(f"Its tokenizer is not ours: sample.py cannot read or write its tokens, and --data "
              f"must have been made with it (tokenizer {state['tokenizer']!r} in meta.json); if it "
              f"has a tokenizer.json, put it in the folder and import again")


def add_ends(state: dict, folder: Path, config) -> None:
    """The tokens that end a generation."""
    ends = getattr(config, "eos_token_id", None)
    if (folder / "generation_config.json").exists():
        generation = import_transformers().GenerationConfig.from_pretrained(
            folder, local_files_only=True)
        ends = ends if generation.eos_token_id is None else generation.eos_token_id
    if ends is not None:
        state["ends"] = sorted({ends} if isinstance(ends, int) else set(ends))


def add_tokenizer(state: dict, folder: Path, config) -> None:
    """What a checkpoint keeps of a model's tokenizer, and of its template of conversations. Our
    exports name the tokenizer in config.json. OPT numbers GPT-2's tokens differently, and others
    have added some: without a file theirs get a name that no other tokenizer has."""
    name = getattr(config, "tokenizer", None)
    if not isinstance(name, str):
        name = f"{config.model_type}-{config.vocab_size}"
    state["tokenizer"] = name
    try:
        found = None
        if any((folder / file).exists() for file in TOKENIZER_FILES):
            found = load_tokenizer(folder)
        if name == "gpt2-50257" and (found is None or SOME_OF_GPT2S.items() <=
                                     found.tokenizer.get_vocab().items()):
            state["tokenizer"] = name = "gpt2"
        if found is None:
            return
        if not is_named(name):
            state["tokenizer"], state["tokenizer_file"] = found.name, found.file
        program = program_of(None, found)
        if program is None:
            return
        if program == plain_program(get_tokenizer(name) if is_named(name) else found):
            state["template"] = "plain"
        elif "tokenizer_file" in state:
            state["template"], state["template_file"] = hash_of(program), program
        else:
            note(f"no template of conversations is kept: it is of another tokenizer than {name}")
    except (ValueError, ConnectionError) as error:
        note(str(error))


# ---- Export ----------------------------------------------------------------------------------

def to_huggingface(encoding) -> HuggingFaceTokenizer:
    """The same tokenizer, if it is tiktoken's: gpt2 or bytes. Any two tokens that make up a third
    are merged, the first of the vocabulary before others."""
    if isinstance(encoding, HuggingFaceTokenizer):
        return encoding
    from tokenizers.models import BPE
    from transformers import PreTrainedTokenizerFast
    from transformers.convert_slow_tokenizer import bytes_to_unicode, generate_merges
    characters = bytes_to_unicode()
    vocab = {"".join(map(characters.get, token)): encoding.encoding.encode_single_token(token)
             for token in encoding.encoding.token_byte_values()}
    tokenizer = byte_level_tokenizer(BPE(vocab=vocab, merges=generate_merges(vocab)))
    tokenizer.add_special_tokens([EOT])
    return HuggingFaceTokenizer(PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=EOT, eos_token=EOT, unk_token=EOT, pad_token=EOT))


def write_tokenizer(encoding, cfg, folder: Path, template) -> None:
    """Write a tokenizer as transformers opens it for any architecture."""
    converted = to_huggingface(encoding)
    tokenizer = copy.deepcopy(converted.tokenizer)
    tokenizer.model_max_length = cfg.seq_len
    tokenizer.chat_template = None if template is None else (
        template.program or plain_program(encoding))
    tokenizer.save_pretrained(folder)
    opened = import_transformers().AutoTokenizer.from_pretrained(folder)
    if HuggingFaceTokenizer(opened).name != converted.name:
        note("AutoTokenizer encodes for this architecture with a pattern of words of its own: open "
             "the tokenizer by PreTrainedTokenizerFast")


def export_model(file: Path, folder: Path) -> None:
    """Write a folder that transformers opens; it appears only when it is complete."""
    if folder.exists():
        raise ValueError(f"{folder} exists: give a new folder")
    verify(file)
    state = load(file)
    cfg = make_config(**state["model"])
    tokenizer = state["tokenizer"]
    encoding = None
    template = None
    end = END_OF_OTHERS.get(tokenizer)
    ends = set(state.get("ends", []))
    if "tokenizer_file" in state or tokenizer in ("gpt2", "bytes"):     # those that can be written
        encoding = get_tokenizer(tokenizer, state.get("tokenizer_file"))
        end = encoding.eot_token
        if "template" in state:
            template = get_template(state["template"], encoding, state.get("template_file"))
            end = end if template.end is None else template.end
        ends |= {encoding.eot_token, end}
    start = encoding.prefix[0] if encoding is not None and encoding.prefix else end
    if end is not None and end >= cfg.vocab_size:
        raise ValueError(f"the tokenizer {tokenizer} has {end + 1} tokens, but the model's "
                         f"vocabulary {cfg.vocab_size}")
    # With a pad_token_id, as OPT's own 1, a model learns nothing of that token.
    config = their_config(cfg, tokenizer=tokenizer, eos_token_id=end, pad_token_id=None,
                          bos_token_id=start, dtype="float32")
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    with errors_with_path(folder), \
            tempfile.TemporaryDirectory(prefix=".new-", dir=parent) as temporary:
        aside = Path(temporary, "folder")           # its mode is the usual one, temporary's is 700
        aside.mkdir()
        architecture = write_model(state["parameters"], config, cfg, ends, aside)
        if encoding is not None:
            write_tokenizer(encoding, cfg, aside, template)
        card = model_card(file, state, cfg, config.model_type, encoding is not None)
        card.save(aside / "README.md")
        os.rename(aside, folder)
    text = f"with its tokenizer, {tokenizer}"
    if encoding is None:
        text = f"without a tokenizer: an export cannot write {tokenizer!r}"
    print(f"{folder}: {parameter_count(cfg):,} parameters as {architecture}, {text}")


def write_model(parameters, config, cfg, ends: set[int], folder: Path) -> str:
    """Write config, weights and the `ends` of a generation, then read some blocks back and compare
    them. Returns transformers' class."""
    from safetensors import SafetensorError
    family = family_of(config)
    with torch.device("meta"):
        model = import_transformers().AutoModelForCausalLM.from_config(config)
    if len(ends) > 1:       # config.json has the end of an answer alone
        model.generation_config.eos_token_id = sorted(ends)
    tensors = {}
    for name, full in parameters.items():
        tensors |= to_theirs(name, full, family, cfg)
    try:
        model.save_pretrained(folder, state_dict=tensors)
    except SafetensorError as error:
        raise DiskFailed(f"the weights could not be written: {error}") from error
    del tensors
    compare(read_model(folder), cfg, parameters.__getitem__)
    return type(model).__name__


# ---- The command line ------------------------------------------------------------------------

@errors_in_one_line("tools.huggingface")
def main() -> None:
    name, usage = "tools.huggingface", "python -m tools.huggingface"
    parser = Parser(name, f"{usage} import NAME_OR_DIR FILE.pt\n       {usage} export FILE.pt DIR",
                    "Convert weights from and to Hugging Face.")
    parser.add_argument("command", choices=("import", "export"), help="import: write a checkpoint "
                        "of weights alone. export: write a folder that transformers opens")
    parser.add_argument("source", metavar="FROM", help="a model: its name on the hub, or a folder; "
                        "or a checkpoint of this project")
    parser.add_argument("target", type=Path, metavar="TO", help="the new file, or the new folder")
    args = parser.parse_args()
    import_transformers()                   # or the package is missing
    try:
        if args.command == "import":
            import_model(args.source, args.target)
        else:
            export_model(Path(args.source), args.target)
    except KeyboardInterrupt:
        sys.exit(1)


if __name__ == "__main__":
    main()
