"""The program data.py: its flags, what it makes, and the lines that it prints at its end."""
import argparse
import itertools
import os
import re
import shlex
import sys
from functools import partial
from pathlib import Path

from base.commandline import Parser
from base.other_names import DATA_ADVICE
from corpus.chat_templates import is_own
from corpus.console import explain, is_failure, print_lines
from corpus.conversations import FORMS
from corpus.downloads import DOWNLOADS, FINEWEB_SHARDS, download_fineweb, download_text
from corpus.file_kinds import LINES, READ, READ_KINDS
from corpus.formats import EOT
from corpus.inputs import find_files, hold_conversations, standard_library
from corpus.prepare import prepare
from corpus.shards import DEFAULT_OUT, SPLITS, count_tokens
from corpus.split import VAL_ONE_IN
from corpus.split_names import follow_names
from corpus.temporary_folder import signals_stop
from corpus.tokenizers import DOWNLOADED, MOST_TOKENS, OWN, find_file, is_named

SEQ_LEN = 128               # train.py's default, for a warning


def make_parser() -> Parser:
    """The flags of data.py, with their defaults."""
    parser = Parser("data.py", "python data.py [--dataset NAME | --input FILE ...] [FLAG ...]",
                    "Turn text into shards of tokens for train.py.", advice=DATA_ADVICE)
    text = parser.add_argument_group("text")
    source = text.add_mutually_exclusive_group()
    source.add_argument("--dataset", choices=["python", *DOWNLOADS], default="python",
                        help="python: the standard library's source, no download (the default)")
    source.add_argument("--input", nargs="+", type=Path, metavar="FILE",
                        help=f"your own text or conversations: {READ_KINDS}, other files of "
                             f"text, or folders of them")
    text.add_argument("--text-field", metavar="NAME",
                      help="field of JSON or column of Parquet with the text (default text)")
    text.add_argument("--text-endings", nargs="+", metavar="ENDING",
                      help="in folders, files of text that end so are documents as .txt are: "
                           "md,py,rst; or names without a suffix: LICENSE")
    text.add_argument("--split-names", choices=["follow", "ignore"], default="follow",
                      help="files named train train, those named validation validate, those named "
                           "test are left out; or all are used alike (default follow)")
    text.add_argument("--near-duplicates", choices=["keep", "drop", "ignore"], default="keep",
                      help="documents with most words in common: count them, keep the first, or do "
                           "not look for them, which is faster (default keep)")
    text.add_argument("--template", metavar="NAME|FILE",
                      help="how conversations are written: plain, chatml, a model's .jinja or "
                           "folder (default: that of the tokenizer's folder, else chatml if it has "
                           "its tokens)")
    shards = parser.add_argument_group("shards")
    tokenizer = shards.add_mutually_exclusive_group()
    tokenizer.add_argument("--tokenizer", metavar="NAME|PATH",
                           help="gpt2, bytes, cl100k_base, o200k_base, a .tiktoken, a "
                                "tokenizer.json or its folder (default gpt2; bytes for python)")
    tokenizer.add_argument("--train-tokenizer", type=int, metavar="N",
                           help="train a byte-pair encoding of N tokens on the text first")
    add = shards.add_argument
    add("--out", type=Path, metavar="DIR",
        help="folder of the shards (default data/DATASET; required with --input)")
    add("--seed", type=int, default=0, metavar="N", help="seed of the validation split (default 0)")
    add("--shard-tokens", type=int, default=10**8, metavar="N",
        help="tokens of a shard (default 100M)")
    add("--shards", type=int, default=1, metavar="N",
        help="shards of fineweb, each of 100M tokens (default 1)")
    parser.add_argument("unnamed", nargs="*", help=argparse.SUPPRESS)
    return parser


