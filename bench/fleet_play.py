"""How do 64 agents use a fleet at once? Recorded sessions played over real connections, by one of three ways.

    socket   a WebSocket for each session, opened again after every few turns, `previous_response_id` and what is new
    chained  one HTTP request a turn, `previous_response_id` and what is new
    full     one HTTP request a turn with the whole history, answers included, and no id

What each turn heard is kept: status, error, how often it was sent again. A turn that failed is sent again as an agent
would: after a moment, and with the whole history where the server does not know the parent.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import aiohttp

from segue_bench.sessions import Answered, Said, SeededText, Step
from segue_fleet.fleet import MODEL

Way = Literal["socket", "chained", "full"]
WAYS: tuple[Way, ...] = ("socket", "chained", "full")
ENDS = ("response.completed", "response.failed", "response.incomplete", "error")
# A socket is opened again after so many turns, at whatever machine and worker the balancer chooses then.
SOCKET_TURNS = 4
TRIES_MAX = 12
# The first time; twice as long each time.
RETRY_S, RETRY_S_MAX = 0.25, 4.0
TURN_S_MAX = 120.0
PLAY_S_MAX = 600.0
LOST = (aiohttp.ClientError, ConnectionError, TimeoutError)


@dataclass(frozen=True)
class Heard:
    """What one turn came to; seconds are real."""

    session: str
    step: int
    began_at: float
    seconds: float
    # Everything that went wrong before it succeeded, in order.
    errors: tuple[str, ...]
    input_tokens: int = 0
    cached_tokens: int = 0
    is_continuation: bool = True

    @property
    def ended_at(self) -> float:
        return self.began_at + self.seconds


class TurnFailed(Exception):
    """A turn ended with an error that the server sent."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@dataclass
class Agent:
    """One session on its way."""

    name: str
    steps: Sequence[Step]
    way: Way
    at: int = 0
    ids: dict[int, str] = field(default_factory=dict)
    outputs: dict[int, list[Any]] = field(default_factory=dict)
    socket: aiohttp.ClientWebSocketResponse | None = None
    socket_turns: int = 0


