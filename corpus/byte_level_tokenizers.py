"""A tokenizer.json whose tokens are bytes, as those of GPT-2, Llama 3, Qwen, SmolLM2, GPT-NeoX and
OLMo are.

Their vocabulary writes each byte as one character, as GPT-2's does: a printed character stands for
itself, and the others are numbered from 256 on (Radford et al. 2019, bytes_to_unicode).

    " caf\\u00e9"  ->  bytes 20 63 61 66 c3 a9  ->  "\\u0120caf\\u00c3\\u00a9"  ->  tokens

Tokens that were added to the vocabulary are plain text. A text may be cut where `find_places` says
if its parts then give the tokens of the whole.
"""
import itertools
import json
import re
from functools import cached_property

from corpus.json_tokenizers import JsonTokenizer
from corpus.token_streams import BytesStream

PROBES = ["".join(map(chr, range(0x250))),          # the characters below U+0250
          "a b  c\n\n d\te \r\n f\u00a0\u3000 g", "don't I've 12 3456 !? x = [1, 2];\n    y(z) ",
          "\u00e9t\u00e9 e\u0301 \u6f22\u5b57 \u0939\u093f \U0001f600 \U0001f469\u200d\U0001f4bb"]


def characters_of_bytes() -> list[str]:
    """The character that stands for each byte."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
               *range(ord("\u00ae"), ord("\u00ff") + 1)}
    others = itertools.count(256)
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


class NotBytes(ValueError):
    """Its tokens are not bytes alone: text_tokenizers.py opens it."""


class ByteLevelTokenizer(JsonTokenizer):
    """A tokenizer.json whose tokens are bytes. Raises NotBytes for another."""

    def __init__(self, file: str):
        super().__init__(file)
        self.byte_of = {character: byte for byte, character in enumerate(characters_of_bytes())}
        if not self.byte_of.keys() <= self.tokenizer.get_vocab().keys():
            raise NotBytes
        self.plain = self.find_plain()
        self.check_bytes()
        place = self.find_places()
        self.cut = None
        if self.parts_give_the_whole(re.compile(place)):
            self.cut = re.compile(f"(?s:.+){place}")                # the last place

    def stream(self, before=()) -> BytesStream:
        return BytesStream(self.decode_single_token_bytes)

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

    def check_bytes(self) -> None:
        """Raise NotBytes unless texts come back from their tokens, and none is a special token."""
        for number, token in self.added.items():
            if token.special and number in self.encode_ordinary(token.content):
                raise NotBytes
        normalizer = self.tokenizer.normalizer
        for text in PROBES:
            expected = (text if normalizer is None else normalizer.normalize_str(text)).encode()
            found = b"".join(map(self.decode_single_token_bytes, self.encode_ordinary(text)))
            if found not in (expected, b" " + expected):        # add_prefix_space
                raise NotBytes

    def parts_give_the_whole(self, place: re.Pattern) -> bool:
        """Whether the parts of a text that is cut at a place give the tokens of the whole."""
        for text in PROBES + self.words_with_spaces():
            whole = self.encode_ordinary(text)
            for found in place.finditer(text):
                parts = text[:found.start()], text[found.start():]
                if sum(map(self.encode_ordinary, parts), []) != whole:
                    return False
        return True

    def words_with_spaces(self) -> list[str]:
        """The tokens of the vocabulary that have a space behind another character."""
        space = characters_of_bytes()[ord(" ")]
        found = []
        for characters in self.tokenizer.get_vocab(with_added_tokens=False):
            if space in characters.lstrip(space) and self.byte_of.keys() >= set(characters):
                found.append(self.bytes_of(characters).decode(errors="ignore"))
        return found

    def decides(self, written: dict) -> list:
        """What of the model and of the steps before it decides the tokens."""
        model = written["model"]
        if self.kind == "BPE":              # the rest decides nothing where all bytes are tokens
            model = [model.get(key) or None for key in ("merges", "ignore_merges",
                                                        "continuing_subword_prefix",
                                                        "end_of_word_suffix")]
        steps = [written["normalizer"], written["pre_tokenizer"]]
        return [model, json.loads(json.dumps(steps), object_hook=without_offsets)]


def without_offsets(part: dict) -> dict:
    """Where a token lies in the text is not used."""
    return {key: value for key, value in part.items() if key != "trim_offsets"}
