"""Making a data set, and what is wrong with one: data.py and the files of corpus/.

    python -m pytest tests/test_data.py

Section                       Claims                                    Compared with
Corpora                       downloads, input, the vocabulary          a loopback server
Files that people have        kinds, links, encodings, bad lines, disks the bytes of the files
Documents                     split by seed and text; pieces; memory    GPT-2's pattern
The files of a data set       whole or not there; damage is refused     the bytes of the files
A run's data                  --data, --epochs; GPT-2's tokens          literals
Data larger than memory       what is read of cold shards               /proc/self/io
"""
import collections
import errno
import functools
import gzip
import hashlib
import http.server
import itertools
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import requests

import checkpoint
import corpus.prepare
import corpus.shards
import data
from base import errors
from corpus import (bpe, compressed, dedup_and_split, downloads, encode, formats, inputs, mixtures,
                    near_duplicates, notes_and_progress, tiktoken_tokenizers)
from corpus.formats import EOT
from corpus.prepare import prepare
from corpus.shards import SPLITS, open_shard
from corpus.tiktoken_tokenizers import TiktokenTokenizer
from corpus.tokenizers import get_tokenizer
from model import GPTConfig
from runtime import checks
from sample import plain_generate
from tests.harness import (NASTY, PAGES, ROOT, SHARED, TINY, Command, dataset, meta_of, names_in,
                           nothing, saved, set_block, shard, texts_of, write_lines, write_texts)
from tools import huggingface


# ---------------------------------------------------------------------------------------------
# Corpora: where text comes from
# ---------------------------------------------------------------------------------------------

