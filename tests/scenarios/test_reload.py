"""A server is looked at, reloaded and stopped while it works: `segue status`, `segue reload`, SIGHUP, `segue stop`.

The commands run as an operator types them, against a `segue serve` with two workers and FAKE chat endpoints as engines.
"""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from segue.server.control import control_path
from segue_cli import cli
from tests.engines.fakes.chat import FakeChat, delta, end
from tests.engines.fakes.server import Body
from tests.support import ServedProcess, fetch, served_process, until, wire

# Each request is a connection of its own, which the kernel gives to either worker: so many reach both.
TRIES = 12


def speaks(word: str) -> list[Body]:
    return [delta(content=f"{word} "), delta(content="goes on"), end()]


def configure(path: Path, models: Mapping[str, tuple[str, ...]], *more: str) -> None:
    """A file with these models and the addresses of their engines."""
    tables = [
        f'[[models]]\nname = "{name}"\nengine_url = {json.dumps(urls)}\n'
        for name, urls in models.items()
    ]
    path.write_text("\n".join(['engine = "chat"', *more, *tables]))


class Terminal:
    """Runs commands against one server, in a thread: the engines of the test go on meanwhile."""

    def __init__(self, served: ServedProcess, capsys: pytest.CaptureFixture[str]) -> None:
        self._url = served.url
        self._capsys = capsys

    async def run(self, *words: str) -> tuple[int, str]:
        self._capsys.readouterr()
        status = await asyncio.to_thread(cli.main, [*words, "--url", self._url])
        printed = self._capsys.readouterr()
        return status, printed.out + printed.err


async def ask(served: ServedProcess, model: str) -> dict[str, Any]:
    body = {"model": model, "input": "x"}
    return dict((await fetch(served, "POST", "/v1/responses", body)).json)


def text_of(response: Mapping[str, Any]) -> str:
    return str(response["output"][0]["content"][0]["text"])


@pytest.mark.timeout(100)
async def test_operator_reloads_and_stops_a_server_with_two_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "segue.toml"
    async with FakeChat(events=speaks("old")) as old, FakeChat(events=speaks("new")) as new:
        configure(file, {"first": (old.url,)})
        flags = ("--config", str(file), "--workers", "2", "--engine", "chat")
        with ExitStack() as stack:
            # In a thread, so that the engines can answer when the workers ask about them.
            serving = served_process(*flags, cwd=tmp_path)
            served = await asyncio.to_thread(stack.enter_context, serving)
            terminal = Terminal(served, capsys)
            await see_status(terminal, served)
            async with wire(served) as socket:
                await see_replica_removed(terminal, served, file, (old, new), socket)
            await see_bad_file_refused(terminal, served, file, new.url)
            await see_signal_obeyed(terminal, served, file, (old, new))
            await see_drain(terminal, served, file, (old, new))
            await see_stop(terminal, served, old)


async def see_status(terminal: Terminal, served: ServedProcess) -> None:
    status, printed = await terminal.run("status", "--json")
    found = json.loads(printed)
    assert (status, found["is_ready"], found["pid"]) == (0, True, served.process.pid)
    assert len({one["pid"] for one in found["workers"]}) == 2
    assert [one["models"] for one in found["workers"]] == [["first"]] * 2
    status, printed = await terminal.run("status")
    assert status == 0
    assert f"process      {served.process.pid}" in printed


async def see_replica_removed(
    terminal: Terminal,
    served: ServedProcess,
    file: Path,
    engines: tuple[FakeChat, FakeChat],
    socket: Any,
) -> None:
    """A turn streams at the old replica while that is removed, and a model is added."""
    old, new = engines
    old.hold_at = 1
    await socket.create(model="first", input="x")
    async with asyncio.timeout(10):
        await old.held.wait()
    configure(
        file,
        {"first": (new.url,), "second": (new.url,)},
        'log_level = "debug"',
        "connections_max = 50",
    )
    status, printed = await terminal.run("reload")
    assert status == 0
    assert "model second (added)" in printed
    assert "model first (engine_url)" in printed
    assert "log_level" in printed
    assert "needs a restart: connections_max" in printed
    for _ in range(TRIES):
        assert text_of(await ask(served, "first")) == "new goes on"
        assert text_of(await ask(served, "second")) == "new goes on"
    old.gate.set()
    ended = (await socket.events())[-1]
    assert ended["type"] == "response.completed"
    assert text_of(ended["response"]) == "old goes on"
    # The same connection goes on with the new engine, and knows the turn of the old one.
    after = await socket.turn(
        model="first", input="y", previous_response_id=ended["response"]["id"]
    )
    assert text_of(after["response"]) == "new goes on"


