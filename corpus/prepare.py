"""Text to shards, from files of any size, in two passes over the documents.

    files --dedup_and_split.py--> hash, size, split of documents --encode.py--> tokens --> shards

The shards appear in their folder when all are complete.
"""
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from base.errors import NO_SPACE, named
from corpus.dedup_and_split import Index, index_documents
from corpus.encode import bytes_per_token, tokenise, train_tokenizer
from corpus.file_changes import sha256_of
from corpus.jinja_templates import hash_of
from corpus.notes_and_progress import note, progress
from corpus.published_templates import choose_template, read_ends
from corpus.shards import FLAGS_SUFFIX, LEARNT, SPLITS, append_tokens, read_meta
from corpus.temporary_folder import check_writable, new_folder
from corpus.tokenizer_config import notes
from corpus.tokenizers import (file_name, find_file, get_tokenizer, is_named, open_file, read_file,
                               text_sha256)


class Encoder(NamedTuple):
    """How the documents become tokens."""
    encoding: object            # tokenizers.get_tokenizer
    file: str | None            # the content of the tokenizer's file
    template: object = None     # of conversations (published_templates.get_template)
    ends: list[str] = []        # tokens that end a generation, by the files of a model


def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000,
            field: str | None = "text", near_duplicates="ignore", train_tokens: int | None = None,
            template: str | None = None, validation=frozenset()) -> dict:
    """Tokenise the documents of these files into shards in `out`, which appear when all are
    complete, and return what meta.json says. `tokenizer`: the name of one in corpus/tokenizers.py,
    the path of a file of one or of a folder with it. `train_tokens`: one of so many tokens is
    trained on this text in its place. Without a `field` the files hold conversations; `template`:
    the name of one of ours, or the path of a model's; None: the one beside the tokenizer's file, or
    the default for the tokenizer. `validation`: the files that validate; without them the split is
    drawn. What is there already is not made again. Raises ValueError if a file is not text, if
    there is too little or, before it tokenises, if `out` holds shards of other text or other flags,
    which a run may be training on."""
    is_text = field is not None
    encoder = None
    if train_tokens is None:
        encoder = open_encoder(tokenizer, is_text, template)
    check_writable(out)
    index = index_documents(files, seed, field, near_duplicates, validation)
    name = f"bpe of {train_tokens}" if encoder is None else encoder.encoding.name
    source = f"{index.digest}, {name}, {shard_tokens}"
    if not is_text:
        source += f", {template or 'plain' if encoder is None else encoder.template.name}"
    meta = find_complete(out, source)
    if meta is not None:
        return meta
    check_held(out, source)
    if encoder is None:
        file = train_tokenizer(index, train_tokens)
        encoder = make_encoder(open_file(file), file, is_text, template)
    out.mkdir(parents=True, exist_ok=True)
    with new_folder(out) as folder:
        meta = dict(tokenizer=encoder.encoding.name, vocab_size=encoder.encoding.n_vocab, seed=seed,
                    source=source, **index.counts)
        meta |= write_shards(folder, index, encoder, shard_tokens)
        meta |= write_files_of(folder, encoder)
        if validation:
            meta["files"] = dict(train=len(files) - len(validation), val=len(validation))
        if train_tokens is not None:
            meta["compared"] = compare_with_gpt2(index, encoder.encoding)
        publish(folder, out, meta)
    return meta


def open_encoder(tokenizer: str, is_text: bool, template: str | None) -> Encoder:
    """The Encoder of a tokenizer's name or path. Of text, notes tell what the other files of a
    model's folder say. Raises ValueError, OSError."""
    if is_named(tokenizer):
        return make_encoder(get_tokenizer(tokenizer), None, is_text, template)
    path = find_file(tokenizer)
    file = read_file(path)
    model_folder = path.parent if path.suffix == ".json" else None
    encoder = make_encoder(open_file(file), file, is_text, template, model_folder)
    if is_text:
        for line in notes(path, encoder.encoding):
            note(line)
    return encoder


def make_encoder(encoding, file: str | None, is_text: bool, template: str | None,
                 model_folder: Path | None = None) -> Encoder:
    chosen = None if is_text else choose_template(template, encoding, model_folder)
    ends = [] if model_folder is None else read_ends(model_folder)
    return Encoder(encoding, file, chosen, ends)


def compare_with_gpt2(index: Index, encoding) -> list[float]:
    """Bytes a token of text that validates, and GPT-2's if its vocabulary is there."""
    compared = [bytes_per_token(index, encoding)]
    with suppress(ConnectionError):
        compared.append(bytes_per_token(index, get_tokenizer("gpt2")))
    return compared


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


def write_shards(folder: Path, index: Index, encoder: Encoder, shard_tokens: int) -> dict:
    """Encode the documents. Returns what meta.json says of the shards."""
    tokens = dict.fromkeys(SPLITS, 0)
    text_bytes = dict.fromkeys(SPLITS, 0)
    learnt = dict.fromkeys(SPLITS, 0)           # tokens of answers
    count_bytes = progress("tokenising", index.size)
    for split, encoded, size, flags in tokenise(index, encoder.encoding, encoder.template):
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
    # The fingerprint covers the headers, too: windows do not cross the end of a shard.
    meta = dict(tokens=tokens, text_bytes=text_bytes,
                bytes_per_token=text_bytes["val"] / tokens["val"],
                fingerprint=sha256_of(*sorted(folder.iterdir())))
    if encoder.template is not None:
        meta |= dict(template=encoder.template.name, learnt=learnt, bytes_per_token=None)
    return meta


def write_files_of(folder: Path, encoder: Encoder) -> dict:
    """Write the files of the tokenizer and of the template. Returns what meta.json says of them."""
    meta = {}
    if encoder.template is not None and encoder.template.file is not None:
        name = hash_of(encoder.template.file)
        (folder / f"{name}.json").write_text(encoder.template.file, encoding="utf-8")
        meta["template_file"] = name
    if encoder.ends:
        meta["ends"] = encoder.ends
    if encoder.file is not None:
        (folder / file_name(encoder.encoding.name)).write_text(encoder.file, encoding="utf-8")
        meta["tokenizer_sha256"] = text_sha256(encoder.file)
    return meta


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
