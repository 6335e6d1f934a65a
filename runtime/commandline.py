"""The command line's parser, for every program here."""
import argparse
import difflib
import fnmatch
import io
import re
import sys


class Parser(argparse.ArgumentParser):
    """The parser of all programs here. Flags may have underscores for dashes, as nanoGPT's.
    Mistakes end the program with status 2 and one line that names all flags that are unknown or
    have a value of the wrong kind. `advice` says what to do about some of them: {names elsewhere,
    or FLAG=VALUE for wrong values of our flags, as patterns of fnmatch: a sentence}. Otherwise the
    line suggests a flag of ours, with its help: by `other_names` {our flag: its names elsewhere},
    or by similarity."""

    def __init__(self, prog: str, usage: str, description=None, other_names=None, advice=None,
                 **options):
        super().__init__(prog, usage, description, allow_abbrev=False, exit_on_error=False,
                         formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self.other_names = other_names or {}
        self.advice = advice or {}

    def error(self, message: str, status: int = 2):
        self.exit(status, f"{self.prog}: {message}\n")

    def parse_args(self, arguments=None) -> argparse.Namespace:
        for stream in (sys.stdout, sys.stderr):     # a path may have letters that it cannot print
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="backslashreplace")
        if arguments is None:
            arguments = sys.argv[1:]
        given = [re.sub(r"^--[\w-]+(?=$|=)", lambda flag: flag[0].replace("_", "-"), text)
                 for text in arguments]
        problems = []
        kept = []
        for text in given:              # --compile=False, as nanoGPT's
            name, sep, _ = text.partition("=")
            if sep and getattr(self._option_string_actions.get(name), "nargs", None) == 0:
                problems.append(f"argument {name} takes no value: give {name} alone, or leave it "
                                f"out")
            else:
                kept.append(text)
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
        flags = [text for text in unknown if text.startswith("--") or text.endswith(".py")]
        if not problems and not flags:          # with those, others are their values
            flags = unknown[:1]
        for flag in flags:
            problems.append(f"unknown argument {flag}: {self.advise(flag)}")
        if problems:
            self.error("; ".join(problems))
        return args

    def explain(self, error: argparse.ArgumentError) -> str:
        """The message of a wrong value, with what to do instead where it is known."""
        message = str(error)
        if "invalid int value" in message:
            return f"{message}: give a whole number, such as 1000"
        value = re.search("'(.*?)'|$", error.message)[1] or ""
        sentence = self.find_advice(f"{error.argument_name}={value}")
        return f"{message}: {sentence}" if sentence else message

    def find_advice(self, name: str) -> str | None:
        for theirs, sentence in self.advice.items():
            if any(fnmatch.fnmatchcase(name.removeprefix("--"), known) for known in theirs.split()):
                return sentence
        return None

    def advise(self, unknown: str) -> str:
        name = unknown.partition("=")[0]
        sentence = self.find_advice(name)
        if sentence is not None:
            return sentence
        flags = {flag: action for action in self._actions for flag in action.option_strings}
        near = ["--" + ours for ours, theirs in self.other_names.items()
                if name.removeprefix("--") in theirs.split() and "--" + ours in flags]
        near += difflib.get_close_matches(name, flags, 1, 0.75)
        if not near:
            return "--help lists the flags"
        return f"did you mean {near[0]}? ({flags[near[0]].help % vars(flags[near[0]])})"
