"""The flags of every program here, and the mistakes in them.

    @dataclass(frozen=True)
    class Flags:
        steps: int = flag(800, "steps of the whole run", low=1)

    parser = Parser("train.py", "python train.py [FLAG ...]", "Train a GPT.", ADVICE)
    add_flags(parser, Flags)
    flags = Flags(**parse_given(parser, sys.argv[1:]))

The fields of a dataclass are the flags of train.py, data.py, sample.py and tools.plan. Their types,
ranges and choices are checked here, and --help is made of them. The other tools add their arguments
to a Parser. A wrong command line ends in one line that names all mistakes.
"""
import argparse
import dataclasses
import difflib
import fnmatch
import io
import itertools
import math
import os
import re
import sys
import typing

from base.other_names import flags_called


# ---- Flags as fields of a dataclass ----------------------------------------------------------

def flag(default, help, low=None, below=math.inf, choices=None, group=None, form=None,
         suggest=None):
    """A field that is a flag. Its value is of the field's type, or of several such values if that
    is list[type]. low <= value < below is the valid range; `group` begins a section of --help;
    `form` is the value's placeholder there; `suggest` says of a value that is none of the choices
    what to do."""
    if choices and form is None:
        form = "{" + ",".join(map(str, choices)) + "}"
    return dataclasses.field(default=default, metadata=dict(
        help=help, low=low, below=below, choices=choices, group=group, form=form,
        suggest=suggest))


def flag_name(name: str) -> str:
    """The flag of a field: n_layer is --n-layer."""
    return "--" + name.replace("_", "-")


def placeholder(f: dataclasses.Field) -> str:
    """What stands for the value of a field in --help."""
    return f.metadata["form"] or {int: "N", float: "X", str: "NAME"}[f.type]


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


def add_flags(parser: "Parser", kind, names=None) -> None:
    """Add the fields of a dataclass, or of these `names`, to a parser, in their groups of --help.
    A flag that is not given is absent from what the parser returns."""
    groups, heading = {}, None
    for f in dataclasses.fields(kind):
        heading = f.metadata["group"] or heading    # that of the fields after it, too
        if names is not None and f.name not in names:
            continue
        if heading not in groups:
            groups[heading] = parser.add_argument_group(heading)
        options = dict(help=f.metadata["help"], default=argparse.SUPPRESS)
        if f.type is bool:
            groups[heading].add_argument(flag_name(f.name), action="store_true", **options)
            continue
        if f.default not in (None, ""):
            options["help"] += f" (default {f.default})"
        if typing.get_args(f.type):
            options["nargs"] = "+"
        groups[heading].add_argument(flag_name(f.name), type=reader_of(f), metavar=placeholder(f),
                                     choices=f.metadata["choices"], **options)
        if f.metadata["suggest"] is not None:
            parser.suggestions[flag_name(f.name)] = f.metadata["suggest"]


def reader_of(f: dataclasses.Field):
    """The function that makes a value of a field from a text, and checks its range."""
    kind = (typing.get_args(f.type) or [f.type])[0]
    low, below = f.metadata["low"], f.metadata["below"]

    def read(text):
        value = kind(text)
        if low is not None and not low <= value < below:
            limit = "finite" if below == math.inf else f"below {below}"
            raise argparse.ArgumentTypeError(f"{text} must be at least {low} and {limit}")
        return value
    read.__name__ = kind.__name__       # which argparse shows for a value of another kind
    return read


def parse_given(parser: "Parser", arguments) -> dict:
    """The flags that were given, of a parser that has those of `add_flags`. Raises ValueError."""
    args, problems = parser.parse(arguments)
    if problems:
        raise ValueError("; ".join(problems))
    return vars(args)


# ---- The parser ------------------------------------------------------------------------------

INSTEAD = {     # what to do about an error of argparse, by words in its message
    "invalid int value": "give a whole number",
    "invalid float value": "give a number",
    "expected one argument": "give a value; one that begins with - as FLAG=VALUE",
    "ignored explicit argument": "a switch takes no value: give FLAG alone, or leave it out"}


