"""Text to shards, from files of any size, in two passes over the documents.

    files --dedup_and_split.py--> hash, size, split of documents --encode.py--> tokens --> shards

The shards appear in their folder when all are complete.
"""
import json
import os
import tempfile
from pathlib import Path

from base.errors import errors_with_path
from corpus import EOT, note, progress
from corpus.dedup_and_split import Index, index_documents
from corpus.downloads import sha256_of
from corpus.encode import tokenise, train_on
from corpus.huggingface_tokenizers import find_tokenizer
from corpus.shards import FLAGS_SUFFIX, LEARNT, SPLITS, append_tokens
from corpus.templates import choose_template
from corpus.tokenizers import get_tokenizer, is_named


def prepare(files, out: Path, tokenizer: str, seed=0, shard_tokens=100_000_000,
            field: str | None = "text", near_duplicates="ignore", train_tokens: int | None = None,
            template: str | None = None, validation=frozenset()) -> dict:
    """Tokenise the documents of these files into shards in `out`, and return what meta.json says.
    `tokenizer`: a name or a path. `train_tokens`: one of so many tokens is trained on this text in
    its place. Without a `field` the files hold conversations. `template`: plain, or the path of a
    model's; None: the tokenizer's, or plain. `validation`: the files that validate; without them
    the split is drawn. Raises ValueError if a file is not text, if there is too little, or if `out`
    holds shards of other text or flags."""
    encoding = None
    if train_tokens is None:
        encoding = get_tokenizer(tokenizer) if is_named(tokenizer) else find_tokenizer(tokenizer)
        if encoding.end_of_text != EOT:
            note(f"{encoding.end_of_text}, the eos_token of the tokenizer, separates the documents")
        writer = None if field is not None else choose_template(template, encoding)
    for left in out.glob(".new-*"):
        note(f"{left} is of a job that runs, or that was killed: then remove it")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".new-", dir=out) as name:
        folder = Path(name)
        index = index_documents(files, seed, field, near_duplicates, validation)
        made_with = f"bpe of {train_tokens}" if encoding is None else encoding.name
        source = f"{index.digest}, {made_with}, {shard_tokens}"
        if field is None:
            source += f", {writer.name if encoding is not None else template or 'plain'}"
        check_held(out, source)
        if encoding is None:
            encoding = train_on(index, train_tokens)
            writer = None if field is not None else choose_template(template, encoding)
        meta = dict(tokenizer=encoding.name, vocab_size=encoding.n_vocab, seed=seed, source=source,
                    **index.counts)
        meta |= write_shards(folder, index, encoding, writer, shard_tokens)
        meta |= write_files_of(folder, encoding, writer)
        if validation:
            meta["files"] = dict(train=len(files) - len(validation), val=len(validation))
        publish(folder, out, meta)
    return meta


def write_shards(folder: Path, index: Index, encoding, template, shard_tokens: int) -> dict:
    """Encode the documents. Returns what meta.json says of the shards."""
    tokens = dict.fromkeys(SPLITS, 0)
    text_bytes = dict.fromkeys(SPLITS, 0)
    learnt = dict.fromkeys(SPLITS, 0)           # tokens of answers
    count_bytes = progress("tokenising", index.size)
    for split, encoded, size, flags in tokenise(index, encoding, template):
        append_tokens(folder, split, encoded, tokens[split], shard_tokens, flags)
        tokens[split] += len(encoded)
        text_bytes[split] += size
        if flags is not None:
            learnt[split] += int((flags & LEARNT).sum())
        count_bytes(size)
    # The fingerprint covers the headers, too: windows do not cross the end of a shard.
    meta = dict(tokens=tokens, text_bytes=text_bytes,
                bytes_per_token=text_bytes["val"] / tokens["val"],
                fingerprint=sha256_of(*sorted(folder.iterdir())))
    if template is not None:
        meta |= dict(template=template.name, learnt=learnt, bytes_per_token=None)
    return meta


def write_files_of(folder: Path, encoding, template) -> dict:
    """Write the files of the tokenizer and of the template. Returns what meta.json says of both."""
    meta = {}
    contents = {}
    if encoding.file is not None:
        meta["tokenizer_file"] = f"{encoding.name}.json"
        contents[meta["tokenizer_file"]] = encoding.file
    if encoding.ends:
        meta["ends"] = encoding.ends
    if template is not None and template.name != "plain":
        meta["template_file"] = f"{template.name}.jinja"
        contents[meta["template_file"]] = template.program
    for name, content in contents.items():
        (folder / name).write_text(content, encoding="utf-8", newline="")
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
    with errors_with_path(meta_path):
        # If this is interrupted, the meta.json that has the source alone is refused.
        meta_path.write_text(json.dumps(dict(source=meta["source"])))
        for path in folder.iterdir():
            os.replace(path, out / path.name)
        (folder / "meta.json").write_text(json.dumps(meta, indent=2) + "\n")
        os.replace(folder / "meta.json", meta_path)
