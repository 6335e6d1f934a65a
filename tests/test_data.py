"""Making a data set, and what is wrong with one: data.py and the files of corpus/."""
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
import subprocess
import sys
import threading
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import requests
import tiktoken

import corpus.prepare
import corpus.shards
import data
from base import errors
from corpus import EOT, documents, downloads, encode, file_formats, inputs, near_duplicates
from corpus.chat_records import Refused
from corpus.prepare import prepare
from corpus.shards import SPLITS
from corpus.tokenizers import TiktokenTokenizer, get_tokenizer
from tests.commands import (NASTY, SHARED, Command, dataset, expect_mistake, meta_of, set_block,
                            shard, texts_of, write_lines, write_texts)
from tests.harness import contents, names_in, no_file_above, nothing


# ---- Corpora: where text comes from ----------------------------------------------------------

def test_the_default_is_the_standard_library_without_its_tests(tmp_path, monkeypatch, run_data):
    """`python data.py` reads the .py files of Python's library, equal ones once."""
    assert Path(json.__file__) in inputs.standard_library()
    for folder in ("tests", "test", "idle_test", "site-packages", "dist-packages", "a", "b"):
        (tmp_path / "lib" / folder).mkdir(parents=True)
        (tmp_path / "lib" / folder / "x.txt").write_text("not read")
        (tmp_path / "lib" / folder / "x.py").write_text("some text" if folder in "ab" else folder)
    (tmp_path / "lib" / "link.py").symlink_to("nowhere")
    monkeypatch.setattr(inputs.sysconfig, "get_paths", lambda: {"stdlib": str(tmp_path / "lib")})
    _, out, _ = run_data("--out", tmp_path / "out")
    assert out.startswith("1 document, 1 duplicate dropped, 0 without text skipped; ")
    assert texts_of(tmp_path / "out", *SPLITS) == ["some text"]


@pytest.mark.parametrize("given, words", [
    ("empty.txt", "no text"), ("tiny.txt", "no text"), ("blank.jsonl", "no text"),
    ("no\nsuch.txt", r"there is no file or folder no\nsuch.txt"),
    ("a.txt --seed -1", "--seed"), (f"a.txt --seed {2 ** 63}", f"below {2 ** 63}"),
    ("a.txt --shard-tokens 9", "1024"), (f"a.txt --shard-tokens {2 ** 31}", f"below {2 ** 31}"),
    ("a.txt --shard_toks 9", "--shard-tokens?"), ("--dataset=shakespeare_char", "shakespeare?"),
    ("--dataset fineweb --shards 104", "--shards below 104"),
    ("--dataset shakespeare --shards 2", "only fineweb"),
    ("--dataset fineweb --tokenizer bytes", "GPT-2's tokens"),
    ("--input a.txt", "--out"), ("--output-prefix a", "--output-prefix: --help lists"),
    ("a.txt --out", "--out: expected one argument: give a value; one that"),
    ("a.txt --out gone", "--out gone is not a directory: give another"),
    ("a.txt --out held", "held/meta.json was made of other text"),
    ("a.txt --out chat", "train_000000.learn was made of other text"),
    ("empty.txt --out a.txt/below", "a.txt/below"),     # before the text is read
    ("a.txt --out .", "fineweb_train_000001.bin"),      # neither deleted nor mixed in
    ("a.txt --tokenizer old", "older version --train-tokenizer N"),
    ("--out d a.txt b.md", "unknown argument a.txt: --help lists the flags"),
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
    Path("gone").symlink_to("nowhere")
    Path("held").mkdir()
    Path("held/meta.json").write_bytes(b"\xff")
    for name in ("chat/train_000000.learn", "old/bpe-0123456789ab.tiktoken"):
        Path(name).parent.mkdir()
        Path(name).touch()
    refuse_data(words, *given.split(" "))


# Where there is no network: the message of requests has the names of five classes.
NO_NAME = requests.ConnectionError("HTTPSConnectionPool: Max retries exceeded")
NO_NAME.__context__ = OSError("no such name")


@pytest.mark.parametrize("answer, words", [
    (dict(side_effect=NO_NAME), "(no such name)"),
    (dict(return_value=mock.Mock(content=b"a login page")), "Hash mismatch")])
def test_without_gpt2s_vocabulary_bytes_are_offered(tmp_path, monkeypatch, run_data, answer, words):
    """Where it cannot be downloaded the exit status is 1, and bytes are offered instead."""
    monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(requests, "get", mock.Mock(**answer))
    monkeypatch.setattr(tiktoken.registry, "ENCODINGS", {})         # of tests before
    (tmp_path / "a.txt").write_text("some text")
    expect_mistake(run_data("--out", tmp_path, "--input", tmp_path / "a.txt"), words,
                   "TIKTOKEN_CACHE_DIR", "--tokenizer bytes", program="data.py", status=1)
    assert requests.get.call_args.kwargs["timeout"] == downloads.TIMEOUT      # it never hangs


BODY = np.random.default_rng(0).bytes(1 << 16).hex().encode()
SIZE = len(BODY)


@pytest.fixture
def server(monkeypatch):
    """A server whose files have this body. ranges: it knows Range; drop: so many replies end half
    way; length: it says how long one is; asked: (file, first byte) of each request."""
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
    ({}, b"x" * SIZE, SHA256, [SIZE, 0]), ({}, b"x" * 5 * SIZE, SHA256, [5 * SIZE, 0]),
    (dict(body=b"another text"), b"", SHA256, None),
    ({}, b"", None, [0]), (dict(drop=99), b"", None, None),
    (dict(length=False, ranges=False), b"", None, None)])
