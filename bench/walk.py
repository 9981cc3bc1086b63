"""Which way does a request take through the code? One turn of each of four kinds, by room, file and function.

    make walk                                  # or: python -m bench.walk
    make walk ARGS="--kind websocket"          # one kind
    make walk ARGS="--summary --json FILE"     # only the table; keep everything in FILE
    make walk ARGS="--against FILE"            # the change since FILE in percent
    make walk ARGS="--src ../other/src"        # another checkout, with these same turns

Definitions:

- A *hop* is a distinct pair of functions of the package, caller and callee, at the place where it occurs first. So work
  that is done for each token counts once. A coroutine or generator that goes on is not called again. Comprehensions,
  lambdas, class bodies and generated functions are not hops; a property is one. Where other code calls, the caller is
  the nearest function of the package on the stack, or `loop`: the event loop, a new task, a new thread.
- *Functions* and *files* are those at either end of a hop; *code lines* are those of these files (`bench.size`).
- A *room* is a folder of the package, or a file beside the folders.
- *File changes* and *room changes* are neighbours in the list of hops whose callees are in different files, or rooms.
- *Tasks* are coroutines that the event loop starts.

The server is `segue serve` in a process of its own, in front of a fake vLLM, after a few turns of the same kind. It is
recorded until it makes no new hop for 1.3 s, the work after the terminal event included. Hops count that each of three
such turns makes and that a server without a request does not: what a timer does is nobody's turn.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.kinds import KINDS, Kind, WalkFailed, find_tokenizer, walk
from bench.size import SOURCE, room_of, total

FOOTER = (
    "hop: a distinct pair of caller and callee in the package, where it occurs first. functions, files: at either end\n"
    "of a hop. room: a folder of the package, or a file beside the folders. file and room changes: neighbours in the\n"
    "list of hops whose callees differ in it. tasks: coroutines that the event loop starts. code lines: of the files.\n"
    "<- names the caller where it is not the function above. loop: the event loop, a new task or a new thread.\n"
    "More: python -m bench.walk --help"
)


# --- counting -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Spot:
    """A function: its file, from the package on, and its name."""

    file: str
    name: str

    @property
    def room(self) -> str:
        """The room of its file."""
        return room_of(self.file)


@dataclass(frozen=True)
class Hop:
    """A call of one function by another, or by the event loop."""

    caller: Spot | None
    callee: Spot


@dataclass(frozen=True)
class Counts:
    """How long a way is, and how often it turns."""

    hops: int
    functions: int
    files: int
    file_changes: int
    rooms: int
    room_changes: int
    tasks: int
    code_lines: int


@dataclass(frozen=True)
class Recording:
    """What the tracer has seen."""

    hops: Sequence[Hop]
    tasks: int


def read_recording(body: Mapping[str, Any]) -> Recording:
    """A recording as the tracer gives it."""
    return Recording(
        [Hop(caller and Spot(*caller), Spot(*callee)) for caller, callee in body["hops"]],
        body["tasks"],
    )


def shared(turns: Sequence[Recording]) -> Recording:
    """What all of these turns do, in the order of the first."""
    kept = set.intersection(*(set(turn.hops) for turn in turns))
    hops = [hop for hop in turns[0].hops if hop in kept]
    return Recording(hops, min(turn.tasks for turn in turns))


def files_of(hops: Sequence[Hop]) -> list[str]:
    """The files at either end of these hops."""
    return sorted({spot.file for spot in spots_of(hops)})


def spots_of(hops: Sequence[Hop]) -> set[Spot]:
    """The functions at either end of these hops."""
    return {spot for hop in hops for spot in (hop.caller, hop.callee) if spot is not None}


def changes(places: Sequence[str]) -> int:
    """How many neighbours differ."""
    return sum(one != other for one, other in pairwise(places))


def count(recording: Recording, package: Path) -> Counts:
    """The figures of a turn."""
    hops = recording.hops
    files = files_of(hops)
    return Counts(
        hops=len(hops),
        functions=len(spots_of(hops)),
        files=len(files),
        file_changes=changes([hop.callee.file for hop in hops]),
        rooms=len({room_of(file) for file in files}),
        room_changes=changes([hop.callee.room for hop in hops]),
        tasks=recording.tasks,
        code_lines=total(package / file for file in files),
    )


# --- showing --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Walked:
    """A kind of turn, its way and its figures."""

    kind: Kind
    hops: Sequence[Hop]
    counts: Counts


def path_lines(hops: Sequence[Hop]) -> Iterator[str]:
    """The way, one line a hop, under its room and file; the caller is named where it is not the function above."""
    before: Spot | None = None
    for hop in hops:
        callee = hop.callee
        if before is None or before.room != callee.room:
            yield f"[bold]{escape(callee.room)}[/]"
        if before is None or before.file != callee.file:
            yield f"  [cyan]{escape(callee.file.split('/', 1)[-1])}[/]"
        by = "" if hop.caller == before and before else f"  [dim]<- {escape(by_name(hop))}[/]"
        yield f"    {escape(callee.name)}{by}"
        before = callee


def by_name(hop: Hop) -> str:
    """The caller, with its file where that is another one."""
    if hop.caller is None:
        return "loop"
    is_near = hop.caller.file == hop.callee.file
    return hop.caller.name if is_near else f"{hop.caller.file} {hop.caller.name}"


def summary(walked: Sequence[Walked], before: Mapping[str, Mapping[str, int]]) -> Table:
    """A row for each figure, a column for each kind; the change in percent beside it."""
    table = Table(box=None, pad_edge=False)
    table.add_column("")
    for one in walked:
        table.add_column(one.kind.name, justify="right")
    for figure in fields(Counts):
        cells = [
            cell(getattr(one.counts, figure.name), before.get(one.kind.name, {}).get(figure.name))
            for one in walked
        ]
        table.add_row(figure.name.replace("_", " "), *cells)
    return table


def cell(now: int, before: int | None) -> str:
    """A figure, and its change."""
    if before is None:
        return f"{now:,}"
    change = f"{(now - before) / before:+.0%}" if before else f"was {before}"
    return f"{now:,} ({change})"


def show(walked: Sequence[Walked], console: Console) -> None:
    """Print each way."""
    for one in walked:
        title = f"[bold underline]{one.kind.name}[/]: {escape(one.kind.meaning)}\n"
        console.print(title, soft_wrap=True)
        for line in path_lines(one.hops):
            console.print(line, soft_wrap=True)
        console.print()


# --- files ----------------------------------------------------------------------------------------


def as_json(walked: Sequence[Walked]) -> str:
    """Figures and ways; a hop is the names of caller and callee."""
    kinds = {
        one.kind.name: {
            "counts": asdict(one.counts),
            "files": files_of(one.hops),
            "hops": [[label(hop.caller), label(hop.callee)] for hop in one.hops],
        }
        for one in walked
    }
    return json.dumps({"python": platform.python_version(), "kinds": kinds}, indent=1) + "\n"


def label(spot: Spot | None) -> str:
    """A function in one word."""
    return "loop" if spot is None else f"{spot.file}:{spot.name}"


def read_counts(path: Path | None) -> dict[str, dict[str, int]]:
    """The figures of each kind in an earlier file."""
    if path is None:
        return {}
    try:
        return {
            name: kind["counts"] for name, kind in json.loads(path.read_text())["kinds"].items()
        }
    except (OSError, ValueError, KeyError) as wrong:
        raise WalkFailed(f"{path} cannot be read as a file of --json: {wrong!r}") from wrong


# --- the command ----------------------------------------------------------------------------------


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.walk",
        description=__doc__,
        epilog="kinds:\n" + "\n".join(f"  {kind.name:<12} {kind.meaning}" for kind in KINDS),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add(
        "--kind",
        action="append",
        choices=[kind.name for kind in KINDS],
        metavar="NAME",
        help="only this kind; may be repeated",
    )
    add("--summary", action="store_true", help="only the table")
    add("--json", type=Path, metavar="FILE", help="write figures and ways here")
    add("--against", type=Path, metavar="FILE", help="an earlier --json, to show the change")
    add(
        "--src",
        type=Path,
        default=SOURCE,
        metavar="PATH",
        help="a folder with the package segue (default: this checkout's src)",
    )
    add(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="SmolLM2's GGUF or tokenizer.json (default: the installed one)",
    )
    return parser.parse_args(arguments)


def take(kind: Kind, source: Path, tokenizer: Path) -> Walked:
    """Walk one kind."""
    try:
        turns = walk(kind, source, tokenizer)
    except WalkFailed as wrong:
        raise WalkFailed(f"{kind.name}: {wrong}") from wrong
    recording = shared([read_recording(turn) for turn in turns])
    return Walked(kind, recording.hops, count(recording, source / "segue"))


def run(options: argparse.Namespace, console: Console) -> None:
    """Walk, and print what was asked for."""
    source: Path = options.src.resolve()
    if not (source / "segue").is_dir():
        raise WalkFailed(f"there is no package segue in {options.src}")
    before = read_counts(options.against)
    tokenizer = options.tokenizer.resolve() if options.tokenizer else find_tokenizer()
    wanted = [kind for kind in KINDS if not options.kind or kind.name in options.kind]
    # Each waits most of the time.
    with ThreadPoolExecutor(len(wanted)) as pool:
        walked = list(pool.map(lambda kind: take(kind, source, tokenizer), wanted))
    if options.json:
        options.json.write_text(as_json(walked))
    if not options.summary:
        show(walked, console)
    console.print(summary(walked, before))
    console.print(f"\n{FOOTER}", style="dim", soft_wrap=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """The command."""
    try:
        run(parse(arguments), Console(highlight=False))
    except WalkFailed as wrong:
        print(f"walk: {wrong}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
