"""Flags of other trainers, and what to give here instead: of nanoGPT, llm.c, picotron, Megatron-LM,
torchtitan, litgpt, DeepSpeed and transformers' Trainer. The parsers of train.py, data.py, sample.py
and tools.plan say it (commandline.Parser).
"""
OTHER_NAMES = {     # of our flags, in nanoGPT, picotron and Megatron-LM
    "steps": "max-iters train-iters", "lr": "learning-rate",
    "n-layer": "num-layers num-hidden-layers", "n-head": "num-attention-heads",
    "n-embd": "hidden-size", "zero": "use-distributed-optimizer", "batch-ramp": "rampup-batch-size",
    "tp": "tensor-model-parallel-size", "pp": "pipeline-model-parallel-size",
    "cp": "context-parallel-size cp-size", "pp-chunks": "num-virtual-stages-per-pipeline-rank",
    "batch-size": "global-batch-size gradient-accumulation-steps grad-acc-steps",
    "micro-batch": "micro-batch-size mbs", "eval-every": "eval-interval",
    "log-every": "log-interval", "seq-len": "block-size seq-length", "clip": "grad-clip clip-grad",
    "data": "data-path", "warmup-steps": "warmup-iters lr-warmup-iters", "out": "out-dir save",
    "resume": "load", "dtype": "bf16 fp16", "recompute": "recompute-granularity",
    "save-every": "save-interval", "offload": "optimizer-cpu-offload", "init-from": "finetune"}

# The nearest flag of each project, for docs/flags.md; its value may differ. Names of picotron
# without dashes are keys of its config.json. A parser suggests ours for those in OTHER_NAMES.
PROJECTS = ("nanoGPT", "picotron", "Megatron-LM", "llm.c")
IN_PROJECTS = {
    "data": ("`dataset`, `prepare.py`", "`dataset`", "`--data-path`, `preprocess_data.py`",
             "`-i`, `-j`, `dev/data/`"),
    "out": ("`out_dir`", "`save_dir`", "`--save`", "`-o`"),
    "resume": ("`init_from=resume`", "`load_path`", "`--load`", "`-y`"),
    "init-from": ("`init_from=gpt2`", "", "`--finetune`", "`-e`"),
    "eval-only": ("`eval_only`", "", "", ""),
    "model": ("", "", "", "`-e d12`"),
    "n-layer": ("`n_layer`", "`--num_hidden_layers`", "`--num-layers`", ""),
    "n-head": ("`n_head`", "`--num_attention_heads`", "`--num-attention-heads`", ""),
    "n-embd": ("`n_embd`", "", "`--hidden-size`", ""),
    "seq-len": ("`block_size`", "`--seq_len`", "`--seq-length`", "`-t`"),
    "batch-size": ("`batch_size` x `gradient_accumulation_steps`",
                   "`--mbs` x `--grad_acc_steps` x `--dp`", "`--global-batch-size`",
                   "`-d` (tokens)"),
    "micro-batch": ("`batch_size`", "`--mbs`", "`--micro-batch-size`", "`-b`"),
    "batch-ramp": ("", "", "`--rampup-batch-size`", ""),
    "steps": ("`max_iters`", "`total_train_steps`", "`--train-iters`", "`-x`"),
    "lr": ("`learning_rate`", "`learning_rate`", "`--lr`", "`-l`"),
    "min-lr-ratio": ("`min_lr`", "", "`--min-lr`", "`-q`"),
    "warmup-steps": ("`warmup_iters`", "", "`--lr-warmup-iters`", "`-u`"),
    "clip": ("`grad_clip`", "", "`--clip-grad`", ""),
    "tp": ("", "`--tp`", "`--tensor-model-parallel-size`", ""),
    "pp": ("", "`--pp`", "`--pipeline-model-parallel-size`", ""),
    "cp": ("", "`--cp`, `cp_size`", "`--context-parallel-size`", ""),
    "pp-schedule": ("", "`--pp_engine`", "", ""),
    "pp-chunks": ("", "", "`--num-virtual-stages-per-pipeline-rank`", ""),
    "zero": ("", "", "`--use-distributed-optimizer`: 1", "`-z`"),
    "recompute": ("", "", "`--recompute-granularity full`", "`-r`"),
    "sequence-parallel": ("", "", "`--sequence-parallel`", ""),
    "offload": ("", "", "`--optimizer-cpu-offload`", ""),
    "dtype": ("`dtype`", "", "`--bf16`, `--fp16`", "`PRECISION`"),
    "device": ("`device`", "`--use_cpu`", "", ""),
    "compile": ("`compile`", "", "", ""),
    "save-every": ("", "`save_frequency`", "`--save-interval`", "`-n`"),
    "keep": ("", "", "", "`-nk`"),
    "eval-every": ("`eval_interval`", "", "`--eval-interval`", "`-v`"),
    "eval-tokens": ("`eval_iters`", "", "", ""),
    "log-every": ("`log_interval`", "", "", ""),
    "check-every": ("", "", "`--check-weight-hash-across-dp-replicas-interval`", ""),
    "rollback": ("", "", "", "`-sl`, `-sg`")}

