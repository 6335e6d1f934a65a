"""Every branch for GPUs, without one: NCCL's rules, and a device made of Python.

NCCL: a simulation drives the real executor by NCCL's rules, under which messages keep the order in
which they are asked for. `Second` is a device whose tensors the CPU holds: it notes each copy to
and from it and each wait, and refuses to mix devices, as a GPU does."""
import functools
import itertools
import math
import re
import time
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import (_setup_privateuseone_for_python_backend as
                                              setup_privateuseone_for_python_backend)

import checkpoint
import train
from base import agreement
from parallel import Grid, Pipeline
from parallelism import build, collectives, kernels, pipeline
from parallelism.pipeline import SCHEDULES, run_schedule
from runtime import evaluation, step_stats
from runtime.signals import StopSignal
from tests.commands import TINY, read_metrics, torchrun
from tests.harness import (CFG, GPUS, ROOT, Memory, Rows, assert_same_rows, gather_full_state,
                           gridded, log_of, own_processes, run_steps, settings, traffic,
                           without_saves)

# ---- NCCL: groups, connections, settings and the order of messages

def connections_of(rank, world, dp, pp, tp, ep=1):
    """The kinds of each group, and {(group, function, peer)} of the communication of make_groups
    on a device that is not the CPU; gloo stands in for NCCL."""
    new_group, connect = dist.new_group, build.connect
    started = []

    def on_gloo(ranks=None, *, backend, timeout, **options):
        assert backend == ("gloo" if ranks is None else "nccl")     # "save" sends host memory
        return new_group(ranks, backend="gloo", **options)

    def note(function, x, *args, **kwargs):
        if function != "wait":
            group = next(v for v in (*args, *kwargs.values()) if isinstance(v, dist.ProcessGroup))
            started.append((group, function, kwargs.get("group_dst", kwargs.get("group_src"))))
    with mock.patch.object(dist, "new_group", on_gloo), traffic(note), mock.patch.object(
            build, "connect", lambda grid, device: connect(grid, torch.device("cpu"))), \
            mock.patch.object(torch.cpu, "synchronize", lambda: started.append("synchronize")):
        grid = Grid(dp, pp, tp, rank, ep=ep)
        build.make_groups(grid, torch.device("meta"), timedelta(seconds=30))
    assert started.pop() == "synchronize" and "synchronize" not in started
    names = {}
    for name, group in grid.groups.items():
        if group is not None:
            names[group] = f"{names[group]} {name}" if group in names else name
    grid.groups.clear()
    return {*names.values()}, {(names[group], *rest) for group, *rest in started}