def parse_flags(arguments) -> argparse.Namespace:
    """The values of the flags. A mistake ends the program with status 2."""
    parser = make_parser()
    args = parser.parse_args(arguments)
    if args.unnamed and args.unnamed[0] in ("python", *DOWNLOADS):
        parser.error(f"give --dataset {args.unnamed[0]}")
    if args.unnamed:
        parser.error(f"text is given by --input: give --input {shlex.join(args.unnamed)} --out DIR")
    if not 0 <= args.seed < 2**63 or not 1024 <= args.shard_tokens < 2**31:
        parser.error("--seed must be 0 to 2^63 - 1, --shard-tokens 1024 to 2^31 - 1")
    if args.out is None:
        if args.input:
            parser.error("--input requires --out DIR, where the shards go")
        args.out = Path("data", args.dataset)
    if os.path.lexists(args.out) and not args.out.is_dir():     # also a link to nowhere
        parser.error(f"--out {args.out} is not a directory: give another")
    if args.text_field is not None and not args.input:
        parser.error("--text-field is for the files of --input: leave it out")
    check_endings(parser, args)
    if args.template is not None and (not args.input or args.text_field is not None):
        parser.error("--template is for the conversations of --input, which have no --text-field: "
                     "leave one out")
    check_template(parser, args)
    is_fineweb = args.dataset == "fineweb"
    if args.shards != 1 and not (is_fineweb and 1 <= args.shards <= FINEWEB_SHARDS):
        parser.error(f"only --dataset fineweb has --shards, 1 to {FINEWEB_SHARDS}")
    if is_fineweb and (args.tokenizer, args.train_tokenizer) != (None, None):
        parser.error("--dataset fineweb has GPT-2's tokens: drop --tokenizer bytes")
    check_tokenizer(parser, args)
    if args.tokenizer is None:
        args.tokenizer = "bytes" if args.dataset == "python" and not args.input else "gpt2"
    return args


def check_template(parser: Parser, args) -> None:
    """End the program if there is no such template."""
    if args.template is None or args.template in FORMS:
        return
    if not Path(args.template).exists():
        parser.error(f"--template {args.template}: there is no such file: give {', '.join(FORMS)}, "
                     f"a model's .jinja or its folder")
    if args.train_tokenizer is not None:
        parser.error(f"--template {args.template} is of a model, whose tokens a tokenizer of one's "
                     f"own has not: give --tokenizer FILE, or --template plain")


def check_endings(parser: Parser, args) -> None:
    """Make --text-endings a list of endings in lower case without dots. End the program if they are
    read in another way."""
    if args.text_endings is None:
        return
    if not args.input:
        parser.error("--text-endings is for the folders of --input: leave it out")
    given = [one.strip().lower() for text in args.text_endings for one in text.split(",")]
    endings = [re.sub(r"^\*?\.|\.(gz|zst)$", "", one) for one in given if one]
    args.text_endings = list(dict.fromkeys(endings))
    for ending in args.text_endings:
        if f".{ending}" in (*READ[1:], *LINES, ".gz", ".zst"):
            parser.error(f"--text-endings {ending}: such files hold documents or are compressed, "
                         f"and are read anyway: leave it out")
    if not args.text_endings or "" in args.text_endings:
        parser.error("--text-endings needs endings of names: give md,py")


def command_with(args, endings: list[str], is_other: bool) -> str:
    """The command line of these flags with more --text-endings, and another --out if it `is_other`,
    because this one gets the shards of fewer files."""
    out = args.out
    if is_other:
        others = (Path(f"{os.path.normpath(args.out)}-{number}") for number in itertools.count(2))
        out = next(other for other in others if not os.path.lexists(other))
    endings = [*(args.text_endings or []), *endings]
    values = vars(args) | dict(out=out, text_endings=",".join(endings))
    if args.train_tokenizer is not None:
        del values["tokenizer"]
    defaults = vars(make_parser().parse_args([]))
    words = ["python", "data.py"]
    for name, value in values.items():
        if value != defaults[name]:
            parts = value if isinstance(value, list) else [value]
            words += [f"--{name.replace('_', '-')}", *map(str, parts)]
    return shlex.join(words)


def check_tokenizer(parser: Parser, args) -> None:
    """End the program if there is no such tokenizer."""
    n_tokens = args.train_tokenizer
    if n_tokens is not None:
        if not 257 <= n_tokens <= MOST_TOKENS:
            parser.error(f"--train-tokenizer must be 257 to {MOST_TOKENS:,}: the 256 bytes, "
                         f"{EOT} and what is trained; a shard has 16 bits a token")
        args.tokenizer = f"bpe of {n_tokens}"
    elif args.tokenizer is not None and not is_named(args.tokenizer):
        path = Path(args.tokenizer)
        if not path.exists() and not path.name.endswith(tuple(OWN.values())):
            parser.error(f"--tokenizer {args.tokenizer}: give {', '.join(DOWNLOADED)}, bytes, a "
                         f"FILE.tiktoken, which --train-tokenizer makes, a tokenizer.json, which "
                         f"`python -m tools.huggingface import` brings along, or a folder with one")
        try:
            args.tokenizer = str(find_file(args.tokenizer))
        except (ValueError, OSError) as error:
            parser.error(f"--tokenizer {error}")


