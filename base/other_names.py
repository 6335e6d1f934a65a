"""Flags of other trainers, and what to give here instead: of nanoGPT, picotron, Megatron-LM and
llm.c. commandline.Parser, the parser of every program here, suggests our flags by IN_PROJECTS, and
says the sentences of a program's ADVICE. docs/flags.md has the table.
"""
import re

# The nearest flag of each project; its value may differ. Names of picotron without dashes are keys
# of its config.json.
PROJECTS = ("nanoGPT", "picotron", "Megatron-LM", "llm.c")
IN_PROJECTS = {
    "data": ("`dataset`, `prepare.py`", "`dataset`", "`--data-path`, `preprocess_data.py`",
             "`-i`, `-j`, `dev/data/`"),
    "out": ("`out_dir`", "`save_dir`", "`--save`", "`-o`"),
    "resume": ("`init_from=resume`", "`load_path`", "`--load`", "`-y`"),
    "init-from": ("`init_from=gpt2`", "", "`--finetune`", "`-e`"),
    "eval-only": ("`eval_only`", "", "", ""),
    "log": ("`wandb_log`", "`--use_wandb`", "`--tensorboard-dir`, `--wandb-project`", ""),
    "model": ("", "", "", "`-e d12`"),
    "n-layer": ("`n_layer`", "`--num_hidden_layers`", "`--num-layers`", ""),
    "n-head": ("`n_head`", "`--num_attention_heads`", "`--num-attention-heads`", ""),
    "n-embd": ("`n_embd`", "", "`--hidden-size`", ""),
    "n-kv-head": ("", "`--num_key_value_heads`", "`--num-query-groups`", ""),
    "head-dim": ("", "", "`--kv-channels`", ""),
    "hidden": ("", "", "`--ffn-hidden-size`", ""),
    "rope-theta": ("", "", "`--rotary-base`", ""),
    "n-expert": ("", "", "`--num-experts`", ""),
    "n-active": ("", "", "`--moe-router-topk`", ""),
    "shared-hidden": ("", "", "`--moe-shared-expert-intermediate-size`", ""),
    "balance-loss": ("", "", "`--moe-aux-loss-coeff`", ""),
    "z-loss": ("", "", "`--moe-z-loss-coeff`", ""),
    "balance-bias": ("", "", "`--moe-router-bias-update-rate`", ""),
    "seq-len": ("`block_size`", "`--seq_len`", "`--seq-length`, `--max-position-embeddings`",
                "`-t`"),
    "dropout": ("`dropout`", "", "`--hidden-dropout`, `--attention-dropout`", ""),
    "batch-size": ("`batch_size` x `gradient_accumulation_steps`",
                   "`--mbs` x `--grad_acc_steps` x `--dp`", "`--global-batch-size`",
                   "`-d` (tokens)"),
    "micro-batch": ("`batch_size`", "`--mbs`", "`--micro-batch-size`", "`-b`"),
    "batch-ramp": ("", "", "`--rampup-batch-size`", ""),
    "steps": ("`max_iters`", "`total_train_steps`", "`--train-iters`, `--train-samples`", "`-x`"),
    "lr": ("`learning_rate`", "`learning_rate`", "`--lr`", "`-l`"),
    "min-lr-ratio": ("`min_lr`", "", "`--min-lr`", "`-q`"),
    "warmup-steps": ("`warmup_iters`", "", "`--lr-warmup-iters`, `--lr-warmup-fraction`", "`-u`"),
    "lr-schedule": ("", "", "`--lr-decay-style`", "`-k`"),
    "weight-decay": ("`weight_decay`", "`weight_decay`", "`--weight-decay`", "`-c`"),
    "beta1": ("`beta1`", "", "`--adam-beta1`", ""),
    "beta2": ("`beta2`", "", "`--adam-beta2`", ""),
    "clip": ("`grad_clip`", "", "`--clip-grad`", ""),
    "tp": ("", "`--tp`", "`--tensor-model-parallel-size`", ""),
    "pp": ("", "`--pp`", "`--pipeline-model-parallel-size`", ""),
    "cp": ("", "`--cp`, `cp_size`", "`--context-parallel-size`", ""),
    "ep": ("", "", "`--expert-model-parallel-size`", ""),
    "pp-schedule": ("", "`--pp_engine`", "", ""),
    "pp-chunks": ("", "", "`--num-virtual-stages-per-pipeline-rank`", ""),
    "tp-overlap": ("", "", "`--tp-comm-overlap`, which cuts products", ""),
    "timeout": ("", "", "`--distributed-timeout-minutes`", ""),
    "zero": ("", "", "`--use-distributed-optimizer`: 1, `--use-megatron-fsdp`: 3", "`-z`"),
    "recompute": ("", "", "`--recompute-granularity full`, `--recompute-activations`", "`-r`"),
    "sequence-parallel": ("", "", "`--sequence-parallel`", ""),
    "offload": ("", "", "`--optimizer-cpu-offload`", ""),
    "dtype": ("`dtype`", "", "`--bf16`, `--fp16`", "`PRECISION`"),
    "device": ("`device`", "`--use_cpu`", "", ""),
    "compile": ("`compile`", "", "", ""),
    "save-every": ("", "`save_frequency`", "`--save-interval`", "`-n`"),
    "keep": ("", "", "", "`-nk`"),
    "eval-every": ("`eval_interval`", "", "`--eval-interval`", "`-v`"),
    "eval-tokens": ("`eval_iters`", "", "`--eval-iters`", "`-m`"),
    "log-every": ("`log_interval`", "", "`--log-interval`", ""),
    "check-every": ("", "", "`--check-weight-hash-across-dp-replicas-interval`", ""),
    "rollback": ("", "", "", "`-sl`, `-sg`")}


