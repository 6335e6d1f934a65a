"""The tokenizers: text to tokens and back, and where a text may be cut before it is encoded."""
import re

from corpus.downloads import last_cause, read_url
from corpus.formats import EOT


def get_tokenizer(name: str):
    """A tiktoken.Encoding. "gpt2": GPT-2's BPE, 50257 tokens. "bytes": token i is byte i, and 256
    is <|endoftext|>. Raises ValueError for another name, ConnectionError without a vocabulary."""
    import tiktoken.load        # imported here, like requests: train.py runs without them
    if name == "bytes":         # the pattern bounds the characters processed at once; no merges
        return tiktoken.Encoding("bytes", pat_str=r"[\s\S]{1,256}", special_tokens={EOT: 256},
                                 mergeable_ranks={bytes([i]): i for i in range(256)})
    if name != "gpt2":
        raise ValueError(f"there is no tokenizer {name!r} here, only gpt2 and bytes: `python -m "
                         f"tools.huggingface export FILE.pt DIR` takes its model to where it is")
    tiktoken.load.read_file = read_url      # tiktoken's own may wait for ever
    try:
        return tiktoken.get_encoding("gpt2")        # downloads its vocabulary once
    except (OSError, ValueError) as error:      # ValueError: the file has the wrong hash
        raise ConnectionError(f"GPT-2's vocabulary could not be loaded ({last_cause(error)}): add "
                              f"--tokenizer bytes to data.py's flags, which needs none, or run it "
                              f"again later, or set TIKTOKEN_CACHE_DIR to a folder that has it"
                              ) from None


# A text cut here and encoded in parts gives the tokens of the whole: before a space or newline that
# follows another character. GPT-2's pattern splits text into words, which have white space at most
# as their first character, and runs of white space. So a word ends here in any case, and no
# look-ahead crosses this place. The pattern is greedy: match() finds the last such place.
CUT = re.compile(r"(?s:.*)\S(?=[ \n])")
