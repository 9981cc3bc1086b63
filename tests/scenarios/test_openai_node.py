"""The official OpenAI JavaScript client's `ResponsesWS`, unmodified, against the `segue` command."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.clients.outside import CITIES, LOOP_END, LOOP_TURNS, run_node, serving_clients
from tests.events import check_refusal, check_response
from tests.support import ServedProcess, metric

Found = dict[str, Any]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with serving_clients(tmp_path_factory.mktemp("clients")) as served:
        yield served


def run(served: ServedProcess, story: str) -> Found:
    """What came of a story; it was told on one socket, closed by the client, and nothing on it was odd."""
    found: Found = run_node("node_loop.cjs", served, story)[story]
    assert "broke" not in found, found["broke"]
    assert found["closes"] == [1000]
    assert found["raws"] == 0
    return found


async def test_node_client_runs_a_loop_of_thirty_turns_on_one_socket(
    served: ServedProcess,
) -> None:
    """Every response is complete, and Segue counts only what was new in each turn."""
    names = ("items_validated", "tool_decodes", "tokens_tokenized", "tokens_reused")
    before = [await metric(served, f"segue_{name}_total") for name in names]
    found = run(served, "loop/loop")
    after = [await metric(served, f"segue_{name}_total") for name in names]
    responses = found["responses"]
    assert len(responses) == LOOP_TURNS
    parent = None
    for response in responses:
        check_response(response)
        assert response["previous_response_id"] == parent
        parent = response["id"]
    calls = [response["output"][0] for response in responses[:-1]]
    assert [json.loads(call["arguments"])["city"] for call in calls] == CITIES
    assert len({call["call_id"] for call in calls}) == len(calls)
    assert responses[-1]["output"][0]["content"][0]["text"] == LOOP_END
    assert found["errors"] == []
    items, decodes, tokenized, reused = (a - b for a, b in zip(after, before, strict=True))
    assert items == LOOP_TURNS
    assert decodes == 1
    assert reused > 10 * tokenized


def test_node_client_goes_on_after_an_error_on_the_same_socket(served: ServedProcess) -> None:
    found = run(served, "refusal/improvised")
    check_refusal(found["refused"], 400, "previous_response_not_found")
    assert found["refused"]["error"]["param"] == "previous_response_id"
    assert found["errors"] == ["WebSocketError"]
    assert found["next"]["previous_response_id"] == found["first"]["id"]
    assert "sunny in city" in found["next"]["output"][0]["content"][0]["text"]


def test_node_client_runs_lanes_beside_each_other_and_forks(served: ServedProcess) -> None:
    found = run(served, "lanes/lanes")
    for lane in ("a", "b"):
        assert len(found[lane]) == 3
        assert found[lane][-1]["output"][0]["content"][0]["text"].startswith("Both.")
    order = found["order"]
    assert {lane for lane, _ in order} == {"a", "b"}
    begins = [order.index([lane, "response.created"]) for lane in "ab"]
    ends = [order.index([lane, "response.completed"]) for lane in "ab"]
    assert max(begins) < min(ends), "the lanes were not interleaved"
    # The parent is an older turn of lane a, unstored: this connection has kept it all the same.
    fork = found["fork"]
    assert fork["type"] == "response.completed", fork
    assert fork["response"]["previous_response_id"] == found["a"][0]["id"]
    assert json.loads(fork["response"]["output"][-1]["arguments"]) == {"city": "Rome"}
