"""--tp-overlap: two halves of a microbatch in turn compute what one process does, and the sums of
one travel behind the products of the other.

    python -m pytest tests/test_halves.py
"""
from dataclasses import replace

import pytest

from models import make_config
from tests.harness import CFG, differences, reference, trained, whole_gradient, without_saves
from parallelism import halves

LLAMA = make_config(vocab_size=257, n_layer=3, n_head=4, n_kv_head=4, n_embd=32, seq_len=16)


@pytest.mark.parametrize("cfg, layout, flags", [
    (CFG, (1, 2, 1), {}),
    (LLAMA, (1, 2, 2), dict(pp_schedule="1f1b", recompute=True)),
])
def test_halves_train_as_one_process(pool, tmp_path, reference, cfg, layout, flags):
    ours = trained(pool, layout, tmp_path / "out", cfg, whole_gradient, prepare=without_saves,
                   steps=5, dtype="fp64", tp_overlap=True, **flags)
    expected = reference(cfg, steps=5, dtype="fp64")
    assert max(differences(ours, expected)) < 1e-10