class Parser(argparse.ArgumentParser):
    """The parser of all programs here. Flags may have underscores for dashes, as nanoGPT's.
    Mistakes end the program with status 2 and one line. `advice` says what to do about some of
    them: {names elsewhere, or FLAG=VALUE for wrong values of our flags, as patterns of fnmatch: a
    sentence}. The advice for "" is for words without a flag. Otherwise the line suggests a flag of
    ours, by its name in another project (other_names.py) or by similarity."""

    def __init__(self, prog: str, usage: str, description=None, advice=None, **options):
        super().__init__(prog, usage, description, allow_abbrev=False, exit_on_error=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.advice = advice or {}
        self.suggestions = {}           # flag: function of a wrong value -> what to do, in words
        self.problems = []              # of the command line that is parsed now

    def error(self, message: str, status: int = 2):
        self.exit(status, f"{self.prog}: {message}\n")

    def parse_args(self, arguments=None) -> argparse.Namespace:
        args, problems = self.parse(sys.argv[1:] if arguments is None else arguments)
        if problems:
            self.error("; ".join(problems))
        return args

    def parse(self, arguments) -> tuple[argparse.Namespace, list[str]]:
        """(the values, what is wrong with the command line)."""
        for stream in (sys.stdout, sys.stderr):     # a path may have letters that it cannot print
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        given = [re.sub(r"^--[\w.-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
                 for text in arguments]
        lacking = []                # problems of a flag without a value, or a switch with one
        while True:
            self.problems = []      # _get_values adds the others
            try:
                args, unknown = self.parse_known_args(given)
                break
            except argparse.ArgumentError as error:
                lacking.append(self.explain(error))
                if error.argument_name not in self._option_string_actions:      # a word's
                    return argparse.Namespace(), self.problems + lacking
                given = [text for text in given if text.partition("=")[0] != error.argument_name]
        problems = self.problems + lacking
        words = list(itertools.takewhile(lambda text: not text.startswith("-"), unknown))
        if words:                   # behind an unknown flag they are its values
            problems.append(f"unknown argument {' '.join(words)}: {self.advise(words[0])}")
        for text in unknown:
            if text.startswith("-"):
                problems.append(f"unknown argument {text}: {self.advise(text)}")
        return args, problems

    def _get_values(self, action, texts):
        """The values of one flag. Parsing continues after a wrong one, to find all mistakes."""
        try:
            return super()._get_values(action, texts)
        except argparse.ArgumentError as error:
            if not action.option_strings:       # a word, such as import or export
                raise
            self.problems.append(self.explain(error))
            return None

    def _get_value(self, action, text: str):
        """One value. A shell leaves a ~ as it is behind = or a comma."""
        if re.search("DIR|FILE|PATH", str(action.metavar)):
            if text == "":              # --out "$OUT", where OUT is not set
                raise argparse.ArgumentError(action, "the value is empty: give a path (is a "
                                             "variable of the shell not set?)")
            text = ",".join(map(os.path.expanduser, text.split(",")))
        return super()._get_value(action, text)

    def explain(self, error: argparse.ArgumentError) -> str:
        """The message of a wrong value, with what to do instead where it is known."""
        flag = error.argument_name
        value = (re.findall("'(.*?)'", error.message) or [""])[0]
        message = str(error)
        sentences = [self.find_advice(f"{flag}={value}")]
        if "invalid choice" in message and flag in self._option_string_actions:
            choices = list(map(str, self._option_string_actions[flag].choices))
            near = difflib.get_close_matches(value.lower(), choices, 1)
            if flag in self.suggestions:
                message = message.partition(" (choose from")[0]     # the list would hide the rest
                sentences.append(self.suggestions[flag](value))
            elif near:
                sentences.append(f"did you mean {near[0]}?")
        sentences += [sentence.replace("FLAG", flag) for words, sentence in INSTEAD.items()
                      if words in message]
        return ": ".join([message, *list(filter(None, sentences))[:1]])

    def find_advice(self, name: str) -> str | None:
        for theirs, sentence in self.advice.items():
            if any(fnmatch.fnmatchcase(name.removeprefix("--"), known) for known in theirs.split()):
                return sentence
        return None

    def advise(self, unknown: str) -> str:
        """What to do about a flag or a word that is unknown."""
        ours = self._option_string_actions
        name = unknown.partition("=")[0]
        sentence = self.find_advice(name)
        if sentence is not None:
            return sentence
        bare = name.lstrip("-")
        near = [f"--{same}" for same in (bare, *flags_called(bare)) if f"--{same}" in ours]
        if not near and name.startswith("--"):
            near = [flag for flag in ours if flag.startswith(name)]
            if len(near) != 1:
                near = difflib.get_close_matches(name, ours, 1, 0.75)
        if near:
            return f"did you mean {near[0]}? ({ours[near[0]].help % vars(ours[near[0]])})"
        if name.startswith("-"):
            return "--help lists the flags"
        return self.advice.get("", "--help lists the flags")
