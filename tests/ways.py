"""The four ways to ask for a turn: JSON, SSE, a socket, a lane of a socket. A story can be told in each of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.events import check_response, check_turn
from tests.support import MODEL, Served, ServedProcess, fetch, wire

WAYS = ("json", "sse", "socket", "lane")
LANE = "lane.1"

Server = Served | ServedProcess


@dataclass(frozen=True)
class Told:
    """How a turn ended: with a response, or refused with a status and an error."""

    status: int
    response: dict[str, Any] = field(default_factory=dict)
    error: dict[str, Any] = field(default_factory=dict)
    events: list[dict[str, Any]] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text of the answer."""
        parts = [part for item in self.response["output"] for part in item.get("content", ())]
        return "".join(part.get("text", "") for part in parts if part["type"] == "output_text")


async def ask(served: Server, way: str, **fields: Any) -> Told:
    """One turn, asked for in this way; what it must look like in any case is checked."""
    body = {"model": MODEL, **fields}
    if way in ("json", "sse"):
        return await _post(served, {**body, "stream": True} if way == "sse" else body)
    lane = LANE if way == "lane" else None
    named = {} if lane is None else {"stream_id": lane}
    async with wire(served) as socket:
        await socket.create(**named, **body)
        events = await socket.events(lane)
    if events[-1]["type"] == "error":
        return Told(events[-1]["status"], error=events[-1]["error"], events=events)
    return Told(200, check_turn(events, lane), events=events)


async def _post(served: Server, body: Mapping[str, Any]) -> Told:
    answer = await fetch(served, "POST", "/v1/responses", body)
    if answer.status != 200:
        return Told(answer.status, error=answer.json["error"])
    if not body.get("stream"):
        check_response(answer.json)
        return Told(200, answer.json)
    return Told(200, check_turn(answer.events), events=answer.events)


async def made(served: Server, way: str, **fields: Any) -> dict[str, Any]:
    """The response of a turn that must complete."""
    told = await ask(served, way, **fields)
    assert told.status == 200, told.error
    assert told.response["status"] == "completed", told.response
    return told.response


async def refused(served: Server, way: str, **fields: Any) -> tuple[int, str, str | None]:
    """Status, code and param of a request that must be refused before it starts."""
    told = await ask(served, way, **fields)
    assert told.status != 200, told.response
    return told.status, told.error["code"], told.error["param"]
