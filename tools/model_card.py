"""The model card of an export (Mitchell et al. 2019): README.md, by huggingface_hub. It has what
the checkpoint and the metrics.jsonl beside it say; a fact that neither has is left out.

The facts stand in a block of JSON, where no name of a user's data is read as Markdown. Paths are as
the command had them, also those of this machine.
"""
import dataclasses
import json
import shlex
from pathlib import Path

from base.commandline import words_of
from base.flops import active_parameters, flops_per_token, parameter_count
from base.options import OF_TRAINING, Config, flags_of_writer
from model import GPTConfig
from runtime.evaluation import perplexity
from tools.metrics import finite, read_metrics

CARD = """
# A language model of {size}

A program has written this card. It states no licence, no language and no intended use, because none
is recorded: add them before you publish the model.

## Model

{model}

## Training

{training}

## How to use

In this folder. From elsewhere, give its path or its name on the hub for `.`:

```python
{code}
```

## Limits

Bias, toxicity, safety, truthfulness, memorisation of its data and downstream tasks were not
evaluated, as far as is recorded. What the data contain and who may use them is not recorded.
"""
OPEN = """from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

model = AutoModelForCausalLM.from_pretrained(".")
"""
CONTINUE = """tokenizer = PreTrainedTokenizerFast.from_pretrained(".")
inputs = tokenizer("The", return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens={count}, do_sample=False)[0]
print(tokenizer.decode(tokens, skip_special_tokens=True))"""
ANSWER = """tokenizer = PreTrainedTokenizerFast.from_pretrained(".")
messages = [dict(role="user", content="Hello")]
inputs = tokenizer.apply_chat_template(
    messages, add_generation_prompt=True, return_dict=True, return_tensors="pt")
tokens = model.generate(**inputs, max_new_tokens={count}, do_sample=False)[0]
print(tokenizer.decode(tokens[inputs["input_ids"].shape[1]:], skip_special_tokens=True))"""


def json_block(facts: dict) -> str:
    """The facts that are not None."""
    known = {name: fact for name, fact in facts.items() if fact is not None}
    return f"```json\n{json.dumps(known, indent=1, default=str)}\n```"


def model_card(file: Path, state: dict, cfg: GPTConfig, model_type: str, has_tokenizer: bool):
    """The ModelCard for the export of the checkpoint `file`, whose state is given."""
    from huggingface_hub import ModelCard, ModelCardData
    is_chat = "template" in state
    tags = ["plainscale", model_type]
    if is_chat:
        tags.append("conversational")
    head = ModelCardData(library_name="transformers", pipeline_tag="text-generation", tags=tags)
    size = f"{parameter_count(cfg):,} parameters"
    if hasattr(cfg, "n_expert"):
        size += (f", of which a token uses {active_parameters(cfg):,} ({cfg.n_active} of "
                 f"{cfg.n_expert} experts in each layer)")
    model = {"model_type": model_type, "type of the weights": "fp32",
             "tokenizer": state["tokenizer"]} | dataclasses.asdict(cfg)
    training = "Not recorded: the checkpoint holds weights alone."
    if state["config"]:
        training = json_block(facts_of_run(file, state, cfg))
    code = OPEN
    if has_tokenizer:
        code += (ANSWER if is_chat else CONTINUE).format(count=min(50, cfg.seq_len // 2))
    return ModelCard(f"---\n{head.to_yaml()}\n---\n" + CARD.format(
        size=size, model=json_block(model), training=training, code=code))


def facts_of_run(file: Path, state: dict, cfg: GPTConfig) -> dict:
    flags = flags_of_writer(state)
    given = {name: flags[name] for name in (*OF_TRAINING, "data", "init_from")
             if flags[name] != getattr(Config, name)}
    kind, origin, step = state["run"]["origin"]
    facts = {
        "step": state["step"], "updates": state["optimizer_steps"], "tokens": state["tokens"],
        "FLOPs, about": f"{flops_per_token(cfg) * state['tokens']:.2e}", "data": flags["data"],
        "loss": "in conversations of the answers alone" if "template" in state else None,
        "rollbacks": state["monitor"].get("rollbacks"), "run": state["run"]["id"],
        "began": kind if origin is None else f"{kind}: step {step} of the run {origin}",
        "command": shlex.join(["python", "train.py", *words_of(given)])}
    # What metrics.jsonl says of this step, if the file is beside the checkpoint and of its run.
    run = read_metrics(file.parent)
    now = [row for row in run.rows if row["step"] == state["step"]]
    if not now or now[0]["tokens"] != state["tokens"]:
        return facts
    facts |= {"training loss": finite(now[0], "loss")}
    evaluated = [row for _, row in run.evaluations() if row["step"] <= state["step"]]
    if evaluated:
        row = evaluated[-1]
        facts |= {"validation loss": row["val_loss"], "of step": row["step"],
                  "perplexity": perplexity(row["val_loss"]),
                  "bits a byte": finite(row, "bits_per_byte")}
    return facts
