"""How often does a sampled turn differ from the encoding of its own text?

    python -m bench.reencode                 200 turns of SmolLM2 at temperature 1, some minutes
    python -m bench.reencode --turns 40

A model may spell a word with other tokens than its tokenizer would. A server that keeps only text then gives the engine
a prompt that is not what the engine computed, and the cached prefix ends at the first such token. Half of the turns
are free text, a quarter have tools to call if the model likes, a quarter are calls forced by a JSON schema. Answers
end at 60 tokens at the latest. The end mark is left out; a forced call is compared together with the words that it
was begun with. A turn counts as different if any id does; a token counts as lost if it stands after the first
difference, because none of it is reused.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from contextlib import aclosing
from typing import NamedTuple

from rich.progress import Progress

from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.seams.model import Ids, Job, Sampling, Scene
from segue.seams.prompt import Head
from segue.vocabularies.load import vocabulary_from_gguf
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.codec import decode_tools, user_message
from segue_bench.rounds import print_table
from segue_embedded.embedded import EmbeddedEngine
from segue_embedded.weights import find_weights

PARALLEL = 4
ANSWER_TOKENS_MAX = 60
CONTEXT_TOKENS = 1_024
THINGS = (
    *("a cat", "the sea", "Python's asyncio", "old trains", "bread", "the moon"),
    *("a bug in a parser", "rain in Oslo", "numbers above 1,000,000"),
    *("日本語", "emoji 🎉", "C++ templates"),
)
ASKS = (
    "Tell me about {}.",
    "Write a short poem about {}.",
    "Write code about {}.",
    "Explain {} to a child.",
    "List five facts about {}, with figures.",
)
TOOLS = json.dumps(
    [
        {
            "type": "function",
            "name": "search",
            "description": "Search for something",
            "parameters": {
                "type": "object",
                "properties": {
                    "query": {"type": "string", "maxLength": 80},
                    "limit": {"type": "integer"},
                    "tags": {"type": "array", "items": {"type": "string"}, "maxItems": 3},
                },
                "required": ["query", "limit", "tags"],
                "additionalProperties": False,
            },
        }
    ]
).encode()
KINDS = ("text", "text", "tools", "forced")
# What a text server writes before an answer, and encodes together with it.
CUE = "assistant\n"


def scene_of(kind: str, turn: int) -> Scene:
    """What is asked in this turn."""
    ask = ASKS[turn % len(ASKS)].format(THINGS[turn // len(ASKS) % len(THINGS)])
    head = Head()
    if kind != "text":
        head = Head(
            tools=decode_tools(TOOLS, None)[0],
            tool_choice="required" if kind == "forced" else "auto",
        )
    return Scene(head, None, (user_message(ask),), can_constrain=True)


class Sample(NamedTuple):
    """One turn: its ids after the cue, and how many of them an encoding of its text would keep."""

    kind: str
    tokens: int
    kept: int
    # What was sampled and what would be written, at the first difference.
    example: str


async def sample(
    engine: EmbeddedEngine, dialect: TokenDialect, words: Vocabulary, turn: int, temperature: float
) -> Sample:
    """Let the model answer once, and compare."""
    kind = KINDS[turn % len(KINDS)]
    scene = scene_of(kind, turn // len(KINDS))
    rendered = dialect.render(scene)
    job = Job(
        prompt=rendered.prompt,
        scene=scene,
        sampling=Sampling(temperature=temperature),
        stops=dialect.stops,
        output_tokens_max=ANSWER_TOKENS_MAX,
        schema=rendered.schema,
    )
    ids = list(rendered.lead)
    async with aclosing(engine.sample(job)) as pieces:
        async for piece in pieces:
            if isinstance(piece, Ids):
                ids.extend(id for id in piece.ids if id not in dialect.stops)
    cue = list(words.encode(CUE))
    written = list(words.encode(CUE + b"".join(map(words.bytes_of, ids)).decode()))
    return compare(kind, words, cue + ids, written, len(cue))


def compare(
    kind: str, words: Vocabulary, ids: list[int], written: list[int], before: int
) -> Sample:
    """How far the two agree."""
    both = zip(ids, written, strict=False)
    kept = next((n for n, (one, other) in enumerate(both) if one != other), len(ids))
    example = ""
    if kept < len(ids):
        example = " / ".join(
            "|".join(words.bytes_of(id).decode(errors="replace") for id in row[kept : kept + 4])
            for row in (ids, written)
        )
    return Sample(kind, len(ids) - before, max(0, kept - before), example)


async def measure(turns: int, temperature: float) -> list[Sample]:
    """All turns, a few at a time."""
    path = find_weights("smollm2")
    words = vocabulary_from_gguf(path)
    dialect = TokenDialect(SMOLLM2, words)
    engine = EmbeddedEngine(path, words, context_tokens=CONTEXT_TOKENS, parallel=PARALLEL)
    found: list[Sample] = []
    todo = iter(range(turns))
    try:
        with Progress() as bar:
            task = bar.add_task("turns", total=turns)

            async def work() -> None:
                for turn in todo:
                    found.append(await sample(engine, dialect, words, turn, temperature))
                    bar.advance(task)

            async with asyncio.TaskGroup() as group:
                for _ in range(PARALLEL):
                    group.create_task(work())
    finally:
        await engine.close()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        prog="bench.reencode", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=1.0)
    options = parser.parse_args(arguments)
    samples = asyncio.run(measure(options.turns, options.temperature))
    rows = []
    for kind in (*dict.fromkeys(KINDS), "all"):
        chosen = [sample for sample in samples if kind in (sample.kind, "all")]
        tokens = sum(sample.tokens for sample in chosen)
        lost = sum(sample.tokens - sample.kept for sample in chosen)
        differ = sum(sample.kept < sample.tokens for sample in chosen)
        shares = differ / max(1, len(chosen)), lost / max(1, tokens)
        rows.append((kind, len(chosen), differ, shares[0], tokens, lost, shares[1]))
    columns = "kind {}|turns {}|differ {}|share {:.1%}|tokens {}|lost {}|share {:.1%}"
    print_table(columns, rows)
    for sample in [sample for sample in samples if sample.example][:8]:
        print(f"  {sample.kind}: {sample.example!r}")


if __name__ == "__main__":
    main()
