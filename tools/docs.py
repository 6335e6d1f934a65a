"""Write the generated blocks of docs/flags.md from the code that they describe.

    python -m tools.docs

A block stands between two marks:

    <!-- generated: train_flags -->     base.options.Config; sizes, the names of --model
    <!-- generated: data_flags -->      the parser of data.py; sample_flags, that of sample.py
    <!-- generated: other_names -->     tools/other_names.py
    <!-- end -->
"""
import dataclasses
import re
from pathlib import Path

from base import sample_flags
from base.commandline import Parser, flag_name, placeholder
from base.errors import errors_in_one_line, errors_with_path
from base.options import LOCAL, SHAPE, Config
from corpus import flags as data_flags
from models import SIZES
from tools.other_names import IN_PROJECTS, PROJECTS

PAGE = Path(__file__).resolve().parents[1] / "docs/flags.md"
BLOCK = re.compile(r"^(<!-- generated: (\w+) -->\n)(.*?)^(<!-- end -->)$", re.S | re.M)
LONGEST_CELL = 25           # words; what is longer stands in a note


def row(*cells) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def heading(*columns) -> list[str]:
    return [row(*columns), "|" + "---|" * len(columns)]


def train_flags(page: str) -> list[str]:
    """One table, with a row before each group of --help. A flag whose meaning takes more than a
    cell has a note in the page, which the table links."""
    lines = heading("Flag", "Default", "Meaning", "When you resume")
    group = None
    for f in dataclasses.fields(Config):
        if f.metadata["group"] not in (None, group):
            group = f.metadata["group"]
            lines.append(row(f"**{group[0].upper()}{group[1:]}**", "", "", ""))
        lines.append(flag_row(f, page))
    return lines


def flag_row(f: dataclasses.Field, page: str) -> str:
    """The row of a field of Config: flag, default, meaning, what a resume does."""
    flag, help = flag_name(f.name), f.metadata["help"]
    found = re.fullmatch(r"(.*) \(default: (.*)\)", help)
    meaning, default = (found[1], found[2]) if found else (help, "none")
    value = "" if f.type is bool else f" {placeholder(f)}"
    if f.type is bool:
        default = "off"
    elif f.default is not None:
        default = f"`{f.default}`"
    elif f.name in SHAPE:
        default = "of `--model`"
    if f.name == "model":
        meaning = "named size"                  # the page lists them
    if f"\n- `{flag}`: " in page:
        if len(default.split()) > LONGEST_CELL:
            default = "see the note"
        meaning += " ([note](#notes))"
    return row(f"`{flag}{value}`", default, meaning, "repeat" if f.name in LOCAL else "kept")


def flags_of(parser: Parser) -> list[str]:
    """The flags of a program other than train.py, as its --help lists them."""
    rows = []
    for group in parser._action_groups[2:]:         # without those of argparse
        for action in group._group_actions:
            value = action.metavar
            if action.choices:
                value = "{" + ",".join(action.choices) + "}"
            if action.nargs == "+":
                value += " ..."
            flag = " ".join(filter(None, [action.option_strings[-1], value]))
            flag = flag.replace("|", r"\|")                # which ends a cell
            rows.append([f"`{flag}`", action.help % vars(action)])
    return [*heading("Flag", "Meaning"), *(row(*cells) for cells in rows)]


def other_names(page: str) -> list[str]:
    """The nearest flags of other projects."""
    names = [f.name.replace("_", "-") for f in dataclasses.fields(Config)]
    rows = [[f"`--{name}`", *IN_PROJECTS[name]] for name in names if name in IN_PROJECTS]
    return [*heading("Here", *PROJECTS), *(row(*cells) for cells in rows)]


BLOCKS = dict(train_flags=train_flags, other_names=other_names,
              sizes=lambda page: [f"The sizes are `{'`, `'.join(SIZES)}`."],
              data_flags=lambda page: flags_of(data_flags.make_parser()),
              sample_flags=lambda page: flags_of(sample_flags.make_parser()))


def filled(page: str) -> str:
    """The page with the content of its blocks replaced."""
    return BLOCK.sub(lambda found: f"{found[1]}\n" + "\n".join(BLOCKS[found[2]](page))
                     + f"\n\n{found[4]}", page)


@errors_in_one_line("tools.docs")
def main() -> None:
    Parser("tools.docs", "python -m tools.docs", __doc__).parse_args()
    page = PAGE.read_text()
    if filled(page) != page:
        with errors_with_path(PAGE):
            PAGE.write_text(filled(page))
        print("wrote docs/flags.md")


if __name__ == "__main__":
    main()
