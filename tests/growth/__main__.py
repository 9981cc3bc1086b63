"""The growth fuzzer from the command line: `python -m tests.growth [--long] [words of structures]`."""

from __future__ import annotations

import argparse
import sys

from tests.growth.measure import Finding, bench, judge, sizes_to
from tests.growth.structures import STRUCTURES


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.growth", description=__doc__)
    parser.add_argument(
        "names", nargs="*", help="only structures with one of these words in their name"
    )
    parser.add_argument("--long", action="store_true", help="up to the limits of the protocol")
    parser.add_argument("--limit", type=int, default=0, help="divide the limits by this")
    parser.add_argument("--store", default="memory", help="where turns are kept")
    args = parser.parse_args()
    chosen = [
        one for one in STRUCTURES if not args.names or any(word in one.name for word in args.names)
    ]
    found: list[Finding] = []
    with bench(store=args.store) as server:
        for number, one in enumerate(chosen, 1):
            print(
                f"{number} of {len(chosen)}: {one.name} ...", file=sys.stderr, end="\r", flush=True
            )
            sizes = (
                sizes_to(one.limit // (args.limit or 1), 3) if args.long else sizes_to(one.short, 2)
            )
            try:
                found.append(
                    judge(one.name, lambda size, one=one: server.cost(one.case, size), sizes)
                )
            except Exception as fault:
                print(f"ERR {one.name:<44} {str(fault)[:300] or repr(fault)}")
                continue
            print(found[-1].line(), flush=True)
    bad = sum(one.is_bad for one in found)
    print(f"{len(found)} structures, {bad} bad")
    return 1 if bad else 0


if __name__ == "__main__":
    raise SystemExit(main())
