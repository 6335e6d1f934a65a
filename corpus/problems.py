"""What cannot be read as text: one document in a thousand may be left out."""
import shlex
from pathlib import Path

LFS_POINTER = "version https://git-lfs"


class NotText(ValueError):
    """Stands in place of a text that cannot be read, and says where and why."""


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
    return (f"{problem}convert it, as by iconv -f {encoding} -t UTF-8 {shlex.quote(str(path))} > "
            f"NEW{path.suffix}, or leave it out")
