"""A tokenizer of Hugging Face, which the package `transformers` opens: AutoTokenizer knows every
kind of folder. tokenizers.py has the interface.

    hf-HASH.json    its files beside the shards: {"tokenizer.json": the content, ...}. HASH is of
                    what decides the tokens, and not of how or where a file is written

- A long text is cut where its parts give the tokens of the whole. Llama 2's has no such place.
- In a text the characters of a special token are ordinary. Other added tokens are found.
- The eos_token separates documents. What stands before a text, as <|begin_of_text|>, is `prefix`.

--train-tokenizer makes such a tokenizer by byte-pair encoding on bytes with GPT-2's pattern of
words (Sennrich et al. 2016, Radford et al. 2019). The package `tokenizers` trains it.
"""
import hashlib
import json
import re
import tempfile
from contextlib import suppress
from functools import cached_property, lru_cache
from pathlib import Path

import numpy as np

from corpus import EOT
from corpus.shards import refuse_old

OWN = "hf-"                 # how the name of such a tokenizer begins
ENDS = "generation_config.json"
FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", ENDS)
AT_SPACE = re.compile(r"(?s:.*)\S(?= )")     # the last place before a space that follows a word
SIDE = 200                  # characters on both sides of a place that tell whether it cuts well
BROKEN = "\ufffd"           # stands for bytes that are no character
INNER_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")      # of SentencePiece: not a character's first
HUB_NAME = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")


def import_transformers():
    try:
        import transformers
    except ImportError:
        raise ValueError("this needs the package transformers: pip install transformers") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


class HuggingFaceTokenizer:
    """A tokenizer of transformers behind the interface of tokenizers.py. Raises ValueError."""

    def __init__(self, tokenizer, ends=()):
        self.tokenizer = tokenizer
        self.backend = getattr(tokenizer, "backend_tokenizer", None)    # special tokens are found
        if self.backend is None:
            raise ValueError("the package tokenizers cannot run it")
        if EOT in tokenizer.get_vocab():
            tokenizer.eos_token = tokenizer.eos_token or EOT
        if tokenizer.eos_token is None:
            raise ValueError("it has no eos_token, which ends a document: name one in its "
                             "tokenizer_config.json")
        self.backend.no_truncation()
        self.backend.no_padding()
        self.of_text = without_special(self.backend)
        self.ends = sorted(ends)
        self.n_vocab = max(tokenizer.get_vocab().values()) + 1      # some vocabularies have holes
        self.end_of_text = tokenizer.eos_token
        self.eot_token = tokenizer.eos_token_id
        bare = self.backend.encode("a", add_special_tokens=False).ids
        whole = self.backend.encode("a").ids
        self.prefix = whole[:whole.index(bare[0])]
        decides = [json.loads(self.backend.to_str()), self.prefix, self.eot_token]
        self.special = {number for number, token in self.backend.get_added_tokens_decoder().items()
                        if token.special and number != tokenizer.unk_token_id}
        self.name = OWN + hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]

    @cached_property
    def file(self) -> str:
        with tempfile.TemporaryDirectory() as folder:
            self.tokenizer.save_pretrained(folder)
            Path(folder, ENDS).write_text(json.dumps(dict(eos_token_id=self.ends)), "utf-8")
            return json.dumps({name: Path(folder, name).read_text("utf-8") for name in FILES
                               if Path(folder, name).exists()})

    def encode_ordinary(self, text: str) -> list[int]:
        # encode_batch_fast finds no offsets: it takes two thirds of the time, half the memory.
        return self.of_text.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.array(self.encode_ordinary(text), "<u4")

    def encode_with_special(self, text: str) -> list[int]:
        """The tokens of a text that a template has written."""
        return self.backend.encode_batch_fast([text], add_special_tokens=False)[0].ids

    def find_cut(self, text: str, start: int, end: int) -> int | None:
        for _ in range(8):
            match = AT_SPACE.match(text, start, end - SIDE)
            if match is None:
                return None
            end = match.end()
            sides = text[max(start, end - SIDE):end], text[end:end + SIDE]
            if sum(map(self.encode_ordinary, sides), []) == self.encode_ordinary("".join(sides)):
                return end
        return None

    def stream(self, before=()) -> "TextStream":
        """A text begins behind a special token: without the space of its first word."""
        special = [number for number, token in enumerate(before, 1) if token in self.special]
        return TextStream(self.backend, before[max(special, default=0):])