def test_the_default_is_the_standard_library_without_tests_and_packages(tmp_path, monkeypatch,
                                                                        run_data):
    """`python data.py` reads the .py files of Python's library: equal files once, and no link that
    leads nowhere."""
    assert Path(json.__file__) in inputs.standard_library()
    for folder in ("tests", "test", "idle_test", "site-packages", "dist-packages", "a", "b"):
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / "x.txt").write_text("not read")
        (tmp_path / "lib" / folder / "x.py").write_text("some text" if folder in "ab" else folder)
    (tmp_path / "lib" / "link.py").symlink_to("nowhere")
    monkeypatch.setattr(inputs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    _, out, _ = run_data("--out", tmp_path / "out")
    assert out.startswith("1 documents, 1 duplicates dropped, 0 without text skipped; ")
    assert texts_of(tmp_path / "out", *SPLITS) == ["some text"]


@pytest.mark.parametrize("given, words", [
    ("none.txt", "there is no file or folder none.txt\n"), ("empty.txt", "no text"),
    ("tiny.txt", "no text"), ("blank.jsonl", "no text"),
    ("no\nsuch.txt", r"there is no file or folder no\nsuch.txt"),
    ("a.txt --shard_toks 9", "mean --shard-tokens?"), ("--nonsense", "--nonsense --help"),
    ("a.txt --seed -1", "--seed"), (f"a.txt --seed {2 ** 63}", f"below {2 ** 63}"),
    ("a.txt --shard-tokens 9", "1024"), (f"a.txt --shard-tokens {2 ** 31}", f"below {2 ** 31}"),
    ("--dataset=shakespeare_char", "did you mean shakespeare?"), ("--dataset none", "none"),
    ("--dataset fineweb --shards 0", "--shards below 104"),
    ("--dataset fineweb --shards 104", "--shards below 104"),
    ("--dataset shakespeare --shards 2", "only fineweb"),
    ("--dataset fineweb --tokenizer bytes", "GPT-2's tokens"),
    ("--input a.txt", "--out"), ("--output-prefix a", "--output-prefix: --help lists"),
    ("a.txt --out", "--out: expected one argument: give a value; one that"),
    ("a.txt --out a.txt", "a.txt is not a directory: give another"),
    ("a.txt --out gone", "--out gone is not a directory: give another"),
    ("a.txt --out held", "held/meta.json was made of other text"),
    ("a.txt --out .", "fineweb_train_000001.bin"),      # neither deleted nor mixed in
    ("--out d a.txt b.md", "unknown argument a.txt: --help lists the flags"),
    ("--out d --text-endings md", "leave it out"),
    ("a.txt --text-endings ,", "give md,py"), ("a.txt --text-endings jsonl", "are read anyway"),
    ("a.txt --tokenizer folder.tiktoken", "folder.tiktoken holds no tokenizer.json and "
     "no .tiktoken, but nothing: give a folder or file with one"),
    ("a.txt --tokenizer Qwen/Qwen3-8B", "tokenizer.json, `python -m tools.huggingface"),
    ("a.txt --tokenizer cl100k", "give gpt2, cl100k_base, o200k_base, bytes, a FILE.tiktoken"),
    ("a.txt --tokenizer few.tiktoken", "few.tiktoken a file that --train-tokenizer has made"),
    ("a.txt --tokenizer bad.tiktoken", "bad.tiktoken a file that --train-tokenizer has made"),
    ("a.txt --train-tokenizer 300", "--train-tokenizer: drop one"),
    ("--input a.txt --out d --train-tokenizer 256", "at least 257"),
    ("--input a.txt --out d --train-tokenizer 65537", "below 65537")])
def test_a_mistake_in_the_flags_ends_in_one_line_and_exit_2(refuse_data, given, words):
    """The flags, or those behind --input."""
    Path("a.txt").write_text("some words\n" * 100)
    Path("fineweb_train_000001.bin").write_bytes(shard([1, 2]))
    Path("empty.txt").touch()
    Path("tiny.txt").write_text("a")
    write_texts("blank.jsonl", ["", " \n"])
    Path("bad.tiktoken").write_text("<!DOCTYPE html>")
    Path("few.tiktoken").write_text("YQ== 0\n")
    Path("gone").symlink_to("nowhere")
    for folder in ("held", "folder.tiktoken"):
        Path(folder).mkdir()
    Path("held/meta.json").write_bytes(b"\xff")
    refuse_data(words, *given.split(" "))


def gz(raw):
    return gzip.compress(raw, mtime=0)


WORDS = "some words in a row\n" * 50


TAR = b"a.txt".ljust(257, b"\0") + b"ustar".ljust(255, b"\0")


@pytest.mark.parametrize("name, content, words", [
    # No text.
    ("a.txt.gz", b"", "empty copy"), ("a.txt.zst", b"", "cut off"), ("a.parquet", b"", "cut off"),
    # Not UTF-8.
    ("a.txt", b"x" * 300_000 + b"\xe4!", "byte 300000 (0xe4) iconv -f WINDOWS-1252 leave it out"),
    ("torn.txt", b"x" * 50 + "漢".encode()[:2], "byte 50"),
    ("a.txt.gz", gz(b"x" * 300_000 + b"\xe4"), "byte 300000 gunzip -c | iconv WINDOWS NEW.txt"),
    ("latin.md", b"caf\xe9 au lait", "iconv -f WINDOWS-1252"),
    ("a.jsonl", b'{"text": "ok"}\n{"text": "\xe4"}\n', "line 2"),
    ("a.txt", WORDS.encode("utf-16"), "byte 0 (0xff) iconv -f UTF-16 -t"),
    ("a.txt", WORDS.encode("utf-16-le"), "NUL bytes iconv -f UTF-16LE"),
    ("a.jsonl", '{"text": "some words"}\n'.encode("utf-16"), "iconv -f UTF-16 -t"),
    ("a.txt", WORDS.encode("utf-16-be"), "NUL bytes iconv -f UTF-16BE"),
    ("a.jsonl", '{"text": "some words"}\n'.encode("utf-32-be"), "iconv -f UTF-32BE -t"),
    ("a.txt", WORDS.encode("utf-32"), "byte 0 (0xff) iconv -f UTF-32 -t"),
    ("a.jsonl", '{"text": "some words"}\n'.encode("utf-32"), "iconv -f UTF-32 -t"),
    ("a.jsonl", '{"text": "some words"}\n'.encode("utf-32-le"), "not UTF-8 iconv -f UTF-32LE -t"),
    ("a.txt", b"ab\0bc", "NUL bytes leave it out"),
    ("a.txt", b"version https://git-lfs.github.com/spec/v1\n" * 50, "git lfs pull"),
    # Not lines of JSON.
    ("a.jsonl", b'{"text": "ok"}\n\n{"text": }\n', "line 3 JSON"),
    ("a.jsonl", b'[{"text": "a"}, {"text": ', "record 2 is not JSON cut off"),
    ("a.jsonl", b'[{"text": "a"} {"text": "b"}]', "record 2 is not JSON comma missing"),
    ("a.jsonl", b'{"text": "abcd"}\n\0\0\0\0', "line 2 is not JSON: it has 4 NUL bytes tr -d"),
    ("a.jsonl", b"<!DOCTYPE html><html>\n", "is not JSON"),
    # No strings under "text".
    ("a.jsonl", b'{"text": "\\ud800"}\n', "line 1 surrogate"),
    ("a.jsonl", b'{"text": "ok"}\n["text"]\n', 'line 2 "text"'),
    ("a.jsonl", b'{"data": [{"text": "a"}]}\n', 'no field "text", but "data" jq -c ."data"[]'),
    ("a.jsonl", b'{"content": "a", "id": 5}\n', 'line 1 has no field "text", but "content", "id"'),
    ("a.jsonl", b'"a"\n', "line 1 is a string"), ("a.jsonl", b"null\n", "line 1 is null"),
    ("a.jsonl", b'{"text": null}\n', '"text" is null'),
    ("a.jsonl", b'{"text": 5}\n', '"text" is a number'),
    ("a.jsonl", b'{"text": ["a"]}\n', '"text" is an array'),
    # Of another kind.
    ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid", "of another kind"),
    ("a.gz", b"some text", "of another kind than its name says"),
    ("a.zst", b"some text", "of another kind than its name says"),
    ("a.jsonl.gz", b"PAR1" * 20, "cannot be read to its end"),
    ("a.jsonl.gz", gz(gz(b"{}")), "is not UTF-8"),
    # What is no text, and the program that gives its text.
    ("a.txt", TAR, "NUL bytes"), ("b.tar.gz", gz(TAR), "mkdir tar -xf b.tar.gz"),
    ("a.tar", TAR, "tar -xf a.tar"), ("a.xz", b"\xfd7zXZ\0\0\4", "unxz"),
    ("a.zip", b"PK\3\4\x14\0", "unzip a.zip -d NEW"),
    ("a.docx", b"PK\3\4\x14\0", "pandoc a.docx"),
    ("a.png", b"\x89PNG\r\n\x1a\n", "leave it out"),
    ("a.pdf", b"%PDF-1.7\n%\xe2\xe3\n", "pdftotext a.pdf"),
    ("b.warc.gz", gz(b"WARC/1.0\r\n"), "warcio open('b.warc.gz'"),
    ("a.sqlite", b"SQLite format 3\0", "sqlite3 a.sqlite"),
    ("a.npy", b"\x93NUMPY\1\0v\0", "text from which it was made"),
    ("train.bin", bytes([7, 1, 9, 2, 0, 0, 200, 8] * 9), "nanoGPT NEW/gpt2_train_{i"),
    ("a.bin", shard([1, 2]), "llm.c train.py --data"),
    ("a.dat", b"\0\1\2\0\3\0\0\4" * 99, "NUL"), ("a.ogg", bytes(range(1, 256)) * 3, "not UTF-8")])
def test_a_file_that_is_not_read_is_refused_by_its_name_with_what_to_do(refuse_data, name, content,
                                                                        words):
    Path(name).write_bytes(content)
    refuse_data(f"{words} {name}", name)


@pytest.mark.parametrize("name, words", [
    ("pipe.txt", "is no file: the text is read twice"), ("/dev/null", "is no file"),
    ("gone.txt", "gone.txt is a link to nowhere, which is not there"),
    ("a.txt/b.txt", "no file or folder a.txt/b.txt"), ("empty", "empty: only it is empty"),
    ("packed", "only 2 .xz (a.xz), 1 .md (c.md): --text-endings md")])
def test_a_path_that_holds_no_text_is_refused_by_its_name(refuse_data, name, words):
    os.mkfifo("pipe.txt")
    Path("gone.txt").symlink_to("nowhere")
    for folder in ("empty", "packed"):
        Path(folder).mkdir()
    for file in ("packed/c.md", "a.txt"):
        Path(file).write_text("some text")
    for file in "ab":
        Path(f"packed/{file}.xz").write_bytes(b"\xfd7zXZ\0\0\4")
    refuse_data(f"{words} {name}", name)


def without_a_name(*_, **__):
    """A reply of requests where there is no network: its message has the names of five classes."""
    try:
        raise OSError("no such name")
    except OSError as error:
        raise requests.ConnectionError("HTTPSConnectionPool: Max retries exceeded") from error


@pytest.mark.parametrize("answer, words", [
    (dict(side_effect=requests.ConnectionError("no net")), "could not be loaded (no net): add"),
    (dict(side_effect=without_a_name), "could not be loaded (no such name): add --tokenizer bytes"),
    (dict(return_value=SimpleNamespace(content=b"a login page", raise_for_status=int)),
     "Hash mismatch")])
def test_without_gpt2s_vocabulary_one_line_offers_bytes(tmp_path, monkeypatch, run_data, answer,
                                                        words):
    """Where it cannot be downloaded the exit status is 1, and bytes are offered instead."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(requests, "get", mock.Mock(**answer))
    tiktoken = pytest.importorskip("tiktoken")
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})         # of tests before
    (tmp_path / "a.txt").write_text("some text")
    status, out, line = run_data("--out", tmp_path, "--input", tmp_path / "a.txt")
    assert (status, out, line.count("\n")) == (1, "", 1) and "TIKTOKEN_CACHE_DIR" in line
    assert words in line and "--tokenizer bytes" in line
    assert requests.get.call_args.kwargs["timeout"] == downloads.TIMEOUT      # it never hangs


BODY = np.random.default_rng(0).bytes(1 << 16).hex().encode()
SIZE = len(BODY)


@pytest.fixture
def server(monkeypatch):
    """A server on this machine. body: of each of its files; ranges: it knows Range; drop: so many
    replies end half way; length: it says how long a reply is; asked: (file, first byte) of each
    request."""
    server = SimpleNamespace(body=BODY, ranges=True, drop=0, length=True, asked=[])

    class Handler(http.server.BaseHTTPRequestHandler):
        log_message = mock.Mock()

        def do_GET(self):
            start, status = 0, 200
            if server.ranges:
                start = int(self.headers["Range"][len("bytes="):-1])
                status = 206 if start < len(server.body) else 416
            server.asked.append((Path(self.path).name, start))
            reply = server.body[start:]
            self.send_response(status)
            if server.length:
                self.send_header("Content-Length", str(len(reply)))
            self.end_headers()
            if server.drop > 0:
                reply = reply[:len(reply) // 2]
            server.drop -= 1
            self.wfile.write(reply)

    set_block(monkeypatch, 4096)
    monkeypatch.setattr(downloads.time, "sleep", nothing)        # between tries
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as httpd:
        threading.Thread(target=httpd.serve_forever, args=(0.02,), daemon=True).start()
        server.url = f"http://127.0.0.1:{httpd.server_port}"
        yield server
        httpd.shutdown()


SHA256 = hashlib.sha256(BODY).hexdigest()


@pytest.mark.parametrize("served, part, sha256, starts", [
    (dict(drop=2), b"", SHA256, [0, SIZE // 2, SIZE * 3 // 4]),     # after a lost connection it
    (dict(drop=2, ranges=False), b"", SHA256, [0, 0, 0]),           # continues, or starts over
    ({}, BODY[:SIZE // 2], SHA256, [SIZE // 2]),                    # it continues an earlier run's
    ({}, b"x" * 999, SHA256, [999, 0]),                             # or starts over if another's
    ({}, b"x" * SIZE, SHA256, [SIZE, 0]),
    ({}, b"x" * 5 * SIZE, SHA256, [5 * SIZE, 0]),
    (dict(body=b"another text"), b"", SHA256, None),
    ({}, b"", None, [0]), (dict(drop=99), b"", None, None),
    (dict(length=False, ranges=False), b"", None, None)])
def test_a_download_is_whole_in_the_end_or_refused(tmp_path, server, served, part, sha256, starts):
    """What the server does; what .part holds before; where the requests begin, of which four that
    are wrong (None) are an error. A file is whole by its sha256, if it is known, or by the length
    that the server says. A damaged one is replaced, and a whole one not asked for."""
    vars(server).update(served)
    if sha256 is not None:
        (tmp_path / "file").write_bytes(b"damaged")
    (tmp_path / "file.part").write_bytes(part)
    fetch = functools.partial(downloads.download, f"{server.url}/a", tmp_path / "file", sha256)
    if starts is None:
        with pytest.raises(ConnectionError, match="cannot download"):
            fetch()
        assert len(server.asked) == 4
    else:
        fetch()
        fetch()
        assert [start for _, start in server.asked] == starts
        assert names_in(tmp_path) == ["file"] and (tmp_path / "file").read_bytes() == BODY


def test_a_line_of_endoftext_ends_a_tiny_story(tmp_path, server, monkeypatch, run_data):
    """The same characters within a line do not. With another sha256 than that of DOWNLOADS the exit
    status is 1."""
    server.body = b"Once\nupon\n<|endoftext|>\n\nThe end <|endoftext|> not\n<|endoftext|>\n"
    for sha256, expected in [(SHA256, 1), (hashlib.sha256(server.body).hexdigest(), 0)]:
        monkeypatch.setitem(downloads.DOWNLOADS, "tinystories",
                            (f"{server.url}/file", sha256))
        status, _, error = run_data("--dataset", "tinystories", "--tokenizer", "bytes",
                                    "--out", tmp_path)
        assert status == expected and ("data.py: cannot download" in error) == (status == 1)
    assert texts_of(tmp_path, *SPLITS) == ["Once\nupon", "The end <|endoftext|> not"]


def test_finewebs_shards_are_fetched_once_and_what_has_a_name_is_whole(tmp_path, server,
                                                                       monkeypatch, run_data):
    """Two training shards and the validation shard: a download continues, a second run asks for
    nothing, a shard that is cut short is refused, and one that is missing is fetched again."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    fetch = functools.partial(run_data, "--dataset", "fineweb", "--shards", 2)
    names = [f"fineweb_{name}.bin" for name in ("val_000000", "train_000001", "train_000002")]
    val, *train = [Path("data/fineweb", name) for name in names]
    server.body = shard(range(200))
    val.parent.mkdir(parents=True)
    train[0].with_name(f"{names[1]}.part").write_bytes(server.body[:500])
    for _ in range(2):                              # the second time nothing is asked for
        status, out, error = fetch()
        assert (status, error) == (0, "") and "400 tokens to train on, 200 to validate on" in out
        assert "python train.py --data data/fineweb --out out/fineweb\n" in out
        assert server.asked == list(zip(names, [0, 500, 0]))
    assert data.TokenDataset("data/fineweb", "train", 8).meta == dict(
        tokenizer="gpt2", vocab_size=50257, bytes_per_token=None)
    os.truncate(train[1], 1100)
    status, _, error = fetch()
    assert status == 2 and "not a complete shard" in error and "remove it" in error
    train[1].unlink()
    assert fetch()[0] == 0 and server.asked[3:] == [(names[2], 0)]          # in its place
    Path("data/fineweb/meta.json").touch()
    assert "holds other shards" in fetch()[2]


def test_small_and_upper_case_input_is_read_and_the_command_fits_it(make_data):
    """Sixty .TXT documents of five characters are too little text for the default windows: the
    output says so, and its command trains on windows that fit. Of one character each: there is no
    command."""
    def made_of(length):
        Path(f"{length}").mkdir()
        for i in range(60):
            Path(f"{length}/{i}.TXT").write_text(length * chr(ord("A") + i))
        out, _ = make_data(length, "--out", f"{length}/out")
        assert out.startswith("60 documents, 0 duplicates dropped, 0 without")
        return out
    out = made_of(1)
    assert out.endswith("This is too little text to train on: add text.\n")
    assert "train.py" not in out
    out = made_of(5)
    assert f"too little text for windows of {GPTConfig().seq_len} + 1 tokens" in out
    seq_len = int(re.search(r" --seq-len (\d+)\n", out)[1])
    made = [data.TokenDataset("5/out", split, seq_len) for split in SPLITS]
    assert sum(one.n_tokens for one in made) == 360 and min(one.n_windows for one in made) > 0


@pytest.mark.parametrize("out, run", [("../mine/", "out/mine"), ("a b", "'out/a b'")])
def test_the_command_that_trains_has_an_out_of_the_datas_name(tmp_path, monkeypatch, make_data, out,
                                                              run):
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    Path("a.txt").write_text(WORDS)
    told, _ = make_data("a.txt", "--out", out)
    assert re.search(f"\npython train.py --data .* --out {run}( --seq-len .*)?\n", told), told


def test_progress_is_told_every_five_seconds(monkeypatch, capsys, make_data):
    """Mechanism of the lines on standard error: bytes done, of the total where it is known, and
    lines without text move the clock too. Each look at the clock is four seconds later."""
    clock = SimpleNamespace(monotonic=itertools.count(0, 4).__next__)
    monkeypatch.setattr(notes_and_progress, "time", clock)
    note = notes_and_progress.progress("x", 5_000_000, done=1_000_000)
    for _ in range(4):
        note(1_000_000)
    assert capsys.readouterr().err == "x: 3.0 of 5.0 MB\nx: 5.0 of 5.0 MB\n"
    _, error = make_data(write_texts("a.jsonl", [""] * 2000 + ["some text"] * 9))
    assert re.fullmatch("(reading: 0.0 MB\n)+(tokenising: 0.0 of 0.0 MB\n)*", error)


# ---------------------------------------------------------------------------------------------
# Files that people have
# ---------------------------------------------------------------------------------------------

def read_texts(*names):
    """The documents of these files, as data.py reads them."""
    return [[part if isinstance(part, formats.NotText) else str(part) for part in blocks]
            for path in map(Path, names) for blocks in formats.read_documents(path)]


def test_folders_behind_links_are_read_once_and_what_is_skipped_is_told(make_data):
    """One file here and 60 behind a link; links in a circle, to a file and a folder that are read
    anyway; other kinds, hidden ones, a named pipe, a socket, a link to nowhere."""
    for folder in ("in/sub", "far", "in/.git"):
        Path(folder).mkdir(parents=True)
    for number in range(60):
        Path(f"far/{number}.txt").write_text(f"document {number}")
    Path("in/sub/a.txt").write_text("here")
    for name, target in [("far", "../far"), ("far2", "../far"), ("up", ".."), ("gone.txt", "none"),
                         ("0.txt", "sub/a.txt"), ("self.txt", "self.txt")]:
        Path("in", name).symlink_to(target)
    for name in ("in/b.md", "in/c.md", "in/x.csv.gz", "in/LICENSE", "in/.git/x.txt", "in/._a.txt"):
        Path(name).write_text("not read")
    os.mkfifo("in/pipe.txt")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("in/socket.txt")
        out, error = make_data("in", "in/sub/a.txt")
    assert out.startswith("61 documents, 0 duplicates dropped, 0 without text")
    told, again, texts = error.splitlines()
    # The files of text, with all flags that were given.
    assert texts.startswith("note: to read the files of text, too: python data.py --input in "
                            "in/sub/a.txt --text-endings md,") and "LICENSE" in texts
    assert again == "note: in/sub/a.txt is given twice, and read once"
    assert told.startswith("note: in: 61 files are read; skipped: 2 ")
    for words in ("2 .md (b.md)", "1 .csv (x.csv.gz)", "1 without a suffix (LICENSE)",
                  "2 hidden (.git)", "2 special file (pipe.txt)", "2 unreadable (gone.txt)"):
        assert words in told, told


def test_unreadable_files_and_folders_are_told(monkeypatch, make_data, refuse_data):
    for name in ("a.txt", "locked.txt"):
        Path(name).write_text("some words")
    Path("sub").mkdir()
    access, scan = os.access, os.scandir
    monkeypatch.setattr(os, "access", lambda path, mode: "locked" not in str(path)
                        and access(path, mode))

    def scandir(path):
        if str(path).endswith("sub"):
            raise PermissionError(13, "Permission denied", path)
        return scan(path)
    monkeypatch.setattr(os, "scandir", scandir)
    assert "1 files are read; skipped: 2 unreadable (" in make_data(".")[1]
    refuse_data("locked.txt cannot be read: permission denied", "locked.txt")


def test_a_byte_order_mark_is_no_text(tmp_path, monkeypatch):
    set_block(monkeypatch, 7)
    text = "h\u00e9llo \u6f22\u5b57\r\nworld \U0001f642\u2028x\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig", newline="")
    lines = "".join(json.dumps(dict(text=t), ensure_ascii=False) + "\n" for t in (text, "\ufeffb"))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8-sig")
    assert ["".join(parts) for parts in read_texts(tmp_path / "a.txt", tmp_path / "a.jsonl")] == [
        text, text, "b"]


