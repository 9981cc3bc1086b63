"""How large is the code? Code lines and files of each room, and how long functions are.

    python -m bench.size             # each room of src/segue
    python -m bench.size FILE …      # the sum of these files

A *code line* is a line of Python that is not blank, not only a comment and not part of a docstring. A *room* is a
folder of the package, or a file beside the folders. A function's length is in lines of the file, from `def` to its end.
"""

from __future__ import annotations

import argparse
import ast
import io
import statistics
import threading
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

# Python 3.11 may lose count of its depth when two threads parse at once (SystemError in `ast.parse`).
_parsing = threading.Lock()

SOURCE = Path(__file__).parent.parent / "src"
BENCH = "bench"

# Tokens that do not make a line code.
SILENT = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


def code_lines(path: Path) -> int:
    """How many code lines this Python file has."""
    return len(code_line_numbers(path.read_text()))


def code_line_numbers(text: str) -> set[int]:
    """The numbers of the code lines, from 1."""
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in SILENT:
            found.update(range(token.start[0], token.end[0] + 1))
    with _parsing:
        tree = ast.parse(text)
    for node in ast.walk(tree):
        # Docstrings, those of attributes included.
        if isinstance(node, ast.Expr) and is_string(node.value):
            found.difference_update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    lines = text.splitlines()
    return {number for number in found if lines[number - 1].strip()}


def is_string(node: ast.expr) -> bool:
    """Whether this is a string that is written out."""
    return isinstance(node, ast.Constant) and isinstance(node.value, str)


@dataclass(frozen=True)
class Function:
    """A function, and how long it is."""

    file: str
    name: str
    lines: int


def functions(path: Path, name: str) -> Iterator[Function]:
    """The functions of a file, those inside others included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield Function(name, node.name, (node.end_lineno or node.lineno) - node.lineno + 1)


def room_of(file: str) -> str:
    """The room of a file, which is named from the package on."""
    return file.split("/", 1)[0]


@dataclass
class Room:
    """How many files and code lines a room has."""

    files: int = 0
    lines: int = 0


def rooms(package: Path) -> dict[str, Room]:
    """The rooms by name: folders first, then files."""
    found: dict[str, Room] = {}
    for name, path in sources(package):
        room = found.setdefault(room_of(name), Room())
        room.files += 1
        room.lines += code_lines(path)
    return dict(sorted(found.items(), key=lambda one: (one[0].endswith(".py"), one[0])))


def sources(package: Path) -> list[tuple[str, Path]]:
    """The Python files of a package, by their names from the package on."""
    return [(path.relative_to(package).as_posix(), path) for path in sorted(package.rglob("*.py"))]


def percentile(values: Sequence[int], share: float) -> int:
    """The value that this share of the values does not exceed."""
    return sorted(values)[max(0, round(share * len(values)) - 1)]


def show(package: Path, console: Console) -> None:
    """Print rooms, totals and function lengths."""
    table = Table(box=None, pad_edge=False)
    table.add_column("room")
    table.add_column("files", justify="right")
    table.add_column("code lines", justify="right")
    found = rooms(package)
    for name, room in found.items():
        table.add_row(name, f"{room.files:,}", f"{room.lines:,}")
    table.add_section()
    for label, left_out in (("all", ""), (f"all but {BENCH}", BENCH)):
        kept = [room for name, room in found.items() if name != left_out]
        files, lines = sum(room.files for room in kept), sum(room.lines for room in kept)
        table.add_row(label, f"{files:,}", f"{lines:,}")
    console.print(table)
    for label, left_out in (("all", ""), (f"all but {BENCH}", BENCH)):
        console.print(lengths(package, label, left_out), highlight=False, soft_wrap=True)


def lengths(package: Path, label: str, left_out: str) -> str:
    """How long functions are, in a sentence."""
    found = [
        function
        for name, path in sources(package)
        if room_of(name) != left_out
        for function in functions(path, name)
    ]
    lines = [function.lines for function in found]
    longest = max(found, key=lambda function: function.lines)
    return (
        f"functions ({label}): {len(found):,}; lines: median {statistics.median(lines):g}, "
        f"p90 {percentile(lines, 0.9)}, longest {longest.lines} ({longest.file} {longest.name})"
    )


def total(paths: Iterable[Path]) -> int:
    """The code lines of these files together."""
    return sum(map(code_lines, paths))


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the sizes."""
    assert __doc__ is not None
    parser = argparse.ArgumentParser(
        prog="python -m bench.size",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", metavar="FILE", nargs="*", type=Path, help="files to add up")
    parser.add_argument(
        "--src",
        type=Path,
        default=SOURCE,
        metavar="PATH",
        help="a folder with the package segue (default: this checkout's src)",
    )
    options = parser.parse_args(arguments)
    if options.files:
        for path in options.files:
            print(f"{code_lines(path):>7,}  {path}")
        print(f"{total(options.files):>7,}  in {len(options.files)} files")
        return
    show(options.src / "segue", Console())


if __name__ == "__main__":
    main()
