"""Train the same model with PyTorch's own parallel stack: the other side of the races.

    torchrun --nproc_per_node=2 -m tools.bench.pytorch_stack '{"mode": "ddp", "work": ...}'

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
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel


class PlainBlock(nn.Module):
    """A block as others write it, q, k and v apart."""

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
    def __init__(self, vocab, shape):
        super().__init__()
        C = shape["n_embd"]
        self.token = nn.Embedding(vocab, C)
        self.position = nn.Embedding(shape["seq_len"], C)
        self.blocks = nn.Sequential(*(PlainBlock(C, C // shape["n_head"])
                                      for _ in range(shape["n_layer"])))
        self.norm = nn.LayerNorm(C)
        self.head = nn.Linear(C, vocab, bias=False)
        for module in self.modules():               # of N(0, 1) many numbers become denormal
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, x, y):
        """The loss of sequences x with targets y, both (B, T)."""
        x = self.blocks(self.token(x) + self.position.weight)
        return self.loss(self.head(self.norm(x)), y)

    def loss(self, logits, y):
        return F.cross_entropy(logits.float().flatten(0, 1), y.flatten())


def parallel(mode, compiled, plain, dtype):
    """The model as a user trains it. Alone and by DDP it is compiled as a whole; by FSDP2, as in
    torchtitan, each block and the loss, and FSDP2 itself casts to 16 bits."""
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
            plain.loss = torch.compile(plain.loss)
            for block in plain.blocks:
                block.compile()
        for module in [*plain.blocks, plain]:
            fully_shard(module, mp_policy=policy)
    return plain


def compute_gradients(net, cast, x, y, micro_batch):
    """Of the sequences of a step and their targets."""
    microbatches = list(zip(x.split(micro_batch), y.split(micro_batch)))
    for i, (tokens, targets) in enumerate(microbatches):
        last = i == len(microbatches) - 1
        waits = isinstance(net, DistributedDataParallel) and not last
        with net.no_sync() if waits else nullcontext():
            with cast():
                loss = net(tokens, targets) / len(microbatches)
            loss.backward()


def train_plain(mode, compiled, work):
    """Train a PlainGPT on random tokens by PyTorch's stack -> tokens per second of the whole job,
    the median over the steps after the warm-up, and the peak of rank 0's memory on a GPU in GB.
    `work`: the fields of a launch.Work."""
    warnings.simplefilter("ignore")
    work = SimpleNamespace(**work)
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.set_num_threads(os.cpu_count() if world == 1 else 1)
    torch.manual_seed(0)
    if work.device == "cuda":
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    plain = PlainGPT(work.vocab, work.shape).to(work.device)
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
