"""The bytes of a file, decompressed where they or its name say .gz or .zst. A file that is damaged
or cut off is refused by its name: none is read in part."""
import gzip
import importlib
import io
import zlib
from pathlib import Path

from corpus.file_kinds import compression_of, table_kind

BLOCK = 1 << 18             # characters or bytes read at once, and characters encoded at once
LARGEST_WINDOW = 31         # of zstd --long=31
PACKAGES = {".zst": "backports.zstd", ".parquet": "pyarrow", ".arrow": "pyarrow"}   # are optional


def import_zstd():
    """The module of PEP 784: Python's own from 3.14 on, or the package."""
    try:
        return importlib.import_module("compression.zstd")
    except ImportError:
        return importlib.import_module(PACKAGES[".zst"])


def check_package(path: Path) -> None:
    """Raise ValueError if a package that reads this file is missing."""
    suffix = table_kind(path) or compression_of(path)
    if suffix not in PACKAGES:
        return
    package = PACKAGES[suffix]
    try:
        if suffix == ".zst":
            import_zstd()
        else:
            importlib.import_module(package)
    except ImportError:
        raise ValueError(f"{path}: the package {package} reads {suffix}: pip install {package}"
                         ) from None


def open_bytes(path: Path) -> io.BufferedReader:
    """The bytes of a file, decompressed. Reading raises ValueError if it is not whole."""
    suffix = compression_of(path)
    if suffix is None:
        return open(path, "rb")
    if path.stat().st_size == 0:        # which gzip takes for an empty text
        raise not_whole(path, "it is empty")
    if suffix == ".gz":
        decompressed = Decompressed(path, gzip.open(path), gzip.BadGzipFile, zlib.error)
    else:
        check_package(path)
        zstd = import_zstd()
        options = {zstd.DecompressionParameter.window_log_max: LARGEST_WINDOW}
        decompressed = Decompressed(path, zstd.open(path, options=options), zstd.ZstdError)
    return io.BufferedReader(decompressed, BLOCK)


def not_whole(path: Path, reason) -> ValueError:
    """The error of a file that cannot be decompressed, or is no table."""
    reason = str(reason).partition("\n")[0]
    return ValueError(f"{path} cannot be read to its end ({reason}): it is damaged, cut off or of "
                      f"another kind than its name says: copy or download it again")


class Decompressed(io.RawIOBase):
    """The bytes of an open file that decompresses another. `errors`: what it raises for damaged
    bytes, besides the EOFError of a file that is cut off."""

    def __init__(self, path: Path, file, *errors):
        self.path, self.file, self.errors = path, file, (EOFError, *errors)

    def readable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.file.tell()

    def close(self) -> None:
        self.file.close()
        super().close()

    def readinto(self, buffer) -> int:
        try:
            return self.file.readinto(buffer)
        except self.errors as error:
            raise not_whole(self.path, error) from None
