"""The program data.py: its flags, what it makes, and the lines that it prints at its end."""
import os
import shlex
import signal
import sys
from dataclasses import dataclass, replace
from pathlib import Path

from base.commandline import Flags, Parser, add_flags, flag, flag_name
from base.errors import errors_in_one_line
from corpus import counted
from corpus.downloads import (DOWNLOADS, FINEWEB_SHARDS, address_of, download,
                              download_fineweb)
from corpus.file_formats import READ_KINDS
from corpus.inputs import find_files, follow_names, hold_conversations, standard_library
from corpus.prepare import prepare
from corpus.shards import (DEFAULT_OUT, SPLITS, find_shards, read_header,
                           tell_small_validation)
from corpus.tokenizers import MOST_TOKENS

SEQ_LEN = 128               # train.py's default, for a warning


@dataclass(frozen=True)
class DataFlags(Flags):
    """Every flag of data.py with its default."""
    dataset: str = flag("python", "python: the standard library's source, no download",
                        group="text", choices=["python", *DOWNLOADS])
    input: list[Path] = flag(None, f"your own text or conversations: {READ_KINDS}, other files of "
                             f"text, or folders of them", form="FILE")
    text_field: str = flag(None, "field of JSON or column of Parquet with the text (default text)")
    split_names: str = flag("follow", "files named train train, those named validation validate, "
                            "those named test are left out; or all are used alike",
                            choices=["follow", "ignore"])
    near_duplicates: str = flag(None, "documents with most words in common: count them, keep the "
                                "first, or do not look for them (default keep; ignore for python)",
                                choices=["keep", "drop", "ignore"])
    template: str = flag(None, "how conversations are written: plain, a model's .jinja or folder "
                         "(default: that of the tokenizer, or else plain)", form="NAME|FILE")
    tokenizer: str = flag(None, "gpt2, bytes, cl100k_base, o200k_base, a tokenizer.json, its "
                          "folder or name on the hub (default gpt2; bytes for python)",
                          group="shards", form="NAME|PATH")
    train_tokenizer: int = flag(None, "train a byte-pair encoding of at most N tokens first",
                                low=257, below=MOST_TOKENS + 1)
    out: Path = flag(None, "folder of the shards (default data/DATASET; required with --input)",
                     form="DIR")
    seed: int = flag(0, "seed of the validation split", low=0, below=2**63)
    shard_tokens: int = flag(10**8, "tokens of a shard", low=1024, below=2**31)
    shards: int = flag(1, "shards of fineweb, each of 100M tokens", low=1,
                       below=FINEWEB_SHARDS + 1)


