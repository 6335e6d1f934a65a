"""What test_all.py does not need to show: the mechanisms of each file, options together, data sets,
the files of a run, the runtime, faults, the branches for GPUs, the tools, the README. harness.py
starts ranks and programs for all of them.

    python -m pytest                    # test_all.py and these
    python -m pytest tests -m slow"""
