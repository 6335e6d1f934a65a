"""The flags of sample.py, and what is refused of them."""
import sys
from dataclasses import dataclass

from base.commandline import Flags, Parser, add_flags, flag
from base.errors import refuse

LOWEST = 1e-6                  # temperature and top-p below it would be 0 in fp32, or nearly


@dataclass(frozen=True)
class SampleFlags(Flags):
    """Every flag of sample.py with its default."""
    ckpt: str = flag("out/latest.pt", "checkpoint", group="checkpoint and text", form="FILE")
    prompt: str = flag("", "text to continue; -: standard input (default: begin a document)",
                       form="TEXT")
    chat: bool = flag(False, "answer each line of standard input; for a model that was trained on "
                      "conversations; an empty line begins a new one")
    num_samples: int = flag(None, "samples per prompt, with --seed, --seed + 1, ...; if it is "
                            "given, each line of --prompt - is a prompt (default: one sample)",
                            low=1)
    max_tokens: int = flag(500, "tokens per sample; whenever the model's window is full, it "
                           "forgets the older half", low=0)
    stop: str = flag("", r"end before this text (a line break is $'\n')", form="TEXT")
    temperature: float = flag(0.8, "divides the logits; 0: the most probable token", low=0,
                              group="choice of the next token")
    top_k: int = flag(0, "the N most probable; 0: all", low=0)
    top_p: float = flag(1.0, "the smallest set of tokens whose probability reaches X", low=LOWEST)
    seed: int = flag(0, "random seed", low=0, below=2**63)
    device: str = flag("auto", "auto: cuda or mps where available", group="device and precision",
                       choices=["auto", "cpu", "cuda", "mps"])
    dtype: str = flag("fp32", "type of weights and activations; bf16 is faster where the device "
                      "multiplies 16-bit numbers", choices=["fp32", "bf16"])


def parse_flags(arguments) -> SampleFlags:
    """The values of the flags. Raises ValueError, also for a stream that is closed."""
    parser = Parser("sample.py", "python sample.py [FLAG ...]", "Sample text from a checkpoint.")
    add_flags(parser, SampleFlags)
    flags = SampleFlags(**parser.parse(arguments))
    refuse([
        (0 < flags.temperature < LOWEST,
         f"argument --temperature: {flags.temperature:g} must be 0 (greedy) or at least "
         f"{LOWEST:g}"),
        (flags.top_p > 1, f"argument --top-p: {flags.top_p:g} must be at most 1"),
        (flags.chat and sys.stdin is None, "--chat reads standard input, which is closed"),
        (flags.chat and (flags.prompt or flags.stop or flags.num_samples is not None),
         "--chat reads standard input and ends where the model does: drop --prompt, --stop and "
         "--num-samples"),
        (sys.stdout is None,
         "standard output, where the text goes, is closed: give a file or a pipe")])
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    return flags
