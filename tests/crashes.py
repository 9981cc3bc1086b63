"""Clients that write without a pause, what they were told, and whether a server still knows it after a crash.

`writing` runs the clients and notes a *fact* for each thing that a server has acknowledged. `check` asks a server that
was started on what the crash left for every one of them. `halves` looks into the tables for rows without the rows that
belong to them.
"""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import websockets

from tests.support import MODEL, WAIT_S, Answer, Served, ServedProcess, Wire, fetch, wire

Server = Served | ServedProcess
CHAIN_MAX = 6
CHECKS_AT_ONCE = 8
# How a client notices that its server is no more: nothing listens, the line breaks, half an answer.
GONE = (OSError, EOFError, ValueError, IndexError, websockets.WebSocketException)


# --- facts --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Finished:
    """A client has the response, whole."""

    response: dict[str, Any]


@dataclass(frozen=True)
class Begun:
    """A client was promised that it can come back for this response."""

    id: str
    conversation: str | None = None


@dataclass(frozen=True)
class Erasing:
    """A client is about to ask for its deletion."""

    id: str


@dataclass(frozen=True)
class Erased:
    """A client was told that it is gone."""

    id: str


@dataclass(frozen=True)
class Shelved:
    """These items are in the conversation, in this order."""

    conversation: str
    ids: tuple[str, ...]


Fact = Finished | Begun | Erasing | Erased | Shelved


@dataclass
class Book:
    """All facts, in the order in which clients learned them."""

    facts: list[Fact] = field(default_factory=list)
    # Told the number of each fact as it is noted.
    on_note: Callable[[int], None] = lambda _: None

    def note(self, fact: Fact) -> None:
        self.on_note(len(self.facts))
        self.facts.append(fact)


# --- clients ------------------------------------------------------------------------------------------------


@asynccontextmanager
async def writing(served: Server, book: Book) -> AsyncIterator[list[asyncio.Task[Exception]]]:
    """Several clients that write for as long as this lasts or the server lives; each returns what ended it."""
    writers = (speak, listen, stream, come_back, shelve, shelve_behind, erase)
    tasks = [asyncio.create_task(until_gone(one(served, book))) for one in (*writers, speak)]
    try:
        yield tasks
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled():
                task.result()


async def until_gone(work: Awaitable[None]) -> Exception:
    try:
        await work
    except TimeoutError:
        raise
    except GONE as error:
        return error
    raise AssertionError("a client has stopped")


async def ask(served: Server, method: str, path: str, body: object = None) -> dict[str, Any]:
    """What a server answers to a client that wants nothing unusual. JSON that was cut off is an error of its reader."""
    answer = await fetch(served, method, f"/v1/{path}", body)
    found: dict[str, Any] = answer.json
    if answer.status != 200:
        raise ValueError(found)
    return found


async def post(served: Server, **fields: Any) -> dict[str, Any]:
    """A response by plain HTTP."""
    return await ask(served, "POST", "responses", {"model": MODEL, "input": "x", **fields})


async def speak(served: Server, book: Book) -> None:
    """Chains by plain JSON."""
    parent = None
    for number in count():
        if number % CHAIN_MAX == 0:
            parent = None
        response = await post(
            served, input=f"question {number} " + "x" * 700, previous_response_id=parent
        )
        book.note(Finished(response))
        parent = response["id"]


async def listen(served: Server, book: Book) -> None:
    """Two lanes of chains on a socket."""

    async def lane(socket: Wire, heard: asyncio.Queue[Any], name: str) -> None:
        parent = None
        for number in count():
            if number % CHAIN_MAX == 0:
                parent = None
            await socket.create(
                input=f"{name} {number}", stream_id=name, previous_response_id=parent
            )
            response = await heard.get()
            book.note(Finished(response))
            parent = response["id"]

    # Unbounded: a close that waits behind frames which nobody takes any more would take ten seconds.
    async with wire(served, max_queue=None) as socket:
        lanes: dict[str, asyncio.Queue[Any]] = {name: asyncio.Queue() for name in ("left", "right")}
        tasks = [asyncio.create_task(lane(socket, heard, name)) for name, heard in lanes.items()]
        try:
            while True:
                event = await socket.next()
                if event["type"] in ("error", "response.failed"):
                    raise ValueError(event)
                if event["type"] == "response.completed":
                    lanes[event["stream_id"]].put_nowait(event["response"])
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def stream(served: Server, book: Book) -> None:
    """Responses as server-sent events."""
    for number in count():
        words = {"input": f"stream {number}", "instructions": "Be brief.", "stream": True}
        answer = await fetch(served, "POST", "/v1/responses", {"model": MODEL, **words})
        if not answer.body.endswith(b"data: [DONE]\n\n"):
            raise ValueError(answer.body)
        if answer.events[-1]["type"] != "response.completed":
            raise ValueError(answer.events[-1])
        book.note(Finished(answer.events[-1]["response"]))


