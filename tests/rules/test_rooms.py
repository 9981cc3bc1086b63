"""Has a room become a drawer?

A room that is too large to be known well is divided. What every server has, whatever it serves, has a limit as a whole,
and so has the reading path: the files that ARCHITECTURE.md names between `<!-- reading path -->` and `<!-- end -->`,
for a newcomer's afternoon. Lines are code lines (`python -m bench.size`). Made-up trees show that each rule can fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from bench.size import code_lines as counted_lines

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
PACKAGE = SOURCE / "segue"

ROOM_LINES_MAX = 3_000
# The sum of the rooms that every server has, whatever API, tool, engine or store. No feature raises it; a raise is a
# commit of its own that edits docs/decisions/0018-rooms.md.
CORE_LINES_MAX = 15_500
PATH_LINES_MAX = 5_800
CORE_ROOMS = {
    *("settings", "wire", "seams", "session", "turn", "process", "memory", "accounts"),
    *("listener", "server", "observe"),
}
# The modules beside the rooms, which count as one room.
LOOSE = "loose modules"
# Packages beside the server, each with rooms of its own.
BESIDE = ("segue_cli", "segue_dashboard", "segue_embedded")

# Two rules count the same files.
code_lines = cache(counted_lines)


def rooms(package: Path) -> dict[str, list[Path]]:
    """The files of each folder of the package, and those beside the folders."""
    folders = sorted(path for path in package.iterdir() if path.is_dir())
    found = {folder.name: sorted(folder.rglob("*.py")) for folder in folders}
    return found | {LOOSE: sorted(package.glob("*.py"))}


def room_lines(package: Path) -> dict[str, int]:
    return {room: sum(map(code_lines, files)) for room, files in rooms(package).items()}


def drawers(package: Path) -> Iterator[str]:
    """Rooms that are too large."""
    for room, lines in room_lines(package).items():
        if lines > ROOM_LINES_MAX:
            yield f"{package.name}/{room} has {lines:,} code lines, more than {ROOM_LINES_MAX:,}"


def core_complaints(package: Path) -> Iterator[str]:
    """Whether what every server has is too large."""
    lines = room_lines(package)
    core = sum(lines.get(room, 0) for room in (*CORE_ROOMS, LOOSE))
    if core > CORE_LINES_MAX:
        yield f"the rooms of every server have {core:,} code lines, more than {CORE_LINES_MAX:,}"


def reading_path(page: str) -> list[str]:
    """The files of the reading path, from the package on, each once."""
    place = re.search(r"<!-- reading path -->(.*?)<!-- end -->", page, re.DOTALL)
    names = re.findall(r"`(?:src/segue/)?([\w/]+\.py)`", place[1]) if place else []
    return list(dict.fromkeys(names))


def path_complaints(page: str, package: Path) -> Iterator[str]:
    names = reading_path(page)
    if not names:
        yield "ARCHITECTURE.md names no reading path"
    missing = [name for name in names if not (package / name).is_file()]
    yield from (f"{name} is on the reading path and does not exist" for name in missing)
    lines = sum(code_lines(package / name) for name in names if name not in missing)
    if lines > PATH_LINES_MAX:
        yield f"the reading path has {lines:,} code lines, more than {PATH_LINES_MAX:,}"


@pytest.mark.parametrize("package", ["segue", *BESIDE])
def test_no_room_is_a_drawer(package: str) -> None:
    assert list(drawers(SOURCE / package)) == []


def test_what_every_server_has_keeps_its_size() -> None:
    assert list(core_complaints(PACKAGE)) == []
    assert rooms(PACKAGE).keys() >= CORE_ROOMS


def test_record_names_the_limits() -> None:
    record = (ROOT / "docs" / "decisions" / "0018-rooms.md").read_text("utf-8")
    for limit in (ROOM_LINES_MAX, CORE_LINES_MAX, PATH_LINES_MAX):
        assert f"{limit:,}" in record


def test_reading_path_takes_an_afternoon() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert list(path_complaints(page, PACKAGE)) == []


# --- the rules can fail -----------------------------------------------------------------------------------------------


def fill(package: Path, name: str, lines: int) -> None:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('"""A docstring."""\n\n# A comment.\n' + "a = 1\n" * lines)


@pytest.mark.parametrize(
    "name, lines, complains",
    [
        ("wire/items.py", 3_000, False),
        ("wire/items.py", 3_001, True),
        ("app.py", 3_000, False),
        ("app.py", 3_001, True),
    ],
)
def test_rule_sees_a_drawer(tmp_path: Path, name: str, lines: int, complains: bool) -> None:
    fill(tmp_path, name, lines - 1)
    fill(tmp_path, f"{name[:-3]}_too.py", 1)
    assert bool(list(drawers(tmp_path))) is complains


@pytest.mark.parametrize(
    "names, complains",
    [
        (["turn/loop.py", "wire/items.py"], False),
        (["turn/loop.py", "wire/items.py", "errors.py"], True),
        (["turn/loop.py", "wire/items.py", "web/search.py"], False),
    ],
)
def test_rule_sees_a_core_that_grew(tmp_path: Path, names: list[str], complains: bool) -> None:
    for name in names:
        fill(tmp_path, name, CORE_LINES_MAX // 2)
    assert bool(list(core_complaints(tmp_path))) is complains


PATH = (
    "<!-- reading path -->\n1. `turn/loop.py`\n2. `src/segue/wire/items.py`\n<!-- end -->\n`app.py`"
)


@pytest.mark.parametrize(
    "page, lines, complains",
    [
        (PATH, PATH_LINES_MAX // 2, False),
        (PATH, PATH_LINES_MAX // 2 + 1, True),
        ("no markers: `turn/loop.py`", 10, True),
        (PATH.replace("loop", "gone"), 10, True),
    ],
)
def test_rule_sees_a_path_that_is_too_long(
    tmp_path: Path, page: str, lines: int, complains: bool
) -> None:
    for name in ("turn/loop.py", "wire/items.py", "app.py"):
        fill(tmp_path, name, lines)
    assert bool(list(path_complaints(page, tmp_path))) is complains
