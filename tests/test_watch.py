"""A run with a test that hangs and a worker that dies says which, and ends."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
HANGS = "import time\ndef test_hangs():\n    time.sleep(600)\n"
DIES = """import os, signal, subprocess
def test_dies():
    subprocess.Popen(["sleep", "600"])
    os.kill(os.getpid(), signal.SIGKILL)
"""
CONFTEST = 'pytest_plugins = ["tests.watch"]\n'


def bounded(minutes: float, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.bounded", str(minutes), *command],
        cwd=ROOT, text=True, capture_output=True, timeout=60, check=False,
        env={**os.environ, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def test_run_names_a_test_that_hangs_and_ends_when_a_worker_dies(tmp_path: Path) -> None:
    for name, text in {"test_1": HANGS, "test_2": DIES, "conftest": CONFTEST}.items():
        (tmp_path / f"{name}.py").write_text(text)
    (tmp_path / "pytest.ini").touch()
    # -s: what a test starts holds the output of the run open
    ran = bounded(
        1, sys.executable, "-m", "pytest", str(tmp_path), "-p", "xdist", "-p", "pytest_timeout",
        "-p", "no:cacheprovider", "-s", "-n", "1", "--dist", "loadfile", "--max-worker-restart", "0",
        "--timeout", "0.5", "--timeout-method", "signal",
    )  # fmt: skip
    assert ran.returncode == 1, ran.stdout + ran.stderr
    lines = ran.stdout.splitlines()
    assert (
        "FAILED test_1.py::test_hangs in call: Failed: Timeout (>0.5s) from pytest-timeout."
        in lines
    )
    assert (
        "FAILED test_2.py::test_dies in ???: worker 'gw0' crashed while running 'test_2.py::test_dies'"
        in lines
    )
    assert "a worker died in test_2.py::test_dies" in lines[-2]
    assert lines[-1].startswith("left behind by a test, ended: ")


def test_run_over_its_time_is_ended_with_everything_that_it_started() -> None:
    ran = bounded(0.005, "sh", "-c", "sleep 600 & exec sleep 600")
    assert ran.returncode == 128 + 15
    assert ran.stdout.splitlines()[1] == "not ended after 0.005 minutes"
    assert "sleep 600" in ran.stdout.splitlines()[2]
