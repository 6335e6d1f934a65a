"""The model card of an export: README.md with what is known of a model, and what is not.

    checkpoint              model, data, flags, tokens, where the run began
    metrics.jsonl           beside it: losses, settings that a resume has changed, versions
    the directory --data    if it is still there: how often each source was read
                                                                         --> README.md

(Mitchell et al. 2019, "Model Cards for Model Reporting".) It begins with the fields that the hub
of Hugging Face reads. A fact that none of the three has is "not recorded". Layout and machines are
left out, because no result depends on them. Paths stand there as the commands had them, also those
of this machine. tools/huggingface.py writes the card.
"""
import dataclasses
import re
import shlex
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from amp import PRECISIONS
from base.commandline import words_of
from base.flops import active_parameters, flops_per_token, parameter_count
from base.options import OF_TRAINING, Config, flags_of_writer
from corpus.mixtures import open_mixture, parse_mixture
from model import GPTConfig
from runtime.console import describe
from runtime.evaluation import perplexity
from tools.metrics import finite, last_valid_step, parse_line

FLAGS_OF_A_COMMAND = {*OF_TRAINING, "data", "init_from", "resume"}
NEW_TOKENS = 50                 # that the card's example draws, at most half of the positions


class Exported(NamedTuple):
    """What an export knows of its model."""
    cfg: GPTConfig
    model_type: str             # in config.json
    architecture: str           # the class in transformers
    tokenizer_class: str | None         # the class that opens its tokenizer; None: it has none


# ---------------------------------------------------------------------------------------------
# What is known beside the checkpoint
# ---------------------------------------------------------------------------------------------


class Record(NamedTuple):
    """What metrics.jsonl says of a checkpoint."""
    row: dict                   # of its step
    evaluated: dict | None      # the last row until then that has a validation loss
    data: dict | None           # what that evaluation has read (evaluation.describe_data)
    starts: list[dict]          # the events of the starts and resumes until then


def read_record(file: Path, state: dict) -> Record | None:
    """The record of the checkpoint `file` in the metrics.jsonl beside it; None if it has none. Of
    several rows of this checkpoint the last one counts."""
    found, starts, evaluations = None, [], []
    with suppress(OSError), open(file.parent / "metrics.jsonl", "rb") as lines:
        for line in map(parse_line, lines):
            if line is None:                        # damaged
                continue
            while evaluations and evaluations[-1][0]["step"] > last_valid_step(line):
                evaluations.pop()
            if line.get("event") == "start":
                starts = [line]
            elif line.get("event") == "resume":     # to an earlier step: later resumes are void
                starts = [start for start in starts
                          if start["event"] == "start" or start["step"] < line["step"]] + [line]
            elif "event" not in line and starts:
                if finite(line, "val_loss") is not None:
                    evaluations.append((line, starts[-1].get("data")))
                if is_row_of(line, starts[-1], state):
                    found = Record(line, *(evaluations or [(None, None)])[-1], starts)
    return found


def is_row_of(row: dict, start: dict, state: dict) -> bool:
    """Whether a row of metrics.jsonl is of the step of a checkpoint, and of its run: `start`, the
    event before the row, has all flags of the checkpoint, and the row its last loss. (A plain run
    keeps no losses, and never goes back.)"""
    has_its_loss = state["config"].get("plain", False) or row.get("loss") == last_loss(state)
    return (row["step"] == state["step"] and row.get("tokens") == state["tokens"]
            and start.get("config") == state["config"] and has_its_loss)


def last_loss(state: dict) -> float | None:
    """The loss of a checkpoint's step, if it keeps it. Those of bad steps are not kept."""
    monitor = state["monitor"]
    losses = monitor.get("losses", [])
    return losses[-1] if losses and monitor["bad"] == 0 else None


def find_epochs(state: dict) -> dict[str, float]:
    """{fingerprint: how often the run has read that source}; {} if the data are elsewhere now."""
    try:
        mixture = open_mixture(state["config"]["data"], "train", state["model"]["seq_len"])
    except (OSError, ValueError):
        return {}
    if not mixture.sources.keys() >= {key for _, weights in state["data"] for key in weights}:
        return {}                       # other data of that name
    mixture.phases = state["data"]
    epochs = mixture.epochs(state["consumed_samples"])
    return {key: epochs[source.name] for key, source in mixture.sources.items()}


