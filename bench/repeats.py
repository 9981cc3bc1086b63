"""How much of what an agent writes stands in its context, and what would speculation without a model guess of it?

    python -m bench repeats FOLDER [--tokenizer FILE] [--sessions N] [--json FILE]

FOLDER has sessions as chat messages (`*.json` with a list `messages`: role, content, tool_calls), such as those that
mini-swe-agent writes. Nothing is sampled: each answer that was really written is guessed again, token by token, by two
methods that vLLM has, with the context that the model had:

ngram    the longest of the last 2 to 4 tokens that stands earlier; the 8 tokens after its first place are the guess
suffix   the longest ending that stands earlier, at its latest place; as many tokens as it is long, 24 at most

A step of the engine gives the guessed tokens that are right and one more. With one conversation a step takes about as
long with a guess as without, so tokens a step is how many times as fast the answer is written, at best.
"""

from __future__ import annotations

import argparse
import json
import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from segue.printable import say
from segue.vocabularies.load import vocabulary_from_file, vocabulary_from_gguf
from segue_bench.rounds import print_table
from segue_embedded.weights import find_weights

NGRAM_MIN, NGRAM_MAX, NGRAM_GUESS = 2, 4, 8
SUFFIX_MIN, SUFFIX_MAX, PLACES_MAX = 4, 24, 16
# A copy is at least this long.
COPY = 8
# What a command does, by its words; the first that fits.
ACTIONS = {
    "edit": re.compile(
        r"sed -i|cat >|cat <<|tee |str_replace|\.write\(|apply_patch|patch -p|>>? *\S+\.\w+"
    ),
    "patch": re.compile(r"git (diff|add|commit|stash|checkout)|patch\.txt"),
    "test": re.compile(r"pytest|unittest|runtests|tox|python3? (-m|-c|\S+\.py)|make "),
    "read": re.compile(r"\b(cat|head|tail|sed -n|nl|less|grep|rg|find|ls|tree|wc)\b"),
}


def action_of(command: str) -> str:
    """Which kind of action a command is."""
    return next((name for name, words in ACTIONS.items() if words.search(command)), "other")


class Context:
    """The tokens so far, and where what stands."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        # The first place after each n-gram; and all places after the last tokens of a suffix.
        self._first: list[dict[tuple[int, ...], int]] = [{} for _ in range(NGRAM_MAX + 1)]
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def add(self, ids: Sequence[int]) -> None:
        """More tokens."""
        for id in ids:
            # What ends before this token is followed by it.
            end = len(self.ids)
            for size in range(NGRAM_MIN, NGRAM_MAX + 1):
                if end >= size:
                    self._first[size].setdefault(tuple(self.ids[end - size :]), end)
            if end >= SUFFIX_MIN:
                self._places[tuple(self.ids[end - SUFFIX_MIN :])].append(end)
            self.ids.append(id)

    def ngram(self) -> list[int]:
        """vLLM's `ngram`."""
        for size in range(NGRAM_MAX, NGRAM_MIN - 1, -1):
            if len(self.ids) >= size:
                place = self._first[size].get(tuple(self.ids[-size:]))
                if place is not None:
                    return self.ids[place : place + NGRAM_GUESS]
        return []

    def suffix(self) -> list[int]:
        """As suffix decoding does it, without the counts of how often each went on how."""
        ids = self.ids
        best, best_place = 0, 0
        for place in self._places.get(tuple(ids[-SUFFIX_MIN:]), [])[-PLACES_MAX:]:
            length = SUFFIX_MIN
            while (
                length < SUFFIX_MAX
                and place > length
                and ids[place - length - 1] == ids[-length - 1]
            ):
                length += 1
            if length >= best:
                best, best_place = length, place
        return ids[best_place : best_place + best] if best else []


METHODS: dict[str, Callable[[Context], list[int]]] = {
    "ngram": Context.ngram,
    "suffix": Context.suffix,
}


@dataclass
class Count:
    """Of one kind of text."""

    texts: int = 0
    tokens: int = 0
    copied: int = 0
    steps: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    guessed: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))
    right: dict[str, int] = field(default_factory=lambda: dict.fromkeys(METHODS, 0))


