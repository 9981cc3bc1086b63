"""How do Llama 3.1, 3.2 and 3.3 write and read?

A prompt is a row of blocks, `<|start_header_id|>role<|end_header_id|>`, two newlines, content, `<|eot_id|>`. The first
is always the system's and says what day it is: the day on which the chain began, so that midnight changes no prompt.
The tools stand in the first message of the user, as the models were trained; where the chain does not begin with one,
in the system's block, which is the template's other way.

A call is the whole answer, an object with `name` and `parameters`. Where text went before it, `<|python_tag|>` stands
between them. Outputs come back in the role `ipython`, as JSON strings. The template knows one call at a time; more of
them are parted by `;`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from segue.dialects.grammar import UNQUOTE, Held, HeldReader, held_offer, named
from segue.dialects.offers import (
    added_by,
    arguments_schema,
    call_schema,
    definition_of,
    forced,
    format_schema,
)
from segue.dialects.parts import Part, dumps, dumps_indented, object_or_string, parts_of, text_of
from segue.dialects.speech import THINK, THOUGHT, Speech, TextReader
from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import Hand, NameOf, is_alike_by_words, render
from segue.turn.values import NO_IDS, Grammar, Head, IdArray, Rendered, Scene, id_array
from segue.wire.items import AdditionalTools, Item, Message
from segue.wire.tools import Offer

BEGIN, HEADER, HEADED = "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"
END, TAG = "<|eot_id|>", "<|python_tag|>"
OTHER_ENDS = ("<|eom_id|>", "<|end_of_text|>")
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "llama1"

# The words of the models' own template.
ENVIRONMENT = "Environment: ipython\n"
DATES = "Cutting Knowledge Date: December 2023\nToday Date: {}\n\n"
FORMAT = (
    'Respond in the format {"name": function name, "parameters": '
    "dictionary of argument name and its value}.Do not use variables.\n\n"
)
TOOLS_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n" + FORMAT
)
TOOLS_IN_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON "
    "for a function call." + FORMAT
)
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
ROLES = {
    "think": "assistant", "talk": "assistant", "call": "assistant", "response": "ipython",
    "tools": "system",
}  # fmt: skip
# What goes on in the same block: a model turn in the order in which the model writes it.
JOINS = {
    ("think", "think"),
    ("think", "talk"),
    ("think", "call"),
    ("talk", "call"),
    ("call", "call"),
}


class Llama3Dialect:
    """A `Dialect` for token engines."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._header = id_array([vocabulary.special(HEADER)])
        self._headed = id_array([vocabulary.special(HEADED)])
        self._end = id_array([vocabulary.special(END)])
        tag = vocabulary.special(TAG) if vocabulary.has_special(TAG) else None
        self._tag = NO_IDS if tag is None else id_array([tag])
        others = [text for text in OTHER_ENDS if vocabulary.has_special(text)]
        self._stops = frozenset(vocabulary.special(text) for text in (END, *others))
        self._speech = Speech(vocabulary, self._stops, self._end, signal=tag)
        self._hand = Hand(
            fingerprint=f"{VERSION}-{vocabulary.fingerprint}",
            cue=self._opening("assistant") + vocabulary.encode("\n\n"),
            begin=self._begin,
            given=self._given,
            wrote=self.write,
            is_alike=is_alike_by_words,
        )

    @property
    def fingerprint(self) -> str:
        """Names this format and the vocabulary."""
        return self._hand.fingerprint

    @property
    def stops(self) -> frozenset[int]:
        """Ids that end the model's turn."""
        return self._stops

    def render(self, scene: Scene) -> Rendered:
        """The prompt: head, history, what is given now, the cue, and where the answer is forced, its beginning."""
        rendered = render(self._hand, scene)
        lead, schema = self._lead(scene)
        return replace(rendered, lead=lead, schema=schema) if lead or schema else rendered

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample behind the cue to say these items, its end mark included."""
        return self._encode("", parts_of(items)) + self._end

    def reader(self, scene: Scene) -> TextReader | HeldReader:
        """A reader for the answer to this scene, which knows the tools by name."""
        if (held := self._held(scene)) is not None:
            return HeldReader(self._vocabulary, self._stops, held)
        is_forced = scene.can_constrain and bool(forced(scene))
        return TextReader(self._speech, scene, mends=is_forced)

    def _held(self, scene: Scene) -> Held | None:
        """A call that is held to a grammar, if there is to be one."""
        if (found := held_offer(scene)) is None:
            return None
        offer, grammar = found
        lead = self._vocabulary.encode(named(offer.qualified_name, "parameters"))
        return Held(offer, grammar, lead, self._vocabulary.encode(UNQUOTE + "}"), self._end)

    def _lead(self, scene: Scene) -> tuple[IdArray[int], bytes | Grammar | None]:
        if not scene.can_constrain:
            return NO_IDS, None
        if (held := self._held(scene)) is not None:
            return held.lead, held.grammar
        offers = forced(scene)
        if not offers:
            return NO_IDS, format_schema(scene, "parameters")
        if len(offers) > 1:
            return NO_IDS, call_schema(offers, "parameters")
        begun = f'{{"name": {dumps(offers[0].qualified_name)}, "parameters":'
        return self._vocabulary.encode(begun), arguments_schema(offers[0])

    def _begin(
        self, head: Head, items: Sequence[Item], root_at: int, name_of: NameOf
    ) -> IdArray[int]:
        """The system's block, and the first message of the user if the tools are to stand in it."""
        system = head.instructions or ""
        if head.instructions is None and _is_from(items, ("system", "developer")):
            system, items = _message(items[0]), items[1:]
        offers = head.tools.offers
        before = (ENVIRONMENT if offers else "") + DATES.format(_day(root_at))
        if not offers or not _is_from(items, ("user",)):
            tools = TOOLS_IN_SYSTEM + _tools(offers) if offers else ""
            return self._beginning(before + tools + system.strip()) + self._given(items, name_of)
        first = TOOLS_IN_USER + _tools(offers) + _message(items[0]).strip()
        ids = self._beginning(before + system.strip()) + self._block("user", first)
        return ids + self._given(items[1:], name_of)

    def _beginning(self, system: str) -> IdArray[int]:
        return id_array([self._vocabulary.special(BEGIN)]) + self._block("system", system)

    def _given(self, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
        ids = id_array()
        for parts in _blocks(items):
            role = ROLES.get(parts[0].kind, parts[0].kind)
            ids.extend(self._opening(role) + self._encode("\n\n", parts) + self._end)
        return ids

    def _block(self, role: str, content: str) -> IdArray[int]:
        return self._opening(role) + self._vocabulary.encode(f"\n\n{content}") + self._end

    def _opening(self, role: str) -> IdArray[int]:
        return self._header + self._vocabulary.encode(role) + self._headed

    def _encode(self, before: str, parts: Sequence[Part]) -> IdArray[int]:
        """The content of one block; only the tag before a call is more than text."""
        ids = id_array()
        text = before
        for n, part in enumerate(parts):
            last = parts[n - 1].kind if n else None
            if part.kind == "call" and last == "talk":
                ids.extend(self._vocabulary.encode(text) + self._tag)
                text = "" if self._tag else "\n"
            text += ("; " if part.kind == last == "call" else "") + _written(part)
        return ids + self._vocabulary.encode(text)


def _blocks(items: Sequence[Item]) -> list[list[Part]]:
    blocks: list[list[Part]] = []
    for item in items:
        for part in _parts(item):
            if blocks and (blocks[-1][-1].kind, part.kind) in JOINS:
                blocks[-1].append(part)
            else:
                blocks.append([part])
    return blocks


def _parts(item: Item) -> list[Part]:
    if isinstance(item.value, AdditionalTools):
        added = added_by(item)
        return [Part("tools", TOOLS_IN_SYSTEM + _tools(added))] if added else []
    return parts_of((item,))


def _written(part: Part) -> str:
    match part.kind:
        case "think":
            return f"{THINK}\n{part.text}\n{THOUGHT}\n\n"
        case "call":
            named = f'"name": {dumps(part.name)}, "parameters": {object_or_string(part.text)}'
            return f"{{{named}}}"
        case "response":
            return dumps(part.text)
        case _:
            return part.text.strip()


def _tools(tools: Sequence[Offer]) -> str:
    return "".join(dumps_indented(definition_of(tool)) + "\n\n" for tool in tools)


def _is_from(items: Sequence[Item], roles: tuple[str, ...]) -> bool:
    return bool(items) and isinstance(items[0].value, Message) and items[0].value.role in roles


def _message(item: Item) -> str:
    assert isinstance(item.value, Message)
    return text_of(item.value)


def _day(at: int) -> str:
    """As `26 Jul 2024`, whatever language the machine speaks."""
    day = datetime.fromtimestamp(at, UTC)
    return f"{day.day:02} {MONTHS[day.month - 1]} {day.year}"
