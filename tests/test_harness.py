"""How a failing test is told.
"""
import re

import pytest

from tests.harness import ROOT

FAILING = '''\
import pytest
from tests.harness import assert_close, on_ranks, relative

@pytest.fixture(scope="session")
def leave_nothing_behind():
    """The processes of the tests around these go on."""

@pytest.mark.claim("Layers are alike.")
@pytest.mark.parametrize("layout", [(1, 2, 1)])
@on_ranks
def test_layers(rank, world=2, *, layout):
    if rank == 1:
        assert_close(dict(dx=(1.5, 1.0)), 1e-12)

@pytest.mark.claim("Runs are alike.")
@pytest.mark.parametrize("layout", [(2, 1, 1)])
def test_runs(layout):
    assert relative({"step 3": dict(loss=5.5)}, {"step 3": dict(loss=5.0)}) <= 1e-10

@on_ranks
def test_error(rank, world=1):
    raise ValueError("no assertion")
'''


def told(folder, capsys, *flags):
    """What pytest, in this process, says of these tests."""
    (folder / "test_failing.py").write_text(FAILING)
    pytest.main(["-c", str(ROOT / ".pytest.ini"), "--rootdir", str(folder), *flags,
                 str(folder / "test_failing.py")])
    return capsys.readouterr().out


def test_a_claim_that_fails_is_told_in_one_line(tmp_path, capsys):
    """Claim, layout, place and values, and no traceback. An error that is no assertion has its
    traceback, and with -vv so has a claim."""
    layers, runs, error = re.split("\n_{9,} test.*_{9,}\n", told(tmp_path, capsys))[1:]
    assert layers == ("claim: Layers are alike. | layout (1, 2, 1) | rank 1 of 2, "
                      "test_failing.py:13: dx differs by 0.5: 1.5 beside 1")
    assert runs == ("claim: Runs are alike. | layout (2, 1, 1) | test_failing.py:18: "
                    "assert 0.1 at ['step 3']['loss']: 5.5 beside 5 <= 1e-10")
    assert "Traceback" in error and "ValueError: no assertion" in error
    assert "Traceback" in told(tmp_path, capsys, "-vv", "-k", "layers")
