"""What cannot be read as text: one document in a thousand may be left out."""
import shlex
from pathlib import Path

from corpus.kinds import COMPRESSED, kind_of, kind_of_start, pipe
from corpus.messages import note

MOST_NOT_TEXT = 1000        # one document in so many may be left out


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


def what_it_holds(path: Path, start: bytes) -> str | None:
    """What a text is that begins with these bytes, as a clause; None if they do not tell. They are
    decompressed where the file is compressed."""
    kind = kind_of_start(start)
    if kind is None:
        return None
    name = shlex.quote(str(path))
    if path.suffix.lower() in COMPRESSED:
        return f"{kind.clause} once it is decompressed: decompress it, and then: {kind.advice}"
    return f"{kind.clause}: {kind.advice}".replace("FILE", name)


def guess(path: Path, raw: bytes) -> str:
    """What a file probably is of which these bytes are not UTF-8, and what to do."""
    odd, even = raw[1::2].count(0), raw[::2].count(0)
    if odd + even <= len(raw) // 50:
        encoding = "WINDOWS-1252"
        problem = ""
    else:
        if odd + even > len(raw) // 2 and min(odd, even) > len(raw) // 8:
            encoding = "UTF-32"
        elif 2 * min(odd, even) > max(odd, even):
            return f"{(odd + even) / len(raw):.0%} of it are NUL bytes: leave it out"
        else:
            encoding = "UTF-16LE" if odd > even else "UTF-16BE"
        problem = f"it looks like {encoding} without a byte-order mark: "
    command = pipe(path, f"iconv -f {encoding} -t UTF-8")
    return f"{problem}convert it, as by {command} > NEW{kind_of(path.name)}, or leave it out"


def check_problems(problems: list[NotText], documents: int, at_end=False) -> None:
    """Of so many documents these could not be read: one in a thousand is left out, with a note; a
    ValueError if they are more, at the end or once most documents are so."""
    count = len(problems)
    most = documents // MOST_NOT_TEXT if at_end else max(10, documents // 2)
    named = "; ".join(map(str, problems[:3]))
    if count > most:
        if count > 3:
            named += "; ..."
        raise ValueError(f"{named} ({count:,} of {documents:,} documents; one in {MOST_NOT_TEXT:,} "
                         f"would be left out)")
    if count and at_end:
        note(f"{count:,} of {documents:,} documents are left out: {named}")
