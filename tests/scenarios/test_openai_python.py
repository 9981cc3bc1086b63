"""The official OpenAI Python client, unmodified, against the `segue` command."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from typing import Any

import pytest
import zstandard

from tests.clients.outside import CITIES, LOOP_END, LOOP_TURNS, run_python, serving_clients
from tests.events import check_refusal, check_response, check_usage
from tests.support import ServedProcess, fetch


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServedProcess]:
    with serving_clients(tmp_path_factory.mktemp("clients")) as served:
        yield served


Found = dict[str, Any]

TRANSPORTS = ("json", "sse", "helper", "socket")
VIEWS = ("text", "summary", "hidden")


@pytest.fixture(scope="module")
def loops(served: ServedProcess) -> Found:
    """All loops, one after the other in one process: importing the client is what takes time."""
    asked = [f"{model}/{one}" for model in ("loop", "improvised") for one in TRANSPORTS]
    asked += [f"thinking-{view}/helper" for view in VIEWS]
    found: Found = run_python("python_loop.py", served, *asked)
    return found


@pytest.fixture(scope="module")
def lanes(served: ServedProcess) -> Found:
    """All stories with lanes, in one process."""
    asked = ("lanes/together", "lanes/fork", "improvised/blocking")
    found: Found = run_python("python_lanes.py", served, *asked)
    return found


@pytest.fixture(scope="module")
def called(served: ServedProcess) -> Found:
    """What the client's plain calls gave."""
    found: Found = run_python("python_calls.py", served, "improvised")
    return found


def unbroken(found: Found, name: str) -> Any:
    """What a script found under this name."""
    assert "broke" not in found[name], found[name]["broke"]
    return found[name]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_python_client_runs_a_loop_of_thirty_turns(loops: Found, transport: str) -> None:
    """Every call comes back under its own id, and each turn after the first costs what is new in it."""
    turns = unbroken(loops, f"loop/{transport}")["turns"]
    assert len(turns) == LOOP_TURNS
    for turn, city in zip(turns, CITIES, strict=False):
        ((call_id, name, arguments),) = turn["calls"]
        assert call_id.startswith("call_")
        assert (name, json.loads(arguments)) == ("get_weather", {"city": city})
    assert len({turn["calls"][0][0] for turn in turns[:-1]}) == LOOP_TURNS - 1
    assert turns[-1]["text"] == LOOP_END
    _check_chain([turn["response"] for turn in turns])
    for turn in turns:
        check_usage(turn["response"]["usage"])
        if transport != "json":
            assert turn["types"][0] == "response.created"
            assert turn["types"][-1] == "response.completed"
    _check_costs(turns)


def _check_chain(responses: list[dict[str, Any]]) -> None:
    parent = None
    for response in responses:
        assert response["status"] == "completed"
        assert response["previous_response_id"] == parent
        parent = response["id"]


def _check_costs(turns: list[dict[str, Any]]) -> None:
    """Segue's own counters: what each turn received, validated, decoded and tokenized."""
    costs = [turn["counted"] for turn in turns]
    # The loop before may have begun with the same words and tools: then these are known.
    assert [cost["segue_items_validated_total"] for cost in costs[1:]] == [1] * (len(turns) - 1)
    assert costs[0]["segue_items_validated_total"] <= 1
    assert [cost["segue_tool_decodes_total"] for cost in costs[1:]] == [0] * (len(turns) - 1)
    assert costs[0]["segue_tool_decodes_total"] <= 1
    bytes_each = [cost["segue_bytes_received_total"] for cost in costs]
    assert max(bytes_each[1:]) - min(bytes_each[1:]) < 64, "a turn received more than what is new"
    tokenized = [cost["segue_tokens_tokenized_total"] for cost in costs]
    reused = [cost["segue_tokens_reused_total"] for cost in costs]
    usages = [turn["response"]["usage"] for turn in turns]
    # Every token of a prompt is new or taken over; what is left is the cue that makes the model speak.
    rest = {u["input_tokens"] - t - r for u, t, r in zip(usages, tokenized, reused, strict=True)}
    assert len(rest) == 1
    assert 0 <= rest.pop() < 8
    # What came before is taken over whole, sampled tokens included, and only a short output is new.
    assert all(r >= u["total_tokens"] for u, r in zip(usages, reused[1:], strict=False))
    assert all(0 < t < 40 for t in tokenized[1:])
    assert sum(reused) > 10 * sum(tokenized)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_python_client_holds_a_conversation_with_the_improvising_engine(
    loops: Found, transport: str
) -> None:
    first, last = unbroken(loops, f"improvised/{transport}")["turns"]
    assert json.loads(first["calls"][0][2]) == {"city": "city"}
    assert "sunny in city" in last["text"]
    assert isinstance(last["response"]["usage"]["total_tokens"], int)


