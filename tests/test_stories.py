"""What a user does with one run after another, as stories.

A line is a command of train.py, "STATUS FLAGS :: what it says", behind the letter of its torchrun
where it has one; "$" a command of the shell; "=" what is true then; "!" a statement of Python. TINY
stands for harness.TINY. Status 9: killed in the first evaluation. A refusal, status 2, is one line
and changes no file."""
import re
import shlex
import subprocess
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import checkpoint
import train
from base.options import Config
from runtime import evaluation
from tests.commands import TINY, kinds, read_metrics
from tests.harness import assert_same_state, column, contents

RUN_8 = "TINY --batch-size 8 --steps 10 --save-every 4"
STORIES = {
    "resume never, resume auto": r"""
A 0 TINY --out 'my run' --resume never :: python sample.py --ckpt 'my run/latest.pt'$
2 TINY --out 'my run' --resume never :: --resume never, but my run holds
B 2 TINY --out 'my run' --resume never :: --resume never, but my run holds
B 2 TINY --out 'my run' --resume never :: --resume never, but my run holds
A 0 TINY --out 'my run' --resume never :: nothing left
$ truncate -s 1000 'my run/step_00000004.pt'
0 TINY --out 'my run' :: /step_00000004.pt is damaged.*after step 2
= "damaged" in kinds(events("my run"))
$ truncate -s 9 'my run'/*.pt
1 TINY --out 'my run' :: is whole""",
    "resume FILE, killed and started again": r"""
0 TINY --out base ::
$ cp -r base copy
9 TINY --out new --resume base/step_00000002.pt --lr 0.5 :: base/step_00000002.pt,
A 9 TINY --out new --resume base/step_00000002.pt --steps 6 --eval-every 6 :: step 2
A 0 TINY --out new --resume base/step_00000002.pt --steps 6 :: new/.*after step 4
0 TINY --out new --resume base/step_00000002.pt --lr 0.1 :: nothing left to do
$ diff -r base copy && rm -r base
2 TINY --out new --resume base/step_00000002.pt --steps 7 :: drop --resume to go on
A 0 TINY --out new --resume base/step_00000002.pt --steps 7 :: after step 6
= state("new/latest.pt")["run"]["id"] == state("new/step_00000002.pt")["run"]["id"]
= state("new/latest.pt")["run"]["origin"][0] == "resume" """,
    "init-from FILE": r"""
0 TINY --out base ::
0 TINY --out new --init-from base/step_00000004.pt --lr 0 --steps 1 --seq-len 8 :: weights  from
! one, two = state("base/latest.pt"), state("new/latest.pt")
= all(x[:len(y)].equal(y) for x, y in zip(one["parameters"].values(), two["parameters"].values()))
= (two["optimizer_steps"], two["consumed_samples"], len(two["monitor"]["losses"])) == (1, 4, 1)
= two["monitor"]["checkpoints"][0] == [0, "step_00000000.pt", True]
= two["run"]["origin"] == ["init-from", one["run"]["id"], 4]
$ mv base old
A 0 TINY --out new --init-from ./old/step_00000004.pt --seq-len 8 --steps 5 :: after step 1
$ rm -r old
2 TINY --out new --init-from old/step_00000004.pt --seq-len 8 --steps 6 :: drop --init-from to
A 0 TINY --out new --init-from old/step_00000004.pt --seq-len 8 --steps 6 :: after step 5
0 TINY --out new --seq-len 8 --steps 7 :: after step 6""",
    "the command line, then the checkpoint, then the default": r"""
0 TINY --out o --lr 0.01 --lr-schedule linear --beta2 0.9 :: step
0 --out o :: nothing left to do; raise
0 --out o --seed 5 --beta2 0.8 :: nothing left to do
= losses("o") == 4
2 --out o --steps 8 --seed 5 :: in the order of seed 1337; in that of --seed 5
0 --out o --steps 8 :: steps 8 instead of 4; so the next step's learning rate is 5.50e-03
= losses("o") == 4
0 --out o --steps 10 --lr 0.1 --batch-size 2 --dtype fp64 :: lr 0.1 instead of 0.01, dtype fp64
= losses("o") == 6
0 --out p --resume o/latest.pt :: 10 of 10: nothing left to do; raise --steps or --epochs$
= column(rows("o"), "step") == [*range(1, 11)]
= ["val_loss" in row for row in rows("o")] == [False, True] * 5
= kinds(events("o")) == ["start", "end", "resume", "end", "resume", "end"]
= column(events("o"), "step") == [0, 4, 4, 8, 8, 10]
= events("o")[2]["given"] == dict(data=data, out="o", steps=8)
= events("o")[2]["path"].endswith("step_00000004.pt") and events("o")[2]["config"]["beta2"] == 0.9
= [rows("o")[i]["lr"] for i in (4, 8)] == pytest.approx([5.5e-3, 0.1 * (0.1 + 0.9 / 8)])
= state("o/latest.pt")["consumed_samples"] == 8 * 4 + 2 * 2
= dict(beta2=0.9, lr=0.1, steps=10, clip=1.0).items() <= state("o/latest.pt")["config"].items()""",
    "the sample of an evaluation belongs to the run": r"""
0 TINY --out o --eval-tokens 100 :: on 112 of.*on 112 of
0 --out o --steps 6 :: on 112 of
= "eval tokens" not in text
0 --out o --steps 8 --eval-tokens 320 :: eval tokens 320 instead of 100.*on 320 of
0 --out p --resume o/latest.pt --steps 10 :: on 320 of
0 --out o --eval-only :: on 3,680 of
0 --out o --eval-only --eval-tokens 32 :: on 32 of
0 --out q --init-from o/latest.pt --steps 1 :: on 2,048 of
0 --out q --steps 2 --eval-tokens 16 :: eval tokens 16 instead of the default""",
    "none unsets a ramp and a skip; every third step is shown": r"""
0 TINY --out o --eval-every 0 --batch-ramp 2:2:40 --skip-steps 3:3 :: sequences 4 to 5 are left out
= config("o").items() >= dict(batch_ramp="2:2:40", skip_steps="3:3").items()
2 TINY --out o --batch-size 3 :: 2:2:40 does not end at --batch-size 3
0 --out o --batch-ramp none --skip-steps none --steps 9 --log-every 3 :: .
= re.findall(r"^step (\d)/9", text, re.MULTILINE) == ["6", "9"]
= column(rows("o"), "step") == [*range(1, 10)]
! trained = torch.tensor(column(rows("o"), "batch_size")).cumsum(0)
= column(rows("o"), "tokens") == (16 * trained).tolist()
= config("o").items() >= dict(batch_ramp=None, skip_steps=None).items()""",
    "a branch has the whole state but a new history": r"""
0 TINY --out o ::
! hurt = state("o/step_00000002.pt")
! hurt["monitor"].update(lr_factor=0.25, rollbacks=2, returned_to=[2])
! torch.save(hurt, "by_hand.pt")
0 --out p --resume by_hand.pt :: learning rate x 0.25
= kinds(events("p")) == ["resume", "end"] and column(rows("p"), "step") == [3, 4]
= rows("p")[0]["lr"] == 0.25 * train.learning_rate(Config(**events("p")[0]["config"]), 3)
! monitor = state("p/latest.pt")["monitor"]
= monitor.items() >= dict(lr_factor=0.25, rollbacks=0, returned_to=[]).items()
= monitor["checkpoints"][0] == [2, "step_00000002.pt", True]
! assert_same_state(state("p/step_00000002.pt"), hurt, but=("config", "monitor", "run"))
= state("p/latest.pt")["run"]["origin"] == ["resume", hurt["run"]["id"], 2]
0 --out q --resume by_hand.pt --lr 1.0 --clip 0.5 --skip-steps 3:3 :: lr 1.0 instead of 0.004
= kinds(events("q")) == ["resume", "skip", "end"]
= events("q")[0]["changed"] == dict(lr=[4e-3, 1.0], clip=[1.0, 0.5], skip_steps=[None, "3:3"])
= (events("q")[0]["lr_factor"], state("q/latest.pt")["monitor"]["lr_factor"]) == (1, 1)""",
    "a mixture goes on, and tells of other weights": r"""
0 RUN_8 --data a=0.7,b=0.3 --out o ::
$ mkdir p q r && cp o/step_00000004.pt p && cp o/step_00000004.pt q
0 RUN_8 --data b=3,a=7 --out p ::
= "instead of" not in text and events("p")[0]["changed"] == {}
! assert_same_state(state("p/latest.pt"), state("o/latest.pt"))
0 RUN_8 --data a=1,b=1 --out q :: data a=1,b=1 instead of
= events("q")[0]["changed"] == dict(data=["a=0.7,b=0.3", "a=1,b=1"]) and losses("q") == 6
! first, (begin, weights) = state("q/latest.pt")["data"]
= [first] == state("o/latest.pt")["data"] and begin == 32 and {*weights.values()} == {1}
$ cp q/step_00000008.pt r
0 RUN_8 --data a=1,b=1 --out r ::
= "instead of" not in text and losses("r") == 6
2 RUN_8 --data a --out q :: the text that a=1,b=1 had, not on that of a
0 RUN_8 --data a=1,b=0 --out q --steps 11 ::
= state("q/latest.pt")["data"][-1][0] == 80""",
    "a run that ends diverged fails before its last save, each time": r"""
1 TINY --out o --steps 3 --lr 1e10 --warmup-steps 1 --save-every 1 :: step 3: the validation l
= state("o/latest.pt")["step"] == 2 and "end" not in kinds(events("o"))
1 TINY --out o --steps 3 --lr 1e10 --warmup-steps 1 --save-every 1 :: step 3: the val""",
    "an exact run keeps its microbatch": r"""
0 TINY --out o --save-every 0 --exact --micro-batch 1 :: 4 microbatches x 1 sequences
2 TINY --out o --steps 6 --exact --micro-batch 2 :: 1 sequences
0 TINY --out o --steps 6 --exact :: 4 microbatches x 1 sequences
0 TINY --out o --steps 8 --micro-batch 2 :: 2 microbatches x 2 sequences""",
    "--plain goes on with its runs, and with another program's where it can": r"""
0 TINY --out run ::
0 TINY --out o --plain ::
! one, two = state("run/latest.pt"), state("o/latest.pt")
= one.keys() == two.keys() and two["optimizer_steps"] == 4 and one["tokens"] == two["tokens"]
= one["config"] | dict(out="") == two["config"] | dict(plain=False, out="")
= two["monitor"]["losses"] == [] and two["monitor"]["checkpoints"] == []
= kinds(events("o")) == ["start", "end"] and events("o")[0]["data"] == events("run")[0]["data"]
= set().union(*[a.keys() - b.keys() for a, b in zip(rows("run"), rows("o"))]) == NOT_PLAIN
0 TINY --out o --plain :: is step 4 of 4: nothing left to do; raise --steps
0 TINY --out o --plain --steps 6 --lr 0.001 :: steps 6 instead of 4, lr 0.001 instead of 0.004
= events("o")[-2]["changed"] == dict(steps=[4, 6], lr=[0.004, 0.001])
0 TINY --out o --steps 8 --keep 1 :: after step 6
0 TINY --out rates --plain --lr 0.01 ::
$ cp -a rates copy
0 TINY --out rates --plain --lr 0.01 --steps 8 ::
! told = re.search("(?m)^resume .* 8 instead of 4; so the next step's .*", text)[0]
= told.endswith(" learning rate is 5.50e-03 instead of 1.00e-03")
0 TINY --out copy --lr 0.01 --steps 8 ::
= told in text.replace("copy", "rates").splitlines()
= state("o/latest.pt")["monitor"]["checkpoints"][0] == [6, "step_00000006.pt", True]
$ test -e o/step_00000006.pt
1 TINY --out nan --plain --lr 1e30 --save-every 1 :: step \d has loss nan .*lower --lr
2 TINY --out run --plain --steps 6 --batch-size 2 :: --batch-size 4, not 2
2 TINY --out run --plain --steps 6 --data b :: was trained on the text
0 TINY --out ramp --batch-ramp 2:2:4 ::
2 TINY --out ramp --plain --steps 6 :: --batch-ramp
0 TINY --out drop --dropout 0.1 ::
2 TINY --out drop --plain --steps 6 :: --dropout
0 TINY --out half --dtype fp16 --steps 2 ::
0 TINY --out half --plain ::
= state("half/latest.pt")["scaler"]["scale"] == 1"""}
WARNED = r"""
0 TINY --out o --lr 0.001 --steps 20 --warmup-steps 50 :: 50 is .* 20 .* 4.00e-04, not 1.00e-03\n
= rows("o")[-1]["lr"] == pytest.approx(4e-4)
0 TINY --out p --lr 0.001 --steps 20 --warmup-steps 20 :: .
= "--warmup-steps" not in text
0 TINY --out q --lr 10 --steps 8 --eval-every 0 :: worse than a uniform guess: 5.54
= "Now sample from it" not in text
0 TINY --out r --lr 0.01 --steps 8 --eval-every 0 :: Now sample from it
= "uniform guess" not in text"""
STORIES |= {"a warm-up too long, a loss too high": WARNED,
            "the same with --plain": WARNED.replace("TINY", "TINY --plain")}


