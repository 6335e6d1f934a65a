"""What a run on real machines needs beside the training, one concern a file. It stands on the book
and on base/. train.py and sample.py call it. An argument `run` is a train.Run, but no file here
imports train.py:

    startup, directory                  where a run begins
    checks                              what is refused
    run_state                           what a run's checkpoints hold: save, restore, go back
    checkpoint_writer                   the thread that writes checkpoints, tensor by tensor
    folder_writer                       a checkpoint as a folder: each rank writes its part
    loader                              the rows of the batches that a rank reads
    plain_run                           what train.py --plain needs beside training
    divergence, rollback, flipped_bits  what watches a run, and takes it back to a checkpoint
    step_stats                          sums over all ranks: the numbers of a step
    run_log, console                    metrics.jsonl and the steps; what else a run prints
    evaluation                          the validation loss
    dashboards                          TensorBoard and Weights & Biases, for --log
    signals                             the end by a signal
    samples, chat                       prompts and conversations of sample.py, and what it prints
"""