@pytest.mark.parametrize("view", VIEWS)
def test_strict_helper_accepts_reasoning_however_it_is_shown(loops: Found, view: str) -> None:
    turns = unbroken(loops, f"thinking-{view}/helper")["turns"]
    assert [turn["response"]["output"][0]["type"] for turn in turns] == ["reasoning", "reasoning"]
    assert turns[-1]["text"] == "Sunny."
    thought = turns[0]["response"]["output"][0]
    shown = {"text": thought.get("content"), "summary": thought["summary"], "hidden": None}[view]
    assert (shown[0]["text"] if shown else None) == (
        None if view == "hidden" else "Which city?\nOslo."
    )


def test_managed_session_runs_two_lanes_beside_each_other(lanes: Found) -> None:
    found = unbroken(lanes, "lanes/together")
    for responses in found["lanes"].values():
        assert len(responses) == 3
        _check_chain(responses)
        assert responses[-1]["output"][0]["content"][0]["text"].startswith("Both.")
    order = found["order"]
    assert {lane for lane, _ in order} == {"a", "b"}
    begins = [order.index([lane, "response.created"]) for lane in "ab"]
    ends = [order.index([lane, "response.completed"]) for lane in "ab"]
    assert max(begins) < min(ends), "the lanes were not interleaved"


def test_managed_session_forks_from_another_lane(lanes: Found) -> None:
    """Both children have the parent's history; a refusal on one lane touches neither the socket nor the other."""
    found = unbroken(lanes, "lanes/fork")
    root, left, right = found["root"], found["left"], found["right"]
    assert left["previous_response_id"] == right["previous_response_id"] == root["id"]
    assert left["id"] != right["id"]
    assert left["usage"]["input_tokens"] == right["usage"]["input_tokens"]
    assert left["usage"]["input_tokens"] > root["usage"]["total_tokens"]
    for child in (left, right):
        assert json.loads(child["output"][-1]["arguments"]) == {"city": "Rome"}
    check_refusal(found["refused"], 400, "previous_response_not_found", lane="b")
    assert found["on"]["status"] == "completed"
    assert found["on"]["output"][0]["content"][0]["text"].startswith("Both.")


def test_blocking_session_speaks_on_named_lanes_and_the_default_one(lanes: Found) -> None:
    found = unbroken(lanes, "improvised/blocking")["lanes"]
    assert set(found) == {"a", "b", "default"}
    for call, answer in found.values():
        assert call["output"][0]["type"] == "function_call"
        assert answer["previous_response_id"] == call["id"]
        assert "sunny" in answer["output"][0]["content"][0]["text"]


def test_python_client_retrieves_what_it_created(called: Found) -> None:
    assert called["fetched"] == called["made"]
    assert called["made"]["metadata"] == {"for": "test"}
    assert called["made"]["temperature"] == 0.5
    assert called["request_id"]


def test_python_client_pages_through_input_items_in_both_orders(called: Found) -> None:
    items = [f"item {index}" for index in range(7)]
    assert called["asc"] == items
    assert called["desc"] == called["unset"] == items[::-1]
    assert called["first"] == [items[:3], True]
    assert called["after"] == items[3:]
    assert len(set(called["ids"])) == len(items)


def test_python_client_lists_and_retrieves_models(called: Found) -> None:
    assert {"loop", "improvised"} <= set(called["models"])
    model = called["model"]
    assert (model["id"], model["object"]) == ("improvised", "model")
    assert isinstance(model["created"], int)


