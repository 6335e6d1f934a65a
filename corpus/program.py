"""The program data.py: what it makes, and the lines that it prints at its end."""
import os
import shlex
import signal
import sys
from pathlib import Path

from base.errors import errors_in_one_line
from corpus.downloads import download_fineweb, download_text
from corpus.flags import DataFlags, parse_flags
from corpus.inputs import find_files, hold_conversations, standard_library
from corpus.notes_and_progress import counted
from corpus.prepare import prepare
from corpus.shards import DEFAULT_OUT, SPLITS, find_shards, read_header
from corpus.split_by_filename import follow_names
from corpus.templates import is_own

SEQ_LEN = 128               # train.py's default, for a warning


@errors_in_one_line("data.py")
def main(arguments=None) -> None:
    flags = parse_flags(sys.argv[1:] if arguments is None else arguments)
    for number in {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}:  # not on Windows
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
        files = [download_text(flags.dataset, flags.out)]
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
             f"on."]
    if "template" in meta:
        origin = ", the model's own template" if is_own(meta["template"]) else ""
        lines.append(f"Learnt are the answers, {meta['learnt']['train']:,} of the tokens; the "
                     f"template is {meta['template']}{origin}.")
    longest = min(tokens.values()) - 1          # window that both splits hold
    if longest < SEQ_LEN and "template" not in meta:
        flags += f" --seq-len {max(1, longest)}"
    return [*lines, "Now train, in one process or in eight:", f"python train.py{flags}",
            f"torchrun --nproc_per_node=8 train.py{flags} --tp 2 --pp 2"]
