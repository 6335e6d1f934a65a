"""A GPU of shapes: what a program starts on an H100, counted by PyTorch's build for CPUs.

    gpu = make_fake_gpu()
    with gpu:                               # a tensor on "cuda" has a shape and no memory
        y = torch.compile(f)(torch.empty(4096, 768, device="cuda"))
    gpu.launches                            # the kernels of y, in their order

Autograd and torch.compile work as on a GPU. Inductor generates its Triton kernels, and the code
that starts them runs, but the kernels are not compiled: Triton need not be installed.

    counted         kernels, the bytes and FLOPs of each, the memory of tensors and its peak, and
                    how often the host waits for the device
    not counted     time, caches, what a kernel reads again, communication, copies from the host
                    and to it, gaps in memory, and the second kernel of an operation that starts
                    several (LAUNCHES has those that are known)
    assumed         attention is FlashAttention, and any number that the host reads is 0

`make_fake_gpu` changes PyTorch in this process for good: use a process of its own.
"""
import ctypes
import math
import re
import weakref
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import torch
import torch._inductor.config as inductor
import torch.nn.functional as F
from torch._dynamo.device_interface import CudaInterface
from torch._inductor import async_compile, scheduler
from torch._inductor.codegen.wrapper import PythonWrapperCodegen
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode
from torch.nn.attention import bias
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "_grouped_mm")
# Operations that start several kernels, and those that start none beside views.
LAUNCHES = {"native_layer_norm_backward": 2, "_fused_rms_norm_backward": 2,
            "_scaled_dot_product_flash_attention_backward": 3}
NO_LAUNCH = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided", "detach",
             "_unsafe_view", "lift_fresh", "record_stream", "resize_", "set_", "is_pinned")
OVERWRITES = ("copy_", "zero_", "fill_", "_foreach_zero_", "_foreach_copy_")


@dataclass
class Launch:
    """A call that starts kernels."""
    phase: str
    name: str
    kernels: int
    bytes: float
    flops: float = 0.0

    @property
    def kind(self) -> str:
        """product, attention, or memory"""
        if self.name in PRODUCTS:
            return "product"
        return "attention" if "attention" in self.name else "memory"


class FakeGPU(FakeTensorMode):
    """launches        [Launch], in their order
    phase           the program's name for what it does now
    waits           how often the host has waited for the device
    memory, peak    bytes of the tensors on the device, now and at most
    """

    def __init__(self):
        super().__init__(allow_non_fake_inputs=True)
        self.phase = ""
        self.depth = 0              # above 0: an operation decomposes into others
        self.known = {}             # {address of a storage: its bytes}
        self.memory = 0
        self.start()

    def start(self) -> None:
        """Begin to count."""
        self.launches = []
        self.waits = 0
        self.peak = self.memory

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        self.depth += 1
        try:
            out = super().__torch_dispatch__(func, types, args, kwargs)
        except DataDependentOutputException:    # x.item(), of a number that the host reads
            out = 0.0 if args[0].is_floating_point() else 0
            self.waits += args[0].device.type == "cuda"
        finally:
            self.depth -= 1
        if self.depth == 0:
            self.count(func, args, kwargs, out)
        return out

    def count(self, func, args, kwargs, out) -> None:
        """Note the launch of an operation, if it starts a kernel on the device."""
        devices = {x.device.type for x in tensors_in((args, kwargs, out))}
        if "cuda" not in devices or func.namespace != "aten":
            return
        for x in tensors_in(out):
            self.hold(x)
        name = func._schema.name.split("::")[1]
        if func.is_view or name in NO_LAUNCH or (name == "copy_" and args[0] is args[1]):
            return
        if "cpu" in devices and name in ("_to_copy", "copy_"):
            to_host = tensors_in(out)[0].device.type == "cpu"
            self.waits += to_host and not kwargs.get("non_blocking", args[2:] == (True,))
            return
        flops = 0.0
        if func.overloadpacket in flop_registry:
            given = {k: v for k, v in kwargs.items() if k not in ("out", "out_dtype")}
            factors = [x for x in args if not isinstance(x, torch.dtype)]
            flops = flop_registry[func.overloadpacket](*factors, **given, out_val=out)
        self.launches.append(Launch(self.phase, name, kernels_of(name, args),
                                    bytes_of(func, name, args, kwargs, out), flops))

    def hold(self, x: torch.Tensor) -> None:
        """Count the memory of a tensor until it is freed."""
        storage = x.untyped_storage()
        address = storage._cdata
        if x.device.type == "cuda" and address not in self.known:
            self.known[address] = storage.nbytes()
            self.memory += storage.nbytes()
            self.peak = max(self.peak, self.memory)
            weakref.finalize(storage, self.free, address)

    def free(self, address: int) -> None:
        self.memory -= self.known.pop(address)