def flags_called(name: str) -> list[str]:
    """Our flags that have this name in a project, both without dashes. A product has none: it is
    several flags there."""
    found = []
    for ours, cells in IN_PROJECTS.items():
        text = " ".join(cell.replace("_", "-") for cell in cells if " x " not in cell)
        if name in re.findall(r"`-*([\w-]+)", text):
            found.append(ours)
    return found


# Names, or FLAG=VALUE for wrong values of our flags; patterns of fnmatch. The first one counts.
ADVICE = {          # where the nearest flag of ours is not enough to know, or nothing is needed
    "*.py *.json config": "there are no configuration files, only flags: --help lists them; "
                          "docs/training.md has nanoGPT's demo",
    "*.pt": "give it to --resume or --init-from",
    "resume=": "leave it out to go on with the run in --out, or give never or FILE",
    "nproc-per-node nnodes world-size":
        "start so many processes: torchrun --nproc_per_node=N train.py",
    "dp data-parallel-*":
        "dp is what tp, pp and cp leave of the processes: start that many times more",
    "data-path": "give --data DIR of data.py; a mixture is --data A=0.7,B=0.3",
    "dataset": "`python data.py --dataset NAME` makes data/NAME: give --data data/NAME (nanoGPT's "
               "shakespeare_char: --dataset shakespeare --tokenizer bytes)",
    "mock-data split vocab-file merge-file tokenizer-type tokenizer-model vocab-size":
        "leave it out: `python data.py` has split and encoded the text (--tokenizer)",
    "model-name": "give --model NAME for a new model of that size; for its published weights "
                  "--init-from FILE.pt, which `python -m tools.huggingface import NAME FILE.pt` "
                  "makes",
    "bias disable-bias-linear normalization swiglu position-embedding-type "
    "untie-embeddings-and-output-weights init-method-std group-query-attention "
    "make-vocab-size-divisible-by":
        "leave it out: --model chooses a family: a GPT has biases, LayerNorm, learned positions "
        "and a tied head, a Llama RMSNorm and rotary positions",
    "min-lr": "give --min-lr-ratio, min-lr / lr, such as 0.1",
    "max-tokens": "give --steps, tokens / (batch-size x seq-len), or --epochs",
    "lr-decay-iters lr-decay-samples": "leave it out: the learning rate decays until --steps",
    "decay-lr": "--min-lr-ratio 1 keeps the learning rate",
    "eval-iters": "give --eval-tokens, a number of tokens",
    "-d": "give --batch-size, in sequences: tokens / seq-len",
    "gradient-accumulation-steps grad-acc-steps":
        "give --batch-size, nanoGPT's batch_size x gradient_accumulation_steps, and "
        "--micro-batch, its batch_size",
    "rampup-batch-size": "give --batch-ramp START:INCREMENT:SEQUENCES, as 4:4:100",
    "num-layers-per-virtual-pipeline-stage":
        "give --pp-schedule interleaved --pp-chunks V, V = n-layer / pp / N",
    "num-virtual-stages-per-pipeline-rank": "give --pp-schedule interleaved --pp-chunks N",
    "fp16 bf16": "give --dtype fp16, or bf16",
    "fp8-format": "there are no products in 8 bits: give --dtype bf16",
    "use-distributed-optimizer": "give --zero 1",
    "use-megatron-fsdp": "give --zero 3",
    "recompute-*": "give --recompute (whole blocks; there is no selective)",
    "wandb-* use-wandb": "give --log wandb",
    "loss-scale initial-loss-scale": "--dtype fp16 finds its loss scale by itself",
    "exit-duration-in-mins exit-signal-handler": "SIGTERM makes a run save and end",
    "no-load-optim no-load-rng": "leave it out: --init-from takes weights alone",
    "always-save-checkpoint":
        "leave it out: every --save-every steps a checkpoint is written, whatever the validation "
        "loss; there is no file of the best",
    "overlap-* use-checkpoint-args num-workers": "leave it out: it is always so",
    "adam-eps backend distributed-backend transformer-impl use-mcore-models ckpt-format "
    "attention-backend use-flash-attn cp-comm-type":
        "leave it out: there is one kind here, or --device decides",
    # wrong values of our flags
    "dtype=bf*": "give bf16",
    "dtype=*float16 dtype=half": "give fp16",
    "dtype=*float32": "give fp32",
    "dtype=*float64": "give fp64",
    "device=cuda:* device=gpu": "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
    "lr-schedule=constant": "give --min-lr-ratio 1 instead, which keeps the learning rate",
    "rollback=[Ff]alse rollback=0": "give off",
    "rollback=[Tt]rue rollback=1": "give on",
    "clip=None": "give 0",
    "": "a value stands behind its flag, as in --steps 1000, and a switch has none: --help lists "
        "the flags"}

