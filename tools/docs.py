"""Write the generated blocks of README.md and docs/ from the code that they describe.

    python -m tools.docs                # write them
    python -m tools.docs --check        # only say which differ; exit status 1 if one does

README.md and the pages of docs/ have blocks, whose content stands between two marks:

    <!-- generated: train_flags -->     base.options.Config; sizes, the names of --model
    <!-- generated: data_flags -->      the parser of data.py; sample_flags, that of sample.py
    <!-- generated: other_names -->     tools/other_names.py
    <!-- generated: claims -->          the marks @pytest.mark.claim of the tests
    <!-- generated: faults -->          the marks @pytest.mark.fault of the tests
    <!-- generated: techniques -->      TECHNIQUES below; lines are counted in the code
    <!-- generated: schedules -->       tools.schedule
    <!-- end -->

The tests are parsed, not imported. Other tools write pictures to docs/images: layouts.svg is by
tools.compare --svg (docs/exact.md), schedules.svg by tools.schedule --svg, as its docstring says.
"""
import ast
import dataclasses
import re
import sys
from pathlib import Path
from typing import Iterator, NamedTuple

from base import sample_flags
from base.commandline import Parser, flag_name, placeholder
from base.errors import errors_in_one_line, named
from base.options import LOCAL, SHAPE, Config
from corpus import flags as data_flags
from models import SIZES
from tools import schedule
from tools.markdown_tables import heading, row, table
from tools.other_names import IN_PROJECTS, PROJECTS

ROOT = Path(__file__).resolve().parents[1]
FLAGS_PAGE = ROOT / "docs/flags.md"
BLOCK = re.compile(r"^(<!-- generated: (\w+) -->\n)(.*?)^(<!-- end -->)$", re.S | re.M)
LONGEST_CELL = 25           # words; what is longer stands in a note

MEGATRON = "[Megatron-LM](https://arxiv.org/abs/1909.08053)"
DDP = "[PyTorch DDP](https://arxiv.org/abs/2006.15704)"
REPLICAS = "test_replicas_train_as_one_process_and_stay_equal"
TENSOR = "test_plain_tensor_parallel_layers_equal_the_whole_layers"
TECHNIQUES = [              # (technique, paper, its simple forms, the test that compares them)
    ("Tensor parallelism", MEGATRON, ["PlainColumnLinear", "PlainRowLinear"], TENSOR),
    ("Vocabulary-parallel loss", MEGATRON, ["PlainVocabHead"], TENSOR),
    ("Sequence parallelism", "[Korthikanti et al.](https://arxiv.org/abs/2205.05198)",
     ["f", "g"], "test_plain_sequence_parallel_layers_equal_the_whole_layers"),
    ("Pipeline parallelism", "[GPipe](https://arxiv.org/abs/1811.06965)",
     ["plain_gpipe", "plain_pipeline"],
     "test_plain_pipelines_give_the_gradients_of_the_whole_model"),
    ("1F1B", "[Narayanan et al.](https://arxiv.org/abs/2104.04473)", ["plain_1f1b"],
     "test_plain_pipelines_give_the_gradients_of_the_whole_model"),
    ("Data parallelism", DDP, ["plain_step"], REPLICAS),
    ("Overlap with backward", DDP, ["PlainBucket"], REPLICAS),
    ("ZeRO 1", "[Rajbhandari et al.](https://arxiv.org/abs/1910.02054)",
     ["plain_shards", "reduce_scatter_gradients", "all_gather_parameters"], REPLICAS),
    ("ZeRO 2", "[Rajbhandari et al.](https://arxiv.org/abs/1910.02054)",
     ["reduce_scatter_in_backward"], REPLICAS),
    ("ZeRO 3", "[FSDP](https://arxiv.org/abs/2304.11277)",
     ["PlainGathered", "gather_in_use"], REPLICAS),
    ("Context parallelism", "[Llama 3, 3.3.2](https://arxiv.org/abs/2407.21783)",
     ["PlainContextAttention"], "test_plain_context_attention_equals_plain_attention"),
    ("Expert parallelism", "[GShard](https://arxiv.org/abs/2006.16668)",
     ["exchange", "plain_experts"], "test_plain_experts_have_the_gradients_of_all"),
    ("3D parallelism", "[Narayanan et al.](https://arxiv.org/abs/2104.04473)", ["plain_3d_step"],
     "test_plain_program_has_the_losses_of_train_py"),
    ("Loss scaling", "[Micikevicius et al.](https://arxiv.org/abs/1710.03740)",
     ["plain_scaled_step"], "test_plain_scaled_step_equals_that_of_torchs_scaler"),
    ("Exact sums", "[Demmel and Nguyen](https://doi.org/10.1109/ARITH.2013.9)",
     ["plain_exact_sum"], "test_an_exact_sum_is_the_same_in_every_order"),
    ("Training loop, AdamW", "[Loshchilov and Hutter](https://arxiv.org/abs/1711.05101)",
     ["plain_train"], "test_the_plain_program_has_the_losses_of_a_run"),
    ("Batches", "", ["plain_batch"], "test_plain_batch_reads_what_a_run_reads"),
    ("Checkpoints", "", ["plain_save", "plain_load"],
     "test_a_plain_run_continues_in_eight_ranks_and_back"),
    ("Sampling", "", ["plain_generate"], "test_plain_generate_draws_what_sample_draws")]