def tensors_in(tree) -> list[torch.Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, torch.Tensor)]


def kernels_of(name: str, args: tuple) -> int:
    """How many kernels an operation starts. One on lists of tensors starts another for each 36
    tensors (of four lists; 110 of one), and for each 320 pieces of 65536 numbers."""
    if not name.startswith(("_foreach", "_fused_adamw")):
        return LAUNCHES.get(name, 1)
    most = 36 if name.startswith("_fused") else 110
    pieces = sum(math.ceil(x.numel() / 65536) for x in args[0])
    return max(math.ceil(len(args[0]) / most), math.ceil(pieces / 320))


def bytes_of(func, name: str, args: tuple, kwargs: dict, out) -> int:
    """Bytes that an operation reads and writes: each tensor once, and again what it changes."""
    if name == "embedding":                     # rows of the matrix
        return 2 * nbytes(out)
    if name == "index_add_":
        return 3 * nbytes(args[3])
    if name in ("gather", "scatter_"):          # of each row of the logits one sector of 32 bytes
        return 2 * 32 * args[2].numel()
    given = func._schema.arguments
    changed = [value for value, argument in zip(args, given) if argument.is_write]
    if name in OVERWRITES:
        changed = []
    return nbytes((args, kwargs, out)) + nbytes(changed)


def nbytes(tree) -> int:
    """Of the different tensors."""
    different = {(x.untyped_storage()._cdata, x.storage_offset(), x.shape): x
                 for x in tensors_in(tree)}
    return sum(x.numel() * x.element_size() for x in different.values())


# ---------------------------------------------------------------------------------------------
# What PyTorch asks of a GPU, answered
# ---------------------------------------------------------------------------------------------

CUDA, EXTENSION = 1, 20                         # numbers of c10::DeviceType
IS_BUILT, IS_AVAILABLE, HAS_CONTEXT = 2, 3, 4   # functions of at::AcceleratorHooksInterface


class Guard(torch._C._acc.DeviceGuard):
    """Says which device a thread of autograd has."""

    @torch.compiler.disable
    def type_(self):
        return torch._C._autograd.DeviceType.CUDA


@cache
def register_device() -> tuple:
    """Autograd asks two C++ objects about a device. The guard says which device a thread has, and
    the hooks say whether the device is there. PyTorch's build for CPUs has no guard for CUDA, and
    hooks that answer no. Python can register a guard, but only for the device type of extensions.
    So this function copies its entry to that of CUDA, and replaces three functions of the hooks.
    C++ then refers to what it returns, which the cache keeps."""
    pointer = ctypes.c_void_p
    folder = Path(torch.__file__).parent / "lib"
    c10, cpu = (ctypes.CDLL(folder / name) for name in ("libc10.so", "libtorch_cpu.so"))
    guard = Guard()
    torch._C._acc.register_python_privateuseone_device_guard(guard)
    guards = (pointer * (EXTENSION + 1)).in_dll(c10, "_ZN3c104impl26device_guard_impl_registryE")
    guards[CUDA] = guards[EXTENSION]
    get_hooks = cpu._ZN2at6detail12getCUDAHooksEv
    get_hooks.restype = pointer
    hooks = pointer.from_address(get_hooks())           # an object begins with its functions' table
    table = (pointer * 64)(*(pointer * 64).from_address(hooks.value))
    yes = ctypes.CFUNCTYPE(ctypes.c_bool)(lambda: True)
    for function in IS_BUILT, IS_AVAILABLE, HAS_CONTEXT:
        table[function] = ctypes.cast(yes, pointer).value
    hooks.value = ctypes.addressof(table)
    return guard, table, yes


@cache
def aten_library() -> torch.library.Library:
    """Implementations of PyTorch's operations, as long as the process lives."""
    return torch.library.Library("aten", "IMPL")


