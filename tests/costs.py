"""CPU seconds, user and kernel, of each file and of the tests that take most: a plugin of pytest.

    python -m pytest -p tests.costs tests/test_zero.py

Ranks and commands count for their test, a fixture for the test that needs it first.
"""
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

SECONDS = {}        # test -> array (user, kernel)


def cpu_seconds():
    """(user, kernel) of the processes of this session and of their ended children."""
    ticks = np.zeros(2)
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):             # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                ticks += np.array(fields[11:15], float).reshape(2, 2).sum(0)
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    before = cpu_seconds()
    result = yield
    SECONDS[item.nodeid] = cpu_seconds() - before
    return result


def pytest_terminal_summary(terminalreporter):
    files = defaultdict(lambda: np.zeros(2))
    for test, seconds in SECONDS.items():
        files[test.partition("::")[0]] += seconds
    largest = sorted(SECONDS.items(), key=lambda row: -row[1].sum())
    terminalreporter.section("CPU seconds: user + kernel")
    for name, (user, kernel) in [*sorted(files.items()), *largest[:40]]:
        terminalreporter.write_line(f"{user:6.1f} + {kernel:5.1f}  {name}")
