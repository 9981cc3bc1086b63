"""What is a model family, and how does it become a dialect?

A `Family` is a value: the special tokens, and plain functions that write and read. `TokenDialect` is the dialect
of all of them: a family on a vocabulary. Nothing in it knows a family by name. `choose.py` has the table of families.

Every function that writes takes the vocabulary first and gives ids. It puts them together from chunks with
`Vocabulary.ids`: a `Mark` is a special token, and text never becomes special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from segue.dialects.forced import (
    CallForm,
    GrammarCall,
    GrammarReader,
    closing_of,
    grammar_offer,
    lead_of,
)
from segue.dialects.offers import added_by
from segue.dialects.parts import Part, parts_of, text_of
from segue.turn.values import Head, IdArray, ItemText, Parsed, Piece, Rendered, Scene
from segue.vocabularies.vocabulary import Chunk, Vocabulary
from segue.wire.items import AdditionalTools, Item, Message
from segue.wire.tools import Offer


class _Reader(Protocol):
    """The seam `Reader`, which is not imported, because its page knows of tasks and clocks."""

    def feed(self, piece: Piece) -> list[Parsed]: ...

    def close(self, *, is_cut: bool) -> list[Parsed]: ...

    @property
    def is_over(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family writes and reads."""

    # Names what kept ids mean: a change of the family that changes them needs a new number.
    version: str
    # The special tokens by which a model of this family is known; it cannot do without them.
    specials: tuple[str, ...]
    # Special tokens that end the model's turn. The vocabulary must have the first.
    stops: tuple[str, ...]
    # Closes the model's turn in history, and begins with a stop.
    seal: tuple[Chunk, ...]
    # Makes the model speak.
    cue: tuple[Chunk, ...]
    # The prompt of a scene; `Writing.render` for every family that writes item by item.
    render: Callable[[BoundFamily, Scene], Rendered]
    # What the model would sample after the cue to say these items, up to a stop.
    write: Callable[[Vocabulary, Sequence[Item]], IdArray[int]]
    # Reads the answer to a scene.
    reader: Callable[[BoundFamily, Scene], _Reader]
    # How an answer begins that is forced to be a call, or JSON.
    call: CallForm
    # Skips or ends the model's thought, before every forced answer.
    without_thought: tuple[Chunk, ...] = ()
    # Whether the thought is also skipped where the effort is "none".
    is_thought_optional: bool = False
    # Whether the special tokens alone decide, so that the model's template is not compared.
    is_known_by_tokens: bool = False
    # Whether a model's files, where it has no template, are of the format that is written here.
    is_format_known: Callable[[Path], bool] = lambda path: True
    # The family with the default system text of this prompt, which the model's own template has written.
    with_prompt: Callable[[str], Family] | None = None


@dataclass(frozen=True, slots=True)
class BoundFamily:
    """What a family is on one vocabulary, and what all readers of its answers share."""

    vocabulary: Vocabulary
    fingerprint: str
    cue: IdArray[int]
    stops: frozenset[int]
    seal: IdArray[int]
    # Tokens that are plain text wherever they stand, ready to be sent; None: the token is not plain.
    plain_tokens: dict[int, ItemText | None] = field(default_factory=dict)


def bind(family: Family, vocabulary: Vocabulary) -> BoundFamily:
    """The family on this vocabulary; refused if they do not fit."""
    for text in family.specials:
        vocabulary.special(text)
    first, *others = family.stops
    stops = [first, *filter(vocabulary.has_special, others)]
    return BoundFamily(
        vocabulary,
        f"{family.version}-{vocabulary.fingerprint}",
        vocabulary.ids(*family.cue),
        frozenset(map(vocabulary.special, stops)),
        vocabulary.ids(*family.seal),
    )


class TokenDialect:
    """A `Dialect` for token engines: any family on its vocabulary."""

    def __init__(self, family: Family, vocabulary: Vocabulary) -> None:
        self._family = family
        self._bound = bind(family, vocabulary)
        self.fingerprint = self._bound.fingerprint
        self.stops = self._bound.stops

    def render(self, scene: Scene) -> Rendered:
        """The prompt, and where the answer is forced, its beginning and the schema of what follows."""
        rendered = self._family.render(self._bound, scene)
        chunks, schema = lead_of(self._family.call, scene)
        is_unthinking = self._family.is_thought_optional and scene.effort == "none"
        if schema is not None or is_unthinking:
            chunks = self._family.without_thought + chunks
        if not chunks and schema is None:
            return rendered
        return replace(rendered, lead=self._bound.vocabulary.ids(*chunks), schema=schema)

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        return self._family.write(self._bound.vocabulary, items)

    def reader(self, scene: Scene) -> _Reader:
        found = grammar_offer(scene)
        if found is None:
            return self._family.reader(self._bound, scene)
        vocabulary, form = self._bound.vocabulary, self._family.call
        lead = vocabulary.ids(*self._family.without_thought, *lead_of(form, scene)[0])
        closing = vocabulary.encode(closing_of(form))
        call = GrammarCall(found[0], len(lead), closing, self._bound.seal)
        return GrammarReader(vocabulary, self._bound.stops, call)


# --- what most families write alike ---------------------------------------------------------------

# What goes on in the same block: a model turn in the order in which the model writes it.
MODEL_TURN = {
    ("think", "think"),
    ("think", "talk"),
    ("think", "call"),
    ("talk", "call"),
    ("call", "call"),
}


def blocks_of(
    items: Sequence[Item], joins: set[tuple[str, str]], tools: Callable[[Sequence[Offer]], str]
) -> list[list[Part]]:
    """What these items say, by block; `tools` writes the tools that an item brings."""
    blocks: list[list[Part]] = []
    for item in items:
        for part in _parts_of(item, tools):
            if blocks and (blocks[-1][-1].kind, part.kind) in joins:
                blocks[-1].append(part)
            else:
                blocks.append([part])
    return blocks


def _parts_of(item: Item, tools: Callable[[Sequence[Offer]], str]) -> list[Part]:
    if isinstance(item.value, AdditionalTools):
        added = added_by(item)
        return [Part("tools", tools(added))] if added else []
    return parts_of((item,))


def is_from(items: Sequence[Item], *roles: str) -> bool:
    """Whether the first item is a message with one of these roles."""
    return bool(items) and isinstance(items[0].value, Message) and items[0].value.role in roles


def message_text(item: Item) -> str:
    """The words of an item that is a message."""
    assert isinstance(item.value, Message)
    return text_of(item.value)


def system_of(head: Head, items: Sequence[Item]) -> tuple[str | None, Sequence[Item]]:
    """The instructions, or else a system message that leads the chain; and the items after it."""
    if head.instructions is None and is_from(items, "system", "developer"):
        return message_text(items[0]), items[1:]
    return head.instructions, items
