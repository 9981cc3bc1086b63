"""Real clients through good and bad times: each fixes the repository, or ends with words that it understands.

Nothing may hang, and the server may not be the worse for it. What must come of a story is said here, per client.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.clients.agents import AGENTS, Agent
from tests.clients.stage import scripted, staged
from tests.clients.stories import SILENT_S, STORIES, Told
from tests.clients.task import END

# Each takes a few seconds; the others run with `make test-clients`.
QUICK = ("Codex CLI", "OpenAI Python", "OpenAI npm", "Agents SDK Python")

Record = Callable[[str, object], None]

# Where a client gives up: what it says, and why that is right.
ENDS: dict[str, dict[str, tuple[str, str]]] = {
    "parent not found": {
        "Agents SDK Python": ("previous_response_not_found", "names the code, does not resend"),
        "AI SDK": ("Previous response with id .* not found", "shows the message, does not resend"),
    },
    "drop in mid-response": {
        "Agents SDK Python": ("connection closed before", "does not repeat a request"),
        "Agents SDK JavaScript": ("the socket broke", "does not repeat a request"),
        "AI SDK": ("interrupted", "finish reason `interrupted`"),
    },
    "no WebSocket (426)": {
        "OpenAI npm": ("Unexpected server response: 426", "no fallback to HTTP"),
        "Agents SDK Python": ("HTTP 426", "no fallback to HTTP"),
        "Agents SDK JavaScript": ("the socket broke", "no fallback to HTTP"),
        "AI SDK": ("Unexpected server response: 426", "no fallback to HTTP"),
    },
    "engine error": {
        "Agents SDK Python": ("response.failed.*server_error", "`ModelBehaviorError`"),
        "Agents SDK JavaScript": ("response.failed", "`ModelBehaviorError`"),
        "AI SDK": ("The engine broke off", "shows the message"),
    },
    "context overflow": {
        "Codex CLI": ("ran out of room in the model's context window", "its own message"),
        "Codex CLI, HTTP": ("ran out of room in the model's context window", "its own message"),
        "OpenAI Python": ("context_length_exceeded", "`context_length_exceeded`"),
        "OpenAI npm": ("context_length_exceeded", "`context_length_exceeded`"),
        "Agents SDK Python": ("context_length_exceeded", "`ModelBehaviorError`"),
        "Agents SDK JavaScript": ("response.failed", "`ModelBehaviorError`"),
        "AI SDK": ("exceeds the context window", "shows the message"),
    },
}
# Stories that only a socket can tell.
OF_SOCKETS = {"parent not found", "age limit", "no WebSocket (426)"}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.clients, id=name)
        for name in AGENTS
    ],
)
async def test_client_fixes_the_bug(name: str, tmp_path: Path, record_property: Record) -> None:
    """The repository's tests really pass, on one socket, and Segue has counted only what was new."""
    record_property("cell", (name, "fixes the bug", "yes"))
    agent = AGENTS[name]
    async with staged(tmp_path, *scripted(tmp_path, agent.turns())) as stage:
        ran = await stage.play(agent)
        assert ran.code == 0, ran.said[-3000:]
        assert END in ran.out
        assert stage.is_fixed
        turns = len(agent.turns())
        proxy = stage.proxy
        if agent.transport == "sse":
            assert proxy.requests.count("POST /v1/responses") == turns
            assert proxy.handshakes == []
        else:
            assert proxy.handshakes == [101]
            assert not [one for one in proxy.requests if one.startswith("POST")]
        if agent.chains:
            await check_chain(agent, stage)
        tokenized = await stage.count("tokens_tokenized_total")
        assert await stage.count("tokens_reused_total") > 2 * tokenized, "history was made again"


async def check_chain(agent: Agent, stage: Any) -> None:
    """Every turn but the first stood on the one before, found on the connection, and sent only what was new."""
    frames = [frame for _, frame in stage.proxy.frames]
    warm_ups = [frame for frame in frames if frame.get("generate") is False]
    assert len(warm_ups) == (agent.name == "Codex CLI"), "Codex warms up, the others do not"
    assert len(frames) == len(agent.turns()) + len(warm_ups)
    assert "previous_response_id" not in frames[0]
    assert all(frame["previous_response_id"] for frame in frames[1:])
    found = await stage.count('state_lookups_total{where="connection"}')
    assert found == len(frames) - 1
    assert await stage.count("tool_decodes_total") == 1
    assert all(len(frame["input"]) == 1 for frame in frames[1 + len(warm_ups) :])


@pytest.mark.clients
@pytest.mark.parametrize("name", AGENTS)
@pytest.mark.parametrize("story", [story for story in STORIES if story != "fixes the bug"])
async def test_client_recovers_or_ends_with_words_that_it_understands(
    story: str, name: str, tmp_path: Path, record_property: Record
) -> None:
    agent = AGENTS[name]
    words, why = ENDS.get(story, {}).get(name, ("", ""))
    is_untouched = agent.transport == "sse" and story in OF_SOCKETS
    text = f"ends: {why}" if words else "no socket" if is_untouched else "recovers"
    record_property("cell", (name, story, "goes on" if story == "long silence" else text))
    told = await STORIES[story](agent, tmp_path)
    if words:
        assert told.ran.code == 1, told.ran.said[-3000:]
        assert re.search(words, told.ran.said, re.DOTALL), told.ran.said[-3000:]
    else:
        assert told.is_recovered, told.ran.said[-3000:]
        assert END in told.ran.out
    if agent.transport == "websocket":
        check_happened(story, agent, told)


def check_happened(story: str, agent: Agent, told: Told) -> None:
    """The story was really told: what it is about has happened."""
    proxy = told.proxy
    match story:
        case "parent not found" if agent.chains and told.is_recovered:
            assert proxy.sockets > 1 or "again" in told.ran.said
        case "age limit":
            assert proxy.sockets > 1
        case "drop in mid-response":
            assert proxy.created >= 3
            assert proxy.sockets == (2 if told.is_recovered else 1)
        case "restart with drain":
            assert proxy.sockets == 2
        case "no WebSocket (426)":
            assert set(proxy.handshakes) == {426}
        case "engine error" if told.is_recovered:
            assert proxy.sockets == 2
        case "long silence":
            assert told.ran.seconds > SILENT_S
            assert proxy.handshakes == [101]
        case _:
            pass
