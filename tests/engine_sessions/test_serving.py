"""What does a client of the plugin get, and what does the plugin hold, when one of both does what it should not?"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest

from segue.engine_sessions import frames
from segue_vllm import serving
from segue_vllm.chains import new_digest
from segue_vllm.frames import Ask, Cancel, End, Failed, Taken, Tokens, bytes_of
from segue_vllm.outputs import Heard, Request
from segue_vllm.serving import Connection, SessionServer
from segue_vllm.versions import is_tried
from tests.engine_sessions.replica import MODEL, FakeDoor


class Client:
    """The socket of a client, which may take nothing any longer."""

    def __init__(self) -> None:
        self.arrived: asyncio.Queue[Mapping[str, Any]] = asyncio.Queue()
        self.frames: list[list[Any]] = []
        self.came, self.takes = asyncio.Event(), asyncio.Event()
        self.takes.set()
        self.closed: tuple[int, str | None] | None = None

    async def accept(self) -> None:
        pass

    async def receive(self) -> Mapping[str, Any]:
        return await self.arrived.get()

    async def send_bytes(self, data: bytes) -> None:
        await self.takes.wait()
        self.frames.append([msgspec.to_builtins(said) for said in frames.read_said(data)])
        self.came.set()

    async def close(self, code: int = 1000, reason: str | None = None) -> None:
        self.closed = code, reason

    def ask(self, message: Ask | Cancel) -> None:
        data = msgspec.msgpack.encode(message)
        self.arrived.put_nowait({"type": "websocket.receive", "bytes": data})

    def leave(self) -> None:
        self.arrived.put_nowait({"type": "websocket.disconnect"})


def ask(stream: int, **changed: Any) -> Ask:
    sampling = msgspec.json.encode({"max_tokens": 3})
    made = Ask(stream, 0, 0, b"", b"\1\0\0\0", "o", MODEL, None, 0, sampling)
    return msgspec.structs.replace(made, **changed)


class BadDoor(FakeDoor):
    """Fails in ways that nobody expects."""

    def __init__(self) -> None:
        super().__init__(None)
        self.requests: list[Request] = []
        self.aborted: list[Request] = []

    def adapter(self, model: str) -> Any:
        if model == "broken":
            raise AssertionError("broken")

    async def start(
        self, ask: Ask, ids: list[int], room: int, kept: dict[str, Any] | None, heard: Heard
    ) -> Request:
        if ask.salt is not None:
            raise {"attribute": AttributeError, "runtime": RuntimeError, "os": OSError}[ask.salt]
        request = Request(str(ask.stream), heard)
        self.requests.append(request)
        return request

    async def abort(self, request: Request) -> None:
        self.aborted.append(request)
        raise RuntimeError("the engine is dead")


@contextmanager
def served(step: int = 1) -> Iterator[tuple[BadDoor, Client, asyncio.Task[None]]]:
    door, client = BadDoor(), Client()
    server = SessionServer(door, 1_000_000)
    server.step = step
    task = asyncio.create_task(Connection(server, client).run())
    yield door, client, task
    task.cancel()


async def said(client: Client, count: int) -> list[Any]:
    """What came after the first frame."""
    async with asyncio.timeout(5):
        while len(found := [one for frame in client.frames for one in frame][1:]) < count:
            client.came.clear()
            await client.came.wait()
    return found


@pytest.mark.parametrize("fault", ["attribute", "runtime", "os"])
async def test_fault_that_nobody_expects_ends_one_answer_and_no_other(fault: str) -> None:
    with served() as (door, client, task):
        client.ask(ask(1))
        client.ask(ask(2, salt=fault))
        client.ask(ask(3, model="broken"))
        client.ask(Cancel(1))
        client.ask(ask(4))
        found = await said(client, 5)
        failed = [Failed(number, 500, "The engine failed.") for number in (2, 3)]
        taken = [Taken(1, 1), Taken(2, 2), Taken(4, 3)]
        assert sorted(map(repr, found)) == sorted(
            repr(msgspec.to_builtins(one)) for one in (*taken, *failed)
        )
        assert [request.id for request in door.aborted] == ["1"]
        client.leave()
        await task
        assert [request.id for request in door.aborted] == ["1", "4"]


async def test_answer_that_is_cancelled_while_it_is_asked_again_is_neither_asked_nor_counted() -> (
    None
):
    """The core has refused to go on; before the plugin has asked with all ids, nobody waits any longer."""
    with served(step=2) as (door, client, _):
        client.ask(ask(1))
        await said(client, 1)
        first: Any = door.requests[0].heard
        first.tokens([5], 0)
        first.end("length", None)
        digest = new_digest()
        digest.update(bytes_of(array("I", [1, 5])))
        client.ask(ask(2, handle=1, length=2, digest=digest.digest()))
        await said(client, 4)
        answer: Any = door.requests[1].heard
        chains = answer.connection.chains
        assert answer.is_by_key
        answer.end("error", None)
        await answer.connection._cancel(answer)
        for handle in (1, 2):
            chains.forget(handle)
        await asyncio.sleep(0)
        assert len(door.requests) == 2
        # What is on its way from the engine is nobody's.
        answer.tokens([6], 0)
        answer.end("length", None)
        assert (chains.tokens, chains.turns) == (0, 0)
        client.ask(ask(3))
        assert [found[0] for found in await said(client, 5)] == [2, 3, 4, 2, 2]


async def test_client_that_reads_nothing_is_left_and_nothing_is_held_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "UNREAD_MAX", 50)
    with served() as (door, client, task):
        client.ask(ask(1))
        await said(client, 1)
        client.takes.clear()
        (request,) = door.requests
        answer: Any = request.heard
        for place in range(1_000):
            request.heard.tokens([place], None)
            answer.connection.flush()
            if place == 10:
                await asyncio.sleep(0)
        assert len(answer.connection._unsaid) <= 50
        await asyncio.wait_for(task, 5)
        assert door.aborted == [request]
        assert client.closed == (serving.TOO_SLOW, "the answers were not read")


async def test_what_waits_leaves_in_frames_that_can_be_read_at_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "FRAME_MAX", 10)
    with served() as (door, client, _):
        client.ask(ask(1))
        await said(client, 1)
        (request,) = door.requests
        answer: Any = request.heard
        for place in range(25):
            request.heard.tokens([place], None)
        request.heard.end("stop", 24)
        answer.connection.flush()
        found = await said(client, 27)
        assert max(map(len, client.frames)) == 10
        wanted = [*(Tokens(1, [place]) for place in range(25)), End(1, "stop", 24)]
        assert found[1:] == [msgspec.to_builtins(one) for one in wanted]


async def test_message_that_cannot_be_read_ends_the_connection_and_its_answers() -> None:
    with served() as (door, client, task):
        client.ask(ask(1))
        await said(client, 1)
        client.arrived.put_nowait({"type": "websocket.receive", "bytes": b"\xc1"})
        await asyncio.wait_for(task, 5)
        assert client.closed == (serving.BAD_MESSAGE, "this message cannot be read")
        assert door.aborted == door.requests


async def test_socket_that_breaks_ends_the_connection_without_a_word() -> None:
    with served() as (door, client, task):
        client.ask(ask(1))
        await said(client, 1)

        async def broken() -> Mapping[str, Any]:
            raise RuntimeError("no connection")

        client.receive = broken  # type: ignore[method-assign]
        client.ask(Cancel(9))
        await asyncio.wait_for(task, 5)
        assert client.closed is None
        assert door.aborted == door.requests


@pytest.mark.parametrize(
    "version, is_known", [("0.32.0", True), ("0.32.0+cpu", True), ("0.32.1", False), ("1.0", False)]
)
def test_what_is_not_public_is_used_with_versions_that_were_tried_only(
    version: str, is_known: bool
) -> None:
    assert is_tried(version) == is_known


def test_words_of_a_failure_are_not_endless() -> None:
    _, words = serving._failure(ValueError("x" * 100_000))
    assert len(words) == serving.WORDS_MAX