DATA_ADVICE = {     # for data.py: of nanoGPT, and of Megatron-LM's preprocess_data.py
    "dataset=shakespeare_char": "give shakespeare --tokenizer bytes",
    "dataset=openwebtext": "give fineweb",
    "output-prefix": "give --out DIR",
    "data": "give --input FILE ... --out DIR, or --dataset NAME",
    "json-keys": "give --text-field NAME",
    "tokenizer-type vocab-file": "give --tokenizer gpt2",
    "workers append-eod": "leave it out: it is always so",
    "split": "leave it out: about 5% of the documents validate (--seed draws others), or those of "
             "files named validation",
    "python shakespeare tinystories fineweb": "give it to --dataset",
    "": "text is given by --input FILE ... --out DIR"}

SAMPLE_ADVICE = {   # for sample.py: of nanoGPT's
    "out-dir": "give --ckpt OUT/latest.pt",
    "*.pt": "give --ckpt FILE",
    "init-from":
        "give --ckpt FILE: `python -m tools.huggingface import gpt2 gpt2.pt` makes one of GPT-2's "
        "weights",
    "start": "give --prompt TEXT, or --prompt - < FILE",
    "compile": "leave it out",
    "dtype=float32": "give fp32",
    "dtype=bfloat16 dtype=float16": "give bf16",
    "device=cuda:* device=gpu": "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
    "": "give --prompt TEXT"}

PLAN_ADVICE = {     # for tools.plan
    "gpus num-gpus nproc-per-node world-size": "give --world, the number of GPUs"}
