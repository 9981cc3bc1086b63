"""The official Anthropic clients in Python and JavaScript, unmodified, against the `segue` command.

Calls, streams, counts, models, parsing and errors; their tool runners are in `test_anthropic_threads.py`. All stories
of a client are told in one process: importing it is what takes time.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.outside import (
    CITIES,
    LOOP_END,
    LOOP_TURNS,
    run_node,
    run_python,
    serving_clients,
)
from tests.support import ServedProcess

Found = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with serving_clients(tmp_path_factory.mktemp("clients")) as served:
        yield served


@pytest.fixture(scope="module")
def python(served: ServedProcess) -> Found:
    stories = ("created/loop", "streamed/loop", "streamed/thinking-text", "counted/loop")
    more = ("parsed/improvised", "models/loop", "refused/improvised")
    found: Found = run_python("python_messages.py", served, *stories, *more)
    return found


@pytest.fixture(scope="module")
def node(served: ServedProcess) -> Found:
    stories = ("created/loop", "streamed/loop", "streamed/thinking-text")
    found: Found = run_node(
        "node_messages.cjs", served, *stories, "counted/loop", "models/loop", "refused/loop"
    )
    return found


def unbroken(found: Found, name: str) -> Any:
    """What a program found under this name."""
    assert "broke" not in found[name], found[name]["broke"]
    return found[name]


def prompt_tokens(usage: dict[str, Any]) -> int:
    """On Messages the prompt is the sum of three."""
    names = ("input_tokens", "cache_creation_input_tokens", "cache_read_input_tokens")
    return sum(usage[name] or 0 for name in names)


def check_loop(turns: list[dict[str, Any]]) -> None:
    """A call for each city under an id of its own, then the end; each prompt goes on from the one before."""
    assert len(turns) == LOOP_TURNS
    calls = [block for turn in turns for block in turn["content"] if block["type"] == "tool_use"]
    assert [call["input"]["city"] for call in calls] == CITIES
    assert len({call["id"] for call in calls}) == len(calls)
    assert [turn["stop_reason"] for turn in turns] == ["tool_use"] * len(CITIES) + ["end_turn"]
    assert turns[-1]["content"][-1]["text"] == LOOP_END
    for before, turn in itertools.pairwise(turns):
        # The answer, its end and the tool's output are new.
        used = prompt_tokens(before["usage"]) + before["usage"]["output_tokens"]
        assert used < prompt_tokens(turn["usage"]) < used + 60


@pytest.mark.parametrize("client", ["python", "node"])
@pytest.mark.parametrize("story", ["created", "streamed"])
def test_client_runs_a_loop_with_its_whole_history(
    request: pytest.FixtureRequest, client: str, story: str
) -> None:
    found = unbroken(request.getfixturevalue(client), f"{story}/loop")
    check_loop(found["turns"])
    for types in found.get("types", ()):
        assert (types[0], types[-1]) == ("message_start", "message_stop")
        assert types.count("content_block_start") == types.count("content_block_stop") > 0


@pytest.mark.parametrize("client", ["python", "node"])
def test_thoughts_come_with_a_signature_and_are_taken_back(
    request: pytest.FixtureRequest, client: str
) -> None:
    turns = unbroken(request.getfixturevalue(client), "streamed/thinking-text")["turns"]
    assert [turn["content"][0]["type"] for turn in turns] == ["thinking", "thinking"]
    assert turns[0]["content"][0]["thinking"] == "Which city?\nOslo."
    assert all(turn["content"][0]["signature"] for turn in turns)
    assert turns[-1]["content"][-1]["text"] == "Sunny."


@pytest.mark.parametrize("client", ["python", "node"])
def test_count_of_tokens_is_what_the_turn_uses(request: pytest.FixtureRequest, client: str) -> None:
    found = unbroken(request.getfixturevalue(client), "counted/loop")
    assert found["tokens"] == prompt_tokens(found["usage"]) > 0


@pytest.mark.parametrize("client", ["python", "node"])
def test_models_are_listed_in_anthropics_shape(request: pytest.FixtureRequest, client: str) -> None:
    found = unbroken(request.getfixturevalue(client), "models/loop")
    assert {"loop", "improvised"} <= {model["id"] for model in found["listed"]}
    assert (found["one"]["id"], found["one"]["type"]) == ("loop", "model")


def test_anthropic_client_parses_an_answer_in_its_own_shape(python: Found) -> None:
    assert unbroken(python, "parsed/improvised")["town"] == {"name": "name", "people": 1}


@pytest.mark.parametrize(
    ("call", "kind", "words"),
    [
        ("model", "NotFoundError", "model: nobody"),
        ("temperature", "BadRequestError", "temperature"),
        ("orphan", "BadRequestError", "tool_use"),
        ("server tool", "BadRequestError", "code_execution"),
    ],
)
def test_anthropic_client_catches_the_error_it_knows(
    python: Found, call: str, kind: str, words: str
) -> None:
    error = unbroken(python, "refused/improvised")[call]
    assert error["kind"] == kind
    assert error["body"]["type"] == "error"
    assert words in error["body"]["error"]["message"]
    assert error["request_id"] == error["body"]["request_id"]


def test_javascript_client_catches_an_unknown_model(node: Found) -> None:
    error = unbroken(node, "refused/loop")
    assert (error["kind"], error["status"]) == ("NotFoundError", 404)
    assert error["body"]["error"] == {"type": "not_found_error", "message": "model: nobody"}
    assert error["request_id"] == error["body"]["request_id"]
