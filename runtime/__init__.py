"""What a run on real machines needs beside the training, one concern a file.

Some files stand below the book: data.py, checkpoint.py, train.py and sample.py call them, and they
know nothing of a run. tests/test_structure.py holds them to it:

    commandline, options, other_names, model_names      flags and their mistakes
    sample_flags                        those of sample.py
    sample_text                         its prompts and conversations, and what it prints
    batch_ramp                          the sizes of batches that grow
    processes, devices, cpu_threads     ranks, and what they compute on
    checkpoint_files, flops             files of checkpoints; what a model computes

The others stand above it. Their argument `run` is a train.Run, but none imports train.py:

    startup, checks, directory          where a run begins, and what is refused
    run_state                           what a run's checkpoints hold: save, restore, go back
    checkpoint_writer, streamed_tensors the thread that writes checkpoints, tensor by tensor
    loader                              the rows of the batches that a rank reads
    plain_run                           what train.py --plain needs beside training
    monitors                            what watches a run: divergence, rollback, flipped_bits,
                                        and console with the log
    evaluation, eval_answers            the validation loss; answers that are right
    signals, start_follow               the end by a signal; dashboards

Programs import something from here before numpy and torch, so that a Python without the packages
that they need, such as the system's, ends in one line.
"""
import importlib.util
import sys
from pathlib import Path

program = Path(sys.argv[0]).name
needed = ["numpy"]
if program != "data.py":
    needed.append("torch")
if program in ("data.py", "sample.py"):
    needed.append("tiktoken")
missing = [name for name in needed if importlib.util.find_spec(name) is None]
if missing:
    print(f"{sys.executable} does not have {' and '.join(missing)}: activate the environment that "
          f"does, as `. .venv/bin/activate` (README.md), or `pip install -r requirements.txt`",
          file=sys.stderr)
    sys.exit(2)
