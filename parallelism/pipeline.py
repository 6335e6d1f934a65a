"""Pipeline parallelism (GPipe, Huang et al. 2019), as train.py runs it: one executor for any
schedule.

It computes the same as `plain_pipeline` in parallel.py, which already has 1F1B. The differences:

    difference                          gain                                  where
    a message travels during an op      its sender never waits for it; with   run_turns
                                        GPipe its receiver does not, either
    1F1B: backwards start early         activations of p microbatches, not m  schedules.py
    crossing messages start together    NCCL cannot hang                      start_messages
    a rank never builds other stages    memory / p                            build_stage
    backward recomputes a block         stores 1 value instead of about 16    recompute_blocks
    a rank has v chunks of the layers   bubble about 1 / v; v times messages  model_chunks
    gradients of weights wait for gaps  bubble about 1 / 3; keeps p, as 1F1B  schedules.zb_h1
    tp ranks send 1 / tp of x each      networks carry x once, not tp times   gather_message
"""
import copy
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.utils.checkpoint import checkpoint

from amp import PRECISIONS
from model import GPT
from parallel import stage_layers
from parallelism.collectives import Work, all_gather, comm_errors, on_hosts, sum_dtype
from parallelism.schedules import split_in_turns


def chunk_layers(n_layer: int, grid) -> list[range]:
    """The numbers of the blocks in each chunk of this rank."""
    return [stage_layers(n_layer, grid.pp * grid.chunks, chunk * grid.pp + grid.stage)
            for chunk in range(grid.chunks)]


def model_chunks(model: GPT, grid) -> list[GPT]:
    """The chunks of this rank's model, as models that share its modules."""
    chunks = []
    for number, layers in enumerate(chunk_layers(model.cfg.n_layer, grid)):
        chunk = copy.copy(model)
        chunk._modules = dict(
            embed=model.embed if number == 0 else None,
            blocks=nn.ModuleDict({str(layer): model.blocks[str(layer)] for layer in layers}),
            head=model.head if number == grid.chunks - 1 else None)
        chunks.append(chunk)
    return chunks


def recompute_blocks(model: GPT) -> None:
    """Backward recomputes a block from its input: 1 stored value per position and channel
    instead of about 16, for a third more FLOPs (by blocks as in Chen et al. 2016)."""
    for block in model.blocks.values():
        # Dropout masks depend on seeds only, so there is no generator state to restore.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False,
                                preserve_rng_state=False)


OP_NAMES = {"F": "forward", "B": "backward", "W": "weight gradients"}       # for errors


def like_activations(config, model_config, grid, device) -> torch.Tensor:
    """A tensor with the shape and type of what one stage sends to the next."""
    positions = model_config.seq_len // grid.cp
    if grid.sequence_parallel:
        positions //= grid.tp
    return torch.empty(config.micro_batch, positions, model_config.n_embd,
                       dtype=PRECISIONS[config.dtype].parameters, device=device)


def run_schedule(schedule, model: GPT, grid, batch: list, activation_like: torch.Tensor,
                 flat=None) -> torch.Tensor:
    """Run this stage's list of ops, which schedules.py makes. Returns the sum of the losses,
    not scaled, in `sum_dtype`; 0 on all stages but the last. Raises DistError if another rank is
    gone or hangs.

    batch            microbatch -> (inputs (B, T), targets (B, T), dropout seed, positions of packed
                     texts (B, T) or None)
    activation_like  `like_activations`, (B, T, C) or (B, T / tp, C)
    flat             the FlatParameters that collect the gradients; None if there is no backward
    """
    loss = activation_like.new_zeros((), dtype=sum_dtype(activation_like.device))
    last_backward = {chunk: m for kind, m, chunk in schedule if kind == "B"}
    kept = {}                   # (microbatch, chunk) -> (input, output), from forward to backward
    chunks = model_chunks(model, grid)
    postponed = []              # of each backward without its W, the factors of the products
    has_weight_ops = ("W", 0, 0) in schedule
    for module in model.modules():
        module.postponed = postponed if has_weight_ops else None

    def forward(m, chunk, x):
        inputs, targets, dropout_seed, positions = batch[m]
        x = inputs if grid.is_first and chunk == 0 else x.requires_grad_()
        # Activations, or from the head the loss.
        y = chunks[chunk](x, targets, dropout_seed, positions=positions)
        if chunks[chunk].head is not None:
            loss.add_(y.detach())
        if torch.is_grad_enabled():
            kept[m, chunk] = x, y
        return y

    def backward(m, chunk, dy):
        x, y = kept.pop((m, chunk))
        if chunks[chunk].head is not None:
            scaled = y * model.head.loss_factor
        else:       # dy is its gradient. (torch.autograd.backward(y, dy) imports a compiler, 0.5 s)
            scaled = (y * dy).sum()
        flat.prepare_grad_sync(chunks[chunk], m == last_backward[chunk])
        postponed.append([])
        scaled.backward()
        return x.grad

    @torch.no_grad()
    def weight_grads(m, chunk, _):
        factors = postponed.pop(0)
        while factors:                                  # each product frees its own
            module, dy, x = factors.pop(0)
            module.weight.grad = module.weight_grad(dy, x)
            flat.grad_ready(module.weight)

    run_turns(split_in_turns(schedule, grid.chunks), grid,
              dict(F=forward, B=backward, W=weight_grads), activation_like)
    return loss


