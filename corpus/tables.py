"""Tables of columns, which pyarrow reads: Parquet, and Arrow as datasets.save_to_disk and Feather
write it.

A stream of Arrow has no length and no checksum. One without its end is refused, and values are
checked as far as their types allow.
"""
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from corpus.file_kinds import ARROW_FILE, STREAM_END, table_kind

ROWS_AT_ONCE = 256


@contextmanager
def open_table(path: Path):
    """Yield (schema of Arrow, batches): batches(columns=[name, ...]) yields record batches. Raises
    an ArrowException or an OSError."""
    import pyarrow
    from pyarrow import ipc, parquet
    if table_kind(path) == ".parquet":
        with parquet.ParquetFile(path, page_checksum_verification=True) as file:
            yield file.schema_arrow, partial(file.iter_batches, ROWS_AT_ONCE, use_threads=False)
        return
    with pyarrow.OSFile(str(path)) as source:
        end = source.size() - len(STREAM_END)
        is_file = source.read(len(ARROW_FILE)) == ARROW_FILE
        if not is_file and (end < 0 or source.read_at(len(STREAM_END), end) != STREAM_END):
            raise pyarrow.ArrowInvalid("it has no end of a stream")
        source.seek(0)
        reader = ipc.open_file(source) if is_file else ipc.open_stream(source)
        yield reader.schema, partial(batches_of, reader)


def batches_of(reader, columns):
    """Yield the checked record batches of a reader of Arrow."""
    batches = reader
    if hasattr(reader, "get_batch"):            # of a file, which has them in any order
        batches = map(reader.get_batch, range(reader.num_record_batches))
    for batch in batches:
        chosen = batch.select(columns)
        chosen.validate(full=True)
        yield chosen
