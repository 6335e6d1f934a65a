"""Tokens to text, as they are drawn: a stream is given a token at a time, and returns the text that
is certain now.

    stream = encoding.stream(before)            # the tokens of the prompt
    text = "".join(map(stream.add, tokens)) + stream.end()

A character may have several tokens. It is written when it is complete.
"""
import codecs
import re

BYTE = re.compile(r"<0x[0-9A-F]{2}>")       # a token of SentencePiece that is one byte
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
        if self.is_byte(token):         # one wrong byte makes the bytes next to it wrong
            return ""
        text = self.text_of_new()
        return "" if text.endswith(BROKEN) else self.settle(text)

    def end(self) -> str:
        return self.settle(self.text_of_new())

    def settle(self, text: str) -> str:
        self.before += self.new
        self.new = []
        return text

    def text_of_new(self) -> str:
        """What the new tokens add to the text of those before them."""
        first = max(0, len(self.before) - ENOUGH)
        while first > 0 and self.is_byte(self.before[first]):   # bytes are decoded together
            first -= 1
        before = self.before[first:]
        head, text = self.decode(before), self.decode(before + self.new)
        while before and not text.startswith(head):             # new bytes make those before wrong
            before.pop()
            head, text = self.decode(before), self.decode(before + self.new)
        return text[len(head):]

    def decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=False)

    def is_byte(self, token: int) -> bool:
        return BYTE.fullmatch(self.tokenizer.id_to_token(token) or "") is not None


def decode(encoding, tokens) -> str:
    """The text of some tokens."""
    stream = encoding.stream()
    return "".join(map(stream.add, tokens)) + stream.end()