def test_the_groups_of_a_gpu_connect_before_the_first_step(pool):
    """Of four stages of tp 2, each with its neighbors."""
    for rank, (groups, started) in enumerate(pool.run(8, connections_of, 1, 4, 2)):
        assert {name for name, _, _ in started} == groups - {"save"}
        neighbors = {stage for stage in (rank // 2 - 1, rank // 2 + 1) if 0 <= stage < 4}
        assert {x for x in started if x[0] == "pp" and x[1] != "all_reduce"} == {
            ("pp", function, stage) for function in ("isend", "irecv") for stage in neighbors}


@pytest.mark.parametrize("layout, expected", [
    ((4, 1, 1), "replicas world"), ((1, 1, 4), "tp world"), ((1, 2, 1), "pp world embedding"),
    ((2, 2, 1), "replicas, pp embedding, world"),
    ((4, 1, 1, 2), "replicas world, ep, same_experts"), ((4, 1, 1, 4), "replicas, ep world")])
def test_equal_ranks_share_a_group_and_exchanges_of_all_with_all_connect(pool, layout, expected):
    """A group of NCCL takes memory of each GPU. What overlaps has its own."""
    world = math.prod(layout[:3])
    for groups, started in pool.run(world, connections_of, *layout):
        assert groups == {*expected.split(", "), "save"}
        connected = {group for group, function, _ in started if function == "all_to_all_single"}
        assert connected == {group for group in groups if {*group.split()} & {"tp", "ep"}}


def messages_of(schedule, stages, num_microbatches, chunks=1, kinds="FB", device="cpu"):
    """For each stage the messages of its run_schedule, in order: lists of (is it sent, from stage,
    to stage, tag) that start together. Nothing is sent."""
    started = [[] for _ in range(stages)]
    one = torch.ones(1, 1, device=device)
    arrived = SimpleNamespace(wait=lambda: None)

    def start(messages):
        started[stage].append([
            (True, stage, peer, tag) if kind is dist.isend else (False, peer, stage, tag)
            for kind, _, peer, _, tag in messages])
        return [arrived] * len(messages)

    class Chunk(SimpleNamespace):
        def __call__(self, x, *_, **__):
            y = x * torch.ones_like(x, requires_grad=True)
            return y if self.head is None else y.sum()

    def model_chunks(model, grid):
        return [Chunk(head=None) for _ in range(chunks - 1)] + [model]
    with mock.patch.multiple(dist, P2POp=lambda *message: message, batch_isend_irecv=start), \
            mock.patch.object(pipeline, "model_chunks", model_chunks):
        for stage in range(stages):
            ops = SCHEDULES[schedule](stage, stages, num_microbatches, chunks)
            is_last = stage == stages - 1
            model = Chunk(head=SimpleNamespace() if is_last else None,
                          cfg=SimpleNamespace(n_embd=1), parameters=lambda: iter([one]))
            with nullcontext() if "B" in kinds else torch.no_grad():
                run_schedule([op for op in ops if op[0] in kinds], model,
                             Grid(dp=1, pp=stages, tp=1, rank=stage, chunks=chunks),
                             [(one, None, 0, None)] * num_microbatches, flat=mock.Mock())
    return started


def reach_their_end(started):
    """Whether all stages do on NCCL, where a device does nothing else until the messages that it
    has started together have met their counterparts; and each gets the message that it expects."""
    paths = {}
    for sent, *path, tag in itertools.chain(*itertools.chain(*started)):
        paths.setdefault(tuple(path), ([], []))[sent].append(tag)
    if any(received != sent for received, sent in paths.values()):
        return False
    under_way = set()
    while started := [groups for groups in started if groups]:
        under_way.update(*(groups[0] for groups in started))
        after = [groups[1:] if all((not sent, *rest) in under_way for sent, *rest in groups[0])
                 else groups for groups in started]
        if after == started:
            return False
        started = after
    return True


@pytest.mark.claim("No schedule can hang on NCCL, where single messages would.")
@pytest.mark.parametrize("most", [4, pytest.param(6, marks=pytest.mark.slow)])
def test_no_schedule_can_hang_on_nccl_where_single_messages_do(most):
    """Mechanism (of pipelines on GPUs): in a model of NCCL the messages of all schedules arrive,
    with up to `most` stages, 2 most microbatches and 4 chunks; also of the forwards alone, of any
    number (evaluation)."""
    for stages, count in itertools.product((2, 3, 4), (2, 3, 8)):
        single = [[[message] for messages in groups for message in messages]
                  for groups in messages_of("1f1b", stages, count)]
        assert not reach_their_end(single)
        with mock.patch.object(pipeline.Interleaved, "split_in_turns", Pipeline.split_in_turns):
            assert not reach_their_end(messages_of("interleaved", stages, 3 * stages, 2))
    for stages, count, chunks in itertools.product(range(1, most + 1), range(1, 2 * most + 1),
                                                   (1, 2, 3, 4)):
        if stages == 1 and chunks > 1:
            continue
        if count in (1, 3, 8):
            schedule = "gpipe" if chunks == 1 else "interleaved"
            for device in ("cpu", "meta"):
                assert reach_their_end(messages_of(schedule, stages, count, chunks, "F", device))
        if chunks == 1:         # CPUs receive early
            for schedule, device in itertools.product(("gpipe", "1f1b"), ("cpu", "meta")):
                started = messages_of(schedule, stages, count, device=device)
                assert reach_their_end(started)
                if schedule == "gpipe" and stages > 2 and count > 1:
                    assert len(started[1][1]) == (1 if device == "cpu" else 2)
        elif count % stages == 0:
            assert reach_their_end(messages_of("interleaved", stages, count, chunks))


def communication_of(rank, world, layout, config, cfg):
    """All that this rank starts in a run, in order, as `messages_of` has it; a collective is a
    message to each other rank of its group, and one from each."""
    started = []
    exchange, all_reduce, batch = collectives._exchange, dist.all_reduce, dist.batch_isend_irecv

    def note(group, sizes, received):
        others = [(r, peer) for r, peer in enumerate(dist.get_process_group_ranks(group))
                  if peer != rank]
        started.append([(True, rank, peer, sizes[r]) for r, peer in others]
                       + [(False, peer, rank, received[r]) for r, peer in others])

    def noted_exchange(outgoing, incoming, group):
        note(group, [x.numel() for x in outgoing], [x.numel() for x in incoming])
        return exchange(outgoing, incoming, group)

    def noted_all_reduce(x, op, group, async_op):
        note(group, [x.numel()] * group.size(), [x.numel()] * group.size())
        return all_reduce(x, op, group, async_op)

    def noted_batch(messages):
        started.append([
            (True, rank, m.peer, m.tag) if m.op is dist.isend else (False, m.peer, rank, m.tag)
            for m in messages])
        return batch(messages)
    with mock.patch.object(collectives, "_exchange", noted_exchange), mock.patch.multiple(
            dist, all_reduce=noted_all_reduce, batch_isend_irecv=noted_batch):
        run_steps(rank, world, layout, config, cfg, prepare=without_saves)
    return started


@pytest.mark.claim("Context-parallel ranks communicate in one order.")
@pytest.mark.parametrize("layout, flags", [
    ((1, 2, 2), dict(cp=2, pp_schedule="1f1b", sequence_parallel=True, zero=1)),
    pytest.param((2, 1, 1), dict(cp=2, zero=3, recompute=True), marks=pytest.mark.slow)])
def test_context_parallel_ranks_communicate_in_one_order(pool, tmp_path, layout, flags):
    """Mechanism (that a run does not hang where NCCL makes each rank wait for what it starts): in
    that model all messages and collectives of two steps meet."""
    dp, tp, pp = layout
    config = settings(tmp_path, steps=2, check_every=0, tp=tp, pp=pp, **flags)
    world = dp * tp * pp * config.cp
    started = pool.run(world, communication_of, layout, config, replace(CFG, n_layer=pp))
    assert all(len(groups) > 20 for groups in started) and reach_their_end(started)
    first, *others = started
    swapped = [[*first[:i], first[i + 1], first[i], *first[i + 2:]] for i in range(20)]
    assert not all(reach_their_end([other_way, *others]) for other_way in swapped)


# ---- Every branch for GPUs, on a device made of Python

SECOND_LOG = []         # in order: ("arrives" or "leaves", bytes) or ("event", 0)
SECOND_LACKS = set()    # types


def log_copy(source, to, itemsize):
    if source.device != to:
        direction = "leaves" if to.type == "cpu" else "arrives"
        SECOND_LOG.append((direction, source.numel() * itemsize))


def inside(arguments):
    return tree_map_only(Second, lambda x: x.held, arguments)


class Second(torch.Tensor):
    """A tensor on the second device. `held`, on the CPU, has its numbers, on which the CPU computes
    every operation. As on a GPU, no operation takes tensors of two devices, but copies do."""

    @staticmethod
    def __new__(cls, held):
        assert held.dtype not in SECOND_LACKS
        tensor = torch.Tensor._make_wrapper_subclass(
            cls, held.shape, strides=held.stride(), storage_offset=held.storage_offset(),
            dtype=held.dtype, device=torch.device("second", 0))
        tensor.held = held
        return tensor

    def untyped_storage(self):              # ZeRO 3 frees it and takes it again
        return self.held.untyped_storage()

    @classmethod
    def __torch_dispatch__(cls, operation, types, args=(), kwargs=None):
        name, kwargs = operation.name(), dict(kwargs or {})
        to = torch.device(kwargs.pop("device", None) or "second:0")
        if name == "aten::copy_":
            log_copy(args[1], args[0].device, args[0].element_size())
        elif name == "aten::_to_copy":
            log_copy(args[0], to, args[0].element_size())
        elif name == "aten::_local_scalar_dense":
            log_copy(args[0], torch.device("cpu"), args[0].element_size())
        else:
            tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
            assert all(isinstance(x, Second) or x.dim() == 0 for x in tensors), name
        out = operation(*inside(args), **inside(kwargs))
        for x, argument in zip(args, operation._schema.arguments):
            if isinstance(out, torch.Tensor) and argument.is_write:
                return x                    # in place: the very argument comes back
        return tree_map_only(torch.Tensor, Second, out) if to.type == "second" else out


@functools.cache
def second_device():
    """(the device of Second tensors; what unregisters it when it goes), before autograd has run."""
    def event():
        SECOND_LOG.append(("event", 0))
        return True

    def on_cpu(function):
        return lambda *args, dtype=None, **_: Second(function(*args, dtype=dtype))

    def copy_from(source, target, non_blocking=False):
        log_copy(source, target.device, source.element_size())
        target.held.copy_(source)
        return target
    setup_privateuseone_for_python_backend("second", SimpleNamespace(       # torch.second
        Event=lambda: SimpleNamespace(record=event, query=event, synchronize=event),
        get_amp_supported_dtype=lambda: [torch.float32]))
    library = torch.library.Library("aten", "IMPL")
    for name, kernel in [("empty.memory_format", on_cpu(torch.empty)),
                         ("empty_strided", on_cpu(torch.empty_strided)),
                         ("arange", on_cpu(torch.arange)), ("_copy_from", copy_from)]:
        library.impl(name, kernel, "PrivateUse1")
    return torch.device("second", 0), library


def on_second_device(rank, world, layout, config, cfg, wide):
    """As run_steps -> (rows, what happens in a step, elements that this rank keeps, validation loss
    of what is restored)."""
    device, _ = second_device()
    SECOND_LACKS.update({torch.float64} - {wide})           # as MPS
    dp, tp, pp = layout

    def unwrapped(function):
        return lambda *args, **kwargs: function(*(getattr(x, "held", x) for x in args), **kwargs)

    def batch(messages):
        handles = [kind(x, peer, group, tag=tag) for kind, x, peer, group, tag in messages]
        return [SimpleNamespace(wait=functools.cache(h.wait)) for h in handles]    # gloo's: once
    names = "all_reduce", "reduce_scatter_single", "all_gather_single", "isend", "irecv"
    with gridded(rank, world, tp, pp, config.sequence_parallel, cp=config.cp) as grid, \
            ExitStack() as stack:
        for module in ("runtime.step_stats", "parallel"):
            stack.enter_context(mock.patch(f"{module}.sum_dtype", lambda device: wide))
        stack.enter_context(mock.patch.multiple(
            dist, P2POp=lambda *message: message, batch_isend_irecv=batch,
            **{name: unwrapped(getattr(dist, name)) for name in names}))
        run = train.Run(config, cfg, grid, device, Memory(cfg), Memory(cfg, 13, seed=1), None)
        rows = Rows(run, lambda run: len(SECOND_LOG))
        run.log = log_of(run, rows)
        run.train()
        whole = gather_full_state(run.flat, checkpoint.STATE.values())
        full = agreement.all_gather_object(whole)[0]
        run.flat.initialize(cfg, seed=5)
        checkpoint.restore({key: full[name] for key, name in checkpoint.STATE.items()}, run.flat)
        restored = evaluation.evaluate(run.model, run.val_data, run.loader, run.progress.batches,
                                       run.stop)["val_loss"]
    SECOND_LACKS.clear()
    numel = sum(bucket.shard["master"].numel() for bucket in run.flat.buckets)
    return rows.steps, SECOND_LOG[rows.seen[-3]:rows.seen[-2]], numel, restored


@pytest.mark.claim("Another device computes what the CPU does.")
@pytest.mark.parametrize("layout, flags", [
    ((1, 1, 2), dict(pp=2, pp_schedule="1f1b")),
    ((2, 1, 1), dict(zero=3, offload=True, recompute=True, dropout=0.1)),
    *(pytest.param(*row, marks=pytest.mark.slow) for row in [
        ((1, 1, 1), {}), ((1, 1, 1), dict(dtype="bf16", offload=True)),
        ((1, 1, 1), dict(dtype="fp16")), ((1, 1, 1), dict(cp=2, zero=2, dropout=0.1)),
        ((1, 2, 2), dict(tp=2, pp=2, sequence_parallel=True, dtype="bf16"))])])
def test_another_device_computes_what_the_cpu_does_and_waits_once_a_step(pool, tmp_path, layout,
                                                                         flags):
    """Losses and norms are the CPU's, to 1e-6, in 16 bits to 2 eps. The host reads what all ranks
    know of a step at once, when the next batch is there."""
    wide = torch.float64 if flags else torch.float32
    config = settings(tmp_path, steps=3, **flags)
    world = math.prod(layout) * config.cp
    cfg = replace(CFG, n_layer=3)
    theirs = pool.run(world, run_steps, layout, config, cfg)[0][0]
    with own_processes() as fresh:
        rows, log, numel, restored = fresh.run(world, on_second_device, layout, config, cfg,
                                               wide)[0]
    bound = 1e-6 if config.dtype == "fp32" else 2 * torch.finfo(torch.bfloat16).eps
    assert_same_rows(rows, theirs, bound)
    assert restored == rows[-1]["val_loss"]
    leave, arrive = ([size for what, size in log if what == way] for way in ("leaves", "arrives"))
    seen = [what for what, _ in log]
    buckets = len(leave) - 1
    offloads = []
    if buckets > 0:
        later = ["event", "arrives", "leaves", "event"] * (buckets - 2)
        offloads = ["leaves", "event"] * 2 + later + ["event", "arrives"] * 2
    assert seen[seen.index("leaves"):] == ["leaves", "event", "event"] + offloads
    offloaded = numel if config.offload else 0
    assert leave[0] == 5 * wide.itemsize and sum(leave[1:]) == 4 * offloaded
    replicas = layout[0] * config.cp
    batch = 2 * 8 * config.batch_size // replicas * CFG.seq_len             # tokens and targets
    assert sum(arrive) == batch + (2 if config.dtype == "bf16" else 4) * offloaded


def test_a_device_that_never_ends_its_work_ends_the_run():
    """A rank that hangs leaves the others' GPUs waiting, and a copy to the host with them: to_host
    raises a DistError after its timeout. It looks often, because a step waits for it. A process
    alone waits however long: --timeout is for other ranks."""
    never = SimpleNamespace(Event=lambda: SimpleNamespace(record=list, query=lambda: False))
    x = mock.Mock(device=torch.device("cuda"))
    with mock.patch.object(torch, "get_device_module", lambda device: never), \
            mock.patch.object(time, "sleep", wraps=time.sleep) as sleep:
        with pytest.raises(dist.DistError, match="has not ended its work in 0.05 s"):
            collectives.to_host(x, timeout=0.05)
    assert sleep.call_args.args[0] < 1e-3
    for world, expected in [(1, math.inf), (2, 60)]:
        grid = SimpleNamespace(world=world, groups=dict(world=None))
        with mock.patch.object(step_stats, "to_host", wraps=collectives.to_host) as to_host:
            step_stats.sum_across_ranks(dict(loss=torch.zeros(())), grid, 60, StopSignal())
        assert to_host.call_args.args[1] == expected


# ---- What a compiled run of one process does that a plain model, compiled as a whole, does not

def differences_of_expert_products(device, dtype, counts):
    """Of the products of four experts and of both gradients, relative to fp64."""
    counts = torch.tensor(counts, device=device)
    x, weight, dy = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
                     for shape in ((int(counts.sum()), 32), (4, 48, 32), (int(counts.sum()), 48)))
    y = kernels.expert_linear(x, weight, counts)
    found = [y, *torch.autograd.grad(y, (x, weight), dy)]
    wide_x, wide_weight = (z.detach().double().requires_grad_() for z in (x, weight))
    parts = zip(wide_x.split(counts.tolist()), wide_weight)
    wide_y = torch.cat([rows @ matrix.mT for rows, matrix in parts])
    wide = [wide_y, *torch.autograd.grad(wide_y, (wide_x, wide_weight), dy.double())]
    return [((a - b).norm() / b.norm().clamp(min=1)).item() for a, b in zip(found, wide)]


COUNTS = [[5, 0, 9, 3], [0, 0, 0, 17], [1000, 1, 22, 2025], [0, 0, 0, 0]]


@pytest.mark.parametrize("counts", COUNTS)
def test_all_experts_products_at_once_are_those_of_each(monkeypatch, counts):
    """PyTorch's kernel has a slow form for CPUs."""
    assert max(differences_of_expert_products("cpu", torch.float32, counts)) <= 1e-6
    monkeypatch.setattr(kernels, "multiplies_experts_at_once", lambda weight: True)
    assert max(differences_of_expert_products("cpu", torch.float32, counts)) <= 1e-6
    assert max(differences_of_expert_products("cpu", torch.bfloat16, counts)) <= 1e-2


def products_on_a_gpu(rank, world):
    """{type: the largest difference}, or None without a GPU."""
    if not torch.cuda.is_available():
        return None
    assert kernels.multiplies_experts_at_once(
        torch.empty(1, 8, 8, device="cuda", dtype=torch.bfloat16))
    return {dtype: max(max(differences_of_expert_products("cuda", dtype, counts))
                       for counts in COUNTS) for dtype in (torch.bfloat16, torch.float64)}


@pytest.mark.gpu
def test_a_gpu_multiplies_all_experts_at_once():
    with own_processes(CUDA_VISIBLE_DEVICES="0" if GPUS is None else GPUS) as fresh:
        found, = fresh.run(1, products_on_a_gpu)
    if found is None:
        pytest.skip("no GPU here")
    assert found[torch.bfloat16] <= 1e-2 and found[torch.float64] <= 1e-14


@pytest.mark.gpu
@pytest.mark.parametrize("world, flags", [
    (1, ""), (1, "--dtype bf16 --offload"), (1, "--dtype fp16 --recompute"), (1, "--compile"),
    (2, ""), (2, "--zero 1"), (2, "--zero 3 --offload"), (2, "--tp 2 --sequence-parallel"),
    (2, "--cp 2"), (4, "--cp 4 --dtype bf16"), (4, "--cp 2 --tp 2 --sequence-parallel --zero 2"),
    (2, "--pp 2"), (4, "--pp 4 --pp-schedule 1f1b"), (4, "--tp 2 --pp 2 --pp-schedule 1f1b"),
    (2, "--pp 2 --pp-schedule interleaved --pp-chunks 2"),
    (4, "--pp 2 --pp-schedule interleaved --pp-chunks 2 --zero 2"),
    (8, "--tp 2 --pp 2 --zero 2 --dtype bf16"), (2, "--compile --zero 1"),
    (4, "--compile --tp 2 --pp 2 --sequence-parallel"), (2, "--checkpoint-format folder --zero 1"),
    (2, "--ep 2 --zero 1"), (2, "--device cpu --zero 1 --checkpoint-format folder"),
    (2, "--device cpu --ep 2 --zero 1")])
def test_gpus_train_as_the_cpu(run_train, shards, tmp_path, monkeypatch, world, flags):
    """Losses and norms are the CPU's, to 1e-5 in fp32 without TF32 and 0.02 in 16 bits, the last
    four from the run's own checkpoint; each process has a GPU of its own. Two rows need none."""
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "0")
    same = ["--data", shards, *TINY, "--n-layer", 4, "--batch-size", 16, "--micro-batch", 2,
            "--steps", 8]
    if "--ep" in flags:         # fp32 would choose other experts
        same += ["--model", "moe-nano", "--hidden", 16, "--n-kv-head", 2, "--dtype", "fp64"]
    step = "step_00000004" if "folder" in flags else "step_00000004.pt"
    for more in (["--out", tmp_path / "gpu"],
                 ["--out", tmp_path / "branch", "--resume", tmp_path / "gpu" / step]):
        process = torchrun(world, ROOT / "train.py", *same, "--device", "cuda", *flags.split(),
                           *more, cwd=ROOT, gpus=GPUS)
        out, error = process.communicate(timeout=240)
        if re.search("but . CUDA devices|no CUDA device", error):
            pytest.skip(f"fewer than {world} GPUs here")
        assert process.returncode == 0, error
    assert run_train(*same, "--out", tmp_path / "cpu")[0] == 0
    gpu, branch, cpu = (read_metrics(tmp_path / name)[0] for name in ("gpu", "branch", "cpu"))
    assert_same_rows(gpu[:4] + branch, cpu, 0.02 if "16" in flags else 1e-5)
