"""The tokenizers: text to tokens and back, and where a text may be cut before it is encoded.

    gpt2        GPT-2's byte-pair encoding, 50,257 tokens; its vocabulary is downloaded once
    bytes       token i is byte i, and 256 is <|endoftext|>
    cl100k_base, o200k_base             GPT-4's and GPT-4o's; downloaded once; tokens of 32 bits
    bpe-HASH    one of your own (--train-tokenizer), or another file of tiktoken's kind
    json-HASH   a tokenizer.json of Hugging Face (json_tokenizers.py)

HASH is of what decides the tokens: the name says what the tokenizer does, not where it is or how
its file is written. The file lies beside the shards, and in checkpoints.
"""
import base64
import hashlib
import json
import re
from pathlib import Path

from corpus.downloads import last_cause, read_url
from corpus.formats import EOT
from corpus.json_tokenizers import open_json
from corpus.model_folders import with_end_of_text

MOST_TOKENS = 1 << 16       # of a vocabulary whose tokens are uint16
DOWNLOADED = {"gpt2": "GPT-2's", "cl100k_base": "cl100k_base's", "o200k_base": "o200k_base's"}
OWN = {"bpe-": ".tiktoken", "json-": ".json"}       # how the name of a file's begins: its suffix


def get_tokenizer(name: str, file: str | None = None):
    """A tiktoken.Encoding or a JsonTokenizer. `file` is the content of the tokenizer's file, for a
    name that begins as in OWN. The file decides: an older name was the hash of its bytes. Raises
    ValueError for another name, ConnectionError without a vocabulary."""
    import tiktoken.load        # imported here, like requests: train.py runs without them
    if name == "bytes":         # the pattern bounds the characters processed at once; no merges
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if file is not None and is_of_file(name):
        return open_json(file) if is_json(file) else own_tokenizer(file)
    if name not in DOWNLOADED:
        raise ValueError(f"there is no tokenizer {name!r} here, only gpt2 and bytes: `python -m "
                         f"tools.huggingface export FILE.pt DIR` takes its model to where it is")
    tiktoken.load.read_file = read_url      # tiktoken's own may wait for ever
    try:
        return tiktoken.get_encoding(name)          # downloads its vocabulary once
    except (OSError, ValueError) as error:      # ValueError: the file has the wrong hash
        raise ConnectionError(f"{DOWNLOADED[name]} vocabulary could not be loaded "
                              f"({last_cause(error)}): add --tokenizer bytes to data.py's flags, "
                              f"which needs none, or run it again later, or set "
                              f"TIKTOKEN_CACHE_DIR to a folder that has it") from None


def bytes_of_token(encoding, token: int) -> bytes:
    """b"" for an id that no token has. A model may draw one: cl100k_base and o200k_base have holes
    before their special tokens, and a model may have more rows than there are tokens."""
    try:
        return encoding.decode_single_token_bytes(token)
    except KeyError:
        return b""


# ---- The tokenizer of a file ----------------------------------------------------------------

def is_json(file: str) -> bool:
    return file.lstrip().startswith("{")


def name_of(file: str) -> str:
    """Of the tokenizer with this content of its file. Raises ValueError if it is none."""
    if is_json(file):
        return open_json(file).name
    ranks = read_ranks(file)
    return "bpe-" + text_sha256(write_tokens(sorted(ranks, key=ranks.get)))[:12]


def text_sha256(file: str) -> str:
    return hashlib.sha256(file.encode()).hexdigest()


def is_same(name: str, file: str | None, other: str, other_file: str | None) -> bool:
    """Whether two names, with the contents of their files, are of one tokenizer."""
    if name == other:
        return True
    if file is None or other_file is None:
        return False
    return name_of(file) == name_of(other_file)


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


def write_tokens(tokens: list[bytes]) -> str:
    """The content of tiktoken's kind of file: a token in base64 and its id on each line."""
    return "".join(f"{base64.b64encode(token).decode()} {number}\n"
                   for number, token in enumerate(tokens))


def read_file(path: Path) -> str:
    """The content of a .tiktoken or a tokenizer.json; in that of a model's folder the token that
    ends a text is marked where the other files say more. Raises ValueError, with the path, if it is
    none."""
    try:
        file = path.read_text(encoding="utf-8-sig")     # without a byte-order mark
        if path.name == "tokenizer.json":
            file = with_end_of_text(file, path.parent)
        name_of(file)
    except ValueError as error:         # a UnicodeDecodeError and a binascii.Error too
        raise ValueError(f"{path}: {error}: give a file that --train-tokenizer has made, another "
                         f"of tiktoken's kind, or a tokenizer.json whose tokens are bytes"
                         ) from None
    return file


