"""The tokenizers by their names, their files, and the tokens around a text.

    gpt2        GPT-2's byte-pair encoding, 50,257 tokens; its vocabulary is downloaded once
    bytes       token i is byte i, and 256 is <|endoftext|>
    cl100k_base, o200k_base             GPT-4's and GPT-4o's; downloaded once; tokens of 32 bits
    bpe-HASH    one of your own (--train-tokenizer), or another file of tiktoken's kind
    json-HASH   a tokenizer.json of Hugging Face, or GPT-2's older pair of vocab.json and merges.txt

HASH is of what decides the tokens: the name says what the tokenizer does, not where it is or how
its file is written. The file lies beside the shards, and in checkpoints.

tiktoken_tokenizers.py has the first four kinds. Of the last, json_tokenizers.py has what all share;
byte_level_tokenizers.py those whose tokens are bytes, text_tokenizers.py the others, and
vocab_and_merges.py reads the pair. They all have

    name, n_vocab
    end_of_text, eot_token      what separates documents: its text, its token
    prefix                      the tokens that stand before a text, such as <|begin_of_text|>
    added                       {token: its content and where it is found} of those added to the
                                vocabulary. In a text the special ones are ordinary characters
    special_tokens_set          the contents of those that conversations may use
    with_special(texts)         this tokenizer, for which more of the added ones are special
    cut                         a pattern that ends where a text may be cut before it is encoded;
                                None: nowhere
    encode_ordinary(text, behind)       its tokens; behind: json_tokenizers.NOTHING (the default), a
                                TOKEN or TEXT. encode_to_numpy(text): as an array
    encode_with_offsets(text, behind)   its tokens, and of each the offsets of its characters:
                                start, end
    encode_single_token(text)   the token with this content
    stream(before)              tokens to text, as they are drawn behind the tokens `before`
                                (token_streams.py). A number that no token has is no text: some
                                vocabularies have holes, and a model may have more rows than tokens
"""
import hashlib
import json
from functools import lru_cache
from pathlib import Path

from corpus.byte_level_tokenizers import ByteLevelTokenizer, NotBytes
from corpus.text_tokenizers import TextTokenizer
from corpus.tiktoken_tokenizers import (DOWNLOADED, bytes_tokenizer, downloaded_tokenizer,
                                        own_tokenizer)
from corpus.token_streams import decode
from corpus.tokenizer_config import with_end_of_text
from corpus.vocab_and_merges import PAIR, has_pair, json_of_pair

OWN = {"bpe-": ".tiktoken", "json-": ".json"}       # how the name of a file's begins: its suffix


def get_tokenizer(name: str, file: str | None = None):
    """The tokenizer of this name. `file` is the content of its file, if it has one. Raises
    ValueError for another name, ConnectionError without a vocabulary."""
    if file is not None:
        return open_file(file)
    if name == "bytes":
        return bytes_tokenizer()
    if name in DOWNLOADED:
        return downloaded_tokenizer(name)
    raise ValueError(f"there is no tokenizer {name!r} here, only gpt2 and bytes: `python -m "
                     f"tools.huggingface export FILE.pt DIR` takes its model to where it is")


# ---- The tokenizer of a file ----------------------------------------------------------------

def is_json(file: str) -> bool:
    return file.lstrip().startswith("{")


def open_file(file: str):
    """The tokenizer of a file with this content. Raises ValueError if it is none."""
    return open_json(file) if is_json(file) else own_tokenizer(file)


@lru_cache(maxsize=2)       # a large one takes seconds
def open_json(file: str):
    """The tokenizer of a tokenizer.json with this content."""
    try:
        return ByteLevelTokenizer(file)
    except NotBytes:
        return TextTokenizer(file)


def name_of(file: str) -> str:
    """Of the tokenizer of a file. Raises ValueError if it is none."""
    return open_file(file).name


def text_sha256(file: str) -> str:
    return hashlib.sha256(file.encode()).hexdigest()


def has_added(file: str | None, other: str | None) -> bool:
    """Whether the second of two tokenizer.json is the first with more added tokens."""
    if file is None or other is None or not is_json(file) or not is_json(other):
        return False
    held = {token["content"] for token in json.loads(file).get("added_tokens", [])}
    content = json.loads(other)
    content["added_tokens"] = [token for token in content.get("added_tokens", [])
                               if token["content"] in held]
    try:
        return name_of(json.dumps(content)) == name_of(file)
    except ValueError:          # it needs one of the others
        return False


