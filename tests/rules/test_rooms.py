"""Has a room become a drawer?

A room that is too large to be known well is divided, or a decision record says why not. The whole package has a limit,
and so has the reading path: the files that ARCHITECTURE.md names between `<!-- reading path -->` and `<!-- end -->`,
for a newcomer's afternoon. Lines are code lines (`python -m bench.size`). Made-up trees show that each rule can fail.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

import pytest

from bench.size import code_lines as counted_lines

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "segue"

ROOM_FILES_MAX = 15
ROOM_LINES_MAX = 3_000
# What it was raised for: docs/decisions/0018-rooms.md.
PACKAGE_LINES_MAX = 37_850
PATH_LINES_MAX = 6_000
# Not part of the server.
LEFT_OUT = "bench"
# The core. It has no exception.
CORE = "turn"

# Two rules count the same files.
code_lines = cache(counted_lines)

# Room -> files and lines that it may have, and the record that says why.
Exceptions = Mapping[str, tuple[int, int, str]]
EXCEPTIONS: Exceptions = {}


def rooms(package: Path) -> dict[str, list[Path]]:
    """The files of each folder of the package; a room's `__init__` is no file of its own."""
    folders = sorted(path for path in package.iterdir() if path.is_dir() and path.name != LEFT_OUT)
    return {
        folder.name: [path for path in sorted(folder.rglob("*.py")) if path.name != "__init__.py"]
        for folder in folders
    }


def drawers(package: Path, exceptions: Exceptions) -> Iterator[str]:
    """Rooms that are too large."""
    for room, files in rooms(package).items():
        files_max, lines_max, _ = exceptions.get(room, (ROOM_FILES_MAX, ROOM_LINES_MAX, ""))
        if len(files) > files_max:
            yield f"{room} has {len(files)} files, more than {files_max}"
        if (lines := sum(map(code_lines, files))) > lines_max:
            yield f"{room} has {lines:,} code lines, more than {lines_max:,}"


def unfounded(root: Path, exceptions: Exceptions) -> Iterator[str]:
    """Exceptions without a record, without a need, or for the core."""
    for room, (files, lines, record) in exceptions.items():
        if room == CORE:
            yield f"{room} is the core and has no exception"
        if files <= ROOM_FILES_MAX and lines <= ROOM_LINES_MAX:
            yield f"{room} needs no exception"
        if not (root / record).is_file() or f"`{room}`" not in (root / record).read_text("utf-8"):
            yield f"{room}: {record} does not say why"


def package_lines(package: Path) -> int:
    paths = package.rglob("*.py")
    return sum(code_lines(path) for path in paths if path.relative_to(package).parts[0] != LEFT_OUT)


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


def test_no_room_is_a_drawer() -> None:
    assert list(drawers(PACKAGE, EXCEPTIONS)) == []


def test_every_exception_has_a_record() -> None:
    assert list(unfounded(ROOT, EXCEPTIONS)) == []


def test_package_keeps_its_size() -> None:
    assert package_lines(PACKAGE) <= PACKAGE_LINES_MAX


def test_reading_path_takes_an_afternoon() -> None:
    page = (ROOT / "ARCHITECTURE.md").read_text("utf-8")
    assert list(path_complaints(page, PACKAGE)) == []


# --- the rules can fail -----------------------------------------------------------------------------------------------


def fill(package: Path, name: str, lines: int) -> None:
    path = package / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text('"""A docstring."""\n\n# A comment.\n' + "a = 1\n" * lines)


@pytest.mark.parametrize(
    "files, lines, exception, complains",
    [
        (15, 200, None, False),
        (16, 1, None, True),
        (1, 3_000, None, False),
        (1, 3_001, None, True),
        (16, 200, (16, 3_200, "record.md"), False),
        (17, 1, (16, 3_200, "record.md"), True),
    ],
)
def test_rule_sees_a_drawer(
    tmp_path: Path, files: int, lines: int, exception: tuple[int, int, str] | None, complains: bool
) -> None:
    for number in range(files):
        fill(tmp_path, f"wire/file{number}.py", lines)
    fill(tmp_path, "wire/__init__.py", 0)
    fill(tmp_path, "bench/large.py", 4_000)
    exceptions = {} if exception is None else {"wire": exception}
    assert bool(list(drawers(tmp_path, exceptions))) is complains


@pytest.mark.parametrize(
    "room, limits, record, complains",
    [
        ("wire", (16, 3_000), "record.md", False),
        ("wire", (15, 3_000), "record.md", True),
        ("wire", (16, 3_000), "gone.md", True),
        ("stores", (16, 3_000), "record.md", True),
        ("turn", (16, 3_000), "record.md", True),
    ],
)
def test_rule_sees_an_exception_without_a_reason(
    tmp_path: Path, room: str, limits: tuple[int, int], record: str, complains: bool
) -> None:
    (tmp_path / "record.md").write_text("`wire` and `turn` are large because of their tables.")
    assert bool(list(unfounded(tmp_path, {room: (*limits, record)}))) is complains


def test_rule_counts_the_package_without_the_benchmarks(tmp_path: Path) -> None:
    for name in ("app.py", "wire/items.py", "bench/load.py"):
        fill(tmp_path, name, 10)
    assert package_lines(tmp_path) == 20


PATH = (
    "<!-- reading path -->\n1. `turn/loop.py`\n2. `src/segue/wire/items.py`\n<!-- end -->\n`app.py`"
)


@pytest.mark.parametrize(
    "page, lines, complains",
    [
        (PATH, 3_000, False),
        (PATH, 3_001, True),
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
