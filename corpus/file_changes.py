"""Whether a file has changed: by its bytes, or by its size and time."""
import hashlib
from pathlib import Path

from base.errors import named


def sha256_of(*paths) -> str:
    """The sha256 of these files' bytes, one file after the other."""
    digest = hashlib.sha256()
    for path in paths:
        with named(path), open(path, "rb") as file:
            hashlib.file_digest(file, lambda: digest)
    return digest.hexdigest()


def change_of(path: Path) -> tuple[int, int]:
    """The size of a file and the time of its last change, in nanoseconds."""
    status = path.stat()
    return status.st_size, status.st_mtime_ns