async def see_bad_file_refused(
    terminal: Terminal, served: ServedProcess, file: Path, url: str
) -> None:
    for models, more, reason in (
        ({}, "port = ", "is not TOML"),
        ({"third": (url,)}, "prot = 1", "prot"),
        ({"third": (url,), "fourth": ()}, "", "engine_url"),
    ):
        configure(file, models, more)
        status, printed = await terminal.run("reload")
        assert status == 2
        assert "nothing was changed" in printed
        assert reason in printed
    listed = [await fetch(served, "GET", "/v1/models") for _ in range(TRIES)]
    assert {tuple(one["id"] for one in each.json["data"]) for each in listed} == {
        ("first", "second")
    }


async def see_signal_obeyed(
    terminal: Terminal, served: ServedProcess, file: Path, engines: tuple[FakeChat, FakeChat]
) -> None:
    """SIGHUP does the same, a replica that returns is used again, and one that does not answer is named."""
    old, _ = engines
    configure(file, {"first": (old.url,)})
    served.process.send_signal(signal.SIGHUP)
    await until(lambda: "model second (removed)" in "".join(served.printed))
    for _ in range(TRIES):
        assert text_of(await ask(served, "first")) == "old goes on"
        assert (await ask(served, "second"))["error"]["code"] == "model_not_found"
    configure(file, {"first": (old.url, "http://127.0.0.1:1")})
    _, printed = await terminal.run("reload")
    assert "these engines do not answer: http://127.0.0.1:1\n" in printed
    configure(file, {"first": (old.url,)})
    assert "warning" not in (await terminal.run("reload"))[1]


async def see_drain(
    terminal: Terminal, served: ServedProcess, file: Path, engines: tuple[FakeChat, FakeChat]
) -> None:
    """A turn streams at a replica that is drained: it ends there, all others go elsewhere, until it is returned."""
    old, new = engines
    configure(file, {"first": (old.url,)})
    assert (await terminal.run("reload"))[0] == 0
    status, printed = await terminal.run("engines", "drain", old.url)
    assert (status, "--force" in printed) == (2, True), "the last one"
    assert (await terminal.run("engines", "drain", "http://127.0.0.1:1"))[0] == 2
    old.gate.clear()
    old.held.clear()
    running = asyncio.create_task(ask(served, "first"))
    async with asyncio.timeout(10):
        await old.held.wait()
    configure(file, {"first": (old.url, new.url)})
    assert (await terminal.run("reload"))[0] == 0
    status, printed = await terminal.run("engines", "drain", old.url, "--wait", "0.1", "--json")
    assert (status, "1 responses still run" in printed) == (1, True)
    found = json.loads(printed[printed.index("{") : printed.rindex("}") + 1])
    assert (found["workers"], found["answered"]) == (2, 2)
    rows = {one["name"]: (one["is_drained"], one["running"]) for one in found["engines"]}
    assert rows == {old.url: (True, 1), new.url: (False, 0)}
    assert f"{old.url} is drained until all servers" in printed
    draining = asyncio.create_task(terminal.run("engines", "drain", old.url))
    # New settings do not end it, and models that they add know of it.
    configure(file, {"first": (old.url, new.url), "second": (old.url, new.url)})
    reloads = "".join(served.printed).count("settings reloaded")
    served.process.send_signal(signal.SIGHUP)
    await until(lambda: "".join(served.printed).count("settings reloaded") > reloads)
    for _ in range(TRIES):
        assert text_of(await ask(served, "first")) == "new goes on"
        assert text_of(await ask(served, "second")) == "new goes on"
    assert not draining.done()
    old.gate.set()
    assert text_of(await running) == "old goes on"
    assert (await draining)[0] == 0
    assert f"{old.url}, drained, 0 running" in (await terminal.run("status"))[1]
    status, printed = await terminal.run("engines", "drain", new.url)
    assert (status, "no other engine of first, second is up" in printed) == (2, True)
    assert (await terminal.run("engines", "drain", new.url, "--force"))[0] == 0
    assert "drained by the operator" in (await ask(served, "first"))["error"]["message"]
    for url in (old.url, new.url):
        status, printed = await terminal.run("engines", "return", url.removeprefix("http://"))
        assert (status, f"{url}  up " in printed) == (0, True)
    assert text_of(await ask(served, "first")) in ("old goes on", "new goes on")
    await see_drained_by_settings(terminal, served, file, engines)
    configure(file, {"first": (old.url,)})
    assert (await terminal.run("reload"))[0] == 0


