"""Does every endless loop run where its errors are heard, and is each of them documented?

An endless loop is an async function with `while True`. It is started by `segue.aio`, which names it, logs what
it raises and starts it again: not as a bare task, whose error nobody hears of until somebody waits for it. The rule
goes by the names of functions, and does not follow one through a variable. A made-up tree shows that it can fail.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# The packages of a server.
PACKAGES = [ROOT / "src" / name for name in ("segue", "segue_dashboard", "segue_embedded")]
PAGE = ROOT / "docs" / "observability.md"

SUPERVISOR = "aio.py"
STARTERS = {"create_task", "ensure_future", "spawn"}
NAMED_BY = {"in_background", "run_forever"}
# File and function of loops that are heard of in another way.
HEARD = {
    ("supervisor.py", "keep"): "a child process: an error ends its parent, with a traceback",
}


def trees(package: Path) -> Iterator[tuple[Path, ast.Module]]:
    for path in sorted(package.rglob("*.py")):
        yield path, ast.parse(path.read_text("utf-8"))


def endless(tree: ast.Module) -> set[str]:
    """The names of the functions that never return."""
    return {
        function.name
        for function in ast.walk(tree)
        if isinstance(function, ast.AsyncFunctionDef)
        for node in ast.walk(function)
        if isinstance(node, ast.While) and isinstance(node.test, ast.Constant) and node.test.value
    }


def called(call: ast.Call) -> str:
    """The last part of the name of what is called."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def bare_loops(package: Path) -> list[str]:
    others = [(path, tree) for path, tree in trees(package) if path.name != SUPERVISOR]
    loops = {name for _, tree in others for name in endless(tree)}
    return [
        f"{path.relative_to(package)}, line {node.lineno}: {called(work)} is an endless loop: use in_background"
        for path, tree in others
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) in STARTERS
        for work in node.args[:1]
        if isinstance(work, ast.Call) and called(work) in loops
        if (path.name, called(work)) not in HEARD
    ]


def names(package: Path) -> set[str]:
    """The names of all background loops."""
    return {
        ast.literal_eval(node.args[0])
        for path, tree in trees(package)
        if path.name != SUPERVISOR
        for node in ast.walk(tree)
        if isinstance(node, ast.Call) and called(node) in NAMED_BY
    }


def documented(page: str) -> set[str]:
    table = page.partition("<!-- loops -->")[2].partition("<!-- end of loops -->")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`(\w+)`", row)}


def test_no_endless_loop_is_a_bare_task() -> None:
    assert [loop for package in PACKAGES for loop in bare_loops(package)] == []


def test_every_loop_is_documented_and_no_other() -> None:
    found = set().union(*map(names, PACKAGES))
    assert len(found) > 20
    assert documented(PAGE.read_text("utf-8")) == found


LOOP = "async def keep_on(self):\n    while True:\n        await self.work()\n"
ENDS = "async def keep_on(self):\n    while self.waiting:\n        await self.work()\n"


@pytest.mark.parametrize(
    "text, complains",
    [
        (LOOP + "task = asyncio.create_task(keep_on(one))", True),
        (LOOP + "tasks.create_task(self.room.keep_on())", True),
        (LOOP + "asyncio.ensure_future(keep_on(one))", True),
        (LOOP + "in_background('work', keep_on)", False),
        (LOOP + "create_task(run_forever('work', keep_on))", False),
        (ENDS + "create_task(keep_on(one))", False),
        ("create_task(answer(one))", False),
    ],
)
def test_rule_tells_a_bare_loop_from_one_that_is_heard(
    tmp_path: Path, text: str, complains: bool
) -> None:
    (tmp_path / "room.py").write_text(text)
    assert bool(bare_loops(tmp_path)) is complains
