"""How a failing test is told."""
import pytest

from tests.harness import ROOT

FAILING = '''\
import pytest
from tests.harness import assert_close, on_ranks

@pytest.mark.claim("Layers are alike.")
@pytest.mark.parametrize("layout", [(1, 2, 1)])
@on_ranks
def test_layers(rank, world=2, *, layout):
    if rank == 1:
        assert_close(dict(dx=(1.5, 1.0)), 1e-12)
'''


def test_a_claim_that_fails_on_a_rank_is_told_in_one_line(tmp_path, capsys):
    """Claim, layout, place and values, and no traceback."""
    (tmp_path / "test_failing.py").write_text(FAILING)
    pytest.main(["-c", str(ROOT / ".pytest.ini"), "--rootdir", str(tmp_path),
                 str(tmp_path / "test_failing.py")])
    assert ("\nclaim: Layers are alike. | layout (1, 2, 1) | rank 1 of 2, test_failing.py:9: dx "
            "differs by 0.5: 1.5 beside 1\n") in capsys.readouterr().out
