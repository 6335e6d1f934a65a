"""A tokenizer.json of Hugging Face whose tokens are bytes, as those of Llama 3, Qwen, SmolLM2,
GPT-NeoX and OLMo are. The package `tokenizers` encodes; tokenizers.py finds the file.

Their vocabulary writes each byte as one character, as GPT-2's does: a printed character stands for
itself, and the others are numbered from 256 on (Radford et al. 2019, bytes_to_unicode).

    " caf\\u00e9"  ->  bytes 20 63 61 66 c3 a9  ->  "\\u0120caf\\u00c3\\u00a9"  ->  tokens
"""
import itertools
import json

import numpy as np

from corpus.conversations import MARKS
from corpus.formats import EOT

END_OF_TEXT = (EOT, "<|end_of_text|>", "</s>")      # the first of them that the vocabulary has


def characters_of_bytes() -> list[str]:
    """The character that stands for each byte."""
    printed = {*range(ord("!"), ord("~") + 1), *range(ord("\u00a1"), ord("\u00ac") + 1),
               *range(ord("\u00ae"), ord("\u00ff") + 1)}
    others = itertools.count(256)
    return [chr(byte) if byte in printed else chr(next(others)) for byte in range(256)]


class JsonTokenizer:
    """What this project uses of a tiktoken.Encoding. `file` is the content of a tokenizer.json.
    Raises ValueError if its tokens are not bytes, or without the package."""

    def __init__(self, file: str, name: str):
        try:
            import tokenizers
        except ImportError:
            raise ValueError("a tokenizer.json needs the package tokenizers: pip install "
                             "tokenizers") from None
        try:
            content = json.loads(file)
            kind = content["model"]["type"]
            self.tokenizer = tokenizers.Tokenizer.from_str(file)
        except Exception as error:          # the package raises nothing narrower
            raise ValueError(f"it is no tokenizer.json: {error}") from None
        if kind != "BPE" or '"ByteLevel"' not in file:
            raise ValueError(f"its tokens are not bytes (its model is {kind}): a text that is "
                             f"encoded in parts would not give the tokens of the whole")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        # Without white space that it leaves out of offsets, and without tokens that it adds.
        self.tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
        self.tokenizer.encode_special_tokens = True     # in a text their characters are ordinary
        self.name = name
        ids = self.tokenizer.get_vocab()
        self.n_vocab = max(ids.values()) + 1            # some vocabularies have holes
        ends = [token for token in END_OF_TEXT if token in ids]
        if not ends:
            raise ValueError(f"it has no token {', '.join(END_OF_TEXT)}")
        self.end_of_text = ends[0]
        self.eot_token = ids[self.end_of_text]
        added = {token["content"] for token in content.get("added_tokens", [])}
        self.special_tokens_set = {self.end_of_text, *added.intersection(MARKS)}
        # Some files do not call them special: any text could forge them.
        self.tokenizer.add_special_tokens(list(self.special_tokens_set))
        self.byte_of = {character: byte for byte, character in enumerate(characters_of_bytes())}

    def added_tokens(self) -> dict:
        """{id: the AddedToken of the package}."""
        return self.tokenizer.get_added_tokens_decoder()

    def encode_ordinary(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False).ids

    def encode_with_offsets(self, text: str) -> tuple[list[int], list[tuple[int, int]]]:
        """The tokens of a text, and the characters of the text that each is of: first, end."""
        encoded = self.tokenizer.encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def encode_single_token(self, text: str) -> int:
        return self.tokenizer.token_to_id(text)

    def encode_to_numpy(self, text: str, disallowed_special=()) -> np.ndarray:
        return np.array(self.encode_ordinary(text), "<u4")

    def decode_single_token_bytes(self, token: int) -> bytes:
        """Raises KeyError for an id that no token has, as tiktoken does."""
        characters = self.tokenizer.id_to_token(token)
        if characters is None:
            raise KeyError(token)
        if all(character in self.byte_of for character in characters):
            return bytes(self.byte_of[character] for character in characters)
        return characters.encode()          # a special token
