"""The pages of the documentation: their form, their links, and what tools.docs has generated.

    python -m pytest tests/test_docs.py
    python -m tools.docs                    # mends what a change of the code has made old

The commands of the pages have tests in tests/test_readme.py.
"""
import os
import re
import shlex
import shutil
import subprocess
import sys
import xml.etree.ElementTree
from dataclasses import fields
from types import SimpleNamespace

import pytest

import tools.compare
from base.options import Config
from tests.harness import ROOT, TINY, launch, run_main
from tools import docs, loss_picture
from tools.other_names import IN_PROJECTS, PROJECTS

PAGES_OF_TABLES = ("docs/flags.md", "docs/claims.md")
# Words of a cell, words of a paragraph.
LIMITS = {"README.md": (15, 60)}
LIMITS_OF_CHAPTERS = (25, 90)
LINES_OF_README = 150
WORDS_OF_A_CHAPTER = (500, 1500)


def pages():
    """{path: text} of README.md and the pages of docs/."""
    files = [ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))]
    return {file.relative_to(ROOT).as_posix(): file.read_text() for file in files}


# ---------------------------------------------------------------------------------------------
# The checkers
# ---------------------------------------------------------------------------------------------

def elements(page):
    """Yields (line number, kind, text) of each "heading", "row" of a table, line of "code", and
    "paragraph". An item of a list is a paragraph."""
    paragraph, first, in_code = [], 0, False

    def finish():
        if paragraph:
            yield first, "paragraph", " ".join(paragraph)
            paragraph.clear()

    for number, line in enumerate(page.splitlines(), 1):
        text = line.strip()
        if text.startswith("```"):
            yield from finish()
            in_code = not in_code
        elif in_code:
            yield number, "code", line
        elif not text or text.startswith(("#", "|", "<!--")):
            yield from finish()
            if text.startswith("#"):
                yield number, "heading", text.lstrip("# ")
            elif text.startswith("|"):
                yield number, "row", text
        else:
            if re.match(r"([-*]|\d+\.) ", text):
                yield from finish()
            if not paragraph:
                first = number
            paragraph.append(text)
    yield from finish()


def count_words(text):
    """A link counts with its text alone; signs without a letter or digit are no words."""
    shown = re.sub(r"\]\([^)]*\)", "]", text)
    return len([word for word in shown.split() if re.search(r"\w", word)])


def too_long(page, most_in_cell, most_in_paragraph):
    """[what is longer than that, with its line]."""
    found = []
    for number, kind, text in elements(page):
        parts, most = [], 0
        if kind == "row":
            parts = re.split(r"(?<!\\)\|", text.strip("|"))
            most = most_in_cell
        elif kind == "paragraph":
            parts = [text]
            most = most_in_paragraph
        for part in parts:
            words = count_words(part)
            if words > most:
                found.append(f"line {number}: {'cell' if kind == 'row' else kind} of {words} words "
                             f"(at most {most}): {part.strip()[:50]} ...")
    return found


def anchors(page):
    """The names that a link to this page may have behind #, as GitHub makes them."""
    found = re.findall(r'<a (?:name|id)="([^"]+)"', page)
    for _, kind, text in elements(page):
        if kind == "heading":
            shown = re.sub(r"\]\([^)]*\)", "", text).lower()
            name = re.sub(r"[^\w\- ]", "", shown).replace(" ", "-")
            count = sum(known == name or known.startswith(f"{name}-") and known[len(name) + 1:]
                        .isdigit() for known in found)
            found.append(f"{name}-{count}" if name in found else name)
    return found


def links(page):
    """Yields (line number, target) of each link or picture outside of code."""
    in_code = False
    for number, line in enumerate(page.splitlines(), 1):
        if line.strip().startswith("```"):
            in_code = not in_code
        elif not in_code:
            for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "`", line)):
                yield number, target


def broken_links(path, page, root):
    """[a relative link whose file or anchor does not exist, with its line]."""
    found = []
    for number, target in links(page):
        if re.match(r"\w+:", target):               # https://, mailto:
            continue
        file, _, anchor = target.partition("#")
        place = (root / path).parent / file if file else root / path
        problem = None
        if not place.exists():
            problem = "no such file"
        elif re.fullmatch(r"L\d+", anchor):
            if int(anchor[1:]) > len(place.read_text().splitlines()):
                problem = "the file has fewer lines"
        elif anchor and anchor not in anchors(place.read_text()):
            problem = "no such heading"
        if problem:
            found.append(f"line {number}: {target}: {problem}")
    return found


