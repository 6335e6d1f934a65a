"""In place of train.py, for tests of the tools that start many runs: it needs no torch, and its
loss is LAW of the width and the tokens. `python imitated_train.py train.py FLAGS`.

It saves, resumes, branches, diverges and fails as train.py does, as far as those tools see. Each
start is a line of $STARTS. Runs whose --out ends in $FAILS fail, those in $KILLED are killed."""
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path

words = sys.argv[2:]
flags = {name[2:].replace("-", "_"): value for name, value in zip(words[::2], words[1::2])}
out = Path(flags["out"])
steps = 20 * int(flags["epochs"]) if "epochs" in flags else int(flags["steps"])
with open(os.environ["STARTS"], "a") as starts:
    starts.write(f"{out}\n")
if str(out).endswith(os.environ.get("FAILS", "nothing")):
    print("train.py: warning: a warning\ntrain.py: no memory: take less\nand a traceback")
    sys.exit(1)
if str(out).endswith(os.environ.get("KILLED", "nothing")):
    print("train.py: step 40/400 loss 3.6", flush=True)
    os.kill(os.getpid(), 9)

saved = sorted(int(file.stem[5:]) for file in out.glob("step_*.pt"))
step, kind = 0, "start"
if saved:
    step, kind = saved[-1], "resume"
elif "resume" in flags:
    assert Path(flags["resume"]).exists(), flags["resume"]
    step, kind = int(Path(flags["resume"]).stem[5:]), "resume"
config = json.loads(os.environ["DEFAULTS"])
if "resume" in flags:               # a branch has the flags of its trunk, unless it gives others
    with open(Path(flags["resume"]).parent / "metrics.jsonl") as trunk:
        config |= json.loads(trunk.readline())["config"]
for name, value in flags.items():
    config[name] = value
    with suppress(ValueError):
        config[name] = json.loads(value)        # a number
tokens_per_step = config["batch_size"] * config["seq_len"]
N = json.loads(os.environ["SIZES"])[str(config["n_embd"])]
every = int(flags.get("save_every", 0)) or steps
with open(out / "metrics.jsonl", "ab", buffering=0) as metrics:
    def write(**line):
        metrics.write(json.dumps(line | dict(time=time.time())).encode() + b"\n")
    source = dict(fingerprint=os.environ["FINGERPRINT"], weight=1.0, val_fingerprint="v",
                  sequences=8)
    write(event=kind, step=step, config=config, data=dict(
        tokenizer="bytes", vocab_size=257, bytes_per_token=1.0, seq_len=config["seq_len"],
        sources=dict(d=source)))
    if config["lr"] > 1:
        write(step=step + 1, loss=None, tokens=0, lr=0.1, tokens_per_second=1.0)
        write(event="stop", step=step + 1, reason="the loss is not finite")
        print("train.py: step 1: the loss is not finite")
        sys.exit(1)
    while step < steps:
        step += max(1, steps // 40)
        D = step * tokens_per_step
        row = dict(step=step, tokens=D, loss=4.0, lr=0.1, tokens_per_second=1.0)
        if step == steps:
            row["val_loss"] = 1 + 30 * N ** -0.3 + 30 * D ** -0.3 + config["lr"] / 1e9
        write(**row)
        if step % every == 0 or step == steps:
            (out / f"step_{step:08}.pt").touch()
        time.sleep(float(os.environ["SECONDS_OF_A_STEP"]))
    write(event="end", step=steps)