def test_a_download_is_whole_in_the_end_or_refused(tmp_path, server, served, part, sha256, starts):
    """What the server does; what .part holds before; where the requests begin (None: four are an
    error). Whole is a file by its sha256, or else by its length. A damaged one is replaced."""
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
    """The same characters within a line do not, and are counted. Another sha256 is an error; a
    download that is stopped says that it continues."""
    server.body = b"Once\nupon\n<|endoftext|>\n\nThe end <|endoftext|> not\n<|endoftext|>\n"

    def make(sha256):
        monkeypatch.setitem(downloads.DOWNLOADS, "tinystories", (f"{server.url}/file", sha256))
        return run_data("--dataset", "tinystories", "--tokenizer", "bytes", "--out", tmp_path)
    status, _, error = make(SHA256)
    assert status == 1 and "cannot download" in error
    with mock.patch.object(downloads, "progress", side_effect=KeyboardInterrupt):
        assert "continues the download" in make(None)[2]
    status, _, error = make(hashlib.sha256(server.body).hexdigest())
    assert status == 0 and "<|endoftext|> stands 1 times within a line" in error
    assert texts_of(tmp_path, *SPLITS) == ["Once\nupon", "The end <|endoftext|> not"]


def test_finewebs_shards_are_fetched_once(tmp_path, server, monkeypatch, run_data):
    """A download continues, a second run asks for nothing, a shard that is cut short is refused."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    fetch = functools.partial(run_data, "--dataset", "fineweb", "--shards", 2)
    names = [f"fineweb_{name}.bin" for name in ("val_000000", "train_000001", "train_000002")]
    folder = Path("data/fineweb")
    server.body = shard(range(200))
    folder.mkdir(parents=True)
    (folder / f"{names[1]}.part").write_bytes(server.body[:500])
    for _ in range(2):                              # the second time nothing is asked for
        status, out, error = fetch()
        assert (status, error) == (0, "") and "400 tokens to train on, 200 to validate on" in out
        assert "python train.py --data data/fineweb --out out/fineweb\n" in out
        assert server.asked == list(zip(names, [0, 500, 0]))
    assert data.TokenDataset(folder, "train", 8).meta == dict(
        tokenizer="gpt2", vocab_size=50257, bytes_per_token=None)
    os.truncate(folder / names[2], 1100)
    status, _, error = fetch()
    assert status == 2 and "not a complete shard" in error and "remove it" in error
    (folder / "meta.json").touch()
    assert "holds other shards" in fetch()[2]


# ---- Files that people have ------------------------------------------------------------------

def read_texts(*names):
    """The documents of these files, as data.py reads them."""
    found = [list(document) for path in map(Path, names)
             for document in documents.read_documents(path)]
    for text in itertools.chain(*found):
        if isinstance(text, Refused):
            raise text
    return ["".join(texts) for texts in found]


def test_a_byte_order_mark_and_empty_lines_of_json_are_no_text(tmp_path, monkeypatch):
    set_block(monkeypatch, 7)
    text = "h\u00e9llo \u6f22\u5b57\r\nworld \U0001f642\u2028x\n"
    (tmp_path / "a.txt").write_text(text, encoding="utf-8-sig", newline="")
    lines = "".join("\n" + json.dumps(dict(text=t), ensure_ascii=False) + "\r\n"
                    for t in (text, "\ufeffb"))
    (tmp_path / "a.jsonl").write_text(lines, encoding="utf-8-sig")
    assert read_texts(tmp_path / "a.txt", tmp_path / "a.jsonl") == [text, text, "b"]


def test_lines_of_endoftext_cut_a_txt_wherever_blocks_end(tmp_path, monkeypatch):
    """600 random texts in blocks of 1 to 40 characters, against the lines of the whole text."""
    rng = random.Random(0)
    parts = [EOT, EOT, "\n", "\n", "\n", " ", "\r\n", "a", "<|endof", "word", "\t"]
    documents = 0
    for _ in range(600):
        text = "".join(rng.choices(parts, k=rng.randrange(20)))
        set_block(monkeypatch, rng.randint(1, 40))
        (tmp_path / "a.txt").write_bytes(text.encode())
        found = list(filter(None, read_texts(tmp_path / "a.txt")))
        first, *others = re.split(r"(?m)^\s*?<\|endoftext\|>\s*?$", text)
        expected = [first.rstrip(), *map(str.strip, others)] if others else [text]
        assert found == list(filter(None, expected)), text
        documents += len(found)
    assert documents > 500


DOCUMENTS = ["one text\n", "\u00e9t\u00e9 \u6f22\u5b57\r\n", "", "x" * 50_000]
DOCUMENTS += [f"text {i} " * 20 for i in range(300)]


def write_kind(file, texts, field="text"):
    """These texts in a file of the kind that its name says, by the packages' own writers."""
    if file.suffix in (".parquet", ".arrow"):
        pyarrow = pytest.importorskip("pyarrow")
        from pyarrow import parquet
        table = pyarrow.table({"id": range(len(texts)), field: texts})
        if file.suffix == ".parquet":
            parquet.write_table(table, file, row_group_size=100, write_page_checksum=True)
        else:
            with pyarrow.ipc.new_stream(str(file), table.schema) as writer:
                writer.write_table(table)
        return
    raw = "".join(json.dumps({"id": 5, field: text}) + "\n" for text in texts).encode()
    if ".txt" in file.name:
        raw = f"\n{EOT}\n".join(texts).encode()
    elif file.name == "array.json":
        raw = json.dumps([{field: text} for text in texts], indent=1).encode()
    if file.suffix.lower() == ".gz":
        raw = b"".join(gzip.compress(part) for part in (raw[:9000], raw[9000:]))
    elif file.suffix == ".zst":
        zstd = pytest.importorskip("backports.zstd")
        raw = zstd.compress(raw, options={zstd.CompressionParameter.checksum_flag: 1})
    file.write_bytes(raw)


