"""What does each test cost?

`make test-cost` runs the tests with this plugin (`-p tests.cost`). It counts the CPU seconds and the wall time of each
test, the processes that the test started included, those that still run too. What sets up a fixture of a module or of
the session is a row of its own (`file::[fixture]`), and so is what a worker does before its first test. At the end it
prints the dearest rows by CPU and by wall, the sum of each folder and subject, and the totals; `--cost-file=FILE` keeps
all rows as JSON, `python -m tests.cost FILE` prints them again, and `python -m tests.cost BEFORE AFTER` compares two.

The cost of a server that several tests share is charged to the test that runs while the server works. A process that
outlives its parent is lost from sight: its CPU is counted only as long as its parent lives. Children that still run are
seen on Linux alone.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

DEAREST = 40
# What belongs together in several folders: how the paths of its files begin.
SUBJECTS = {
    "sandboxes, files and skills": (
        *(
            f"tests/{room}/"
            for room in ("sandbox", "isolation", "escapes", "egress", "files", "bundles")
        ),
        *(f"tests/scenarios/test_{name}" for name in ("shell", "code_interpreter", "containers")),
        *(f"tests/scenarios/test_{name}" for name in ("files", "skills")),
        *(
            "tests/contracts/test_skill_rows",
            "tests/dashboard/test_containers",
            "tests/stores/test_sql_files",
        ),
    )
}
# On how many workers the time of a subject is shown.
WORKERS = 3
TICKS_A_SECOND = os.sysconf("SC_CLK_TCK")
IMPORTS = "[start, imports and collection]"
CONTROLLER = "[the process that hands out the tests]"

_meter = pytest.StashKey["Meter"]()


class Cost(NamedTuple):
    """Seconds."""

    cpu: float
    wall: float

    def plus(self, other: Cost) -> Cost:
        return Cost(self.cpu + other.cpu, self.wall + other.wall)


NOTHING = Cost(0, 0)


def living_children(process: int) -> list[int]:
    """The children of a process, by the lists that the kernel keeps of each of its threads."""
    found: list[int] = []
    try:
        for thread in os.listdir(f"/proc/{process}/task"):
            listed = Path(f"/proc/{process}/task/{thread}/children").read_text()
            found += map(int, listed.split())
    except OSError:
        pass  # the process has ended, or the system has no such lists
    return found


def living_cpu_s(process: int) -> float:
    """What the descendants of a process have used so far, with those of their own children that have ended."""
    total = 0.0
    for child in living_children(process):
        try:
            fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        # utime, stime, cutime and cstime: fields 14 to 17 of proc(5), counted from the state
        total += sum(map(int, fields[11:15])) / TICKS_A_SECOND + living_cpu_s(child)
    return total


def used_so_far() -> Cost:
    """By this process and everything below it."""
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    ended_s = ended.ru_utime + ended.ru_stime
    return Cost(time.process_time() + ended_s + living_cpu_s(os.getpid()), time.perf_counter())


class Meter:
    """Charges what is used to the row that is open; a row may be opened inside another one."""

    def __init__(self, outermost: str) -> None:
        self.rows: dict[str, Cost] = {}
        self.open = [outermost]
        # the CPU from the start of the process on, the wall time from here
        self.seen = Cost(0, time.perf_counter())

    def charge(self) -> None:
        used = used_so_far()
        # A process that lost its parent takes what it used out of sight: that is no cost below zero.
        new = Cost(max(0, used.cpu - self.seen.cpu), used.wall - self.seen.wall)
        self.seen = used
        row = self.open[-1]
        self.rows[row] = self.rows.get(row, NOTHING).plus(new)

    @contextmanager
    def row(self, name: str) -> Iterator[None]:
        self.charge()
        self.open.append(name)
        try:
            yield
        finally:
            self.charge()
            self.open.pop()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost-file", help="keep the cost of each test as JSON here")


def pytest_configure(config: pytest.Config) -> None:
    has_workers = config.getoption("dist", "no") != "no"
    config.stash[_meter] = Meter(CONTROLLER if has_workers else IMPORTS)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    with item.config.stash[_meter].row(item.nodeid):
        return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_fixture_setup(fixturedef: Any, request: pytest.FixtureRequest) -> Iterator[Any]:
    if fixturedef.scope == "function":
        return (yield)
    module = request.node.nodeid if fixturedef.scope == "module" else f"[{fixturedef.scope}]"
    with request.config.stash[_meter].row(f"{module}::[{fixturedef.argname}]"):
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    meter = session.config.stash[_meter]
    meter.charge()
    if hasattr(session.config, "workeroutput"):
        session.config.workeroutput["cost"] = {n: tuple(cost) for n, cost in meter.rows.items()}


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A worker of xdist has ended: its rows are added to those of the process that hands out the tests."""
    rows = node.config.stash[_meter].rows
    for name, cost in getattr(node, "workeroutput", {}).get("cost", {}).items():
        rows[name] = rows.get(name, NOTHING).plus(Cost(*cost))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = config.stash[_meter].rows
    if CONTROLLER in rows:  # the workers, which are its children, have rows of their own
        rows[CONTROLLER] = Cost(time.process_time(), rows[CONTROLLER].wall)
    if file := config.getoption("--cost-file"):
        Path(file).write_text(json.dumps(rows, indent=0))
    terminalreporter.section("what the tests cost")
    for line in table(rows):
        terminalreporter.write_line(line)


