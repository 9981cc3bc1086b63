"""What do processes hold over time, and does it grow? Samples from /proc, slopes, and the verdict on them."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from itertools import combinations
from pathlib import Path

MIB = 1 << 20
SLOPE_MIB_MAX = 1.0
# Open files and tasks at rest: what a lost one every quarter of an hour would make.
SLOPE_COUNT_MAX = 4.0
# A process that lived for less after the warm-up says nothing about hours.
LIFE_S_MIN = 1800.0
# Processes by what stands in their command lines.
NAMES = {"segue.workers.worker": "worker", "segue.sandbox.keeper": "keeper", "bwrap": "sandbox"}
# More points than these are thinned out: a slope is a median over pairs.
POINTS_MAX = 400


@dataclass(frozen=True)
class Sample:
    """One process at one time. `is_rest`: no client was there."""

    at_s: float
    pid: int
    name: str
    rss: int
    anonymous: int
    pss: int
    files: int
    cpu_s: float
    is_rest: bool


@dataclass(frozen=True)
class Slope:
    """How a figure of a process moves, in units an hour."""

    name: str
    pid: int
    hours: float
    first: float
    last: float
    an_hour: float


def descendants(pid: int) -> list[int]:
    """A process and all that it has started, in order."""
    found = [pid]
    with suppress(OSError):
        for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
            found += descendants(int(child))
    return found


def name_of(pid: int) -> str:
    """What a process of Segue is, by its command line."""
    line = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return next((name for word, name in NAMES.items() if word in line), "other")


def began_at(pid: int) -> int:
    """When a process was started, in ticks; ids begin again at some time."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def guarded(pid: int) -> tuple[int, int]:
    """The share of memory and the open files; nothing of a process that lets nobody look."""
    try:
        shares = Path(f"/proc/{pid}/smaps_rollup").read_text().split()
        return int(shares[shares.index("Pss:") + 1]) * 1024, len(os.listdir(f"/proc/{pid}/fd"))
    except PermissionError:
        return 0, 0


def sample(pid: int, at_s: float, *, is_rest: bool, name: str = "") -> Sample | None:
    """A process now; None where it has gone."""
    try:
        name = name or name_of(pid)
        status = dict(
            line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        )
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        pss, files = guarded(pid)
    except OSError:
        return None
    if "VmRSS" not in status:
        return None
    kib = {key: int(status[key].split()[0]) * 1024 for key in ("VmRSS", "RssAnon")}
    cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
    return Sample(at_s, pid, name, kib["VmRSS"], kib["RssAnon"], pss, files, cpu_s, is_rest)


def slope(points: Sequence[tuple[float, float]]) -> float:
    """The median of the slopes between all pairs of points, for each hour; single outliers do not move it."""
    points = points[:: max(1, len(points) // POINTS_MAX)]
    slopes = [(y - x) / (b - a) for (a, x), (b, y) in combinations(points, 2) if b > a]
    return statistics.median(slopes) * 3600 if slopes else 0.0


def slope_of(name: str, pid: int, points: Sequence[tuple[float, float]]) -> Slope:
    """How a series moves, and where it begins and ends: the medians of its first and last tenth."""
    tenth = max(1, len(points) // 10)
    first = statistics.median(value for _, value in points[:tenth])
    last = statistics.median(value for _, value in points[-tenth:])
    hours = (points[-1][0] - points[0][0]) / 3600
    return Slope(name, pid, hours, first, last, slope(points))


def series(samples: Sequence[Sample], field: str) -> dict[int, list[tuple[float, float]]]:
    """The values of one figure over time, for each process."""
    found: dict[int, list[tuple[float, float]]] = {}
    for one in samples:
        found.setdefault(one.pid, []).append((one.at_s, float(getattr(one, field))))
    return found


def slopes(samples: Sequence[Sample], field: str, since_s: float) -> list[Slope]:
    """How a figure moves in each process that has lived long enough since then."""
    late = [one for one in samples if one.at_s >= since_s]
    names = {one.pid: one.name for one in late}
    return [
        slope_of(names[pid], pid, points)
        for pid, points in series(late, field).items()
        if points[-1][0] - points[0][0] >= LIFE_S_MIN
    ]


def verdicts(
    samples: Sequence[Sample], tasks: Sequence[tuple[float, float]], warm_s: float
) -> list[str]:
    """What grows and must not; nothing, if all is well."""
    found = [
        f"memory: {one.name} ({one.pid}) grows by {one.an_hour / MIB:.2f} MiB an hour"
        for one in slopes(samples, "rss", warm_s)
        if one.an_hour > SLOPE_MIB_MAX * MIB
    ]
    rest = [one for one in samples if one.is_rest]
    found += [
        f"files: {one.name} ({one.pid}) opens {one.an_hour:.1f} more an hour"
        for one in slopes(rest, "files", warm_s)
        if one.an_hour > SLOPE_COUNT_MAX
    ]
    late = [point for point in tasks if point[0] >= warm_s]
    if late and slope(late) > SLOPE_COUNT_MAX:
        found.append(f"tasks: {slope(late):.1f} more an hour")
    return found


def write(path: Path, samples: Sequence[Sample], more: Mapping[str, object]) -> None:
    """Keep the figures."""
    path.write_text(json.dumps({**more, "samples": [asdict(one) for one in samples]}))
