"""What is measured? Presets, and the list of loops that they and the flags amount to. Values only.

A *case* is one bar of the chart: a way at a speed and a context, with the render cache on or off. A *loop* is one
repetition of a case. All cases of one speed and context run one after the other, and each repetition begins with
another one, so that a machine that slows down slows all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from segue_bench.story import Shape
from segue_bench.ways import WayName

CODEX = Shape(
    instructions_bytes=13_000, tools_bytes=19_000, tool_output_bytes=2_000, output_tokens=100
)


@dataclass(frozen=True, slots=True)
class Preset:
    """What a plain run of this name does."""

    about: str
    shape: Shape
    speeds: tuple[float, ...]
    contexts: tuple[int, ...]
    turns: int
    repeat: int
    # Slow models make long loops: a loop is cut to so much sampling, one turn at least. 0: never.
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
        shape=Shape(1_000, 1_500, 500, 300),
        speeds=(65, 1_000, 0),
        contexts=(1_000, 20_000),
        turns=6,
        repeat=1,
        sampling_s_max=2.0,
    ),
}


@dataclass(frozen=True, slots=True)
class Plan:
    """Everything that one run of the command was asked for."""

    preset: str
    shape: Shape
    ways: tuple[WayName, ...]
    # None: a server that runs already has the speed that it has.
    speeds: tuple[float | None, ...]
    contexts: tuple[int, ...]
    turns: int
    repeat: int
    seed: int
    tool_ms: float = 0.0
    rtt_ms: float = 0.0
    tls: bool = False
    sampling_s_max: float = 0.0
    # Whether full history is also asked of a server without any cache of ours.
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
class Caches:
    """Which caches for single requests the server has; None: it is not ours, and we do not know."""

    render: bool | None = None
    pieces: bool | None = None


ALL = Caches(True, True)
NOT_RENDERED = Caches(False, True)
BARE = Caches(False, False)
UNKNOWN = Caches()


@dataclass(frozen=True, slots=True)
class Case:
    """One way under one set of conditions."""

    way: WayName
    caches: Caches
    tokens_per_s: float | None
    context_tokens: int
    turns: int


def cases(plan: Plan) -> list[list[Case]]:
    """The cases, those that are compared with each other together."""
    return [
        [
            Case(way, caches, speed, context, plan.turns_at(speed))
            for way in plan.ways
            # A rollout of one turn waits for nobody.
            if way != "rollout" or plan.turns_at(speed) > 1
            for caches in _caches(plan, way)
        ]
        for context in plan.contexts
        for speed in plan.speeds
    ]


def _caches(plan: Plan, way: WayName) -> tuple[Caches, ...]:
    """Full history over HTTP is asked with the render cache off and on; a foreign server has what it has."""
    if plan.url:
        return (UNKNOWN,)
    match way:
        case "http-new":
            return (NOT_RENDERED,)
        case "http-full":
            return (BARE, NOT_RENDERED, ALL) if plan.bare else (NOT_RENDERED, ALL)
        case _:
            return (ALL,)


def order(groups: Sequence[Sequence[Case]], repeat: int) -> Iterator[Case]:
    """Every case so many times, each repetition beginning with another case of its group."""
    for repetition in range(repeat):
        for group in groups:
            first = repetition % len(group)
            yield from (*group[first:], *group[:first])


def model_name(speed: float, context_tokens: int) -> str:
    """What our own server calls the model that plays this speed behind this context."""
    return f"scripted-{speed:g}-{context_tokens}"
