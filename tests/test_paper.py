"""What tools/bench/fake_gpu.py counts, and counts of a step that must not grow.

    python -m pytest tests/test_paper.py -m slow

Most start an interpreter, because `make_fake_gpu` changes PyTorch for good. No test needs a GPU.
"""
import json

import pytest

from tools.bench import launch

ROWS, IN, OUT = 4096, 768, 3072
POSITIONS, VOCAB = 4096, 50304
LOGITS = 2 * POSITIONS * VOCAB / 1e9        # GB of those of a microbatch, in bf16
STEP = "--model nano --n-layer 1 --seq-len 1024 --batch-size 8 --micro-batch 4"

PROGRAM = f"""
import json
import torch
from tools.bench.fake_gpu import make_fake_gpu

gpu = make_fake_gpu()
with gpu:
    x = torch.empty({ROWS}, {IN}, device="cuda", dtype=torch.bfloat16)
    w = torch.empty({OUT}, {IN}, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    f = torch.compile(lambda x: torch.relu(torch.nn.functional.linear(x, w) * 2 + 1).sum(1))
    f(x).sum().backward()
    w.grad = None
    gpu.start()
    before = gpu.memory
    y = f(x)
    held = gpu.memory - before
    forward = len(gpu.launches)
    y.sum().backward()
    held_after = gpu.memory - before
    launches = [[k.kind, k.kernels, k.bytes, k.flops] for k in gpu.launches]
    y.to("cpu", non_blocking=True)
    torch.zeros(4).sum().item()             # on the host
    waits = [gpu.waits]
    y.sum().item()
    waits.append(gpu.waits)
    y.to("cpu")
    waits.append(gpu.waits)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    waits.append(gpu.waits)
print(json.dumps([launches, forward, held, held_after, gpu.peak - before, waits]))
"""


def run(*command):
    return json.loads(launch.finished(1, *command).splitlines()[-1])


@pytest.mark.slow
def test_launches_memory_and_waits_are_those_counted_by_hand():
    """A product, then a kernel that adds up what it makes of the result; backward the same."""
    launches, forward, held, held_after, peak, waits = run("-c", PROGRAM)
    print(launches, forward, held, held_after, peak, waits)
    assert 0


@pytest.mark.slow
@pytest.mark.parametrize("flags, parts, passes, recompiles", [
    ("", 1, 13, 0), ("--compile", 1, 3, 0), ("--compile --tp 2", 2, 5, 1)])
def test_counts_of_a_step_do_not_grow(flags, parts, passes, recompiles):
    """The host waits once, for the numbers of the step. The compiled loss passes over the logits
    three times: it reads them, reads them again, and writes the gradient."""
    found = run("-m", "tools.bench.paper", f"{STEP} {flags}")
    print(found)
    assert (found["waits"], found["breaks"], found["recompiles"]) == (1, 0, recompiles)
    assert found["GB: head and loss"] / 2 / LOGITS * parts < passes + 0.05
