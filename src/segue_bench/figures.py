"""Which figures come out? Loops in, one line a case out: medians, and the spread over the repetitions.

The names of the fields are the keys of the JSON file: they are added to, never renamed.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from msgspec import Struct

from segue_bench.loop import MeasuredLoop
from segue_bench.plan import BenchCase
from segue_bench.server import STAGES
from segue_bench.ways import WayName

# The stages in which the server waits for its engine; all others are its own work.
ENGINE_STAGES = ("first_token", "sample")


class TimeShares(Struct, frozen=True):
    """Which part of the turns was spent where; tool time is not counted."""

    api: float | None
    inference: float | None
    client: float


class BenchRun(Struct, frozen=True, kw_only=True):
    """One case, measured."""

    way: WayName
    tokens_per_s: float | None
    context_tokens: int
    turns: int
    total_s: float
    turn_ms_p50: float
    turn_ms_p99: float
    ttft_ms_p50: float
    cpu_ms_per_turn: float | None
    bytes_sent: int
    bytes_received: int
    tokens_tokenized: int | None
    render_cache: bool | None
    piece_cache: bool | None
    repetitions: int
    total_s_each: list[float]
    ttft_ms_each: list[float]
    turn_ms_along: list[float]
    opening_ms: float
    tokens_reused: int | None
    items_validated: int | None
    prompt_tokens_first: int | None
    prompt_tokens_last: int | None
    output_tokens_per_turn: float | None
    events_per_turn: float
    client_cpu_ms_per_turn: float
    shares: TimeShares
    # Milliseconds a turn: the server's stages, the client's own work, and the rest (transport, network, waiting).
    stages_ms: dict[str, float]

    @property
    def name(self) -> str:
        """Its name in tables."""
        if self.way != "http-full" or self.render_cache is None:
            return self.way
        if not self.piece_cache:
            return "http-full, bare"
        return f"http-full, cache {'on' if self.render_cache else 'off'}"


def sum_up(case: BenchCase, loops: Sequence[MeasuredLoop]) -> BenchRun:
    """One line for all repetitions of a case."""
    turns = [turn for loop in loops for turn in loop.turns]
    turn_ms = [turn.turn_s * 1e3 for turn in turns]
    stages = _stages_ms(loops)
    middle = sorted(loops, key=lambda loop: loop.total_s)[len(loops) // 2]
    counted = middle.counted
    prompts = [
        turn.last.response.usage.input_tokens
        for turn in middle.turns
        if turn.last.response is not None and turn.last.response.usage is not None
    ]
    if case.way == "rollout":
        prompts = []  # Its usage is the sum of all its rounds.
    return BenchRun(
        way=case.way,
        tokens_per_s=case.tokens_per_s,
        context_tokens=case.context_tokens,
        turns=case.turns,
        total_s=_r(statistics.median(loop.total_s for loop in loops)),
        turn_ms_p50=_r(statistics.median(turn_ms)),
        turn_ms_p99=_r(percentile(turn_ms, 0.99)),
        ttft_ms_p50=_r(statistics.median(turn.ttft_s * 1e3 for turn in turns)),
        cpu_ms_per_turn=_cpu_ms(loops),
        bytes_sent=middle.traffic.sent,
        bytes_received=middle.traffic.received,
        tokens_tokenized=None if counted is None else int(counted.tokens_tokenized),
        render_cache=case.caches.render,
        piece_cache=case.caches.pieces,
        repetitions=len(loops),
        total_s_each=[_r(loop.total_s) for loop in loops],
        ttft_ms_each=[_r(statistics.median(t.ttft_s * 1e3 for t in loop.turns)) for loop in loops],
        turn_ms_along=[
            _r(statistics.median(loop.turns[n].turn_s * 1e3 for loop in loops))
            for n in range(case.turns)
        ],
        opening_ms=_r(statistics.median(loop.opening.turn_s * 1e3 for loop in loops)),
        tokens_reused=None if counted is None else int(counted.tokens_reused),
        items_validated=None if counted is None else int(counted.items_validated),
        prompt_tokens_first=prompts[0] if prompts else None,
        prompt_tokens_last=prompts[-1] if prompts else None,
        output_tokens_per_turn=_output_tokens(middle),
        events_per_turn=_r(statistics.mean(turn.events for turn in turns)),
        client_cpu_ms_per_turn=_r(
            statistics.median(loop.client_cpu_s * 1e3 / case.turns for loop in loops)
        ),
        shares=_shares(stages, statistics.mean(turn_ms)),
        stages_ms=stages,
    )


def percentile(values: Sequence[float], share: float) -> float:
    """The smallest value that this share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, max(0, -int(-len(ordered) * share // 1) - 1))]


def _cpu_ms(loops: Sequence[MeasuredLoop]) -> float | None:
    cpu_ms = [loop.cpu_s * 1e3 / loop.case.turns for loop in loops if loop.cpu_s is not None]
    return _r(statistics.median(cpu_ms)) if cpu_ms else None


def _output_tokens(loop: MeasuredLoop) -> float | None:
    """By the server's usage. A rollout reports it once, for all of its turns."""
    counts = [
        turn.last.response.usage.output_tokens
        for turn in loop.turns
        if turn.last.response is not None and turn.last.response.usage is not None
    ]
    return _r(sum(counts) / loop.case.turns) if counts else None


def _stages_ms(loops: Sequence[MeasuredLoop]) -> dict[str, float]:
    """Where a turn's time goes, in the mean of the loops; without stages where the server does not report them."""
    client = statistics.mean(turn.client_s * 1e3 for loop in loops for turn in loop.turns)
    whole = statistics.mean(turn.turn_s * 1e3 for loop in loops for turn in loop.turns)
    counted = [(loop.counted, loop.case.turns) for loop in loops if loop.counted is not None]
    stages = {"client": _r(client)}
    for stage in STAGES if counted else ():
        spent = statistics.mean(
            counters.stage_s[stage] * 1e3 / turns for counters, turns in counted
        )
        stages[stage] = _r(spent)
    stages["rest"] = _r(max(0.0, whole - sum(stages.values())))
    return stages


def _shares(stages: dict[str, float], whole_ms: float) -> TimeShares:
    client = _r(stages["client"] / whole_ms)
    if "sample" not in stages:
        return TimeShares(None, None, client)
    inference = _r(min(1.0, sum(stages[stage] for stage in ENGINE_STAGES) / whole_ms))
    return TimeShares(_r(max(0.0, 1 - client - inference)), inference, client)


def _r(value: float) -> float:
    """More than four decimals are noise."""
    return round(value, 4)


def shorter(run: BenchRun, than: BenchRun) -> float:
    """By which share a case is shorter than another."""
    return 1 - run.total_s / than.total_s


def baseline(runs: Sequence[BenchRun]) -> BenchRun | None:
    """What the others are compared with: full history over HTTP without the render cache."""
    full = (run for run in runs if run.way == "http-full" and run.piece_cache is not False)
    return next((run for run in full if not run.render_cache), None)


# --- figures in words -----------------------------------------------------------------------------


def speed_words(speed: float | None) -> str:
    if speed is None:
        return "speed of the server's model"
    return f"{speed:,.0f} tokens/s" if speed else "unlimited speed"


def tokens_words(tokens: int) -> str:
    return f"{tokens / 1000:g}k" if tokens >= 1000 else str(tokens)


def seconds_words(seconds: float) -> str:
    """A duration with three digits."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
