"""What the other files of a model's folder say of its tokenizer.json.

    tokenizer_config.json, special_tokens_map.json      the token that ends a text, eos_token
    config.json                                         its number, eos_token_id
    added_tokens.json                                   added tokens, in older folders
    tokenizer_config.json                               added tokens, add_bos_token, add_eos_token

Shards and checkpoints keep the tokenizer's file alone. So the token that ends a text is marked in
it. The package `tokenizers` ignores the mark.
"""
import json
from pathlib import Path

from corpus.json_tokenizers import END_OF_TEXT, MARKED, MARKS

FLAGS = ("single_word", "lstrip", "rstrip", "normalized")   # they decide where a token is found
SAVE_AGAIN = ("save both again by transformers' AutoTokenizer.from_pretrained(DIR)"
              ".save_pretrained(NEW)")


def read_object(path: Path) -> dict:
    """The object in a file of JSON, or an empty one without the file. Raises ValueError."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is refused: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} is refused: it is no object, but {type(content).__name__}")
    return content


def content_of(token) -> str | None:
    """Of a token that is a text, or an object with its content."""
    return token.get("content") if isinstance(token, dict) else token


def special_tokens(folder: Path) -> dict:
    """The names that a model's folder gives to special tokens, as transformers decides it."""
    tokens = read_object(folder / "tokenizer_config.json")
    if "added_tokens_decoder" not in tokens:
        tokens |= read_object(folder / "special_tokens_map.json")
    for key in ("extra_special_tokens", "model_specific_special_tokens"):
        more = tokens.get(key)
        if isinstance(more, dict):
            tokens |= more
    return tokens


def with_end_of_text(file: str, folder: Path) -> str:
    """The content of this folder's tokenizer.json, in which the token that ends a text is marked if
    the other files name another than json_tokenizers.py would take. Raises ValueError if
    tokenizer_config.json has other added tokens."""
    try:
        content = json.loads(file)
        added = content.setdefault("added_tokens", [])
        ids = ids_of(content["model"]["vocab"]) | {token["content"]: token["id"]
                                                   for token in added}
    except (ValueError, KeyError, TypeError, AttributeError):
        return file                     # JsonTokenizer says what is wrong
    config = read_object(folder / "tokenizer_config.json")
    check_added(added, config)
    if "added_tokens_decoder" not in config:            # an older form of it
        for token in read_object(folder / "added_tokens.json"):
            if token not in ids:
                raise ValueError(f"added_tokens.json has the token {token!r}, which tokenizer.json "
                                 f"has not: {SAVE_AGAIN}")
    end = end_of(folder, config, added)
    listed = [token for token in END_OF_TEXT if token in ids]
    # The token that ends an answer ends a document only if no other token does.
    ends_answers = end in MARKS or has_template(folder, config)
    if (end not in ids or end in listed[:1] or (listed and ends_answers)
            or any(token.get(MARKED) for token in added)):
        return file
    for token in added:
        if token["content"] == end:
            token[MARKED] = True
            break
    else:
        added.append(dict(id=ids[end], content=end, **dict.fromkeys(FLAGS, False), special=True,
                          **{MARKED: True}))
    return json.dumps(content, ensure_ascii=False)


def ids_of(vocab) -> dict[str, int]:
    """{token: number}, of a tokenizer.json's vocabulary. Unigram's is a list of [token, score]."""
    if isinstance(vocab, list):
        return {token: number for number, (token, _) in enumerate(vocab)}
    return dict(vocab)


def end_of(folder: Path, config: dict, added: list[dict]) -> str | None:
    """The token that the files of a model's folder call the end, if they name one. config.json's
    may be a default of its class: it must be the number of a special token."""
    for one in (config, read_object(folder / "special_tokens_map.json")):
        end = content_of(one.get("eos_token"))
        if end is not None:
            return end
    number = read_object(folder / "config.json").get("eos_token_id")
    named = [token["content"] for token in added
             if token.get("special") and token["id"] == number]
    return named[0] if named else None


def has_template(folder: Path, config: dict) -> bool:
    """Whether a model writes conversations."""
    return bool(config.get("chat_template")) or (folder / "chat_template.jinja").exists()


def added_by(config: dict) -> dict[str, dict]:
    """{number: added token}, of tokenizer_config.json. Raises ValueError."""
    added = config.get("added_tokens_decoder") or {}
    if not isinstance(added, dict) or not all(
            isinstance(token, dict) and isinstance(content_of(token), str)
            for token in added.values()):
        raise ValueError("tokenizer_config.json has added_tokens_decoder in a form that is not "
                         "known: save it again by transformers")
    return added


def check_added(added: list[dict], config: dict) -> None:
    """Raise ValueError if transformers would find another added token in a text. Special tokens are
    not looked for."""
    own = {token["content"]: token for token in added}
    for token in added_by(config).values():
        held = own.get(token["content"])
        if token.get("special") or (held is not None and held.get("special")):
            continue
        if held is None or any(bool(held.get(key)) != bool(token.get(key)) for key in FLAGS):
            raise ValueError(f"tokenizer_config.json adds the token {token['content']!r}, which "
                             f"tokenizer.json has not, or has in another way: {SAVE_AGAIN}")


def notes(path: Path, encoding) -> list[str]:
    """What a user should know of a tokenizer's file, whose tokenizer is `encoding`."""
    if path.name != "tokenizer.json":
        return []
    config = read_object(path.parent / "tokenizer_config.json")
    ids = encoding.tokenizer.get_vocab()
    lines = []
    end = end_of(path.parent, config, encoding.content.get("added_tokens", []))
    if end is not None and end not in ids:
        lines.append(f"{path} has no token {end!r}, which the files beside it call the end: "
                     f"{encoding.end_of_text} separates documents")
    elif end is not None and len({end, encoding.end_of_text, *END_OF_TEXT} & ids.keys()) > 1:
        lines.append(f"{path}: {encoding.end_of_text} separates documents; the files beside it "
                     f"call {end} the end")
    for key, tokens, where in (("add_bos_token", encoding.prefix, "before"),
                               ("add_eos_token", encoding.suffix, "behind")):
        if key in config and bool(config[key]) != bool(tokens):
            does = "puts a token" if tokens else "puts nothing"
            lines.append(f"{path} {does} {where} a text, although tokenizer_config.json has {key} "
                         f"{json.dumps(config[key])}: the first decides, as in transformers 5")
    by_class = str(config.get("tokenizer_class")).startswith("LlamaTokenizer")
    if by_class and "Prepend" in json.dumps(encoding.content.get("normalizer")):
        lines.append(f"{path} puts a space before each text, also behind a token and before a "
                     f"space; transformers 5 does not, if it opens the folder by the class "
                     f"LlamaTokenizer: the file decides")
    return lines
