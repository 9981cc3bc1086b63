"""A vLLM that Segue starts itself: a real process over a real socket, which is no vLLM (`vllm_program.py`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
from msgspec import structs

from segue.errors import Misconfigured
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands import engine_child
from segue_cli.commands.engine_child import BEST, EngineChild, with_engine
from segue_embedded.weights import find_weights
from tests.support import WAIT_S, served_process, until

ROOT = Path(__file__).parents[2]


@pytest.fixture
def port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """`vllm` on the path; this interpreter has none."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "vllm"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m tests.commands.vllm_program "$@"\n')
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return script


def asked(port: int, model: str = "good", *flags: str) -> Settings:
    settings = load_settings({"engine": "vllm"}, environment={})
    words = (f"--port={port}", "--port", str(port), *flags)
    return structs.replace(settings, model=(model,), engine_arg=words[1:])


def test_segue_starts_vllm_serves_with_it_and_stops_it(
    program: Path, port: int, tmp_path: Path
) -> None:
    flags = ["--engine", "vllm", "--model", "good", "--tokenizer", str(find_weights("smollm2"))]
    flags += ["--engine-arg=--port", f"--engine-arg={port}", "--engine-arg=--seed=7"]
    with served_process(*flags, cwd=tmp_path) as served:
        body = json.dumps({"model": "good", "input": "Hi", "store": False}).encode()
        request = Request(f"{served.url}/v1/responses", body, {"Content-Type": "application/json"})
        with urlopen(request, timeout=20) as answer:
            assert json.load(answer)["usage"]["output_tokens"] > 0
        assert served.stop() == 0
    words = (tmp_path / "state" / "segue" / f"vllm-{port}.log").read_text().splitlines()[0]
    assert " ".join(BEST) in words
    assert words.endswith(f"--port {port} --seed=7")
    assert "vLLM answers after" in "".join(served.printed)
    with socket.socket() as probe:
        assert probe.connect_ex(("127.0.0.1", port)) != 0


def children(pid: int) -> list[int]:
    return [*map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())]


def is_alive(pid: int) -> bool:
    with suppress(FileNotFoundError):
        return " Z " not in Path(f"/proc/{pid}/stat").read_text()
    return False


async def test_vllm_that_ends_by_itself_is_started_again_three_times(
    program: Path, port: int, caplog: pytest.LogCaptureFixture
) -> None:
    child = EngineChild(asked(port))
    child.start()
    assert child._process is not None
    (core,) = children(child._process.pid)
    try:
        # What is said of an end comes from a log that may be gone.
        child.log_path.unlink()
        for _ in range(3):
            process = child._process
            assert process is not None
            process.send_signal(signal.SIGKILL)
            await until(lambda last=process: child._process is not last)  # type: ignore[misc]
        assert child._process is not None
        child._process.send_signal(signal.SIGKILL)
        await until(lambda: not child._watcher.is_alive())
        assert "for the fourth time in ten minutes and is not started again" in caplog.text
        # It would hold the card, and the next vLLM would find no room there.
        assert not is_alive(core)
    finally:
        child.stop()


def test_vllm_that_has_ended_is_not_started_again_behind_a_server_that_stops(
    program: Path, port: int
) -> None:
    """It ends while the server does: whoever was to start it again is still about to."""
    child = EngineChild(asked(port))
    child.start()
    last = child._process
    child.stop()
    child._spawn()
    assert child._process is last


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_signal_while_vllm_loads_stops_it_too(
    program: Path, port: int, tmp_path: Path, number: int
) -> None:
    """As `systemctl stop` and Docker end it, minutes before there is a server."""
    flags = ["--model", "loading", "--engine-arg=--port", f"--engine-arg={port}"]
    command = [sys.executable, "-m", "segue_cli.cli", "serve", "--engine", "vllm", *flags]
    log = tmp_path / "state" / "segue" / f"vllm-{port}.log"
    segue = await asyncio.create_subprocess_exec(*command, cwd=tmp_path, stderr=subprocess.PIPE)
    await until(lambda: log.exists() and "loading in" in log.read_text())
    pid = int(log.read_text().split()[-1])
    segue.send_signal(number)
    _, said = await asyncio.wait_for(segue.communicate(), WAIT_S)
    try:
        # It would hold the port and the card.
        os.kill(pid, signal.SIGKILL)
        is_stopped = False
    except ProcessLookupError:
        is_stopped = True
    assert (segue.returncode, is_stopped) == (128 + number, True)
    assert b"Traceback" not in said