# Names, or FLAG=VALUE for wrong values of our flags; patterns of fnmatch. The first one counts.
ADVICE = {          # what to do where a value is not ours, or nothing is needed
    "noise-scale": "the gradient noise scale is gone (docs/experiments.md): leave it out",
    "*.py": "there are no configuration files, only flags: docs/training.md has nanoGPT's demo",
    "*.json *.yaml *.yml *.toml config config-file config-path":
        "there are no configuration files, only flags: --help lists them",
    "deepspeed deepspeed-config":
        "there are no configuration files: give --zero 1, 2 or 3, --dtype and --clip, and start "
        "by torchrun",
    "*.pt": "give it to --resume or --init-from",
    "resume=": "leave it out to go on with the run in --out, or give never or FILE",
    "local-rank":
        "torch.distributed.launch and deepspeed give it: start by torchrun --nproc_per_node=N "
        "train.py",
    "nproc-per-node gpus num-gpus ngpu n-gpu devices num-devices num-processes nnodes num-nodes "
    "world-size":
        "start so many processes: torchrun --nproc_per_node=N train.py",
    "dp dp-size data-parallel-size data-parallel-*-degree":
        "dp is what tp, pp and cp leave of the processes: start that many times more",
    "tp-size tensor-parallel tensor-parallel-size tensor-parallel-degree": "give --tp",
    "pp-size pipeline-parallel-size pipeline-parallel-degree": "give --pp",
    "pp-engine pipeline-parallel-schedule": "give --pp-schedule gpipe or 1f1b",
    "context-parallel context-parallel-degree": "give --cp",
    "data-path": "give --data DIR of data.py; a mixture is --data A=0.7,B=0.3",
    "mock-data": "leave it out: `python data.py` makes data/python without a download",
    "dataset":
        "`python data.py --dataset NAME` makes data/NAME: give --data data/NAME (nanoGPT's "
        "shakespeare_char: --dataset shakespeare --tokenizer bytes)",
    "train-file validation-file train-data valid-data dataset-name dataset-config-name "
    "dataset-path data-dir dataset-dir text-column-name":
        "`python data.py --input FILE --out DIR` makes shards of your text: give --data DIR",
    "split vocab-file merge-file tokenizer tokenizer-type tokenizer-model tokenizer-name "
    "tokenizer-path tokenizer-name-or-path use-fast-tokenizer vocab-size":
        "leave it out: `python data.py` has split and encoded the text (--tokenizer)",
    "max-position-embeddings max-seq-length max-seq-len max-length context-length "
    "n-ctx n-positions ctx-len": "give --seq-len",
    "model-name-or-path model-name model-id checkpoint-dir":
        "give --model NAME for a new model of that size; for its published weights --init-from "
        "FILE.pt, which `python -m tools.huggingface import NAME FILE.pt` makes",
    "depth num-blocks": "give --n-layer",
    "hidden-dim d-model dim width embed-dim": "give --n-embd",
    "num-heads n-heads": "give --n-head",
    "model-type config-name config-overrides":
        "give --model NAME, or --n-layer, --n-head and --n-embd",
    "lora* use-lora use-peft peft* load-in-*bit quantize":
        "there are no adapters and no quantized weights: --init-from trains all weights",
    "num-key-value-heads num-query-groups group-query-attention":
        "give --n-kv-head with --model llama-nano or another of the models after it",
    "ffn-hidden-size intermediate-size": "give --hidden with --model llama-nano or one after it",
    "kv-channels": "give --head-dim with --model llama-nano or another of the models after it",
    "rotary-base": "give --rope-theta with --model llama-nano or another of the models after it",
    "bias disable-bias-linear normalization norm-epsilon swiglu "
    "position-embedding-type rotary-percent "
    "tie-word-embeddings untie-embeddings-and-output-weights init-method-std num-experts "
    "make-vocab-size-divisible-by expert-model-parallel-size":
        "leave it out: --model chooses a family: a GPT has biases, LayerNorm, learned positions "
        "and a tied head, a Llama RMSNorm and rotary positions",
    "max-lr peak-lr": "give --lr",
    "min-lr": "give --min-lr-ratio, min-lr / lr, such as 0.1",
    "warmup num-warmup-steps": "give --warmup-steps, a number of steps",
    "wd": "give --weight-decay",
    "lr-warmup-fraction lr-warmup-samples warmup-ratio": "give --warmup-steps, a number of steps",
    "train-samples": "give --steps, a number of steps",
    "max-steps train-steps num-steps total-train-steps max-train-steps num-iterations "
    "max-iterations": "give --steps",
    "num-train-epochs num-epochs max-epochs": "give --epochs, a whole number",
    "tokens max-tokens": "give --steps, tokens / (batch-size x seq-len), or --epochs",
    "lr-decay-iters lr-decay-samples": "leave it out: the learning rate decays until --steps",
    "decay-lr": "--min-lr-ratio 1 keeps the learning rate",
    "lr-decay-style lr-scheduler-type lr-scheduler": "give --lr-schedule cosine or linear",
    "lr-schedule=constant*": "give --min-lr-ratio 1 instead, which keeps the learning rate",
    "eval-iters": "give --eval-tokens, a number of tokens",
    "eval-steps eval-strategy evaluation-strategy eval-freq":
        "give --eval-every, a number of steps",
    "per-device-eval-batch-size eval-batch-size eval-micro-batch-size":
        "leave it out: an evaluation takes --micro-batch",
    "eval evaluate eval-mode": "give --eval-only",
    "do-train do-eval": "leave it out: train.py does both (--eval-only: no training)",
    "per-device-train-batch-size per-gpu-train-batch-size train-batch-size":
        "give --batch-size, the sequences of a step of the whole job: per device x devices x "
        "gradient accumulation steps",
    "auto-find-batch-size group-by-length remove-unused-columns ddp-*":
        "leave it out: there is nothing like it here",
    "train-micro-batch-size-per-gpu device-batch-size batch-size-per-gpu local-batch-size":
        "give --micro-batch, and --batch-size for the whole job",
    "total-batch-size *batch-size-tokens *batch-tokens":
        "give --batch-size, in sequences: tokens / seq-len",
    "bs": "give --batch-size",
    "gradient-accumulation-steps":
        "give --batch-size, nanoGPT's batch_size x gradient_accumulation_steps, and "
        "--micro-batch, its batch_size",
    "rampup-batch-size": "give --batch-ramp START:INCREMENT:SEQUENCES, as 4:4:100",
    "num-layers-per-virtual-pipeline-stage":
        "give --pp-schedule interleaved --pp-chunks V, V = n-layer / pp / N",
    "num-virtual-stages-per-pipeline-rank": "give --pp-schedule interleaved --pp-chunks N",
    "bf16": "give --dtype bf16",
    "fp16": "give --dtype fp16",
    "precision mixed-precision torch-dtype": "give --dtype bf16, fp16 or fp32",
    "tf32": "leave it out: fp32 on GPUs has products in TF32",
    "fp8-format fp8": "there are no products in 8 bits: give --dtype bf16",
    "dtype=*fp8*": "there are no products in 8 bits: give bf16",
    "dtype=bf*": "give bf16",
    "dtype=*float16 dtype=half dtype=*16-mixed dtype=16*": "give fp16",
    "dtype=*float32 dtype=float dtype=32*": "give fp32",
    "dtype=*float64 dtype=double": "give fp64",
    "device=cuda:* device=gpu device=[0-9]*":
        "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
    "cpu no-cuda use-cpu": "give --device cpu",
    "accelerator": "give --device cpu, cuda or mps, or leave it out",
    "strategy": "leave it out, or give --zero 3 where it was fsdp",
    "seed-everything random-seed": "give --seed",
    "amp": "give --dtype bf16 or fp16",
    "verbose debug": "leave it out: --log-every says how much the console shows",
    "model=gpt2-small model=gpt2-124[mM] model=124[mM] model=gpt": "give gpt2",
    "activation=gelu_*": "give gelu",
    "rollback=[Ff]alse rollback=0 rollback=no rollback=none": "give off",
    "rollback=[Tt]rue rollback=1 rollback=yes": "give on",
    "clip=[Nn]one dropout=[Nn]one weight-decay=[Nn]one": "give 0",
    "log=all": "give tensorboard,wandb",
    "log=none log=csv log=json* log=console":
        "leave it out: metrics.jsonl in --out has the figures",
    "loss-scale initial-loss-scale": "--dtype fp16 finds its loss scale by itself",
    "wandb wandb-* use-wandb": "give --log wandb",
    "name run-name exp-name experiment-name project": "leave it out: --out names the run",
    "report-to log-with logger": "give --log tensorboard or --log wandb, or leave it out",
    "tensorboard-dir tensorboard": "give --log tensorboard",
    "logging-dir log-dir": "leave it out: the figures are in --out",
    "logging-steps logging-strategy": "give --log-every, a number of steps",
    "zero-stage stage": "give --zero",
    "fsdp fsdp-config use-fsdp": "give --zero 3",
    "offload-optimizer cpu-offload": "give --offload",
    "use-distributed-optimizer": "give --zero 1",
    "use-megatron-fsdp": "give --zero 3",
    "adam-beta1": "give --beta1",
    "adam-beta2": "give --beta2",
    "adam-eps adam-epsilon eps": "leave it out: AdamW's epsilon is 1e-8",
    "hidden-dropout attention-dropout": "give --dropout",
    "gradient-checkpointing activation-checkpointing checkpoint-activations": "give --recompute",
    "recompute-granularity recompute-activations recompute-method recompute-num-layers":
        "give --recompute (whole blocks; there is no selective)",
    "save-steps save-strategy ckpt-interval checkpoint-interval save-freq":
        "give --save-every, a number of steps",
    "save-total-limit": "give --keep, a number of files",
    "output-dir save-dir save-folder default-root-dir": "give --out DIR",
    "overwrite-output-dir save-overwrite":
        "leave it out: a run continues in its --out, and a new run takes another --out",
    "resume-from-checkpoint load-path":
        "leave it out: a run continues from the newest checkpoint of its --out",
    "push-to-hub hub-*":
        "leave it out: `python -m tools.huggingface export FILE.pt DIR` makes a folder for the hub",
    "max-grad-norm gradient-clipping gradient-clip-val max-norm": "give --clip",
    "torch-compile use-compile": "give --compile",
    "distributed-timeout-minutes": "give --timeout, in seconds",
    "exit-duration-in-mins exit-signal-handler": "SIGTERM makes a run save and end",
    "no-load-optim no-load-rng": "leave it out: --init-from takes weights alone",
    "always-save-checkpoint":
        "leave it out: every --save-every steps a checkpoint is written, whatever the validation "
        "loss; there is no file of the best",
    "overlap-grad-reduce overlap-param-gather accumulate-allreduce-grads-in-fp32 "
    "use-checkpoint-args":
        "leave it out: it is always so",
    "tp-comm-overlap": "leave it out: nothing hides tensor parallelism's communication",
    "backend distributed-backend transformer-impl use-mcore-models ckpt-format attention-backend "
    "use-flash-attn attention-softmax-in-fp32 no-masked-softmax-fusion optimizer optim "
    "attn-implementation flash-attention cp-comm-type":
        "leave it out: there is one kind here, or --device decides",
    "num-workers dataloader-*": "leave it out: the next batch is loaded in advance",
    # llm.c's, and what a notebook adds
    "-i": "give --data DIR", "-j": "leave it out: --data has the validation text, too",
    "-o": "give --out DIR", "-e": "give --model NAME, or --init-from FILE",
    "-b": "give --micro-batch N", "-t": "give --seq-len N",
    "-d": "give --batch-size, in sequences: tokens / seq-len",
    "-l": "give --lr", "-u": "give --warmup-steps", "-q": "give --min-lr-ratio",
    "-c": "give --weight-decay", "-v": "give --eval-every", "-m": "give --eval-tokens",
    "-n": "give --save-every", "-x": "give --steps", "-z": "give --zero", "-r": "give --recompute",
    "-y": "leave it out: a run continues from the newest checkpoint of its --out",
    "-k": "give --lr-schedule", "-f": "start it from a shell; in a notebook by !python train.py",
    "": "a value stands behind its flag, as in --steps 1000, and a switch has none: --help lists "
        "the flags"}