def count_text(context: Context, ids: Sequence[int], count: Count) -> None:
    """Guess this text after the context, which it then belongs to."""
    count.texts += 1
    count.tokens += len(ids)
    begin = len(context.ids)
    # By each method, up to where the answer is known already.
    known = dict.fromkeys(METHODS, 0)
    for place, id in enumerate(ids):
        for name, guess in METHODS.items():
            if known[name] > place:
                continue
            guessed = guess(context)[: len(ids) - place]
            right = next(
                (n for n, (a, b) in enumerate(zip(guessed, ids[place:], strict=False)) if a != b),
                len(guessed),
            )
            count.steps[name] += 1
            count.guessed[name] += len(guessed)
            count.right[name] += right
            known[name] = place + right + 1
        context.add([id])
    count.copied += copied(context.ids, begin)


def copied(ids: Sequence[int], begin: int) -> int:
    """How many of the ids from this place on belong to a copy of at least `COPY` tokens of what stands before."""
    seen = {tuple(ids[at : at + COPY]) for at in range(max(0, begin - COPY + 1))}
    covered = begin
    total = 0
    for at in range(begin, len(ids) - COPY + 1):
        if tuple(ids[at : at + COPY]) in seen:
            total += at + COPY - max(at, covered)
            covered = at + COPY
    return total


def pieces(message: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """What a message says: of whom or of which kind of action, and the text."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "\n".join(part.get("text", "") for part in content)
    if message["role"] != "assistant":
        yield "", content
        return
    if content:
        yield "words", content
    for call in message.get("tool_calls") or ():
        arguments = call["function"]["arguments"]
        yield action_of(arguments), arguments


def main(arguments: Sequence[str]) -> None:
    """Count, and print."""
    parser = argparse.ArgumentParser(prog="python -m bench repeats", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tokenizer", type=Path, help="tokenizer.json (default: SmolLM2's)")
    parser.add_argument("--sessions", type=int, default=1_000)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(arguments)
    path = options.tokenizer
    vocabulary = (
        vocabulary_from_file(path) if path else vocabulary_from_gguf(find_weights("smollm2"))
    )
    counts: dict[str, Count] = defaultdict(Count)
    sessions = turns = longest = 0
    for file in sorted(options.folder.rglob("*.json")):
        try:
            messages = json.loads(file.read_text())["messages"]
        except (KeyError, TypeError, ValueError):
            continue
        if sessions == options.sessions:
            break
        sessions += 1
        context = Context()
        for message in messages:
            turns += message["role"] == "assistant"
            for kind, text in pieces(message):
                ids = vocabulary.encode(text).tolist()
                if kind:
                    count_text(context, ids, counts[kind])
                else:
                    context.add(ids)
        longest = max(longest, len(context.ids))
    if not turns:
        raise SystemExit(f"bench: no sessions in {options.folder}")
    whole = Count()
    for count in counts.values():
        for name in ("texts", "tokens", "copied"):
            setattr(whole, name, getattr(whole, name) + getattr(count, name))
        for name in METHODS:
            for field_name in ("steps", "guessed", "right"):
                getattr(whole, field_name)[name] += getattr(count, field_name)[name]
    rows = {**dict(sorted(counts.items(), key=lambda pair: -pair[1].tokens)), "all": whole}
    say(f"{sessions} sessions, {turns} answers, up to {longest:,} tokens")
    print_table(
        "what is written {}|texts {:,}|tokens {:,}|copied {:.0%}|ngram: tokens a step {:.2f}|right of guessed {:.0%}"
        "|suffix: tokens a step {:.2f}|right of guessed {:.0%}",
        [
            (
                name, count.texts, count.tokens, count.copied / max(count.tokens, 1),
                *(
                    value
                    for method in METHODS
                    for value in (
                        count.tokens / max(count.steps[method], 1),
                        count.right[method] / max(count.guessed[method], 1),
                    )
                ),
            )
            for name, count in rows.items()
        ],
    )  # fmt: skip
    if options.json:
        told = {name: count.__dict__ for name, count in rows.items()}
        options.json.write_text(json.dumps({"sessions": sessions, "turns": turns, "counts": told}))
