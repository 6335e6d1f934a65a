"""The flags of every program here, and the mistakes in them.

    @dataclass(frozen=True)
    class Config(Flags):
        steps: int = flag(800, "steps of the whole run", low=1)

    parser = Parser("train.py", "python train.py [FLAG ...]", "Train a GPT.")
    add_flags(parser, Config)
    config = Config(**parser.parse(sys.argv[1:]))

Types, ranges and choices of the fields are checked here, and --help is made of them. Some tools add
their arguments to a Parser. A wrong command line ends in one line.
"""
import argparse
import dataclasses
import difflib
import io
import itertools
import math
import os
import re
import sys
import typing
from contextlib import suppress
from pathlib import Path


# ---- Flags as fields of a dataclass ----------------------------------------------------------

def flag(default, help, low=None, below=math.inf, choices=None, group=None, form=None):
    """A field that is a flag. Its value is of the field's type, or of several such values if that
    is list[type]. low <= value < below is the valid range; `group` begins a section of --help;
    `form` is the value's placeholder there."""
    if choices and form is None:
        form = "{" + ",".join(map(str, choices)) + "}"
    return dataclasses.field(default=default, metadata=dict(
        help=help, low=low, below=below, choices=choices, group=group, form=form))


@dataclasses.dataclass(frozen=True)
class Flags:
    """The values of some flags, also in a notebook. Raises ValueError for a wrong one."""

    def __post_init__(self):
        for f in dataclasses.fields(self):
            value, low, below = getattr(self, f.name), f.metadata["low"], f.metadata["below"]
            choices, must = f.metadata["choices"], None
            if value is not None and low is not None and not low <= value < below:
                must = f"at least {low} and {'finite' if below == math.inf else f'below {below}'}"
            elif value is not None and choices and value not in choices:
                must = f"one of {', '.join(map(str, choices))}"
            if must is not None:
                raise ValueError(f"argument {flag_name(f.name)}: {value} must be {must}")


def flag_name(name: str) -> str:
    """The flag of a field: n_layer is --n-layer."""
    return "--" + name.replace("_", "-")


def words_of(flags: dict) -> list[str]:
    """The words of a command with these values of fields. A switch that is off has none."""
    words = []
    for name, value in flags.items():
        if value is not False:
            words.append(flag_name(name))
        if isinstance(value, list):
            words += map(str, value)
        elif not isinstance(value, bool):
            words.append(str(value))
    return words


def groups_of(kind) -> dict[str, str]:
    """The group of --help of each field of a dataclass: that of the last one that names it."""
    groups = {}
    group = None
    for f in dataclasses.fields(kind):
        group = f.metadata["group"] or group
        groups[f.name] = group
    return groups


def add_flags(parser: "Parser", kind, names=None) -> None:
    """Add the fields of a dataclass, or of these `names`, to a parser, in their groups of --help.
    A flag that is not given is absent from what the parser returns."""
    headings = groups_of(kind)
    wanted = [f for f in dataclasses.fields(kind) if names is None or f.name in names]
    for heading, of_group in itertools.groupby(wanted, lambda f: headings[f.name]):
        group = parser.add_argument_group(heading)
        for f in of_group:
            options, help = dict(action="store_true"), f.metadata["help"]
            if f.type is not bool:
                help += "" if f.default in (None, "") else f" (default {f.default})"
                form = f.metadata["form"] or {int: "N", float: "X", str: "NAME"}[f.type]
                kind = (typing.get_args(f.type) or [f.type])[0]
                options = dict(type=kind, metavar=form, choices=f.metadata["choices"],
                               nargs="+" if typing.get_args(f.type) else None)
            group.add_argument(flag_name(f.name), help=help, default=argparse.SUPPRESS, **options)


# ---- The parser ------------------------------------------------------------------------------

INSTEAD = {     # what to do about an error of argparse, by words in its message
    "invalid int value": "give a whole number", "invalid float value": "give a number",
    "expected one argument": "give a value; one that begins with - as FLAG=VALUE",
    "ignored explicit argument": "a switch takes no value: give FLAG alone, or leave it out"}


