"""The flags of data.py, and what is refused of them. corpus/program.py reads them."""
import os
from dataclasses import dataclass, replace
from pathlib import Path

from base.commandline import Parser, add_flags, flag, flag_name
from corpus.file_formats import READ_KINDS
from corpus.downloads import DOWNLOADS, FINEWEB_SHARDS
from corpus.tokenizers import MOST_TOKENS


@dataclass(frozen=True)
class DataFlags:
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
