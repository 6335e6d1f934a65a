"""The tokenizers of the package tiktoken: GPT-2's and later ones, bytes, and those of one's own.

A file of one's own (.tiktoken), which --train-tokenizer makes, has a token in base64 and its id on
each line. Its words are those of GPT-2's pattern. tokenizers.py finds the file.
"""
import base64
import hashlib
import re
from typing import NamedTuple

import numpy as np

from corpus.downloads import last_cause, read_url
from corpus.formats import EOT
from corpus.token_streams import BytesStream

MOST_TOKENS = 1 << 16       # of a vocabulary whose tokens are uint16
DOWNLOADED = {"gpt2": "GPT-2's", "cl100k_base": "cl100k_base's", "o200k_base": "o200k_base's"}

# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")
# Later patterns add the line ends behind it to a word of signs: there, before a space alone.
CUT_AT_SPACE = re.compile(r"(?s:.*)\S(?= )")


class Added(NamedTuple):
    """A token that stands for a text, as tokenizers.AddedToken has it."""
    content: str
    special: bool = True        # not looked for in a text
    lstrip: bool = False
    rstrip: bool = False


class TiktokenTokenizer:
    """A tiktoken.Encoding behind the interface of tokenizers.py."""
    prefix = ()
    end_of_text = EOT

    def __init__(self, encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.n_vocab = encoding.n_vocab
        self.eot_token = encoding.eot_token
        self.special_tokens_set = encoding.special_tokens_set
        self.added = {self.encode_single_token(text): Added(text)
                      for text in self.special_tokens_set}
        self.cut = cut_of(self.name)

    def with_special(self, texts) -> "TiktokenTokenizer":
        return self             # all of its added tokens are

    # (GPT-2's words do not depend on what they are `behind`.)
    def encode_ordinary(self, text: str, behind: str | None = None) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def encode_with_offsets(self, text: str, behind: str | None = None
                            ) -> tuple[list[int], list[tuple[int, int]]]:
        tokens = self.encode_ordinary(text)
        character_of = [number for number, character in enumerate(text)
                        for _ in character.encode()]
        offsets = []
        first = 0               # byte
        for token in tokens:
            end = first + len(self.decode_single_token_bytes(token))
            offsets.append((character_of[first], character_of[end - 1] + 1))
            first = end
        return tokens, offsets

    def encode_single_token(self, text: str) -> int:
        return self.encoding.encode_single_token(text)

    def stream(self, before=()) -> BytesStream:
        return BytesStream(self.decode_single_token_bytes)

    def decode_single_token_bytes(self, token: int) -> bytes:
        try:
            return self.encoding.decode_single_token_bytes(token)
        except KeyError:        # cl100k_base and o200k_base have holes before their special tokens
            return b""

    def ranks(self) -> dict[bytes, int]:
        """{token: id} of those that are no special ones."""
        return {token: self.encode_single_token(token)
                for token in self.encoding.token_byte_values()}


def cut_of(name: str) -> re.Pattern:
    """Where a text may be cut before the tokenizer of this name encodes it."""
    return CUT_AT_SPACE if name in ("cl100k_base", "o200k_base") else CUT


def bytes_tokenizer() -> TiktokenTokenizer:
    import tiktoken             # in functions, like requests: train.py runs without them
    # The pattern bounds the characters that are processed at once. There are no merges.
    return TiktokenTokenizer(tiktoken.Encoding(
        "bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
        mergeable_ranks={bytes([i]): i for i in range(256)}))


def downloaded_tokenizer(name: str) -> TiktokenTokenizer:
    """One of DOWNLOADED, whose vocabulary is downloaded once. Raises ConnectionError."""
    import tiktoken.load
    tiktoken.load.read_file = read_url          # tiktoken's own may wait for ever
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:      # ValueError: the file has the wrong hash
        raise ConnectionError(f"{DOWNLOADED[name]} vocabulary could not be loaded "
                              f"({last_cause(error)}): add --tokenizer bytes to data.py's flags, "
                              f"which needs none, or run it again later, or set "
                              f"TIKTOKEN_CACHE_DIR to a folder that has it") from None


def own_tokenizer(file: str) -> TiktokenTokenizer:
    """The tokenizer of a file with this content. <|endoftext|> is its last token. Its name is the
    hash of its tokens in order. Raises ValueError."""
    import tiktoken
    from tiktoken_ext.openai_public import r50k_pat_str
    ranks = read_ranks(file)
    tokens = write_tokens(sorted(ranks, key=ranks.get))
    return TiktokenTokenizer(tiktoken.Encoding(
        "bpe-" + hashlib.sha256(tokens.encode()).hexdigest()[:12], pat_str=r50k_pat_str,
        mergeable_ranks=ranks, special_tokens={EOT: len(ranks)}))


def write_tokens(tokens: list[bytes]) -> str:
    """The content of a file of one's own."""
    return "".join(f"{base64.b64encode(token).decode()} {number}\n"
                   for number, token in enumerate(tokens))


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
