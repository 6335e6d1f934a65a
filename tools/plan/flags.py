"""The flags of a plan: train.py's of the model and the layout, and its own."""
from dataclasses import dataclass, replace

from amp import PRECISIONS
from base import options
from base.commandline import flag
from tools.plan.gpus import GPUS, GPUSpec, gpu_name, spec_of

GPT2_VOCABULARY = 50257         # of the sizes that are not below
# Tokens of the published models. PaLM's is a round number in the paper, 256k.
VOCABULARIES = {
    "llama-7b": 32000, "llama-13b": 32000, "llama-33b": 32000, "llama-65b": 32000,
    "llama2-7b": 32000, "llama2-13b": 32000, "llama2-70b": 32000,
    "llama3-8b": 128256, "llama3-70b": 128256, "mistral-7b": 32768,
    "mistral-7b-v0.1": 32000, "tinyllama-1.1b": 32000,
    "smollm2-135m": 49152, "smollm2-360m": 49152, "smollm2-1.7b": 49152,
    "qwen2.5-0.5b": 151936, "qwen2.5-1.5b": 151936, "qwen2.5-3b": 151936, "qwen2.5-7b": 152064,
    "qwen3-0.6b": 151936, "qwen3-1.7b": 151936, "qwen3-4b": 151936, "qwen3-8b": 151936,
    "olmo-1b": 50304, "olmo2-1b": 100352, "olmo2-7b": 100352, "olmo2-13b": 100352,
    "olmo2-32b": 100352, "phi-1": 51200, "phi-1.5": 51200, "phi-2": 51200, "gptj-6b": 50400,
    "galactica-125m": 50000, "galactica-1.3b": 50000, "galactica-6.7b": 50000,
    "galactica-30b": 50000, "galactica-120b": 50000, "neox-20b": 50432,
    "pythia-70m": 50304, "pythia-160m": 50304, "pythia-410m": 50304, "pythia-1b": 50304,
    "pythia-1.4b": 50304, "pythia-2.8b": 50304, "pythia-6.9b": 50432, "pythia-12b": 50688,
    "palm-8b": 256000, "mixtral-8x7b": 32000, "mixtral-8x22b": 32768, "olmoe-1b-7b": 50304,
    "qwen3-30b-a3b": 151936, "qwen3-235b-a22b": 151936}


@dataclass(frozen=True)
class PlanConfig(options.Config):
    """train.py's flags, of which RUN_FLAGS count here, and the plan's own."""
    batch_size: int = flag(16, "sequences per step; for a model of 60M parameters or more as many "
                           "tokens as GPT-3's of its size had", low=1, group="optimization")
    world: int = flag(None, "GPUs (required)", low=1, group="plan")
    gpu: gpu_name = flag(None, "kind of GPU (required): " + ", ".join(GPUS) + ", or TFLOP/s:GB:"
                        "GB/s of another", form="NAME")
    gpus_per_node: int = flag(8, "GPUs of a machine", low=1)
    network: float = flag(None, "GB per second of each GPU to other machines (default: its usual "
                          "machine's)", low=0)
    vocab_size: int = flag(None, "tokens of the vocabulary (default: as published with --model, of "
                           f"GPT and OPT {GPT2_VOCABULARY}); a run takes that of its data", low=1)
    tokens: float = flag(None, "instead of --steps: train on so many tokens, as 26e9", low=1)
    mtbf_hours: float = flag(5100.0, "hours between two failures of a machine; OPT-175B: 35 "
                             "restarts in two months on 124 machines", low=1)
    file_system: float = flag(100.0, "GB per second at which all machines together write and read "
                              "a checkpoint that is a folder; a machine at most 2", low=1e-3)
    law: str = flag(None, "ladder.json of tools.ladder: its law in place of Hoffmann et al.'s",
                    form="FILE")
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
    def vocabulary(self) -> int:
        """Tokens: --vocab-size, or those of the model."""
        if self.vocab_size is not None:
            return self.vocab_size
        return VOCABULARIES.get(self.model, GPT2_VOCABULARY)

    @property
    def size(self) -> int:
        """Bytes of a number of the parameters and activations."""
        return PRECISIONS[self.dtype].parameters.itemsize

    @property
    def master_size(self) -> int:
        """The same of masters and gradients."""
        return PRECISIONS[self.dtype].masters.itemsize

    @property
    def recomputes_attention(self) -> bool:
        """Whether backward computes attention once more, and nothing else of a block."""
        return self.cp > 1 and not self.recompute


LAYOUT = ("tp", "pp", "cp", "ep", "micro_batch", "zero", "recompute", "sequence_parallel",
          "pp_schedule", "pp_chunks", "steps")
RUN_FLAGS = ["model", *options.SHAPE, "batch_size", "steps", "tp", "pp", "cp", "ep", "pp_schedule",
             "pp_chunks", "micro_batch", "zero", "recompute", "sequence_parallel",
             "offload", "compile", "dtype", "checkpoint_format"]
OWN_FLAGS = list(PlanConfig.__annotations__)
