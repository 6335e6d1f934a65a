"""Train the same model with PyTorch's own parallel stack: the other side of the races.

    python -m tools.bench.pytorch_stack '{"mode": "single"}'
    torchrun --nproc_per_node=2 -m tools.bench.pytorch_stack '{"mode": "ddp"}'

The argument is a JSON object of arguments of `train_plain`; the modes are single, ddp, fsdp, tp, pp
and 3d.
"""
import functools
import json
import os
import sys
import time
import warnings
from contextlib import nullcontext

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel

SHAPE = dict(n_layer=6, n_head=6, n_embd=384, seq_len=256)


class PlainBlock(nn.Module):
    """A block as PyTorch's stack can cut it: q, k and v apart."""

    def __init__(self, C, D):
        super().__init__()
        self.head_dim = D
        self.norm1, self.norm2 = nn.LayerNorm(C), nn.LayerNorm(C)
        self.q, self.k, self.v, self.proj = (nn.Linear(C, C) for _ in range(4))
        self.up, self.down = nn.Linear(C, 4 * C), nn.Linear(4 * C, C)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (part(h).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
                   for part in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class PlainGPT(nn.Module):
    """What a pipeline's stage holds of it: all blocks and both ends for one process."""

    def __init__(self, vocab, shape, stage, stages, tied):
        super().__init__()
        layers = shape["n_layer"] // stages
        C = shape["n_embd"]
        first, last = stage == 0, stage == stages - 1
        self.token = nn.Embedding(vocab, C) if first else None
        self.position = nn.Embedding(shape["seq_len"], C) if first else None
        self.blocks = nn.ModuleList(PlainBlock(C, C // shape["n_head"]) for _ in range(layers))
        self.norm = nn.LayerNorm(C) if last else None
        self.head = nn.Linear(C, vocab, bias=False) if last else None
        for module in self.modules():               # of N(0, 1) many numbers become denormal
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        if first and last and tied:
            self.head.weight = self.token.weight

    def forward(self, x):
        if self.token is not None:
            x = self.token(x) + self.position.weight
        for block in self.blocks:
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def tensor_parallel(plain, mesh):
    """parallelize_module as its tutorial has it, with the loss on cut logits."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (ColwiseParallel, RowwiseParallel,
                                                   parallelize_module)
    layer = {name: ColwiseParallel() for name in ("q", "k", "v", "up")}
    layer |= {name: RowwiseParallel() for name in ("proj", "down")}
    for block in plain.blocks:
        parallelize_module(block, mesh, layer)
    ends = {"token": RowwiseParallel(input_layouts=Replicate()),
            "head": ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)}
    parallelize_module(plain, mesh, {n: s for n, s in ends.items() if getattr(plain, n)})


def data_parallel(mode, plain):
    """The model as DDP or FSDP2 trains it."""
    from torch.distributed.fsdp import fully_shard
    if mode == "ddp":
        return DistributedDataParallel(plain)
    if mode == "fsdp":
        for module in [*plain.blocks, plain]:
            fully_shard(module)
    return plain


def by_type(module):
    """Its plain parameters and its DTensors, which AdamW and clipping refuse to mix."""
    groups = {}
    for p in module.parameters():
        groups.setdefault(type(p), []).append(p)
    return list(groups.values())


def average_over_replicas(parameters, group):
    """The mean of the gradients: DDP refuses DTensors."""
    from torch.distributed.tensor import DTensor
    for p in parameters:
        grad = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
        dist.all_reduce(grad, group=group)
        grad /= group.size()


def gradients_of(net, loss_of, cast, micro_batch, compile):
    """A function (x, y), the sequences of a step and their targets, that computes gradients."""
    def whole(x, y):
        return loss_of(net(x), y)
    if compile:
        whole = torch.compile(whole)

    def gradients(x, y):
        microbatches = list(zip(x.split(micro_batch), y.split(micro_batch)))
        for i, (tokens, targets) in enumerate(microbatches):
            last = i == len(microbatches) - 1
            waits = isinstance(net, DistributedDataParallel) and not last
            with net.no_sync() if waits else nullcontext():
                with cast():
                    loss = whole(tokens, targets) / len(microbatches)
                loss.backward()
    return gradients


def gradients_of_pipeline(net, stage, stages, group, loss_of, schedule, microbatches):
    """The same by a schedule of torch's pipelining, of a stage's `net`."""
    from torch.distributed import pipelining
    stage = pipelining.PipelineStage(net, stage, stages, torch.device("cpu"), group=group)
    schedule = getattr(pipelining, schedule)(stage, microbatches, loss_fn=loss_of)

    def gradients(x, y):
        given, options = [], {}
        if stage.is_first:
            given.append(x)
        if stage.is_last:
            options.update(target=y, losses=[])
        schedule.step(*given, **options)
    return gradients


def train_plain(mode, batch_size=16, micro_batch=2, vocab=257, dtype="fp32", steps=3, warmup=2,
                schedule="ScheduleGPipe", shape=SHAPE, device="cpu", compile=False, trace=None):
    """Train a PlainGPT on random tokens by PyTorch's stack -> tokens per second of the whole job,
    the median over the steps after the warm-up, and the peak of memory on a GPU (single only) in
    GB. `compile`: model and loss as a whole. `trace`: a file for a profile of the last two steps.
    Where there is tensor parallelism (tp, 3d) or a pipeline the head is not tied and the norm is
    not global: the stack has no way to do either."""
    warnings.simplefilter("ignore")
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(os.cpu_count() if world == 1 else 1)
    tp = {"tp": world, "3d": 2}.get(mode, 1)
    pp = {"pp": world, "3d": 2}.get(mode, 1)
    dp = world // (tp * pp)
    stage = rank // (dp * tp)
    torch.manual_seed(0)
    plain = PlainGPT(vocab, shape, stage, pp, tied=tp == 1).to(device)
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (pp, dp, tp), mesh_dim_names=("pp", "dp", "tp"))
    if tp > 1:
        tensor_parallel(plain, mesh["tp"])
    net = data_parallel(mode, plain)
    groups = by_type(plain)
    optimizer = torch.optim.AdamW([dict(params=group) for group in groups], lr=1e-3, fused=True)

    def loss_of(logits, y):
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    cast = nullcontext
    if dtype == "bf16":
        cast = functools.partial(torch.autocast, device, torch.bfloat16)
    loss_context = loss_parallel if tp > 1 else nullcontext
    if pp > 1:
        gradients = gradients_of_pipeline(net, stage, pp, mesh["pp"].get_group(), loss_of, schedule,
                                          batch_size // dp // micro_batch)
    else:
        gradients = gradients_of(net, loss_of, cast, micro_batch, compile)

    def step(x, y):
        with loss_context():
            gradients(x, y)
        if mode == "3d":
            average_over_replicas(plain.parameters(), mesh["dp"].get_group())
        for group in groups:
            torch.nn.utils.clip_grad_norm_(group, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()

    size = (batch_size // dp, shape["seq_len"])
    seconds = timed(step, warmup + steps, size, vocab, device, trace)
    if world > 1:
        dist.destroy_process_group()
    peak = torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None
    return dict(tokens_per_second=batch_size * shape["seq_len"] / np.median(seconds[warmup:]),
                peak_memory=peak)


def timed(step, count, size, vocab, device, trace):
    """The seconds of each of so many steps on random tokens."""
    seconds = []
    profiler = torch.profiler.profile()
    for number in range(count):
        if trace is not None and number == count - 2:
            profiler.start()
        x, y = torch.randint(vocab, (2, *size)).to(device)
        if dist.is_initialized():
            dist.barrier()
        start = time.perf_counter()
        step(x, y)
        seconds.append(time.perf_counter() - start)
    if trace is not None:
        profiler.stop()
        profiler.export_chrome_trace(trace)
    return seconds


if __name__ == "__main__":
    result = train_plain(**json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