def find_file(given: str) -> Path:
    """The file of a tokenizer that --tokenizer names: a file, or a folder that holds one. Raises
    ValueError if it holds none, or several."""
    path = Path(given)
    if not path.is_dir():
        return path
    file = path / "tokenizer.json"
    if file.is_file():
        return file
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
    raise ValueError(f"{path} holds no tokenizer.json and no .tiktoken, but {holds or 'nothing'}: "
                     f"give a folder or file with one")


def read_own(folder: Path, name: str, sha256: str | None = None) -> str:
    """The content of the file of this tokenizer. `sha256` is that of the file; without it the name
    has it. Raises ValueError if the file is lost or damaged."""
    path = folder / file_name(name)
    try:
        file = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, the tokenizer of the shards beside it: copy it, too"
                         ) from None
    except UnicodeDecodeError:
        file = ""
    if not is_whole(file, name, sha256):
        raise ValueError(f"{path} is damaged: copy it again")
    return file


def is_whole(file: str, name: str, sha256: str | None) -> bool:
    """Whether the content of a tokenizer's file is undamaged."""
    digest = text_sha256(file)
    if sha256 is not None:
        return digest == sha256
    if name.endswith(digest[:12]):      # an older name; it needs no package
        return True
    try:
        return name_of(file) == name
    except ValueError:
        return False


def read_ranks(file: str) -> dict[bytes, int]:
    """{token: id}, of such a file. Raises ValueError if it is damaged or has too many tokens."""
    ranks = {}
    for line in file.splitlines():
        token, _, number = line.partition(" ")
        ranks[base64.b64decode(token, validate=True)] = int(number)
    if sorted(ranks.values()) != list(range(len(ranks))) or len(ranks) < 256:
        raise ValueError("it is no vocabulary of tiktoken's kind: a token and its number a line")
    if len(ranks) >= MOST_TOKENS:
        raise ValueError(f"it has {len(ranks):,} tokens, and {MOST_TOKENS:,} is the most of one of "
                         f"one's own")
    return ranks


def own_tokenizer(file: str):
    """The tiktoken.Encoding of such a file, with GPT-2's pattern; <|endoftext|> is the last."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    ranks = read_ranks(file)
    return tiktoken.Encoding(name_of(file), pat_str=r50k_pat_str, mergeable_ranks=ranks,
                             special_tokens={EOT: len(ranks)})


# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")
# Later patterns add the line ends behind it to a word of signs: there, before a space alone.
CUT_AT_SPACE = re.compile(r"(?s:.*)\S(?= )")


def cut_of(name: str) -> re.Pattern:
    """Where a text may be cut before this tokenizer encodes it."""
    is_later = name in ("cl100k_base", "o200k_base") or name.startswith("json-")
    return CUT_AT_SPACE if is_later else CUT


def cut_for(encoding) -> re.Pattern:
    """As `cut_of`; the added tokens of a tokenizer.json may forbid some places."""
    return getattr(encoding, "cut", None) or cut_of(encoding.name)


# ---- What stands before a text ---------------------------------------------------------------

def text_prefix(encoding) -> list[int]:
    """The tokens that a tokenizer puts before a text: those of its post_processor."""
    return list(getattr(encoding, "prefix", []))


def document_start(encoding) -> list[int]:
    """The tokens before each document: the end of the one before, and the prefix. If that begins
    with the same token, one is enough."""
    prefix = text_prefix(encoding)
    if prefix[:1] == [encoding.eot_token]:
        return prefix
    return [encoding.eot_token, *prefix]


def prompt_tokens(encoding, text: str, rows: int) -> list[int]:
    """The tokens of a prompt for a model of a vocabulary of so many `rows`. Raises ValueError if it
    has no row for one of them."""
    tokens = text_prefix(encoding) + encoding.encode_ordinary(text) or [encoding.eot_token]
    check_rows(encoding, tokens, rows)
    return tokens


def check_rows(encoding, tokens: list[int], rows: int) -> None:
    """Raise ValueError if a model of so many `rows` has none for one of the tokens of a prompt."""
    if max(tokens) >= rows:
        raise ValueError(f"the prompt has the token {shown_token(encoding, max(tokens))}, and the "
                         f"model has rows for {rows:,} tokens: leave it out of the prompt")


def shown_token(encoding, token: int) -> str:
    """Its number, and its text."""
    return f"{token}, {bytes_of_token(encoding, token).decode(errors='replace')!r}"
