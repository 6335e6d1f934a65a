"""What the programs have in common: their help.
"""
import importlib
import re
import sys

import pytest


@pytest.mark.parametrize("program", ["corpus.program", "train", "sample", "tools.schedule",
                                     "tools.plan.__main__", "tools.ladder",
                                     "tools.sweep"])
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