FILES_OF_FORMS = ("parallel.py", "amp.py", "parallelism/exact_sums.py", "train.py", "data.py",
                  "checkpoint.py", "sample.py")

SCHEDULES = [               # (stages, microbatches, schedule, chunks)
    (3, 4, "gpipe", 1), (3, 4, "1f1b", 1), (2, 4, "interleaved", 2), (3, 4, "zb-h1", 1)]


# ---------------------------------------------------------------------------------------------
# Flags
# ---------------------------------------------------------------------------------------------


def train_flags_block(up: str) -> list[str]:
    """A table for each group of --help. A flag whose meaning takes more than a cell has a heading
    in the page, with a note under it: the table links it."""
    page = FLAGS_PAGE.read_text()
    lines = []
    group = None
    for f in dataclasses.fields(Config):
        if f.metadata["group"] not in (None, group):
            group = f.metadata["group"]
            lines += ["", f"## {group[0].upper()}{group[1:]}", "",
                      *heading("Flag", "Default", "Meaning", "When you resume")]
        lines.append(flag_row(f, page))
    return lines[1:]


def flag_row(f: dataclasses.Field, page: str) -> str:
    """The row of a field of Config: flag, default, meaning, what a resume does."""
    flag = flag_name(f.name)
    meaning, default = split_help(f.metadata["help"])
    value = ""
    if f.type is bool:
        default = "off"
    else:
        value = f" {placeholder(f)}"
        if f.default is not None:
            default = f"`{f.default}`"
        elif f.name in SHAPE:
            default = "of `--model`"
    if f.name == "model":
        meaning = "named size"                  # the page lists them
    if f"### `{flag}`\n" in page:
        if len(default.split()) > LONGEST_CELL:
            default = "see the note"
        meaning += f" ([note](#{flag}))"
    return row(f"`{flag}{value}`", default, meaning, "repeat" if f.name in LOCAL else "kept")


def split_help(help: str) -> tuple[str, str]:
    """(meaning, default) of a text such as "sequences (default: 4)"."""
    found = re.fullmatch(r"(.*) \(default: (.*)\)", help)
    return (found[1], found[2]) if found else (help, "none")


def sizes_block(up: str) -> list[str]:
    return ["The sizes are " + ", ".join(f"`{name}`" for name in SIZES) + "."]


def parser_block(parser: Parser) -> list[str]:
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
    return table(["Flag", "Meaning"], rows)


def other_names_block(up: str) -> list[str]:
    """The nearest flags of other projects."""
    names = [f.name.replace("_", "-") for f in dataclasses.fields(Config)]
    rows = [[f"`--{name}`", *IN_PROJECTS[name]] for name in names if name in IN_PROJECTS]
    return table(["Here", *PROJECTS], rows)


# ---------------------------------------------------------------------------------------------
# Marks on tests
# ---------------------------------------------------------------------------------------------


class Mark(NamedTuple):
    file: str               # such as tests/test_survival.py
    test: str
    values: list            # what the mark was given
    named: dict


def marks(kind: str) -> Iterator[Mark]:
    """The marks @pytest.mark.<kind>(...) in the order of the files and of the tests in them."""
    for file in (ROOT / "test_all.py", *sorted(ROOT.glob("tests/test_*.py"))):
        for node in ast.parse(file.read_text()).body:
            if not isinstance(node, ast.FunctionDef):
                continue
            for decorator in node.decorator_list:
                if (isinstance(decorator, ast.Call)
                        and ast.unparse(decorator.func) == f"pytest.mark.{kind}"):
                    values = [ast.literal_eval(value) for value in decorator.args]
                    named = {word.arg: ast.literal_eval(word.value) for word in decorator.keywords}
                    yield Mark(file.relative_to(ROOT).as_posix(), node.name, values, named)


def claims_block(up: str) -> list[str]:
    """A table for each file of tests, under the first sentence of its docstring."""
    lines = []
    rows = {}
    for mark in marks("claim"):
        rows.setdefault(mark.file, []).append([mark.values[0], f"`{mark.test}`"])
    for file, claims in rows.items():
        docstring = " ".join(ast.get_docstring(ast.parse((ROOT / file).read_text())).split())
        about = re.match(r"(.*?\.)(?: |$)", docstring)[1]
        lines += ["", f"## {file}", "", f"[{file}]({up}{file}): {about}", "",
                  *table(["Claim", "Test"], claims)]
    return lines[1:]


