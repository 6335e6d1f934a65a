"""Train model.GPT with PyTorch's own parallel stack: the other side of the races.

    torchrun --nproc_per_node=2 -m tools.bench.pytorch_stack '{"mode": "ddp", ...}'

The argument is a JSON object of arguments of `train_plain`; the modes are single, ddp and fsdp.
"""
import functools
import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from model import GPT, GPTConfig


def parallel(mode, compiled, plain, dtype):
    """The model as a user trains it. Alone and by DDP it is compiled as a whole; by FSDP2, as in
    torchtitan, each block and the head, and FSDP2 itself casts to 16 bits."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    if compiled and mode != "fsdp":
        plain.compile()
    if mode == "ddp":
        return DistributedDataParallel(plain)
    if mode == "fsdp":
        policy = MixedPrecisionPolicy()
        if dtype == "bf16":
            policy = MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=torch.float32)
        if compiled:
            plain.head.compile()
            for block in plain.blocks.values():
                block.compile()
        for module in [*plain.blocks.values(), plain]:
            fully_shard(module, mp_policy=policy)
    return plain


def compute_gradients(net, cast, x, y, micro_batch):
    """Forward and backward of a step, by microbatches."""
    microbatches = list(zip(x.split(micro_batch), y.split(micro_batch)))
    for i, (tokens, targets) in enumerate(microbatches):
        last = i == len(microbatches) - 1
        waits = isinstance(net, DistributedDataParallel) and not last
        with net.no_sync() if waits else nullcontext():
            with cast():
                loss = net(tokens, targets) / y.numel()
            loss.backward()


def train_plain(mode, compiled, work):
    """Train a GPT on random tokens by PyTorch's stack -> tokens per second of the whole job,
    the median over the steps after the warm-up, and the peak of rank 0's memory on a GPU in GB.
    `work`: the fields of a launch.Work."""
    warnings.simplefilter("ignore")
    work = SimpleNamespace(**work)
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(os.cpu_count() if world == 1 else 1)
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    plain = GPT(GPTConfig(work.vocab, **work.shape)).initialize(seed=0).to(work.device)
    if world > 1:
        dist.init_process_group("nccl" if work.device == "cuda" else "gloo")
    net = parallel(mode, compiled, plain, work.dtype)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3, fused=True)
    cast = nullcontext
    if work.dtype == "bf16" and mode != "fsdp":
        cast = functools.partial(torch.autocast, work.device, torch.bfloat16)
    tokens = work.batch, work.shape["seq_len"]
    seconds = []
    for _ in range(work.steps):
        x, y = torch.randint(work.vocab, (2, *tokens)).to(work.device)
        start = time.perf_counter()
        compute_gradients(net, cast, x, y, work.microbatches[0])
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if work.device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    if world > 1:
        dist.destroy_process_group()
    return dict(tokens_per_second=world * np.prod(tokens) / np.median(seconds[work.warmup:]),
                peak_memory=torch.cuda.max_memory_allocated() / 1e9)


if __name__ == "__main__":
    result = train_plain(**json.loads(sys.argv[1]))
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(result))
