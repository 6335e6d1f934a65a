"""Text to shards, from files of any size, in two passes over the documents.

    files --index.py--> hash, size and split of each document --encode.py--> tokens --> shards

The shards appear in their folder when all are complete.
"""
import json
import os
from contextlib import suppress
from pathlib import Path

from base.errors import NO_SPACE, named
from corpus.chat_templates import choose_template, read_ends, write_own
from corpus.console import note, progress
from corpus.conversations import Template
from corpus.encode import bytes_per_token, tokenise, train_tokenizer
from corpus.file_changes import sha256_of
from corpus.index import Index, index_documents
from corpus.model_folders import notes
from corpus.shards import FLAGS_SUFFIX, LEARNT, SPLITS, append_tokens, read_meta
from corpus.temporary_folder import check_writable, new_folder
from corpus.tokenizers import (file_name, find_file, get_tokenizer, is_named, name_of, read_file,
                               text_sha256)


def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000,
            field: str | None = "text", near_duplicates="ignore", train_tokens: int | None = None,
            template: str | None = None, validation=frozenset()) -> dict:
    """Tokenise the documents of these files into shards in `out`, which appear when all are
    complete, and return what meta.json says. `tokenizer`: the name of one in corpus/tokenizers.py,
    the path of a file of one or of a folder with it, or the one of `train_tokens` tokens that is
    trained on this text. Without a `field` the files hold conversations; `template`: the name of
    one of ours, or the path of a model's; None: the one beside the tokenizer's file, or the default
    for the tokenizer. `validation`: the files that validate; without them the split is drawn.
    What is there already is not made again. Raises ValueError if a file is not text, if there is
    too little or, before it tokenises, if `out` holds shards of other text or other flags, which a
    run may be training on."""
    vocabulary = None           # the content of the file of a tokenizer of one's own
    model_folder = None
    if train_tokens is None and not is_named(tokenizer):
        tokenizer, vocabulary, model_folder = open_tokenizer(tokenizer, is_text=field is not None)
    ends = [] if model_folder is None else read_ends(model_folder)
    if train_tokens is None:
        encoding = get_tokenizer(tokenizer, vocabulary)
        if field is None:
            template = choose_template(template, encoding, model_folder)
    check_writable(out)
    index = index_documents(files, seed, field, near_duplicates, validation)
    source = f"{index.digest}, {tokenizer}, {shard_tokens}"
    if field is None and train_tokens is not None:
        source += f", {template or 'plain'}"
    elif field is None:
        source += f", {template.name}"
    meta = find_complete(out, source)
    if meta is not None:
        return meta
    check_held(out, source)
    if train_tokens is not None:
        vocabulary = train_tokenizer(index, train_tokens)
        tokenizer = name_of(vocabulary)
        encoding = get_tokenizer(tokenizer, vocabulary)
        if field is None:
            template = Template(template or "plain", encoding)
    out.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        tokens, text_bytes, learnt = write_shards(folder, index, encoding, shard_tokens, template)
        # The fingerprint covers the headers, too: windows do not cross the end of a shard.
        meta = dict(tokenizer=tokenizer, vocab_size=encoding.n_vocab, seed=seed, tokens=tokens,
                    text_bytes=text_bytes, bytes_per_token=text_bytes["val"] / tokens["val"],
                    fingerprint=sha256_of(*sorted(folder.iterdir())), source=source,
                    **index.counts)
        if validation:
            meta["files"] = dict(train=len(files) - len(validation), val=len(validation))
        if template is not None:
            meta |= dict(template=template.name, learnt=learnt, bytes_per_token=None)
            if template.file is not None:
                meta["template_file"] = write_own(folder, template)
        if ends:
            meta["ends"] = ends
        if vocabulary is not None:
            (folder / file_name(tokenizer)).write_text(vocabulary, encoding="utf-8")
            meta["tokenizer_sha256"] = text_sha256(vocabulary)
        if train_tokens is not None:
            meta["compared"] = [bytes_per_token(index, encoding)]
            with suppress(ConnectionError):     # GPT-2's vocabulary may not be there
                meta["compared"].append(bytes_per_token(index, get_tokenizer("gpt2")))
        publish(folder, out, meta)
    return meta


def open_tokenizer(given: str, is_text: bool) -> tuple[str, str, Path | None]:
    """(name, content of the file, the model's folder if it may be of one) of the tokenizer at this
    path. Of text, notes tell what the folder's other files say. Raises ValueError, OSError."""
    path = find_file(given)
    vocabulary = read_file(path)
    if is_text:
        for line in notes(path):
            note(line)
    model_folder = path.parent if path.suffix == ".json" else None
    return name_of(vocabulary), vocabulary, model_folder


def find_complete(out: Path, source: str) -> dict | None:
    """What meta.json in `out` says, if it is of this source and the shards are those that it
    describes; None otherwise."""
    try:
        meta = json.loads((out / "meta.json").read_text())
        shards = sorted(path for path in out.glob("[!.]*") if path.suffix in (".bin", FLAGS_SUFFIX))
        if meta["source"] != source or sha256_of(*shards) != meta["fingerprint"]:
            return None
        read_meta(out)                          # its tokenizer is there, too
    except (OSError, ValueError, KeyError, TypeError):
        return None
    note(f"{out} holds the shards of this text already: they are left as they are")
    return meta


def write_shards(folder: Path, index: Index, encoding, shard_tokens: int,
                 template) -> tuple[dict, dict, dict]:
    """Encode the documents. Returns {split: number of tokens}, {split: bytes of text} and {split:
    number of tokens of answers}."""
    tokens = dict.fromkeys(SPLITS, 0)
    text_bytes = dict.fromkeys(SPLITS, 0)
    learnt = dict.fromkeys(SPLITS, 0)
    count_bytes = progress("tokenising", index.size)
    for split, encoded, size, flags in tokenise(index, encoding, template):
        try:
            append_tokens(folder, split, encoded, tokens[split], shard_tokens, flags)
        except OSError as error:
            if error.errno in NO_SPACE:
                made = sum(tokens.values()) + len(encoded)
                needed = encoded.itemsize * made * index.size / (sum(text_bytes.values()) + size)
                error.strerror += f" (the shards need about {max(needed / 1e6, 1):,.0f} MB)"
            raise
        tokens[split] += len(encoded)
        text_bytes[split] += size
        if flags is not None:
            learnt[split] += int((flags & LEARNT).sum())
        count_bytes(size)
    return tokens, text_bytes, learnt


def check_held(out: Path, source: str) -> None:
    """Raise ValueError if `out` holds shards of another source, on which a run may be training."""
    meta_path = out / "meta.json"
    held = [*out.glob("[!.]*.bin"), *out.glob(f"[!.]*{FLAGS_SUFFIX}"), *out.glob("meta.json")]
    if held and not (meta_path.exists() and
                     f'"{source}"' in meta_path.read_text(errors="replace")):
        raise ValueError(f"{held[0]} was made of other text, with other flags or by another "
                         f"program: give another --out, or remove the shards and meta.json")


def publish(folder: Path, out: Path, meta: dict) -> None:
    """Move the complete files to `out`, meta.json last."""
    meta_path = out / "meta.json"
    with named(meta_path):
        # If this is interrupted, open_source refuses the meta.json that has the source alone.
        meta_path.write_text(json.dumps(dict(source=meta["source"])))
        for path in folder.iterdir():
            os.replace(path, out / path.name)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        os.replace(folder / "meta.json", meta_path)
