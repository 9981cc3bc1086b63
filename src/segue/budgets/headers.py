"""How do the headers of an answer say what is left of a key's minute? In the words of each API. Pure.

OpenAI's clients read `x-ratelimit-*` with durations, Anthropic's read `anthropic-ratelimit-*` with times.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from segue.limits import Rate

RateHeaders = Callable[[Sequence[Rate]], list[tuple[bytes, bytes]]]


def openai_headers(rates: Sequence[Rate]) -> list[tuple[bytes, bytes]]:
    """As OpenAI's clients read them."""
    return [
        (f"x-ratelimit-{name}-{rate.of}".encode(), value.encode())
        for rate in rates
        for name, value in (
            ("limit", str(rate.limit)),
            ("remaining", str(rate.remaining)),
            ("reset", duration(rate.reset_s)),
        )
    ]


def anthropic_headers(rates: Sequence[Rate]) -> list[tuple[bytes, bytes]]:
    """As Anthropic's clients read them."""
    return [
        (f"anthropic-ratelimit-{rate.of}-{name}".encode(), value.encode())
        for rate in rates
        for name, value in (
            ("limit", str(rate.limit)),
            ("remaining", str(rate.remaining)),
            ("reset", time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() + rate.reset_s))),
        )
    ]


def duration(seconds: float) -> str:
    """Such as 20ms, 1.5s or 6m0s."""
    return "".join(_parts(seconds))


def _parts(seconds: float) -> Iterator[str]:
    if seconds < 1:
        yield f"{round(1000 * seconds)}ms"
        return
    minutes, rest = divmod(round(seconds, 3), 60)
    if minutes:
        yield f"{int(minutes)}m"
    yield f"{rest:.3f}".rstrip("0").rstrip(".") + "s"
