"""`make walk`: a real turn under the tracer, and the counting on made-up ones."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import textwrap
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bench.size import code_line_numbers, room_of
from bench.tracer import Recorder
from bench.vllm import IDS, ids_of
from bench.walk import Hop, Recording, Spot, cell, count, main, path_lines, shared

READ = Spot("listener/socket.py", "Socket.read")
DECODE = Spot("wire/codec.py", "decode")
CHECK = Spot("wire/codec.py", "check")
RUN = Spot("turn/run.py", "run")
NEW_ID = Spot("ids.py", "new_id")
PATH = [Hop(None, READ), Hop(READ, DECODE), Hop(DECODE, CHECK), Hop(None, RUN), Hop(RUN, NEW_ID)]


def walked(path: Path) -> dict[str, Any]:
    """What the command writes about a plain turn on a WebSocket."""
    assert main(["--kind", "websocket", "--summary", "--json", str(path)]) == 0
    kind: dict[str, Any] = json.loads(path.read_text())["kinds"]["websocket"]
    return kind


def passed(walk: dict[str, Any]) -> tuple[int, ...]:
    """What was passed; the order in which tasks take their turns may differ."""
    return tuple(walk["counts"][name] for name in ("hops", "functions", "files", "rooms"))


def test_walk_of_a_websocket_turn_passes_the_main_rooms(tmp_path: Path) -> None:
    assert {"listener", "responses", "session", "turn", "engines"} <= set(
        map(room_of, walked(tmp_path / "1.json")["files"])
    )


@pytest.mark.reliability
def test_two_walks_of_a_websocket_turn_are_the_same(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        one, other = pool.map(walked, [tmp_path / "1.json", tmp_path / "2.json"])
    if passed(one) != passed(other):
        # A busy machine may cut off the work after a response; then two of three must agree.
        third = walked(tmp_path / "3.json")
        assert passed(third) in (passed(one), passed(other))


def test_reader_is_told_when_there_is_no_package(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--src", str(tmp_path)]) == 1
    assert "there is no package segue" in capsys.readouterr().err


def test_counts_are_of_distinct_places_and_of_changes_between_neighbours(tmp_path: Path) -> None:
    for hop in PATH:
        file = tmp_path / hop.callee.file
        file.parent.mkdir(exist_ok=True)
        file.write_text('"""A docstring."""\n\nx = 1  # code\n# none\n')
    counts = count(Recording(PATH, tasks=1), tmp_path)
    assert (counts.hops, counts.functions, counts.tasks) == (5, 5, 1)
    assert (counts.files, counts.file_changes, counts.code_lines) == (4, 3, 4)
    assert (counts.rooms, counts.room_changes) == (4, 3)


def test_hop_that_one_turn_does_not_make_is_left_out() -> None:
    timer = Hop(None, Spot("app.py", "tick"))
    turns = [Recording([timer, *PATH], 3), Recording(PATH[::-1], 2)]
    assert shared(turns) == Recording(PATH, 2)


def test_path_names_rooms_files_and_callers_where_they_change() -> None:
    assert [line.strip() for line in path_lines(PATH[:3])] == [
        "[bold]listener[/]",
        "[cyan]socket.py[/]",
        "Socket.read  [dim]<- loop[/]",
        "[bold]wire[/]",
        "[cyan]codec.py[/]",
        "decode",
        "check",
    ]


@pytest.mark.parametrize(
    "now, before, shown",
    [(1200, None, "1,200"), (90, 120, "90 (-25%)"), (3, 0, "3 (was 0)"), (2, 2, "2 (+0%)")],
)
def test_change_is_shown_in_percent(now: int, before: int | None, shown: str) -> None:
    assert cell(now, before) == shown


PROGRAM = """
import asyncio

class Thing:
    @property
    def value(self):
        return [sorted([n], key=lambda one: leaf(one)) for n in range(3)]

def leaf(n):
    return n

async def numbers():
    for n in range(3):
        await asyncio.sleep(0)
        yield n

async def inner():
    await asyncio.sleep(0)
    async for n in numbers():
        leaf(n)

async def outer():
    await asyncio.gather(inner(), inner())
    return Thing().value
"""


@pytest.fixture
def recorder(tmp_path: Path) -> Recorder:
    return Recorder(str(tmp_path) + os.sep)


@pytest.fixture
def outer(tmp_path: Path) -> Callable[[], Coroutine[Any, Any, object]]:
    """A function in a file of the package that is watched."""
    scope: dict[str, Any] = {"__name__": "made_up"}
    exec(compile(PROGRAM, str(tmp_path / "room" / "file.py"), "exec"), scope)
    found: Callable[[], Coroutine[Any, Any, object]] = scope["outer"]
    return found


def watch(recorder: Recorder, run: Callable[[], Coroutine[Any, Any, object]]) -> None:
    recorder.on()
    before = sys.getprofile()
    sys.setprofile(recorder.see)
    try:
        asyncio.run(run())
    finally:
        sys.setprofile(before)


def test_tracer_counts_the_start_of_a_coroutine_and_not_its_resumption(
    recorder: Recorder, outer: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    watch(recorder, outer)
    recorded = recorder.off()
    names = [(caller and caller[1], callee[1]) for caller, callee in recorded["hops"]]
    assert names == [
        (None, "outer"),
        (None, "inner"),
        ("inner", "numbers"),
        ("inner", "leaf"),
        ("outer", "Thing.value"),
        ("Thing.value", "leaf"),
    ]
    assert recorded["tasks"] == 3


def test_tracer_leaves_out_what_it_was_told_to_ignore(
    recorder: Recorder, outer: Callable[[], Coroutine[Any, Any, object]]
) -> None:
    watch(recorder, outer)
    recorder.ignore()
    watch(recorder, outer)
    assert recorder.off() == {"hops": [], "tasks": 0}


def test_engine_writes_words_as_ids() -> None:
    assert ids_of("It is noon.") == [IDS["It"], IDS[" is"], IDS[" noon"], IDS["."]]


def test_code_lines_are_not_blank_and_no_comments_or_docstrings() -> None:
    text = '''\
    """A module.

    With more."""

    import os  # one

    # none
    class Thing:
        """None."""

        at = """two
        of them"""
        """None either."""

        def f(self):
            return (
                1
            )
    '''
    assert code_line_numbers(textwrap.dedent(text)) == {5, 8, 11, 12, 15, 16, 17, 18}