def start_torchrun():
    """What a new torchrun tells its process: of a store that outlives it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    return store, dict(RANK=0, WORLD_SIZE=1, MASTER_ADDR="127.0.0.1", MASTER_PORT=store.port,
                       TORCHELASTIC_USE_AGENT_STORE=True)


@pytest.mark.parametrize("story", STORIES)
def test_story(run_train, shards, two_sources, tmp_path, monkeypatch, story):
    monkeypatch.chdir(tmp_path)
    for name in "ab":
        (tmp_path / name).symlink_to(two_sources / name)
    stores, jobs = zip(*(start_torchrun() for _ in "AB"))
    known = dict(
        assert_same_state=assert_same_state, column=column, Config=Config, kinds=kinds,
        pytest=pytest, re=re, torch=torch, train=train,
        data=str(shards), state=lambda path: checkpoint.load(Path(path)),
        rows=lambda out: read_metrics(Path(out))[0], events=lambda out: read_metrics(Path(out))[1],
        losses=lambda out: len(checkpoint.load(Path(out, "latest.pt"))["monitor"]["losses"]),
        config=lambda out: checkpoint.load(Path(out, "latest.pt"))["config"],
        NOT_PLAIN={"activation_norm", "batch_size", "skipped", "bits_per_byte"})
    for line in STORIES[story].strip().splitlines():
        kind, _, rest = line.partition(" ")
        if kind == "$":
            subprocess.run(rest, shell=True, check=True)
        elif kind == "=":
            assert eval(rest, known), line
        elif kind == "!":
            exec(rest, known)
        else:
            job, status, given = re.fullmatch(r"(?:([AB]) )?(\d) (.*)", line).groups()
            given, _, words = given.partition(" ::")
            given = given.replace("RUN_8", RUN_8).replace("TINY", shlex.join(map(str, TINY)))
            before = contents(tmp_path)
            killed = mock.patch.object(evaluation, "evaluate_source", side_effect=SystemExit(9))
            with killed if status == "9" else nullcontext():
                found, text, error = run_train("--data", shards, *shlex.split(given),
                                               **(jobs["AB".index(job)] if job else {}))
            assert found == int(status), (line, text, error)
            assert re.search(words.strip(), error + text.strip(), re.S), (line, text, error)
            assert status != "2" or (contents(tmp_path) == before and error.count("\n") == 1), line
            known["text"] = text
