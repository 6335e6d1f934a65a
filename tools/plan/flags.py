"""The flags of a plan: train.py's of the model and the layout, and its own."""
from dataclasses import dataclass, replace

from amp import PRECISIONS
from base import options
from base.commandline import flag
from tools.plan.gpus import GPUS, GPUSpec, gpu_name, spec_of

GPT2_VOCABULARY = 50257         # of the sizes that are not below
# Tokens of the published models, by the beginning of their names: the longest that fits counts.
# PaLM's is a round number in the paper, 256k.
VOCABULARIES = {
    "llama-nano": GPT2_VOCABULARY, "llama-": 32000, "llama2-": 32000, "llama3-": 128256,
    "mistral-": 32768, "mistral-7b-v0.1": 32000, "tinyllama-": 32000, "smollm2-": 49152,
    "qwen2.5-": 151936, "qwen2.5-7b": 152064, "qwen3-": 151936, "olmo-": 50304, "olmo2-": 100352,
    "phi-": 51200, "gptj-": 50400, "galactica-": 50000, "neox-": 50432, "pythia-": 50304,
    "pythia-6.9b": 50432, "pythia-12b": 50688, "palm-": 256000, "mixtral-8x7b": 32000,
    "mixtral-8x22b": 32768, "olmoe-": 50304}


@dataclass(frozen=True)
class PlanConfig(options.Config):
    """train.py's flags, of which RUN_FLAGS count here, and the plan's own."""
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
        begins = max(filter(self.model.startswith, VOCABULARIES), key=len, default=None)
        return VOCABULARIES.get(begins, GPT2_VOCABULARY)

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
          "pp_schedule", "pp_chunks")
RUN_FLAGS = ["model", *options.SHAPE, "batch_size", "steps", *LAYOUT, "offload", "compile", "dtype",
             "checkpoint_format"]
OWN_FLAGS = list(PlanConfig.__annotations__)