def without_blocks(page):
    """The page without its generated blocks."""
    return docs.BLOCK.sub("", page)


# ---------------------------------------------------------------------------------------------
# The checkers find what they should
# ---------------------------------------------------------------------------------------------

# ---------------------------------------------------------------------------------------------
# The checkers find what they should
# ---------------------------------------------------------------------------------------------

def test_a_long_paragraph_item_or_cell_is_named_with_its_line():
    page = ("# A heading of more than five words here\n\none two [three](http://a/b) -- four\n"
            "five\n\n- one two three four five six\n- one\n\n| a | one two three |\n|---|---|\n"
            "```\none two three four five six seven\n```\n<!-- a comment of more than five words "
            "-->\n1. one two three four five `six`\n")
    assert too_long(page, 2, 5) == [
        "line 6: paragraph of 6 words (at most 5): - one two three four five six ...",
        "line 9: cell of 3 words (at most 2): one two three ...",
        "line 15: paragraph of 7 words (at most 5): 1. one two three four five `six` ..."]
    assert too_long(page, 3, 7) == []


def test_a_link_to_a_file_or_heading_that_does_not_exist_is_named_with_its_line(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "code.py").write_text("a = 1\nb = 2\n")
    (tmp_path / "docs" / "a.md").write_text("# One `--two`, three\n## Again\n## Again\n")
    page = ("[a](docs/a.md#one---two-three) [b](docs/a.md#again-1) [c](code.py#L2) [d](#here)\n"
            "[e](https://nowhere.invalid) `[f](nowhere)`\n\n## Here\n<a name=\"there\"></a>\n"
            "[g](#there) ![h](no.svg)\n[i](docs/a.md#again-2) [j](code.py#L3)\n[k](#nowhere)\n")
    (tmp_path / "README.md").write_text(page)
    assert broken_links("README.md", page, tmp_path) == [
        "line 6: no.svg: no such file", "line 7: docs/a.md#again-2: no such heading",
        "line 7: code.py#L3: the file has fewer lines", "line 8: #nowhere: no such heading"]
    assert broken_links("docs/a.md", "[a](../code.py#L1) [b](a.md) [c](code.py)", tmp_path) == [
        "line 1: code.py: no such file"]


def test_a_block_is_replaced_and_a_wrong_mark_is_refused():
    page = "before\n\n<!-- generated: faults -->\nworn out\n<!-- end -->\n\nafter\n"
    filled = docs.fill(page, "../")
    assert filled.startswith("before\n\n<!-- generated: faults -->\n\n| Fault | Tried |")
    assert filled.endswith("|\n\n<!-- end -->\n\nafter\n") and "worn out" not in filled
    assert docs.fill(filled, "../") == filled and "](../tests/test_survival.py)" in filled
    assert without_blocks(filled) == "before\n\n\n\nafter\n"
    with pytest.raises(ValueError, match="no block is called fault; there are train_flags, "):
        docs.fill(page.replace("faults", "fault"), "")
    for wrong in (page.replace("<!-- end -->\n", ""),
                  page.replace("worn out", "<!-- generated: faults -->")):
        with pytest.raises(ValueError, match="has no <!-- end -->"):
            docs.fill(wrong, "")


def test_marks_are_read_without_importing_the_tests(tmp_path, monkeypatch):
    (tmp_path / "tests").mkdir()
    (tmp_path / "test_all.py").write_text(
        "import nothing_of_this_name\n@pytest.mark.slow\n@pytest.mark.claim('one '\n    'two')\n"
        "def test_a(): pass\n")
    (tmp_path / "tests" / "test_b.py").write_text(
        "@pytest.mark.fault('x', tried=2, survived=1, note='y')\n@pytest.mark.claim('three')\n"
        "@pytest.mark.fault('z', tried=1, survived=0, note='')\ndef test_b(): pass\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    assert list(docs.marks("claim")) == [("test_all.py", "test_a", ["one two"], {}),
                                         ("tests/test_b.py", "test_b", ["three"], {})]
    assert [(mark.values, mark.named["survived"]) for mark in docs.marks("fault")] == [
        (["x"], 1), (["z"], 0)]