def is_named(name: str) -> bool:
    """Whether --tokenizer NAME is one that needs no file."""
    return name == "bytes" or name in DOWNLOADED


def is_of_file(name: str) -> bool:
    return name.startswith(tuple(OWN))


def file_name(name: str) -> str:
    """Of the file of this tokenizer, beside its shards."""
    kind, _ = name.split("-")
    return name + OWN[f"{kind}-"]


def read_file(path: Path) -> str:
    """The content of a .tiktoken or a tokenizer.json; in that of a model's folder the token that
    ends a text is marked where the other files say more. Raises ValueError, with the path, if it is
    none."""
    try:
        file = path.read_text(encoding="utf-8-sig")     # without a byte-order mark
        if path.name in PAIR and has_pair(path.parent):
            file = json_of_pair(path.parent)
        if path.name in ("tokenizer.json", *PAIR):
            file = with_end_of_text(file, path.parent)
        name_of(file)
    except ValueError as error:         # a UnicodeDecodeError and a binascii.Error too
        raise ValueError(f"{path}: {error}: give a file that --train-tokenizer has made, another "
                         f"of tiktoken's kind, a tokenizer.json, or a vocab.json with its "
                         f"merges.txt") from None
    return file


def find_file(given: str) -> Path:
    """The file of a tokenizer that --tokenizer names: a file, or a folder that holds one. Raises
    ValueError if it holds none, or several."""
    path = Path(given)
    if not path.is_dir():
        return path
    file = path / "tokenizer.json"
    if file.is_file():
        own = list(path.glob("bpe-*.tiktoken"))
        if len(own) == 1:       # an export: tokenizer.json has the same tokens, by another name
            return own[0]
        return file
    if has_pair(path):
        return path / PAIR[0]
    found = sorted(file for pattern in ("*.tiktoken", "json-*.json") for file in path.glob(pattern))
    if len(found) == 1:
        return found[0]
    names = sorted(file.name for file in path.iterdir())
    if len(found) > 1:
        raise ValueError(f"{path} holds {len(found)} tokenizers: give one of them, such as "
                         f"{found[0]}")
    if len(names) > 5:
        names = [*names[:5], "..."]
    holds = ", ".join(names)
    raise ValueError(f"{path} holds no tokenizer.json, no vocab.json with merges.txt and no "
                     f".tiktoken, but {holds or 'nothing'}: give a folder or file with one")


def read_kept(path: Path, what: str, sha256: str) -> str:
    """The content of a file beside shards, whose hash begins like this. Raises ValueError if it is
    lost or damaged."""
    try:
        file = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, {what} beside it: copy it, too") from None
    except UnicodeDecodeError:
        file = ""
    if not text_sha256(file).startswith(sha256):
        raise ValueError(f"{path} is damaged: copy it again")
    return file


# ---- What stands before a text ---------------------------------------------------------------

def document_start(encoding) -> list[int]:
    """The tokens before each document: the end of the one before, and the prefix. If that begins
    with the same token, one is enough."""
    prefix = list(encoding.prefix)
    if prefix[:1] == [encoding.eot_token]:
        return prefix
    return [encoding.eot_token, *prefix]


def prompt_tokens(encoding, text: str, rows: int) -> list[int]:
    """The tokens of a prompt for a model of a vocabulary of so many `rows`. Raises ValueError if it
    has no row for one of them."""
    tokens = [*encoding.prefix, *encoding.encode_ordinary(text)] or [encoding.eot_token]
    check_rows(encoding, tokens, rows)
    return tokens


def check_rows(encoding, tokens: list[int], rows: int) -> None:
    """Raise ValueError if a model of so many `rows` has none for one of the tokens of a prompt."""
    if max(tokens) >= rows:
        raise ValueError(f"the prompt has the token {shown_token(encoding, max(tokens))}, and the "
                         f"model has rows for {rows:,} tokens: leave it out of the prompt")


def shown_token(encoding, token: int) -> str:
    """Its number, and its text."""
    return f"{token}, {decode(encoding, [token])!r}"
