"""What the programs of tools/ have in common: how they are started, and their help.

    python -m pytest tests/test_tool_commands.py
"""
import importlib
import re
import subprocess
import sys

import pytest

from tests.harness import ROOT

FILES = [file.stem for file in sorted((ROOT / "tools").glob("*.py"))
         if "__main__" in file.read_text()]
FOLDERS = [file.parent.name for file in sorted((ROOT / "tools").glob("*/__main__.py"))]


@pytest.mark.parametrize("name", FILES + FOLDERS)
def test_a_tool_started_as_a_file_says_how_it_is_started(name):
    """Or as a folder. In one line, in the project's folder and in tools/, before anything slow is
    imported."""
    assert {"plan", "huggingface", "compare", "follow", "schedule"} <= {*FILES, *FOLDERS}
    path = f"{name}.py" if name in FILES else name
    for folder, *command in [(ROOT, f"tools/{path}"), (ROOT / "tools", path, "--help"),
                             (ROOT / "tools", "-m", name)]:
        done = subprocess.run([sys.executable, "-S", *command], cwd=folder, capture_output=True,
                              text=True)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == (f"{name}.py: start it as a module, in the folder {ROOT}: "
                               f"python -m tools.{name}\n")


@pytest.mark.parametrize("program", ["corpus.program", "train", "sample", "tools.schedule",
                                     "tools.plan.__main__"])
def test_help_is_in_groups_and_says_the_form_of_each_value(monkeypatch, capsys, program):
    """Each flag but --help has a heading of its own subject, and N, X, {a,b} ... for a value, not
    its own name. Each program takes underscores for dashes and suggests a similar flag."""
    def output(*flags):
        monkeypatch.setattr(sys, "argv", [program, *flags])
        with pytest.raises(SystemExit):
            importlib.import_module(program).main()
        return capsys.readouterr()
    text = output("--help").out
    _, general, *groups = re.split(r"(?m)^\w.*:$", text)
    assert re.findall("--[a-z-]+", general) == ["--help"] and groups
    forms = dict(re.findall(r"(?m)^  (--[a-z0-9-]+) ([^ \n]+)", text))
    assert len(forms) >= 4
    for flag, form in forms.items():
        assert form != flag.strip("-").replace("-", "_").upper(), flag
    flag = max(forms, key=len)
    error = output(flag[:-1].replace("-", "_").replace("__", "--", 1)).err
    assert f": did you mean {flag}? (" in error and error.count("\n") == 1
