"""How a failing test is told.
"""
import re

import pytest

from tests.harness import ROOT

FAILING = '''\
import pytest
from tests.harness import assert_close, on_ranks, relative

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
'''


def test_a_claim_that_fails_is_told_in_one_line(tmp_path, capsys):
    """Claim, layout, place and values, and no traceback."""
    (tmp_path / "test_failing.py").write_text(FAILING)
    pytest.main(["-c", str(ROOT / ".pytest.ini"), "--rootdir", str(tmp_path),
                 str(tmp_path / "test_failing.py")])
    layers, runs = re.split("\n_{9,} test.*_{9,}\n", capsys.readouterr().out)[1:]
    assert layers == ("claim: Layers are alike. | layout (1, 2, 1) | rank 1 of 2, "
                      "test_failing.py:9: dx differs by 0.5: 1.5 beside 1")
    assert runs.startswith("claim: Runs are alike. | layout (2, 1, 1) | test_failing.py:14: "
                    "assert 0.1 at ['step 3']['loss']: 5.5 beside 5 <= 1e-10\n")
