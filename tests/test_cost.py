"""What a test costs is counted with the processes that it started, by module and under xdist too."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cost import IMPORTS, SUBJECTS, Cost, Meter, by_folder, compare, read, table

ROOT = Path(__file__).parent.parent
BUSY = "import time\nwhile time.process_time() < {s}: pass\n"
# A server that still runs when its module's first test ends, a child that is waited for, and a test that only waits.
TESTS = f'''
import subprocess, sys, threading, time
import pytest

@pytest.fixture(scope="module")
def server():
    process = subprocess.Popen([sys.executable, "-c", """{BUSY.format(s=0.4)}print(flush=True)
input()"""], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    process.stdout.readline()
    yield process
    process.communicate(b"\\n")

def test_server(server):
    pass

def test_child(server):
    subprocess.run([sys.executable, "-c", """{BUSY.format(s=0.5)}"""], check=True)

def test_waits():
    threading.Event().wait(0.3)
'''


@pytest.mark.parametrize("workers", [(), ("-n", "2", "--dist", "loadfile")], ids=["plain", "xdist"])
def test_each_test_and_each_fixture_of_a_module_has_its_cost(
    tmp_path: Path, workers: tuple[str, ...]
) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    (tmp_path / "pytest.ini").touch()
    ran = subprocess.run(
        [
            sys.executable, "-m", "pytest", str(tmp_path), "-p", "xdist", "-p", "tests.cost",
            "-p", "no:cacheprovider", "--cost-file", str(tmp_path / "cost.json"), *workers,
        ],
        cwd=ROOT, text=True, capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = read(str(tmp_path / "cost.json"))
    assert rows["test_it.py::[server]"].cpu >= 0.35
    assert rows["test_it.py::test_server"].cpu < 0.3
    assert rows["test_it.py::test_child"].cpu >= 0.45
    assert rows["test_it.py::test_waits"].cpu < 0.3 <= rows["test_it.py::test_waits"].wall
    assert rows[IMPORTS].cpu > 0
    total = sum(cost.cpu for cost in rows.values())
    assert f"{total:.1f} CPU seconds" in ran.stdout


def test_row_inside_another_is_charged_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [Cost(1, 10)]
    monkeypatch.setattr("tests.cost.used_so_far", lambda: clock[-1])
    meter = Meter("before")
    meter.seen = clock[-1]
    clock.append(Cost(2, 12))
    with meter.row("test"):
        clock.append(Cost(5, 20))
        with meter.row("fixture"):
            clock.append(Cost(9, 21))
        clock.append(Cost(9.5, 22))
        meter.charge()
        clock.append(Cost(8, 23))  # a process was lost with its parent
    assert meter.rows == {"before": Cost(1, 2), "test": Cost(3.5, 10), "fixture": Cost(4, 1)}


def test_table_has_the_dearest_the_folders_and_the_totals() -> None:
    rows = {
        "tests/a/test_x.py::test_dear": Cost(3, 4),
        "tests/a/test_x.py::test_slow": Cost(1, 9),
        "tests/b/test_y.py::[served]": Cost(2, 2),
    }
    lines = table(rows)
    by_wall = lines.index("   CPU s   wall s  the 40 dearest by wall")
    assert lines[1] == "    3.00     4.00  tests/a/test_x.py::test_dear"
    assert lines[by_wall + 1] == "    1.00     9.00  tests/a/test_x.py::test_slow"
    assert "    4.00    13.00  tests/a" in lines
    assert lines[-1] == "6.0 CPU seconds, 15.0 s of wall, 3 rows"
    assert by_folder({"[session]::[postgres]": Cost(1, 1)}) == {"[session]::[postgres]": Cost(1, 1)}


def test_two_runs_are_compared(tmp_path: Path) -> None:
    (tmp_path / "before.json").write_text(json.dumps({"a/t.py::x": [3, 4], "a/t.py::y": [1, 1]}))
    (tmp_path / "after.json").write_text(json.dumps({"a/t.py::x": [2, 3]}))
    lines = compare(read(str(tmp_path / "before.json")), read(str(tmp_path / "after.json")))
    assert "| a/t.py::x | 3.00 | 2.00 | 4.00 | 3.00 |" in lines
    assert "| a/t.py::y | 1.00 | gone | 1.00 | gone |" in lines
    assert "| a | 4.00 | 2.00 | 5.00 | 3.00 |" in lines
    assert lines[-1] == "CPU seconds: 4.0 before, 2.0 after."


def test_subjects_are_summed_by_file_and_have_files() -> None:
    shown = table({"tests/egress/a.py::one": Cost(1, 3), "tests/egress/a.py::two": Cost(1, 6)})
    at = next(number for number, line in enumerate(shown) if "sandboxes" in line)
    assert "3 s of wall on 3 workers" in shown[at]
    assert shown[at + 1].split() == ["2.00", "9.00", "tests/egress/a.py"]
    for beginning in (each for beginnings in SUBJECTS.values() for each in beginnings):
        assert [*ROOT.glob(f"{beginning}*")], beginning
