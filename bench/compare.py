"""Did it become slower? One benchmark in two checkouts, run alternately, medians compared.

    python -m bench.compare --base PATH --runs 9 turns events idle peers

Both servers are driven by the benchmarks of this checkout, so that only the server differs; with `--own-drivers` each
checkout runs its own benchmarks. Each needs its `.venv`. The checkouts take turns, and each round begins with the other
one. A figure counts as higher if its median is above the base's by more than the tolerance. The exit status is 1 if any
figure is higher. Where others use the machine too, the ratio of the lowest figures is the steadier one.
"""

from __future__ import annotations

import argparse
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

from segue_bench.rounds import interleaved, print_table

HERE = Path(__file__).parents[1]
RUN_S_MAX = 600.0


class Benchmark(NamedTuple):
    """The flags of a short run, and where name and figure stand in its output."""

    flags: tuple[str, ...]
    figure: re.Pattern[str]
    unit: str


BENCHMARKS = {
    "turns": Benchmark(
        ("--rounds", "5", "--sizes", "1000", "100000"),
        re.compile(r"^ *(?P<name>[\d,]+) +\d+ +[\d.]+ +(?P<figure>[\d.]+) +[\d.]+ x$", re.M),
        "CPU ms a turn",
    ),
    "events": Benchmark(
        ("--rounds", "3"),
        re.compile(r"^(?P<name>one socket|64 sockets|SSE) +[\d,]+ +(?P<figure>[\d.]+) ", re.M),
        "CPU us an event",
    ),
    "idle": Benchmark(
        (),
        re.compile(r"^(?P<name>[\d,]+) idle connections: (?P<figure>[\d.]+) KiB each$", re.M),
        "KiB a connection",
    ),
    "peers": Benchmark(
        ("--rounds", "4"),
        re.compile(
            r"^(?P<name>[\w-]+ +(?:all 30|late)) +(?:[\d.]+ +){3}(?:[-\d.]+ x +){2}(?P<figure>[\d.]+) ",
            re.M,
        ),
        "CPU ms a turn",
    ),
}


def read_figures(name: str, output: str) -> dict[str, float]:
    """The figures of one run, by the row that they stand in."""
    rows = BENCHMARKS[name].figure.finditer(output)
    figures = {row["name"]: float(row["figure"]) for row in rows}
    if not figures:
        raise SystemExit(f"bench: {name} printed no figure:\n{output}")
    return figures


def run(name: str, checkout: Path, driver: Path, modules: Path) -> dict[str, float]:
    """Run one benchmark of `driver` on the server of `checkout`."""
    environment = {**os.environ, "PYTHONPATH": str(modules)}
    command = [str(checkout / ".venv" / "bin" / "python"), "-m", "bench", name]
    ran = subprocess.run(
        [*command, *BENCHMARKS[name].flags],
        cwd=driver,
        env=environment,
        capture_output=True,
        text=True,
        timeout=RUN_S_MAX,
    )
    if ran.returncode:
        raise SystemExit(f"bench: {name} failed in {checkout}:\n{ran.stderr[-2000:]}")
    return read_figures(name, ran.stdout)


def compare(
    name: str, base: Sequence[Mapping[str, float]], here: Sequence[Mapping[str, float]], most: float
) -> list[tuple[object, ...]]:
    """One row a figure: medians, ratio, verdict."""
    rows: list[tuple[object, ...]] = []
    for row in base[0]:
        before, after = ([figures[row] for figures in runs] for runs in (base, here))
        ratio = statistics.median(after) / statistics.median(before)
        low = min(after) / min(before)
        verdict = "higher" if ratio > 1 + most else "lower" if ratio < 1 - most else "same"
        middle = statistics.median(before), statistics.median(after)
        rows.append((f"{name}: {row}", BENCHMARKS[name].unit, *middle, ratio, low, verdict))
    return rows


def main(arguments: Sequence[str]) -> int:
    """Print the table; 1 if any figure is higher."""
    parser = argparse.ArgumentParser(prog="python -m bench.compare", description=__doc__)
    parser.add_argument("names", nargs="+", choices=tuple(BENCHMARKS), metavar="NAME")
    parser.add_argument("--base", type=Path, required=True, help="the checkout to compare with")
    parser.add_argument("--runs", type=int, default=9, help="runs in each checkout (default: 9)")
    tolerance = "share by which a median may differ (default: 0.03)"
    parser.add_argument("--tolerance", type=float, default=0.03, help=tolerance)
    own = "each checkout runs its own benchmarks"
    parser.add_argument("--own-drivers", action="store_true", help=own)
    options = parser.parse_args(arguments)
    base = options.base.resolve()
    rows: list[tuple[object, ...]] = []
    with ExitStack() as stack:
        # Nothing but the benchmarks comes from this checkout: the server is the one of the environment.
        modules = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="segue-bench-")))
        if not options.own_drivers:
            (modules / "segue_bench").symlink_to(HERE / "src" / "segue_bench")
        drivers = {base: base if options.own_drivers else HERE, HERE: HERE}
        for name in options.names:
            candidates = {
                checkout: partial(run, name, checkout, driver, modules)
                for checkout, driver in drivers.items()
            }
            results = interleaved(candidates, options.runs, warm_ups=0)
            rows += compare(name, results[base], results[HERE], options.tolerance)
    figures = "base {:.2f}|here {:.2f}|here/base {:.3f} x|of the lowest {:.3f} x"
    print_table(f"figure {{}}|unit {{}}|{figures}|verdict {{}}", rows)
    return int(any(row[-1] == "higher" for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
