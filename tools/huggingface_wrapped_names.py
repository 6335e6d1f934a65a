"""Which tensor of a file is which of the model: names as other programs have left them.

    _orig_mod.model.layers.0._checkpoint_wrapped_module.mlp.up_proj.weight  in the file
    layers.0.mlp.up_proj.weight                                             in the family's table

Modules that wrap others put their names between. What stands before the blocks, such as `model.` or
`gpt_neox.`, is whatever stands before the embedding. tools/huggingface.py calls `find_names`.
"""
from collections.abc import Iterable

from tools.huggingface_families import Family

# torch.compile, DistributedDataParallel and DeepSpeed, FSDP 1, its checkpointing, Lightning
WRAPPERS = ("_orig_mod", "module", "_fsdp_wrapped_module", "_checkpoint_wrapped_module",
            "_forward_module")
HEADS = ("lm_head", "embed_out")            # transformers 5 calls NeoX's lm_head, too


def find_names(names: Iterable[str], family: Family, is_tied: bool) -> dict[str, str]:
    """{the family's name without its prefix: the file's name}, for all `names` of the files; what
    is no part of the model keeps its own name, without wrappers. Raises ValueError if two names
    mean the same tensor."""
    bare = {}
    for name in names:
        add(bare, ".".join(part for part in name.split(".") if part not in WRAPPERS), name)
    embedding = family.ends["embed.token"] + ".weight"
    if is_tied:
        name_embedding(bare, embedding, family.blocks)
    prefixes = sorted(name.removesuffix(embedding) for name in bare
                      if f".{name}".endswith(f".{embedding}"))
    if len(prefixes) > 1:
        raise ValueError(f"it holds several models, {prefixes[0]}{embedding} and {prefixes[1]}"
                         f"{embedding}: save one of them alone")
    prefix = "".join(prefixes)
    head = family.ends.get("head", "lm_head")
    found = {}
    for name, original in bare.items():
        module, _, kind = name.rpartition(".")                  # kind: weight or bias
        before = [module.removesuffix(one) for one in HEADS if f".{module}".endswith(f".{one}")]
        if before and prefix.startswith(before[0]):     # it stands beside the body, or in it
            add(found, f"{head}.{kind}", original)
        else:
            add(found, name.removeprefix(prefix), original)
    return found


def name_embedding(bare: dict[str, str], embedding: str, blocks: str) -> None:
    """Call the head of a tied model its embedding, if a file has the matrix as the head alone."""
    has_embedding = any(f".{name}".endswith(f".{embedding}") for name in bare)
    heads = [name for name in bare
             if f".{name}".endswith(tuple(f".{head}.weight" for head in HEADS))]
    bodies = [name[:f".{name}".index(f".{blocks}.0.")] for name in bare
              if f".{blocks}.0." in f".{name}"]
    if not has_embedding and len(heads) == 1 and bodies:
        bare[bodies[0] + embedding] = bare.pop(heads[0])


def add(names: dict[str, str], name: str, original: str) -> None:
    """Raises ValueError if it is there."""
    if name in names:
        raise ValueError(f"{names[name]} and {original} are both {name}: save the model once")
    names[name] = original