class Players:
    """All agents of one way."""

    def __init__(
        self,
        url: str,
        texts: SeededText,
        *,
        time_factor: float,
        gap_s_max: float,
        seed: int = 1,
    ) -> None:
        self._url = url
        self._texts = texts
        self._factor = time_factor
        self._gap_s_max = gap_s_max
        self._random = random.Random(seed)
        self._session: aiohttp.ClientSession | None = None
        self.heard: list[Heard] = []
        self._awaited: list[tuple[int, asyncio.Event]] = []

    async def have_heard(self, turns: int) -> None:
        """Wait until so many turns have ended."""
        event = asyncio.Event()
        self._awaited.append((turns, event))
        async with asyncio.timeout(PLAY_S_MAX):
            await event.wait()

    async def __aenter__(self) -> Players:
        timeout = aiohttp.ClientTimeout(total=TURN_S_MAX)
        connector = aiohttp.TCPConnector(limit=0)
        self._session = aiohttp.ClientSession(timeout=timeout, connector=connector)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._session is not None
        await self._session.close()

    async def play(self, agents: Sequence[Agent], turns: int, stagger_s: float = 0.0) -> None:
        """So many turns of each, all agents at once; they begin within this time."""
        async with asyncio.TaskGroup() as group:
            for agent in agents:
                delay = self._random.uniform(0, stagger_s) / self._factor
                group.create_task(self._play(agent, turns, delay))

    async def _play(self, agent: Agent, turns: int, delay: float) -> None:
        await asyncio.sleep(delay)
        for step in agent.steps[agent.at : agent.at + turns]:
            before = time.monotonic()
            await self._turn(agent, step)
            agent.at += 1
            if agent.at < len(agent.steps):
                gap = agent.steps[agent.at].at_s - step.at_s
                due = before + max(0.0, min(gap, self._gap_s_max)) / self._factor
                await asyncio.sleep(max(0.0, due - time.monotonic()))
        await _close(agent)

    async def _turn(self, agent: Agent, step: Step) -> None:
        """Until it succeeds."""
        began, errors = time.monotonic(), []
        is_whole = agent.way == "full"
        while True:
            try:
                response = await self._ask(agent, self._request(agent, step, is_whole=is_whole))
                break
            except TurnFailed as error:
                errors.append(error.code)
                is_whole = is_whole or error.code == "previous_response_not_found"
            except LOST as error:
                errors.append(type(error).__name__)
                await _close(agent)
            if len(errors) == TRIES_MAX:
                raise RuntimeError(f"{agent.name} step {step.number}: {errors}")
            await asyncio.sleep(min(RETRY_S * 2 ** (len(errors) - 1), RETRY_S_MAX))
        agent.ids[step.number] = response["id"]
        agent.outputs[step.number] = response["output"]
        usage = response["usage"]
        details = usage["input_tokens_details"]
        self.heard.append(
            Heard(
                agent.name,
                step.number,
                began,
                time.monotonic() - began,
                tuple(errors),
                usage["input_tokens"],
                details["cached_tokens"],
                step.kind == "continuation",
            )
        )
        for turns, event in self._awaited:
            if len(self.heard) >= turns:
                event.set()

    def _request(self, agent: Agent, step: Step, *, is_whole: bool) -> dict[str, Any]:
        request: dict[str, Any] = {
            "model": MODEL,
            "instructions": self._texts.text(
                Said(f"{agent.way} {step.head.source}", step.head.tokens)
            ),
            "max_output_tokens": step.output_tokens,
        }
        parent = None if is_whole or step.parent is None else agent.ids[step.parent]
        if parent is not None:
            request["previous_response_id"] = parent
        parts = step.history if parent is None else step.new
        request["input"] = [item for part in parts for item in self._items(agent, part)]
        return request

    def _items(self, agent: Agent, part: Said | Answered) -> list[Any]:
        if isinstance(part, Answered):
            return agent.outputs[part.step]
        text = self._texts.text(Said(f"{agent.way} {part.source}", part.tokens))
        return [{"type": "message", "role": "user", "content": text}]

    async def _ask(self, agent: Agent, request: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        if agent.way == "socket":
            response = await self._by_socket(agent, request)
        else:
            async with self._session.post(f"{self._url}/v1/responses", json=request) as answer:
                # HAProxy's own refusals are no JSON.
                raw = await answer.read()
                response = json.loads(raw) if raw.startswith(b"{") else {"error": None}
                if answer.status != 200:
                    code = (response.get("error") or {}).get("code")
                    raise TurnFailed(code or f"status {answer.status}")
        if response["status"] != "completed":
            raise TurnFailed((response.get("error") or {}).get("code") or response["status"])
        return response

    async def _by_socket(self, agent: Agent, request: dict[str, Any]) -> dict[str, Any]:
        assert self._session is not None
        if agent.socket is None or agent.socket.closed or agent.socket_turns >= SOCKET_TURNS:
            await _close(agent)
            agent.socket = await self._session.ws_connect(
                f"{self._url}/v1/responses", max_msg_size=0
            )
            agent.socket_turns = 0
        agent.socket_turns += 1
        await agent.socket.send_json({"type": "response.create", **request})
        async with asyncio.timeout(TURN_S_MAX):
            async for message in agent.socket:
                if message.type is not aiohttp.WSMsgType.TEXT:
                    break
                if not message.data.startswith(tuple(f'{{"type":"{end}"' for end in ENDS)):
                    continue
                event = json.loads(message.data)
                if event["type"] == "error":
                    raise TurnFailed((event.get("error") or event)["code"])
                response: dict[str, Any] = event["response"]
                return response
        raise ConnectionResetError("the socket ended")


async def _close(agent: Agent) -> None:
    if agent.socket is not None:
        await agent.socket.close()
        agent.socket = None
