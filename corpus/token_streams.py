"""Tokens to text, as they are drawn: a stream is given a token at a time, and returns the text that
is certain now.

    stream = encoding.stream(before)            # the tokens of the prompt
    text = "".join(map(stream.add, tokens)) + stream.end()
"""
import codecs
import re

BROKEN = "\ufffd"           # stands for bytes that are no character
INNER_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")      # of SentencePiece: not a character's first


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


class TextStream:
    """Tokens whose text depends on those before them, as the space before a word does. A character
    is never taken back: where bytes behind it are wrong, the package writes U+FFFD in its place."""

    def __init__(self, backend, before):
        self.backend = backend
        self.before = list(before)
        self.new = []           # tokens whose text is not certain yet

    def add(self, token: int) -> str:
        self.new.append(token)
        text = self.text_of_new()
        if text.endswith(BROKEN):
            return ""
        self.before += self.new
        self.new = []
        return text

    def end(self) -> str:
        return self.text_of_new()

    def text_of_new(self) -> str:
        """What the new tokens add to the text of those before them."""
        first = max(0, len(self.before) - 8)            # so many decide how the next is written
        token_of = self.backend.id_to_token
        while first > 0 and INNER_BYTE.fullmatch(token_of(self.before[first]) or ""):
            first -= 1
        before = self.before[first:]
        head, text, alone = self.backend.decode_batch([before, before + self.new, self.new],
                                                      skip_special_tokens=False)
        return text[len(head):] if text.startswith(head) else alone
