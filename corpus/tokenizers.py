"""The tokenizers: text to tokens and back, and where a text may be cut before it is encoded.

    gpt2        GPT-2's byte-pair encoding, 50,257 tokens; its vocabulary is downloaded once
    bytes       token i is byte i, and 256 is <|endoftext|>
    cl100k_base, o200k_base             GPT-4's and GPT-4o's; downloaded once; tokens of 32 bits
    bpe-HASH    one of your own (--train-tokenizer), or another file of tiktoken's kind
    json-HASH   a tokenizer.json of Hugging Face (json_tokenizers.py)

HASH is of the file's content: the name says what the tokenizer does, not where it is. The file lies
beside the shards, and in checkpoints.
"""
import base64
import hashlib
import re
from pathlib import Path

from corpus.downloads import last_cause, read_url
from corpus.formats import EOT
from corpus.json_tokenizers import JsonTokenizer

MOST_TOKENS = 1 << 16       # of a vocabulary whose tokens are uint16
DOWNLOADED = {"gpt2": "GPT-2's", "cl100k_base": "cl100k_base's", "o200k_base": "o200k_base's"}
OWN = {"bpe-": ".tiktoken", "json-": ".json"}       # how the name of a file's begins: its suffix


def get_tokenizer(name: str, file: str | None = None):
    """A tiktoken.Encoding or a JsonTokenizer. `file` is the content of the tokenizer's file, for a
    name that begins as in OWN. Raises ValueError for another name, ConnectionError without a
    vocabulary."""
    import tiktoken.load        # imported here, like requests: train.py runs without them
    if name == "bytes":         # the pattern bounds the characters processed at once; no merges
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if file is not None and name == name_of(file):
        return JsonTokenizer(file, name) if name.startswith("json-") else own_tokenizer(file)
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

def name_of(file: str) -> str:
    """Of the tokenizer with this content of its file."""
    kind = "json-" if file.lstrip().startswith("{") else "bpe-"
    return kind + hashlib.sha256(file.encode()).hexdigest()[:12]


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
    """The content of a .tiktoken or a tokenizer.json. Raises ValueError, with the path, if it is
    none."""
    try:
        file = path.read_text(encoding="utf-8")
        get_tokenizer(name_of(file), file)
    except ValueError as error:         # a UnicodeDecodeError and a binascii.Error too
        raise ValueError(f"{path}: {error}: give a file that --train-tokenizer has made, another "
                         f"of tiktoken's kind, or a tokenizer.json whose tokens are bytes"
                         ) from None
    return file


def read_own(folder: Path, name: str) -> str:
    """The content of the file of this tokenizer. Raises ValueError if it is lost or damaged."""
    path = folder / file_name(name)
    try:
        file = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ValueError(f"{path} is missing, the tokenizer of the shards beside it: copy it, too"
                         ) from None
    if name_of(file) != name:
        raise ValueError(f"{path} is damaged: copy it again")
    return file


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