# ---------------------------------------------------------------------------------------------
# The form of the pages
# ---------------------------------------------------------------------------------------------

def problems(check):
    """"path, problem" of each page, by check(path, page)."""
    return [f"{path}, {problem}" for path, page in pages().items() for problem in check(path, page)]


def test_no_paragraph_and_no_cell_is_too_long():
    found = problems(lambda path, page: too_long(page, *LIMITS.get(path, LIMITS_OF_CHAPTERS)))
    assert not found, "\n".join(found)


def test_the_readme_is_read_in_one_sitting():
    lines = pages()["README.md"].count("\n")
    assert lines <= LINES_OF_README, f"README.md has {lines} lines: move text into docs/"


def test_a_chapter_has_500_to_1500_words():
    """Without its generated blocks. Links count with their text, code counts."""
    fewest, most = WORDS_OF_A_CHAPTER

    def check(path, page):
        words = count_words(without_blocks(page))
        if path.startswith("docs/") and path not in PAGES_OF_TABLES and not fewest <= words <= most:
            yield f"{words} words, not {fewest} to {most}"
    found = problems(check)
    assert not found, "\n".join(found)


def test_links_and_anchors_exist():
    found = problems(lambda path, page: broken_links(path, page, ROOT))
    assert not found, "\n".join(found)


def test_the_readme_links_every_page():
    all_pages = pages()
    linked = {target.partition("#")[0] for _, target in links(all_pages["README.md"])}
    missing = all_pages.keys() - linked - {"README.md"}
    assert len(all_pages) > 2 and not missing, f"README.md links to none of {sorted(missing)}"


# ---------------------------------------------------------------------------------------------
# What is generated
# ---------------------------------------------------------------------------------------------

def test_the_committed_pages_are_what_the_tool_writes():
    """Byte for byte."""
    outdated = sorted(docs.outdated())
    assert not outdated, f"run python -m tools.docs: it changes {', '.join(outdated)}"


def test_the_tool_writes_what_has_changed_and_says_so(tmp_path, monkeypatch, capsys):
    """With --check it writes nothing, and its exit status is 1."""
    (tmp_path / "parallelism").mkdir()
    for path in ("test_all.py", *docs.FILES_OF_FORMS):
        shutil.copy(ROOT / path, tmp_path / path)
    (tmp_path / "tests").mkdir()
    (tmp_path / "docs").mkdir()
    readme = tmp_path / "README.md"
    readme.write_text("<!-- generated: techniques -->\n<!-- end -->\n")
    page = tmp_path / "docs" / "a.md"
    page.write_text("<!-- generated: other_names -->\n<!-- end -->\n")
    monkeypatch.setattr(docs, "ROOT", tmp_path)
    program = SimpleNamespace(__name__="tools.docs", main=docs.main)
    files = ["README.md", "docs/a.md"]
    status, out, _ = run_main(capsys, program, "--check")
    assert status == 1 and page.read_text().count("\n") == 2
    assert out == "".join(f"{path} is out of date: run python -m tools.docs\n" for path in files)
    status, out, _ = run_main(capsys, program)
    assert status == 0 and out == "".join(f"wrote {path}\n" for path in files)
    assert "[`plain_pipeline`](parallel.py#L" in readme.read_text()
    assert run_main(capsys, program, "--check") == (0, "", "")
    readme.write_text("<!-- generated: techniques -->\n")
    status, _, error = run_main(capsys, program)
    assert status == 2 and error.startswith("tools.docs: README.md: a mark <!-- generated: ...")


def test_the_page_of_flags_has_every_flag_and_every_name_elsewhere():
    page = pages()["docs/flags.md"]
    of_other_programs = page[page.index("## Flags of"):page.index("## Names in other projects")]
    page = page.replace(of_other_programs, "")
    rows = {}
    for _, kind, text in elements(page):
        if kind == "row" and text.startswith("| `--"):
            rows.setdefault(re.match(r"\| `--([\w-]+)", text)[1], []).append(text)
    names = [field.name.replace("_", "-") for field in fields(Config)]
    assert [name for name in rows if name in names] == names and set(rows) == set(names)
    notes = re.findall(r"(?m)^### `--(.*)`$", page)
    assert len(notes) > 10 and not set(notes) - set(names) and not set(IN_PROJECTS) - set(names)
    assert {len(cells) for cells in IN_PROJECTS.values()} == {len(PROJECTS)}


