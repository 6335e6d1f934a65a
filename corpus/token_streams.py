"""Tokens to text, as they are drawn: a stream is given a token at a time, and returns the text that
is certain now.

    stream = encoding.stream(before)            # the tokens of the prompt
    text = "".join(map(stream.add, tokens)) + stream.end()

A character may have several tokens. It is written when it is complete, and is not taken back: where
SentencePiece's bytes behind it are no characters, the package writes U+FFFD for each byte of the
run, also for those of the characters before. Here only the bytes from the first wrong one on are
U+FFFD. They are written at the end of the run.
"""
import codecs
import re

INNER_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")      # of SentencePiece: not a character's first
BROKEN = "\ufffd"       # stands for bytes that are no character
ENOUGH = 8              # tokens of the text before that decide how the next one is written


class BytesStream:
    """Of tokens that are bytes. `bytes_of(token)` are those of one."""

    def __init__(self, bytes_of):
        self.bytes_of = bytes_of
        self.decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def add(self, token: int) -> str:
        return self.decoder.decode(self.bytes_of(token))

    def end(self) -> str:
        """What is left: the beginning of a character that was not completed."""
        return self.decoder.decode(b"", final=True)


class TextStream:
    """Of tokens whose text depends on the tokens before them: the space before the first word of a
    text is not written. `tokenizer` is of the package tokenizers; `before` are the tokens of the
    text that these continue, if there is one."""

    def __init__(self, tokenizer, before=()):
        self.tokenizer = tokenizer
        self.before = list(before)
        self.new = []           # tokens whose text is not certain yet

    def add(self, token: int) -> str:
        self.new.append(token)
        text = self.text_of_new()
        if text.endswith(BROKEN):       # the bytes of a character that is not complete, or wrong
            return ""
        return self.settle(text)

    def end(self) -> str:
        return self.settle(self.text_of_new())

    def settle(self, text: str) -> str:
        self.before += self.new
        self.new = []
        return text

    def text_of_new(self) -> str:
        """What the new tokens add to the text of those before them."""
        first = max(0, len(self.before) - ENOUGH)
        while first > 0 and self.is_inner_byte(self.before[first]):
            first -= 1
        before = self.before[first:]
        head, text = self.decode(before), self.decode(before + self.new)
        if not text.startswith(head):       # new bytes make those before wrong
            return self.decode(self.new)
        return text[len(head):]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def is_inner_byte(self, token: int) -> bool:
        return INNER_BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None


def decode(encoding, tokens) -> str:
    """The text of some tokens."""
    stream = encoding.stream()
    return "".join(map(stream.add, tokens)) + stream.end()