async def see_drained_by_settings(
    terminal: Terminal, served: ServedProcess, file: Path, engines: tuple[FakeChat, FakeChat]
) -> None:
    """A replica that the settings take out of service; a later order holds until the settings change again."""
    old, new = engines
    both = {"first": (old.url, new.url)}
    configure(file, both, 'engine_drained = ["http://127.0.0.1:1"]')
    status, printed = await terminal.run("reload")
    assert (status, "'http://127.0.0.1:1' is not one of engine_url" in printed) == (2, True)
    configure(file, both, f'engine_drained = ["{old.url}"]')
    assert (await terminal.run("reload"))[0] == 0
    for _ in range(TRIES):
        assert text_of(await ask(served, "first")) == "new goes on"
    status, printed = await terminal.run("engines", "return", old.url)
    assert (status, "is listed in engine_drained" in printed) == (0, True)
    assert f"{old.url}  up " in printed
    assert "note" not in (await terminal.run("engines", "drain", old.url))[1]
    configure(file, both)
    assert (await terminal.run("reload"))[0] == 0
    assert f"{old.url}  up " in (await terminal.run("engines"))[1]


async def see_stop(terminal: Terminal, served: ServedProcess, old: FakeChat) -> None:
    """A turn that runs is waited for, and the answer of the command comes when the process has ended."""
    old.gate.clear()
    old.held.clear()
    running = asyncio.create_task(ask(served, "first"))
    async with asyncio.timeout(10):
        await old.held.wait()
    stopping = asyncio.create_task(terminal.run("stop"))
    await until(lambda: "stopping" in "".join(served.printed))
    assert not stopping.done()
    old.gate.set()
    assert text_of(await running) == "old goes on"
    status, printed = await stopping
    assert (status, "has stopped" in printed) == (0, True)
    assert served.process.wait(10) == 0
    assert (await terminal.run("status"))[0] == 3
    assert (await terminal.run("stop"))[0] == 3


async def test_server_that_is_not_ours_is_neither_stopped_nor_reloaded(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A server of another user, or a socket that a killed server has left: the process there is not touched."""
    async with FakeChat() as other:
        words = ("--url", other.url)
        for verb in ("stop", "reload"):
            assert await asyncio.to_thread(cli.main, [verb, *words]) == 2
        assert "It was started by another user" in capsys.readouterr().err
    # What a server that was killed has left: a name without a process.
    with free_port() as port, socket.socket(socket.AF_UNIX) as left:
        left.bind(str(control_path("127.0.0.1", port)))
    words = ("--url", f"http://127.0.0.1:{port}")
    assert await asyncio.to_thread(cli.main, ["status", "--json", *words]) == 3
    assert json.loads(capsys.readouterr().out)["is_running"] is False
    assert await asyncio.to_thread(cli.main, ["stop", *words]) == 3
    control_path("127.0.0.1", port).unlink()


@contextmanager
def free_port() -> Iterator[int]:
    """A port of this machine where nothing listens."""
    with socket.create_server(("127.0.0.1", 0)) as port:
        yield port.getsockname()[1]
