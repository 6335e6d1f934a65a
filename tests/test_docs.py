"""The pages of the documentation: their form, their links, and that flags.md has every flag.

The commands of the pages have tests in tests/test_readme.py."""
import ast
import re
from dataclasses import fields
from pathlib import Path

import pytest

from base.commandline import Parser, add_flags, flag_name
from base.options import LOCAL, SHAPE, Config
from base.sample_flags import SampleFlags
from corpus.program import DataFlags
from models import SIZES
from tests.commands import PAGES
from tests.harness import ROOT

WORDS = dict(cell=15, paragraph=60)             # at most, but for pages that are made of code
OF_CODE = ("flags.md", "claims.md", "faults.md")


def without_code(page):
    return re.sub(r"(?ms)^ *```.*?^ *```$", "", page)


def parts_of(page):
    """Yields (kind, text) of each "heading", "cell" and "paragraph". An item of a list is a
    paragraph."""
    page = re.sub(r"(?m)^ *(#.*|\|.*|<!--.*)$", r"\n\1\n", without_code(page))
    page = re.sub(r"(?m)^( *([-*]|\d+\.) )", r"\n\1", page)
    for part in re.split(r"\n\s*\n", page):
        text = " ".join(part.split())
        if text.startswith("#"):
            yield "heading", text.lstrip("# ")
        elif text.startswith("|"):
            yield from (("cell", cell) for cell in re.split(r"(?<!\\)\|", text.strip("|")))
        elif not text.startswith("<!--"):
            yield "paragraph", text


def count_words(text):
    """A link counts with its text alone; signs without a letter or digit are no words."""
    shown = re.sub(r"\]\([^)]*\)", "]", text)
    return len([word for word in shown.split() if re.search(r"\w", word)])


def anchors(page):
    """The names that a link to this page may have behind #, as GitHub makes them."""
    shown = (re.sub(r"\]\([^)]*\)", "", text).lower() for kind, text in parts_of(page)
             if kind == "heading")
    return [*re.findall(r'<a name="([^"]+)"', page),
            *(re.sub(r"[^\w\- ]", "", text).replace(" ", "-") for text in shown)]


def links(page):
    """The targets of links and pictures."""
    return re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`]*`", "`", without_code(page)))


def test_no_paragraph_and_no_cell_is_too_long():
    found = []
    for name, page in PAGES.items():
        most = dict(cell=25, paragraph=90) if name in OF_CODE else WORDS
        found += [f"{name}: {kind} of {count_words(text)} words, at most {most[kind]}: {text[:50]}"
                  for kind, text in parts_of(page)
                  if kind in most and count_words(text) > most[kind]]
    assert not found, "\n".join(found)


def test_links_and_anchors_exist():
    found = []
    for name, page in PAGES.items():
        folder = ROOT if name == "README.md" else ROOT / "docs"
        for target in links(page):
            file, _, anchor = target.partition("#")
            place = folder / (file or name)
            if not re.match(r"\w+:", target) and not (          # https://, mailto:
                    place.exists() and (not anchor or anchor in anchors(place.read_text()))):
                found.append(f"{name}: {target}")
    assert not found, "\n".join(found)


def test_the_readme_is_read_in_one_sitting_and_links_every_page():
    assert PAGES["README.md"].count("\n") <= 150, "move text into docs/"
    linked = {Path(target.partition("#")[0]).name for target in links(PAGES["README.md"])}
    missing = PAGES.keys() - linked - {"README.md"}
    assert len(PAGES) > 2 and not missing, f"README.md links to none of {sorted(missing)}"


def row_of_train(f, meaning, page) -> str:
    """The cells after the flag: its default, its meaning, what a resume does."""
    meaning, _, default = meaning.removesuffix(")").partition(" (default")
    if f.type is bool:
        default = "off"
    elif f.default is not None:
        default = f"`{f.default}`"
    elif f.name in SHAPE:
        default = "of `--model`"
    default = default.removeprefix(": ") or "none"
    if f.name == "model":
        meaning = "named size"                  # the page lists them
    if f"\n- `{flag_name(f.name)}`: " in page:
        meaning += " ([note](#notes))"
    if f.name == "micro_batch":
        default = "see the note"
    return f"{default} | {meaning} | {'repeat' if f.name in LOCAL else 'kept'}"


@pytest.mark.parametrize("kind, heading", [
    (Config, "# Flags of train.py"), (DataFlags, "## Flags of data.py"),
    (SampleFlags, "## Flags of sample.py")])
def test_the_page_of_flags_has_every_flag_in_the_words_of_help(kind, heading):
    """A row for each flag and no other, in the order of --help, with its placeholder and default.
    Of train.py the page also has the named sizes."""
    page = PAGES["flags.md"]
    parser = Parser("", "", "")
    add_flags(parser, kind)
    wanted = []
    for f, action in zip(fields(kind), parser._actions[1:], strict=True):       # without --help
        words = [flag_name(f.name), action.metavar, "..." if action.nargs == "+" else None]
        flag = " ".join(filter(None, words)).replace("|", r"\|")                # which ends a cell
        meaning = row_of_train(f, action.help, page) if kind is Config else action.help
        wanted.append(f"| `{flag}` | {meaning} |")
    part = re.split("(?m)^## ", page.partition(heading)[2])[0]
    assert re.findall(r"(?m)^\| `--.*", part) == wanted
    assert kind is not Config or f"The sizes are `{'`, `'.join(SIZES)}`." in page


def test_the_table_of_techniques_names_functions_and_tests_that_exist():
    rows = re.findall(r"\[`(\w+)`\]\(\.\./([\w/]+\.py)\)", PAGES["techniques.md"])
    assert len(rows) > 20
    for name, file in rows:
        assert re.search(rf"(?m)^(def|class) {name}\b", (ROOT / file).read_text()), name


def marks(kind):
    """[(words, test, named arguments)] of @pytest.mark.<kind>; the tests are parsed."""
    found = []
    for file in (ROOT / "test_all.py", *sorted(ROOT.glob("tests/test_*.py"))):
        for node in ast.parse(file.read_text()).body:
            for mark in getattr(node, "decorator_list", ()):
                if isinstance(mark, ast.Call) and ast.unparse(mark.func) == f"pytest.mark.{kind}":
                    found.append((ast.literal_eval(mark.args[0]), node.name,
                                  {word.arg: ast.literal_eval(word.value)
                                   for word in mark.keywords}))
    return found


def test_every_claim_and_fault_of_a_mark_stands_in_its_page():
    page = PAGES["claims.md"]
    missing = [f"| {words} | `{test}` |" for words, test, _ in marks("claim")
               if f"| {words} | `{test}` |" not in page]
    assert not missing and page.count("| `test_") == len(marks("claim")), "\n".join(missing)
    for words, _, named in marks("fault"):
        row = f"| {words} | {named['tried']:,} | {named['survived']:,} | {named['note']} |"
        assert row in PAGES["faults.md"], row
