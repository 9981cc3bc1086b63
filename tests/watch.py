"""What becomes of a test that hangs, and of a run whose worker dies?

A test that is over its time fails with its stack, by a signal, and the run goes on. The signal comes again until it is
through, and what the test puts away has that time again. A test that hangs where no signal helps (in C) ends its worker
`HARD_S` later. A worker that dies ends the run: xdist would give the same test to the next worker, and so on. Each
failure is printed when it happens, and a run that is ended from outside (SIGTERM) says which tests were running.
"""

from __future__ import annotations

import asyncio
import faulthandler
import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import pytest

HARD_S = 30
AGAIN_S = 5

_settings = pytest.StashKey[Any]()
_stderr = pytest.StashKey[int]()


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)
    if config.getoption("dist", "no") != "no":
        config.pluginmanager.register(Watch(config))


def pytest_unconfigure(config: pytest.Config) -> None:
    os.close(config.stash[_stderr])


def pytest_collection_finish() -> None:
    """Nine thousand tests and their modules stay to the end: no collection of garbage looks at them again."""
    freeze_heap()


def freeze_heap() -> None:
    """Collect what is garbage now; what is left is looked at no more."""
    gc.unfreeze()
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_timeout_set_timer(item: pytest.Item, settings: Any) -> Iterator[Any]:
    result = yield
    item.stash[_settings] = settings
    fail = signal.getsignal(signal.SIGALRM)
    if callable(fail):

        def print_and_fail(*given: Any) -> None:
            __tracebackhide__ = True
            print_tasks()
            fail(*given)

        signal.signal(signal.SIGALRM, print_and_fail)
        signal.setitimer(signal.ITIMER_REAL, settings.timeout, AGAIN_S)
    end_s = settings.timeout + HARD_S
    faulthandler.dump_traceback_later(end_s, file=item.config.stash[_stderr], exit=True)
    return result


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item: pytest.Item) -> Iterator[Any]:
    if settings := item.stash.get(_settings, None):
        item.config.hook.pytest_timeout_set_timer(item=item, settings=settings)
    return (yield)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[Any]:
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


def print_tasks() -> None:
    """Where each task of the loop waits: the stack of the thread says only that it waits."""
    with suppress(RuntimeError):
        for task in asyncio.all_tasks():
            task.print_stack(file=sys.stdout)


class Watch:
    """What the process that hands out the tests prints while they run."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.running: dict[str, float] = {}
        signal.signal(signal.SIGTERM, self.on_end)

    def say(self, line: str) -> None:
        reporter = self.config.pluginmanager.getplugin("terminalreporter")
        reporter.write_line(f"\n{line}")
        reporter.flush()

    def on_end(self, *_: object) -> None:
        for name, began in self.running.items():
            self.say(f"RUNNING {name} for {time.monotonic() - began:.0f} s")
        pytest.exit("the run was ended from outside", returncode=1)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        self.running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = crash.message if crash else str(report.longrepr)
            first = reason.strip().partition("\n")[0]
            self.say(f"FAILED {report.nodeid} in {report.when}: {first}")

    def pytest_handlecrashitem(self, crashitem: str, report: pytest.TestReport) -> None:
        self.config.hook.pytest_runtest_logreport(report=report)
        pytest.exit(f"a worker died in {crashitem}; its last words are above", returncode=1)