async def come_back(served: Server, book: Book) -> None:
    """Responses in the background, asked for until they have ended."""
    for number in count():
        begun = await post(served, input=f"later {number}", background=True)
        book.note(Begun(begun["id"]))
        await wait_for(served, book, begun["id"])


async def wait_for(served: Server, book: Book, turn_id: str) -> dict[str, Any]:
    while True:
        response = await ask(served, "GET", f"responses/{turn_id}")
        if response["status"] == "completed":
            book.note(Finished(response))
            return response
        if response["status"] == "failed":
            raise ValueError(response)


async def shelve(served: Server, book: Book) -> None:
    """A conversation, with items of its own and responses that join it."""
    name = await converse(served, book)
    for number in count():
        item = {"role": "user", "content": f"item {number}"}
        added = await ask(served, "POST", f"conversations/{name}/items", {"items": [item]})
        book.note(Shelved(name, tuple(one["id"] for one in added["data"])))
        response = await post(served, input="and?", conversation=name)
        book.note(Finished(response))
        book.note(Shelved(name, tuple(one["id"] for one in response["output"])))


async def shelve_behind(served: Server, book: Book) -> None:
    """A conversation whose responses run in the background."""
    name = await converse(served, book)
    for number in count():
        begun = await post(served, input=f"{number}", conversation=name, background=True)
        book.note(Begun(begun["id"], name))
        response = await wait_for(served, book, begun["id"])
        book.note(Shelved(name, tuple(one["id"] for one in response["output"])))


async def converse(served: Server, book: Book) -> str:
    """The name of a new conversation."""
    name: str = (await ask(served, "POST", "conversations", {}))["id"]
    book.note(Shelved(name, ()))
    return name


async def erase(served: Server, book: Book) -> None:
    """Responses that are deleted again."""
    for number in count():
        response = await post(served, input=f"forget {number}")
        book.note(Finished(response))
        book.note(Erasing(response["id"]))
        gone = await ask(served, "DELETE", f"responses/{response['id']}")
        assert gone["deleted"] is True
        book.note(Erased(response["id"]))


# --- what must hold -----------------------------------------------------------------------------------------


async def check(
    served: Server, facts: Sequence[Fact], some: Sequence[Fact] | None = None
) -> list[str]:
    """What this server does not know of what clients were told, or of some of it; nothing, if all is well."""
    gate = asyncio.Semaphore(CHECKS_AT_ONCE)

    async def one(look: Any) -> list[str]:
        async with gate:
            found: list[str] = await look
            return found

    erased = {fact.id for fact in facts if isinstance(fact, Erased)}
    unsure = {fact.id for fact in facts if isinstance(fact, Erasing)} - erased
    some = facts if some is None else some
    finished = {fact.response["id"]: fact.response for fact in some if isinstance(fact, Finished)}
    kept = {name: body for name, body in finished.items() if name not in erased | unsure}
    begun = [fact for fact in some if isinstance(fact, Begun)]
    shelved: dict[str, list[str]] = {}
    for fact in some:
        if isinstance(fact, Shelved):
            shelved.setdefault(fact.conversation, []).extend(fact.ids)
    parents = {body["previous_response_id"] for body in kept.values()}
    tips = [
        body for name, body in kept.items() if name not in parents and "conversation" not in body
    ]
    looks: list[Any] = [is_same(served, body) for body in kept.values()]
    looks += [is_gone(served, fact.id) for fact in some if isinstance(fact, Erased)]
    looks += [is_ended(served, fact) for fact in begun]
    looks += [is_shelved(served, name, ids) for name, ids in shelved.items()]
    looks += [goes_on(served, body) for body in tips[-4:]]
    return [word for words in await asyncio.gather(*map(one, looks)) for word in words]


async def get(served: Server, path: str) -> Answer:
    return await fetch(served, "GET", f"/v1/{path}")


async def is_same(served: Server, body: Mapping[str, Any]) -> list[str]:
    answer = await get(served, f"responses/{body['id']}")
    if answer.status == 404:
        return [f"lost: {body['id']} was acknowledged and is not there"]
    return (
        [] if answer.json == body else [f"changed: {body['id']} reads otherwise: {answer.body!r}"]
    )


async def is_gone(served: Server, turn_id: str) -> list[str]:
    status = (await get(served, f"responses/{turn_id}")).status
    return [] if status == 404 else [f"returned: {turn_id} was deleted and is there again"]


