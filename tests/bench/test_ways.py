"""Each way against a server that keeps what it was sent: do the frames follow the contract?"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.server import ServerConnection, serve

from segue_bench.client import ServerAddress
from segue_bench.plan import CODEX
from segue_bench.server import ServerNotStarted, spawn
from segue_bench.ways import RolloutWay, TurnFailed, WayNotSupported, WayTarget, make_way
from segue_bench.workload import WorkloadMaker

CALL = {"type": "function_call", "call_id": "call_1", "name": "read_file", "arguments": "{}"}
COMPLETED = {"type": "response.completed", "response": {"id": "resp_1", "output": [CALL]}}
DONE = {
    "type": "response.done",
    "sequence_number": 9,
    "response_id": "resp_2",
    "required_input": [
        {"type": "function_call_output", "call_id": "call_a", "name": "read_file"},
        {"type": "function_call_output", "call_id": "call_b", "name": "read_file"},
    ],
}
ENDED = {"type": "response.completed", "response": {"id": "resp_2", "output": []}}


@contextmanager
def answering(answer: Callable[[int], dict[str, Any]]) -> Iterator[tuple[WayTarget, list[Any]]]:
    """A WebSocket server that gives the n-th message the n-th answer, and what it was sent."""
    heard: list[Any] = []

    def listen(socket: ServerConnection) -> None:
        for message in socket:
            heard.append(json.loads(message))
            socket.send(json.dumps({"type": "response.created"}, separators=(",", ":")))
            socket.send(json.dumps(answer(len(heard)), separators=(",", ":")))

    with serve(listen, "127.0.0.1", 0, compression=None) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        port = server.socket.getsockname()[1]
        workload = WorkloadMaker(CODEX, 1).workload(1, 1.0, 3)
        yield WayTarget(ServerAddress(f"http://127.0.0.1:{port}"), "any", workload), heard
        server.shutdown()
        thread.join(10)


def test_rollout_begins_once_and_appends_every_output() -> None:
    answers = {1: COMPLETED, 2: DONE, 3: DONE, 4: ENDED}
    with answering(lambda number: answers[number]) as (target, heard):
        way = make_way("rollout", target)
        way.open()
        for output in target.workload.outputs:
            way.turn(output)
        way.close()
    opening, begin, *appends = heard
    assert "rollout" not in opening
    assert begin["rollout"] is True
    assert begin["previous_response_id"] == "resp_1"
    assert [item["call_id"] for item in begin["input"]] == ["call_1"]
    assert len(appends) == 2
    for frame, output in zip(appends, target.workload.outputs[1:], strict=True):
        assert frame.keys() == {"type", "response_id", "input"}
        assert frame["type"] == "response.append"
        assert frame["response_id"] == "resp_2"
        assert [item["call_id"] for item in frame["input"]] == ["call_a", "call_b"]
        assert all(item["output"] == output for item in frame["input"])


def test_a_server_without_rollout_mode_is_recognised() -> None:
    with answering(lambda number: COMPLETED) as (target, _):
        way = make_way("rollout", target)
        way.open()
        with pytest.raises(WayNotSupported, match="no rollout mode"):
            way.turn("out")
        way.close()


def test_a_server_that_refuses_rollout_mode_is_recognised() -> None:
    error = {"type": "error", "error": {"code": "unsupported_parameter", "message": "rollout?"}}
    with answering(lambda number: COMPLETED if number == 1 else error) as (target, _):
        way = RolloutWay(target)
        way.open()
        with pytest.raises(WayNotSupported, match="unsupported_parameter"):
            way.turn("out")
        way.close()


def test_a_failed_turn_says_what_the_server_said() -> None:
    failed = {"type": "response.failed", "response": {"id": "r", "error": {"code": "broken"}}}
    with answering(lambda number: failed) as (target, _):
        way = make_way("ws", target)
        with pytest.raises(TurnFailed, match="broken"):
            way.open()
        way.close()


def test_a_socket_sends_only_what_is_new() -> None:
    with answering(lambda number: COMPLETED) as (target, heard):
        way = make_way("ws", target)
        way.open()
        way.turn("one")
        way.close()
    first, second = heard
    assert len(first["input"]) == len(target.workload.opening)
    assert second["input"] == [
        {"type": "function_call_output", "call_id": "call_1", "output": "one"}
    ]
    assert second["tools"] == first["tools"]
    assert second["store"] is False


def test_a_server_of_ours_that_does_not_start_says_why(tmp_path: Path) -> None:
    command = ["-m", "segue_cli.cli", "serve", "--engine", "scripted", "--store", "nowhere"]
    with pytest.raises(ServerNotStarted, match="nowhere"), spawn(command, "port (1)", tmp_path):
        pass
