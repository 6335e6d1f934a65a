"""sample.py --chat: the conversation with a user. samples.py says what sample.py uses of it."""
import sys

import torch

from base.errors import warn
from corpus.chat_records import ASSISTANT, Message
from corpus.templates import get_template
from runtime.samples import check_rows, show


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


class Chat:
    """The conversation of --chat. The model answers each line with all of the conversation before
    it in the window. Where that is too long, the oldest question and answer are forgotten."""

    def __init__(self, args, state: dict, tokenizer, model_config):
        """Raises ValueError if the checkpoint `state` is not that of a model of conversations."""
        if "template" not in state:
            raise ValueError(f"{args.ckpt} was not trained on conversations: drop --chat, or train "
                             f"it on some (docs/conversations.md)")
        self.args, self.tokenizer, self.model_config = args, tokenizer, model_config
        self.template = get_template(state["template"], tokenizer, state.get("template_file"))
        self.ends = {self.template.end}
        self.messages = []
        self.stream = None              # of the answer that is drawn now: its tokens become text

    def prompts(self):
        generators = [torch.Generator().manual_seed(self.args.seed)]
        for line in read_lines():
            if not line:
                self.messages = []
                continue
            self.messages.append(Message("user", line))
            try:
                tokens = self.prompt_tokens()
            except ValueError as error:
                warn(f"{error}: it is left out, and a new conversation begins", "sample.py")
                self.messages = []
                continue
            self.stream = self.tokenizer.stream(tokens)
            room = self.model_config.seq_len - len(tokens)
            yield tokens, min(self.args.max_tokens, room), generators

    def prompt_tokens(self) -> list[int]:
        """The tokens of the conversation up to the next answer. Raises ValueError if the model
        cannot read them."""
        seq_len = self.model_config.seq_len
        tokens = self.template.prompt_of(self.messages)
        while len(tokens) >= seq_len and len(self.messages) > 1:
            self.messages = self.messages[2:]
            tokens = self.template.prompt_of(self.messages)
        if len(tokens) >= seq_len:
            raise ValueError(f"this has {len(tokens)} tokens, the model sees {seq_len}")
        check_rows(self.tokenizer, tokens, self.model_config.vocab_size)
        return tokens

    def write(self, drawn) -> None:
        answer = ""
        shown = 0                       # characters on standard output
        for tokens in drawn:
            answer += self.stream.add(tokens[0])
            shown = show(answer, shown)
        answer += self.stream.end()
        show(answer, shown)
        print(flush=True)
        self.messages.append(Message(ASSISTANT, answer))