@errors_in_one_line("data.py")
def main() -> None:
    flags = parse_flags(sys.argv[1:])
    for number in {signal.SIGINT, signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:
        if signal.getsignal(number) is not signal.SIG_IGN:                      # by nohup
            signal.signal(number, signal.default_int_handler)                   # as Ctrl-C does
    try:
        meta = make(flags)
    except KeyboardInterrupt:
        then = "makes the shards from the beginning; nothing is left of them"
        if any(flags.out.rglob("*.part")):
            then = "continues the download"
        print(f"data.py: stopped: the same command {then}", file=sys.stderr)
        sys.exit(1)
    print(*summary(flags.out, meta), sep="\n", flush=True)


def parse_flags(arguments) -> DataFlags:
    """The values of the flags, with an `out`. Raises ValueError."""
    parser = Parser("data.py", "python data.py [--dataset NAME | --input FILE ...] [FLAG ...]",
                    "Turn text into shards of tokens for train.py.")
    add_flags(parser, DataFlags)
    given = parser.parse(arguments)
    for one, other in [("dataset", "input"), ("tokenizer", "train_tokenizer")]:
        if one in given and other in given:
            raise ValueError(f"{flag_name(one)} cannot be combined with {flag_name(other)}: drop "
                             f"one")
    flags = DataFlags(**given)
    if flags.input and flags.out is None:
        raise ValueError("--input requires --out DIR, where the shards go")
    if flags.out is None:
        flags = replace(flags, out=Path("data", flags.dataset))
    if os.path.lexists(flags.out) and not flags.out.is_dir():     # also a link to nowhere
        raise ValueError(f"--out {flags.out} is not a directory: give another")
    for name in ("text_field", "template"):
        if name in given and not flags.input:
            raise ValueError(f"{flag_name(name)} is for the files of --input: leave it out")
    if flags.template is not None and flags.text_field is not None:
        raise ValueError("--template is for conversations, which have no --text-field: leave one "
                         "out")
    if "shards" in given and flags.dataset != "fineweb":
        raise ValueError("only --dataset fineweb has --shards")
    if flags.dataset == "fineweb" and given.keys() & {"tokenizer", "train_tokenizer"}:
        raise ValueError("--dataset fineweb has GPT-2's tokens: drop --tokenizer bytes")
    if flags.template not in (None, "plain") and not Path(flags.template).exists():
        raise ValueError(f"--template {flags.template}: there is no such file: give plain, a "
                         f"model's .jinja or its folder")
    return flags


def make(flags: DataFlags) -> dict:
    """Find or download the text and make the shards. Returns what meta.json says."""
    field = flags.text_field or "text"
    validation = set()
    if flags.input:
        files = find_files(flags.input, field)
        if flags.split_names == "follow":
            files, validation = follow_names(files)
        if flags.template is not None or (flags.text_field is None and hold_conversations(files)):
            field = None
    elif flags.dataset == "python":
        files = standard_library()
    elif flags.dataset == "fineweb":
        download_fineweb(flags.out, flags.shards)
        return dict(tokens={split: sum(read_header(path)[1]
                                       for path in find_shards(flags.out, split))
                            for split in SPLITS})
    else:
        files = [flags.out / "raw" / f"{flags.dataset}.txt"]
        download(address_of(flags.dataset), files[0], DOWNLOADS[flags.dataset][1])
    is_python = flags.dataset == "python" and not flags.input
    tokenizer = flags.tokenizer or ("bytes" if is_python else "gpt2")
    near_duplicates = flags.near_duplicates or ("ignore" if is_python else "keep")
    return prepare(files, flags.out, tokenizer, flags.seed, flags.shard_tokens, field,
                   near_duplicates, flags.train_tokenizer, flags.template, validation)


def summary(out: Path, meta: dict) -> list[str]:
    """Lines with the numbers of documents and tokens, and the commands that train on them."""
    tokens = meta["tokens"]
    flags = ""
    if out != DEFAULT_OUT:
        run = f"out/{Path(os.path.abspath(out)).name}"          # also of --out . or ..
        flags = f" --data {shlex.quote(out.as_posix())} --out {shlex.quote(run)}"
    documents = ""
    if "documents" in meta:
        kind = "document" if "template" not in meta else "conversation"
        documents = (f"{counted(meta['documents'], kind)}, "
                     f"{counted(meta['duplicates'], 'duplicate')} dropped, "
                     f"{meta['skipped']:,} without text skipped")
        if meta.get("near_duplicates") and "val_near_duplicates" not in meta:
            documents += f", {counted(meta['near_duplicates'], 'near-duplicate')} dropped"
        if "unreadable" in meta:
            documents += f", {meta['unreadable']:,} unreadable left out"
        documents += "; "
    lines = [f"{documents}{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate "
             f"on.", *tell_small_validation(tokens["train"], tokens["val"])]
    if "template" in meta:
        origin = ", the model's own template" if "template_file" in meta else ""
        lines.append(f"Learnt are the answers, {meta['learnt']['train']:,} of the tokens; the "
                     f"template is {meta['template']}{origin}.")
    longest = min(tokens.values()) - 1          # window that both splits hold
    if longest < SEQ_LEN and "template" not in meta:
        flags += f" --seq-len {max(1, longest)}"
    return [*lines, "Now train, in one process or in eight:", f"python train.py{flags}",
            f"torchrun --nproc_per_node=8 train.py{flags} --tp 2 --pp 2"]
