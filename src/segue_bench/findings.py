"""Does it hold? The sentences that the measurement was made for, each worked out from the runs and nothing else.

In: the runs. Out: what each comparison came to; a comparison whose cases were not measured is not there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from segue_bench.charts import baseline, speed_words, tokens_words
from segue_bench.figures import Run, shorter


def findings(runs: Sequence[Run]) -> list[str]:
    """One sentence a comparison."""
    return [*_sockets(runs), *_recalls(runs), *_flatness(runs)]


def _largest(runs: Sequence[Run]) -> list[Run]:
    context = max((run.context_tokens for run in runs), default=0)
    return [run for run in runs if run.context_tokens == context]


def _speeds(runs: Sequence[Run]) -> Iterator[list[Run]]:
    for speed in dict.fromkeys(run.tokens_per_s for run in runs):
        yield [run for run in runs if run.tokens_per_s == speed]


def _sockets(runs: Sequence[Run]) -> Iterator[str]:
    """The loop on a socket against full history over HTTP."""
    for group in _speeds(_largest(runs)):
        held = baseline(group)
        socket = next((run for run in group if run.way == "ws"), None)
        if held is None or socket is None:
            continue
        beside = [
            f"{run.name.removeprefix('http-full, ')}: {shorter(socket, run):.0%}"
            for run in group
            if run.way == "http-full" and run is not held
        ]
        more = f" ({', '.join(beside)})" if beside else ""
        yield (
            f"{tokens_words(held.context_tokens)} tokens, {speed_words(held.tokens_per_s)}: the loop on a WebSocket is "
            f"{shorter(socket, held):.0%} shorter than with full history over HTTP{more}"
        )


def _recalls(runs: Sequence[Run]) -> Iterator[str]:
    """Time to the first token with the render cache against without."""
    for group in _speeds(_largest(runs)):
        held = baseline(group)
        recalled = next((run for run in group if run.way == "http-full" and run.render_cache), None)
        if held is not None and recalled is not None:
            gain = 1 - recalled.ttft_ms_p50 / held.ttft_ms_p50
            yield (
                f"{tokens_words(held.context_tokens)} tokens, {speed_words(held.tokens_per_s)}: the render cache "
                f"shortens the time to the first token of full history by {gain:.0%}"
            )


def _flatness(runs: Sequence[Run]) -> Iterator[str]:
    """A turn on a socket at the largest context against the smallest."""
    for group in _speeds([run for run in runs if run.way == "ws"]):
        small = min(group, key=lambda run: run.context_tokens)
        large = max(group, key=lambda run: run.context_tokens)
        if small is not large:
            yield (
                f"{speed_words(small.tokens_per_s)}: a turn on a WebSocket at {tokens_words(large.context_tokens)} "
                f"tokens takes {large.turn_ms_p50 / small.turn_ms_p50:.2f} times the turn at "
                f"{tokens_words(small.context_tokens)}"
            )
