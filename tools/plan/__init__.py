"""Plan a run before it starts: memory, traffic, time and failures on GPUs of any number.

    python -m tools.plan --world 992 --gpu a100-80g --model opt-175b --dtype fp16 --tp 8 --zero 3 \\
        --recompute --batch-size 992 --micro-batch 8 --steps 147660 --vocab-size 50272

is OPT-175B as it was trained (Zhang et al. 2022: 147 TFLOP/s per GPU), and begins with

    fits     yes: 47.5 of 85 GB on rank 0, the fullest; 6% should stay free
    run      147,660 steps in 36.1 days (25.3 to 50.6), 860,062 GPU hours; MFU 33.4%, 128 TFLOP/s

The flags of the model, the batch and the layout are train.py's. `--search` prints the ten fastest
layouts that fit; flags that are given are constraints. `--json` prints the numbers of `make_plan`.

    step = m max(t) + (sum(t) - max(t)) / chunks + data parallelism + AdamW

           for m microbatches, where t is the time of one on each stage, forward and backward;
           data parallelism counts where backward does not hide it, and SHARE of it where
           backward does

    t    = sum(products) / (rate of the GPU) + FLOPs of attention / (its rate)
           + PASSES bytes of x / memory bandwidth
           + bytes of tp, cp and pp / (rate of the links) + HOP for each rank, none of them hidden

A product takes half a wave of tiles more, so that narrow and short ones are slow. Attention's rate
is FlashAttention 1's, so that a plan of a long context is cautious. docs/planning.md says what the
constants are fitted on, and how far off they are.
"""
