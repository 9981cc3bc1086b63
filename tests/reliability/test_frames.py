"""Hundreds of scripts of frames that nobody foresaw, with several models, stores and limits behind the socket."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings

from tests.dialects.templates import folder
from tests.frames import Script, answered, every_place, scripts
from tests.scenarios.test_chained_equals_full import SCRIPT
from tests.scenarios.test_frames import TOKENS_PER_S
from tests.scenarios.test_guards import RULES, configured
from tests.support import Served, serving

pytestmark = pytest.mark.reliability

SCRIPTS = 400
STEPS_A_SOCKET = 200
# What stands behind the socket, made where a test has its files.
BEHIND: dict[str, Callable[[Path], dict[str, Any]]] = {
    "scripted": lambda _: {},
    "small context": lambda _: {"context_tokens": 300},
    "sqlite": lambda path: {"store": f"sqlite:///{path}/s.db"},
    "guarded": lambda path: {"guard": ["rules"], **configured(path, RULES)},
    "calls and reasoning": lambda path: {"script": _script(path)},
    "qwen3": lambda path: _model("qwen3", "qwen3", path),
    "llama3": lambda path: _model("llama3_2", "llama3", path),
    "template": lambda path: _model("qwen3", "template", path),
}


def _script(path: Path) -> str:
    (path / "script.json").write_text(json.dumps(SCRIPT))
    return str(path / "script.json")


def _model(name: str, dialect: str, path: Path) -> dict[str, Any]:
    return {"tokenizer": str(folder(name)), "dialect": dialect, "script": _script(path)}


@contextmanager
def served_by(runner: asyncio.Runner, flags: dict[str, Any]) -> Iterator[Served]:
    """A server that lives on this loop while something runs on it."""
    server = serving(**flags)
    yield runner.run(server.__aenter__())
    runner.run(server.__aexit__(None, None, None))


def check_quiet(caplog: pytest.LogCaptureFixture) -> None:
    """Nothing that a client sends is an error of ours."""
    loud = [one for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info]
    assert not loud, [one.getMessage() for one in loud]


@pytest.mark.parametrize("behind", ["scripted", "guarded"])
def test_every_place_takes_or_refuses_every_odd_value(
    behind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    steps = tuple(every_place())
    with asyncio.Runner() as runner, served_by(runner, BEHIND[behind](tmp_path)) as served:
        for start in range(0, len(steps), STEPS_A_SOCKET):
            runner.run(answered(served, steps[start : start + STEPS_A_SOCKET]))
    check_quiet(caplog)


@pytest.mark.parametrize("behind", BEHIND)
def test_every_frame_is_answered_and_every_socket_goes_on(
    behind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    @settings(
        max_examples=SCRIPTS,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(script=scripts)
    def answer_all(script: Script) -> None:
        runner.run(answered(served, script))

    with (
        asyncio.Runner() as runner,
        served_by(runner, {"tps": TOKENS_PER_S, **BEHIND[behind](tmp_path)}) as served,
    ):
        answer_all()
    check_quiet(caplog)
