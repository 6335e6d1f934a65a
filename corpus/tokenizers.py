"""The tokenizers by their names, and the tokens around a text.

    gpt2        GPT-2's byte-pair encoding, 50,257 tokens; its vocabulary is downloaded once
    bytes       token i is byte i, and 256 is <|endoftext|>
    cl100k_base, o200k_base             GPT-4's and GPT-4o's; downloaded once; tokens of 32 bits
    hf-HASH     of Hugging Face, or one of your own (huggingface_tokenizers.py)

They all have

    name, n_vocab
    end_of_text, eot_token      what separates documents: its text, its token
    ends                        further tokens that end what a model writes
    prefix                      the tokens that stand before a text, such as <|begin_of_text|>
    file                        the content of the file that keeps it beside shards and in
                                checkpoints; None: the name is enough
    find_cut(text, start, end)  where before `end` the text from `start` on may be cut, so that its
                                parts give the tokens of the whole; None: not before `end`
    encode_ordinary(text), encode_to_numpy(text)        special tokens are ordinary characters there
    stream(before)              tokens to text, as they are drawn behind the tokens `before`:
                                add(token) returns the text that is certain now, end() the rest
"""
import codecs
import re
from functools import partial

import numpy as np

from base.errors import first_cause
from corpus import EOT
from corpus.downloads import read_url
from corpus.huggingface_tokenizers import AT_SPACE, open_file
from corpus.shards import refuse_old

MOST_TOKENS = 1 << 16       # of a vocabulary whose tokens are uint16
DOWNLOADED = {"gpt2": "GPT-2's", "cl100k_base": "cl100k_base's", "o200k_base": "o200k_base's"}

# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
AT_SPACE_OR_LINE_END = re.compile(r"(?s:.*)\S(?=[ \n])")


def end_of_word(text: str, start: int, end: int, pattern=AT_SPACE_OR_LINE_END) -> int:
    """The end of the pattern's last match in a text before `end`. A text without one, which is not
    prose, is cut at `end`, and may take a few tokens more."""
    match = pattern.match(text, start, end)
    return match.end() if match else end


class BytesStream:
    """Tokens that are bytes to text: a character is written with its last byte."""

    def __init__(self, encoding):
        self.encoding = encoding
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        try:
            return self.decoder.decode(self.encoding.decode_single_token_bytes(token))
        except KeyError:        # a hole in a vocabulary, or a row of a model without a token
            return ""

    def end(self) -> str:
        return self.decoder.decode(b"", final=True)


class TiktokenTokenizer:
    """A tiktoken.Encoding behind this interface."""
    prefix = ()
    end_of_text = EOT
    ends = ()
    file = None

    def __init__(self, encoding):
        self.encoding = encoding
        self.name = encoding.name
        self.n_vocab = encoding.n_vocab
        self.eot_token = encoding.eot_token
        # Later patterns than GPT-2's add the line ends behind it to a word of signs.
        pattern = AT_SPACE if self.name in ("cl100k_base", "o200k_base") else AT_SPACE_OR_LINE_END
        self.find_cut = partial(end_of_word, pattern=pattern)

    def encode_ordinary(self, text: str) -> list[int]:
        return self.encoding.encode_ordinary(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return self.encoding.encode_to_numpy(text, disallowed_special=())

    def stream(self, before=()) -> BytesStream:
        return BytesStream(self.encoding)


def get_tokenizer(name: str, file: str | None = None):
    """The tokenizer of this name. `file` is the content of its file, if it has one. Raises
    ValueError for another name, ConnectionError without a vocabulary, which is downloaded once."""
    refuse_old(name)
    if file is not None:
        return open_file(file)
    if not is_named(name):
        raise ValueError(f"there is no tokenizer {name!r} here, only gpt2 and bytes: `python -m "
                         f"tools.huggingface export FILE.pt DIR` takes its model to where it is")
    import tiktoken.load        # in functions, like requests: train.py runs without them
    if name == "bytes":
        # The pattern bounds the characters that are processed at once. There are no merges.
        return TiktokenTokenizer(tiktoken.Encoding(
            "bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
            mergeable_ranks={bytes([i]): i for i in range(256)}))
    tiktoken.load.read_file = read_url          # tiktoken's own may wait for ever
    try:
        return TiktokenTokenizer(tiktoken.get_encoding(name))
    except (OSError, ValueError) as error:      # ValueError: the file has the wrong hash
        raise ConnectionError(f"{DOWNLOADED[name]} vocabulary could not be loaded "
                              f"({first_cause(error)}): add --tokenizer bytes to data.py's flags, "
                              f"which needs none, or run it again later, or set "
                              f"TIKTOKEN_CACHE_DIR to a folder that has it") from None


def is_named(name: str) -> bool:
    """Whether --tokenizer NAME is one that needs no file."""
    return name == "bytes" or name in DOWNLOADED


# ---- What stands before a text ---------------------------------------------------------------

def document_start(encoding) -> list[int]:
    """The tokens before each document: the end of the one before, and the prefix. If that begins
    with the same token, one is enough."""
    prefix = list(encoding.prefix)
    if prefix[:1] == [encoding.eot_token]:
        return prefix
    return [encoding.eot_token, *prefix]


def decode(encoding, tokens) -> str:
    """The text of some tokens."""
    stream = encoding.stream()
    return "".join(map(stream.add, tokens)) + stream.end()
