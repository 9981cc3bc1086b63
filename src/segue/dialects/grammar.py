"""How is a call written and read whose input must follow a grammar?

Engines are held to the grammar itself, and a grammar knows nothing of JSON. So the words around the input are ours: the
lead begins the call up to the quote of its `input`, then the model writes the input as it is, and what closes the call
is put behind it. In the prompt of later turns such an input stands unescaped, as it was sampled. The reader needs no
marks: everything behind the lead, up to a stop, is the input.
"""

from __future__ import annotations

from codecs import getincrementaldecoder
from dataclasses import dataclass

from segue.dialects.offers import forced, opened_call
from segue.dialects.parts import dumps
from segue.dialects.vocabulary import Vocabulary
from segue.turn.values import (
    Grammar,
    IdArray,
    Ids,
    ItemClosed,
    ItemText,
    Parsed,
    Piece,
    Scene,
    TurnClosed,
    id_array,
)
from segue.wire.tools import Offer, grammar_of

# Around the input, inside the arguments.
QUOTE, UNQUOTE = '{"input": "', '"}'


@dataclass(frozen=True, slots=True)
class Held:
    """A call whose input is held to a grammar: our words before it, and what closes the model's turn behind it."""

    offer: Offer
    grammar: Grammar
    lead: IdArray[int]
    behind: IdArray[int]
    seal: IdArray[int]


def held_offer(scene: Scene) -> tuple[Offer, Grammar] | None:
    """The one tool that must be called, if it has a grammar and the engine can be held to it.

    Whether it can was asked before the turn began.
    """
    offers = forced(scene)
    if not scene.can_constrain or len(offers) != 1:
        return None
    found = grammar_of(offers[0])
    if found is None:
        return None
    syntax, definition = found
    return offers[0], Grammar("regex" if syntax == "regex" else "lark", definition)


def named(name: str, arguments_key: str) -> str:
    """The beginning of a call that is an object of name and arguments."""
    return f'{{"name": {dumps(name)}, "{arguments_key}": {QUOTE}'


class HeldReader:
    """A `Reader` of such a call."""

    def __init__(self, vocabulary: Vocabulary, stops: frozenset[int], held: Held) -> None:
        self._vocabulary = vocabulary
        self._stops = stops
        self._held = held
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._ids = id_array()
        self._is_stopped = False
        self._is_open = False
        self.is_over = False

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with these ids, the lead first."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        parsed: list[Parsed] = []
        for id in piece.ids:
            self._is_stopped = self._is_stopped or id in self._stops
            if self._is_stopped:
                break
            self._take(id, parsed)
        return parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Close the call, and seal the turn."""
        parsed: list[Parsed] = []
        is_cut = is_cut and not self._is_stopped
        if self._is_open:
            if not is_cut and (rest := self._decode.decode(b"", final=True)):
                parsed.append(ItemText(rest))
            parsed.append(ItemClosed(self._ids, is_cut))
            self._ids = id_array()
        # Which stop the engine took, when nothing else was allowed, says nothing about how this family ends a turn.
        behind = self._held.behind if self._is_open else id_array()
        parsed.append(TurnClosed(self._ids + behind + self._held.seal))
        return parsed

    def _take(self, id: int, parsed: list[Parsed]) -> None:
        self._ids.append(id)
        if self._is_open:
            if text := self._decode.decode(self._vocabulary.bytes_of(id)):
                parsed.append(ItemText(text))
        elif len(self._ids) == len(self._held.lead):
            self._is_open = True
            parsed.append(opened_call(self._held.offer.qualified_name, self._held.offer))
