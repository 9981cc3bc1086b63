"""As which users of the host do sandboxes run, and the proxy of their network? Ids that no machine gives away."""

from __future__ import annotations

import os
from pathlib import Path

PROXY = 1_999_999_999
# One for each sandbox, from here on.
FIRST, COUNT = 2_000_000_000, 100_000_000


def uid_of(number: int) -> int:
    """The user of a sandbox by its number."""
    return FIRST + number % COUNT


def can_start_as_others(process: str = "/proc/self") -> bool:
    """Whether this process can start others as these users: as root, where they exist. In a container without the root
    of the host only some ids do."""
    maps = [Path(process, name).read_text().splitlines() for name in ("uid_map", "gid_map")]
    return os.geteuid() == 0 and all(any(map(_has_all, lines)) for lines in maps)


def _has_all(line: str) -> bool:
    inside, _, count = map(int, line.split())
    return inside <= PROXY and inside + count >= FIRST + COUNT
