"""tools/bench/paper.py and fake_gpu.py: what they count, and counts of a step that must not grow.

    python -m pytest tests/test_paper.py -m slow

Each starts an interpreter, because `make_fake_gpu` changes PyTorch for good. No GPU is needed.
"""
import json

import pytest

from tools.bench import launch

# Four products and a fused kernel; what is read on the host; a tensor that lives for a while.
PROGRAM = """
import json
import torch
from tools.bench.fake_gpu import make_fake_gpu

gpu = make_fake_gpu()
with gpu:
    x = torch.empty(4096, 768, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.nn.Parameter(torch.empty(3072, 768, device="cuda", dtype=torch.bfloat16))
    f = torch.compile(lambda x: torch.relu(torch.nn.functional.linear(x, w) * 2 + 1))
    f(x).sum().backward()
    x.grad = w.grad = None
    del x.grad
    gpu.start()
    before = gpu.memory
    y = f(x)
    held = gpu.memory - before
    y.sum().backward()
    y.sum().item()
    y.to("cpu")
    y.to("cpu", non_blocking=True)
    torch.zeros(4).sum().item()
print(json.dumps([[[k.kind, k.kernels, k.bytes, k.flops] for k in gpu.launches], held, gpu.waits]))
"""


def run(*command):
    return json.loads(launch.finished(1, *command).splitlines()[-1])


@pytest.mark.slow
def test_launches_are_counted_as_by_hand():
    kernels, held, waits = run("-c", PROGRAM)
    print(kernels, held, waits)
    assert 0


MEGA = 1e6
POSITIONS, VOCAB = 4096, 50304
LOGITS = 2 * POSITIONS * VOCAB / 1e9        # GB of a microbatch's, in bf16
STEP = "--model nano --n-layer 1 --seq-len 1024 --batch-size 8 --micro-batch 4"


@pytest.mark.slow
@pytest.mark.parametrize("flags, passes, recompiles", [
    ("", 14, 0), ("--compile", 3, 0), ("--compile --tp 2", 3, 1)])
def test_counts_of_a_step_do_not_grow(flags, passes, recompiles):
    """The host waits once, for the numbers of the step. The compiled loss passes over the logits
    three times: it reads them, reads them again, and writes the gradient."""
    found = run("-m", "tools.bench.paper", f"{STEP} {flags}")
    print(found)
    assert (found["waits"], found["breaks"], found["recompiles"]) == (1, 0, recompiles)
    assert found["GB: head and loss"] / 2 / LOGITS < passes + 0.02
