"""`python -m bench NAME …`: measure one thing, or without a name the cost of a turn and of an event."""

from __future__ import annotations

import importlib
import sys

NAMES = (
    "turns",
    "apis",
    "wires",
    "peers",
    "paced",
    "bars",
    "front",
    "ahead",
    "events",
    "idle",
    "body",
    "commits",
    "sockets",
    "render",
    "chain",
    "reencode",
    "guards",
    "ending",
    "families",
    "hosted",
    "hostile",
    "holds",
    "compare",
    "reuse",
    "repeats",
    "drafts",
    "fleet",
    "scale",
    "cold",
    "state",
)
FIRST = ("turns", "events")


def main(arguments: list[str]) -> int:
    """Run the named benchmark."""
    if arguments and arguments[0] in ("-h", "--help"):
        print(f"python -m bench [{'|'.join(NAMES)}] …   (each takes --help)")
        return 0
    if arguments and arguments[0] not in NAMES:
        print(f"bench: '{arguments[0]}' is not one of: {', '.join(NAMES)}", file=sys.stderr)
        return 2
    failed = 0
    for name in arguments[:1] or FIRST:
        print(f"\n{name}")
        failed |= importlib.import_module(f"bench.{name}").main(arguments[1:]) or 0
    return failed


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