@pytest.mark.parametrize("name", ["a.json", "array.json", "a.JSON.GZ", "a.jsonl.zst", "a.parquet",
                                  "a.arrow"])
def test_every_kind_of_file_gives_the_same_shards(make_data, name):
    found = set()
    for kind in ("a.jsonl", name):
        write_kind(Path(kind).absolute(), DOCUMENTS, "body")
        assert make_data(kind, "--text-field", "body", "--out", f"{kind}.out")[0].startswith("303 ")
        found.add(meta_of(f"{kind}.out")["fingerprint"])
    assert len(found) == 1


def test_a_folder_is_read_by_kinds_and_what_is_skipped_is_told(make_data, refuse_data):
    """Without .txt, .jsonl and .parquet other files of text are read. A killed job is told, too."""
    for name in ("in/a.txt", "in/sub/b.txt", "in/.hidden/c.txt", "in/d.md", "in/e.png", "in/g.csv",
                 "one/a.md", "one/README", "one/set.json", "one/t.csv", "two/sub/b.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text(f"{{'{name}'}} " * 9)
    for name in ("one/p.png", "only/a.png"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_bytes(b"\x89PNG\0\xff")
    Path("in/set.json").write_text(json.dumps(dict(text=1), indent=1))
    write_texts("in/f.json", ["a text"] * 3)
    out, error = make_data("in")
    assert "3 documents, 2 duplicates dropped" in out
    assert "in: 3 files read; skipped: 1 .md, 1 .png, 1 .csv, 1 .json: name" in error
    Path("md/.new-1").mkdir(parents=True)
    out, error = make_data("in/d.md", "--out", "md")
    assert out.startswith("1 document, ") and ".new-1 is of a job that" in error
    out, error = make_data("one", "two", "--out", "text")
    assert out.startswith("3 documents, ") and "two: 1 file read as text (1 .py)\n" in error
    assert "one: 2 files read as text (1 README, 1 .md); skipped: 1 .png, 1 .json, 1 .csv" in error
    refuse_data("only holds 1 .png", "only")


@pytest.mark.parametrize("name, text, words", [
    ("a.jsonl", b'{"body": "a", "id": 1}\n' * 20, 'a.jsonl line 1 field "text", but "body", "id"'),
    ("a.txt", b"a" * file_formats.BLOCK + b" \0tail\n", "NUL bytes"),
    ("a.txt", f"{'text ' * 40}\n{EOT}\n".encode() * 2000 + b"\xe9\n", "a.txt not UTF-8"),
    ("a.jsonl", b'{"text": 5}\n', '"text" int'), ("a.jsonl", b"{", "JSON"),
    ("a.json", b'[{"text": "a"}, ', "array of JSON"),
    ("a.txt", "caf\xe9".encode("utf-16"), "a.txt UTF-16 iconv"),
    ("a.md", b"PK\3\4 x", "zip unpack"), ("a.txt", b"%PDF-1.4 \xff", "PDF pdftotext"),
    ("a.jsonl", "{}".encode("utf-16"), "a.jsonl UTF-16"), ("a.rtf", b"{\\rtf1 a}", "as text"),
    ("a.jsonl", b'{"prompt": "a", "chosen": "b", "rejected": "c"}\n', "preferences completion"),
    ("a.txt", gzip.compress(b"text"), "gzip .gz"), ("a.py", "text".encode("utf-16-le"), "NUL"),
    ("a.jsonl", b'{"text": "caf\xe9"}', "JSON 'utf-8'"), ("a.parquet", b"PAR1 and so on", "again"),
    ("a.arrow", b"and so on", "again")])
def test_a_file_without_its_text_is_refused_in_a_line(refuse_data, name, text, words):
    """It is told alone, without a number of documents."""
    Path(name).write_bytes(text)
    assert "tolerated" not in refuse_data(words, name)


@pytest.mark.parametrize("between, name", [(",", "a b.csv"), ("\t", "a.tsv")])
def test_the_line_for_a_table_makes_lines_of_it(refuse_data, between, name):
    """Also of a long field, behind Excel's mark; and none of a table that is not text."""
    for rows in (f"\ufeffid{between}text\n1{between}{'a' * 200_000}\n".encode(), b"text\n\xff\n"):
        Path(name).write_bytes(rows)
        told = refuse_data("table --text-field", name)
        line = re.search("python -c .* rm NEW.jsonl", told)[0]
        subprocess.run(line.replace("python", sys.executable, 1), shell=True, capture_output=True,
                       env=os.environ | dict(PYTHONIOENCODING="utf-8"))
        if b"\xff" not in rows:
            assert json.loads(Path("NEW.jsonl").read_text()) == dict(id="1", text="a" * 200_000)
    assert not Path("NEW.jsonl").exists()


@pytest.mark.claim("One document in 1,000 may be unreadable: it is left out and named.")
def test_one_bad_document_in_a_thousand_is_left_out_and_more_are_refused(make_data, refuse_data):
    def write(documents, bad):
        """So many documents, of which these numbers are no JSON."""
        Path("a.jsonl").write_text("".join("{\n" if i in bad else json.dumps(dict(text=f"text {i}"))
                                           + "\n" for i in range(documents)))
    write(2000, {7, 1999})
    out, error = make_data("a.jsonl")
    assert "1,998 documents," in out and ", 2 unreadable left out; " in out
    assert "2 of 2,000 documents are left out: a.jsonl line 8 " in error and error.count("\n") == 1
    shutil.rmtree("out")
    write(1999, {7, 8})
    refuse_data("a.jsonl line 8 line 9 (2 of 1,999 documents; only one in 1,000", "a.jsonl")
    write(10 ** 5, range(0, 10 ** 5, 2))
    refuse_data("line 1 line 3 of 21 documents", "a.jsonl")         # it does not read on


@pytest.mark.claim("A compressed file that is cut off or damaged is refused by its name, never "
                   "read in part.")
@pytest.mark.parametrize("name", ["a.txt.gz", "a.jsonl.gz", "a.json.zst", "a.parquet"])
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


# ---- Splits by the names of files

@pytest.mark.claim("Files named train, validation and test train, validate and are left out.")
def test_names_of_files_decide_the_split(tmp_path, monkeypatch, make_data, refuse_data):
    """Below a folder that is itself called test, too."""
    (tmp_path / "test").mkdir()
    monkeypatch.chdir(tmp_path / "test")
    for train, val, test in [
            ("train-00000-of-00002.jsonl train-00001-of-00002.jsonl", "dev.jsonl", "a_test.jsonl"),
            ("train/chunk1/example_train_0.jsonl train/more/part2.txt",
             "validation/chunk1/example_holdout_0.jsonl", "test/chunk1/example_holdout_0.jsonl"),
            ("TRAIN.txt latest.txt contest.txt development.txt trainings.txt train-test.txt",
             "eval1.txt", "held_out.txt holdout.txt"),
            ("train.txt", "val.txt", "heldout.txt"), ("training.txt", "valid.txt", "")]:
        train, val, test = ({Path("in", name) for name in names.split()}
                            for names in (train, val, test))
        read, validation = inputs.follow_names([*train, *val, *test])
        assert (set(read), validation) == (train | val, val)
    names = ["c4-train.00000-of-01024.json.gz", "c4-train.00001-of-01024.json.gz",
             "c4-validation.00000-of-00008.json.gz", "c4-test.json.gz"]
    Path("in").mkdir()
    for name in names:
        write_kind(Path("in", name), [f"document {i} of {name}\n" for i in range(10)])

    def files_of(split):
        return sorted({text.split()[3] for text in texts_of("out", split)})
    flags = "in", "--near-duplicates", "ignore"
    assert re.search("val: 1.* test: 1", make_data(*flags)[1])
    assert (files_of("train"), files_of("val")) == (names[:2], names[2:3])
    assert meta_of("out")["files"] == dict(train=2, val=1)
    shutil.rmtree("out")
    make_data(*flags, "--split-names", "ignore")
    assert files_of("train") == sorted(names)
    refuse_data("give another --out", *flags)                   # the source has the names


@pytest.mark.parametrize("near", ["keep", "drop"])
def test_a_document_that_validates_by_its_file_does_not_train(make_data, near):
    """Equal ones, and with "drop" those with most words in common; counted."""
    words = random_words(random.Random(0), 240)
    texts = [" ".join(words[i:i + 60]) for i in range(0, 240, 60)]
    write_texts("in/train.jsonl", [*texts, texts[0], texts[1] + " end", "another"])
    write_texts("in/val.jsonl", [texts[0], texts[1], texts[1]])
    out, _ = make_data("in", "--near-duplicates", near)
    assert "4 duplicates dropped" in out and texts_of("out", "val") == texts[:2]
    alike = [] if near == "drop" else [texts[1] + " end"]
    assert texts_of("out", "train") == [*texts[2:], *alike, "another"]


# ---- Near-duplicates

@pytest.mark.claim("Near-duplicates are found as often as the formula of MinHash says.")
def test_documents_agree_in_a_key_as_often_as_the_formula_says():
    """1,200 pairs, of which one has up to 40 words of 300 replaced: how many agree, beside the sum
    of 1 - (1 - s^8)^14 over their exact shares s of equal shingles of five words."""
    rng = random.Random(0)
    min_hash = near_duplicates.MinHash()
    pairs = []
    for _ in range(1200):
        words = random_words(rng, 300)
        changed = list(words)
        for at in rng.sample(range(300), rng.randint(1, 40)):
            changed[at] = "other"
        one, other = ({tuple(text[i:i + 5]) for i in range(296)} for text in (words, changed))
        keys = [min_hash.keys(" ".join(each)) for each in (words, changed)]
        pairs.append((len(one & other) / len(one | other), bool((keys[0] == keys[1]).any())))
    for low, high in ((0.0, 0.5), (0.5, 0.6), (0.6, 0.7), (0.7, 0.8), (0.8, 0.9), (0.9, 1.0)):
        found = [(s, agree) for s, agree in pairs if low <= s < high]
        expected = [1 - (1 - s ** 8) ** 14 for s, _ in found]
        deviation = sum(p * (1 - p) for p in expected) ** 0.5
        assert len(found) > 50
        assert abs(sum(agree for _, agree in found) - sum(expected)) < 4 * deviation + 1
    assert not any((min_hash.keys(f"one {i}") == min_hash.keys(f"two {i}")).any() for i in range(9))


def random_words(rng, count):
    return [f"w{rng.randrange(100_000)}" for _ in range(count)]


@pytest.mark.parametrize("first, last", [(0x4E00, 0x59B7), (0x3041, 0x3096), (0xE01, 0xE2E),
                                         (0x20000, 0x20500)])
def test_near_duplicates_are_found_in_scripts_without_spaces(first, last):
    """Chinese, Japanese, Thai, rare ideographs, also among English: 99% are equal."""
    rng = random.Random(0)
    min_hash = near_duplicates.MinHash()
    keys = []
    for number in range(60):
        text = [chr(rng.randrange(first, last)) for _ in range(1000)]
        if number % 2:
            text[::50] = [" some words "] * 20
        keys.append(min_hash.keys("".join(text)))
        for at in rng.sample(range(1000), 10):
            text[at] = chr(rng.randrange(first, last))
        assert (keys[-1] == min_hash.keys("".join(text))).any()
    assert not near_duplicates.is_repeated(np.array(keys)).any()


def test_planted_near_duplicates_are_counted_or_dropped(make_data):
    """A hundred of 400 documents are others with one word changed: those are dropped that come
    later. Kept, the ones that validate and have their like in training are told."""
    rng = random.Random(1)
    documents = [random_words(rng, 200) for _ in range(300)]
    documents += [[*words[:100], "changed", *words[101:]] for words in documents[:100]]
    texts = [" ".join(words) for words in documents]
    flags = write_texts("a.jsonl", texts), "--near-duplicates"
    out, error = make_data(*flags, "drop", "--out", "drop")
    assert error == "" and out.startswith("300 documents, ")
    assert ", 100 near-duplicates dropped; " in out
    assert sorted(sum((texts_of("drop", split) for split in SPLITS), [])) == sorted(texts[:300])
    _, error = make_data(*flags, "keep", "--out", "keep")
    train, val = (texts_of("keep", split) for split in SPLITS)
    seen = sum((one in val) != (other in val) for one, other in zip(texts, texts[300:]))
    assert seen > 0 and error.startswith(f"note: {seen} of {len(val)} validation documents have")
    assert "--near-duplicates drop" in error and len(train + val) == 400
    assert meta_of("keep")["near_duplicates"] == 100
    assert make_data(*flags, "ignore", "--out", "ignore")[1] == ""
    assert meta_of("keep")["fingerprint"] == meta_of("ignore")["fingerprint"]


def test_a_book_that_is_drawn_for_validation_gives_its_end_alone(make_data):
    """By the first seed that draws it. Without the rule it would leave 600 bytes for training.
    Before that one or two short texts validate beside the book: this is told."""
    book = "word 1234 " * 24_000
    texts = [book, *(f"short text {i}" for i in range(40))]
    write_texts("a.jsonl", texts)
    for seed in range(99):
        told, error = make_data("a.jsonl", "--seed", seed, "--out", f"{seed}")
        of_train, of_val = (texts_of(f"{seed}", split) for split in SPLITS)
        assert error == ""
        if book not in of_train:
            break
        assert re.search(r"(?m)^\d+ tokens validate beside \d{3},\d{3} that train", told)
    assert seed > 0
    assert 0.04 < len("".join(of_val)) / len("".join(texts)) < 0.06
    end, = (text for text in of_val if text in book)
    assert book.endswith(end) and book[:-len(end)] in of_train


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_leaves_nothing(tmp_path, number):
    """Twice, as an impatient user sends it, while data.py tokenises."""
    (tmp_path / "a.txt").write_text("some words\n" * 1000)
    (tmp_path / "wrapper.py").write_text(f"""
import os, signal, sys, tempfile, corpus.prepare, corpus.program
signal.signal(signal.SIGINT, signal.default_int_handler)    # a job in the background ignores it
def stop(*_):
    os.kill(os.getpid(), {int(number)})
corpus.prepare.append_tokens = stop
cleanup = tempfile.TemporaryDirectory.cleanup
tempfile.TemporaryDirectory.cleanup = lambda self: (stop(), cleanup(self))
sys.exit(corpus.program.main())
""")
    done = Command(tmp_path / "wrapper.py", "--input", tmp_path / "a.txt", "--out", tmp_path / "d",
                   "--tokenizer", "bytes").finish()
    assert (*done[:2], done[2].count("\n")) == (1, "", 1) and "data.py: stopped: " in done[2]
    assert names_in(tmp_path / "d") == []


def test_an_error_of_the_disk_has_its_path_and_what_to_do(tmp_path, server, run_data):
    """Of writing, whose errors have no path of their own: of a shard, and of a download."""
    (tmp_path / "a.txt").write_text("some words in a row\n" * 50)
    with no_file_above(1500):
        status, out, error = run_data("--input", tmp_path / "a.txt", "--tokenizer", "bytes",
                                      "--out", tmp_path / "d")
        with pytest.raises(OSError) as of_download:
            downloads.download(f"{server.url}/a", tmp_path / "file")
    assert (status, out, error.count("\n")) == (1, "", 1) and names_in(tmp_path / "d") == []
    assert re.match(rf"data.py: {tmp_path}/d/.new-\w+/train_000000.bin: File too large: ", error)
    assert errors.describe(of_download.value).startswith(f"{tmp_path}/file.part: File too large: ")


# ---- Documents: their split and their pieces -------------------------------------------------

def test_seed_and_text_alone_decide_the_split_of_a_document(monkeypatch, make_data):
    """Each of 400 documents is in one split, in the order of the input, with its text unchanged.
    Another order, or fewer documents, does not move it; another seed does."""
    monkeypatch.setattr(encode.os, "cpu_count", lambda: 1)  # 4 jobs, 3 under way
    texts = [f"{i} " + "".join(random.Random(i).sample(NASTY, 9)) for i in range(400)]

    def split(texts, seed=0):
        shutil.rmtree("my data", ignore_errors=True)
        write_texts("in/a.jsonl", texts)
        Path("in/empty.txt").touch()
        told, _ = make_data("in", "--out", "my data", "--seed", seed)
        assert "python train.py --data 'my data' --out 'out/my data'" in told
        assert "tokens validate beside" not in told
        assert f"{len(texts)} documents, 0 duplicates dropped, 1 without text skipped" in told
        train, val = (texts_of("my data", split) for split in SPLITS)
        assert train == [t for t in texts if t not in val] and min(len(train), len(val)) > 0
        assert val == [t for t in texts if t not in train]
        meta = meta_of("my data")
        assert meta["bytes_per_token"] == sum(len(t.encode()) for t in val) / meta["tokens"]["val"]
        return set(val)
    first = split(texts)
    assert 5 <= len(first) <= 40 and split(texts[::-1]) == first != split(texts, 1)
    assert split(texts[:300]) == first & set(texts[:300])
    for seed in range(12):
        split(texts[:20], seed)


def test_few_documents_each_give_their_last_5_percent(monkeypatch, make_data):
    """With fewer than 20 documents each is cut at a character, at most 5% from its end. Duplicates
    and blank documents are dropped and counted, and line ends stay."""
    set_block(monkeypatch, 70)
    texts = ["é" * 101, "abcdefghij" * 200, "漢字" * 40 + "x", "one text\n", "one text\r\n"]
    for number, text in enumerate([*texts, texts[1], texts[3], " \n", "\n"]):
        Path(f"{number}.txt").write_bytes(text.encode())
    assert make_data(".", "--shard-tokens", 1024)[0].startswith(
        "5 documents, 2 duplicates dropped, 2 without text skipped; 2,342 tokens to train on, 130 "
        "to validate on.\n")
    assert texts_of("out", *SPLITS) == texts
    tails = [len(tail.encode()) for tail in texts_of("out", "val")]
    assert tails == [10, 100, 13, 1, 1]


@pytest.mark.parametrize("name", ["r50k_base", "cl100k_base", "o200k_base"])
def test_the_pieces_of_a_text_encode_to_the_tokens_of_the_whole(monkeypatch, name):
    """Mechanism of the bounded memory: the pieces of 300 texts have the words of the whole, by the
    tokenizer's own pattern, and BPE merges nothing across words."""
    import regex
    from tiktoken_ext import openai_public
    with mock.patch.object(openai_public, "load_tiktoken_bpe", return_value={}):
        pattern = regex.compile(getattr(openai_public, name)()["pat_str"])

    def words(parts):
        return [word for part in parts for word in pattern.findall(part)]

    def cut(text):
        find_cut = TiktokenTokenizer(SimpleNamespace(name=name, n_vocab=0, eot_token=0)).find_cut
        blocks = [text[i:i + 70] for i in range(0, len(text), 70)]
        splits, (begin, *pieces) = zip(*encode.split_document(blocks, 10 ** 6, find_cut))
        assert set(splits) == {"train"} and begin == ""
        return pieces

    rng = random.Random(0)
    whole = 0
    for size in rng.choices(range(100, 200), k=300):
        text = "".join(rng.choices([*NASTY, "!\n", "a.\n\n", " (", "1234", "\r"], k=100))
        set_block(monkeypatch, size)
        pieces = cut(text)
        assert "".join(pieces) == text and max(map(len, pieces)) <= size
        if max(map(len, pieces)) < size:            # a place was found for each
            whole += 1
            assert words(pieces) == words([text]), text
    assert whole > 100


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz"])
def test_memory_does_not_grow_with_the_size_of_a_document(tmp_path, monkeypatch, name):
    """Mechanism of the bounded memory: ten times the text takes at most 100 kB more."""
    set_block(monkeypatch, 4096)
    monkeypatch.setattr(documents, "LONGEST_LINE", 4096)
    monkeypatch.setattr(encode.os, "cpu_count", lambda: 2)
    peaks = []
    for size in (100_000, 1_000_000):
        raw = ("All work and no play. " * (size // 22)).encode()
        (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith(".gz") else raw)
        tracemalloc.start()
        prepare([tmp_path / name], tmp_path / f"{size}", "bytes")
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 100_000, peaks


def test_the_default_needs_no_optional_package(make_data, refuse_data, monkeypatch):
    """Text, lines, .gz and conversations by `plain` are read; else a line names the package."""
    for package in ("transformers", "tokenizers", "jinja2", "pyarrow", "backports", "datasets",
                    "fsspec", "torch", "safetensors", "huggingface_hub", file_formats.ZSTD):
        monkeypatch.setitem(sys.modules, package, None)
    write_kind(Path("a.jsonl.gz"), DOCUMENTS)
    Path("b.txt").write_text(f"text\n{EOT}\nmore")
    assert make_data("a.jsonl.gz", "b.txt")[0].startswith("305 documents, ")
    write_lines("c.jsonl", [dict(prompt=f"{i}", completion="a") for i in range(30)])
    assert "the template is plain" in make_data("c.jsonl", "--out", "chat")[0]
    for name, package, *flags in (("a.parquet", "pyarrow"), ("a.txt.zst", file_formats.ZSTD),
                                  ("b.txt", "transformers", "--tokenizer", ".", "--out", "new")):
        Path(name).touch()
        refuse_data(f"pip install {package}", name, *flags)


# ---- The files of a data set -----------------------------------------------------------------

def test_a_data_set_stays_until_the_new_one_is_whole(tmp_path):
    """Other text or flags for the same --out are refused: a run may train on it. After a kill while
    files take their place the data set is damaged; the same text and flags mend it, to the bit."""
    text, out, letters = tmp_path / "a.txt", tmp_path / "new", "abcdefghij" * 500
    text.write_text(letters)
    make = functools.partial(prepare, [text], out, "bytes")

    def killed(path, target, replace_file=os.replace):
        if target.name == "meta.json":
            raise KeyboardInterrupt
        replace_file(path, target)
    with mock.patch.object(os, "replace", killed), pytest.raises(KeyboardInterrupt):
        make()
    with pytest.raises(ValueError, match="meta.json is damaged.*run data.py again"):
        data.TokenDataset(out, "train", 4)
    fingerprint = make()["fingerprint"]
    before = contents(out)
    assert names_in(out) == ["meta.json", "train_000000.bin", "val_000000.bin"]
    _, of_train, of_val = before.values()
    assert fingerprint == hashlib.sha256(of_train + of_val).hexdigest()
    for other, flags in [(letters, dict(shard_tokens=1024)), (letters, dict(seed=1)),
                         (letters, dict(shard_tokens=10 ** 6)),      # the beginning of 10 ** 8
                         (letters[:-1] + "J", {})]:
        text.write_text(other)
        with pytest.raises(ValueError, match="of other text, .* give another --out, or remove"):
            make(**flags)
    def then_changes(*arguments, tokenise=corpus.prepare.tokenise):
        text.write_text("some")                 # between the passes
        return tokenise(*arguments)
    with mock.patch.object(corpus.prepare, "tokenise", then_changes), \
            pytest.raises(ValueError, match="the input changed while it was read: run data.py ag"):
        prepare([text], tmp_path / "other", "bytes")
    assert contents(out) == before and names_in(tmp_path / "other") == []
    text.write_text(letters)
    (out / "val_000000.bin").write_bytes(b"damaged")
    make()
    assert contents(out) == before


# ---- Tokenizers by their names ---------------------------------------------------------------

def test_a_vocabulary_above_65536_has_tokens_of_32_bits(tmp_path, monkeypatch):
    """As llm.c's for Llama 3: magic 20240801, version 7, uint32. Pairs with "a" come last."""
    tokens = [bytes([byte]) for byte in range(256)]
    tokens += [bytes([(first + 98) % 256, second]) for first in range(256) for second in range(256)]
    encoding = tiktoken.Encoding(
        "cl100k_base", pat_str=r"\w+|\W", special_tokens={EOT: len(tokens)},
        mergeable_ranks={token: number for number, token in enumerate(tokens)})
    monkeypatch.setattr(corpus.prepare, "get_tokenizer", lambda *_: TiktokenTokenizer(encoding))
    text = "aab\nsome words, and\naac\n" * 800
    (tmp_path / "a.txt").write_text(text)
    meta = prepare([tmp_path / "a.txt"], tmp_path / "d", "cl100k_base", shard_tokens=3000)
    assert meta["vocab_size"] == encoding.n_vocab > 1 << 16
    header = np.fromfile(tmp_path / "d/train_000000.bin", "<i4", 256)
    assert header.tolist() == [20240801, 7, 3000] + [0] * 253
    made = [data.open_shard(path).tolist() for path in sorted((tmp_path / "d").glob("*.bin"))]
    tokens = [token for one in made for token in one if token != encoding.eot_token]
    assert encoding.decode(tokens) == text and max(tokens) > 1 << 16
    dataset_32 = data.TokenDataset(tmp_path / "d", "train", 16)
    assert dataset_32.read([1])[0][0].tolist() == made[0][16:33]


@pytest.mark.parametrize("read", [
    lambda name, folder: dataset(folder, {"train_0": range(9)}, tokenizer=name),
    lambda name, folder: get_tokenizer(name, "the content of its file")])
def test_what_older_versions_made_is_refused_with_the_command_that_makes_it_again(tmp_path, read):
    """Data, and a checkpoint's tokenizer."""
    with pytest.raises(ValueError, match="json-0 is of an older version .* data.py --input FILE "
                                         "--tokenizer FOLDER --out NEW"):
        read("json-0", tmp_path)


def test_gpt2s_tokens_are_the_default(run_data, tmp_path, monkeypatch):
    """Characters of up to three tokens are streamed whole. Skipped where there is neither a network
    nor the vocabulary, in ../shared or tiktoken's cache."""
    if (SHARED / "tiktoken_cache").is_dir():
        monkeypatch.setenv("TIKTOKEN_CACHE_DIR", str(SHARED / "tiktoken_cache"))
    text = "\U0001f642 \u6f22\u5b57 \u00e9t\u00e9 \u20ac!\n" * 500
    (tmp_path / "a.txt").write_text(text)
    status, out, error = run_data("--input", tmp_path / "a.txt", "--out", tmp_path)
    if "vocabulary could not be loaded" in error:
        pytest.skip(error)
    assert (status, error) == (0, "") and "\npython train.py --data " in out
    encoding = get_tokenizer(meta_of(tmp_path)["tokenizer"])
    stream = encoding.stream()
    parts = [stream.add(token) for split in SPLITS
             for token in data.open_shard(tmp_path / f"{split}_000000.bin").tolist()[1:]]
    assert encoding.n_vocab == 50257 and "".join(parts) == text and "" in parts
