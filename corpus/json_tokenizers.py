"""A tokenizer.json of Hugging Face, which the package `tokenizers` runs. tokenizers.py finds it.

    byte_level_tokenizers.py    its tokens are bytes: those of GPT-2, Llama 3, Qwen and others
    text_tokenizers.py          its tokens are text: those of Llama 2, Mistral, T5, BERT and others

This file has what both kinds share: the tokens around a text, the token that ends it, and added
tokens. What a file does is found by encoding texts, not by the names that it contains.
"""
import hashlib
import json
from functools import cached_property

import numpy as np

from corpus.formats import EOT

MARKS = ("<|im_start|>", "<|im_end|>")              # of ChatML
END_OF_TEXT = (EOT, "<|end_of_text|>", "</s>")      # the first of them that the vocabulary has
MARKED = "end_of_text"      # a key that tokenizer_config.py adds to one added token: it ends a text
NOTHING, TOKEN, TEXT = "nothing", "a token", "text"     # what is before a text that is encoded


class JsonTokenizer:
    """A tokenizer.json behind the interface of tokenizers.py. `file` is its content. Raises
    ValueError if it is none, or without the package.

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
            self.tokenizer = tokenizers.Tokenizer.from_str(file)
        except Exception as error:          # the package raises nothing narrower
            raise ValueError(f"it is no tokenizer.json: {error}") from None
        try:
            self.tokenizer.encode("\ue000")         # which no vocabulary has
        except Exception as error:
            raise ValueError(f"it does not encode every text: {error}") from None
        self.kind = type(self.tokenizer.model).__name__         # some files do not name it
        if self.content["model"].get("dropout"):
            raise ValueError("its model leaves out merges at random: set its dropout to null")
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.tokenizer.encode_special_tokens = True     # in a text their characters are ordinary
        ids = self.tokenizer.get_vocab()
        self.n_vocab = max(ids.values(), default=0) + 1     # some vocabularies have holes
        self.prefix, self.suffix = self.surroundings()
        self.end_of_text = self.find_end(ids, self.suffix)
        self.eot_token = ids[self.end_of_text]
        # From here on no white space is left out of the offsets, and no token is added.
        self.tokenizer.post_processor = tokenizers.processors.ByteLevel(trim_offsets=False)
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

    def with_special(self, texts) -> "JsonTokenizer":
        """This tokenizer, for which these added tokens are ordinary characters in a text, too."""
        added = self.content.get("added_tokens", [])
        changed = [token | dict(special=token["special"] or token["content"] in texts)
                   for token in added]
        if changed == added:
            return self
        return type(self)(json.dumps(self.content | dict(added_tokens=changed)))

    def encoder(self, behind: str):
        """The package's tokenizer for a text that stands behind NOTHING, a TOKEN, or TEXT."""
        return self.tokenizer

    def encode_ordinary(self, text: str, behind: str = NOTHING) -> list[int]:
        # encode_batch_fast finds no offsets: it takes two thirds of the time, half the memory.
        return self.encoder(behind).encode_batch_fast([text], add_special_tokens=False)[0].ids

    def encode_with_offsets(self, text: str, behind: str = NOTHING
                            ) -> tuple[list[int], list[tuple[int, int]]]:
        encoded = self.encoder(behind).encode(text, add_special_tokens=False)
        return encoded.ids, encoded.offsets

    def encode_single_token(self, text: str) -> int:
        return self.tokenizer.token_to_id(text)

    def encode_to_numpy(self, text: str) -> np.ndarray:
        return np.array(self.encode_ordinary(text), "<u4")

    # ---- What the file does -----------------------------------------------------------------

    def surroundings(self) -> tuple[list[int], list[int]]:
        """What the post_processor puts before a text, and behind it."""
        found = []
        for text in ("a", "b c"):
            whole, bare = (self.tokenizer.encode(text, add_special_tokens=is_whole).ids
                           for is_whole in (True, False))
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

    @cached_property
    def name(self) -> str:
        """json-HASH, of what decides the tokens and their text, and of nothing else: how the JSON
        is written, what pads or truncates and a post_processor that adds nothing do not count."""
        written = json.loads(self.tokenizer.to_str())
        model, *steps = self.decides(written)
        ordinary = [token for token in written["added_tokens"] if not token["special"]]
        # In this order, because another order makes another hash.
        decides = [model, sorted(self.tokenizer.get_vocab().items()), *steps, ordinary, self.prefix,
                   self.eot_token]
        return "json-" + hashlib.sha256(json.dumps(decides).encode()).hexdigest()[:12]