def plain_documents(text):
    """What lines of <|endoftext|> make of a .txt."""
    lines = text.split("\n")
    cuts = [number for number, line in enumerate(lines) if line.strip() == EOT]
    if not cuts:
        return [text]
    parts = ["\n".join(lines[begin + 1:end])
             for begin, end in itertools.pairwise([-1, *cuts, len(lines)])]
    first, *others = parts
    return [part for part in [first.rstrip(), *(part.strip() for part in others)] if part]


def test_lines_of_endoftext_cut_a_txt_wherever_blocks_end(tmp_path, monkeypatch):
    """600 random texts of such lines, with white space, within a line, at both ends, in blocks of 1
    to 40 characters, against the lines of the whole text."""
    rng = random.Random(0)
    parts = [EOT, EOT, "\n", "\n", "\n", " ", "\r\n", "a", "<|endof", "word", "\t"]
    documents = 0
    for _ in range(600):
        text = "".join(rng.choices(parts, k=rng.randrange(20)))
        set_block(monkeypatch, rng.randint(1, 40))
        (tmp_path / "a.txt").write_bytes(text.encode())
        made = ["".join(blocks) for blocks in read_texts(tmp_path / "a.txt")]
        assert [text for text in made if text] == [t for t in plain_documents(text) if t], text
        documents += len(made)
    assert documents > 500


def test_endoftext_within_a_line_stays_text_and_is_counted(make_data):
    Path("a.txt").write_text(f"one story\n{EOT}\ntwo {EOT} stories{EOT}\n")
    out, error = make_data("a.txt")
    assert out.startswith("2 documents, ")
    assert error.startswith("note: <|endoftext|> stands 2 times within a line") and "own" in error
    assert texts_of("out", *SPLITS) == ["one story", f"two {EOT} stories{EOT}"]


def test_one_document_in_a_thousand_may_be_unreadable(make_data, refuse_data):
    """A line with null and a torn one in 2,000, or a file in Latin-1 in a folder of as many: left
    out, counted, and told with their places. One more is refused."""
    lines = "".join(json.dumps(dict(text=f"text {i}")) + "\n" for i in range(1998))
    Path("in").mkdir()
    Path("in/a.jsonl").write_text('{"text": null}\n' + lines + '{"text": "torn')
    out, error = make_data("in")
    assert out.startswith(
        "1,998 documents, 0 duplicates dropped, 0 without text skipped, 2 unreadable left out; ")
    assert error.startswith("note: 2 of 2,000 documents are left out: ")
    assert 'a.jsonl line 1: "text" is null' in error and "a.jsonl line 2000 is not JSON" in error
    Path("in/b.txt").write_bytes(b"caf\xe9")
    line = refuse_data("b.txt is not UTF-8 text", "in")
    assert "3 of 2,001 documents; only one in 1,000 is tolerated" in line
    Path("in/a.jsonl").write_text(lines)
    out, error = make_data("in", "--out", "other")
    assert "1 unreadable left out" in out and "b.txt" in error and "byte 3" in error
    Path("a.jsonl").write_text('{"text": null}\n' * 20)         # one of a kind is named
    assert refuse_data("", "a.jsonl").endswith(
        'a.jsonl line 1: "text" is null, not a string; ... (11 of 11 documents; only one in 1,000 '
        'is tolerated)\n')


DOCUMENTS = ["one text\n", "\u00e9t\u00e9 \u6f22\u5b57\r\n", "", "x" * 50_000, *(f"text {i} " * 20
                                                                    for i in range(300))]


def write_kind(file, texts, field="text"):
    """These texts in a file of the kind that its name says, by the packages' own writers."""
    if file.suffix == ".parquet":
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet
        parquet.write_table(pyarrow.table({field: texts, "id": range(len(texts))}), file,
                            row_group_size=100, write_page_checksum=True)
        return
    raw = "".join(json.dumps({"id": 5, field: text}) + "\n" for text in texts).encode()
    if ".txt" in file.name:
        raw = f"\n{EOT}\n".join(texts).encode()
    if file.suffix.lower() == ".gz":
        raw = b"".join(gzip.compress(part) for part in (raw[:9000], raw[9000:]))
    elif file.suffix == ".zst":
        try:
            zstd = compressed.import_zstd()
        except ImportError:
            pytest.skip("needs backports.zstd")
        compress = functools.partial(zstd.compress,
                                     options={zstd.CompressionParameter.checksum_flag: 1})
        raw = b"".join(compress(part) for part in (raw[:9000], raw[9000:]))
    file.write_bytes(raw)


KINDS = ["a.jsonl", "a.json", "a.jsonl.gz", "a.JSON.GZ", "a.jsonl.zst", "a.json.zst", "a.parquet"]


def test_every_kind_of_file_gives_the_same_shards(make_data):
    """The same documents, with a text of its own in another field."""
    found = set()
    for name in KINDS:
        write_kind(Path(name), DOCUMENTS, "body")
        told, error = make_data(name, "--text-field", "body", "--out", f"{name}.out")
        assert told.startswith("303 documents, 0 duplicates dropped")
        assert error == "note: 304 records have fields that are not read: id\n"
        found.add(meta_of(f"{name}.out")["fingerprint"])
    assert len(found) == 1


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_compressed_txt_is_the_txt(tmp_path, suffix):
    """Cut by lines of <|endoftext|>, with a byte-order mark."""
    texts = [text.strip() for text in DOCUMENTS if text]
    file = tmp_path / f"a.txt{suffix}"
    write_kind(file, ["\ufeff" + texts[0], *texts[1:]])
    assert ["".join(parts) for parts in read_texts(file)] == texts


@pytest.mark.claim("A compressed file that is cut off or damaged is refused by its name, never "
                   "read in part.")
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.txt.zst", "a.json.zst", "a.parquet"])
def test_a_file_that_is_cut_off_or_damaged_is_refused_never_read_in_part(tmp_path, name):
    """40 of each kind: cut at a random byte, or with a random byte changed. A change that a reader
    may ignore, as of the time in a header of gzip, gives all of the text."""
    rng = random.Random(name)
    file = tmp_path / name
    write_kind(file, DOCUMENTS)
    whole, expected = file.read_bytes(), read_texts(file)
    refused = 0
    for number in range(40):
        damaged = bytearray(whole[:rng.randrange(len(whole))])
        if number % 2:
            damaged = bytearray(whole)
            damaged[rng.randrange(len(whole))] ^= rng.randrange(1, 256)
        file.write_bytes(damaged)
        try:
            assert read_texts(file) == expected
        except ValueError as error:
            refused += 1
            assert str(file) in str(error) and "\n" not in str(error)
            assert re.search("copy or download it again|it is|has no column", str(error))
    assert refused >= 30


def test_records_without_their_text_are_refused_with_what_there_is(make_data, refuse_data):
    """No such field or column; one of numbers; null, of which one in a thousand is left out."""
    pytest.importorskip("pyarrow")
    for name, words in (("a.jsonl", 'no field "text", but "'),
                        ("a.parquet", 'no column "text", but "content", "id"')):
        write_kind(Path(name), ["a"] * 9, "content")
        assert words in refuse_data("the one with the text to --text-field", name)
    refuse_data("is a number", "a.jsonl", "--text-field", "id")
    refuse_data("holds int64, not strings", "a.parquet", "--text-field", "id")
    write_kind(Path("a.parquet"), [*(f"text {i}" for i in range(900)), None])
    refuse_data('row 901: "text" is null', "a.parquet")
    write_kind(Path("a.parquet"), [*(f"text {i}" for i in range(1999)), None])
    out, error = make_data("a.parquet")
    assert 'row 2000: "text" is null' in error and "1 unreadable left out" in out


def test_a_parquet_file_with_two_texts_of_one_name_is_refused(make_data, refuse_data):
    """Other columns may share a name."""
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet
    columns = [pyarrow.array([f"{name} {i}" for i in range(50)]) for name in "abc"]
    for file, names in (("id.parquet", "id text id"), ("a.parquet", "text id text")):
        parquet.write_table(pyarrow.Table.from_arrays(columns, names=names.split()), file)
    make_data("id.parquet")
    refuse_data('a.parquet has several columns "text": rename all but one', "a.parquet")


def test_a_json_file_in_a_folder_is_read_if_it_is_by_lines(make_data, refuse_data):
    """C4's files are; settings of programs are not: they are skipped, with a note. One that is cut
    off is refused."""
    Path("in").mkdir()
    write_kind(Path("in/c4.json.gz"), DOCUMENTS)
    Path("in/config.json").write_text(json.dumps(dict(text="no", size=5), indent=2))
    for name, content in (("list", '[{"size": "a"}]'), ("one", '{"name": "a"}'),
                          ("a", '{"text": {"font": "mono"}}'),
                          ("locale", '{"messages": {"hello": "Hallo"}}')):
        Path(f"in/{name}.json").write_text(content)
    out, error = make_data("in")
    assert out.startswith("303 documents, ")
    assert "1 files are read; skipped: 5 .json without lines of " in error
    assert '{"text": ...} (a.json)' in error
    Path("in/b.json.gz").write_bytes(Path("in/c4.json.gz").read_bytes()[:500])
    refuse_data("b.json.gz cannot be read to its end", "in")


def test_zstd_of_python_is_taken_where_it_is_there(monkeypatch):
    """From Python 3.14 on."""
    module = SimpleNamespace()
    monkeypatch.setitem(sys.modules, "compression", SimpleNamespace(__path__=[]))
    monkeypatch.setitem(sys.modules, "compression.zstd", module)
    assert compressed.import_zstd() is module


@pytest.mark.parametrize("name, package", [("a.jsonl.zst", "backports.zstd"),
                                           ("a.parquet", "pyarrow")])
def test_a_package_that_is_missing_is_named_before_anything_is_read(monkeypatch, refuse_data, name,
                                                                    package):
    Path("in").mkdir()
    for file in ("0.txt", name):
        Path("in", file).write_text("some text")
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.setattr(corpus.prepare, "index_documents", None)
    for given in ("in", f"in/{name}"):
        refuse_data(f"{name}: the package {package} reads pip install {package}", given)


def test_the_recipe_splits_the_pile_by_its_sources(tmp_path):
    """The program in docs/data.md, as it stands there, on lines of three sources."""
    program = re.search(r"zstdcat train/\*.jsonl.zst \| python -c '\n(.*?)\n'\n",
                        PAGES["data.md"], re.S)[1]
    lines = [json.dumps(dict(text=f"text {i}", meta=dict(pile_set_name=name))) + "\n"
             for i, name in enumerate(["Pile-CC", "PubMed Abstracts", "Wikipedia (en)"] * 4)]
    subprocess.run([sys.executable, "-c", program], cwd=tmp_path, input="".join(lines), text=True,
                   check=True)
    assert names_in(tmp_path / "pile") == ["Pile-CC", "PubMed-Abstracts", "Wikipedia-en"]
    assert read_texts(tmp_path / "pile/Wikipedia-en/all.jsonl") == [
        [f"text {i}"] for i in (2, 5, 8, 11)]


