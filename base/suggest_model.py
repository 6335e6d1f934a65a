"""What a wrong --model may mean: the nearest sizes, by family and by number of parameters, or a
model of the hub. The parsers of train.py and tools.plan ask it (commandline.add_flags).
"""
import difflib
import math
import re
from pathlib import Path

from models import SIZES

GPT2 = {"gpt2": 124e6, "gpt2-medium": 355e6, "gpt2-large": 774e6, "gpt2-xl": 1558e6}
UNITS = {"k": 1e3, "m": 1e6, "b": 1e9}
ALIKE = 1.05            # sizes this far apart are one: llama-7b and Llama-6.9B
NEAR = 2                # sizes of all families that are named


def split_name(name: str) -> tuple[str, float | None]:
    """(family, parameters) of a name in small letters: llama3-8b is ("llama3", 8e9), llama-nano
    ("llama", None). 8x7b are 8 experts: 56e9."""
    size = re.search(r"(?<![\d.])(?:(\d+)x)?(\d+(?:\.\d+)?)([kmb])(?![a-z])", name)
    family = name if size is None else name[:size.start()]
    if size is None and name in SIZES:
        family = name.partition("-")[0]
    parameters = GPT2.get(name)
    if size is not None:
        parameters = float(size[2]) * UNITS[size[3]]
        if size[1] is not None:
            parameters *= int(size[1])
    return family.strip("-_. "), parameters


def families() -> dict[str, list[str]]:
    """{family: its names of --model}, in the order of the tables."""
    found = {}
    for name in SIZES:
        found.setdefault(split_name(name)[0], []).append(name)
    return found


def by_distance(names: list[str], parameters: float) -> list[tuple[float, str]]:
    """(how many times larger or smaller, name) of those that have a number, the nearest first. Of
    equally near ones the order is that of the names."""
    sizes = {name: split_name(name)[1] for name in names}
    times = [(math.exp(abs(math.log(size / parameters))), name)
             for name, size in sizes.items() if size is not None]
    return sorted(times, key=lambda one: one[0])


def of_family(wanted: str, known: list[str]) -> list[str]:
    """The families that a wrong one may mean: itself, those that begin with it, or one that is
    spelled alike."""
    if wanted in known:
        return [wanted]
    begin = [family for family in known if wanted and family.startswith(wanted)]
    return begin or difflib.get_close_matches(wanted, known, 1, 0.75)


def suggest_model(value: str) -> str:
    """What to do about a `value` of --model that is no size, as the end of a sentence."""
    given = value.lower().rstrip("/").rpartition("/")[2]
    near, others = near_sizes(given)
    if "/" in value or Path(value, "config.json").exists():
        new = f"; for a new model of that size give --model {near[0]}" if others is None else ""
        return (f"it is a name for a new model, not for weights: make a checkpoint of these by "
                f"`python -m tools.huggingface import {value} FILE.pt`, give --init-from FILE.pt "
                f"and leave --model out{new}")
    if others is None:
        return f"did you mean {', '.join(near)}?"
    if near:
        found = f"the nearest are {', '.join(near)}"
        return f"{found}; of {others}" if others else found
    return f"the families are {', '.join(families())}; --help lists their sizes"


def near_sizes(given: str) -> tuple[list[str], str | None]:
    """(names of sizes, None) if a name in small letters means them; else (the nearest, the sizes of
    its family in words, which may be empty)."""
    if given in SIZES:
        return [given], None
    known = families()
    family, parameters = split_name(given)
    own = of_family(family, list(known))
    names = [name for one in own for name in known[one]]
    if parameters is None:
        if family not in known:                 # of an unfinished name, such as gpt3-6.
            names = [name for name in SIZES if given and name.startswith(given)] or names
        return names, None if names else ""
    alike = [name for times, name in by_distance(names, parameters) if times <= ALIKE]
    if alike:
        return alike, None
    near = [name for _, name in by_distance(list(SIZES), parameters)[:NEAR]]
    ends = {one: [name.removeprefix(f"{one}-") for name in known[one]] for one in own}
    return near, "; of ".join(f"{one}: {', '.join(sizes)}" for one, sizes in ends.items())
