"""The command line's parser, for every program here."""
import argparse
import difflib
import fnmatch
import io
import itertools
import os
import re
import sys


def whole_number(text: str) -> int:
    """The whole number that 1e3, 10k, 1,000 or 2.0 may mean; 1000 for all else."""
    parts = re.fullmatch(r"(\d[\d,]*(?:\.\d+)?(?:[eE]\d+)?)([kKmMbB]?)", text)
    number = 0
    if parts is not None:
        factor = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}[parts[2].lower()]
        number = float(parts[1].replace(",", "")) * factor
    return int(number) if 1 <= number < 1e18 else 1000


def nearest(value: str, choices: list[str]) -> list[str]:
    """The choices that a wrong value, in small letters, may mean: itself; else those that begin
    with it; else the most similar one, if any."""
    if value in choices:
        return [value]
    begin = [choice for choice in choices if value and choice.startswith(value)]
    return begin or difflib.get_close_matches(value, choices, 1, 0.65)


class Parser(argparse.ArgumentParser):
    """The parser of all programs here. Flags may have underscores for dashes, as nanoGPT's.
    Mistakes end the program with status 2 and one line that names all flags that are unknown or
    have a value of the wrong kind. `advice` says what to do about some of them: {names elsewhere,
    or FLAG=VALUE for wrong values of our flags, as patterns of fnmatch: a sentence}. Otherwise the
    line suggests a flag of ours, with its help: by `other_names` {our flag: its names elsewhere},
    or by similarity. The advice for "" is for a value without a flag."""

    def __init__(self, prog: str, usage: str, description=None, other_names=None, advice=None,
                 **options):
        super().__init__(prog, usage, description, allow_abbrev=False, exit_on_error=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.other_names = other_names or {}
        self.advice = advice or {}
        self.suggestions = {}           # flag: function of a wrong value -> what to do, in words

    def error(self, message: str, status: int = 2):
        self.exit(status, f"{self.prog}: {message}\n")

    def parse_args(self, arguments=None) -> argparse.Namespace:
        for stream in (sys.stdout, sys.stderr):     # a path may have letters that it cannot print
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        if arguments is None:
            arguments = sys.argv[1:]
        given = [re.sub(r"^--[\w.-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
                 for text in arguments]
        kept, problems = self.check_values(given)
        args = None
        while args is None:
            try:
                args, unknown = self.parse_known_args(kept)
            except argparse.ArgumentError as error:     # a wrong value: leave out its flag
                problems.append(self.explain(error))
                others = [text for text in kept if text.partition("=")[0] != error.argument_name]
                if others == kept:
                    self.error("; ".join(problems))
                kept = others
        flags = [text for text in unknown if re.match("--|-[a-zA-Z]", text) or
                 text.endswith(".py")]
        if not problems:                        # with those, others may be their values
            flags = list(itertools.takewhile(lambda text: text not in flags, unknown)) + flags
        for flag in flags:
            problems.append(f"unknown argument {flag}: {self.advise(flag)}")
        if problems:
            self.error("; ".join(problems))
        return args

    def check_values(self, given: list[str]) -> tuple[list[str], list[str]]:
        """(the arguments without switches that have a value, with ~ replaced in paths, problems)"""
        problems = []
        kept = []
        flag = ""
        for text in given:
            name, sep, value = text.partition("=")
            if sep and getattr(self._option_string_actions.get(name), "nargs", None) == 0:
                problems.append(f"argument {name} takes no value: give {name} alone, or leave it "
                                f"out")          # --compile=False, as nanoGPT's
                continue
            is_value = not text.startswith("-")     # of the last flag before it
            if is_value:
                name, value = flag, text
            else:
                flag = text
            if (sep or is_value) and self.takes_path(name):
                if value == "":             # --out "$OUT", where OUT is not set
                    problems.append(f"argument {name}: the value is empty: give a path (is a "
                                    f"variable of the shell not set?)")
                # A shell leaves a ~ behind = or a comma as it is.
                value = ",".join(map(os.path.expanduser, value.split(",")))
                text = value if is_value else f"{name}={value}"
            kept.append(text)
        return kept, problems

    def takes_path(self, name: str) -> bool:
        metavar = getattr(self._option_string_actions.get(name), "metavar", None)
        return re.search("DIR|FILE", str(metavar)) is not None

    def explain(self, error: argparse.ArgumentError) -> str:
        """The message of a wrong value, with what to do instead where it is known."""
        message = str(error)
        value = re.search("'(.*?)'|$", error.message)[1] or ""
        sentence = self.find_advice(f"{error.argument_name}={value}")
        choices = getattr(self._option_string_actions.get(error.argument_name), "choices", None)
        suggest = self.suggestions.get(error.argument_name)
        if sentence is None and suggest is not None and "invalid choice" in message:
            sentence = suggest(value)
        near = nearest(value.lower(), [str(choice) for choice in choices or ()])
        if sentence is None and near:
            sentence = f"did you mean {', '.join(near)}?"
            if near == [value.lower()]:
                sentence = f"give {near[0]}"
        elif sentence is None and "invalid int value" in message:
            sentence = f"give a whole number, such as {whole_number(value)}"
            if choices:
                sentence = f"give one of {', '.join(map(str, choices))}"
        elif sentence is None and "invalid float value" in message:
            sentence = "give a number, such as 0.1"
        elif sentence is None and "expected one argument" in message:
            sentence = f"give a value; one that begins with - as {error.argument_name}=VALUE"
        if sentence is None:
            return message
        if choices is not None and len(choices) > 10:       # the list would hide the sentence
            message = message.partition(" (choose from")[0]
        return f"{message}: {sentence}"

    def find_advice(self, name: str) -> str | None:
        for theirs, sentence in self.advice.items():
            if any(fnmatch.fnmatchcase(name.removeprefix("--"), known) for known in theirs.split()):
                return sentence
        return None

    def advise(self, unknown: str) -> str:
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        name = unknown.partition("=")[0]
        last = name.rpartition(".")[2].replace("_", "-")    # of --train.max_steps, as litgpt's
        sentence = self.find_advice(name) or self.find_advice(last)
        if sentence is not None:
            return sentence
        bare = last.lstrip("-")
        near = ["--" + ours for ours, theirs in self.other_names.items()
                if bare in theirs.split() and "--" + ours in flags]
        if "--" + bare in flags:
            near = ["--" + bare]
        elif len(bare) > 1 and name.startswith("-"):    # one letter resembles any short flag
            near += difflib.get_close_matches("--" + bare, flags, 1, 0.75)
        if near:
            return f"did you mean {near[0]}? ({flags[near[0]].help % vars(flags[near[0]])})"
        if not name.startswith("-") and "" in self.advice:
            return self.advice[""]
        return "--help lists the flags"
