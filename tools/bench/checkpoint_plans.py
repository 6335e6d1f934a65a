"""What a checkpoint as a folder costs beside its numbers, on more ranks than there are here. The
real plans of all ranks are made, on meta tensors: the model has no memory, and only the table is
written.

A rank's plan is the entries of the file that runtime/folder_writer.py would write. At the first
save rank 0 receives the entries of all ranks and makes `.metadata` of them. Later saves send none,
and write the same bytes again. Every rank that reads a folder unpickles `.metadata`, and looks for
its chunks in it.

Seconds are those of this process on a CPU, whatever else runs on the machine.
"""
import io
import multiprocessing
import pickle
import threading
import time
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

from base.checkpoint_folder import FolderTensors, write_table
from base.chunks import chunks
from base.dcp_table import Entry, make_table, read_table
from base.pieces import owned_slices, owners
from checkpoint import STATE
from model import SIZES, GPTConfig
from models.llama import LlamaConfig
from parallelism.buckets import Bucket
from parallelism.build import Grid
from runtime.folder_writer import chunks_of
from tools.bench.peak_memory import resident
from tools.markdown_tables import table

# Llama 3 405B as Meta trained it with 8,192 positions (Dubey et al. 2024, tables 3 and 4).
LLAMA_405B = LlamaConfig(vocab_size=128256, seq_len=8192, n_layer=126, n_head=128, n_embd=16384,
                         n_kv_head=8, hidden=53248, rope_theta=5e5)
OPT_175B = GPTConfig(50272, **SIZES["opt-175b"])


class Layout(NamedTuple):
    cfg: GPTConfig
    dp: int
    pp: int
    tp: int
    num_shards: int         # ZeRO's; 1: --zero 0

    @property
    def grid(self) -> Grid:
        return Grid(self.dp, self.pp, self.tp)


LAYOUTS = {
    "OPT-175B, tp 8, zero 0": Layout(OPT_175B, 124, 1, 8, 1),
    "OPT-175B, tp 8, zero 1 to 3": Layout(OPT_175B, 124, 1, 8, 124),
    "Llama 405B, tp 8, pp 16, zero 1": Layout(LLAMA_405B, 128, 16, 8, 128),
}


@lru_cache
def bytes_of_zip(dims: int) -> int:
    """What torch.save adds to the numbers of a chunk."""
    file = io.BytesIO()
    one = torch.zeros((1,) * dims)
    torch.save(one, file)
    return len(file.getbuffer()) - one.nbytes


def entries_of(buckets: list[Bucket], grid: Grid, num_shards: int) -> list[Entry]:
    """What write_part returns on a rank."""
    pieces = [torch.empty(where.stop - where.start, device="meta")
              for _, _, _, where in owned_slices(buckets, grid, num_shards)]
    entries, end = [], 0
    for name, shape, offsets, chunk in chunks_of(buckets, grid, num_shards,
                                                 deque(len(STATE) * pieces)):
        length = chunk.nbytes + bytes_of_zip(chunk.dim())
        entries.append(Entry(name, tuple(shape), offsets, tuple(chunk.shape), end, length))
        end += length
    return entries


def longest_hold(action: Callable) -> tuple:
    """(the result of action(), for how many seconds of this process at most another thread could
    not run, which is ready every millisecond)"""
    longest, ended = 0.0, threading.Event()

    def tick():
        nonlocal longest
        before = time.process_time()
        while not ended.is_set():
            time.sleep(1e-3)
            now = time.process_time()
            longest = max(longest, now - before)
            before = now
    thread = threading.Thread(target=tick)
    thread.start()
    result = action()
    ended.set()
    thread.join()
    return result, longest


def peak() -> int:
    """Bytes of this process at most since it started."""
    return resident("VmHWM")


def save(layout: Layout, folder: Path) -> dict:
    """The first save, in a fresh process: {what: value}."""
    parts, seconds, longest = [[] for _ in range(layout.grid.world)], [], 0
    for grid, buckets in owners(layout.cfg, layout.grid, layout.num_shards):
        start = time.process_time()
        entries = entries_of(buckets, grid, layout.num_shards)
        seconds.append(time.process_time() - start)
        message = pickle.dumps((entries, None, None))
        longest = max(longest, len(message))
        parts[grid.rank], *_ = pickle.loads(message)
    counts = [len(entries) for entries in parts if entries]
    make_table([[]], torch.float32)                 # imports what it needs
    start = time.process_time()
    content, hold = longest_hold(lambda: make_table(parts, torch.float32))
    made = time.process_time() - start
    start = time.perf_counter()
    write_table(folder, content, {}, [0] * len(parts))
    written = time.perf_counter() - start
    return {
        "ranks": f"{len(parts):,}",
        "of which write": f"{len(counts):,}",
        "chunks of a rank": f"{median(counts):,.0f} ({max(counts):,} at most)",
        "chunks in all": f"{sum(counts):,}",
        "a rank's plan, s": f"{median(seconds):.2f} ({max(seconds):.2f} at most)",
        # gather_object makes all messages as long as the longest.
        "rank 0 receives, MB": f"{len(parts) * longest / 1e6:,.0f}",
        "to make the table, s": f"{made:.1f}",
        "during which other threads waited at most, s": f"{hold:.2f}",
        "`.metadata`, MB": f"{len(content) / 1e6:,.0f}",
        "to write it, s of the clock": f"{written:.1f}",
        "rank 0's peak memory, GB": f"{peak() / 1e9:.1f}"}


def load(layout: Layout, folder: Path) -> dict:
    """What a rank of the same layout reads before it reads numbers, in a fresh process."""
    make_table([[]], torch.float32)                 # imports what it needs
    grid, buckets = next(owners(layout.cfg, layout.grid, layout.num_shards))
    start = time.process_time()
    metadata = read_table(folder)
    read = time.process_time() - start
    start = time.process_time()
    for kind in STATE:
        wanted = []
        for bucket in buckets:
            for spec, _, where in bucket.shard_ranges:
                numbers = torch.empty(where.stop - where.start, device="meta")
                wanted += [(spec.name, offsets, chunk)
                           for offsets, chunk in chunks(spec, grid, numbers, where)]
        FolderTensors(folder, metadata, f"{kind}.").plan(wanted)
    found = time.process_time() - start
    return {
        "a rank unpickles it, s": f"{read:.1f}",
        "a rank finds its chunks, s": f"{found:.1f}",
        "its peak memory, GB": f"{peak() / 1e9:.1f}"}


def checkpoint_plans(folder: Path) -> None:
    """A column for each layout."""
    spawn = multiprocessing.get_context("spawn")
    columns = []
    for layout in LAYOUTS.values():
        column = {}
        for part in (save, load):
            with spawn.Pool(1) as fresh:            # whose memory is its own
                column |= fresh.apply(part, (layout, folder))
        columns.append(column)
    print("", *table(["", *LAYOUTS], [[what, *(column[what] for column in columns)]
                                      for what in columns[0]]), sep="\n")
