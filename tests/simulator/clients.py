"""What do clients do, and what do they hear?

Every story is one client that asks, waits, polls, resumes or repeats, at whichever process answers. What it hears of a
response is a `Sighting`; `checks` compares all of them. Nothing here knows what goes wrong in the meantime.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import Any

from tests.simulator.clock import ProcessLoop, World
from tests.simulator.process import Process, Request

ENDED = {"completed", "failed", "incomplete", "cancelled"}
# How long a client waits for an answer, and how often it asks again.
ANSWER_S = 40.0
POLL_S = (0.5, 4.0)
TRIES_MAX = 12
# A process that was ill may say for this long that a turn still runs which others have ended.
STALE_S = 6.0


@dataclass(frozen=True)
class Sighting:
    """What one answer has said of a response."""

    asked_at: float
    heard_at: float
    turn_id: str
    status: str
    process: str
    how: str
    key: str = ""
    # Whether the process had been well for a while.
    was_well: bool = False


@dataclass
class Heard:
    """What all clients have heard."""

    sightings: list[Sighting] = field(default_factory=list)
    # Turns in the background that were acknowledged, and those that have ended well before a client.
    acknowledged: set[str] = field(default_factory=set)
    # Conversations, with the turns that were answered as completed in them.
    conversations: dict[str, list[str]] = field(default_factory=dict)


class Client:
    """One client with one API key."""

    def __init__(
        self,
        world: World,
        loop: ProcessLoop,
        processes: Callable[[], list[Process]],
        heard: Heard,
        secret: str,
        random: Random,
    ) -> None:
        self.world = world
        self.loop = loop
        self.heard = heard
        self.secret = secret
        self.random = random
        self._processes = processes

    # --- asking ---

    def any_process(self) -> Process:
        return self.random.choice(self._processes())

    def send(
        self, process: Process, method: str, target: str, body: object = None, key: str = ""
    ) -> Request:
        headers = {"host": "localhost", "authorization": f"Bearer {self.secret}"}
        if key:
            headers["idempotency-key"] = key
        data = b"" if body is None else json.dumps(body).encode()
        return Request(process, method, target, headers, data, self.loop)

    async def finish(self, request: Request, answer_s: float = ANSWER_S) -> None:
        """Wait for the whole answer, or give up."""
        try:
            async with asyncio.timeout(answer_s):
                while not request.is_whole and not request.is_lost:
                    request.news.clear()
                    await request.news.wait()
        except TimeoutError:
            request.leave()

    async def ask(
        self,
        method: str,
        target: str,
        body: object = None,
        key: str = "",
        process: Process | None = None,
    ) -> Request:
        request = self.send(process or self.any_process(), method, target, body, key)
        await self.finish(request)
        return request

    def see(self, asked_at: float, request: Request, response: Any, how: str, key: str = "") -> str:
        """Note what was heard of a response; its status."""
        since, now, name = request.process.well_since, self.world.now, request.process.name
        was_well = since is not None and now - since > STALE_S
        turn_id, status = response["id"], response["status"]
        seen = Sighting(asked_at, now, turn_id, status, name, how, key, was_well)
        self.heard.sightings.append(seen)
        self.world.note(f"{how} at {seen.process}: {seen.turn_id[-8:]} {seen.status}")
        return seen.status

    async def pause(self, least_s: float = POLL_S[0], most_s: float = POLL_S[1]) -> None:
        await asyncio.sleep(self.random.uniform(least_s, most_s))

    # --- stories ---

    def body(self, **fields: Any) -> dict[str, Any]:
        pieces, pause_ms = self.random.choice(
            ((1, 20), (3, 100), (10, 100), (10, 400), (20, 500), (12, 2_000))
        )
        return {"model": "m", "input": f"{pieces} pieces of {pause_ms} ms", **fields}

    async def plain(self, body: dict[str, Any], key: str = "", polls: int = 2) -> None:
        """One object; with a key it is asked for again until there is an answer, and once more then."""
        for attempt in range(TRIES_MAX if key else 1):
            asked_at = self.world.now
            request = await self.ask("POST", "/v1/responses", body, key)
            if request.is_whole and request.status == 200:
                response = request.json()
                status = self.see(
                    asked_at, request, response, "repeat" if attempt else "create", key
                )
                if status == "completed" and (conversation := body.get("conversation")):
                    self.heard.conversations.setdefault(conversation, []).append(response["id"])
                await self.poll(response["id"], polls)
                if not key or attempt >= 2 or self.random.random() < 0.5:
                    return
            else:
                await self.refused(request, "create")
            await self.pause()

    async def background(self, body: dict[str, Any], key: str = "") -> None:
        """Created in the background, and polled until it has ended."""
        for _ in range(TRIES_MAX):
            asked_at = self.world.now
            request = await self.ask("POST", "/v1/responses", {**body, "background": True}, key)
            if request.is_whole and request.status == 200:
                response = request.json()
                self.heard.acknowledged.add(response["id"])
                self.see(asked_at, request, response, "queue", key)
                await self.poll(response["id"], polls=3)
                return
            await self.refused(request, "queue")
            if not key:
                return
            await self.pause()

    async def poll(self, turn_id: str, polls: int) -> None:
        """Until it has ended, and this often after that."""
        left = polls
        for _ in range(60):
            await self.pause()
            asked_at = self.world.now
            request = await self.ask("GET", f"/v1/responses/{turn_id}")
            if request.is_whole and request.status == 200:
                left -= self.see(asked_at, request, request.json(), "poll") in ENDED
            elif request.is_whole and request.status == 404:
                self.missing(turn_id, request)
            if left <= 0:
                return

    def missing(self, turn_id: str, request: Request) -> None:
        """A response that was announced is not found."""
        well = {"completed", "incomplete"}
        heard = [one for one in self.heard.sightings if one.turn_id == turn_id]
        is_kept = turn_id in self.heard.acknowledged or any(one.status in well for one in heard)
        if is_kept:
            self.world.fail(f"{turn_id} was acknowledged, and is 404 at {request.process.name}")

    async def stream(self, body: dict[str, Any], key: str = "") -> None:
        """A stream; if it breaks off, or the client leaves, it is resumed elsewhere."""
        request = self.send(
            self.any_process(), "POST", "/v1/responses", {**body, "stream": True}, key
        )
        asked_at = self.world.now
        leaves_after = self.random.choice((0.3, 2.0, ANSWER_S, ANSWER_S))
        await self.finish(request, leaves_after if body.get("background") else ANSWER_S)
        if request.status != 200:
            await self.refused(request, "stream")
            return
        events = self.events(request, -1)
        if not events:
            return
        turn_id = events[0]["response"]["id"]
        if body.get("background"):
            self.heard.acknowledged.add(turn_id)
        is_over = self.last(asked_at, request, events, "stream", key)
        # Only these have a log that can be followed again.
        if body.get("background") or key:
            for _ in range(TRIES_MAX):
                if is_over:
                    break
                await self.pause()
                is_over, events = await self.resume(turn_id, events)
            await self.poll(turn_id, polls=1)

    async def resume(self, turn_id: str, events: list[Any]) -> tuple[bool, list[Any]]:
        after = events[-1]["sequence_number"]
        asked_at = self.world.now
        target = f"/v1/responses/{turn_id}?stream=true&starting_after={after}"
        request = await self.ask("GET", target)
        if request.status == 404:
            self.missing(turn_id, request)
        if request.status != 200:
            return False, events
        more = self.events(request, after)
        is_over = self.last(asked_at, request, more, "resume") if more else False
        if request.is_whole and not is_over:
            self.world.fail(
                f"{turn_id}: resumed after {after} at {request.process.name}, and ended without a terminal event"
            )
        return is_over, more or events

    def events(self, request: Request, after: int) -> list[Any]:
        """The whole events of a stream, whose numbers have no gap."""
        chunks = bytes(request.answer).split(b"\n\n")[:-1]
        events = [json.loads(one.partition(b"data: ")[2]) for one in chunks if b"[DONE]" not in one]
        numbers = [event["sequence_number"] for event in events]
        if numbers != list(range(after + 1, after + 1 + len(numbers))):
            self.world.fail(
                f"a stream from {request.process.name} after {after} has the numbers {numbers}"
            )
        return events

    def last(
        self, asked_at: float, request: Request, events: list[Any], how: str, key: str = ""
    ) -> bool:
        """Whether the stream has ended, with one terminal event."""
        ends = [one for one in events if one.get("response", {}).get("status") in ENDED]
        if len(ends) > 1:
            self.world.fail(f"a stream from {request.process.name} has {len(ends)} terminal events")
        if ends:
            self.see(asked_at, request, ends[-1]["response"], how, key)
        elif request.is_whole and how == "stream":
            self.world.fail(f"a stream from {request.process.name} ended without a terminal event")
        return bool(ends)

    async def refused(self, request: Request, how: str) -> None:
        """No answer, or an error: what it says must be true, and must pass."""
        name = request.process.name
        if not request.is_whole:
            self.world.note(
                f"{how} at {name}: {'connection lost' if request.is_lost else 'no answer'}"
            )
            return
        error = request.json()["error"]
        self.world.note(f"{how} at {name}: {request.status} {error['code']}")
        if request.status >= 500 and request.status != 503:
            self.world.note(error["message"])
        if error["code"] == "idempotency_key_spent":
            turn_id = error["message"].split("'")[1]
            found = await self.ask("GET", f"/v1/responses/{turn_id}", process=request.process)
            if found.status == 404:
                self.world.fail(f"409 for the response {turn_id}, which is 404 at {name}")

    async def converse(self, turns: int) -> None:
        """A conversation: a few turns, one after the other, some of them asked for twice at once."""
        conversation = ""
        for _ in range(TRIES_MAX):
            request = await self.ask("POST", "/v1/conversations", {})
            if request.status == 200 and request.is_whole:
                conversation = request.json()["id"]
                break
            await self.pause()
        if not conversation:
            return
        self.heard.conversations[conversation] = []
        for _ in range(turns):
            stories = [self.plain(self.body(conversation=conversation), polls=1)]
            if self.random.random() < 0.3:
                stories.append(self.plain(self.body(conversation=conversation), polls=0))
            await asyncio.gather(*stories)
            await self.pause()
