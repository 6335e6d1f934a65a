"""A tokenizer.json of Hugging Face whose tokens are bytes, as those of Llama 3, Qwen, SmolLM2,
GPT-NeoX and OLMo are. The package `tokenizers` encodes; tokenizers.py finds the file.

Their vocabulary writes each byte as one character, as GPT-2's does: a printed character stands for
itself, and the others are numbered from 256 on (Radford et al. 2019, bytes_to_unicode).

    " caf\\u00e9"  ->  bytes 20 63 61 66 c3 a9  ->  "\\u0120caf\\u00c3\\u00a9"  ->  tokens

Tokens that were added to the vocabulary are plain text. What a file does is found by encoding
texts, not by the names that it contains.
"""
import hashlib
import itertools
import json
import re
from functools import cached_property, lru_cache

import numpy as np

from corpus.formats import EOT

MARKS = ("<|im_start|>", "<|im_end|>")              # of ChatML
END_OF_TEXT = (EOT, "<|end_of_text|>", "</s>")      # the first of them that the vocabulary has
MARKED = "end_of_text"      # key of an added token: the files beside tokenizer.json name this one
PROBES = ["".join(map(chr, range(0x250))),          # the characters below U+0250
          "a b  c\n\n d\te \r\n f\u00a0\u3000 g", "don't I've 12 3456 !? x = [1, 2];\n    y(z) ",
          "\u00e9t\u00e9 e\u0301 \u6f22\u5b57 \u0939\u093f \U0001f600 \U0001f469\u200d\U0001f4bb"]


