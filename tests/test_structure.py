"""The rules of the house: who may import whom, the list of flags, and a book that needs no tools.

MAY_IMPORT is the table of the imports, LINES that of the sizes."""
import ast
import fnmatch
import graphlib
import re
import subprocess
import sys
from dataclasses import fields

import pytest

import model
from base.options import Config
from model import GPTConfig
from tests.harness import ROOT, tokens_of

OURS = ("amp", "checkpoint", "data", "model", "parallel", "sample", "train", "test_all",
        "models", "corpus", "parallelism", "base", "runtime", "tools", "tests")
PACKAGES = ("models", "corpus", "parallelism", "base", "runtime", "tools", "tests")
WITHOUT_TOOLS = ("*.py", "models/*.py", "corpus/*.py", "parallelism/*.py", "base/*.py",
                 "runtime/*.py")
FILES = sorted(file for pattern in (*WITHOUT_TOOLS, "tools/**/*.py") for file in ROOT.glob(pattern)
               if file.name not in ("__init__.py", "test_all.py"))

# A file, or all of a folder: (what of ours it may import, what of that not).
MAY_IMPORT = {
    "model": ("", ""),
    "models.*": ("model models.*", ""),
    "amp": ("", ""),
    # corpus.program: where data.py is the program
    "data": ("corpus.conversations corpus.mixtures corpus.program corpus.shards base "
             "base.batch_ramp", ""),
    "corpus.*": ("corpus.* base.commandline base.errors", ""),
    "parallel": ("amp model parallelism.collectives parallelism.kernels", ""),
    "checkpoint": ("model models* base.disk base.checkpoint_files base.checkpoint_folder "
                   "parallelism.collectives", ""),
    "train": ("*", "tools* tests* test_all"),
    "sample": ("amp models* checkpoint corpus.tokenizers base.devices base.errors "
               "base.sample_flags parallelism.kernels runtime.samples runtime.chat", ""),
    "parallelism.*": ("model models* amp parallel parallelism.*", ""),
    "base.*": ("model models* amp base.*", ""),
    "runtime.*": ("*", "train tools* tests* sample test_all"),
    "tools.*": ("*", "tests* test_all"),
}


def name_of(file):
    """runtime/console.py is runtime.console."""
    return ".".join(file.relative_to(ROOT).with_suffix("").parts)


def imports_of(tree):
    """Our modules that a tree of a file's syntax imports, in functions too."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module in PACKAGES:
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(node.module)
            folder = ROOT / node.module.replace(".", "/")
            found |= {f"{node.module}.{alias.name}" for alias in node.names
                      if (folder / f"{alias.name}.py").exists()}
    return {name for name in found if name.split(".")[0] in OURS}


def matches(name, patterns):
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns.split())


def rule_of(module):
    return MAY_IMPORT.get(module) or MAY_IMPORT[module.split(".")[0] + ".*"]


@pytest.mark.parametrize("file", FILES, ids=name_of)
def test_imports_run_one_way_and_no_file_imports_a_tool(file):
    """Each file imports only those of ours that its line of the table allows."""
    allowed, but = rule_of(name_of(file))
    wrong = {name for name in imports_of(ast.parse(file.read_text()))
             if not matches(name, allowed) or matches(name, but)}
    assert not wrong, f"{name_of(file)} imports {sorted(wrong)}"


def test_no_imports_run_in_a_circle():
    """Neither at the start of a file nor in a function."""
    graph = {name_of(file): imports_of(ast.parse(file.read_text())) for file in FILES}
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        pytest.fail("imports in a circle: " + " <- ".join(error.args[1]))


def test_data_py_needs_neither_torch_nor_the_model():
    """`python data.py` starts at once, and on a machine without torch."""
    code = "import sys, data; print([m for m in ('torch', 'model') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-B", "-c", code], cwd=ROOT, text=True,
                          stdout=subprocess.PIPE)
    assert done.stdout == "[]\n"


# Lines at most, of folders, of files of the book and of the program. A change that raises one says
# what it is worth.
LINES = {"base": 1636, "corpus": 2536, "models": 840, "parallelism": 2532, "runtime": 2751,
         "tools": 4012, "parallel.py": 1350, "model.py": 350, "train.py": 310, "checkpoint.py": 200,
         "data.py": 240, "sample.py": 120, "amp.py": 130}
PROGRAM = 16_992


def test_the_program_grows_by_decision_alone():
    lines = {}
    for file in {file for pattern in (*WITHOUT_TOOLS, "tools/**/*.py")
                 for file in ROOT.glob(pattern)} - {ROOT / "test_all.py"}:
        room = file.relative_to(ROOT).parts[0]
        lines[room] = lines.get(room, 0) + file.read_text().count("\n")
    assert {room: lines[room] for room in LINES if lines[room] > LINES[room]} == {}
    assert sum(lines.values()) <= PROGRAM


EXACT_FILES = list(ROOT.glob("parallelism/exact*.py"))
EXACT = re.compile(r"(?i)exact(?!ly)")


def places(node):
    """How many statements mention --exact; an `if` of it counts with its body as one."""
    if isinstance(node, ast.If) and EXACT.search(ast.unparse(node.test)):
        return 1
    inner = sum(places(child) for child in ast.iter_child_nodes(node)
                if EXACT.search(ast.unparse(child)))
    return inner or int(isinstance(node, ast.stmt))


def test_exact_is_an_extra_that_can_be_deleted():
    """With its four files and ten places in the programs. No comment names it but beside these."""
    found = {}
    for file in {file for file in FILES if "tools" not in file.parts} - set(EXACT_FILES):
        text = file.read_text()
        count = places(ast.parse(text)) + len(re.findall("(?i)# .*exact(?!ly)", text))
        if count > 0:
            found[name_of(file)] = count
    assert len(EXACT_FILES) == 4 and sum(found.values()) <= 10, found
    assert "train" in found and "base.options" in found     # which it finds


FLAGS = """data out log model n_layer n_head n_embd seq_len activation n_kv_head head_dim hidden
    rope_theta n_expert n_active shared_hidden balance_loss z_loss balance_bias dropout batch_size
    batch_ramp steps epochs lr min_lr_ratio warmup_steps lr_schedule decay_ratio weight_decay beta1
    beta2 clip seed plain tp pp cp ep pp_schedule pp_chunks device compile timeout micro_batch zero
    recompute sequence_parallel offload dtype exact save_every keep checkpoint_format
    resume init_from check_every
    eval_every eval_tokens eval_only log_every rollback max_rollbacks skip_steps"""


def test_train_py_has_these_flags_and_no_others():
    """A new flag is a decision, not an accident: whoever adds one writes it down here too."""
    assert {field.name for field in fields(Config)} == set(FLAGS.split())


def test_the_example_in_model_py_runs():
    """The lines of its docstring, as they stand there."""
    names = vars(model) | dict(tokens=tokens_of(GPTConfig(), 2), targets=tokens_of(GPTConfig(), 2))
    exec("\n".join(re.findall("^    ((?:model|loss) = .*)", model.__doc__, re.M)), names)
    assert names["loss"].dim() == 0 and type(names["model"]) is model.GPT
