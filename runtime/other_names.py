"""Flags of nanoGPT, picotron and Megatron-LM, and what to give here instead. The parsers of
train.py, data.py, sample.py and tools/plan.py say it (commandline.Parser).
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
    "*.py": "there are no configuration files, only flags: README.md has nanoGPT's demo",
    "*.pt": "give it to --resume or --init-from",
    "resume=": "leave it out to go on with the run in --out, or give never or FILE",
    "nproc-per-node gpus num-gpus world-size":
        "start so many processes: torchrun --nproc_per_node=N train.py",
    "dp data-parallel-size":
        "dp is what tp, pp and cp leave of the processes: start that many times more",
    "tp-size tensor-parallel tensor-parallel-size": "give --tp",
    "context-parallel": "give --cp",
    "data-path": "give --data DIR of data.py; a mixture is --data A=0.7,B=0.3",
    "mock-data": "leave it out: `python data.py` makes data/python without a download",
    "dataset":
        "`python data.py --dataset NAME` makes data/NAME: give --data data/NAME (nanoGPT's "
        "shakespeare_char: --dataset shakespeare --tokenizer bytes)",
    "split vocab-file merge-file tokenizer-type tokenizer-model vocab-size":
        "leave it out: `python data.py` has split and encoded the text (--tokenizer)",
    "max-position-embeddings": "give --seq-len",
    "bias ffn-hidden-size kv-channels disable-bias-linear normalization norm-epsilon swiglu "
    "position-embedding-type rotary-percent rotary-base group-query-attention num-query-groups "
    "untie-embeddings-and-output-weights init-method-std num-experts make-vocab-size-divisible-by "
    "expert-model-parallel-size":
        "leave it out: the model is GPT-2's, with biases, LayerNorm, learned positions, a tied "
        "head",
    "min-lr": "give --min-lr-ratio, min-lr / lr, such as 0.1",
    "lr-warmup-fraction lr-warmup-samples warmup-ratio": "give --warmup-steps, a number of steps",
    "train-samples": "give --steps, a number of steps",
    "tokens": "give --steps, tokens / (batch-size x seq-len), or --epochs",
    "lr-decay-iters lr-decay-samples": "leave it out: the learning rate decays until --steps",
    "decay-lr": "--min-lr-ratio 1 keeps the learning rate",
    "lr-decay-style": "give --lr-schedule",
    "eval-iters": "give --eval-tokens, a number of tokens",
    "gradient-accumulation-steps":
        "give --batch-size, nanoGPT's batch_size x gradient_accumulation_steps, and "
        "--micro-batch, its batch_size",
    "rampup-batch-size": "give --batch-ramp START:INCREMENT:SEQUENCES, as 4:4:100",
    "num-layers-per-virtual-pipeline-stage":
        "give --pp-schedule interleaved --pp-chunks V, V = n-layer / pp / N",
    "num-virtual-stages-per-pipeline-rank": "give --pp-schedule interleaved --pp-chunks N",
    "bf16": "give --dtype bf16",
    "fp16": "give --dtype fp16",
    "precision": "give --dtype",
    "fp8-format": "there are no products in 8 bits: give --dtype bf16",
    "dtype=bfloat16": "give bf16",
    "dtype=float16": "give fp16",
    "dtype=float32": "give fp32",
    "device=cuda:*": "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU",
    "loss-scale initial-loss-scale": "--dtype fp16 finds its loss scale by itself",
    "wandb-log wandb-project wandb-run-name wandb-exp-name": "give --log wandb",
    "tensorboard-dir": "give --log tensorboard",
    "zero-stage": "give --zero",
    "use-distributed-optimizer": "give --zero 1",
    "use-megatron-fsdp": "give --zero 3",
    "adam-beta1": "give --beta1",
    "adam-beta2": "give --beta2",
    "adam-eps": "leave it out: AdamW's epsilon is 1e-8",
    "hidden-dropout attention-dropout": "give --dropout",
    "recompute-granularity recompute-activations recompute-method recompute-num-layers":
        "give --recompute (whole blocks; there is no selective)",
    "save-steps": "give --save-every",
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
    "use-flash-attn attention-softmax-in-fp32 no-masked-softmax-fusion optimizer cp-comm-type":
        "leave it out: there is one kind here, or --device decides",
    "num-workers": "leave it out: the next batch is loaded in advance"}

DATA_ADVICE = {     # for data.py: of nanoGPT, and of Megatron-LM's preprocess_data.py
    "dataset=shakespeare_char": "give shakespeare --tokenizer bytes",
    "dataset=openwebtext": "give fineweb",
    "output-prefix": "give --out DIR",
    "tokenizer-type vocab-file": "give --tokenizer gpt2",
    "json-keys": "leave it out: a line's text is in the field \"text\"",
    "workers append-eod": "leave it out: it is always so"}

SAMPLE_NAMES = {"max-tokens": "max-new-tokens"}         # of sample.py's flags, in nanoGPT
SAMPLE_ADVICE = {   # for sample.py
    "out-dir": "give --ckpt OUT/latest.pt",
    "*.pt": "give --ckpt FILE",
    "init-from":
        "give --ckpt FILE: `python -m tools.huggingface import gpt2 gpt2.pt` makes one of GPT-2's "
        "weights",
    "start": "give --prompt TEXT, or --prompt - < FILE",
    "compile": "leave it out",
    "dtype=float32": "give fp32",
    "dtype=bfloat16 dtype=float16": "give bf16",
    "device=cuda:*": "give cuda; CUDA_VISIBLE_DEVICES chooses the GPU"}

PLAN_ADVICE = {     # for tools/plan.py: values with a unit
    "network=*": "give GB per second without the unit, as 50",
    "tokens=*": "give a number without a unit, as 1e12"}
