"""Is what real clients send again known again? Their recorded sessions, with this server's own answers in them.

Everything that was in a prompt, the answer included, is taken over in the next one, whatever the client does to its
spelling; a new system message and tools that a search has found change nothing before them.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from bench.replay import load
from bench.wires import free_server, play, scripted_server, summed
from segue_bench.server import ServerProcess
from tests.clients.recordings import recordings

NAMES = recordings()


@pytest.fixture(scope="module")
def served() -> Iterator[ServerProcess]:
    """One server with the scripts of all recordings."""
    with scripted_server([load(name) for name in NAMES]) as process:
        yield process


def test_recordings_have_what_breaks_prefixes_elsewhere() -> None:
    """System messages after results, tools found by a search, images, a subagent; both APIs."""
    assert {load(name).api for name in NAMES} == {"Messages", "Chat"}
    reminded = load("claude-code-reminder").requests[-1].messages
    assert sum(message["role"] == "system" for message in reminded) > 5
    assert any(
        "tool_reference" in str(one.body) for one in load("claude-code-tool-search").requests
    )
    assert any("'image'" in str(one.body) for one in load("claude-code-images").requests)
    assert {one.conversation for one in load("claude-code-subagent").requests} == {0, 1}


@pytest.mark.parametrize("name", NAMES)
def test_turn_of_a_recorded_client_costs_what_is_new_in_it(
    served: ServerProcess, name: str
) -> None:
    recording = load(name)
    played = play(recording, served)
    session = summed(recording, played)
    assert session.turns >= 3
    assert session.is_held, (session, played)
    # Not one token of what was there is rendered again, in any turn.
    assert [one for one in played if one.reused < one.known] == []


def test_real_llamacpp_finds_all_of_a_recorded_history() -> None:
    """By its own count, with answers that a real model has sampled."""
    with free_server("llamacpp") as process:
        played = play(load("langchain-messages"), process, "llamacpp")
    assert len(played) == 4
    assert [one for one in played if one.reused < one.known] == []