@pytest.mark.parametrize(
    "model, words",
    [("small-card", "The card is too small"), ("bad-flag", "It does not know one of its flags")],
)
def test_end_at_the_start_is_said_in_words(
    program: Path, port: int, model: str, words: str
) -> None:
    with pytest.raises(Misconfigured) as refused, with_engine(asked(port, model)):
        pass
    assert words in str(refused.value)
    assert f"vllm-{port}.log" in str(refused.value)


@pytest.mark.parametrize(
    "version, routes, named, plugins, has_scale_out",
    [
        ("0.32.0", ("segue", "theirs"), "", "segue,a_resolver,their_card", True),
        ("0.32.0", ("theirs",), "", "None", True),
        ("0.31.2", ("segue",), "segue,mine", "segue,mine", False),
        ("?", ("segue",), "", "None", False),
    ],
    ids=["ours", "without ours", "as the operator says", "unknown"],
)
def test_plugin_is_named_beside_those_that_vllm_loads_by_itself(
    program: Path,
    port: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    version: str,
    routes: Sequence[str],
    named: str,
    plugins: str,
    has_scale_out: bool,
) -> None:
    """VLLM_PLUGINS is a list of all that may be loaded: what drives a card would be missing."""
    site = tmp_path / "site"
    about = site / f"vllm-{version}.dist-info"
    about.mkdir(parents=True)
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    (about / "entry_points.txt").write_text(
        "[vllm.general_plugins]\na_resolver = a:b\n[vllm.platform_plugins]\ntheir_card = a:b\n"
        "[vllm.endpoint_plugins]\n" + "".join(f"{name} = a:b\n" for name in routes)
    )
    program.write_text(
        f"#!{sys.executable}\nimport sys\nfrom tests.commands import vllm_program\n"
        "sys.exit(vllm_program.main())\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}:{site}")
    if named:
        monkeypatch.setenv("VLLM_PLUGINS", named)
    with pytest.raises(Misconfigured), with_engine(asked(port, "bad-flag")):
        pass
    argv, said, *_ = (tmp_path / "state" / "segue" / f"vllm-{port}.log").read_text().splitlines()
    assert said == f"plugins: {plugins}"
    assert ("--enable-scale-out" in argv) == has_scale_out


def test_port_that_is_no_number_is_refused(program: Path) -> None:
    settings = structs.replace(asked(1), engine_arg=("--port=abc",))
    with pytest.raises(Misconfigured, match="--port abc"):
        EngineChild(settings)


def test_port_that_is_taken_is_named(program: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(Misconfigured, match=f"port {port}, which vLLM would take, is in use"):
            EngineChild(asked(port)).start()


def test_without_vllm_it_is_said_how_to_get_one(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(Misconfigured, match="vLLM is not installed here"):
        EngineChild(asked(port))


def test_flags_for_an_engine_that_runs_elsewhere_are_refused(port: int) -> None:
    settings = structs.replace(asked(port), engine_url=("http://127.0.0.1:1",))
    with (
        pytest.raises(Misconfigured, match="only an engine that Segue starts"),
        with_engine(settings),
    ):
        pass


def test_tokenizer_is_the_models_folder_or_where_the_hub_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    kept = tmp_path / "models--Qwen--Q" / "snapshots" / "1"
    kept.mkdir(parents=True)
    assert engine_child._tokenizer("Qwen/Q") == ""
    (kept / "tokenizer.json").write_text("{}")
    assert engine_child._tokenizer("Qwen/Q") == str(kept)
    assert engine_child._tokenizer(str(tmp_path)) == str(tmp_path)
