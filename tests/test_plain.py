"""The plain forms beside those that run: data.plain_batch, checkpoint.plain_save and plain_load,
sample.plain_generate, and `python train.py --plain`, which is made of them."""
import numpy as np
import pytest
import torch

import data
import sample
from model import GPTConfig
from models.llama import LlamaConfig
from tests.harness import random_gpt, read_metrics, relative

SMALL = ("--seq-len", 32, "--n-embd", 32, "--batch-size", 8, "--warmup-steps", 4, "--device", "cpu")


@pytest.mark.parametrize("first", [0, 5, 30, 1000])
def test_plain_batch_reads_what_a_run_reads(tmp_path, first):
    """Also over the ends of epochs, and of shards of several lengths."""
    rng = np.random.default_rng(0)
    for number, length in enumerate([100, 40, 7, 81]):          # one is too short for a window
        header = np.zeros(256, "<i4")
        header[:3] = 20240520, 1, length
        tokens = rng.integers(257, size=length).astype("<u2")
        (tmp_path / f"train_{number:06d}.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (tmp_path / "meta.json").write_text('{"tokenizer": "bytes", "vocab_size": 257, '
                                        '"bytes_per_token": 1.0, "fingerprint": "x"}')
    dataset = data.TokenDataset(tmp_path, "train", 8)
    batch = data.plain_batch(data.open_shards(tmp_path, "train"), 8, 1337, first, 29)
    assert dataset.n_windows == 26
    assert np.array_equal(batch, dataset.tokens_of(dataset.window_ids(1337, first, 29)))


@pytest.mark.parametrize("cfg", [GPTConfig(257, 16), LlamaConfig(257, 16, 2, 4, 32)])
@pytest.mark.parametrize("temperature", [0, 0.8])
def test_plain_generate_draws_what_sample_draws(cfg, temperature):
    model = random_gpt(cfg)
    prompt = list(range(20))
    expected = [next(iter(drawn.values())) for drawn in sample.generate(
        model, prompt, 40, set(), temperature, generators=[torch.Generator().manual_seed(7)])]
    drawn = sample.plain_generate(model, prompt, 40, temperature, torch.Generator().manual_seed(7))
    assert drawn == expected


def tensors(path):
    state = torch.load(path, weights_only=True)
    return {(key, name): tensor for key in ("parameters", "exp_avg", "exp_avg_sq")
            for name, tensor in state[key].items()}


def test_a_plain_run_goes_on_in_many_ranks_and_back(run_train, library, tmp_path):
    """Runs of six steps: by a Run; by --plain; by --plain with a stop in between; four steps by
    --plain and two by a Run, and the other way around."""
    plans = dict(run=[(6, ())], plain=[(6, ("--plain",))], resumed=[(4, ("--plain",))] * 2,
                 then_run=[(4, ("--plain",)), (6, ())], then_plain=[(4, ()), (6, ("--plain",))])
    plans["resumed"][1] = (6, ("--plain",))
    for name, parts in plans.items():
        out = tmp_path / name
        for number, (steps, flags) in enumerate(parts):
            run_train("--data", library, "--out", out, *SMALL, "--steps", 6, "--save-every", 4,
                      "--eval-every", 2, *flags)
            if len(parts) == 2 and number == 0:         # the second goes on from step 4
                (out / "step_00000006.pt").unlink()
                (out / "latest.pt").unlink()
                (out / "metrics.jsonl").unlink()
    expected = {row["step"]: row for row in read_metrics(tmp_path / "run")[0]}
    for name in plans:
        rows = read_metrics(tmp_path / name)[0]
        assert len(rows) == (2 if len(plans[name]) == 2 else 6)
        for row in rows:
            reference = expected[row["step"]]
            for key in ("loss", "grad_norm", "val_loss", "bits_per_byte", "lr", "tokens"):
                assert (key in row) == (key in reference)
                assert key not in row or relative([row[key]], [reference[key]]) < 1e-5, (name, key)
        one, other = tensors(tmp_path / name / "latest.pt"), tensors(tmp_path / "run/latest.pt")
        assert one.keys() == other.keys()
    one, other = (tensors(tmp_path / name / "latest.pt") for name in ("plain", "resumed"))
    assert all(torch.equal(one[key], other[key]) for key in one)