# ---- Files of text, by their content

def make_folder():
    """A folder as people have it: 5 .md, 4 .py, a LICENSE, a picture, an archive, a .txt."""
    Path("in/sub").mkdir(parents=True)
    for i in range(5):
        Path(f"in/p{i}.md").write_text(f"page {i} \u00e9")
    for i in range(4):
        Path(f"in/sub/m{i}.PY").write_text(f"print({i})")
    Path("in/LICENSE").write_text("a licence")
    Path("in/a.txt").write_text("a text")
    Path("in/a.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\r")
    Path("in/broken.md").write_bytes(b"\0\1\2\3" * 50)
    Path("in/x.warc.gz").write_bytes(gz(b"WARC/1.0\r\nWARC-Type: response\r\n"))
    shutil.make_archive("in/sub/b", "zip", "in/sub")


def test_the_command_of_a_note_reads_the_text_of_a_folder(make_data, refuse_data):
    """As it stands there, into another --out; alone in a folder, they are refused with it."""
    make_folder()
    _, error = make_data("in")
    assert "skipped: 6 .md (" in error and "1 .zip (sub/b.zip)" in error
    command = re.search("note: to read the files of text, too: (python data.py .*)\n", error)[1]
    assert command == ("python data.py --input in --text-endings md,py,LICENSE --tokenizer bytes "
                       "--out out-2")
    out, error = make_data(*command.split()[3:])
    assert out.startswith("11 documents, ") and "to read the" not in error
    assert "1 .md that is not UTF-8 text (broken.md)" in error
    assert "page 0 \u00e9" in texts_of("out-2", *SPLITS)
    Path("in/a.txt").unlink()
    error = refuse_data("", "in", "--out", "none")
    assert "5 md" not in error and error.endswith(
        ": python data.py --input in --text-endings md,py,LICENSE --tokenizer bytes --out none\n")


@pytest.mark.parametrize("given, count", [
    ("*.MD", 6), ("md, .py", 10), ("md py", 10), ("license", 2), ("md.gz", 6), ("d", 1)])
def test_text_endings_are_how_names_end(make_data, given, count):
    make_folder()
    endings = [given] if "," in given else given.split()
    out, error = make_data("in", "--text-endings", *endings)
    assert out.startswith(f"{count} documents, ")
    assert ("--text-endings d: no file is read that ends so" in error) == (given == "d")


@pytest.mark.parametrize("name", ["a.md", "Makefile", "a.html", "a.csv", "a.ipynb", "a.md.gz",
                                  "a.gz", "notes.2024", "a.bin"])
def test_a_file_of_text_is_read_whatever_its_name(make_data, name):
    text = "h\u00e9llo, \u6f22\u5b57\nworld\n" * 30
    raw = text.encode()
    Path(name).write_bytes(gz(raw) if name.endswith(".gz") else raw)
    _, error = make_data(name)
    assert texts_of("out", *SPLITS) == [text]
    assert ("as it stands" in error) == (name in ("a.html", "a.csv", "a.ipynb"))


def test_a_bin_of_text_is_text_in_a_folder_where_one_of_tokens_is_not(tmp_path, run_data):
    """A note offers its ending; the shard beside it is skipped all the same."""
    (tmp_path / "in").mkdir()
    (tmp_path / "in/a.bin").write_text("some text " * 30)
    (tmp_path / "in/b.bin").write_bytes(shard([1, 2]))
    (tmp_path / "in/c.txt").write_text("another text " * 30)
    flags = "--input", tmp_path / "in", "--tokenizer", "bytes", "--out", tmp_path / "out"
    assert "--text-endings bin --tokenizer" in run_data(*flags)[2]
    status, out, error = run_data(*flags[:-1], tmp_path / "all", "--text-endings", "bin")
    assert status == 0 and out.startswith("2 documents, ")
    assert "skipped: 1 .bin that is not UTF-8 text (b.bin)" in error


def write_table(file, texts, kind):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import feather, ipc
    table = pyarrow.table({"text": texts})
    if kind == "feather":
        feather.write_feather(table, file)
        return
    with ipc.new_stream(str(file), table.schema) as writer:     # as datasets.save_to_disk
        writer.write_table(table, 50)


@pytest.mark.parametrize("name, write", [
    ("a.arrow", "stream"), ("a.txt", "stream"), ("data", "feather"), ("a.jsonl.gz", ".parquet"),
    ("part-00000", ".jsonl"), ("a.ndjson", ".jsonl"), ("a.jsonl.gz", ".jsonl.zst"),
    ("part-00001", ".jsonl.gz")])
def test_the_content_of_a_file_says_how_it_is_read(make_data, name, write):
    """By itself and in a folder."""
    texts = [f"text {i} " * 9 for i in range(200)]
    file = Path("in", name)
    file.parent.mkdir()
    if write in ("stream", "feather"):
        write_table(file, texts, write)
    else:
        write_kind(Path(f"b{write}"), texts)
        Path(f"b{write}").rename(file)
    for given in (file, file.parent):
        assert make_data(given)[0].startswith("200 documents, ")


