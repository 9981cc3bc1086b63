"""A test waits for an event, or for a state by `tests.support.until`; a sleep that is left has a reason here.

`sleep(0)`, which only lets other tasks run, is free. A new sleep of any other length fails: wait for what it was to
wait for, or name the file, the number and the reason.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]

POLL = "looks again until a bound, at a state that sets no event"
PACE = "the time is what is played: how fast a client, a load or a tool is"
LONG = "part of a long run, not of `make test`"
STUCK = "never ends: the test is about what cancels it"

ALLOWED = {
    "soak/__main__.py": (7, "clients, kills and samples come at their times, for hours"),
    "soak/book.py": (2, "a client asks again for what is not there yet"),
    "support.py": (1, POLL),
    "bounded.py": (1, POLL),
    "conftest.py": (1, "uvicorn's own, made shorter"),
    "haproxy.py": (1, POLL),
    "pgbouncer.py": (1, POLL),
    "crashes.py": (2, POLL),
    "documents/player.py": (1, POLL),
    "contracts/test_buses.py": (2, "publishes again until one is received"),
    "side_by_side.py": (3, f"{POLL}; the clients' pace"),
    "clients/faulty.py": (1, PACE),
    "disk.py": (1, PACE),
    "mcp_server.py": (1, PACE),
    "conform/proxy.py": (1, "a server that is slow to notice that its client has left"),
    "growth/measure.py": (1, "a server comes to rest"),
    "growth/test_measure.py": (1, PACE),
    "listener/test_protocol.py": (1, PACE),
    "vocabularies/test_vocabulary.py": (1, "a heartbeat that measures how long it was held up"),
    "engines/test_scripted.py": (1, PACE),
    "simulator/clients.py": (1, "on a simulated clock"),
    "simulator/process.py": (1, "on a simulated clock"),
    "simulator/removals.py": (1, "on a simulated clock"),
    "simulator/seed.py": (2, "on a simulated clock"),
    "test_aio.py": (1, STUCK),
    "test_rests.py": (1, PACE),
    "tools/test_hosted.py": (2, STUCK),
    "contracts/test_tools.py": (1, STUCK),
    "dashboard/pictures.py": (2, LONG),
    "dynamo/rig.py": (1, LONG),
    "dynamo/sessions.py": (1, LONG),
    "dynamo/test_routers.py": (1, LONG),
    "engines/test_vllm_hollow.py": (1, LONG),
    "kills.py": (3, LONG),
    "observe/test_prometheus.py": (2, LONG),
    "availability.py": (5, LONG),
    "pauses.py": (9, LONG),
    "powercuts.py": (1, LONG),
    "reliability/test_hangs.py": (2, LONG),
    "reliability/test_kills.py": (2, LONG),
    "reliability/test_loop_cuts.py": (1, LONG),
    "reliability/test_memory.py": (2, LONG),
    "reliability/test_nginx.py": (1, LONG),
}


def sleeps_in(text: str) -> int:
    """Calls of a function named `sleep`, but for those of no length."""
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    return sum(is_sleep(call) for call in calls)


def is_sleep(call: ast.Call) -> bool:
    called = call.func
    name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
    is_free = bool(call.args) and isinstance(call.args[0], ast.Constant) and call.args[0].value == 0
    return name == "sleep" and not is_free


def test_each_sleep_has_a_reason() -> None:
    found = {
        str(file.relative_to(TESTS)): count
        for file in sorted(TESTS.rglob("*.py"))
        if (count := sleeps_in(file.read_text("utf-8")))
    }
    assert found == {file: count for file, (count, _) in ALLOWED.items()}


@pytest.mark.parametrize(
    "line, count",
    [
        ("await asyncio.sleep(0)", 0),
        ("await asyncio.sleep(0.1)", 1),
        ("time.sleep(WAIT_S)", 1),
        ("sleep(1); sleep(2)", 2),
        ("sleeping(1)", 0),
        ('run("import time; time.sleep(600)")', 0),
    ],
)
def test_rule_counts_sleeps(line: str, count: int) -> None:
    assert sleeps_in(f"async def work():\n    {line}\n") == count
