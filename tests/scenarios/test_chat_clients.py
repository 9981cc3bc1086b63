"""The official OpenAI clients, unmodified, on Chat Completions: their calls, their helpers, their runner of tools."""

from __future__ import annotations

import json
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
    """Everything in one process: importing the client is what takes time."""
    found: Found = run_python("python_chat.py", served)
    return found


@pytest.fixture(scope="module")
def node(served: ServedProcess) -> Found:
    found: Found = run_node("node_chat.cjs", served)
    return found


@pytest.mark.parametrize("helper", ["create", "parse", "stream"])
def test_python_client_runs_a_loop_of_thirty_turns(python: Found, helper: str) -> None:
    turns = python["loops"][helper]["turns"]
    assert len(turns) == LOOP_TURNS
    for turn, city in zip(turns, CITIES, strict=False):
        ((call_id, name, arguments),) = turn["calls"]
        assert call_id.startswith("call_")
        assert (name, json.loads(arguments)) == ("get_weather", {"city": city})
        assert turn["finish"] == "tool_calls"
    assert (turns[-1]["text"], turns[-1]["finish"]) == (LOOP_END, "stop")
    assert len({turn["id"] for turn in turns}) == LOOP_TURNS
    for turn in turns:
        usage = turn["usage"]
        assert usage["prompt_tokens"] + usage["completion_tokens"] == usage["total_tokens"]


def test_python_client_sees_thoughts_as_the_operator_allows(python: Found) -> None:
    for view, thought in (("text", "Which city?\nOslo."), ("summary", "Which city?\nOslo.")):
        first, second = python["thinking"][view]["turns"]
        assert (first["thought"], second["thought"]) == (thought, "It is sunny.")
    assert [turn["thought"] for turn in python["thinking"]["hidden"]["turns"]] == [None, None]


def test_python_client_reads_chunks_shapes_and_logprobs(python: Found) -> None:
    *chunks, last = python["chunks"]
    assert last["choices"] == []
    assert last["usage"]["total_tokens"] > 0
    text = "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks)
    assert "".join(python["likely"]) == text
    assert set(python["shaped"]) == {"name", "people"}


@pytest.mark.parametrize(
    "name, kind, code",
    [
        ("model", "NotFoundError", "model_not_found"),
        ("n", "BadRequestError", "unsupported_value"),
        ("stored", "NotFoundError", "not_found"),
        ("listed", "NotFoundError", "not_found"),
        ("embeddings", "NotFoundError", "unknown_url"),
        ("completions", "NotFoundError", "unknown_url"),
    ],
)
def test_python_client_catches_its_own_errors(
    python: Found, name: str, kind: str, code: str
) -> None:
    error = python["errors"][name]
    assert (error["kind"], error["code"]) == (kind, code)
    assert error["request_id"].startswith("req_")


@pytest.mark.parametrize("way", ["plain", "streamed"])
def test_javascript_client_runs_its_tools(node: Found, way: str) -> None:
    run = node["runs"][way]
    assert (run["asked"], run["text"]) == (CITIES, LOOP_END)


def test_javascript_client_reads_thoughts(node: Found) -> None:
    assert node["thinking"] == {"thought": "Which city?\nOslo.", "finish": "stop"}
