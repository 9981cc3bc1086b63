"""What follows from the figures? The comparisons that the measurement was made for, each as a sentence.

In: the runs. Out: one sentence a comparison; a comparison whose cases were not measured is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from segue_bench.figures import BenchRun, baseline, shorter, speed_words, tokens_words


def findings(runs: Sequence[BenchRun]) -> list[str]:
    """One sentence a comparison."""
    context = max((run.context_tokens for run in runs), default=0)
    largest = [run for run in runs if run.context_tokens == context]
    return [*_sockets(largest), *_render_cache(largest), *_growth(runs)]


def _speeds(runs: Sequence[BenchRun]) -> Iterator[list[BenchRun]]:
    for speed in dict.fromkeys(run.tokens_per_s for run in runs):
        yield [run for run in runs if run.tokens_per_s == speed]


def _where(run: BenchRun) -> str:
    return f"{tokens_words(run.context_tokens)} tokens, {speed_words(run.tokens_per_s)}"


def _sockets(runs: Sequence[BenchRun]) -> Iterator[str]:
    """The loop on a WebSocket against full history over HTTP."""
    for group in _speeds(runs):
        full = baseline(group)
        socket = next((run for run in group if run.way == "ws"), None)
        if full is None or socket is None:
            continue
        others = [
            f"{run.name.removeprefix('http-full, ')}: {shorter(socket, run):.0%}"
            for run in group
            if run.way == "http-full" and run is not full
        ]
        more = f" ({', '.join(others)})" if others else ""
        gain = f"{shorter(socket, full):.0%} shorter than with full history over HTTP"
        yield f"{_where(full)}: the loop on a WebSocket is {gain}{more}"


def _render_cache(runs: Sequence[BenchRun]) -> Iterator[str]:
    """Time to the first token with the render cache against without."""
    for group in _speeds(runs):
        full = baseline(group)
        cached = next((run for run in group if run.way == "http-full" and run.render_cache), None)
        if full is not None and cached is not None:
            gain = f"{1 - cached.ttft_ms_p50 / full.ttft_ms_p50:.0%}"
            yield f"{_where(full)}: the render cache shortens the time to the first token of full history by {gain}"


def _growth(runs: Sequence[BenchRun]) -> Iterator[str]:
    """A turn on a WebSocket at the largest context against the smallest."""
    for group in _speeds([run for run in runs if run.way == "ws"]):
        small = min(group, key=lambda run: run.context_tokens)
        large = max(group, key=lambda run: run.context_tokens)
        if small is not large:
            yield (
                f"{speed_words(small.tokens_per_s)}: a turn on a WebSocket at {tokens_words(large.context_tokens)} "
                f"tokens takes {large.turn_ms_p50 / small.turn_ms_p50:.2f} times the turn at "
                f"{tokens_words(small.context_tokens)}"
            )
