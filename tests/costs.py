"""What the tests of each file start, and their CPU seconds: a plugin of pytest that .ci/run loads.

    python -m pytest -p tests.costs test_all.py                     compare with tests/costs.json
    python -m pytest -p tests.costs --record-costs test_all.py      write the new rows there

Ranks of the Pool and commands, which are forks, are equal in number on every machine. A session's
fixture counts for the file that needs it first.
"""
import json
import os
from collections import defaultdict
from contextlib import suppress
from pathlib import Path

from tests import commands, harness

RECORDED = Path(__file__).with_name("costs.json")


def cpu_seconds():
    """Of the processes of this session and of their ended children."""
    ticks = 0
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):             # it has ended
            fields = stat.read_text().rpartition(")")[2].split()
            if int(fields[3]) == os.getsid(0):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Costs:
    def __init__(self):
        self.rows = defaultdict(lambda: dict(ranks=0, commands=0, seconds=0))
        self.file = None
        self.count(harness.Pool, "run", "ranks", lambda pool, world, *_: world)
        self.count(commands.Command, "__init__", "commands", lambda *_: 1)

    def count(self, owner, method, name, many):
        original = getattr(owner, method)

        def counted(*args, **options):
            self.rows[self.file][name] += many(*args)
            return original(*args, **options)
        setattr(owner, method, counted)

    def pytest_runtest_logstart(self, nodeid):
        file = nodeid.partition("::")[0]
        if file != self.file:
            self.rows[self.file]["seconds"] += cpu_seconds()
            self.rows[file]["seconds"] -= cpu_seconds()
            self.file = file

    def pytest_sessionfinish(self, session):
        self.rows[self.file]["seconds"] += cpu_seconds()
        del self.rows[None]                 # the start and the collection
        recorded = json.loads(RECORDED.read_text())
        for file, row in self.rows.items():
            row["seconds"] = round(row["seconds"])
            before = recorded.get(file, dict.fromkeys(row, 0))
            print(f"\n{file}:", *(f"{row[name]} {name} ({before[name]})" for name in row), end="")
        if session.config.getoption("record_costs"):
            lines = [f"{json.dumps(file)}: {json.dumps(row)}"
                     for file, row in sorted((recorded | self.rows).items())]
            RECORDED.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def pytest_addoption(parser):
    parser.addoption("--record-costs", action="store_true", help="write tests/costs.json")


def pytest_configure(config):
    config.pluginmanager.register(Costs())
