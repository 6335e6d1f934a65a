"""The flags of a plan: train.py's of the model and the layout, and its own."""
from dataclasses import dataclass, replace

from amp import PRECISIONS
from runtime import options
from runtime.options import flag
from tools.plan.gpus import GPUS, GPUSpec, gpu_name, spec_of


@dataclass(frozen=True)
class PlanConfig(options.Config):
    """train.py's flags, of which RUN_FLAGS count here, and the plan's own."""
    world: int = flag(None, "GPUs (required)", low=1, group="plan")
    gpu: gpu_name = flag(None, "kind of GPU (required): " + ", ".join(GPUS) + ", or TFLOP/s:GB:"
                        "GB/s of another", form="NAME")
    gpus_per_node: int = flag(8, "GPUs of a machine", low=1)
    network: float = flag(None, "GB per second of each GPU to other machines (default: its usual "
                          "machine's)", low=0)
    vocab_size: int = flag(50257, "tokens of the vocabulary; a run takes that of its data", low=1)
    tokens: float = flag(None, "instead of --steps: train on so many tokens, as 26e9", low=1)
    days: float = flag(None, "instead of --steps: what so many days can train: --model or a shape "
                       "for their steps; without these, the largest named size that gets its "
                       "compute-optimal tokens", low=1e-4)
    mtbf_hours: float = flag(5100.0, "hours between two failures of a machine; OPT-175B: 35 "
                             "restarts in two months on 124 machines", low=1)
    search: bool = flag(False, "the ten fastest layouts that fit; layout flags that are given are "
                        "constraints")
    json: bool = flag(False, "print one object, or with --search a list")

    @property
    def spec(self) -> GPUSpec:
        spec = spec_of(self.gpu)
        if self.network is not None:
            spec = replace(spec, network=1e9 * self.network)
        return spec

    @property
    def size(self) -> int:
        """Bytes of a number of the parameters and activations."""
        return PRECISIONS[self.dtype][0].itemsize

    @property
    def master_size(self) -> int:
        """The same of masters and gradients."""
        return PRECISIONS[self.dtype][1].itemsize

    @property
    def recomputes_attention(self) -> bool:
        """Whether backward computes attention once more, and nothing else of a block (CP3)."""
        return self.cp > 1 and not self.recompute


LAYOUT = ("tp", "pp", "cp", "micro_batch", "zero", "recompute", "sequence_parallel", "pp_schedule",
          "pp_chunks", "steps")
RUN_FLAGS = ["model", *options.SHAPE, "batch_size", "steps", "tp", "pp", "cp", "pp_schedule",
             "pp_chunks", "micro_batch", "zero", "recompute", "sequence_parallel", "offload",
             "compile", "dtype"]
OWN_FLAGS = ["world", "gpu", "gpus_per_node", "network", "vocab_size", "tokens", "days",
             "mtbf_hours", "search", "json"]