DATA_ADVICE = {     # for data.py: of nanoGPT, and of Megatron-LM's preprocess_data.py
    "dataset=shakespeare_char": "give shakespeare --tokenizer bytes",
    "dataset=openwebtext": "give fineweb",
    "output-prefix output-dir output-path save-dir": "give --out DIR",
    "data text file input-file input-dir train-file data-dir dataset-path":
        "give --input FILE ... --out DIR, or --dataset NAME",
    "tokenizer-type vocab-file": "give --tokenizer gpt2",
    "json-keys json-key text-column text-column-name column": "give --text-field NAME",
    "workers append-eod": "leave it out: it is always so",
    "num-workers num-proc": "leave it out: it takes all cores",
    "val-fraction val-split val-ratio test-size split":
        "leave it out: about 5% of the documents validate (--seed draws others), or those of "
        "files named validation"}

SAMPLE_NAMES = {    # of sample.py's flags, in nanoGPT and transformers
    "max-tokens": "max-new-tokens max-length length", "num-samples": "num-return-sequences"}
SAMPLE_ADVICE = {   # for sample.py
    "out-dir": "give --ckpt OUT/latest.pt",
    "*.pt": "give --ckpt FILE",
    "init-from":
        "give --ckpt FILE: `python -m tools.huggingface import gpt2 gpt2.pt` makes one of GPT-2's "
        "weights",
    "model-name-or-path model-name model checkpoint checkpoint-path checkpoint-dir model-path":
        "give --ckpt FILE: `python -m tools.huggingface import NAME FILE.pt` makes one of "
        "published weights",
    "do-sample": "leave it out: it is always so (--temperature 0: the most probable token)",
    "repetition-penalty no-repeat-ngram-size num-beams":
        "leave it out: --temperature, --top-k and --top-p choose the tokens",
    "": "give --prompt TEXT",
    "start": "give --prompt TEXT, or --prompt - < FILE",
    "compile": "leave it out",
    "dtype=float32": "give fp32",
    "dtype=bfloat16 dtype=float16 dtype=fp16": "give bf16",
    "device=cuda:* device=gpu device=[0-9]*":
        "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU"}

PLAN_ADVICE = {     # for tools.plan: values with a unit
    "gpus num-gpus n-gpus devices nproc-per-node world-size": "give --world, the number of GPUs",
    "network=*": "give GB per second without the unit, as 50",
    "tokens=*": "give a number without a unit, as 1e12",
    "days=*": "give a number without a unit, as 7"}