def test_a_folder_of_save_to_disk_is_read_by_its_splits(make_data):
    """datasets.DatasetDict.save_to_disk: a folder for each split, with settings beside the data.
    state.json lists the files of the set: datasets.map writes cache-*.arrow beside them."""
    for split, size in (("train", 80), ("test", 20)):
        folder = Path("in", split)
        folder.mkdir(parents=True)
        texts = [f"{split} {i} " * 9 for i in range(size)]
        write_table(folder / "data-00000-of-00001.arrow", texts, "stream")
        (folder / "dataset_info.json").write_text('{\n  "features": {}\n}')
        (folder / "state.json").write_text(
            '{"_data_files": [{"filename": "data-00000-of-00001.arrow"}]}')
    write_table(folder.with_name("train") / "cache-7.arrow", ["cached"] * 9, "stream")
    Path("in/dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    out, error = make_data("in")
    assert out.startswith("80 documents, ") and "left out: 1 file" in error
    assert "1 cache of datasets" in error
    assert all(text.startswith("train") for text in texts_of("out", "train"))


def test_a_notebook_is_skipped_in_a_folder_and_is_text_by_the_command_of_the_note(make_data):
    Path("in").mkdir()
    for i in range(30):
        Path(f"in/{i}.txt").write_text(f"text {i} " * 9)
        cells = [dict(cell_type="code", source=[f"x = {i}"])]
        Path(f"in/{i}.ipynb").write_text(json.dumps(dict(cells=cells, nbformat=4), indent=1))
    out, error = make_data("in")
    assert out.startswith("30 documents, ")
    command = error.rpartition("python data.py --input ")[2].split()
    assert make_data(*command)[0].startswith("60 documents, ")


@pytest.mark.parametrize("kind", ["stream", "feather"])
def test_arrow_that_is_cut_off_is_refused(refuse_data, kind):
    file = Path("a.arrow")
    write_table(file, [f"text {i}" for i in range(200)], kind)
    whole = file.read_bytes()
    for size in (0, 5, len(whole) // 2, len(whole) - 8, len(whole) - 1):
        file.write_bytes(whole[:size])
        refuse_data("a.arrow cannot be read to its end", "a.arrow")


# ---- Splits by the names of files

def write_splits(names, documents=10):
    """Files of so many documents each, which say in which file they are."""
    for name in names:
        path = Path(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        texts = [f"document {i} of {name}\n" for i in range(documents)]
        raw = f"{EOT}\n".join(texts).encode()
        if ".json" in path.name:
            raw = "".join(json.dumps(dict(text=text)) + "\n" for text in texts).encode()
        path.write_bytes(gzip.compress(raw) if path.suffix == ".gz" else raw)


def files_of(split):
    return {text.split()[3] for text in texts_of("out", split)}


@pytest.mark.claim("Files named train, validation and test train, validate and are left out.")
@pytest.mark.parametrize("train, val, test", [
    ("in/c4-train.00000-of-01024.json.gz in/c4-train.00001-of-01024.json.gz",
     "in/c4-validation.00000-of-00008.json.gz", ""),
    ("in/train-00000-of-00002.jsonl in/train-00001-of-00002.jsonl", "in/dev.jsonl",
     "in/data_test.jsonl"),
    ("in/train/chunk1/example_train_0.jsonl in/train/more/part2.txt",
     "in/validation/chunk1/example_holdout_0.jsonl", "in/test/chunk1/example_holdout_0.jsonl"),
    ("in/TRAIN.txt in/latest.txt in/contest.txt in/development.txt in/evaluation_report.txt "
     "in/trainings.txt in/train-test.txt", "in/eval1.txt", "in/held_out.txt in/holdout.txt"),
    ("in/train.txt", "in/val.txt", "in/heldout.txt"), ("in/training.txt", "in/valid.txt", "")])
def test_names_of_files_decide_the_split(tmp_path, monkeypatch, make_data, refuse_data, train, val,
                                         test):
    """As a folder, as files, and below a folder that is itself called test."""
    (tmp_path / "test").mkdir()
    monkeypatch.chdir(tmp_path / "test")
    write_splits(f"{train} {val} {test}".split())
    flags = "--near-duplicates", "ignore"
    for given in (["in"], [path for path in Path("in").rglob("*") if path.is_file()],
                  [Path.cwd() / "in"]):
        out, error = make_data(*given, *flags)
        assert files_of("train") == set(train.split())
        assert files_of("val") == set(val.split())
        assert f"validation: {len(val.split())} file" in error
        assert (f"left out: {len(test.split())} file" in error) == bool(test)
        assert "not about 5%" not in out
        meta = meta_of("out")
        assert meta["files"] == dict(train=len(train.split()), val=len(val.split()))
        shutil.rmtree("out")
    make_data("in", *flags, "--split-names", "ignore")
    assert files_of("train") == set(f"{train} {val} {test}".split())
    refuse_data("give another --out", "in", *flags)             # the source has the names


@pytest.mark.parametrize("names, told", [
    ("in/train.txt in/test.txt in/a.txt", "test, which is left out: 1 file (in/test.txt)"),
    ("in/a.txt in/b.txt in/notes/test.txt", "none is for training"),
    ("in/a.txt in/val.txt", "none is for training"), ("in/test.txt", ""),
    ("in/train.txt in/a.txt", "")])
def test_where_names_of_files_leave_no_validation_the_split_is_drawn(make_data, names, told):
    write_splits(names.split(), 40)
    _, error = make_data("in")
    assert told in error and bool(told) == ("name" in error)
    kept = {name for name in names.split() if not (name == "in/test.txt" and "left out" in told)}
    assert files_of("train") == kept
    assert 0 < len(texts_of("out", "val")) < 20


def test_names_of_programs_are_no_splits(make_data):
    """train.py beside test_x.py, and documentation; but three .tokens of one corpus are."""
    names = ["train.py", "test_x.py", "model.py", "train.md", "eval.md", "data.md"]
    write_splits(names)
    make_data(*names)
    assert files_of("train") == set(names)
    shutil.rmtree("out")
    names = ["wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens", "train.py", "a.py"]
    write_splits(names)
    make_data(*names)
    assert files_of("train") == {"wiki.train.tokens", "train.py", "a.py"}
    assert files_of("val") == {"wiki.valid.tokens"}


@pytest.mark.parametrize("near", ["keep", "drop"])
def test_a_document_that_validates_by_its_file_does_not_train(make_data, near):
    """Equal ones, and with "drop" those with most words in common; counted."""
    words = random.Random(0).choices([f"w{i}" for i in range(5000)], k=300)
    texts = [" ".join(words[i:i + 60]) for i in range(0, 240, 60)]
    Path("in").mkdir()
    write_texts("in/train.jsonl", [*texts, texts[0], texts[1] + " end", "another"])
    write_texts("in/val.jsonl", [texts[0], texts[1], texts[1]])
    out, error = make_data("in", "--near-duplicates", near)
    assert "4 duplicates dropped" in out
    assert "note: 3 documents of files that train stand in files that validate" in error
    alike = [] if near == "drop" else [texts[1] + " end"]
    assert texts_of("out", "train") == [*texts[2:], *alike, "another"]
    assert texts_of("out", "val") == texts[:2]


def test_a_question_that_validates_by_its_file_does_not_train(make_data):
    """The same question with another answer; unless all conversations have the same one."""
    Path("in").mkdir()
    def write_pairs(name, prompts):
        write_lines(f"in/{name}.jsonl", [dict(prompt=prompt, completion=f"{name} {i}")
                                         for i, prompt in enumerate(prompts)])
    write_pairs("train", ["a", "b", "c", "c"])
    write_pairs("validation", ["b", "d"])
    out, error = make_data("in")
    assert out.startswith("5 conversations, 0 duplicates dropped")
    assert "note: 1 conversations that train have the text before the last answer of" in error
    write_pairs("validation", ["c", "c"])
    write_pairs("train", ["c"] * 9)
    assert make_data("in", "--out", "same")[0].startswith("11 conversations, ")


def test_a_split_that_holds_nothing_is_refused(make_data, refuse_data):
    Path("in").mkdir()
    for train, val, words in (("some words", " ", "validation hold no text"),
                              ("some words", "some words", "train hold no text")):
        Path("in/train.txt").write_text(train)
        Path("in/val.txt").write_text(val)
        refuse_data(words, "in")
    make_data("in", "--split-names", "ignore")


# ---- Near-duplicates

def random_words(rng, count):
    return [f"w{rng.randrange(100_000)}" for _ in range(count)]


def jaccard(one, other):
    """The share of their shingles of five words that two lists of words have in common."""
    one, other = ({tuple(words[i:i + 5]) for i in range(len(words) - 4)} for words in (one, other))
    return len(one & other) / len(one | other)


@pytest.mark.claim("Near-duplicates are found as often as the formula of MinHash says.")
def test_documents_agree_in_a_key_as_often_as_the_formula_says():
    """1,200 pairs, of which one has up to 20 words of 300 replaced: how many agree, beside the sum
    of 1 - (1 - s^8)^14 over their exact shares s; few below 0.4, nearly all above 0.9."""
    rng = random.Random(0)
    min_hash = near_duplicates.MinHash()
    pairs = []
    for _ in range(1200):
        words = random_words(rng, 300)
        changed = list(words)
        for at in rng.sample(range(300), rng.randint(1, 40)):
            changed[at] = "other"
        keys = [min_hash.keys(" ".join(each)) for each in (words, changed)]
        pairs.append((jaccard(words, changed), bool((keys[0] == keys[1]).any())))
    for low, high in ((0.0, 0.5), (0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0)):
        found = [(s, agree) for s, agree in pairs if low <= s < high]
        expected = [1 - (1 - s ** 8) ** 14 for s, _ in found]
        deviation = sum(p * (1 - p) for p in expected) ** 0.5
        assert len(found) > 50
        assert abs(sum(agree for _, agree in found) - sum(expected)) < 4 * deviation + 1
    assert not any((min_hash.keys(f"one {i}") == min_hash.keys(f"two {i}")).any() for i in range(9))


def test_the_shingles_of_a_text_are_those_of_its_words():
    """White space and case do not count; a text of fewer than five words has one shingle; a word
    longer than what is compared has one, too."""
    shingles = near_duplicates.MinHash().shingles
    assert len(shingles("a b c d e f g")) == 3
    assert np.array_equal(shingles("A\tb c\n\nD e f g "), shingles("a b c d e f g"))
    assert len(np.intersect1d(shingles("a b c d e"), shingles("x x a b c d e x"))) == 1
    assert [len(shingles(text)) for text in ("", "a", "a b c d", "x" * 300_000)] == [1] * 4
    assert not np.array_equal(shingles("a b"), shingles("a c"))


@pytest.mark.parametrize("first, last", [(0x4E00, 0x59B7), (0x3041, 0x3096), (0xE01, 0xE2E),
                                         (0x20000, 0x20500)])
def test_near_duplicates_are_found_in_scripts_without_spaces(first, last):
    """Chinese, Japanese, Thai, rare ideographs: 60 pairs of which 99% of the characters are equal,
    also among words of English; and 60 unlike texts."""
    rng = random.Random(0)
    min_hash = near_duplicates.MinHash()
    keys = []
    for number in range(60):
        text = [chr(rng.randrange(first, last)) for _ in range(1000)]
        if number % 2:
            text[::50] = [" some words "] * 20
        changed = list(text)
        for at in rng.sample(range(1000), 10):
            changed[at] = chr(rng.randrange(first, last))
        keys.append(min_hash.keys("".join(text)))
        assert (keys[-1] == min_hash.keys("".join(changed))).any()
    assert not near_duplicates.is_repeated(np.array(keys)).any()


def test_a_long_text_without_spaces_is_cut_at_its_signs():
    """Code without spaces; a long word of letters alone stays one."""
    shingles = near_duplicates.MinHash().shingles
    lines = [f"a[{i}]=b.c({i * i});" for i in range(200)]
    changed = [*lines[:100], "x=1;", *lines[101:]]
    one, other = shingles("".join(lines)), shingles("".join(changed))
    assert len(one) > 500 and len(np.intersect1d(one, other)) > 0.95 * len(one)
    assert len(shingles("a.b" * 50)) == 1           # a word of 150 bytes


def test_planted_near_duplicates_are_counted_or_dropped(make_data):
    """A hundred of 400 documents are others with one word changed: those are dropped that come
    later. Kept, the ones that validate and have their like in training are told."""
    rng = random.Random(1)
    documents = [random_words(rng, 200) for _ in range(300)]
    for number in range(100):
        documents.append([*documents[number][:100], "changed", *documents[number][101:]])
    texts = [" ".join(words) for words in documents]
    flags = write_texts("a.jsonl", texts), "--near-duplicates"
    out, error = make_data(*flags, "drop", "--out", "drop")
    assert error == "" and out.startswith("300 documents, 0 duplicates dropped, ")
    assert ", 100 near-duplicates dropped; " in out
    kept = [text for split in SPLITS for text in texts_of("drop", split)]
    assert sorted(kept) == sorted(texts[:300])
    out, error = make_data(*flags, "keep", "--out", "keep")
    assert out.startswith("400 documents, ")
    train, val = (texts_of("keep", split) for split in SPLITS)
    pairs = list(zip(texts[:100], texts[300:]))
    seen = sum((one in val) != (other in val) for one, other in pairs)
    assert seen > 0 and error == (
        f"note: {seen} of {len(val)} validation documents have a near-duplicate in training, so "
        f"the validation loss is too good: --near-duplicates drop keeps the first of those that "
        f"are alike (100 less)\n")
    assert meta_of("keep")["near_duplicates"] == 100
    assert make_data(*flags, "ignore", "--out", "ignore")[1] == ""
    assert meta_of("keep")["fingerprint"] == meta_of("ignore")["fingerprint"]


def book_that_validates(short, seed=0):
    """A text of 240,000 bytes that the seed draws for validation, beside so many short ones."""
    for number in itertools.count():
        text = f"word {number:4} " * 24_000
        digest = hashlib.blake2b(text.encode(), digest_size=16, salt=bytes(16)).digest()
        if int.from_bytes(digest[:8], "little") < 2 ** 64 // 20:
            return [text, *(f"short text {i}" for i in range(short))]


def test_a_book_that_is_drawn_for_validation_gives_its_end_alone(make_data):
    """Without the rule it would leave 600 of 240,000 bytes for training. Documents of like sizes
    are never cut; where the split is far from 95 to 5 for another reason, a note says it."""
    texts = book_that_validates(40)
    Path("in").mkdir()
    for number, text in enumerate(texts):
        Path(f"in/{number}.txt").write_text(text)
    out, error = make_data("in")
    assert error == "" and "note" not in out
    of_train, of_val = (texts_of("out", split) for split in SPLITS)
    assert 0.04 < len("".join(of_val)) / len("".join(texts)) < 0.06
    end, = (text for text in of_val if text in texts[0])
    assert texts[0].endswith(end) and texts[0][:-len(end)] in of_train
    Path("in/0.txt").write_text("word 1 " * 40_000)             # the book trains
    assert "note: 0.0" in make_data("in", "--out", "other")[0]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path, number):
    """Twice, as an impatient user sends it, while data.py tokenises."""
    (tmp_path / "a.txt").write_text("some words\n" * 1000)
    (tmp_path / "wrapper.py").write_text(f"""
import os, signal, sys, corpus.prepare, corpus.program
signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background ignores it
def stop(*_):
    os.kill(os.getpid(), {int(number)})
corpus.prepare.append_tokens = stop
import tempfile
cleanup = tempfile.TemporaryDirectory.cleanup
tempfile.TemporaryDirectory.cleanup = lambda self: (stop(), cleanup(self))
sys.exit(corpus.program.main())
""")
    done = Command(tmp_path / "wrapper.py", "--input", tmp_path / "a.txt", "--out", tmp_path / "d",
                   "--tokenizer", "bytes").finish()
    assert (*done[:2], done[2].count("\n")) == (1, "", 1) and "data.py: stopped: " in done[2]
    assert names_in(tmp_path / "d") == []


def test_the_next_run_removes_what_a_killed_one_left_but_not_of_a_live_one(tmp_path):
    """Into the same --out: one was killed (SIGKILL) while it tokenised, another waits there."""
    (tmp_path / "a.txt").write_text("some words\n" * 1000)
    (tmp_path / "wrapper.py").write_text("""
import sys, time, corpus.prepare, corpus.program
def wait(folder, *_):
    (folder / "train_000000.bin").touch()
    time.sleep(100)
corpus.prepare.append_tokens = wait
sys.exit(corpus.program.main())
""")
    flags = ["--input", tmp_path / "a.txt", "--out", tmp_path / "d", "--tokenizer", "bytes"]
    found = {}
    for name in ("killed", "live"):
        process = Command(tmp_path / "wrapper.py", *flags)
        end = time.monotonic() + 60
        while time.monotonic() < end and name not in found:
            for folder in (tmp_path / "d").glob(".new-*/train_000000.bin"):
                if folder.parent.name not in found.values():
                    found[name] = folder.parent.name
            time.sleep(0.02)
        if name == "killed":
            process.send_signal(signal.SIGKILL)
            process.process.join()
    assert Command("data.py", *flags).finish()[0] == 0
    assert names_in(tmp_path / "d") == [found["live"], "meta.json", "train_000000.bin",
                                        "val_000000.bin"]
    process.send_signal(signal.SIGTERM)
    assert process.finish()[0] == 1 and not list((tmp_path / "d").glob(".new-*"))


def test_an_identical_job_leaves_what_is_there(run_data, tmp_path):
    """The text is read once, to know it; also for a tokenizer that is trained. A shard that is
    missing is made again."""
    (tmp_path / "a.txt").write_text("some words and others\n" * 500)
    out = tmp_path / "d"
    flags = "--input", tmp_path / "a.txt", "--train-tokenizer", 270, "--out", out
    first = run_data(*flags)
    made = {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    with mock.patch.object(corpus.prepare, "train_tokenizer", None):
        assert run_data(*flags) == (*first[:2], f"note: {out} holds the shards of this text "
                                                f"already: they are left as they are\n")
    assert made == {path.name: path.stat().st_mtime_ns for path in out.iterdir()}
    (out / "val_000000.bin").unlink()
    assert run_data(*flags)[:2] == first[:2] and "val_000000.bin" in names_in(out)


def test_a_stopped_download_says_that_it_continues(tmp_path, server, monkeypatch, run_data):
    monkeypatch.setitem(downloads.DOWNLOADS, "tinystories", (f"{server.url}/file", None))
    monkeypatch.setattr(downloads, "progress", mock.Mock(side_effect=KeyboardInterrupt))
    status, out, error = run_data("--dataset", "tinystories", "--out", tmp_path / "d")
    assert (status, out) == (1, "")
    assert error == "data.py: stopped: the same command continues the download\n"


class Full:
    """A file whose disk has no space left."""
    def __init__(self, number):
        self.number = number

    def __call__(self, path, *arguments, **options):
        file = open(path, *arguments, **options)
        if any(mode in "".join(map(str, arguments)) for mode in "wa+"):
            return mock.MagicMock(wraps=file, write=mock.Mock(
                side_effect=OSError(self.number, os.strerror(self.number))),
                __enter__=lambda self: self, __exit__=lambda self, *_: file.close())
        return file


@pytest.mark.parametrize("number, status", [(errno.ENOSPC, 1), (errno.EROFS, 2)])
def test_an_error_of_the_disk_has_its_path_and_what_to_do(tmp_path, monkeypatch, run_data, number,
                                                          status):
    """Of writing, whose errors have no path of their own."""
    (tmp_path / "a.txt").write_text(WORDS)
    monkeypatch.setattr(corpus.shards, "open", Full(number), raising=False)
    done = run_data("--input", tmp_path / "a.txt", "--tokenizer", "bytes", "--out", tmp_path / "d")
    assert (*done[:2], done[2].count("\n")) == (status, "", 1) and "Errno" not in done[2]
    assert re.fullmatch(rf"data.py: {tmp_path}/d/.new-\w+/(train|val)_000000.bin: "
                        rf"{os.strerror(number)}(?P<needed>.*?): \w.*\n", done[2]), done[2]
    assert ("(the shards need about 1 MB)" in done[2]) == (number in errors.NO_SPACE)
    assert names_in(tmp_path / "d") == []


def test_a_download_to_a_full_disk_names_its_file(tmp_path, server, monkeypatch):
    monkeypatch.setattr(downloads, "open", Full(errno.ENOSPC), raising=False)
    with pytest.raises(OSError) as error:
        downloads.download(f"{server.url}/a", tmp_path / "file")
    assert errors.describe(error.value) == (
        f"{tmp_path}/file.part: No space left on device: free some space there, or give another "
        f"path")


def test_an_out_that_cannot_be_written_is_refused_before_the_text_is_read(tmp_path, monkeypatch,
                                                                          refuse_data):
    Path("a.txt").write_text(WORDS)
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.W_OK)
    monkeypatch.setattr(corpus.prepare, "index_documents", None)
    assert refuse_data("", "a.txt", "--out", tmp_path / "no/such") == (
        f"data.py: {tmp_path}: it cannot be written: give another path\n")


@pytest.mark.parametrize("redirect, status, words", [
    ("> /dev/full", 1, "standard output cannot be"),
    pytest.param(">&-", 0, "", marks=pytest.mark.slow),
    pytest.param("| true", 1, "", marks=pytest.mark.slow)])
def test_a_standard_output_that_is_closed_or_full_takes_no_data_set_away(tmp_path, redirect, status,
                                                                         words):
    (tmp_path / "a.txt").write_text(WORDS)
    command = f"{sys.executable} {ROOT / 'data.py'} --input a.txt --tokenizer bytes --out d"
    done = subprocess.run(["bash", "-c", f"{command} {redirect}; exit ${{PIPESTATUS[0]}}"],
                          cwd=tmp_path, stderr=subprocess.PIPE, text=True)
    assert done.returncode == status and done.stderr.count("\n") == len(words[:1])
    assert words in done.stderr and (tmp_path / "d/meta.json").exists()


def test_names_that_a_console_cannot_show_end_in_no_traceback(tmp_path):
    """An ASCII console, and a name that is not UTF-8."""
    for number, name in enumerate([b"\xc3\xa9.txt", b"\xe9.txt"]):
        with open(os.path.join(os.fsencode(tmp_path), name), "w") as file:
            file.write(f"{number} some words\n" * 100)
    for file, environment in ((b"\xc3\xa9", dict(PYTHONIOENCODING="ascii")),
                              (b"\xe9", dict(PYTHONUTF8="1"))):
        done = subprocess.run(
            [sys.executable, ROOT / "data.py", "--tokenizer", "bytes", "--input", file + b".txt",
             "--out", b"d" + file], cwd=tmp_path, env=os.environ | environment,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        assert (done.returncode, done.stderr) == (0, b"") and b"torchrun" in done.stdout


# ---------------------------------------------------------------------------------------------
# Documents: their split and their pieces
# ---------------------------------------------------------------------------------------------

def test_seed_and_text_alone_decide_the_split_of_a_document(monkeypatch, make_data):
    """Each of 400 documents is in one split, in the order of the input, with its text unchanged,
    <|endoftext|> within it too. Another order, or fewer documents, does not move one to the other
    split; another seed does. Of 20 documents at least one validates and one trains."""
    monkeypatch.setattr(dedup_and_split.os, "cpu_count", lambda: 1)  # 4 jobs, 3 under way
    Path("in").mkdir()
    Path("in/empty.txt").touch()
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)) for i in range(400)]

    def split(texts, seed=0):
        shutil.rmtree("my data", ignore_errors=True)
        write_texts("in/a.jsonl", texts)
        told, _ = make_data("in", "--out", "my data", "--seed", seed)
        assert "python train.py --data 'my data' --out 'out/my data'" in told
        assert f"{len(texts)} documents, 0 duplicates dropped, 1 without text skipped" in told
        to_train, val = (texts_of("my data", split) for split in SPLITS)
        assert to_train == [t for t in texts if t not in val] and min(len(to_train), len(val)) > 0
        assert val == [t for t in texts if t not in to_train]
        meta = meta_of("my data")
        assert meta["bytes_per_token"] == sum(len(t.encode()) for t in val) / meta["tokens"]["val"]
        return set(val)
    first = split(texts)
    assert 5 <= len(first) <= 40 and split(texts[::-1]) == first != split(texts, 1)
    assert split(texts[:300]) == first & set(texts[:300])
    few = [len(split(texts[:20], seed)) for seed in range(12)]
    assert min(few) == 1 and max(few) < 20