def characters_of_bytes() -> list[str]:
    """The character that stands for each byte."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
               *range(ord("\u00ae"), ord("\u00ff") + 1)}
    others = itertools.count(256)
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


@lru_cache(maxsize=2)       # a large one takes seconds
def open_json(file: str) -> "JsonTokenizer":
    return JsonTokenizer(file)


class JsonTokenizer:
    """A tokenizer.json behind the interface of tokenizers.py. `file` is its content. Raises
    ValueError if its tokens are not bytes, or without the package.

    prefix      the tokens that its post_processor puts before a text, such as <|begin_of_text|>
    eot_token   separates documents: what its post_processor puts behind a text; otherwise the added
                token that is MARKED; otherwise the first of END_OF_TEXT
    """

    def __init__(self, file: str):
        try:
            import tokenizers
        except ImportError:
            raise ValueError("a tokenizer.json needs the package tokenizers: pip install "
                             "tokenizers") from None
        try:
            self.content = json.loads(file)
            self.kind = self.content["model"]["type"]
            self.tokenizer = tokenizers.Tokenizer.from_str(file)
        except Exception as error:          # the package raises nothing narrower
            raise ValueError(f"it is no tokenizer.json: {error}") from None
        if self.content["model"].get("dropout"):
            raise ValueError("its model leaves out merges at random: set its dropout to null")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True     # in a text their characters are ordinary
        ids = self.tokenizer.get_vocab()
        self.n_vocab = max(ids.values(), default=0) + 1     # some vocabularies have holes
        self.byte_of = {character: byte for byte, character in enumerate(characters_of_bytes())}
        if not self.byte_of.keys() <= ids.keys():
            self.refuse()
        self.prefix, self.suffix = self.surroundings()
        # From here on no white space is left out of the offsets, and no token is added.
        self.tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        self.end_of_text = self.find_end(ids, self.suffix)
        self.eot_token = ids[self.end_of_text]
        added = {token.content: token
                 for token in self.tokenizer.get_added_tokens_decoder().values()}
        self.special_tokens_set = {self.end_of_text, *added.keys() & set(MARKS)}
        # Some files do not call them special: any text could forge them.
        specials = [added.get(text, tokenizers.AddedToken(text, normalized=False))
                    for text in sorted(self.special_tokens_set)]
        for token in specials:
            token.special = True
        self.tokenizer.add_special_tokens(specials)
        self.added = self.tokenizer.get_added_tokens_decoder()          # {id: AddedToken}
        self.plain = self.find_plain()
        self.place = re.compile(self.find_places())
        self.cut = re.compile(f"(?s:.+){self.place.pattern}")       # the last place
        self.check()

    def refuse(self):
        raise ValueError(f"its tokens are not bytes (its model is {self.kind}): a text that is "
                         f"encoded in parts would not give the tokens of the whole")

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def encode_single_token(self, text: str) -> int:
        return self.tokenizer.token_to_id(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.array(self.encode_ordinary(text), "<u4")

    def decode_single_token_bytes(self, token: int) -> bytes:
        characters = self.tokenizer.id_to_token(token)
        if characters is None:
            return b""
        if token in self.plain or not self.byte_of.keys() >= set(characters):
            return characters.encode()
        return self.bytes_of(characters)

    def bytes_of(self, characters: str) -> bytes:
        return bytes(self.byte_of[character] for character in characters)

    # ---- What the file does -----------------------------------------------------------------

    def surroundings(self) -> tuple[list[int], list[int]]:
        """What the post_processor puts before a text, and behind it."""
        found = []
        for text in ("a", "b c"):
            whole, bare = self.tokenizer.encode(text).ids, self.encode_ordinary(text)
            starts = [start for start in range(len(whole) - len(bare) + 1)
                      if whole[start:start + len(bare)] == bare]
            if not starts:
                raise ValueError("its post_processor changes the tokens of a text: set it to null")
            found.append((whole[:starts[0]], whole[starts[0] + len(bare):]))
        if found[0] != found[1]:
            raise ValueError("its post_processor puts other tokens around each text: set it to "
                             "null")
        return found[0]

    def find_end(self, ids: dict[str, int], suffix: list[int]) -> str:
        """The token that separates documents."""
        behind = [self.tokenizer.id_to_token(token) for token in suffix]
        if len(behind) > 1:
            raise ValueError(f"its post_processor puts {' '.join(behind)} behind a text: one token "
                             f"ends a text here: change its post_processor")
        marked = [token["content"] for token in self.content.get("added_tokens", [])
                  if token.get(MARKED)]
        ends = behind + marked + [token for token in END_OF_TEXT if token in ids]
        if not ends:
            raise ValueError(f"it has no token {', '.join(END_OF_TEXT)}, and no "
                             f"tokenizer_config.json beside it names an eos_token")
        return ends[0]

    def find_plain(self) -> set[int]:
        """The added tokens that are plain text and not the characters of bytes. One that the
        vocabulary had before, as a part of words, keeps its bytes."""
        plain = set()
        of_model = self.tokenizer.get_vocab(with_added_tokens=False)
        for number, token in self.added.items():
            if token.content not in of_model or not self.is_of_words(token.content):
                plain.add(number)
            elif not token.special and self.bytes_of(token.content) != token.content.encode():
                raise ValueError(f"its added token {token.content!r} has the number of the bytes "
                                 f"{self.bytes_of(token.content)!r}: remove it from added_tokens")
        return plain

    def is_of_words(self, characters: str) -> bool:
        """Whether some text has this token of the model's vocabulary as a part of its words."""
        if not self.byte_of.keys() >= set(characters):
            return False
        if self.kind != "BPE" or len(characters) == 1 or characters in self.merged:
            return True
        if not self.content["model"].get("ignore_merges"):
            return False
        try:
            self.bytes_of(characters).decode()
        except UnicodeDecodeError:          # no word of a text has these bytes
            return False
        return True

    @cached_property
    def merged(self) -> set[str]:
        """What the merges make."""
        return {merge.replace(" ", "") if isinstance(merge, str) else "".join(merge)
                for merge in self.content["model"].get("merges", [])}

    def find_places(self) -> str:
        """A pattern of the places where a text may be cut before it is encoded: before a space that
        follows another character (tokenizers.py), and where no added token reaches over it."""
        guards = []
        for token in self.added.values():
            if token.special:               # it is not looked for in a text
                continue
            text = token.content
            before = [text[:i] for i in range(1, len(text))
                      if text[i] == " " and not text[i - 1].isspace()]
            if token.rstrip:                # it takes the space
                before.append(text)
            guards += [f"(?<!(?i:{re.escape(some)}))" for some in before]
            if token.single_word and text.startswith(" "):      # it looks at what is before
                guards.append(f"(?!(?i:{re.escape(text)}))")
        return rf"(?<=\S){''.join(guards)}(?= )"

    def check(self) -> None:
        """Raise ValueError unless texts come back from their tokens, and the parts of a text give
        the tokens of the whole."""
        normalizer = self.tokenizer.normalizer
        for text in PROBES:
            expected = (text if normalizer is None else normalizer.normalize_str(text)).encode()
            found = b"".join(map(self.decode_single_token_bytes, self.encode_ordinary(text)))
            if found not in (expected, b" " + expected):        # add_prefix_space
                self.refuse()
        for text in PROBES + self.words_with_spaces():
            whole = self.encode_ordinary(text)
            for place in self.place.finditer(text):
                first, second = text[:place.start()], text[place.start():]
                if self.encode_ordinary(first) + self.encode_ordinary(second) != whole:
                    self.refuse()

    def words_with_spaces(self) -> list[str]:
        """The tokens of the vocabulary that have a space behind another character."""
        space = characters_of_bytes()[ord(" ")]
        found = []
        for characters in self.tokenizer.get_vocab(with_added_tokens=False):
            if space in characters.lstrip(space) and self.byte_of.keys() >= set(characters):
                found.append(self.bytes_of(characters).decode(errors="ignore"))
        return found

    @cached_property
    def name(self) -> str:
        """json-HASH, of what decides the tokens, and of nothing else: how the JSON is written, what
        pads or truncates and a post_processor that adds nothing do not count."""
        content = json.loads(self.tokenizer.to_str())
        model = content["model"]
        if self.kind == "BPE":              # the rest decides nothing where all bytes are tokens
            model = [model.get(key) or None for key in ("merges", "ignore_merges",
                                                        "continuing_subword_prefix",
                                                        "end_of_word_suffix")]
        parts = json.loads(json.dumps([content["normalizer"], content["pre_tokenizer"]]),
                           object_hook=without_offsets)
        ordinary = [token for token in content["added_tokens"] if not token["special"]]
        decides = [model, sorted(self.tokenizer.get_vocab().items()), parts, ordinary, self.prefix,
                   self.eot_token]
        return "json-" + hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]


def without_offsets(part: dict) -> dict:
    """Where a token lies in the text is not used."""
    return {key: value for key, value in part.items() if key != "trim_offsets"}
