"""What is measured? The presets, and the list of loops that follows from a preset and the flags. Values only.

A *case* is one bar of the chart: a way at a speed and a context, with the render cache on or off. A *loop* is one
repetition of a case. All cases of one speed and context run one after the other, and each repetition begins with
another case, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from segue_bench.rounds import rotated
from segue_bench.ways import WayName
from segue_bench.workload import WorkloadShape

CODEX = WorkloadShape(
    instructions_bytes=13_000, tools_bytes=19_000, tool_output_bytes=2_000, output_tokens=100
)


@dataclass(frozen=True, slots=True)
class Preset:
    """The settings of a run without further flags."""

    about: str
    shape: WorkloadShape
    speeds: tuple[float, ...]
    contexts: tuple[int, ...]
    turns: int
    repeat: int
    # Slow models make long loops: a loop is cut to this much sampling, one turn at least. 0: never.
    sampling_s_max: float
    tool_ms: float = 0.0


PRESETS = {
    "quick": Preset(
        about="the shape of codex, cut to about a minute",
        shape=CODEX,
        speeds=(65, 1_000, 4_000, 0),
        contexts=(100_000,),
        turns=5,
        repeat=2,
        sampling_s_max=1.0,
    ),
    "codex": Preset(
        about="a coding session: 32 kB of instructions and tools, 19 kB of tools resent, 2 kB outputs, 30 tool calls",
        shape=CODEX,
        speeds=(65, 1_000, 4_000, 0),
        contexts=(1_000, 20_000, 100_000),
        turns=30,
        repeat=3,
        sampling_s_max=0.0,
    ),
    "chat": Preset(
        about="little context and long answers: where the API matters least",
        shape=WorkloadShape(1_000, 1_500, 500, 300),
        speeds=(65, 1_000, 0),
        contexts=(1_000, 20_000),
        turns=6,
        repeat=1,
        sampling_s_max=2.0,
    ),
}


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """Everything that one run of the command needs to know."""

    preset: str
    shape: WorkloadShape
    ways: tuple[WayName, ...]
    # None: the speed of a server that runs already is not known.
    speeds: tuple[float | None, ...]
    contexts: tuple[int, ...]
    turns: int
    repeat: int
    seed: int
    tool_ms: float = 0.0
    rtt_ms: float = 0.0
    tls: bool = False
    sampling_s_max: float = 0.0
    # Whether full history is also sent to a server without any of our caches.
    bare: bool = False
    url: str = ""
    model: str = ""
    key: str = ""

    def turns_at(self, speed: float | None) -> int:
        """How many turns a loop at this speed has."""
        if not speed or not self.sampling_s_max:
            return self.turns
        fitting = int(self.sampling_s_max * speed / self.shape.output_tokens)
        return min(self.turns, max(1, fitting))


@dataclass(frozen=True, slots=True)
class ServerCaches:
    """Which caches for single requests the server has; None: not known, because the server is not ours."""

    render: bool | None = None
    pieces: bool | None = None


ALL = ServerCaches(True, True)
NOT_RENDERED = ServerCaches(False, True)
BARE = ServerCaches(False, False)
UNKNOWN = ServerCaches()


@dataclass(frozen=True, slots=True)
class BenchCase:
    """One way under one set of conditions."""

    way: WayName
    caches: ServerCaches
    tokens_per_s: float | None
    context_tokens: int
    turns: int


def cases(plan: BenchPlan) -> list[list[BenchCase]]:
    """The cases, those that are compared with each other together."""
    return [
        [
            BenchCase(way, caches, speed, context, plan.turns_at(speed))
            for way in plan.ways
            # A rollout of one turn never waits for an output.
            if way != "rollout" or plan.turns_at(speed) > 1
            for caches in _caches(plan, way)
        ]
        for context in plan.contexts
        for speed in plan.speeds
    ]


def _caches(plan: BenchPlan, way: WayName) -> tuple[ServerCaches, ...]:
    """Full history over HTTP is measured with the render cache off and on."""
    if plan.url:
        return (UNKNOWN,)
    match way:
        case "http-new":
            return (NOT_RENDERED,)
        case "http-full":
            return (BARE, NOT_RENDERED, ALL) if plan.bare else (NOT_RENDERED, ALL)
        case _:
            return (ALL,)


def order(groups: Sequence[Sequence[BenchCase]], repeat: int) -> Iterator[BenchCase]:
    """Every case as often as `repeat` says, each repetition beginning with another case of its group."""
    for repetition in range(repeat):
        for group in groups:
            yield from rotated(group, repetition)


def model_name(speed: float, context_tokens: int) -> str:
    """The name of the model of our own server for this speed and context."""
    return f"scripted-{speed:g}-{context_tokens}"