def faults_block(up: str) -> list[str]:
    rows = [[mark.values[0], f"{mark.named['tried']:,}", f"{mark.named['survived']:,}",
             mark.named["note"], f"[`{mark.test}`]({up}{mark.file})"]
            for mark in marks("fault")]
    return table(["Fault", "Tried", "Survived", "Outcome", "Test"], rows)


# ---------------------------------------------------------------------------------------------
# Techniques and schedules
# ---------------------------------------------------------------------------------------------


def plain_forms() -> dict[str, tuple[str, int, int]]:
    """{name of a function or class: (file, first line, number of lines)}."""
    found = {}
    for file in FILES_OF_FORMS:
        for node in ast.parse((ROOT / file).read_text()).body:
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                found[node.name] = file, node.lineno, node.end_lineno - node.lineno + 1
    return found


def techniques_block(up: str) -> list[str]:
    forms = plain_forms()
    rows = []
    for technique, paper, names, test in TECHNIQUES:
        cells = []
        for name in names:
            file, line, count = forms[name]
            cells.append(f"[`{name}`]({up}{file}#L{line}): {count} lines")
        rows.append([technique, paper, "; ".join(cells), f"`{test}`"])
    return table(["Technique", "Paper", "Plain form", "Test"], rows)


def schedules_block(up: str) -> list[str]:
    lines = []
    for p, m, name, chunks in SCHEDULES:
        command = f"python -m tools.schedule --pp {p} --microbatches {m} --pp-schedule {name}"
        if chunks > 1:
            command += f" --pp-chunks {chunks}"
        _, drawing, counts = schedule.describe(name, p, m, chunks).split("\n\n")
        bubble, live = counts.splitlines()
        lines += [f"**{schedule.TITLES[name]}.** `{command}`", "", "```", drawing, "```", "",
                  f"B{bubble[1:]}. L{live[1:]}.", ""]
    return lines[:-1]


# ---------------------------------------------------------------------------------------------
# The files
# ---------------------------------------------------------------------------------------------

BLOCKS = {
    "train_flags": train_flags_block, "sizes": sizes_block, "other_names": other_names_block,
    "data_flags": lambda up: parser_block(data_flags.make_parser()),
    "sample_flags": lambda up: parser_block(sample_flags.make_parser()),
    "claims": claims_block, "faults": faults_block, "techniques": techniques_block,
    "schedules": schedules_block}


def fill(page: str, up: str) -> str:
    """The page with the content of its blocks replaced; `up` leads from it to the root. Raises
    ValueError about a mark that is unknown or has no end."""
    begins = re.findall(r"(?m)^<!-- generated: (.*?) -->$", page)
    ends = [begin for _, begin, *_ in BLOCK.findall(page)]
    for name in begins:
        if name not in BLOCKS:
            raise ValueError(f"no block is called {name}; there are {', '.join(BLOCKS)}")
    if begins != ends:
        raise ValueError("a mark <!-- generated: ... --> has no <!-- end --> before the next one")

    def replace(found):
        content = "\n".join(BLOCKS[found[2]](up))
        return f"{found[1]}\n{content}\n\n{found[4]}"
    return BLOCK.sub(replace, page)


def generated() -> dict[str, str]:
    """{path: what it should contain} of every page with blocks."""
    pages = {}
    for file in (ROOT / "README.md", *sorted(ROOT.glob("docs/*.md"))):
        path = file.relative_to(ROOT).as_posix()
        page = file.read_text()
        try:
            filled = fill(page, "../" * path.count("/"))
        except ValueError as error:
            raise ValueError(f"{path}: {error}") from None
        if BLOCK.search(page):
            pages[path] = filled
    return pages


def outdated() -> dict[str, str]:
    """The part of `generated` that differs from the files."""
    return {path: content for path, content in generated().items()
            if (ROOT / path).read_text() != content}


@errors_in_one_line("tools.docs")
def main() -> None:
    parser = Parser("tools.docs", "python -m tools.docs [--check]",
                    "Write the generated blocks of README.md and docs/.")
    parser.add_argument("--check", action="store_true", help="write nothing; say which differ")
    args = parser.parse_args()
    pages = outdated()
    for path, content in pages.items():
        if args.check:
            print(f"{path} is out of date: run python -m tools.docs")
        else:
            with named(path):
                (ROOT / path).write_text(content)
            print(f"wrote {path}")
    sys.exit(1 if args.check and pages else 0)


if __name__ == "__main__":
    main()