def summary(out: Path, meta: dict) -> list[str]:
    """Lines with the numbers of documents and tokens, and the commands that train on them."""
    tokens = meta["tokens"]
    flags = ""
    if out != DEFAULT_OUT:
        run = f"out/{Path(os.path.abspath(out)).name}"          # also of --out . or ..
        flags = f" --data {shlex.quote(out.as_posix())} --out {shlex.quote(run)}"
    documents = ""
    if "documents" in meta:
        kind = "documents" if "template" not in meta else "conversations"
        documents = (f"{meta['documents']:,} {kind}, {meta['duplicates']:,} duplicates dropped, "
                     f"{meta['skipped']:,} without text skipped")
        if meta.get("near_duplicates") and "val_near_duplicates" not in meta:
            documents += f", {meta['near_duplicates']:,} near-duplicates dropped"
        if "unreadable" in meta:
            documents += f", {meta['unreadable']:,} unreadable left out"
        documents += "; "
    lines = [f"{documents}{tokens['train']:,} tokens to train on, {tokens['val']:,} to validate "
             f"on."]
    if "template" in meta:
        own = ", the model's own template" if is_own(meta["template"]) else ""
        lines.append(f"Learnt are the answers, {meta['learnt']['train']:,} of the tokens; the "
                     f"template is {meta['template']}{own}.")
    if "compared" in meta:
        own, *others = meta["compared"]             # GPT-2's, if it could be had
        text = "".join(f", where GPT-2's has {gpt2:.2f}" for gpt2 in others)
        lines.append(f"The tokenizer {meta['tokenizer']} has {meta['vocab_size']:,} tokens: "
                     f"{own:.2f} bytes a token of validation text{text}.")
    share = tokens["val"] / (tokens["train"] + tokens["val"])
    if "documents" in meta and "files" not in meta and not 0.01 <= share <= 0.2:
        cause = "differ much in length"
        if meta["documents"] < VAL_ONE_IN:
            cause = "are few"
        lines.append(f"note: {share:.2%} of the tokens validate, not about 5%, because the "
                     f"{kind} {cause}: another --seed draws others")
    longest = min(tokens.values()) - 1          # window that both splits hold
    if longest < SEQ_LEN and "template" not in meta:
        if longest < 8:                         # nothing can be learnt in so short ones
            return [*lines, "This is too little text to train on: add text."]
        lines.append(f"This is too little text for windows of {SEQ_LEN} + 1 tokens: add text, or "
                     f"use the shorter windows below.")
        flags += f" --seq-len {longest}"
    return [*lines, "Now train, in one process or in eight:", f"python train.py{flags}",
            f"torchrun --nproc_per_node=8 train.py{flags} --tp 2 --pp 2"]


def make(args) -> dict:
    """Find or download the text and make the shards. Returns what meta.json says."""
    field = args.text_field or "text"
    validation = set()
    if args.input:
        files = find_files(args.input, field, args.text_endings or [], partial(command_with, args))
        if args.split_names == "follow":
            files, validation = follow_names(files)
        if args.template is not None or (args.text_field is None and hold_conversations(files)):
            field = None
    elif args.dataset == "python":
        files = standard_library()
    elif args.dataset == "fineweb":
        download_fineweb(args.out, args.shards)
        return dict(tokens={split: count_tokens(args.out, split) for split in SPLITS})
    else:
        files = [download_text(args.dataset, args.out)]
    return prepare(files, args.out, args.tokenizer, args.seed, args.shard_tokens, field,
                   args.near_duplicates, args.train_tokenizer, args.template, validation)


def main(argv=None) -> int:
    args = parse_flags(sys.argv[1:] if argv is None else argv)
    try:
        with signals_stop():
            meta = make(args)
    except KeyboardInterrupt:
        then = "makes the shards from the beginning; nothing is left of them"
        if any(args.out.rglob("*.part")):
            then = "continues the download"
        print(f"data.py: stopped: the same command {then}", file=sys.stderr)
        return 1
    except (ValueError, OSError) as error:
        print(f"data.py: {explain(error)}", file=sys.stderr)
        return 1 if is_failure(error) else 2
    error = print_lines(summary(args.out, meta))
    if error is not None:
        print(f"data.py: the shards are in {args.out}, but standard output cannot be written: "
              f"{error.strerror}", file=sys.stderr)
        return 1
    return 0
