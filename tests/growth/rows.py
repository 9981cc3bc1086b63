"""All rows of the growth fuzzer: requests, schemas, patterns, what others say. Each has a name, and is judged alone."""

from __future__ import annotations

import random
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

from tests import odd_schemas
from tests.any_values import BODIES, faults, thrown
from tests.growth.measure import Bench, Cost, Finding, bench, judge, sizes_to
from tests.growth.outside import ENGINES, FORMS, OUTSIDE, engine_bench, outside_case
from tests.growth.patterns import ANCHORED, RATIO_MAX, TRUSTED, patterns, worst
from tests.growth.structures import STRUCTURES
from tests.growth.test_measure import timed

# Doublings up to the size of `make test`, and up to the limit.
SHORT, LONG = 2, 3
# Of one row.
SHORT_S_MAX, LONG_S_MAX = 20, 240
ANY_SHAPES, ANY_SHAPES_LONG = 300, 5_000
# The part of all odd values at all places that a short run tries.
ANY_VALUES_PART = 0.02


@dataclass(frozen=True)
class Row:
    """One thing that is tried: is it found to grow?"""

    name: str
    try_it: Callable[[Places, bool], Finding]


def tried(row: Row, at: Places, is_long: bool) -> Finding:
    """What comes of a row. What does not end is interrupted, and is a finding too."""

    def interrupt(*_: object) -> None:
        raise TimeoutError(f"not done after {limit_s} s")

    limit_s = LONG_S_MAX if is_long else SHORT_S_MAX
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.alarm(limit_s)
    try:
        return row.try_it(at, is_long)
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


# What rows need: a plain server, one whose engine lies, one that may search the web (nobody answers it there).
BENCHES: dict[str, Callable[[], AbstractContextManager[Bench]]] = {
    "plain": bench,
    "engine": engine_bench,
    "search": partial(bench, search_url="http://127.0.0.1:9"),
}


class Places:
    """The servers that rows need, started when the first of them does."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, Bench] = {}

    def bench(self, kind: str = "plain") -> Bench:
        if kind not in self._made:
            self._made[kind] = self._stack.enter_context(BENCHES[kind]())
        return self._made[kind]


@contextmanager
def places() -> Iterator[Places]:
    with ExitStack() as stack:
        yield Places(stack)


def sizes(short: int, limit: int, is_long: bool) -> list[int]:
    return sizes_to(limit, LONG) if is_long else sizes_to(short, SHORT)


def requests() -> Iterator[Row]:
    for kind, structures in (("plain", [*STRUCTURES, *FORMS]), ("engine", ENGINES)):
        for one in structures:

            def try_it(at: Places, is_long: bool, one: Any = one, kind: str = kind) -> Finding:
                server = at.bench(kind)
                wanted = sizes(one.short, one.limit, is_long)
                return judge(one.name, lambda size: server.cost(one.case, size), wanted)

            yield Row(one.name, try_it)


def outside() -> Iterator[Row]:
    for one in OUTSIDE:

        def try_it(at: Places, is_long: bool, one: Any = one) -> Finding:
            server = at.bench()
            case = outside_case(server, one)
            wanted = sizes(one.short, one.limit, is_long)
            return judge(one.name, lambda size: server.cost(case, size), wanted)

        yield Row(one.name, try_it)


def values() -> Iterator[Row]:
    """Odd values at all places of requests: none is a fault of the server."""
    for body in BODIES:

        def try_it(at: Places, is_long: bool, body: str = body) -> Finding:
            served = at.bench("search").served
            chosen = None if is_long else random.Random()
            found = faults(served.port, thrown(body, served.app, chosen, ANY_VALUES_PART))
            assert not found, found[0]
            return Finding(f"any value, {body}", [Cost(1, 0.0, 0.0)], is_counted=False)

        yield Row(f"any value, {body}", try_it)


def schemas() -> Iterator[Row]:
    for taker, take in odd_schemas.TAKERS.items():
        for structure, (make, short, limit) in odd_schemas.STRUCTURES.items():

            def try_it(
                _: Places, is_long: bool, name: str = f"{taker}, {structure}", take: Any = take,
                make: Any = make, short: int = short, limit: int = limit,
            ) -> Finding:  # fmt: skip
                def cost(size: int) -> Cost:
                    schema = make(size)
                    return timed(lambda _: take(schema) and None)(size)

                return judge(name, cost, sizes(short, limit, is_long))

            yield Row(f"{taker}, {structure}", try_it)
        yield Row(f"{taker}, any shape", partial(any_shapes, f"{taker}, any shape", take))


def any_shapes(name: str, take: Callable[[Any], object], _: Places, is_long: bool) -> Finding:
    """Schemas of any shape: none may raise."""
    count = ANY_SHAPES_LONG if is_long else ANY_SHAPES

    @seed(random.randrange(2**32))
    @settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(odd_schemas.any_schemas)
    def take_any(schema: Any) -> None:
        take(schema)

    return Finding(name, [timed(lambda _: take_any())(count)], is_counted=False)


def regular_expressions() -> Iterator[Row]:
    for name, pattern in patterns():
        if name in TRUSTED:
            continue

        def try_it(_: Places, __: bool, name: str = name, pattern: Any = pattern) -> Finding:
            ratio, took_s, text = worst(pattern, is_anchored=name in ANCHORED)
            assert ratio <= RATIO_MAX, f"x{ratio:.1f}, {took_s * 1000:.0f} ms for {text!r}"
            return Finding(name, [Cost(1, took_s, 0.0)], is_counted=False)

        yield Row(name, try_it)


def all_rows() -> Sequence[Row]:
    return [*requests(), *outside(), *values(), *schemas(), *regular_expressions()]
