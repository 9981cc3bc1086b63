"""What does it cost to write the prompt of a turn? Rendering and tokenizing, with 1k to 500k tokens of history.

    python -m bench render
    python -m bench render --dialects chatml template --sizes 1000 100000

An agent loop of calls and 2 KB outputs; what is measured is `render` of one more output. *Warm*: the parent's prompt
is in memory, as on a connection. *Cold*: only items and kept ids are, as after a restart. The sizes take turns, so that
a noisy machine is noisy for all; each figure is a median. A dialect whose own vocabulary is not
installed gets SmolLM2's, followed by the special tokens of the family. Memory is measured by tracemalloc on a
history of 100k tokens: all that is kept of it, and the joined prompt alone, which is what being warm costs.
"""

from __future__ import annotations

import argparse
import statistics
import time
import tracemalloc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import cast

import msgspec

from segue.dialects.chatml import SMOLLM2
from segue.dialects.family import TokenDialect
from segue.dialects.harmony import HARMONY
from segue.dialects.llama3 import LLAMA3
from segue.dialects.template import template_dialect
from segue.seams.history import Round, Turn
from segue.seams.model import Dialect, Ids, ItemClosed, Rendered, Scene, TurnClosed
from segue.seams.prompt import Head, Tokens
from segue.turn.commit import warm_after
from segue.vocabularies.chat_template import ChatTemplate
from segue.vocabularies.gguf import GgufValue, read_gguf
from segue.vocabularies.load import CONTROL, vocabulary_from_metadata
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item, ItemValue
from segue.wire.response import Response
from segue.wire.tools import FunctionTool, Tools, offers_of
from segue_bench.rounds import interleaved, print_table
from segue_embedded.weights import find_weights

SIZES = (1_000, 10_000, 100_000, 500_000)
OUTPUT_CHARS = 2_000
KEPT_TOKENS = 100_000
# Enough turns to know how many tokens one has.
SAMPLE_TURNS = 30
# What a warm turn may cost at the largest size, against the smallest.
RATIO_MAX = 1.15
# Source text, as a coding agent's tools print it.
TEXT = "".join(
    path.read_text() for path in sorted((Path(__file__).parents[1] / "src").rglob("*.py"))
)

LLAMA3_SPECIALS = (
    "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
)  # fmt: skip
HARMONY_SPECIALS = (
    "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>",
)  # fmt: skip


# --- dialects -------------------------------------------------------------------------------------


def smollm2(*specials: str) -> Vocabulary:
    """SmolLM2's vocabulary with the special tokens of another family at its end."""
    head, name = _smollm2_head()
    tokens, kinds = head["tokenizer.ggml.tokens"], head["tokenizer.ggml.token_type"]
    assert isinstance(tokens, list)
    assert isinstance(kinds, list)
    head["tokenizer.ggml.tokens"] = [*tokens, *specials]
    head["tokenizer.ggml.token_type"] = [*kinds, *[CONTROL] * len(specials)]
    return vocabulary_from_metadata(head, name)


def _smollm2_head() -> tuple[dict[str, GgufValue], str]:
    path = find_weights("smollm2")
    return read_gguf(path), path.name


def template() -> tuple[Dialect, str]:
    """SmolLM2's own template, run as it is."""
    text = _smollm2_head()[0]["tokenizer.chat_template"]
    assert isinstance(text, str)
    return template_dialect(smollm2(), ChatTemplate(text, end="<|im_end|>")), "SmolLM2"


MAKERS: dict[str, Callable[[], tuple[Dialect, str]]] = {
    "chatml": lambda: (TokenDialect(SMOLLM2, smollm2()), "its own"),
    "llama3": lambda: (TokenDialect(LLAMA3, smollm2(*LLAMA3_SPECIALS)), "SmolLM2"),
    "harmony": lambda: (TokenDialect(HARMONY, smollm2(*HARMONY_SPECIALS)), "SmolLM2"),
    "template": template,
}


# --- histories ------------------------------------------------------------------------------------

TOOL = FunctionTool(
    name="read",
    description="Reads a part of a file.",
    parameters=msgspec.Raw(
        b'{"type":"object","properties":{"path":{"type":"string"},"line":{"type":"integer"}}}'
    ),
)
RAW = msgspec.json.encode([TOOL])
HEAD = Head(
    instructions="You are a coding agent.", tools=Tools(RAW, (TOOL,), RAW, offers_of((TOOL,)))
)


def item(**fields: object) -> Item:
    """An item as the wire would make it."""
    raw = msgspec.json.encode(fields)
    return Item(raw, msgspec.json.decode(raw, type=ItemValue))


def output(number: int, part: int) -> Item:
    """2 KB of source text for the call of this number."""
    at = part * 997 % (len(TEXT) - OUTPUT_CHARS)
    text = TEXT[at : at + OUTPUT_CHARS]
    return item(type="function_call_output", call_id=f"call_{number}", output=text)