def name_in_other_projects(name: str) -> list[str]:
    """The flags here of what nanoGPT or Megatron-LM calls --name, by the table in docs/flags.md."""
    page = Path(__file__).parents[1] / "docs/flags.md"
    rows = []
    with suppress(OSError):                     # a copy of the programs alone has no pages
        rows = re.findall(r"(?m)^\| `(--[\w-]+)` \|(.*\|.*)\|$", page.read_text("utf-8"))
    return [ours for ours, theirs in rows
            if name.lstrip("-") in re.findall("`-*([a-z0-9-]+)", theirs.replace("_", "-"))]


class Parser(argparse.ArgumentParser):
    """The parser of all programs here. Flags may have underscores for dashes, as nanoGPT's. A
    mistake ends the program with status 2 and one line, which suggests what is spelled alike."""

    def __init__(self, prog: str, usage: str, description=None, **options):
        super().__init__(prog, usage, description, allow_abbrev=False, exit_on_error=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message):
        self.exit(2, f"{self.prog}: {message}\n")

    def parse_args(self) -> argparse.Namespace:
        try:
            return argparse.Namespace(**self.parse(sys.argv[1:]))
        except ValueError as error:
            self.error(error)

    def parse(self, arguments) -> dict:
        """The values of the flags; those of `add_flags`, if they are given. Raises ValueError."""
        for stream in (sys.stdout, sys.stderr):     # a path may have letters that it cannot print
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        given = [re.sub(r"^--[\w.-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
                 for text in arguments]
        try:
            args, unknown = self.parse_known_args(given)
        except argparse.ArgumentError as error:
            raise ValueError(self.explain(error)) from None
        if unknown:
            raise ValueError(f"unknown argument {unknown[0]}: {self.advise(unknown[0])}")
        return vars(args)

    def _get_value(self, action, text: str):
        """One value. A shell leaves a ~ as it is behind = or a comma."""
        if re.search("DIR|FILE|PATH", str(action.metavar)):
            if text == "":              # --out "$OUT", where OUT is not set
                raise argparse.ArgumentError(action, "the value is empty: give a path (is a "
                                             "variable of the shell not set?)")
            text = ",".join(map(os.path.expanduser, text.split(",")))
        return super()._get_value(action, text)

    def explain(self, error: argparse.ArgumentError) -> str:
        """The message of a wrong value, with what to do instead."""
        flag, message = error.argument_name, str(error)
        action = self._option_string_actions.get(flag)
        if action is None or not action.choices or "invalid choice" not in message:
            told = [text for words, text in INSTEAD.items() if words in message]
            return ": ".join([message, *told]).replace("FLAG", flag or "")
        value = re.search(r"invalid choice: '?(.*?)'? \(choose", message)[1]
        value = value.lower().replace("bfloat", "bf").replace("float", "fp")     # of torch
        near = difflib.get_close_matches(value, list(map(str, action.choices)), 1)
        if len(action.choices) > 10:
            message = message.partition(" (choose from")[0] + ": --help lists the choices"
        return f"{message}: did you mean {near[0]}?" if near else message

    def advise(self, unknown: str) -> str:
        """What to do about a flag or a word that is unknown."""
        actions = self._option_string_actions
        if re.fullmatch(r"[^-].*\.(py|ya?ml|json|toml)", unknown):
            return "there are no configuration files: give flags, which --help lists"
        name = "--" + unknown.partition("=")[0].lstrip("-")
        elsewhere = name_in_other_projects(name)
        near = [flag for flag in elsewhere if flag in actions][:1]
        if elsewhere and not near:
            return f"it is {elsewhere[0]} here, of another program: --help lists the flags of this"
        near = near or [flag for flag in actions if flag.startswith(name)]
        if len(near) != 1:
            near = difflib.get_close_matches(name, actions, 1, 0.75)
        if near:
            return f"did you mean {near[0]}? ({actions[near[0]].help % vars(actions[near[0]])})"
        return "--help lists the flags"
