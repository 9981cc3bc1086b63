"""How does an answer begin that is forced to be a call, or JSON?

In: a scene whose `tool_choice` or format leaves the model no choice, and how the family writes a call (`CallForm`).
Out: the lead, which is the beginning of the answer in our words, and the schema or grammar of what the model adds.
An engine that follows structural tags is held to the family's own format; others to a JSON schema.

A lead ends where a token of the model would end too: after a newline, or after `"arguments":`. The brace that follows
is the model's, because most vocabularies join it with a space or a quote.

A custom tool may have a grammar. Engines follow the grammar itself, which knows nothing of JSON, so the words around
the input are ours: the lead begins the call up to the quote of its `input`, the model writes the input as it is, and
the end of the call is added after it. In the prompt of later turns such an input stands unescaped, as it was sampled.
Its reader needs no marks: everything after the lead, up to a stop, is the input.
"""

from __future__ import annotations

from array import array
from codecs import getincrementaldecoder
from collections.abc import Callable
from dataclasses import dataclass

from segue.errors import InvalidRequest
from segue.readers.bound import BoundFamily
from segue.readers.offers import arguments_schema, call_schema, forced, format_schema, opened_call
from segue.readers.tags import check_followed, check_size
from segue.seams.model import Grammar, Ids, ItemClosed, ItemText, Parsed, Piece, Scene, TurnClosed
from segue.seams.prompt import IdArray
from segue.vocabularies.vocabulary import Chunk, Vocabulary
from segue.wire.tools import Offer, grammar_of

# Around the input of a custom tool, inside the arguments.
QUOTE = '{"input": "'
UNQUOTE = '"}'

Chunks = tuple[Chunk, ...]
Forced = tuple[Chunks, bytes | Grammar | None]


@dataclass(frozen=True, slots=True)
class CallForm:
    """How a family begins and ends a call."""

    # Begins a call of the tool with this name, up to its arguments.
    named: Callable[[str], Chunks]
    # Closes a call after its arguments.
    end: str = ""
    # The key of the arguments where a call is an object; None: this family reads no such call.
    arguments_key: str | None = "arguments"
    # Stands before a call that is an object, where any of several tools may be called.
    before_object: Chunks = ()
    # Whether a call is an object even if only one tool may be called.
    is_always_object: bool = False
    # Begins an answer in JSON.
    before_text: Chunks = ()
    # Around the input of a custom tool whose input follows a grammar, after `named` and before `end`.
    around_input: tuple[Chunk, str] = (f" {QUOTE}", UNQUOTE)
    # Whether what follows `named` is JSON.
    is_json: bool = True
    # The lead and the structural tag of a forced answer; None: the schema does it.
    tagged: Callable[[Scene, Vocabulary], Forced | None] = lambda scene, vocabulary: None


def lead_of(form: CallForm, scene: Scene, vocabulary: Vocabulary) -> Forced:
    """Our words at the beginning of a forced answer, and the schema or grammar of what follows them."""
    lead, held = _lead_of(form, scene, vocabulary) if scene.can_constrain else ((), None)
    if held is not None:
        size = len(held.definition if isinstance(held, Grammar) else held)
        param = "tools" if forced(scene) else "text.format"
        check_size(size, param)
        check_followed(held, param)
    return lead, held


def check_endpoint(scene: Scene) -> None:
    """A chat endpoint holds the answer by itself: it gets nothing that no engine could follow."""
    if offers := forced(scene):
        check_followed(call_schema(offers, "arguments"), "tools")
    if (schema := format_schema(scene)) is not None:
        check_followed(schema, "text.format")


def _lead_of(form: CallForm, scene: Scene, vocabulary: Vocabulary) -> Forced:
    if (offered := grammar_offer(scene)) is not None:
        return (*form.named(offered[0].qualified_name), form.around_input[0]), offered[1]
    tagged = form.tagged(scene, vocabulary) if scene.can_follow_tags else None
    if tagged is not None:
        return tagged
    offers = forced(scene)
    if not offers:
        schema = _text_schema(form, scene)
        return (() if schema is None else form.before_text), schema
    if len(offers) == 1 and form.is_json and not form.is_always_object:
        return form.named(offers[0].qualified_name), arguments_schema(offers[0])
    if form.arguments_key is None:
        raise _unsupported(
            "tool_choice",
            "'tool_choice' can force this model to call a tool by name, but not any of several tools.",
        )
    return form.before_object, call_schema(offers, form.arguments_key)


def _text_schema(form: CallForm, scene: Scene) -> bytes | None:
    """None where the model may also call in a way that is no JSON: one schema cannot describe both."""
    may_call = scene.head.tool_choice != "none" and bool(scene.offers)
    is_free = may_call and form.arguments_key is None
    return None if is_free else format_schema(scene, form.arguments_key)


def _unsupported(param: str, why: str) -> InvalidRequest:
    return InvalidRequest(why, code="unsupported_value", param=param)


# --- an input that follows a grammar --------------------------------------------------------------


def grammar_offer(scene: Scene) -> tuple[Offer, Grammar] | None:
    """The only tool that must be called, if it has a grammar and the engine can follow it.

    Whether the engine reads this grammar was checked before the turn began.
    """
    if not scene.can_constrain or len(offers := forced(scene)) != 1:
        return None
    grammar = grammar_of(offers[0])
    if grammar is None:
        return None
    syntax, definition = grammar
    return offers[0], Grammar("regex" if syntax == "regex" else "lark", definition)


class GrammarReader:
    """A `Reader` of a call whose input follows a grammar."""

    def __init__(
        self, bound: BoundFamily, offer: Offer, lead_tokens: int, closing: IdArray[int]
    ) -> None:
        """`lead_tokens`: how many tokens begin the call. `closing`: what is added after the input."""
        self._bound = bound
        self._offer = offer
        self._lead_tokens = lead_tokens
        self._closing = closing
        self._decode = getincrementaldecoder("utf-8")("replace")
        self._ids = array("I")
        self._is_stopped = False
        self._is_open = False
        self.is_over = False

    def feed(self, piece: Piece) -> list[Parsed]:
        assert isinstance(piece, Ids), "this dialect reads tokens"
        parsed: list[Parsed] = []
        for id in piece.ids:
            self._is_stopped = self._is_stopped or id in self._bound.stops
            if self._is_stopped:
                break
            self._feed_token(id, parsed)
        return parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        parsed: list[Parsed] = []
        is_cut = is_cut and not self._is_stopped
        if not self._is_open:
            return [TurnClosed(self._ids + self._bound.seal)]
        if not is_cut and (rest := self._decode.decode(b"", final=True)):
            parsed.append(ItemText(rest))
        parsed.append(ItemClosed(self._ids, is_cut))
        # Which stop the engine took, when nothing else was allowed, says nothing about how this family ends a turn.
        parsed.append(TurnClosed(self._closing + self._bound.seal))
        return parsed

    def _feed_token(self, id: int, parsed: list[Parsed]) -> None:
        self._ids.append(id)
        if self._is_open:
            if text := self._decode.decode(self._bound.vocabulary.bytes_of(id)):
                parsed.append(ItemText(text))
        elif len(self._ids) == self._lead_tokens:
            self._is_open = True
            parsed.append(opened_call(self._offer))