@pytest.mark.parametrize(
    ("call", "kind", "code", "param"),
    [
        ("parent", "BadRequestError", "previous_response_not_found", "previous_response_id"),
        (
            "parent streamed",
            "BadRequestError",
            "previous_response_not_found",
            "previous_response_id",
        ),
        ("model", "NotFoundError", "model_not_found", "model"),
        ("model card", "NotFoundError", "model_not_found", "model"),
        ("response", "NotFoundError", "not_found", "response_id"),
        ("unstored", "NotFoundError", "not_found", "response_id"),
        ("temperature", "BadRequestError", "invalid_value", "temperature"),
        ("limit", "BadRequestError", "invalid_request", "limit"),
        ("deleted", "NotFoundError", "not_found", "response_id"),
        ("deleted twice", "NotFoundError", "not_found", "response_id"),
        ("deleted items", "NotFoundError", "not_found", "response_id"),
        (
            "deleted parent",
            "BadRequestError",
            "previous_response_not_found",
            "previous_response_id",
        ),
        ("orphan", "BadRequestError", "previous_response_not_found", "previous_response_id"),
    ],
)
def test_python_client_catches_the_error_it_knows(
    called: Found, call: str, kind: str, code: str, param: str
) -> None:
    error = called["errors"][call]
    assert error["kind"] == kind, error
    assert (error["code"], error["param"]) == (code, param)
    assert error["type"] == "invalid_request_error"
    assert error["request_id"].startswith("req_")


def test_child_of_a_deleted_response_keeps_its_own_answer(called: Found) -> None:
    assert "And now?" in called["child"]


def test_python_client_parses_an_answer_in_its_own_shape(called: Found) -> None:
    assert called["parsed"] == {"name": "name", "people": 1}


def test_strict_helper_hears_an_answer_that_is_cut_short(called: Found) -> None:
    assert called["cut"][-2:] == ["response.output_item.done", "response.incomplete"]


def test_python_client_resends_a_whole_history_as_its_own_objects(called: Found) -> None:
    assert "snow" in called["resent"]


def test_python_client_warms_up_and_then_sends_nothing_new(called: Found) -> None:
    (warm, nothing), (types, text) = called["warm"]
    assert warm == ["response.created", "response.in_progress", "response.completed"]
    assert nothing == ""
    assert types[-1] == "response.completed"
    assert text


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_client_sends_a_compressed_body(served: ServedProcess, encoding: str) -> None:
    text = "Long ago. " * 5_000
    plain = json.dumps({"model": "improvised", "input": text}).encode()
    packed = gzip.compress(plain) if encoding == "gzip" else zstandard.compress(plain)
    assert len(packed) < len(plain) / 10
    headers = {"Content-Encoding": encoding, "Content-Type": "application/json"}
    answer = await fetch(served, "POST", "/v1/responses", packed, headers)
    assert answer.status == 200, answer.body
    check_response(answer.json)
    assert "Long ago." in answer.json["output"][0]["content"][0]["text"]
    broken = await fetch(served, "POST", "/v1/responses", b"?" + packed[1:], headers)
    assert broken.status == 400
    assert broken.json["error"]["code"] == "invalid_encoding"


@pytest.fixture(scope="module")
def more(served: ServedProcess) -> Found:
    """What the client's newer calls gave."""
    found: Found = run_python("python_more.py", served, "improvised", "slow")
    return found


def test_python_client_leaves_a_response_in_the_background(more: Found) -> None:
    """It polls one until it is done, hears it again from the middle, and cancels another."""
    found = unbroken(more, "background")
    assert found["made"] in ("queued", "in_progress")
    assert found["done"] == ["completed", "I play a script, I am not a model. You said: Hello"]
    assert found["followed"] == [3, "response.completed"]
    assert found["cancelled"] == "cancelled"


def test_python_client_compacts_and_counts(more: Found) -> None:
    found = unbroken(more, "compaction")
    assert found["object"] == "response.compaction"
    assert found["types"][-1] == "compaction"
    assert found["answer"] == "completed"
    counted, used = found["tokens"]
    assert counted == used


def test_python_client_keeps_a_conversation(more: Found) -> None:
    assert unbroken(more, "conversations")["roles"] == ["user", "assistant"] * 2


def test_python_client_steers_while_the_model_speaks(more: Found) -> None:
    found = unbroken(more, "steering")
    assert found["steer"] == ["response.steer.accepted"]
    assert found["ends"][0] in ("response.incomplete", "response.completed")
    assert found["ends"][1] == "response.completed"
    assert found["parents"] == [None, found["first"]]