def test_few_documents_each_give_their_last_5_percent_in_llm_cs_shards(tmp_path, monkeypatch,
                                                                       run_data):
    """With fewer than 20 documents each is cut at a character, at most 5% from its end. Duplicates
    and blank documents are dropped and counted, line ends stay, and a shard has llm.c's header and
    --shard-tokens tokens."""
    set_block(monkeypatch, 70)
    texts = ["é" * 101, "abcdefghij" * 200, "漢字" * 40 + "x", "one text\n", "one text\r\n"]
    for number, text in enumerate([*texts, texts[1], texts[3], " \n", "\n"]):
        (tmp_path / f"{number}.txt").write_bytes(text.encode())
    status, told, _ = run_data("--input", tmp_path, "--tokenizer", "bytes", "--out",
                               tmp_path / "out", "--shard-tokens", 1024)
    assert status == 0 and told.startswith("5 documents, 2 duplicates dropped, 2 without text skip"
                                           "ped; 2,342 tokens to train on, 130 to validate on.\n")
    assert texts_of(tmp_path / "out", *SPLITS) == texts
    tails = [len(tail.encode()) for tail in texts_of(tmp_path / "out", "val")]
    assert tails == [10, 100, 13, 1, 1]
    for name, count in [("train_000000", 1024), ("train_000001", 1024), ("train_000002", 294),
                        ("val_000000", 130)]:
        raw = (tmp_path / "out" / f"{name}.bin").read_bytes()
        assert np.frombuffer(raw[:1024], "<i4").tolist() == [20240520, 1, count] + [0] * 253
        assert len(raw) == 1024 + 2 * count


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_the_pieces_of_a_text_encode_to_the_tokens_of_the_whole(monkeypatch, name):
    """Mechanism of the bounded memory: the pieces of 300 texts have the words of the whole, by the
    tokenizer's own pattern, and BPE merges nothing across words. Cut anywhere, a third of these
    texts would have others. A text without white space is cut at BLOCK."""
    import regex
    from tiktoken_ext import openai_public
    if name == "r50k_base":
        pattern = openai_public.r50k_pat_str
    else:
        with mock.patch.object(openai_public, "load_tiktoken_bpe", return_value={}):
            pattern = getattr(openai_public, name)()["pat_str"]
    pattern = regex.compile(pattern)

    def words(parts):
        return [word for part in parts for word in pattern.findall(part)]

    def cut(blocks):
        places = tiktoken_tokenizers.cut_of(name)
        splits, (begin, *pieces) = zip(*encode.split_document(blocks, 10 ** 6, places))
        assert set(splits) == {"train"} and begin == ""
        return pieces

    rng = random.Random(0)
    cut_anywhere = whole = 0
    for size in rng.choices(range(100, 200), k=300):
        text = "".join(rng.choices([*NASTY, "!\n", "a.\n\n", " (", "1234", "\r"], k=100))
        set_block(monkeypatch, size)
        pieces = cut(text[i:i + 7] for i in range(0, len(text), 7))
        assert "".join(pieces) == text and max(map(len, pieces)) <= size
        if max(map(len, pieces)) < size:            # a place was found for each
            whole += 1
            assert words(pieces) == words([text]), text
        cut_anywhere += words(text[i:i + size] for i in range(0, len(text), size)) != words([text])
    assert cut_anywhere > 100 and whole > 100
    assert cut(["x" * 500]) == ["x" * size] * (500 // size) + ["x" * (500 % size)]


def test_memory_does_not_grow_with_the_size_of_a_document(tmp_path, monkeypatch):
    """Mechanism of the bounded memory: ten times the text takes at most 100 kB more."""
    set_block(monkeypatch, 4096)
    monkeypatch.setattr(dedup_and_split.os, "cpu_count", lambda: 2)
    peaks = []
    for size in (100_000, 1_000_000):
        (tmp_path / "a.txt").write_text("All work and no play. " * (size // 22))
        tracemalloc.start()
        prepare([tmp_path / "a.txt"], tmp_path / f"{size}", "bytes")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, peaks


# ---------------------------------------------------------------------------------------------
# The files of a data set
# ---------------------------------------------------------------------------------------------

def test_a_data_set_stays_until_the_new_one_is_whole(tmp_path):
    """Other text or flags for the same --out are refused before anything is made, because a run
    may train on it. After a kill while the new files take their place the data set is refused as
    damaged, not taken for one of GPT-2's tokens; the same text and flags mend it, to the bit."""
    text, out, letters = tmp_path / "a.txt", tmp_path / "new", "abcdefghij" * 500
    text.write_text(letters)
    make = functools.partial(prepare, [text], out, "bytes")
    replace_file = os.replace

    def killed(path, target):
        if target.name == "meta.json":
            raise KeyboardInterrupt
        replace_file(path, target)
    with mock.patch.object(os, "replace", killed), pytest.raises(KeyboardInterrupt):
        make()
    with pytest.raises(ValueError, match="meta.json is damaged.*run data.py again"):
        data.TokenDataset(out, "train", 4)
    fingerprint = make()["fingerprint"]
    assert names_in(out) == ["meta.json", "train_000000.bin", "val_000000.bin"]
    before = {path: path.read_bytes() for path in out.iterdir()}
    assert fingerprint == hashlib.sha256(before[out / "train_000000.bin"]
                                         + before[out / "val_000000.bin"]).hexdigest()
    with mock.patch.object(corpus.prepare, "tokenise", side_effect=OSError):
        assert make()["fingerprint"] == fingerprint          # it is not made again
    (out / "train_000000.bin").write_bytes(b"damaged")
    with mock.patch.object(corpus.prepare, "tokenise", side_effect=OSError), pytest.raises(OSError):
        make()
    (out / "train_000000.bin").write_bytes(before[out / "train_000000.bin"])
    for other, flags in [(letters, dict(shard_tokens=1024)), (letters, dict(seed=1)),
                         (letters, dict(shard_tokens=10 ** 6)),      # the beginning of 10 ** 8
                         (letters[:-1] + "J", {})]:
        text.write_text(other)
        with pytest.raises(ValueError, match="of other text, .* give another --out, or remove"):
            make(**flags)
    assert {path: path.read_bytes() for path in out.iterdir()} == before
    text.write_text(letters)
    (out / "val_000000.bin").write_bytes(b"damaged")
    assert make()["fingerprint"] == fingerprint
    assert {path: path.read_bytes() for path in out.iterdir()} == before


@pytest.mark.parametrize("before, after", [("some words\n", "more words\n"),      # of one size
                                           (f"some\n{EOT}\nwords\n", "some\n")])
def test_input_that_changes_between_the_passes_ends_in_one_line(refuse_data, before, after):
    Path("a.txt").write_text(before)
    tokenise = corpus.prepare.tokenise

    def then_changes(*arguments):
        Path("a.txt").write_text(after)
        return tokenise(*arguments)
    with mock.patch.object(corpus.prepare, "tokenise", then_changes):
        assert refuse_data("", "a.txt") == (
            "data.py: a.txt changed while it was read: run data.py again\n")


def test_a_token_beyond_the_vocabulary_is_found_by_exactly_one_rank(tmp_path):
    """Wherever it stands in two shards, which three ranks share."""
    for at in (0, 66_666, 66_667, 133_334, 199_999, 200_000, 299_999):
        tokens = np.full(300_000, 256)
        tokens[at] = 257
        bad = dataset(tmp_path, {"train_0": tokens[:200_000], "train_1": tokens[200_000:]})
        found = []
        for part in range(3):
            try:
                bad.mixture.check(part, 3)
            except ValueError as error:
                found.append(str(error))
        file = "train_0.bin" if at < 200_000 else "train_1.bin"
        assert len(found) == 1 and f"{file} holds token 257, beyond a vocabulary of 257" in found[0]


@pytest.mark.parametrize("file, damage, words", [
    ("train_0.bin", shard(range(20), magic=20240521), "20240521 no header nanoGPT data.py --input"),
    ("train_0.bin", shard(range(20), version=2), "20240520, 2"),
    ("train_0.bin", shard(range(20), count=21), "21 1064"), ("train_0.bin", shard([]), "1024"),
    ("train_0.bin", shard([1])[:5], "5 bytes"), ("train_0.bin", b"", "0 bytes"),
    ("train_0.bin", shard([1]), "1 tokens are too few for a window of 4 + 1: give more text"),
    ("train_0.bin", shard(range(4)), "4 tokens 4 + 1: give more text, or --seq-len 3 or less"),
    ("meta.json", b"[]", ""), ("meta.json", b'{"tokenizer": "gpt2"}', "")])
def test_a_damaged_data_set_is_refused_with_its_file_and_numbers(tmp_path, file, damage, words):
    """Five tokens make a window of 4 + 1; with the damage the ValueError names file and cause."""
    assert dataset(tmp_path, {"train_0": range(5)}).n_windows == 1
    (tmp_path / file).write_bytes(damage)
    with pytest.raises(ValueError) as error:
        data.TokenDataset(tmp_path, "train", 4)
    assert all(word in str(error.value) for word in [file, *words.split()])


def test_shards_of_equal_names_and_sizes_are_told_apart_by_their_tokens(tmp_path):
    """Without meta.json: two folders with another token at the start, in the middle or at the end
    of one of two shards are not the same text, and a copy is."""
    tokens = np.random.default_rng(0).integers(50257, size=1_000_000)
    fingerprints = set()
    for number, at in enumerate([None, None, 0, 3 * 10 ** 5, -1]):
        folder = tmp_path / str(number)
        changed = tokens.copy()
        if at is not None:          # other text of the same length
            changed[at:at + 200_000 if at > 0 else None] = 7
        dataset(folder, dict(train_0=range(9), train_1=changed, val_0=range(9)))
        (folder / "meta.json").unlink()
        fingerprints |= set(data.TokenDataset(folder, "train", 4).mixture.sources)
    assert len(fingerprints) == 4
    with pytest.raises(ValueError, match="hold the same text"):
        data.TokenDataset(f"{tmp_path / '0'}=1,{tmp_path / '1'}=1", "train", 4)
    both = data.TokenDataset(f"{tmp_path / '0'}=1,{tmp_path / '2'}=1", "train", 4)
    assert len(both.mixture.sources) == 2


def test_a_shard_that_meta_json_counts_and_is_missing_is_told(tmp_path):
    (tmp_path / "a.txt").write_text("some words\n" * 500)
    prepare([tmp_path / "a.txt"], tmp_path / "d", "bytes", shard_tokens=2000)
    whole = data.TokenDataset(tmp_path / "d", "train", 4)
    (tmp_path / "d/train_000001.bin").rename(tmp_path / "1.bin")
    with pytest.raises(ValueError, match=f"3,226 train .* says {whole.n_tokens:,}: a shard is mis"):
        data.TokenDataset(tmp_path / "d", "train", 4)


def test_more_shards_than_open_files_are_read(tmp_path):
    """1,100 shards where a process may have 256 open files: each window of an epoch is read, in
    the order of the run, and other files can be opened. The check reads all of them."""
    for number in range(1100):
        (tmp_path / f"fineweb_train_{number:06d}.bin").write_bytes(shard(range(number, number + 9)))
    (tmp_path / "program.py").write_text("""
import resource, sys, data
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
made = data.TokenDataset(sys.argv[1], "train", 4)
made.mixture.check(0, 1)
ids = made.window_ids(1, 0, made.n_windows)
tokens = made.tokens_of(ids)
assert (tokens[:, 0] == ids // 2 + ids % 2 * 4).all()
files = [open(sys.argv[0]) for _ in range(64)]
print(len(ids), len(made.mixture.shards.mapped))
""")
    assert Command(tmp_path / "program.py", tmp_path).finish() == (0, "2200 64\n", "")


def test_names_that_are_not_of_a_split_are_told(tmp_path):
    (tmp_path / "text_document.bin").touch()
    with pytest.raises(FileNotFoundError, match="the name text_document.bin has no word train"):
        data.TokenDataset(tmp_path, "train", 4)
    with pytest.raises(FileNotFoundError, match="no train shards.*this is a file"):
        data.TokenDataset(tmp_path / "text_document.bin", "train", 4)


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("{")])
def test_what_the_message_of_a_lost_or_damaged_meta_json_advises_works(tmp_path, damage):
    (tmp_path / "a.txt").write_text("some words\n" * 100)
    make = functools.partial(prepare, [tmp_path / "a.txt"], tmp_path / "d", "bytes")
    make()
    damage(tmp_path / "d/meta.json")
    with pytest.raises(ValueError, match="remove (it and )?the shards,? and run data.py again"):
        data.TokenDataset(tmp_path / "d", "train", 4)
    for path in (tmp_path / "d").iterdir():
        path.unlink()
    make()
    assert data.TokenDataset(tmp_path / "d", "train", 4).n_windows > 0


# ---------------------------------------------------------------------------------------------
# A tokenizer of one's own
# ---------------------------------------------------------------------------------------------

def plain_bpe(text, n_tokens):
    """Byte-pair encoding that counts all pairs again for each token."""
    words = collections.Counter()
    for word, count in bpe.count_words([text]).items():
        words[tuple(bytes([byte]) for byte in word.encode())] += count
    number = {bytes([byte]): byte for byte in range(256)}
    while len(number) < n_tokens:
        pairs = collections.Counter()
        for word, count in words.items():
            for pair in itertools.pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        best = max(pairs, key=lambda pair: (pairs[pair], -number[pair[0]], -number[pair[1]]))
        number.setdefault(best[0] + best[1], len(number))
        merged = collections.Counter()
        for word, count in words.items():
            parts = list(word)
            at = 0
            while at < len(parts) - 1:
                if (parts[at], parts[at + 1]) == best:
                    parts[at:at + 2] = [best[0] + best[1]]
                at += 1
            merged[tuple(parts)] += count
        words = merged
    return list(number)


@pytest.mark.claim("`--train-tokenizer` makes the tokens of plain byte-pair encoding.")
def test_trained_tokens_are_those_of_plain_byte_pair_encoding():
    """Of a program, and of random texts of three letters: also where pairs overlap, where two pairs
    make one token (as "aba" of "ab", "a" and of "a", "ba"), and where a text has fewer. Each token
    above the bytes is merged from two earlier ones."""
    rng = random.Random(0)
    texts = [((ROOT / "train.py").read_text(), 500), ("".join(NASTY) * 3, 330), ("", 300)]
    for _ in range(100):
        texts.append(("".join(rng.choices("ab c", k=rng.randrange(1, 200))),
                      257 + rng.randrange(60)))
    for text, n_tokens in texts:
        tokens = bpe.train_bpe([text], n_tokens)
        assert tokens == plain_bpe(text, n_tokens) and len(set(tokens)) == len(tokens)
        ranks = tiktoken_tokenizers.read_ranks(tiktoken_tokenizers.write_tokens(tokens))
        merges = bpe.find_merges(ranks)
        assert [left + right for left, right in merges] == tokens[256:]
        assert all(max(ranks[left], ranks[right]) < number
                   for number, (left, right) in enumerate(merges, 256))


@pytest.mark.filterwarnings("ignore")
def test_a_tokenizer_of_ones_own_goes_from_text_to_samples_and_transformers(
        run_data, run_train, run_sample, tmp_path, monkeypatch):
    """It is trained on what trains, lies beside the shards and in the checkpoint, and its name is
    of its content: the same text elsewhere gives the same. Another data set takes its file."""
    monkeypatch.chdir(tmp_path)
    text = ((ROOT / "train.py").read_text() + (ROOT / "data.py").read_text()).replace("|", "")
    Path("a.txt").write_text(text)
    get = corpus.prepare.get_tokenizer

    def without_gpt2(name, own=None):
        if name == "gpt2":
            raise ConnectionError
        return get(name, own)
    monkeypatch.setattr(corpus.prepare, "get_tokenizer", without_gpt2)
    for out in ("one", "two"):
        status, told, error = run_data("--input", "a.txt", "--train-tokenizer", 600, "--out", out)
        assert (status, error) == (0, "")
    meta, other = meta_of("one"), meta_of("two")
    name = meta["tokenizer"]
    assert name == other["tokenizer"] and meta["vocab_size"] == 600
    own = get_tokenizer(name, Path(f"one/{name}.tiktoken").read_text())
    ending = text[-meta["text_bytes"]["val"]:]              # what validates; the text is ASCII
    per_token = len(ending) / len(own.encode_ordinary(ending))
    assert f"{per_token:.2f} bytes a token of validation text.\n" in told
    tokens = np.concatenate([open_shard(Path(f"one/{split}_000000.bin"))
                             for split in SPLITS]).tolist()
    assert own.encoding.decode([token for token in tokens if token != own.eot_token]) == text
    Path(f"two/{name}.tiktoken").rename("renamed.tiktoken")
    Path("b.txt").write_text(text[:5000])
    assert run_data("--input", "b.txt", "--tokenizer", "renamed.tiktoken", "--out", "b")[0] == 0
    assert data.TokenDataset("one=1,b=1", "train", 16).meta["tokenizer"] == name
    assert run_train("--data", "one", "--out", "o", *TINY)[0] == 0
    Path("o/latest.pt").rename("alone.pt")
    shutil.rmtree("one")
    status, sampled, _ = run_sample("--ckpt", "alone.pt", "--prompt", "def ", "--max-tokens", 5)
    assert status == 0 and sampled.startswith("def ")
    transformers = pytest.importorskip("transformers")
    huggingface.export_model(Path("alone.pt"), Path("hf"))
    theirs = transformers.AutoTokenizer.from_pretrained("hf")
    for sample in [*NASTY, " ".join(NASTY), text[:3000]]:
        assert theirs(sample)["input_ids"] == own.encoding.encode(sample, allowed_special="all")
    assert theirs.eos_token_id == own.eot_token == 599
    huggingface.import_model("hf", Path("back.pt"))
    again = checkpoint.load(Path("back.pt"))
    assert again["tokenizer_file"] == Path("renamed.tiktoken").read_text()
    assert get_tokenizer(again["tokenizer"], again["tokenizer_file"]).n_vocab == 600


@pytest.fixture
def cl100k(monkeypatch):
    """A tokenizer with cl100k_base's pattern, and 70,000 tokens of its kind in place of its own."""
    import tiktoken
    from tiktoken_ext.openai_public import cl100k_base       # its vocabulary would be downloaded
    with mock.patch("tiktoken_ext.openai_public.load_tiktoken_bpe", return_value={}):
        pattern = cl100k_base()["pat_str"]
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([first, second]) for first in range(256) for second in range(256)]
    tokens += [bytes([first]) * 2 + bytes([second]) for first in range(97, 123)
               for second in range(256)]
    tokens = list(dict.fromkeys(tokens))
    encoding = tiktoken.Encoding("cl100k_base", pat_str=pattern, mergeable_ranks={
        token: number for number, token in enumerate(tokens)},
        special_tokens={EOT: len(tokens)})
    monkeypatch.setattr(corpus.prepare, "get_tokenizer", lambda *_: TiktokenTokenizer(encoding))
    return encoding


