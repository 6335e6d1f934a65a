"""What tools/bench/fake_gpu.py counts, and counts of a step that must not grow.

    python -m pytest tests/test_paper.py -m slow

Most start an interpreter, because `make_fake_gpu` changes PyTorch for good. No test needs a GPU.
"""
import json
import sys

import pytest
import torch

from tools.bench import launch

pytestmark = [pytest.mark.slow, pytest.mark.skipif(
    torch.version.cuda is not None or sys.platform != "linux",
    reason="PyTorch's build for GPUs, or not Linux: paper.py refuses both")]

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
    peak = gpu.peak - before
    gpu.start()
    torch.nn.functional.silu(w).sum().backward()
    of_silu = [k.name for k in gpu.launches]
print(json.dumps([launches, forward, held, held_after, peak, waits, of_silu]))
"""


def run(*command):
    return json.loads(launch.finished(1, *command).splitlines()[-1])


def test_launches_memory_and_waits_are_those_counted_by_hand():
    """Forward: a product, and a kernel that makes a sum and a mask of it. Backward: what y.sum()
    sends back, a kernel that makes the product's gradient of this and the mask, and a product. What
    has a kernel of its own on a GPU alone, as silu's gradient, is one launch."""
    launches, forward, held, held_after, peak, waits, of_silu = run("-c", PROGRAM)
    product, mask, sums, weight = 2 * ROWS * OUT, ROWS * OUT, 2 * ROWS, 2 * OUT * IN    # bytes
    multiply = ["product", 1, 2 * ROWS * IN + weight + product, 2 * ROWS * IN * OUT]
    fused = ["memory", 1, product + mask + sums, 0]
    assert launches[:forward] == [multiply, fused]
    assert launches[-2:] == [fused, multiply]
    assert held == mask + sums and held_after == weight + sums      # with the weight's gradient
    assert 1 <= peak / (product + mask + sums) < 1.001
    # Of a copy without waiting, and a number on the host; then of an item, a copy, and an event.
    assert waits == [0, 1, 2, 3]
    assert "silu_backward" in of_silu and "sigmoid" not in of_silu


@pytest.mark.parametrize("flags, parts, passes", [
    ("", 1, 13), ("--compile", 1, 3), ("--compile --tp 2", 2, 3)])
def test_counts_of_a_step_do_not_grow(flags, parts, passes):
    """The host waits once, for the statistics of the step. Graphs break for communication alone,
    and nothing is compiled twice. The compiled loss passes three times over the logits: it reads
    them twice and writes their gradient. With tp it does the same with a rank's part. The bounds
    are what was counted when this test was written."""
    found = run("-m", "tools.bench.paper", f"{STEP} {flags}")
    assert (found["waits"], found["breaks"], found["recompiles"]) == (1, 0, 0)
    of_a_microbatch = found["GB: head and loss"] / 2
    assert 0.9 * passes < of_a_microbatch / (LOGITS / parts) < passes + 0.05


def test_the_table_has_a_line_of_each_run(monkeypatch, capsys):
    """Its runs are processes, and the plain loop has one number for forward."""
    from tools.bench import paper           # (it imports the compiler, for seconds)

    def found(command, seconds):
        assert command[1:-1] == ["-m", "tools.bench.paper"]
        phases = ["forward"] if "loop" in command[-1] else paper.FORWARD
        return "a warning\n" + json.dumps({f"GB: {phase}": 2.0 for phase in phases} | {
            "GB: backward": 3.0, "GB: optimizer": 4.0, "peak, GB": 5.0, "kernels": 6000,
            "TFLOP": 7.0, "ms": 8.0, "waits": 1, "breaks": 0, "recompiles": 0}), None
    monkeypatch.setattr(launch, "run", found)
    paper.main(["GPT", "the plain loop"])
    heading, rule, *lines = capsys.readouterr().out.strip().splitlines()
    ends = "3.0 | 4.0 | 5.0 | 1 | 0 | 0 | 8.0 |"
    assert lines == [f"| GPT | 6,000 | 7.0 | 2.0 | 2.0 | 2.0 | 6.0 | {ends}",
                     f"| the plain loop | 6,000 | 7.0 | - | - | - | 2.0 | {ends}"]
    assert {line.count("|") for line in (heading, rule, *lines)} == {15}
    with pytest.raises(SystemExit):
        paper.main(["gpt"])
    assert "there is no run 'gpt'" in capsys.readouterr().err
