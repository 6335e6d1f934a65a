"""Train the same model with PyTorch's own parallel stack: the other side of bench.py's races.

    python -m tools.peer '{"mode": "single"}'
    torchrun --nproc_per_node=2 tools/peer.py '{"mode": "ddp"}'     # or zero1, fsdp, tp, pp, 3d

The argument is a JSON object of arguments of `train_plain`. Prints tokens per second of the whole
job, the median over the steps after the warm-up.
"""
import argparse
import functools
import inspect
import json
import os
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
MODES = ("single", "ddp", "zero1", "fsdp", "tp", "pp", "3d")


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

    def __init__(self, vocab, stage=0, stages=1, tied=True):
        super().__init__()
        layers, C = SHAPE["n_layer"] // stages, SHAPE["n_embd"]
        first, last = stage == 0, stage == stages - 1
        self.token = nn.Embedding(vocab, C) if first else None
        self.position = nn.Embedding(SHAPE["seq_len"], C) if first else None
        self.blocks = nn.ModuleList(PlainBlock(C, C // SHAPE["n_head"]) for _ in range(layers))
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


def train_plain(mode, batch_size=16, micro_batch=2, vocab=257, dtype="fp32", steps=3, warmup=2,
                schedule="ScheduleGPipe", shape=None, device="cpu", compile=False, trace=None):
    """Train a PlainGPT on random tokens by PyTorch's stack; rank 0 prints tokens a second, on a GPU
    (single only) the peak of its memory in GB too. `compile`: model and loss as a whole. `trace`: a
    file for a profile of the last two steps. Where there is tensor parallelism (tp, 3d) or a
    pipeline the head is not tied and the norm is not global: the stack has no way to do either."""
    warnings.simplefilter("ignore")
    SHAPE.update(shape or {})
    from torch.distributed import pipelining
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.optim import ZeroRedundancyOptimizer
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss_parallel
    rank, world = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(os.cpu_count() if world == 1 else 1)
    tp = {"tp": world, "3d": 2}.get(mode, 1)
    pp = {"pp": world, "3d": 2}.get(mode, 1)
    dp, stage = world // (tp * pp), rank // tp % pp
    first, last = stage == 0, stage == pp - 1
    torch.manual_seed(0)
    plain = net = PlainGPT(vocab, stage, pp, tied=tp == 1).to(device)
    if world > 1:
        dist.init_process_group("gloo")
        mesh = init_device_mesh("cpu", (dp, pp, tp), mesh_dim_names=("dp", "pp", "tp"))
    if tp > 1:
        tensor_parallel(plain, mesh["tp"])
    if mode in ("ddp", "zero1"):
        net = DistributedDataParallel(plain)
    if mode == "fsdp":
        for module in [*plain.blocks, plain]:
            fully_shard(module)
    parameters = list(plain.parameters())
    kinds = [[p for p in parameters if isinstance(p, DTensor) == sharded]
             for sharded in (False, True)]
    adamw = functools.partial(torch.optim.AdamW, lr=1e-3, fused=True)
    optimizer = (ZeroRedundancyOptimizer(parameters, torch.optim.AdamW, lr=1e-3, fused=True)
                 if mode == "zero1" else adamw([dict(params=k) for k in kinds if k]))

    def loss_of(logits, y):
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())
    cast = (functools.partial(torch.autocast, device, torch.bfloat16) if dtype == "bf16"
            else nullcontext)

    def whole(x, y):
        return loss_of(net(x), y)
    if compile:
        whole = torch.compile(whole)
    count, loss_context = batch_size // dp // micro_batch, loss_parallel if tp > 1 else nullcontext
    if pp > 1:
        schedule = getattr(pipelining, schedule)(
            pipelining.PipelineStage(net, stage, pp, torch.device("cpu"),
                                     group=mesh["pp"].get_group()), count, loss_fn=loss_of)

    def gradients(x, y):
        if pp > 1:
            schedule.step(*([x] if first else []), **(dict(target=y, losses=[]) if last else {}))
            return
        for i, (a, b) in enumerate(zip(x.split(micro_batch), y.split(micro_batch))):
            alone = isinstance(net, DistributedDataParallel) and i < count - 1
            with net.no_sync() if alone else nullcontext():
                with cast():
                    loss = whole(a, b) / count
                loss.backward()

    seconds = []
    profiler = torch.profiler.profile()
    for step in range(warmup + steps):
        if trace is not None and step == warmup + steps - 2:
            profiler.start()
        x, y = torch.randint(vocab, (2, batch_size // dp, SHAPE["seq_len"])).to(device)
        if world > 1:
            dist.barrier()
        start = time.perf_counter()
        with loss_context():
            gradients(x, y)
        for p in parameters if mode == "3d" else ():        # DDP refuses DTensors
            whole = p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            dist.all_reduce(whole, group=mesh["dp"].get_group())
            whole /= dp
        for some in filter(None, kinds):                    # clipping refuses to mix the two kinds
            torch.nn.utils.clip_grad_norm_(some, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if world > 1:
            dist.barrier()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if trace is not None:
        profiler.stop()
        profiler.export_chrome_trace(trace)
    if rank == 0:
        tokens = batch_size * SHAPE["seq_len"]
        found = dict(tokens_per_second=tokens / np.median(seconds[warmup:]), peak_memory=None)
        if device == "cuda":
            found["peak_memory"] = torch.cuda.max_memory_allocated() / 1e9
        print(json.dumps(found))
    if world > 1:
        dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tools.peer", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.error = lambda message: parser.exit(2, f"peer.py: {message}\n")
    parser.add_argument("work", metavar="JSON", help="arguments of train_plain, by name: "
                        + ", ".join(inspect.signature(train_plain).parameters))
    text = parser.parse_args().work
    try:
        work = json.loads(text)
        inspect.signature(train_plain).bind(**work)
        if work["mode"] not in MODES:
            raise ValueError(f"mode is not one of {', '.join(MODES)}")
    except (TypeError, ValueError) as error:
        parser.error(f"{text}: {error}")
    train_plain(**work)


if __name__ == "__main__":
    main()
