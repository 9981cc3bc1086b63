"""How does a test run end in time, with everything that it started?

`python -m tests.bounded MINUTES COMMAND ...` runs a command. When the time is over it asks the command to end, by
SIGTERM, and soon after insists. Processes that lost their parent become children of this one (Linux): what is left of
them is ended too, else a server of a dead test worker would hold the pipe that the command writes to open for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
INSIST_S = 60
END_S = 10


def adopt_orphans() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def descendants() -> list[int]:
    """The processes below this one, those that have ended and wait for their parent left out."""
    parents: dict[int, int] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = file.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if state != "Z":
            parents[int(file.parent.name)] = int(parent)
    found = {os.getpid()}
    while more := {one for one, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {os.getpid()})


def words(process: int) -> str:
    try:
        return Path(f"/proc/{process}/cmdline").read_text().replace("\0", " ")[:100].strip()
    except OSError:
        return "?"


def end_all(why: str) -> None:
    """End every process below this one, and what they start meanwhile."""
    named: set[int] = set()
    until = time.monotonic() + END_S
    while (left := descendants()) and time.monotonic() < until:
        for process in left:
            if process not in named:
                print(f"{why}: {process} {words(process)}", flush=True)
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        named |= set(left)
        time.sleep(0.05)


def run(minutes: float, command: list[str]) -> int:
    adopt_orphans()
    child = os.posix_spawnp(command[0], command, os.environ)

    def ask(*_: object) -> None:
        print(f"\nnot ended after {minutes:g} minutes", flush=True)
        signal.signal(signal.SIGALRM, lambda *_: end_all("still running, ended"))
        signal.alarm(INSIST_S)
        os.kill(child, signal.SIGTERM)

    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGTERM))
    signal.signal(signal.SIGINT, lambda *_: None)  # a terminal sends it to the command as well
    signal.signal(signal.SIGALRM, ask)
    signal.setitimer(signal.ITIMER_REAL, minutes * 60)
    process = status = 0
    while process != child:  # the others are orphans that have ended
        process, status = os.wait()
    signal.alarm(0)
    end_all("left behind by a test, ended")
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
