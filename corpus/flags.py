"""The flags of data.py, and what is refused of them. corpus/program.py reads them."""
import itertools
import os
import re
import shlex
from dataclasses import dataclass, fields, replace
from pathlib import Path

from base.commandline import Parser, add_flags, flag, flag_name, parse_given, words_of
from corpus.conversations import FORMS
from corpus.downloads import DOWNLOADS, FINEWEB_SHARDS
from corpus.file_kinds import LINES, READ, READ_KINDS
from corpus.tiktoken_tokenizers import DOWNLOADED, MOST_TOKENS
from corpus.tokenizers import is_named


@dataclass(frozen=True)
class DataFlags:
    """Every flag of data.py with its default."""
    dataset: str = flag("python", "python: the standard library's source, no download",
                        group="text", choices=["python", *DOWNLOADS])
    input: list[Path] = flag(None, f"your own text or conversations: {READ_KINDS}, other files of "
                             f"text, or folders of them", form="FILE")
    text_field: str = flag(None, "field of JSON or column of Parquet with the text (default text)")
    text_endings: list[str] = flag(None, "in folders, files of text that end so are documents as "
                                   ".txt are: md,py,rst; or names without a suffix: LICENSE",
                                   form="ENDING")
    split_names: str = flag("follow", "files named train train, those named validation validate, "
                            "those named test are left out; or all are used alike",
                            choices=["follow", "ignore"])
    near_duplicates: str = flag("keep", "documents with most words in common: count them, keep "
                                "the first, or do not look for them, which is faster",
                                choices=["keep", "drop", "ignore"])
    template: str = flag(None, "how conversations are written: plain, chatml, a model's .jinja or "
                         "folder (default: that of the tokenizer's folder, else chatml if it has "
                         "its tokens)", form="NAME|FILE")
    tokenizer: str = flag(None, "gpt2, bytes, cl100k_base, o200k_base, a .tiktoken, a "
                          "tokenizer.json or its folder (default gpt2; bytes for python)",
                          group="shards", form="NAME|PATH")
    train_tokenizer: int = flag(None, "train a byte-pair encoding of N tokens on the text first",
                                low=257, below=MOST_TOKENS + 1)
    out: Path = flag(None, "folder of the shards (default data/DATASET; required with --input)",
                     form="DIR")
    seed: int = flag(0, "seed of the validation split", low=0, below=2**63)
    shard_tokens: int = flag(10**8, "tokens of a shard", low=1024, below=2**31)
    shards: int = flag(1, "shards of fineweb, each of 100M tokens", low=1,
                       below=FINEWEB_SHARDS + 1)


def make_parser() -> Parser:
    parser = Parser("data.py", "python data.py [--dataset NAME | --input FILE ...] [FLAG ...]",
                    "Turn text into shards of tokens for train.py.")
    add_flags(parser, DataFlags)
    return parser


def parse_flags(arguments) -> DataFlags:
    """The values of the flags, with an `out`. Raises ValueError."""
    given = parse_given(make_parser(), arguments)
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
    for name in ("text_field", "text_endings", "template"):
        if name in given and not flags.input:
            raise ValueError(f"{flag_name(name)} is for the files of --input: leave it out")
    if flags.template is not None and flags.text_field is not None:
        raise ValueError("--template is for conversations, which have no --text-field: leave one "
                         "out")
    if "shards" in given and flags.dataset != "fineweb":
        raise ValueError("only --dataset fineweb has --shards")
    if flags.dataset == "fineweb" and given.keys() & {"tokenizer", "train_tokenizer"}:
        raise ValueError("--dataset fineweb has GPT-2's tokens: drop --tokenizer bytes")
    check_template(flags)
    check_tokenizer(flags.tokenizer)
    if flags.text_endings is not None:
        flags = replace(flags, text_endings=parse_endings(flags.text_endings))
    return flags


def parse_endings(texts: list[str]) -> list[str]:
    """The endings of --text-endings in lower case, without dots. Raises ValueError if files that
    end so are read in another way."""
    given = [one.strip().lower() for text in texts for one in text.split(",")]
    endings = [re.sub(r"^\*?\.|\.(gz|zst)$", "", one) for one in given if one]
    for ending in endings:
        if f".{ending}" in (*READ[1:], *LINES, ".gz", ".zst"):
            raise ValueError(f"--text-endings {ending}: such files hold documents or are "
                             f"compressed, and are read anyway: leave it out")
    if not endings or "" in endings:
        raise ValueError("--text-endings needs endings of names: give md,py")
    return list(dict.fromkeys(endings))


def check_template(flags: DataFlags) -> None:
    """Raise ValueError if there is no such template."""
    if flags.template is None or flags.template in FORMS:
        return
    if not Path(flags.template).exists():
        raise ValueError(f"--template {flags.template}: there is no such file: give "
                         f"{', '.join(FORMS)}, a model's .jinja or its folder")
    if flags.train_tokenizer is not None:
        raise ValueError(f"--template {flags.template} is of a model, whose tokens a tokenizer of "
                         f"one's own has not: give --tokenizer FILE, or --template plain")


def check_tokenizer(name: str | None) -> None:
    """Raise ValueError if there is no such tokenizer."""
    if name is not None and not is_named(name) and not Path(name).exists():
        raise ValueError(f"--tokenizer {name}: give {', '.join(DOWNLOADED)}, bytes, a "
                         f"FILE.tiktoken, which --train-tokenizer makes, a tokenizer.json, which "
                         f"`python -m tools.huggingface import` brings along, or a folder with one")


def command_with(flags: DataFlags, endings: list[str], is_other: bool) -> str:
    """The command line of these flags with more --text-endings, and another --out if it `is_other`,
    because this one gets the shards of fewer files."""
    out = flags.out
    if is_other:
        others = (Path(f"{os.path.normpath(out)}-{number}") for number in itertools.count(2))
        out = next(other for other in others if not os.path.lexists(other))
    endings = ",".join([*(flags.text_endings or []), *endings])
    flags = replace(flags, out=out, text_endings=[endings])
    given = {f.name: getattr(flags, f.name) for f in fields(flags)
             if getattr(flags, f.name) != f.default}
    return shlex.join(["python", "data.py", *words_of(given)])
