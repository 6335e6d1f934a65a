"""The bytes of a file, decompressed where they or its name say .gz or .zst. A file that is damaged
or cut off is refused by its name: none is read in part."""
import gzip
import importlib.util
import io
import zlib
from pathlib import Path

from corpus.file_kinds import (COMPRESSED, START, compression_of, table_kind, what_it_is)

BLOCK = 1 << 18             # characters or bytes read at once, and characters encoded at once
LARGEST_WINDOW = 1 << 31    # of zstd --long=31
PACKAGES = {".zst": "zstandard", ".parquet": "pyarrow", ".arrow": "pyarrow"}        # are optional


def check_package(path: Path) -> None:
    """Raise ValueError if a package that reads this file is missing."""
    suffix = table_kind(path) or compression_of(path)
    package = PACKAGES.get(suffix)
    if package is not None and importlib.util.find_spec(package) is None:
        raise ValueError(f"{path}: the package {package} reads {suffix}: pip install {package}")


def open_bytes(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed. Reading raises ValueError if it is not whole."""
    suffix = compression_of(path)
    if suffix == ".gz":
        return io.BufferedReader(Chunks(path, gunzip(path)), BLOCK)
    if suffix == ".zst":
        return io.BufferedReader(Chunks(path, unzstd(path)), BLOCK)
    return open(path, "rb")


def gunzip(path: Path):
    """Yield the bytes of a .gz. Raises an EOFError, a BadGzipFile or a zlib.error."""
    if path.stat().st_size == 0:        # which gzip takes for an empty text
        raise EOFError("it is empty")
    with gzip.open(path) as file:
        while chunk := file.read(BLOCK):
            yield chunk


def unzstd(path: Path):
    """Yield the bytes of the frames of a .zst. Raises an EOFError, also for a file that is cut off,
    which the reader of the package ends as if it were whole."""
    check_package(path)
    import zstandard
    new_frame = zstandard.ZstdDecompressor(max_window_size=LARGEST_WINDOW).decompressobj
    frame = new_frame()
    is_between = False          # two frames
    with open(path, "rb") as file:
        while compressed := file.read(1 << 14):
            while compressed:
                if is_between:
                    frame = new_frame()
                try:
                    chunk = frame.decompress(compressed)
                except zstandard.ZstdError as error:
                    raise EOFError(str(error)) from None
                yield chunk
                is_between = frame.eof
                compressed = frame.unused_data
    if not is_between:
        raise EOFError("it ends within a frame")


def not_whole(path: Path, error: Exception) -> ValueError:
    """The error of a file that cannot be decompressed, or is no Parquet."""
    kind = what_it_is(path, other_than=path.suffix.lower())
    reason = str(error).partition("\n")[0]
    if kind is None and path.suffix.lower() in COMPRESSED:
        with open(path, "rb") as file:
            start = file.read(START)
        if start and start.isascii() and b"\0" not in start:
            kind = f"it is not compressed: give it a name without {path.suffix}"
    return ValueError(f"{path} cannot be read to its end ({reason}): "
                      f"{kind or 'it is damaged or cut off: copy or download it again'}")


class Chunks(io.RawIOBase):
    """The bytes that a generator of chunks yields, as a file."""

    def __init__(self, path: Path, chunks):
        self.path, self.chunks = path, chunks
        self.held = b""         # what is left of a chunk
        self.position = 0

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.position

    def close(self) -> None:
        self.chunks.close()
        super().close()

    def readinto(self, buffer) -> int:
        try:
            while not self.held:
                self.held = next(self.chunks)
        except StopIteration:
            return 0
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise not_whole(self.path, error) from None
        count = min(len(buffer), len(self.held))
        buffer[:count] = self.held[:count]
        self.held = self.held[count:]
        self.position += count
        return count
