"""One question from a command line or a pipe: only the answer on standard output, and a status for scripts."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support import WAIT_S, ServedProcess, served_process


async def ask(*words: str, piped: str = "") -> tuple[int, str, str]:
    """The command with a pipe; its exit status, standard output and standard error."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "segue_cli.cli", "ask", *words),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    async with asyncio.timeout(WAIT_S):
        out, err = await process.communicate(piped.encode())
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[ServedProcess]:
    script = tmp_path / "script.json"
    turn = {"reasoning": "A fruit?", "text": "An apple [not markup]."}
    script.write_text(json.dumps({"turns": [turn]}))
    with served_process("--script", str(script), "--store", "memory", cwd=tmp_path) as served:
        yield served


async def test_answer_is_all_of_standard_output(served: ServedProcess) -> None:
    code, out, err = await ask("--url", served.url, "Name", "a fruit.")
    assert (code, out) == (0, "An apple [not markup].\n")
    assert f"scripted at {served.url}" in err
    assert "A fruit?" in err
    assert "tokens in" in err


async def test_question_and_pipe_are_one_message_and_json_is_the_whole_response(
    served: ServedProcess,
) -> None:
    code, out, _ = await ask("--url", served.url, "--json", piped="Name a fruit.")
    piped = json.loads(out)
    assert (code, piped["status"], piped["store"]) == (0, "completed", False)
    assert piped["output"][-1]["content"][0]["text"] == "An apple [not markup]."

    _, out, _ = await ask("--url", served.url, "--json", "Name a fruit.", piped="Or two.")
    assert json.loads(out)["usage"]["input_tokens"] > piped["usage"]["input_tokens"]


async def test_status_says_whether_there_is_a_whole_answer(
    served: ServedProcess, tmp_path: Path
) -> None:
    for words, told in (
        ((), "nothing to ask"),
        (("--model", "nope", "Hi"), "Served: scripted"),
        (("--url", "http://127.0.0.1:9", "Hi"), "no answer from a server"),
    ):
        code, out, err = await ask(*("--url", served.url), *words)
        assert (code, out) == (2, "")
        assert told in err
        assert "--model" not in err, "a name of a model does not help here"
    long = ("--context-tokens", "64", "--store", "memory")
    with served_process(*long, cwd=tmp_path) as small:
        for more in ((), ("--json",)):
            code, out, err = await ask("--url", small.url, "word " * 200, *more)
            assert (code, out.strip()) == (1, "")
            assert "context window" in err