def next_turn(dialect: Dialect, past: Turn | None, number: int) -> Turn:
    """The turn in which the model, given the last output, makes the call of this number. Nothing is warm yet."""
    arguments = f'{{"path": "src/segue/process/runner.py", "line": {number}}}'
    call = item(type="function_call", call_id=f"call_{number}", name="read", arguments=arguments)
    first = item(type="message", role="user", content="Find the mistake.")
    given = (first if past is None else output(number - 1, number),)
    reader = dialect.reader(Scene(HEAD, None, given))
    parsed = [*reader.feed(Ids(dialect.write([call]))), *reader.close(is_cut=False)]
    ids = tuple(part.ids for part in parsed if isinstance(part, ItemClosed))
    tail = parsed[-1]
    assert isinstance(tail, TurnClosed)
    assert len(ids) == 1, "the model wrote one item"
    last = Round(given, (call,), ids, tail.ids, dialect.fingerprint, did_sample=True)
    return Turn(
        id=f"resp_{number}",
        owner="bench",
        parent_id=past.id if past else None,
        parent=past,
        rounds=(last,),
        response=cast(Response, None),  # A dialect never looks at it.
        is_stored=False,
        open_calls={},
        model_turns=number + 1,
        tools=HEAD.tools,
    )


@dataclass(frozen=True)
class History:
    """A chain, cold and warm, and the number of its last call."""

    cold: Turn
    warm: Turn
    number: int


def history(dialect: Dialect, tokens: int) -> History:
    """A chain of turns with about this many tokens."""
    sample = dialect.render(Scene(HEAD, chain(dialect, SAMPLE_TURNS), ()))
    turns = max(2, round(tokens / sample.context.length * SAMPLE_TURNS))
    cold = chain(dialect, turns)
    last = cold.rounds[-1]
    rendered = dialect.render(Scene(HEAD, cold.parent, last.given))
    kept = warm_after(dialect.fingerprint, HEAD, rendered, last)
    return History(cold, msgspec.structs.replace(cold, warm=kept), turns - 1)


def chain(dialect: Dialect, turns: int) -> Turn:
    """The last one of this many turns."""
    turn = next_turn(dialect, None, 0)
    for number in range(1, turns):
        turn = next_turn(dialect, turn, number)
    return turn


# --- measuring ------------------------------------------------------------------------------------


def timed(
    dialect: Dialect, past: Turn, number: int, parts: Iterator[int]
) -> tuple[float, Rendered]:
    """The seconds that rendering one more output takes: in each round another text, the same for all sizes."""
    scene = Scene(HEAD, past, (output(number, next(parts)),))
    began = time.perf_counter()
    rendered = dialect.render(scene)
    return time.perf_counter() - began, rendered


@dataclass(frozen=True)
class RenderCost:
    """What a turn costs after a history of this many tokens."""

    tokens: int
    tokenized: int
    warm_s: float
    cold_s: float


def measure(
    dialect: Dialect, sizes: Sequence[int], rounds: int, cold_rounds: int
) -> list[RenderCost]:
    """Medians for each size, the sizes taking turns."""
    histories = {size: history(dialect, size) for size in sizes}
    warm, cold = (
        interleaved(
            {
                size: partial(timed, dialect, getattr(chain, kind), chain.number, count())
                for size, chain in histories.items()
            },
            repeat,
            warm_ups,
        )
        for kind, repeat, warm_ups in (("warm", rounds, 1), ("cold", cold_rounds, 0))
    )
    return [
        RenderCost(
            warm[size][-1][1].tokens_reused,
            warm[size][-1][1].tokens_tokenized,
            statistics.median(took for took, _ in warm[size]),
            statistics.median(took for took, _ in cold[size]),
        )
        for size in sizes
    ]


def kept_bytes(dialect: Dialect) -> tuple[int, int]:
    """Bytes of all that is kept of 100k tokens, and of the joined prompt alone."""
    history(dialect, KEPT_TOKENS)  # So that the vocabulary's own memory is not counted.
    tracemalloc.start()
    kept = history(dialect, KEPT_TOKENS)
    whole, _ = tracemalloc.get_traced_memory()
    prompt = kept.warm.warm.prompt if kept.warm.warm else None
    assert isinstance(prompt, Tokens)
    length = prompt.length
    del prompt
    kept = replace(kept, warm=kept.cold)
    bare, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return int(whole * KEPT_TOKENS / length), int((whole - bare) * KEPT_TOKENS / length)


def main(arguments: Sequence[str]) -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench render", description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--cold-rounds", type=int, default=3)
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--dialects", nargs="+", choices=MAKERS, default=list(MAKERS))
    options = parser.parse_args(arguments)
    rows, memory, verdicts = [], [], []
    for name in options.dialects:
        dialect, words = MAKERS[name]()
        costs = measure(dialect, options.sizes, options.rounds, options.cold_rounds)
        for cost in costs:
            warm, cold = cost.warm_s / costs[0].warm_s, cost.cold_s / costs[0].cold_s
            times = (cost.warm_s * 1e3, warm, cost.cold_s * 1e3, cold)
            rows.append((name, words, cost.tokens, cost.tokenized, *times))
        is_flat = costs[-1].warm_s <= RATIO_MAX * costs[0].warm_s
        verdicts.append(f"{name}: warm within {RATIO_MAX} x: {'yes' if is_flat else 'no'}")
        memory.append((name, *(size / 1e6 for size in kept_bytes(dialect))))
    columns = "warm ms {:.3f}|ratio {:.2f}|cold ms {:.1f}|ratio {:.0f}"
    print_table("dialect {}|vocabulary {}|history {:,}|encoded {}|" + columns, rows)
    print("\n".join(verdicts), end="\n\n")
    print_table("kept of 100k tokens {}|all MB {:.2f}|joined prompt MB {:.2f}", memory)