def test_a_vocabulary_above_65536_has_tokens_of_32_bits(tmp_path, cl100k, run_train):
    """As llm.c's for Llama 3: magic 20240801, version 7, uint32. A run trains on them; without
    meta.json they are not taken for GPT-2's."""
    text = "aab\nsome words, and\naac\n" * 800
    (tmp_path / "a.txt").write_text(text)
    meta = prepare([tmp_path / "a.txt"], tmp_path / "d", "cl100k_base", shard_tokens=3000)
    assert meta["vocab_size"] == cl100k.n_vocab > 1 << 16
    header = np.fromfile(tmp_path / "d/train_000000.bin", "<i4", 256)
    assert header.tolist() == [20240801, 7, 3000] + [0] * 253
    made = [open_shard(path).tolist() for path in sorted((tmp_path / "d").glob("*.bin"))]
    tokens = [token for one in made for token in one if token != cl100k.eot_token]
    assert cl100k.decode(tokens) == text and max(tokens) > 1 << 16
    dataset_32 = data.TokenDataset(tmp_path / "d", "train", 16)
    dataset_32.mixture.check(0, 1)
    dataset_32.mixture.will_need([0, 1])
    assert dataset_32.tokens_of([1])[0].tolist() == made[0][16:33]
    assert run_train("--data", tmp_path / "d", "--out", tmp_path / "o", *TINY)[0] == 0
    (tmp_path / "d/train_000001.bin").write_bytes(b"\0" * 2000)
    with pytest.raises(ValueError, match="train_000001.bin begins with 0"):
        data.TokenDataset(tmp_path / "d", "train", 16)
    (tmp_path / "e").mkdir()
    shutil.copy(tmp_path / "d/train_000000.bin", tmp_path / "e/train_0.bin")
    with pytest.raises(ValueError, match="tokens of 32 bits and no meta.json"):
        data.TokenDataset(tmp_path / "e", "train", 16)


