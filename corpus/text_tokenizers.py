"""A tokenizer.json whose tokens are text: SentencePiece's kinds (byte-pair encoding with bytes for
rare characters, as Llama 2's and Mistral's; Unigram, as T5's), WordPiece (BERT's) and others.

    "the cat"  ->  "\\u2581the\\u2581cat"  ->  "\\u2581the", "\\u2581cat"
    "\\u6f22"  ->  "\\u2581\\u6f22"  ->  "\\u2581", "<0xE6>", "<0xBC>", "<0xA2>"

- A text is encoded whole. Its parts would not give the same tokens: many of these tokenizers put a
  space before each text, and merge over the spaces between words.
- That space depends on what is before the text: nothing, a token, or text (`steps`).
- Tokens are decoded together with those before them (token_streams.py).
- The characters of a special token in a text are ordinary. In many of these vocabularies a special
  token is a word like others, which a text could have. `encoder` gives it another name there.
"""
import json
from functools import cached_property

from corpus.json_tokenizers import NOTHING, TEXT, TOKEN, JsonTokenizer
from corpus.token_streams import TextStream

# Characters of all kinds: no vocabulary has each of them, and their UTF-8 has all bytes that occur.
OF_EVERY_KIND = "".join(chr(i) for i in [*range(128), *range(128, 0x110000, 61)]
                        if not 0xd800 <= i < 0xe000)


class TextTokenizer(JsonTokenizer):
    """Any tokenizer.json. Its special tokens are hidden from the encoder of texts, so that the
    characters of a text give none of them. Raises ValueError as JsonTokenizer does, or if a text
    could give one nevertheless."""
    cut = None

    def __init__(self, file: str):
        super().__init__(file)
        self.special = {token.content for token in self.added.values() if token.special}
        self.steps = {behind: self.steps_behind(behind) for behind in (NOTHING, TOKEN, TEXT)}
        self.encoders = {}          # {steps: the package's tokenizer}
        self.check_forgery()

    # ---- Text to tokens ---------------------------------------------------------------------

    def steps_behind(self, behind: str) -> str:
        """The normalizer and the pre_tokenizer for a text that stands behind NOTHING, a TOKEN or
        TEXT, as JSON. They put a space before a text where nothing is before it; some do it behind
        a token, too; none behind text."""
        def changed(part: dict) -> dict:
            kind = part.get("type")
            if kind == "Metaspace" and (behind == TEXT or behind == TOKEN
                                        and part["prepend_scheme"] == "first"):
                return part | dict(prepend_scheme="never")
            if kind == "Prepend" and behind == TEXT:
                return dict(type="Sequence", normalizers=[])
            if kind == "ByteLevel" and behind == TEXT:
                return part | dict(add_prefix_space=False)
            return part
        steps = {key: self.written[key] for key in ("normalizer", "pre_tokenizer")}
        return json.dumps(json.loads(json.dumps(steps), object_hook=changed))

    def encoder(self, behind: str):
        steps = self.steps[behind]
        if steps not in self.encoders:
            self.encoders[steps] = self.make_encoder(steps)
        return self.encoders[steps]

    def make_encoder(self, steps: str):
        """The package's tokenizer with these steps, whose special tokens have new names, which no
        text gives. Merges are dropped so that no merge makes a special token."""
        model = dict(self.written["model"])
        in_model = self.special & self.tokenizer.get_vocab(with_added_tokens=False).keys()
        in_model -= {model.get("unk_token")}                    # which is found by its name
        renamed = {token: new_name(token) for token in in_model}
        if isinstance(model["vocab"], list):                    # of Unigram: [token, score]
            least = min(score for _, score in model["vocab"])
            model["vocab"] = [[renamed.get(token, token), least if token in renamed else score]
                              for token, score in model["vocab"]]
        else:
            model["vocab"] = {renamed.get(token, token): number
                              for token, number in model["vocab"].items()}
        if "merges" in model:
            model["merges"] = [merge for merge in model["merges"]
                               if not renamed.keys() & {*merge, "".join(merge)}]
        added = [token | dict(content=renamed.get(token["content"], token["content"]))
                 for token in self.written["added_tokens"]]
        encoder = type(self.tokenizer).from_str(json.dumps(
            self.written | json.loads(steps) | dict(model=model, added_tokens=added)))
        encoder.encode_special_tokens = True
        return encoder

    def check_forgery(self) -> None:
        """Raise ValueError if a text has a special token by its characters, or one of those that
        conversations may use, such as the end of a text, as what the vocabulary lacks."""
        unknown = self.unknown()
        if unknown in self.special_tokens_set and self.encode_single_token(
                unknown) in self.encode_ordinary(OF_EVERY_KIND + unknown):
            raise ValueError(f"its unknown token {unknown} would end a text or a message at what "
                             f"the vocabulary lacks: give its model an unk_token of its own")
        for text in self.special - {unknown}:
            number = self.encode_single_token(text)
            for some in (text, new_name(text), f"a{new_name(text)}a"):
                if number in self.encode_ordinary(some):
                    raise ValueError(f"a text with the characters of its special token {text} "
                                     f"would have this token: give it a pre_tokenizer")

    def unknown(self) -> str | None:
        """The token that stands for what the vocabulary lacks."""
        model = self.written["model"]
        if model.get("unk_id") is not None:
            return model["vocab"][model["unk_id"]][0]
        return model.get("unk_token")

    # ---- Tokens to text ---------------------------------------------------------------------

    def stream(self, before=()) -> TextStream:
        """Where `before` ends with a special token behind which a text begins, as `encoder` has it,
        the space that its first word has there is not written."""
        special = self.special - {self.unknown()}
        is_special = [token in self.added and self.added[token].content in special
                      for token in before]
        has_text = not all(is_special)
        begins_behind_tokens = self.steps[TOKEN] != self.steps[TEXT]
        if has_text and is_special[-1] and begins_behind_tokens:
            has_text = False
        if not has_text:
            before = ()
        return TextStream(self.tokenizer, before)

    @cached_property
    def written(self) -> dict:
        """The file as the package writes it."""
        return json.loads(self.tokenizer.to_str())

    def decides(self, written: dict) -> list:
        """What of the model, of its scores and of the steps around it decides the tokens."""
        model = {key: value for key, value in written["model"].items()
                 if key != "vocab" and value}
        scores = []
        if isinstance(written["model"]["vocab"], list):         # their last digits are not kept
            scores = [round(score, 6) for _, score in written["model"]["vocab"]]
        steps = [written[key] for key in ("normalizer", "pre_tokenizer", "decoder")]
        return [model, scores, steps]


def new_name(token: str) -> str:
    """Which no text gives: a space is in it, and the steps write spaces in another way."""
    return f" {token} "