# What the compiler asks for.
H100 = SimpleNamespace(name="NVIDIA H100 80GB HBM3", major=9, minor=0, multi_processor_count=132,
                       regs_per_multiprocessor=65536, max_threads_per_multi_processor=2048,
                       warp_size=32, gcnArchName="")
CAUSAL = "a triangle of queries and keys, at the end of the keys"


def flash_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None,
                    enable_gqa=False):
    """F.scaled_dot_product_attention by FlashAttention, as a GPU chooses it without a mask, and
    with a CausalBias, which is CAUSAL here."""
    assert attn_mask in (None, CAUSAL)
    is_causal = is_causal or attn_mask == CAUSAL
    if enable_gqa:
        k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return aten._scaled_dot_product_flash_attention(q, k, v, dropout_p, is_causal, scale=scale)[0]


def returns(value):
    """A function of its own for each name: the compiler tells them apart by identity."""
    return lambda *args, **kwargs: value


def make_fake_gpu() -> FakeGPU:
    gpu = FakeGPU()
    register_device()
    answer_as_h100(gpu)
    run_generated_code(gpu)
    return gpu


def answer_as_h100(gpu: FakeGPU) -> None:
    """Replace the functions of PyTorch that ask a GPU's driver."""
    def wait(*args):
        gpu.waits += 1
        return True
    stream = SimpleNamespace(cuda_stream=0, stream_id=0, device_index=0, device_type=CUDA)
    answers = {
        torch._C: dict(_cuda_getDevice=0, _cuda_setDevice=None, _cuda_getCurrentRawStream=0),
        torch.cuda: dict(_lazy_init=None, _exchange_device=0, _maybe_exchange_device=0,
                         is_available=True, is_bf16_supported=True, current_stream=stream,
                         get_device_properties=H100, get_device_capability=(9, 0),
                         get_rng_state=torch.zeros(16), set_rng_state=None, max_memory_allocated=0)}
    for module, values in answers.items():
        for name, value in values.items():
            setattr(module, name, returns(value))
    CudaInterface.get_device_properties = staticmethod(returns(H100))
    torch.cuda.synchronize = wait
    event = SimpleNamespace(record=returns(None), query=wait, synchronize=wait)
    torch.cuda.Event = returns(event)
    torch.Tensor.pin_memory = lambda x, *args: x
    F.scaled_dot_product_attention = flash_attention
    bias.CausalBias = returns(CAUSAL)

    def on_host(function):          # for constants, which the compiler computes
        return lambda size, *args, device=None, **options: function(size, *args, **options)
    library = aten_library()
    library.impl("empty.memory_format", on_host(torch.empty), "CUDA")
    library.impl("empty_strided", on_host(torch.empty_strided), "CUDA")
    # Not called. But what has a kernel of its own is not decomposed.
    for name in ("_fused_rms_norm", "silu_backward"):
        library.impl(name, returns(None), "CUDA")


def run_generated_code(gpu: FakeGPU) -> None:
    """Let Inductor generate code for Triton, and let this code start kernels that are counted."""
    def kernel(_, name, source, device_str="cuda"):
        moved = 1e9 * float(re.search(r"'kernel_num_gb': ([\d.e+-]+)", source)[1])

        def run(*args, **options):
            gpu.launches.append(Launch(gpu.phase, name, 1, moved))
        return SimpleNamespace(run=run)

    def empty_strided(size, stride, dtype):
        return torch.empty_strided(size, stride, dtype=dtype, device="cuda")

    def reinterpret(x, size, stride, offset=0):
        return x.as_strided(size, stride, x.storage_offset() + offset)
    async_compile.AsyncCompile.triton = kernel
    torch._C._dynamo.guards._empty_strided_cuda = empty_strided
    torch._C._dynamo.guards._reinterpret_tensor = reinterpret
    # Triton is not imported, nor asked what it is.
    PythonWrapperCodegen.write_triton_header_once = PythonWrapperCodegen.write_get_raw_stream_header
    scheduler.has_triton = returns(True)
    torch.utils._triton.triton_hash_with_backend = returns("")
    inductor.benchmark_kernel = True            # writes kernel_num_gb
    inductor.compile_threads = 1
    inductor.force_disable_caches = True        # a GPU's programs may have theirs there