def test_every_claim_and_fault_of_a_mark_stands_in_a_page():
    """The table of faults wherever a page has its block."""
    claims = list(docs.marks("claim"))
    page = pages()["docs/claims.md"]
    assert len(claims) >= 36 and len({mark.values[0] for mark in claims}) == len(claims)
    assert all(f"| {mark.values[0]} | `{mark.test}` |" in page for mark in claims)
    for mark in docs.marks("fault"):
        assert mark.named.keys() == {"tried", "survived", "note"}, mark
        assert 0 <= mark.named["survived"] <= mark.named["tried"], mark


# ---------------------------------------------------------------------------------------------
# Pictures and the transcript
# ---------------------------------------------------------------------------------------------

def test_every_picture_is_well_formed_and_follows_the_color_scheme():
    pictures = sorted(ROOT.glob("docs/images/*.svg"))
    assert {"block.svg", "schedules.svg", "layouts.svg"} <= {file.name for file in pictures}
    for file in pictures:
        content = file.read_text()
        assert "prefers-color-scheme:dark" in content, file
        assert "<title>" in content and xml.etree.ElementTree.fromstring(content) is not None, file


def test_exact_runs_in_two_layouts_are_one_line_of_the_picture(shards, tmp_path, capsys):
    """The same losses; their difference is none, and lies on the line for zero."""
    pytest.importorskip("matplotlib")
    flags = ["--data", shards, *TINY, "--exact", "--micro-batch", 1, "--eval-every", 0]
    outs = [tmp_path / "one", tmp_path / "two"]
    ranks = [*launch(1, *flags, "--out", outs[0]), *launch(2, *flags, "--tp", 2, "--out", outs[1])]
    assert [rank.finish()[0] for rank in ranks] == [0, 0, 0]
    file = tmp_path / "a.svg"
    status, text, error = run_main(capsys, tools.compare, "--svg", file, *outs)
    assert status == 0 and text.endswith(f"\nwrote {file}\n"), error
    runs = tools.compare.read_runs(outs)
    one, two = loss_picture.curves(runs, "loss")
    [strip] = loss_picture.strips(runs)
    assert one == two and len(one.losses) == 4 and strip.curves[0].losses == [0.0] * 4
    picture = file.read_text()
    assert ">difference from 1 process, with --exact: none<" in picture
    assert ">tp 2, exact<" in picture and "prefers-color-scheme:dark" in picture
    assert xml.etree.ElementTree.fromstring(picture) is not None


@pytest.mark.slow
def test_a_run_killed_in_the_middle_has_the_same_weights_as_in_the_transcript(shards, tmp_path):
    """The commands of the page's transcript, in one shell and with a smaller model. Each line that
    it shows is printed, in this order, with other numbers."""
    [block] = [code for page in pages().values() for code in page.split("```")[1::2]
               if "kill -9 $!" in code]
    lines = block.strip().splitlines()[1:]
    assert len(lines) <= 12 and lines[-1] == "the same"
    shutil.copytree(shards, tmp_path / "data" / "python")
    python = shlex.quote(sys.executable)
    smaller = "--n-layer 2 --n-head 2 --n-embd 96 --seq-len 64 --micro-batch 16"
    (tmp_path / "python").write_text(
        f'#!/bin/bash\n[ "$1" = train.py ] || exec {python} "$@"\n'
        f'exec {python} {shlex.quote(str(ROOT))}/"$@" {smaller}\n')
    (tmp_path / "python").chmod(0o755)
    commands = "\n".join(line[2:] for line in lines if line.startswith("$ "))
    done = subprocess.run(["bash", "-c", commands], cwd=tmp_path, text=True, timeout=300,
                          stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          env=dict(os.environ, PATH=f"{tmp_path}:{os.environ['PATH']}"))

    def masked(line):
        line = re.sub(r"\b(loss|lr|norm|left) +\S+|[\d,]+ tok/s", r"\1", line)
        return re.sub(r"step_\d+\.pt, after step \d+", "FILE", " ".join(line.split()))
    printed = iter(map(masked, done.stdout.splitlines()))
    for line in lines:
        if not line.startswith("$ "):
            assert masked(line) in printed, f"{line}\nis not in\n{done.stdout}"
