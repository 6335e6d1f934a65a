"""The command line's parser, for every program here.
"""
import argparse
import difflib
import re
import sys


class Parser(argparse.ArgumentParser):
    """The parser of all programs here. Flags may have underscores for dashes, as nanoGPT's. A
    mistake ends the program with one line and status 2. For each unknown flag the line suggests one
    of ours, with its help: by `other_names` (our flag: its names elsewhere), or by similarity; or
    it says what to do instead (`advice`: a name elsewhere: a sentence)."""

    def __init__(self, prog: str, usage: str, description=None, other_names=None, advice=None,
                 **options):
        super().__init__(prog, usage, description, allow_abbrev=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.other_names = other_names or {}
        self.advice = advice or {}

    def error(self, message: str, status: int = 2):
        self.exit(status, f"{self.prog}: {message}\n")

    def parse_args(self, arguments=None) -> argparse.Namespace:
        if arguments is None:
            arguments = sys.argv[1:]
        given = [re.sub(r"^--[\w-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
                 for text in arguments]
        for text in given:              # --compile=False, as nanoGPT's
            name, sep, _ = text.partition("=")
            if sep and getattr(self._option_string_actions.get(name), "nargs", None) == 0:
                self.error(f"argument {name} takes no value: give {name} alone, or leave it out")
        args, unknown = self.parse_known_args(given)
        if unknown:
            flags = [text for text in unknown if text.startswith("--")] or unknown[:1]
            self.error("; ".join(f"unknown argument {flag}: {self.advise(flag)}" for flag in flags))
        return args

    def advise(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        if name.removeprefix("--") in self.advice:
            return self.advice[name.removeprefix("--")]
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        near = ["--" + ours for ours, theirs in self.other_names.items()
                if name.removeprefix("--") in theirs.split() and "--" + ours in flags]
        near += difflib.get_close_matches(name, flags, 1, 0.75)
        if not near:
            return "--help lists the flags"
        return f"did you mean {near[0]}? ({flags[near[0]].help % vars(flags[near[0]])})"
