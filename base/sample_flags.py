"""The flags and prompts of sample.py, and what is refused of them."""
import argparse
import sys
from pathlib import Path

from base.commandline import Parser
from base.other_names import SAMPLE_ADVICE, SAMPLE_NAMES

DTYPES = ("fp32", "bf16")
LOWEST = 1e-6                  # temperature and top-p below it would be 0 in fp32, or nearly


def make_parser() -> Parser:
    """The flags of sample.py, with their defaults."""
    parser = Parser("sample.py", "python sample.py [FLAG ...]", "Sample text from a checkpoint.",
                    SAMPLE_NAMES, SAMPLE_ADVICE)
    add = parser.add_argument_group("checkpoint and text").add_argument
    add("--ckpt", default="out/latest.pt", metavar="FILE", help="checkpoint (default %(default)s)")
    add("--prompt", default="", metavar="TEXT",
        help="text to continue; -: standard input (default: begin a document)")
    add("--chat", action="store_true", help="answer each line of standard input; for a model that "
        "was trained on conversations; an empty line begins a new one")
    add("--num-samples", type=int, metavar="N", help="samples per prompt, with --seed, --seed + 1, "
        "...; if it is given, each line of --prompt - is a prompt (default: one sample)")
    add("--max-tokens", type=int, default=500, metavar="N", help="tokens per sample; whenever the "
        "model's window is full, it forgets the older half (default %(default)s)")
    add("--stop", default="", metavar="TEXT", help=r"end before this text (a line break is $'\n')")
    add = parser.add_argument_group("choice of the next token").add_argument
    add("--temperature", type=float, default=0.8, metavar="X",
        help="divides the logits; 0: the most probable token (default %(default)s)")
    add("--top-k", type=int, default=0, metavar="N", help="the N most probable; 0: all (default 0)")
    add("--top-p", type=float, default=1.0, metavar="X", help="the smallest set of tokens whose "
        "probability reaches X (default %(default)s)")
    add("--seed", type=int, default=0, metavar="N", help="random seed (default %(default)s)")
    add = parser.add_argument_group("device and precision").add_argument
    add("--device", default="auto", choices=["auto", "cpu", "cuda", "mps"],
        help="auto: cuda or mps where available (default %(default)s)")
    add("--dtype", default="fp32", choices=DTYPES, help="type of weights and activations; "
        "bf16 is faster where the device multiplies 16-bit numbers (default %(default)s)")
    parser.add_argument("words", nargs="*", help=argparse.SUPPRESS)     # none is expected
    return parser


def parse_flags(parser: Parser) -> argparse.Namespace:
    """The values of the flags. A mistake ends the program with status 2."""
    args = parser.parse_args()
    if args.words:
        text = " ".join(args.words)
        is_file = text.endswith(".pt") or Path(text).exists()
        parser.error(f"unknown argument {text}: give --ckpt FILE" if is_file else
                     f"unknown argument {text!r}: give --prompt TEXT")
    if args.chat and sys.stdin is None:
        parser.error("--chat reads standard input, which is closed")
    if args.chat and (args.prompt or args.stop or args.num_samples is not None):
        parser.error("--chat reads standard input and ends where the model does: drop --prompt, "
                     "--stop and --num-samples")
    if args.num_samples is not None and args.num_samples < 1:
        parser.error("--num-samples must be at least 1")
    if args.max_tokens < 0 or args.top_k < 0:
        parser.error("--max-tokens and --top-k must be at least 0")
    if not 0 <= args.seed < 2 ** 63:
        parser.error("--seed must be 0 to 2^63 - 1")
    if args.temperature != 0 and not LOWEST <= args.temperature < float("inf"):
        parser.error(f"--temperature must be 0 (greedy) or at least {LOWEST:g}, and finite")
    if not LOWEST <= args.top_p <= 1:
        parser.error(f"--top-p must be at least {LOWEST:g} and at most 1 (or give --top-k 1)")
    if sys.stdout is None:
        parser.error("standard output, where the text goes, is closed: give a file or a pipe")
    sys.stdout.reconfigure(errors="replace")        # for a terminal that lacks a character
    return args


def read_lines():
    """The lines of standard input for --chat, with a mark before each on a terminal."""
    sys.stdin.reconfigure(errors="replace")         # A wrong byte does not end the conversation.
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)    # only text on standard output
        line = sys.stdin.readline()
        if line == "":
            return
        yield line.removesuffix("\n").removesuffix("\r")


def read_prompts(args) -> list[str]:
    """The prompts. Raises ValueError for text that is not UTF-8."""
    text = args.prompt
    try:
        if args.prompt == "-":
            if sys.stdin is None:
                raise ValueError("--prompt - reads standard input, which is closed")
            text = sys.stdin.read()
        (args.stop + text).encode()
    except UnicodeError as error:
        raise ValueError(f"the text of --prompt or --stop is not UTF-8 ({error.reason}): convert "
                         f"it, as by iconv -f WINDOWS-1252 -t UTF-8") from None
    if args.prompt == "-" and args.num_samples is not None:
        return text.removesuffix("\n").split("\n")
    return [text]
