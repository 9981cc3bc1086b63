"""Whatever a socket is sent, each frame is answered once and the connection goes on: the corpus, and a few new scripts.

`tests/reliability/test_frames.py` is the long run.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from tests.frames import Script, answered, read_script, scripts, write_script
from tests.support import Served, serving

# Slow enough to be steered.
TOKENS_PER_S = 3_000
CORPUS = sorted((Path(__file__).parents[1] / "corpus" / "frames").glob("*.txt"))


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as loop:
        yield loop


@pytest.fixture(scope="module")
def served(runner: asyncio.Runner) -> Iterator[Served]:
    server = serving(tps=TOKENS_PER_S)
    yield runner.run(server.__aenter__())
    runner.run(server.__aexit__(None, None, None))


@pytest.fixture(autouse=True)
def quiet_log(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Nothing that a client sends is an error of ours."""
    caplog.set_level(logging.INFO)
    yield
    loud = [one for one in caplog.records if one.levelno >= logging.ERROR or one.exc_info]
    assert not loud, [one.getMessage() for one in loud]


@pytest.mark.parametrize("path", CORPUS, ids=lambda path: path.stem)
def test_frames_of_the_corpus_are_answered(
    runner: asyncio.Runner, served: Served, path: Path
) -> None:
    runner.run(answered(served, read_script(path.read_bytes())))


@settings(
    max_examples=60,
    derandomize=True,
    database=None,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    suppress_health_check=list(HealthCheck),
)
@given(script=scripts)
def test_frames_that_nobody_foresaw_are_answered(
    runner: asyncio.Runner, served: Served, script: Script
) -> None:
    assert read_script(write_script(script)) == script
    runner.run(answered(served, script))
