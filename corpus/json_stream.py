"""JSON values one after another, where a line does not hold one each: an array of records, objects
over several lines, objects without a line end between them, lines that end in CR alone.

Memory is bounded: a block of the text and the longest value are held.
"""
import codecs
import io
import json
import re
from pathlib import Path
from typing import NamedTuple

from corpus.compressed import open_bytes

BLOCK = 1 << 18             # characters read at once
SPACE = re.compile("[ \\t\\n\\r\\ufeff]*")        # also the byte-order mark of a file among others
MESSAGE = {"role", "from"}  # fields of a message: an array of such is one conversation
NEAR_END = 16               # characters: longer than a literal or an escape that a block cuts
decode = json.JSONDecoder().raw_decode


class Start(NamedTuple):
    """How a text begins."""
    record: object              # the first; None if there is none
    is_by_lines: bool           # it stands on a line of its own
    is_array: bool              # it is an element of an array
    is_alone: bool              # it is all of the text, on several lines


class Values:
    """The JSON values of a text. read(n) returns at most n characters of it, and "" at its end."""

    def __init__(self, read):
        self.read = read
        self.text = ""
        self.at = 0             # what comes before is done
        self.lines = 0          # line ends that are done

    def more(self) -> bool:
        """Read on; False at the end. As much as is held, so that a long value costs its length."""
        new = self.read(max(BLOCK, len(self.text) - self.at))
        self.text = self.text[self.at:] + new
        self.at = 0
        return new != ""

    def move_to(self, at: int) -> None:
        self.lines += self.text.count("\n", self.at, at)
        self.at = at

    def next_character(self) -> str:
        """The next that is not white space, which is not done; "" at the end."""
        while True:
            self.move_to(SPACE.match(self.text, self.at).end())
            if self.at < len(self.text) or not self.more():
                return self.text[self.at:self.at + 1]

    def value(self):
        """The value that begins here. Raises ValueError."""
        while True:
            try:
                value, end = decode(self.text, self.at)
            except json.JSONDecodeError as error:
                may_go_on = error.pos >= len(self.text) - NEAR_END or "Unterminated" in error.msg
                if may_go_on and self.more():
                    continue
                line = self.lines + self.text.count("\n", self.at, error.pos) + 1
                raise BadValue(f"{error.msg} in line {line}", line) from None
            except RecursionError:
                raise ValueError("it is nested too deeply") from None
            if end == len(self.text) and self.more():       # a number may go on
                continue
            self.move_to(end)
            return value

    def elements(self):
        """Yield the values of the array that begins here."""
        self.move_to(self.at + 1)
        while self.next_character() != "]":
            yield self.value()
            if self.next_character() == ",":
                self.move_to(self.at + 1)
            elif self.next_character() != "]":
                raise BadValue(f"a comma or ] is missing in line {self.lines + 1}", self.lines + 1)
        self.move_to(self.at + 1)

    def records(self):
        """Yield each value, and of an array each of its elements, if it is not the messages of a
        conversation. Raises ValueError."""
        while (character := self.next_character()) != "":
            if character == ",":                # between objects, as in an array without brackets
                self.move_to(self.at + 1)
                continue
            if character != "[":
                yield self.value()
                continue
            elements = self.elements()
            for element in elements:
                if isinstance(element, dict) and MESSAGE & element.keys():
                    yield [element, *elements]
                else:
                    yield element

    def start(self) -> Start:
        """The first record and its place. What is not JSON in its first line is called by lines."""
        is_array = self.next_character() == "["
        line = self.lines + 1
        try:
            record = next(self.records(), None)
        except BadValue as error:
            return Start(None, error.line == line, is_array, False)
        except ValueError:
            return Start(None, True, is_array, False)
        is_one_line = self.lines + 1 == line
        following = self.next_character()
        is_done = following not in (",", "]") and (following == "" or self.lines >= line)
        is_by_lines = is_one_line and is_done
        return Start(record, is_by_lines, is_array and following in (",", "]"),
                     not is_one_line and following == "")


class BadValue(ValueError):
    """What is no JSON, and in which line."""

    def __init__(self, text: str, line: int):
        super().__init__(text)
        self.line = line


def open_text(path: Path):
    """The bytes of a file behind its byte-order mark."""
    file = open_bytes(path)
    if file.peek(len(codecs.BOM_UTF8)).startswith(codecs.BOM_UTF8):
        file.read(len(codecs.BOM_UTF8))
    return file


def start_of(path: Path) -> Start:
    """How a file of JSON begins."""
    file = open_text(path)
    with io.TextIOWrapper(file, "utf-8", errors="replace", newline="") as wrapped:
        return Values(wrapped.read).start()