async def is_ended(served: Server, fact: Begun) -> list[str]:
    """Completed, or failed in the words of recovery; and in its conversation just if it is completed."""
    async with asyncio.timeout(WAIT_S):
        # In PostgreSQL whoever left it running is known to be dead only after a while.
        while True:
            answer = await get(served, f"responses/{fact.id}")
            if answer.status == 404:
                return [f"lost: {fact.id} was begun and is not there"]
            response = answer.json
            if response["status"] not in ("queued", "in_progress"):
                break
            await asyncio.sleep(0.1)
    found = []
    if response["status"] == "failed" and response["error"]["code"] != "server_error":
        found.append(f"failed: {fact.id}: {response['error']}")
    elif response["status"] not in ("completed", "failed"):
        found.append(f"half: {fact.id} is {response['status']}")
    if fact.conversation is not None:
        there = set(await items(served, fact.conversation))
        wrote = {one["id"] for one in response["output"]}
        if response["status"] == "completed" and not wrote <= there:
            found.append(f"half: {fact.id} is completed and its conversation does not have it")
        if response["status"] == "failed" and wrote & there:
            found.append(f"half: {fact.id} has failed and its conversation has it")
    return found


async def items(served: Server, conversation: str) -> list[str]:
    """The ids of all items of a conversation, in order."""
    found: list[str] = []
    after = ""
    while True:
        path = f"conversations/{conversation}/items?order=asc&limit=100{after}"
        answer = await get(served, path)
        if answer.status == 404:
            return found
        found += [one["id"] for one in answer.json["data"]]
        if not answer.json["has_more"]:
            return found
        after = f"&after={found[-1]}"


async def is_shelved(served: Server, conversation: str, ids: Sequence[str]) -> list[str]:
    if (await get(served, f"conversations/{conversation}")).status != 200:
        return [f"lost: {conversation} was made and is not there"]
    there = await items(served, conversation)
    known = set(ids)
    if [one for one in there if one in known] != list(ids):
        return [f"lost: {conversation} does not have all of its items"]
    return []


async def goes_on(served: Server, body: Mapping[str, Any]) -> list[str]:
    """Whether the chain can be continued, with all that it was."""
    fields = {"model": MODEL, "input": "go on", "previous_response_id": body["id"]}
    answer = await fetch(served, "POST", "/v1/responses", fields)
    if answer.status != 200:
        return [f"lost: {body['id']} cannot be continued: {answer.body!r}"]
    if answer.json["usage"]["input_tokens"] <= body["usage"]["total_tokens"]:
        return [f"lost: {body['id']} is continued without its history"]
    return []


# Rows that name rows which are not there, in a store that nobody writes to. In the words of both databases.
HALVES = {
    "turns whose process is dead": "SELECT id FROM turns WHERE worker IS NOT NULL",
    "turns without usage": "SELECT id FROM turns WHERE id NOT IN (SELECT turn_id FROM usage)",
    "events without a turn": """
        SELECT turn_id FROM events WHERE NOT EXISTS
        (SELECT 1 FROM turns WHERE turns.owner = events.owner AND turns.id = events.turn_id)""",
    "conversations whose last turn is absent": """
        SELECT id FROM conversations WHERE tip_id IS NOT NULL AND NOT EXISTS
        (SELECT 1 FROM turns WHERE turns.owner = conversations.owner AND turns.id = tip_id)""",
    "conversations that miscount their items": """
        SELECT id FROM conversations WHERE count <>
        (SELECT count(*) FROM shelved WHERE shelved.owner = conversations.owner AND conversation_id = id)""",
    "parents that are absent": """
        SELECT id FROM turns WHERE parent_id IS NOT NULL AND parent_id NOT IN (SELECT id FROM turns)""",
}


# SQLite knows parts by number, PostgreSQL by digest.
UNUSED_PARTS = """
    SELECT {key} FROM parts WHERE NOT EXISTS
    (SELECT 1 FROM turns WHERE instructions = parts.{key} OR tools = parts.{key})"""


async def settled_halves(path: Path) -> list[str]:
    """The same, once the turns that a dead process left queued have been run."""
    until = time.monotonic() + WAIT_S
    while time.monotonic() < until:
        with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
            if not reader.execute(HALVES["turns whose process is dead"]).fetchall():
                break
        await asyncio.sleep(0.05)
    return halves(path)


def halves(path: Path) -> list[str]:
    """What is half there in a SQLite file."""
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as reader:
        found = [
            f"{name}: {row}"
            for name, query in {
                **HALVES,
                "parts without a turn": UNUSED_PARTS.format(key="id"),
            }.items()
            for row in reader.execute(query)
        ]
        found += [str(row) for row in reader.execute("PRAGMA integrity_check") if row != ("ok",)]
        return found + [str(row) for row in reader.execute("PRAGMA foreign_key_check")]
