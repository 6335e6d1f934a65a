"""GPT-2's older pair of files, vocab.json and merges.txt, as a tokenizer.json. OPT has no other.

    vocab.json      {token: number}, the tokens in the characters that stand for bytes
    merges.txt      a pair of tokens that are merged on each line, the first ones first

The tokenizer.json also gets what the other files say: the special tokens, other added tokens, and
whether a token is put before or behind each text, as transformers' GPT2Tokenizer does.
"""
import json
from pathlib import Path

from corpus.formats import EOT
from corpus.tokenizer_config import FLAGS, added_by, content_of, read_object, special_tokens

PAIR = ("vocab.json", "merges.txt")
NAMED = ("bos_token", "eos_token", "unk_token", "pad_token")


def has_pair(folder: Path) -> bool:
    return all((folder / name).is_file() for name in PAIR)


def json_of_pair(folder: Path) -> str:
    """The content of a tokenizer.json for the pair in this folder. Raises ValueError."""
    ids = read_object(folder / PAIR[0])
    lines = (folder / PAIR[1]).read_text(encoding="utf-8").split("\n")
    merges = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
    config = read_object(folder / "tokenizer_config.json")
    named = named_tokens(folder, ids)
    byte_level = dict(type="ByteLevel", add_prefix_space=bool(config.get("add_prefix_space")),
                      trim_offsets=True, use_regex=True)
    model = dict(type="BPE", dropout=None, unk_token=None, continuing_subword_prefix="",
                 end_of_word_suffix="", fuse_unk=False, byte_fallback=False, ignore_merges=False,
                 vocab=ids, merges=merges)
    return json.dumps(dict(
        version="1.0", truncation=None, padding=None, normalizer=None, pre_tokenizer=byte_level,
        post_processor=template_of(config, named, ids), decoder=byte_level, model=model,
        added_tokens=added_tokens(folder, config, named, ids)), ensure_ascii=False)


def named_tokens(folder: Path, ids: dict) -> dict:
    """{bos_token: a text, or an object with its content and FLAGS, ...}, where the vocabulary has
    it. Where the tokenizer's files do not name one, config.json's number tells it: the first that
    the vocabulary has, if they are several. The last resort is <|endoftext|>."""
    given = special_tokens(folder)
    numbers = read_object(folder / "config.json")
    texts = {number: token for token, number in ids.items()}
    named = {}
    for name in NAMED:
        number = numbers.get(f"{name}_id")
        several = number if isinstance(number, list) else [number]
        numbered = [texts[number] for number in several if number in texts]
        token = given[name] if name in given else [*numbered, EOT][0]
        if content_of(token) in ids:
            named[name] = token
    return named


def added_tokens(folder: Path, config: dict, named: dict, ids: dict) -> list[dict]:
    """The added tokens of a tokenizer.json, by their numbers."""
    specials = {content_of(token): token for token in named.values()}
    numbered = {ids[text]: flags_of(token, text, special=True) for text, token in specials.items()}
    if "added_tokens_decoder" in config:
        numbered |= {int(number): flags_of(token, content_of(token), bool(token.get("special")))
                     for number, token in added_by(config).items()}
    else:                               # an older form of it
        numbered |= {number: flags_of(text, text, special=text in specials)
                     for text, number in read_object(folder / "added_tokens.json").items()}
    return [dict(id=number, **numbered[number]) for number in sorted(numbered)]


def flags_of(token, text: str, special: bool) -> dict:
    """An added token that is a text, or an object with some of the FLAGS."""
    flags = dict.fromkeys(FLAGS, False) | dict(normalized=not special)
    if isinstance(token, dict):
        flags |= {key: bool(token[key]) for key in FLAGS if key in token}
    return dict(content=text, special=special, **flags)


def template_of(config: dict, named: dict, ids: dict) -> dict | None:
    """The post_processor: tokens before and behind each text."""
    before, behind = [[content_of(named[name])] if config.get(f"add_{name}") and name in named
                      else [] for name in ("bos_token", "eos_token")]
    if not before + behind:
        return None

    def around(sequence: str) -> list[dict]:
        text = dict(Sequence=dict(id=sequence, type_id=0))
        return [dict(SpecialToken=dict(id=token, type_id=0)) for token in before] + [text] + [
            dict(SpecialToken=dict(id=token, type_id=0)) for token in behind]
    tokens = {token: dict(id=token, ids=[ids[token]], tokens=[token]) for token in before + behind}
    return dict(type="TemplateProcessing", single=around("A"), pair=around("A") + around("B"),
                special_tokens=tokens)
