"""Which steps of what a hostile client sends hold the interpreter, and for how long?

    python -m bench holds [WORD ...]        only the shapes whose names have one of these words

The shapes are those of `python -m bench hostile`. A thread of the server asks for the interpreter every fifth of a
millisecond. Each time that it gets it, it looks how much processor time every other thread has used since, and where
it is: more than `--over` milliseconds (the interpreter is handed over after half a millisecond) was one step that lets
nobody else go on. Processor time, so that other work on the machine does not matter much, and no look counts for which
the watching thread itself waited for a core. A row is a place: how often it held the interpreter for too long, how long
at most, and for how much of all time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from types import FrameType
from unittest.mock import patch

from bench.hostile import SHAPES, fetch_hostile_page, hostile, server_for, turn_times
from bench.peer import Client
from segue.printable import say
from segue.web.fetch import Fetcher
from segue_bench.rounds import print_table
from segue_cli.cli import main as run_segue

LOOK_S = 0.0002
# A look for which the watching thread waited longer for a core says nothing.
WAITED_NS_MAX = 300_000
FRAMES = 3
WRITE_S = 0.5
# Where the server writes what it saw.
FILE, OVER = "HOLDS_FILE", "HOLDS_OVER_S"


def place_of(frame: FrameType | None) -> str:
    """The innermost frames of this package."""
    names: list[str] = []
    while frame is not None and len(names) < FRAMES:
        path, _, name = frame.f_code.co_filename.partition("/segue/")
        if name or not names:
            names.append(f"{name or Path(path).name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " < ".join(names)


def watch(path: Path, over_s: float) -> None:
    """Look until the process ends."""
    me = threading.get_ident()
    waits = os.open("/proc/thread-self/schedstat", os.O_RDONLY)
    used: dict[int, float] = {}
    held: dict[str, list[float]] = defaultdict(list)
    waited, written = 0, time.monotonic()
    while True:
        time.sleep(LOOK_S)
        before, waited = waited, int(os.pread(waits, 64, 0).split()[1])
        for thread in [ident for ident in sys._current_frames() if ident != me]:
            try:
                now = time.clock_gettime(time.pthread_getcpuclockid(thread))
            except OSError:
                continue
            took = now - used.get(thread, now)
            used[thread] = now
            if took > over_s and waited - before < WAITED_NS_MAX:
                held[place_of(sys._current_frames().get(thread))].append(took)
        if time.monotonic() - written > WRITE_S:
            if not path.exists():
                held.clear()
            written = time.monotonic()
            path.write_text(json.dumps(held))


def found(names: Iterable[str], seconds: float, over_ms: float, rows_max: int) -> None:
    """Print a table for each shape."""
    by_name = {shape.name: shape for shape in SHAPES}
    for name in names:
        with TemporaryDirectory() as folder:
            file = Path(folder) / "holds"
            os.environ |= {FILE: str(file), OVER: str(over_ms / 1e3)}
            with server_for(by_name[name], "bench.holds") as (process, asked):
                client = Client(process.port)
                with hostile(process, by_name[name]):
                    # What is done once, by the first of all requests, is left out.
                    turn_times(client, asked, 1.0)
                    file.unlink()
                    turn_times(client, asked, seconds + 2 * WRITE_S)
                client.close()
                held = json.loads(file.read_text())
        most = sorted(held.items(), key=lambda row: -median(row[1]))[:rows_max]
        say(f"\n{name}")
        print_table(
            "where {}|holds {}|median ms {:.1f}|longest ms {:.1f}|share {:.1%}",
            [
                (place, len(times), median(times) * 1e3, max(times) * 1e3, sum(times) / seconds)
                for place, times in most
            ],
        )


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench holds", description=__doc__)
    parser.add_argument("--seconds", type=float, default=4.0, help="for each shape (default: 4)")
    parser.add_argument("--over", type=float, default=1.0, help="milliseconds (default: 1)")
    parser.add_argument("--rows", type=int, default=12, help="for each shape (default: 12)")
    parser.add_argument("words", nargs="*", help="shapes whose names have one of these words")
    options = parser.parse_args(arguments)
    names = [
        shape.name
        for shape in SHAPES
        if not options.words or any(word in shape.name for word in options.words)
    ]
    found(names, options.seconds, options.over, options.rows)


if __name__ == "__main__":
    watched = threading.Thread(
        target=watch, args=(Path(os.environ[FILE]), float(os.environ[OVER])), daemon=True
    )
    watched.start()
    with patch.object(Fetcher, "fetch", fetch_hostile_page):
        raise SystemExit(run_segue(sys.argv[1:]))