def table(rows: Mapping[str, Cost]) -> list[str]:
    """The dearest by CPU and by wall, the folders, and the totals."""
    wall_of_all = rows.get(CONTROLLER, NOTHING).wall or sum(cost.wall for cost in rows.values())
    tests = {name: cost for name, cost in rows.items() if name != CONTROLLER}
    lines = [f"   CPU s   wall s  the {DEAREST} dearest by CPU"]
    lines += map(_line, sorted(rows.items(), key=lambda row: -row[1].cpu)[:DEAREST])
    lines += ["", f"   CPU s   wall s  the {DEAREST} dearest by wall"]
    lines += map(_line, sorted(tests.items(), key=lambda row: -row[1].wall)[:DEAREST])
    lines += ["", "   CPU s   wall s  folder"]
    lines += map(_line, sorted(by_folder(rows).items(), key=lambda row: -row[1].cpu))
    for subject, beginnings in SUBJECTS.items():
        files = {n: c for n, c in by_file(rows).items() if n.startswith(beginnings)}
        whole = sum(cost.wall for cost in files.values()) / WORKERS
        if files:
            lines += [
                "",
                f"   CPU s   wall s  {subject}: {whole:.0f} s of wall on {WORKERS} workers",
            ]
        lines += map(_line, sorted(files.items(), key=lambda row: -row[1].wall))
    cpu = sum(cost.cpu for cost in rows.values())
    return [*lines, "", f"{cpu:.1f} CPU seconds, {wall_of_all:.1f} s of wall, {len(rows)} rows"]


def by_file(rows: Mapping[str, Cost]) -> dict[str, Cost]:
    files: dict[str, Cost] = {}
    for name, cost in rows.items():
        file = name if name.startswith("[") else name.partition("::")[0]
        files[file] = files.get(file, NOTHING).plus(cost)
    return files


def by_folder(rows: Mapping[str, Cost]) -> dict[str, Cost]:
    folders: dict[str, Cost] = {}
    for name, cost in by_file(rows).items():
        folder = name if name.startswith("[") else str(Path(name).parent)
        folders[folder] = folders.get(folder, NOTHING).plus(cost)
    return folders


def _line(row: tuple[str, Cost]) -> str:
    name, cost = row
    return f"{cost.cpu:8.2f} {cost.wall:8.2f}  {name}"


def compare(before: Mapping[str, Cost], after: Mapping[str, Cost]) -> list[str]:
    """Markdown: the dearest rows of before, and what they cost now; folders; totals."""
    names = sorted(before, key=lambda name: -before[name].cpu)[:DEAREST]
    dearest = [(name, before[name], after.get(name)) for name in names]
    old, new = by_folder(before), by_folder(after)
    folders = [(name, old.get(name, NOTHING), new.get(name)) for name in sorted(old | new)]
    sums = [(name, old_sum, new_sum) for name, old_sum, new_sum in folders if old_sum != new_sum]
    totals = [sum(cost.cpu for cost in rows.values()) for rows in (before, after)]
    head = "| {} | CPU s before | after | wall s before | after |\n|---|---|---|---|---|"
    return [
        head.format("row"),
        *map(_compared, dearest),
        "",
        head.format("folder"),
        *map(_compared, sums),
        "",
        f"CPU seconds: {totals[0]:.1f} before, {totals[1]:.1f} after.",
    ]


def _compared(row: tuple[str, Cost, Cost | None]) -> str:
    name, old, new = row
    cpu, wall = (f"{new.cpu:.2f}", f"{new.wall:.2f}") if new else ("gone", "gone")
    return f"| {name} | {old.cpu:.2f} | {cpu} | {old.wall:.2f} | {wall} |"


def read(file: str) -> dict[str, Cost]:
    return {name: Cost(*cost) for name, cost in json.loads(Path(file).read_text()).items()}


def main(files: Sequence[str]) -> None:
    print("\n".join(compare(*map(read, files)) if len(files) > 1 else table(read(*files))))


if __name__ == "__main__":
    main(sys.argv[1:])