def test_shards_without_the_file_of_their_tokenizer_are_refused(tmp_path):
    (tmp_path / "a.txt").write_text("some words and others\n" * 100)
    prepare([tmp_path / "a.txt"], tmp_path / "d", "bpe", train_tokens=260)
    file, = (tmp_path / "d").glob("*.tiktoken")
    assert data.TokenDataset(tmp_path / "d", "train", 4).meta["vocab_size"] == 260
    whole = file.read_text()
    file.write_text(whole.replace("YQ==", "YR=="))
    with pytest.raises(ValueError, match=f"{file.name}.* copy it again"):
        data.TokenDataset(tmp_path / "d", "train", 4)
    file.unlink()
    with pytest.raises(ValueError, match=f"{file.name}.* copy it, too"):
        data.TokenDataset(tmp_path / "d", "train", 4)


# ---------------------------------------------------------------------------------------------
# A run's data
# ---------------------------------------------------------------------------------------------

def test_data_is_a_directory_or_several_by_weight(tmp_path, monkeypatch):
    """--data is DIR, whose name may have a "=", or DIR=WEIGHT,... in lowest terms."""
    monkeypatch.chdir(tmp_path)
    Path("day=1").mkdir()
    for text, weights in {"day=1": {"day=1": 1}, "data/a=0.7,b=0.3": {"data/a": 7, "b": 3},
                          "a=.000001,b=1000,k=v=0": {"a": 1, "b": 10 ** 9, "k=v": 0}}.items():
        assert mixtures.parse_mixture(text) == {Path(folder): w for folder, w in weights.items()}


def test_epochs_make_the_steps_that_read_the_data_so_often(run_train, tmp_path, monkeypatch):
    """49 windows, in batches of 4. Sequences that were left out do not count: the same command ends
    where it would have. A source of weight 0 is not read; other weights count from where the run
    is."""
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        dataset(Path(name), {"train": [i % 256 for i in range(197)], "val": range(9)},
                fingerprint=name)
    flags = ["--n-layer", 1, "--n-head", 1, "--n-embd", 8, "--seq-len", 4, "--batch-size", 4]
    run_train("--data", "a", *flags, "--epochs", 2, "--save-every", 20)
    middle, end = saved(Path("out"), 20), saved(Path("out"), 25)
    left_out = dict(middle, consumed_samples=92)
    for state, given, steps in [
            (None, dict(batch_size=4, epochs=1), 13), (end, {}, 25), (end, dict(epochs=2), 25),
            (end, dict(steps=32), 32), (end, dict(epochs=3, batch_size=8), 25 + 6),
            (left_out, dict(epochs=2), 25), (middle, dict(batch_size=8), 25),
            (middle, dict(epochs=2, batch_size=8), 20 + 3),
            (middle, dict(epochs=2, data="a=1,b=0"), 25),
            (middle, dict(epochs=2, data="a=1,b=1"), 20 + 29),
            # 98 sequences: 6 steps of 3, 3 of 6, 2 of 9, 4 of 12
            (None, dict(epochs=2, batch_size=12, batch_ramp="3:3:50"), 15)]:
        config, _ = checks.validate(dict(data="a", seq_len=4) | given, state, 1, "cpu")
        assert config.steps == steps, given


def test_gpt2s_tokens_end_to_end(run_train, run_sample, run_data, tmp_path, monkeypatch):
    """data.py's default tokenizer, 40 steps, and sample.py: its text, of characters of up to three
    tokens, is that of all greedy tokens decoded at once. Skipped where there is neither a network
    nor the vocabulary, in ../shared or tiktoken's cache."""
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    line = "\U0001f642 \u6f22\u5b57 \u00e9t\u00e9 \u20ac!\n"
    (tmp_path / "a.txt").write_text(line * 500)
    status, _, error = run_data("--input", tmp_path / "a.txt", "--out", tmp_path / "d")
    if "vocabulary could not be loaded" in error:
        pytest.skip(error)
    assert (status, error) == (0, "")
    flags = ["--data", tmp_path / "d", "--out", tmp_path / "o", *TINY, "--n-layer", 1, "--n-embd",
             32, "--batch-size", 8, "--steps", 40, "--lr", 0.02, "--eval-every", 0]
    assert "vocabulary 50257" in run_train(*flags)[1]
    encoding = get_tokenizer("gpt2").encoding
    plain, _ = checkpoint.load_model(tmp_path / "o/latest.pt")
    text = line + encoding.decode(plain_generate(plain, encoding.encode(line), 40, 0))
    assert text.count("\u6f22") > 1 and len(text) < len(line) + 40
    assert run_sample("--ckpt", tmp_path / "o/latest.pt", "--temperature", 0, "--prompt", line,
                      "--max-tokens", 40) == (0, text + "\n", "")


def test_a_sidecar_of_a_mac_is_no_shard(tmp_path):
    """Copied folders have a ._NAME for each file."""
    dataset(tmp_path, dict(train_0=range(50), val_0=range(50)))
    (tmp_path / "._train_0.bin").write_bytes(b"no shard")
    assert data.TokenDataset(tmp_path, "train", 4).n_tokens == 50


# ---------------------------------------------------------------------------------------------
# Data larger than memory
# ---------------------------------------------------------------------------------------------

def bytes_read_from_disk():
    return int(re.search(r"^read_bytes: (\d+)$", Path("/proc/self/io").read_text(), re.M)[1])


def drop_from_memory(path):
    """So that the disk is read again, where the file system has a disk."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.claim("Training on data larger than memory reads the windows of a batch alone from "
                   "the disk.")
def test_windows_are_read_from_the_disk_alone_and_in_advance(tmp_path):
    """32 windows of 2 kB of a cold shard of 48 MB: at most three pages each, and none when they
    are used. Without the advice the kernel reads around each of them, several times as much."""
    dataset(tmp_path, dict(train_0=np.random.default_rng(0).integers(257, size=24_000_000)))
    file = tmp_path / "train_0.bin"
    with open(file, "rb") as shard_file:
        os.fsync(shard_file.fileno())
    texts, read = {}, {}
    for advised in (False, True):
        made = data.TokenDataset(tmp_path, "train", 1024)
        windows = made.window_ids(1, 0, 32)
        drop_from_memory(file)
        before = bytes_read_from_disk()
        if advised:
            made.mixture.will_need([*windows, data.NO_WINDOW])
            read["in advance"] = bytes_read_from_disk() - before
        texts[advised] = made.tokens_of(windows)
        read[advised] = bytes_read_from_disk() - before
    assert np.array_equal(texts[False], texts[True])
    if read[False] > 0:         # in a file system in memory nothing is read
        assert 0 < read[True] == read["in advance"] <= 32 * 3 * 4096 < read[False] / 2, read


def test_a_run_tells_the_kernel_each_window_one_batch_ahead(run_train, shards, tmp_path,
                                                            monkeypatch):
    """Six batches of four: while each is computed, the next has been told and is not yet read."""
    told, read = [], []
    will_need, read_windows = mixtures.Mixture.will_need, data.TokenDataset.read

    def look(self, ids):
        told.append((len(read), list(ids)))
        will_need(self, ids)

    def note_read(self, ids):
        read.extend(ids)
        return read_windows(self, ids)
    monkeypatch.setattr(mixtures.Mixture, "will_need", look)
    monkeypatch.setattr(data.TokenDataset, "read", note_read)
    status, _, _ = run_train("--data", shards, "--out", tmp_path / "out", *TINY, "--steps", 6,
                             "--eval-every", 0)
    assert status == 0 and len(read) >= 24             # then it evaluates
    for step in range(1, 6):
        assert (4 * step, read[4 * step:4 * step + 4]) in told


def test_a_check_of_all_tokens_is_told_and_read_once_by_all_ranks(tmp_path, monkeypatch, capsys):
    """Three ranks read a third of each shard each; the first tells how far it is."""
    made = dataset(tmp_path, {f"train_{number}": range(200) for number in range(6)})
    monkeypatch.setattr(mixtures, "CHECKED_AT_ONCE", 30)
    clock = SimpleNamespace(monotonic=itertools.count(0, 6).__next__)
    monkeypatch.setattr(notes_and_progress, "time", clock)
    read = []
    tell = mixtures.progress

    def progress(*arguments, **options):
        note = tell(*arguments, **options)
        return lambda count: (read.append(count), note(count))
    monkeypatch.setattr(mixtures, "progress", progress)
    for part, lines in ((0, 18), (1, 0), (2, 0)):
        made.mixture.check(part, 3)
        told = capsys.readouterr().err
        assert told.count("\n") == lines and told.count("reading all tokens once") == lines
    assert sum(read) == 2 * made.n_tokens
