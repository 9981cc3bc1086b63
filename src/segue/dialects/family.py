"""What is a model family, and how does it become a dialect?

A `Family` is a value: the special tokens, and plain functions that write and read. `TokenDialect` is the dialect
of all of them: a family on a vocabulary. Nothing in it knows a family by name. `choose.py` has the table of families.

Every function that writes takes the vocabulary first and gives ids. It puts them together from chunks with
`Vocabulary.ids`: a `Mark` is a special token, `Own` words may hold some, and text never becomes special.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from msgspec.structs import replace

from segue.derivation.family import DerivedFamily
from segue.dialects.parts import text_of
from segue.readers.bound import BoundFamily
from segue.readers.forced import CallForm, Chunks, GrammarReader, grammar_offer, lead_of
from segue.seams.model import Parsed, Piece, Rendered, Scene
from segue.seams.prompt import Head, IdArray
from segue.vocabularies.vocabulary import Chunk, Own, Vocabulary
from segue.wire.items import Item, Message


class _Reader(Protocol):
    """The seam `Reader`, which is not imported, because its page knows of tasks and clocks."""

    def feed(self, piece: Piece) -> list[Parsed]: ...

    def close(self, *, is_cut: bool) -> list[Parsed]: ...

    @property
    def is_over(self) -> bool: ...


@dataclass(frozen=True, slots=True)
class Family:
    """How one model family writes and reads."""

    # The name that `--dialect` has for it; variants that only a model's template can tell apart share one.
    name: str
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
    # What else it marks its words with: special too, where the vocabulary has it as a token.
    marks: tuple[str, ...] = ()
    # Whether a prompt says anything else than the model's own template; None: there is nothing to compare with.
    differs: Callable[[Scene, Rendered], bool] | None = None
    # A mark of calls in the model's template that no reader knows.
    unread: str | None = None
    # Skips or ends the model's thought, before every forced answer.
    without_thought: tuple[Chunk, ...] = ()
    # Whether the cue leaves the model thinking, or free to think; if not, there is nothing to skip.
    is_thinking: Callable[[Scene], bool] = lambda scene: True
    # Whether the thought is also skipped where the effort is "none".
    is_thought_optional: bool = False
    # Whether the special tokens alone decide, so that the model's template is not compared.
    is_known_by_tokens: bool = False
    # Whether a model's files, where it has no template, are of the format that is written here.
    is_format_known: Callable[[Path], bool] = lambda path: True
    # Whether images can be written for a model that sees them.
    takes_images: bool = False
    # The family with the default system text of this prompt, which the model's own template has written.
    with_prompt: Callable[[str], Family] | None = None

    def thought_skipped(self, scene: Scene) -> tuple[Chunk, ...]:
        """What skips or ends the model's thought in this scene."""
        return self.without_thought if self.is_thinking(scene) else ()


class TokenDialect:
    """A `Dialect` for token engines: any family on its vocabulary; refused if they do not fit."""

    def __init__(self, family: Family, vocabulary: Vocabulary) -> None:
        vocabulary = vocabulary.protecting(" ".join(family.marks))
        for text in family.specials:
            vocabulary.special(text)
        first, *others = family.stops
        stops = [first, *filter(vocabulary.has_special, others)]
        self._family = family
        self._bound = BoundFamily(
            vocabulary,
            f"{family.version}-{vocabulary.fingerprint}",
            vocabulary.ids(*family.cue),
            frozenset(map(vocabulary.special, stops)),
            vocabulary.ids(*family.seal),
        )
        self.name = family.name
        self.fingerprint = self._bound.fingerprint
        self.stops = self._bound.stops
        self.unread = family.unread
        self.takes_images = family.takes_images
        # Whether the model's own template has no place for tools, so that they are described in words of ours.
        self.lacks_tools = False
        # How the model writes, where that was worked out from its template.
        self.derived: DerivedFamily | None = None

    def render(self, scene: Scene) -> Rendered:
        """The prompt, and where the answer is forced, its beginning and the schema of what follows."""
        family = self._family
        head = scene.head
        rendered = family.render(self._bound, scene)
        chunks: Chunks = ()
        schema = None
        is_free = head.tool_choice in ("auto", "none")
        if not is_free or head.text.format is not None or scene.effects.format is not None:
            chunks, schema = lead_of(family.call, scene, self._bound.vocabulary)
        if schema is not None or (family.is_thought_optional and scene.effort == "none"):
            chunks = family.thought_skipped(scene) + chunks
        if not chunks and schema is None:
            return rendered
        return replace(rendered, lead=self._bound.vocabulary.ids(*chunks), schema=schema)

    def differs(self, scene: Scene, rendered: Rendered) -> bool:
        compare = self._family.differs
        return compare is not None and compare(scene, rendered)

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        return self._family.write(self._bound.vocabulary, items)

    def reader(self, scene: Scene) -> _Reader:
        family = self._family
        bound = self._bound
        is_free = scene.head.tool_choice in ("auto", "none")
        found = None if is_free else grammar_offer(scene)
        if found is None:
            return family.reader(bound, scene)
        chunks, _ = lead_of(family.call, scene, bound.vocabulary)
        lead = bound.vocabulary.ids(*family.thought_skipped(scene), *chunks)
        closing = bound.vocabulary.ids(Own(family.call.around_input[1] + family.call.end))
        return GrammarReader(bound, found[0], len(lead), closing)


# --- what most families write alike ---------------------------------------------------------------


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
