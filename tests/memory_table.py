"""How much memory does a server have whose limit is reached, in each of the ways to fill it?

    python -m tests.memory_table

For each way and each limit a server of its own is filled until it refuses, or with three limits. It prints what
the system counts at the peak, more than for the empty process, and what the server counts itself; a way passes with at
most 1.3 limits at the peak.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.scenarios.test_memory_limit import FILLS, MIB, filled

LIMITS_MIB = (256, 1024)
# Of the limit, beside the empty process.
PEAK_MAX = 1.3
STEP_BYTES = 4_000_000


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--limit", type=int, action="append", help="in MiB (default: 256, 1024)")
    parser.add_argument("--way", choices=FILLS, action="append", help="only these")
    args = parser.parse_args(words)
    failed = 0
    print(f"{'way':16}{'limit':>8}{'peak':>8}{'grown':>8}{'counted':>9}{'peak/limit':>12}")
    for limit in args.limit or LIMITS_MIB:
        for way in args.way or FILLS:
            with tempfile.TemporaryDirectory(prefix="segue-") as folder:
                work = filled(Path(folder), way, limit * MIB, STEP_BYTES)
                peak, grown, held = asyncio.run(work)
            part = peak / (limit * MIB)
            failed += part > PEAK_MAX
            sizes = "".join(f"{size / MIB:8.0f}" for size in (peak, grown, held))
            verdict = "ok" if part <= PEAK_MAX else "ABOVE"
            print(f"{way:16}{limit:8}{sizes} {part:11.2f}  {verdict}", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
