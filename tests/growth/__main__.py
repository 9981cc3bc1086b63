"""The growth fuzzer: what takes more time than its size explains, holds the event loop, or gives what cannot be?

    python -m tests.growth [--long] [WORDS of rows]
    python -m tests.growth --without names        # with a fix taken out: its rows must find it

It covers everything that walks something from outside: requests on every API, schemas, names, pages, search results,
forms, skills, templates, patterns, and engines that lie, burst and break off. `--long` goes up to the limits.
"""

from __future__ import annotations

import argparse
import sys
import time
from contextlib import nullcontext

from tests.growth.removals import REMOVALS, without
from tests.growth.rows import Places, Row, all_rows, places, tried


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.growth",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", help="only rows with one of these words in their name")
    parser.add_argument("--long", action="store_true", help="up to the limits of the protocol")
    parser.add_argument("--without", choices=REMOVALS, help="take this fix out")
    args = parser.parse_args()
    removal = REMOVALS[args.without] if args.without else None
    is_long = args.long or (removal is not None and removal.is_long)
    rows = [
        row
        for row in all_rows()
        if (removal is None or row.name in removal.rows)
        and (not args.names or any(word in row.name for word in args.names))
    ]
    began = time.monotonic()
    with without(args.without) if args.without else nullcontext(), places() as at:
        bad = sum(try_row(row, at, is_long, f"{n} of {len(rows)}") for n, row in enumerate(rows, 1))
    print(f"{len(rows)} rows, {bad} bad, {time.monotonic() - began:.0f} s")
    return 1 if bad else 0


def try_row(row: Row, at: Places, is_long: bool, where: str) -> bool:
    """Print what comes of a row; whether it is bad."""
    print(f"{where}: {row.name} ...", file=sys.stderr, end="\r", flush=True)
    try:
        finding = tried(row, at, is_long)
    except Exception as fault:
        print(f"BAD {row.name:<44} {type(fault).__name__}: {str(fault)[:300]}", flush=True)
        return True
    print(finding.line(), flush=True)
    return finding.is_bad


if __name__ == "__main__":
    raise SystemExit(main())