def find_names(state: dict, record: Record | None) -> dict[str, str]:
    """{fingerprint: name} of the sources, as far as they are known."""
    text = state["config"]["data"]
    try:
        folders = list(parse_mixture(text))
    except ValueError:                  # one directory, whose name has a comma or =
        folders = [Path(text)]
    _, weights = state["data"][-1]
    names = {}
    if len(folders) == len(weights):
        names = {key: folder.absolute().name for key, folder in zip(weights, folders)}
    if record is None:
        return names
    for start in record.starts:
        if start.get("data"):
            for name, source in start["data"]["sources"].items():
                names[source["fingerprint"]] = name
    return names


# ---------------------------------------------------------------------------------------------
# Markdown
# ---------------------------------------------------------------------------------------------


def longest_backticks(text: str) -> int:
    return max(map(len, re.findall("`+", text)), default=0)


def code(text) -> str:
    """A name as code within a line, whatever it holds: no sign in it is Markdown's."""
    shown = "".join(character if character.isprintable()
                    else character.encode("unicode_escape").decode() for character in str(text))
    fence = "`" * (longest_backticks(shown) + 1)
    pad = " " if "`" in shown or shown != shown.strip() else ""
    return fence + pad + shown + pad + fence


def code_block(language: str, text: str) -> str:
    fence = "`" * max(3, longest_backticks(text) + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def items(facts: dict) -> str:
    """A list of the facts that are not None."""
    return "\n".join(f"- {name}: {fact}" for name, fact in facts.items() if fact is not None)


# ---------------------------------------------------------------------------------------------
# The sections
# ---------------------------------------------------------------------------------------------


def model_card(file: Path, folder: Path, state: dict, exported: Exported) -> str:
    """The text of README.md for the export of the checkpoint `file`, whose state is given, to
    `folder`."""
    record = read_record(file, state) if state["config"] else None
    tags = ["plainscale", exported.model_type]
    if "template" in state:
        tags.append("conversational")
    head = ["---", "library_name: transformers", "pipeline_tag: text-generation", "tags:",
            *(f"- {tag}" for tag in tags), "---"]
    sections = {
        "Model": describe_model(exported),
        "Training data": describe_data(state, record),
        "Procedure": describe_procedure(state, record, exported.cfg),
        "Results": describe_results(state, record),
        "Tokenizer": describe_tokenizer(state, exported),
        "How to use": describe_use(state, exported),
        "Limits": describe_limits(state, exported.cfg),
        "Provenance": describe_provenance(file, folder, state, record)}
    return "\n\n".join([
        "\n".join(head), f"# A language model of {parameter_count(exported.cfg):,} parameters",
        "A program has written this card, from what the checkpoint and the files beside it say. "
        "It states no licence, no language and no intended use, because none is recorded: add "
        "them before you publish the model.",
        *(f"## {name}\n\n{text}" for name, text in sections.items())]) + "\n"


def describe_model(exported: Exported) -> str:
    cfg = exported.cfg
    size = f"{parameter_count(cfg):,}"
    hidden = f"{cfg.hidden:,}"
    experts = None
    if hasattr(cfg, "n_expert"):
        size += f", of which a token uses {active_parameters(cfg):,}"
        hidden += " in each expert"
        experts = f"{cfg.n_expert} in each layer, of which a token uses {cfg.n_active}"
        if cfg.shared_hidden > 0:
            experts += f"; one more, of {cfg.shared_hidden:,} hidden channels, computes every token"
    gated = ", gated" if cfg.gated else ""
    window = getattr(cfg, "window", 0)
    attention = f"{cfg.n_head} heads of {cfg.head_dim} channels, {cfg.n_kv_head} of keys and values"
    if 0 < window < cfg.seq_len:
        attention += f", a sliding window of {window:,} positions"
    return items({
        "Architecture": f"{code(exported.architecture)} of `transformers`",
        "Parameters": size,
        "Layers": cfg.n_layer,
        "Width": f"{cfg.n_embd:,} channels",
        "Attention": attention,
        "MLP": f"{hidden} hidden channels, {cfg.activation}{gated}",
        "Experts": experts,
        "Positions": f"{cfg.seq_len:,}, {'learned' if has_learned_positions(cfg) else 'rotary'}",
        "Vocabulary": f"{cfg.vocab_size:,} tokens",
        "Embedding and head": "one matrix" if cfg.tied else "two matrices",
        "Type of the weights": "fp32"})


def has_learned_positions(cfg: GPTConfig) -> bool:
    """As a GPT has. Most models of models/ have rotary positions."""
    return getattr(cfg, "learned_positions", True)


def describe_data(state: dict, record: Record | None) -> str:
    if not state["config"]:
        return "Not recorded: the checkpoint holds weights alone."
    names, epochs = find_names(state, record), find_epochs(state)
    lines = []
    for key in dict.fromkeys(key for _, weights in state["data"] for key in weights):
        shares = []
        for first, weights in state["data"]:        # another phase may have other weights
            share = f"{weights.get(key, 0) / sum(weights.values()):.4g}"
            shares.append(f"from sequence {first:,} on {share}" if first > 0 else share)
        name = code(names[key]) if key in names else "a source whose name is not recorded"
        read = f"; read {epochs[key]:.3g} times" if key in epochs else ""
        lines.append(f"- {name}: its share of the sequences is {', '.join(shares)}{read}; "
                     f"fingerprint {code(key)}")
    lines += ["", f"The model has read {state['tokens']:,} tokens, in sequences of "
                  f"{state['model']['seq_len']:,}."]
    if not epochs:
        lines.append("How many epochs these are is not recorded.")
    if "template" in state:
        lines.append("In conversations the loss counts the answers alone.")
    if state["run"]["origin"][0] == "init-from":
        lines.append("What the initial weights had read is not counted here.")
    return "\n".join(lines)


def describe_procedure(state: dict, record: Record | None, cfg: GPTConfig) -> str:
    if not state["config"]:
        return "Not recorded: the checkpoint holds weights alone."
    config = SimpleNamespace(**flags_of_writer(state))
    schedule = (f"{config.lr_schedule}, to {config.min_lr_ratio:g} of the peak at step "
                f"{config.steps:,}")
    if config.lr_schedule == "wsd":
        schedule += f", over the last {config.decay_ratio:g} of the steps"
    batch = f"{config.batch_size:,} sequences"
    if config.batch_ramp is not None:
        batch += f", after a ramp {code(config.batch_ramp)}"
    _, master = PRECISIONS[config.dtype]
    rollbacks = None
    if state["monitor"].get("rollbacks", 0) > 0:
        rollbacks = (f"{state['monitor']['rollbacks']}, after divergences; the learning rate is "
                     f"multiplied by {state['monitor']['lr_factor']:.3g}")
    return items({
        "Steps": f"{state['step']:,} of {config.steps:,}",
        "Updates": f"{state['optimizer_steps']:,}",
        "Batch": batch,
        "Optimizer": f"AdamW, beta1 {config.beta1:g}, beta2 {config.beta2:g}, weight decay "
                     f"{config.weight_decay:g} on matrices",
        "Learning rate": f"{config.lr:g} at its peak, after {config.warmup_steps:,} steps of "
                         f"warm-up",
        "Schedule": schedule,
        "Clipping": f"gradient norm {config.clip:g}" if config.clip else "none",
        "Dropout": f"{config.dropout:g}",
        "Seed": config.seed,
        "Precision": f"{config.dtype}; the optimizer's state is {str(master)[len('torch.'):]}",
        "Arithmetic": f"about {flops_per_token(cfg) * state['tokens']:.2e} FLOPs (Chowdhery et "
                      f"al. 2022, appendix B)",
        "Rollbacks": rollbacks,
        "Settings that a resume has changed": describe_changes(record)})


def describe_changes(record: Record | None) -> str | None:
    if record is None:
        return "not recorded"
    changes = [f"after step {start['step']:,}, {'; '.join(describe(start['changed']))}"
               for start in record.starts if start.get("changed")]
    return "; ".join(map(code, changes)) or None


def describe_results(state: dict, record: Record | None) -> str:
    if not state["config"]:
        return "Not recorded."
    loss = last_loss(state) if record is None else finite(record.row, "loss")
    last = f"{loss:.4f} nats a token, before its update" if loss is not None else "not recorded"
    facts = {f"Training loss of step {state['step']:,}": last}
    if record is None or record.evaluated is None:
        return items(facts | {"Validation loss": "not recorded"})
    row, data = record.evaluated, record.data
    facts[f"Validation loss after step {row['step']:,}"] = in_units(row, "")
    if data is not None:
        for name, source in data["sources"].items():
            read = (f"{source['sequences']:,} of {source['all_sequences']:,} windows of data, each "
                    f"of {data['seq_len']:,} tokens")
            if finite(row, f"val_loss/{name}") is not None:
                read = f"{in_units(row, '/' + name)}; {read}"
            facts[f"Validation text of {code(name)}"] = read
    if finite(row, "val_answers_right") is not None:
        facts["Answers that greedy decoding gives"] = (
            f"{row['val_answers_right']:.1%} of {row['val_answers']:,}")
    return items(facts)


def in_units(row: dict, suffix: str) -> str:
    """A validation loss in three units; bits per byte where the text's bytes are known."""
    loss = row[f"val_loss{suffix}"]
    bits = finite(row, f"bits_per_byte{suffix}")
    text = f"{loss:.4f} nats a token, perplexity {perplexity(loss):.4g}"
    return text if bits is None else f"{text}, {bits:.4f} bits a byte"


def describe_tokenizer(state: dict, exported: Exported) -> str:
    if exported.tokenizer_class is None:
        return (f"{code(state['tokenizer'])}, which is not part of this folder: its tokens must "
                f"come from elsewhere.")
    text = f"{code(state['tokenizer'])}, in `tokenizer.json`."
    if "template" in state:
        text += (f" Conversations are written by the template {code(state['template'])}, in "
                 f"`tokenizer_config.json`.")
    return text


def describe_use(state: dict, exported: Exported) -> str:
    opener = exported.tokenizer_class
    lines = [f"from transformers import AutoModelForCausalLM{', ' + opener if opener else ''}", "",
             'model = AutoModelForCausalLM.from_pretrained(".")']
    if opener is None:
        lines = ["import torch", *lines,
                 "print(model(torch.tensor([[0, 1, 2]])).logits)       # of three tokens"]
    else:
        count = min(NEW_TOKENS, exported.cfg.seq_len // 2)
        lines.append(f'tokenizer = {opener}.from_pretrained(".")')
        if "template" in state:
            lines += ['messages = [{"role": "user", "content": "Hello"}]',
                      "inputs = tokenizer.apply_chat_template(",
                      '    messages, add_generation_prompt=True, return_dict=True, '
                      'return_tensors="pt")']
        else:
            lines.append('inputs = tokenizer("The", return_tensors="pt")')
        first = '[inputs["input_ids"].shape[1]:]' if "template" in state else ""
        lines += [f"tokens = model.generate(**inputs, max_new_tokens={count}, do_sample=False)[0]",
                  f"print(tokenizer.decode(tokens{first}, skip_special_tokens=True))"]
    return ("In this folder. From elsewhere, give its path or its name on the hub for `.`:\n\n"
            + code_block("python", "\n".join(lines)))


def describe_limits(state: dict, cfg: GPTConfig) -> str:
    lines = ["- Bias, toxicity, safety, truthfulness, memorisation of its data and downstream "
             "tasks were not evaluated, as far as is recorded."]
    if state["config"]:
        lines.append("- The losses above are all that was measured.")
    lines.append("- What the data contain, who may use them, and in which languages they are, is "
                 "not recorded.")
    if "template" not in state:
        lines.append("- The model continues text: no template of conversations is recorded.")
    if has_learned_positions(cfg):
        lines.append(f"- It has positions for {cfg.seq_len:,} tokens, and reads no longer text.")
    elif state["config"]:
        lines.append(f"- It was trained on windows of data, each of {cfg.seq_len:,} tokens. On "
                     f"longer ones it was not evaluated.")
    return "\n".join(lines)


def describe_provenance(file: Path, folder: Path, state: dict, record: Record | None) -> str:
    facts = {"Run": code(state["run"].get("id")), "Step": f"{state['step']:,}",
             "Began": describe_origin(state, record)}
    commands = [f"python -m tools.huggingface export {shlex.join([str(file), str(folder)])}"]
    text = "The command of this export:"
    if state["config"]:
        versions = record.starts[-1].get("environment", {}) if record is not None else {}
        known = [f"{name} {code(versions[name])}" for name in ("pytorch", "python", "commit")
                 if versions.get(name) is not None]
        facts["Versions"] = ", ".join(known) or "not recorded"
        commands.insert(0, train_command(state))
        text = ("The flags of the checkpoint as one command, without those of the layout, and the "
                "command of this export. The command that has made the data is not recorded.")
    shown = code_block("", "\n".join(commands))
    return f"{items(facts)}\n\n{text}\n\n{shown}"


def describe_origin(state: dict, record: Record | None) -> str:
    kind, run, step = state["run"]["origin"]
    if not state["config"]:
        return "not recorded" if kind == "seed" else "with weights that were imported"
    if kind == "seed":
        return f"with weights drawn from seed {state['config']['seed']}"
    first = record.starts[0] if record is not None else state
    name = first["config"].get(kind.replace("-", "_"))
    source = "a file" if name in (None, "auto", "never") else code(name)
    what = "as a branch of" if kind == "resume" else "with the weights of"
    return f"{what} {source}, step {step:,} of the run {code(run)}"


def train_command(state: dict) -> str:
    """A command with the flags of a checkpoint that differ from the defaults."""
    flags = flags_of_writer(state)
    given = {f.name: flags[f.name] for f in dataclasses.fields(Config)
             if f.name in FLAGS_OF_A_COMMAND and flags[f.name] != f.default}
    if given.get("resume") == "never":
        del given["resume"]
    return shlex.join(["python", "train.py", *words_of(given)])