@dataclass
class Message:
    """What a stage sends, or receives, for an op of its own."""
    sending: bool
    op: tuple                   # (kind, microbatch, chunk)
    tensor: torch.Tensor        # the op's result, to be sent; or a tensor like its input


def run_turns(turns: list, grid, functions: dict, activation_like: torch.Tensor) -> None:
    """Run the ops by functions[kind](microbatch, chunk, input) -> result. Before a turn its inputs
    arrive; after it its results leave, while the next turn runs."""
    def inputs_of(turn):
        return [Message(False, op, activation_like) for op in turn]

    leaving = dict.fromkeys("FBW", Work(None))          # the last result of each kind
    arriving = start_messages(grid, inputs_of(turns[0]))
    for turn, next_turn in zip(turns, [*turns[1:], []]):
        inputs = arriving
        receive_early = may_receive_early(turn, next_turn, grid)
        if receive_early:
            arriving = start_messages(grid, inputs_of(next_turn))
        results = []
        for op, x in zip(turn, inputs):
            y = run_op(functions, op, x.wait())
            leaving[op[0]].wait()           # the result before, which has traveled during this op
            results.append(Message(True, op, y))
        if receive_early:
            started = start_messages(grid, results)
        else:                               # together: they may cross
            started = start_messages(grid, results + inputs_of(next_turn))
            arriving = started[len(turn):]
        for op, work in zip(turn, started):
            leaving[op[0]] = work
    for work in leaving.values():
        work.wait()


def may_receive_early(turn: list, next_turn: list, grid) -> bool:
    """Whether the next turn's inputs may be received during this turn, not only after it.

    F, then F: they come from the other neighbor than the one that the result goes to, so yes (GPipe
    is 3 to 10% faster on CPUs). F, then B: both messages are with one neighbor and cross, so they
    have to start together. So too in a ring of chunks, where all stages would wait."""
    return len(next_turn) > 0 and next_turn[-1][0] == turn[-1][0] and grid.chunks == 1


def run_op(functions: dict, op: tuple, x: torch.Tensor | None) -> torch.Tensor | None:
    kind, m, chunk = op
    try:
        return functions[kind](m, chunk, x)
    except dist.DistError as error:
        raise dist.DistError(f"{OP_NAMES[kind]} of microbatch {m}: {error}") from error


def route(grid, message: Message) -> tuple[int, int] | None:
    """(the stage at the other end of a message, its tag); None at the ends of the model, where
    there is no other stage, and for W, which sends nothing."""
    kind, m, chunk = message.op
    places = grid.pp * grid.chunks          # chunk c of stage s is number c p + s in the model
    here = chunk * grid.pp + grid.stage
    forth = 1 if kind == "F" else -1        # activations go to the next place, gradients back
    there = here + forth if message.sending else here - forth
    receiver = there if message.sending else here
    if kind == "W" or not 0 <= there < places:
        return None
    tag = 2 * (m * places + receiver) + "FB".index(kind)        # the op that needs the message
    return there % grid.pp, tag


def start_messages(grid, messages: list[Message]) -> list[Work]:
    """Start all messages together, and return a Work for each; its result is None if the message
    has no `route`. On NCCL they are one operation. If two neighbors send to each other, and
    each started its send before its receive, NCCL could have both wait forever. gloo starts them
    one by one; the tag tells them apart."""
    works = [Work(None) for _ in messages]
    started, operations = [], []
    for work, message in zip(works, messages):
        end = route(grid, message)
        if end is None:
            continue
        stage, tag = end
        peer = grid.rank + (stage - grid.stage) * grid.replicas * grid.tp
        if message.sending:
            start, verb = dist.isend, "send to"
            work.result = message.tensor.detach().contiguous()
        else:
            start, verb = dist.irecv, "receive from"
            work.result = torch.empty_like(message.tensor)
            work.finish = partial(gather_message, grid=grid)
        kind, m, _ = message.op
        work.operation = (f"{OP_NAMES[kind]} of microbatch {m}: {verb} rank {peer}"
                          f"{on_hosts([peer], grid.hosts)} (stage {stage})")
        part = work.result
        if not grid.sequence_parallel:
            part = part.view(-1).chunk(grid.tp)[grid.tp_rank]               # a tp-th of x
        started.append(work)
        operations.append(dist.P2POp(start, part, peer, grid.groups["pp"], tag))
    if started:
        with comm_errors(", ".join(work.operation for work in started)):
            handles = dist.batch_isend_irecv(operations)
        if len(handles) == 1:               # NCCL's one handle is that of every message
            handles = handles * len(started)
        for work, handle in zip(started, handles, strict=True):
            work.handles = [handle]
    return works


def gather_message(x: torch.Tensor, grid) -> torch.Tensor:
    """The tp ranks of a stage have the same x for those of the next, which is in another machine.
    Each sends 1 / tp of it, and the receivers exchange theirs inside their machine (Narayanan et
    al. 2021, section 4.1). With sequence parallelism x is a part already."""
    if not grid.sequence_parallel:
        all_gather(x.view(-1), grid.groups["tp"]).wait()                    # in place
    return x