def without_special(backend):
    """The same tokenizer, to which the characters of special tokens are ordinary. A Unigram model
    has these tokens among its words, so there they get names that no text has."""
    written = json.loads(backend.to_str())
    if written["model"]["type"] == "Unigram":
        names = {token["content"]: f"\U0010ffff{token['content']}"
                 for token in written["added_tokens"] if token["special"]}
        for token in written["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        for word in written["model"]["vocab"]:
            word[0] = names.get(word[0], word[0])
        written["post_processor"] = None
    copied = type(backend).from_str(json.dumps(written))
    copied.encode_special_tokens = True
    return copied


class TextStream:
    """Tokens whose text depends on those before them, as the space before a word does. A character
    is never taken back: where bytes behind it are wrong, the package writes U+FFFD in its place."""

    def __init__(self, backend, before):
        self.backend = backend
        self.before = list(before)
        self.new = []           # tokens whose text is not certain yet

    def add(self, token: int) -> str:
        self.new.append(token)
        text = self.end()
        if text.endswith(BROKEN):
            return ""
        self.before += self.new
        self.new = []
        return text

    def end(self) -> str:
        """What the new tokens add to the text of those before them."""
        first = max(0, len(self.before) - 8)            # so many decide how the next is written
        token_of = self.backend.id_to_token
        while first > 0 and INNER_BYTE.fullmatch(token_of(self.before[first]) or ""):
            first -= 1
        before = self.before[first:]
        head, text, alone = self.backend.decode_batch([before, before + self.new, self.new],
                                                      skip_special_tokens=False)
        return text[len(head):] if text.startswith(head) else alone


# ---- Opening ---------------------------------------------------------------------------------

@lru_cache(maxsize=2)       # a large one takes seconds
def open_file(file: str) -> HuggingFaceTokenizer:
    """The tokenizer of a hf-HASH.json with this content. Raises ValueError."""
    with tempfile.TemporaryDirectory() as folder:
        for name, content in json.loads(file).items():
            if name in FILES:
                Path(folder, name).write_text(content, "utf-8")
        return load(folder)


def load(source) -> HuggingFaceTokenizer:
    """Of a folder, or of a name on the hub. Raises ValueError."""
    transformers = import_transformers()
    path = Path(source, FILES[0])
    config = Path(source, "config.json")
    try:
        facts = json.loads(config.read_text("utf-8")) if config.is_file() else {}
        if path.is_file() and not Path(source, FILES[1]).is_file():
            tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(path))
        elif str(facts.get("tokenizer")).startswith(OWN):   # AutoTokenizer may take another class
            tokenizer = transformers.PreTrainedTokenizerFast.from_pretrained(source)
        else:
            tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    except Exception as error:              # it raises nothing narrower
        text = str(error).strip().partition("\n")[0]
        advice = "give a folder with a tokenizer.json, or a name on the hub"
        if Path(source, "tokenizer.model").is_file() and not path.is_file():
            advice = (f"pip install sentencepiece protobuf, and AutoTokenizer.from_pretrained("
                      f"'{source}').save_pretrained('{source}') makes one of its tokenizer.model")
        raise ValueError(f"{source}: transformers opens no tokenizer ({text}): {advice}") from None
    try:
        return HuggingFaceTokenizer(tokenizer, read_ends(source))
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


def read_ends(source) -> list[int]:
    """The tokens that end what a model writes, by its files."""
    from transformers.utils import cached_file
    for name in (ENDS, "config.json"):
        with suppress(OSError, ValueError, KeyError, TypeError):    # no such file, or it names none
            ends = json.loads(Path(cached_file(source, name)).read_text("utf-8"))["eos_token_id"]
            return [ends] if isinstance(ends, int) else list(ends)
    return []


def find_tokenizer(given) -> HuggingFaceTokenizer:
    """Of a folder or one of its files, of shards or their hf-HASH.json, or of a name on the hub.
    Raises ValueError, OSError."""
    path = Path(given)
    kept = [path] if path.is_file() and path.name.startswith(OWN) else sorted(path.glob(f"{OWN}*"))
    if kept:
        return open_file(kept[0].read_text("utf-8"))
    for old in (*path.glob("json-*.json"), *path.glob("bpe-*.tiktoken")):
        refuse_old(old.stem, f"{path}: ")
    if not path.exists() and not HUB_NAME.fullmatch(str(given)):
        raise ValueError(f"there is no tokenizer {given}: give gpt2, bytes, cl100k_base, "
                         f"o200k_base, a folder with a tokenizer.json, or a name on the hub")
    return load(path.parent if path.is_file() else given)


def byte_level_tokenizer(model):
    """One of the package `tokenizers` whose tokens are bytes, with GPT-2's pattern of words."""
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def train_tokenizer(texts, n_tokens: int) -> HuggingFaceTokenizer:
    """One of n_tokens, or fewer if all words are tokens; the last is <|endoftext|>."""
    transformers = import_transformers()
    from tokenizers import models, pre_tokenizers, trainers
    tokenizer = byte_level_tokenizer(models.BPE())
    tokenizer.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=n_tokens - 1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False))
    tokenizer.add_special_tokens([EOT])
    return HuggingFaceTokenizer(transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=EOT))
