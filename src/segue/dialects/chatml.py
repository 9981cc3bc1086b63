"""How do ChatML models write and read? SmolLM2, Qwen2.5, Qwen3 and Hermes.

A prompt is a row of blocks, `<|im_start|>role`, newline, content, `<|im_end|>`, newline. Role and content are
encoded together, because a newline merges with what follows it, and never with the special ids around
them, so that blocks can be encoded one by one and a user's `<|im_end|>` is only text.

Inside an assistant's block everything is text: `<think>`, then what it says, then each call as JSON between
`<tool_call>` marks; `speech.py` reads it. The families differ in few things, which a `Family` holds.

A forced call begins with our words, up to where the model's own tokens would end too: behind the newline of
`<tool_call>`, or if only one tool is possible, behind `"arguments":`. The brace that follows is the model's, because
most vocabularies join it with a space or a quote.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

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
from segue.dialects.parts import Part, dumps, object_or_string, parts_of, text_of
from segue.dialects.speech import THINK, THOUGHT, Speech, TextReader
from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import Hand, NameOf, has_thought, is_alike_by_words, never, render
from segue.turn.values import (
    NO_IDS,
    Grammar,
    Head,
    IdArray,
    Rendered,
    Round,
    Scene,
    id_array,
)
from segue.wire.items import AdditionalTools, Item, Message, Reasoning
from segue.wire.tools import Offer

START, END, END_OF_TEXT = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
CALL, CALLED = "<tool_call>", "</tool_call>"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "chatml1"

# The words of the model families' own templates.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN2_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_BEHIND = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
)
CALL_SHOWN = '{"name": <function-name>, "arguments": <args-json-object>}'
NO_THOUGHT = f"{THINK}\n\n{THOUGHT}\n\n"


@dataclass(frozen=True, slots=True)
class Family:
    """In what ChatML families differ."""

    name: str
    # What the system says where nobody says anything; None: then there is no system block.
    default_system: str | None = None
    # A call as it is shown to the model.
    call_shown: str = CALL_SHOWN
    # Whether the model thinks before it answers, unless its answer begins with an empty thought; and whether it
    # forgets what it thought before the user's last message.
    thinks: bool = False


SMOLLM2 = Family("smollm2", SMOLLM2_SYSTEM)
QWEN2 = Family("qwen2", QWEN2_SYSTEM)
# A slip in the coder models' template, which they were trained on.
QWEN2_CODER = Family("qwen2-coder", QWEN2_SYSTEM, f"{{{CALL_SHOWN}}}")
QWEN3 = Family("qwen3", thinks=True)
# Hermes, and every other model that writes ChatML: no system text of its own.
PLAIN = Family("plain")
FAMILIES = {family.name: family for family in (PLAIN, SMOLLM2, QWEN2, QWEN2_CODER, QWEN3)}


class ChatmlDialect:
    """A `Dialect` for token engines."""

    def __init__(self, vocabulary: Vocabulary, family: Family = SMOLLM2) -> None:
        self._vocabulary = vocabulary
        self._family = family
        self._start = id_array([vocabulary.special(START)])
        self._end = id_array([vocabulary.special(END)])
        self._newline = vocabulary.encode("\n")
        self._seal = self._end + self._newline
        ends = [END, END_OF_TEXT] if vocabulary.has_special(END_OF_TEXT) else [END]
        self._stops = frozenset(vocabulary.special(text) for text in ends)
        self._speech = Speech(vocabulary, self._stops, self._seal, CALL, CALLED)
        self._no_thought = vocabulary.encode(NO_THOUGHT) if family.thinks else NO_IDS
        self._hand = Hand(
            fingerprint=f"{VERSION}-{family.name}-{vocabulary.fingerprint}",
            cue=self._start + vocabulary.encode("assistant\n"),
            begin=self._begin,
            given=self._given,
            wrote=lambda items: self.write(items) + self._newline,
            is_alike=is_alike_by_words,
            turning=_last_question if family.thinks else never,
            kept=self._kept,
            thinks=self._left_thought,
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
        is_thoughtless = schema is not None or scene.effort == "none"
        if self._family.thinks and is_thoughtless and not isinstance(schema, Grammar):
            lead = self._no_thought + lead
        return replace(rendered, lead=lead, schema=schema) if lead or schema else rendered

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample behind the cue to say these items, its end mark included."""
        return self._vocabulary.encode(content_of(parts_of(items))) + self._end

    def reader(self, scene: Scene) -> TextReader | HeldReader:
        """A reader for the answer to this scene, which knows the tools by name."""
        if (held := self._held(scene)) is not None:
            return HeldReader(self._vocabulary, self._stops, held)
        is_forced = scene.can_constrain and bool(forced(scene))
        return TextReader(self._speech, scene, mends=is_forced)

    def _held(self, scene: Scene) -> Held | None:
        """A call that is held to a grammar, if there is to be one. It begins with an empty thought as others do."""
        if (found := held_offer(scene)) is None:
            return None
        offer, grammar = found
        begun = self._vocabulary.encode(f"{CALL}\n{named(offer.qualified_name, 'arguments')}")
        behind = self._vocabulary.encode(f"{UNQUOTE}}}\n{CALLED}")
        return Held(offer, grammar, self._no_thought + begun, behind, self._seal)

    def _lead(self, scene: Scene) -> tuple[IdArray[int], bytes | Grammar | None]:
        """Our words at the beginning of a forced answer, and the schema or grammar of what follows them."""
        if not scene.can_constrain:
            return NO_IDS, None
        if (held := self._held(scene)) is not None:
            return held.lead, held.grammar
        offers = forced(scene)
        if not offers:
            return NO_IDS, format_schema(scene, "arguments")
        if len(offers) > 1:
            return self._vocabulary.encode(f"{CALL}\n"), call_schema(offers, "arguments")
        name = dumps(offers[0].qualified_name)
        begun = f'{CALL}\n{{"name": {name}, "arguments":'
        return self._vocabulary.encode(begun), arguments_schema(offers[0])

    def _begin(
        self, head: Head, items: Sequence[Item], root_at: int, name_of: NameOf
    ) -> IdArray[int]:
        """The first block is the system's: the instructions, or else a system message that leads the chain."""
        system = head.instructions
        first = items[0].value if items else None
        if system is None and isinstance(first, Message) and first.role in ("system", "developer"):
            system, items = text_of(first), items[1:]
        elif system is None:
            system = self._family.default_system
        if head.tools.offers:
            tools = told_tools(head.tools.offers, self._family.call_shown)
            system = tools if system is None else f"{system}\n\n{tools}"
        before = self._block("system", system) if system is not None else NO_IDS
        return before + self._given(items, name_of)

    def _given(self, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
        ids = id_array()
        for role, content in _blocks(items):
            ids.extend(self._block(role, content))
        return ids

    def _block(self, role: str, content: str) -> IdArray[int]:
        return self._start + self._vocabulary.encode(f"{role}\n{content}") + self._seal

    def _left_thought(self, round: Round) -> bool:
        if has_thought(round.wrote) or round.fingerprint != self.fingerprint:
            return has_thought(round.wrote)
        # A warm-up has sampled nothing.
        first = next((ids[0] for ids in (*round.ids, round.tail) if ids), None)
        return first is not None and self._vocabulary.bytes_of(first) == THINK.encode()

    def _kept(self, round: Round, forgotten: int) -> IdArray[int]:
        """What was sampled; where thoughts are forgotten, also without the marks and newlines that they leave."""
        joined = id_array()
        is_gap = forgotten > 0
        for n, (item, ids) in enumerate(zip(round.wrote, round.ids, strict=True)):
            if n < forgotten and isinstance(item.value, Reasoning):
                is_gap = True
                continue
            joined.extend(self._without_gap(ids) if is_gap else ids)
            is_gap = False
        return joined + (self._without_gap(round.tail) if is_gap else round.tail)

    def _without_gap(self, ids: IdArray[int]) -> IdArray[int]:
        """Without an empty thought, its marks included, and without newlines behind a thought."""
        is_inside = False
        for at, id in enumerate(ids):
            text = self._vocabulary.bytes_of(id)
            if text in (THINK.encode(), THOUGHT.encode()):
                is_inside = text == THINK.encode()
            elif not text or text.strip(None if is_inside else b"\n"):
                return ids[at:]
        return NO_IDS


# --- writing: items as text -----------------------------------------------------------------------

ROLES = {
    "think": "assistant", "talk": "assistant", "call": "assistant", "response": "user",
    "tools": "system",
}  # fmt: skip
# What goes on in the same block: a model turn in the order in which the model writes it, and tool outputs.
JOINS = {
    ("think", "think"),
    ("think", "talk"),
    ("think", "call"),
    ("talk", "call"),
    ("call", "call"),
    ("response", "response"),
}


def _blocks(items: Sequence[Item]) -> list[tuple[str, str]]:
    """Role and content of each block."""
    blocks: list[list[Part]] = []
    for item in items:
        for part in _parts(item):
            if blocks and (blocks[-1][-1].kind, part.kind) in JOINS:
                blocks[-1].append(part)
            else:
                blocks.append([part])
    return [(ROLES.get(parts[0].kind, parts[0].kind), content_of(parts)) for parts in blocks]


def _parts(item: Item) -> list[Part]:
    if isinstance(item.value, AdditionalTools):
        added = added_by(item)
        return [Part("tools", told_tools(added))] if added else []
    return parts_of((item,))


def content_of(parts: Sequence[Part]) -> str:
    """The content of one block that says all these parts."""
    content = ""
    glue = ""
    for part in parts:
        content += glue + _written(part)
        glue = "" if part.kind == "think" else "\n"
    return content


def _written(part: Part) -> str:
    match part.kind:
        case "think":
            return f"{THINK}\n{part.text}\n{THOUGHT}\n\n"
        case "call":
            named = f'"name": {dumps(part.name)}, "arguments": {object_or_string(part.text)}'
            return f"{CALL}\n{{{named}}}\n{CALLED}"
        case "response":
            return f"<tool_response>\n{part.text}\n</tool_response>"
        case _:
            return part.text


def told_tools(tools: Iterable[Offer], call_shown: str = CALL_SHOWN) -> str:
    """What the system says about the tools."""
    told = "\n".join(dumps(definition_of(tool)) for tool in tools)
    return f"{TOOLS_BEFORE}{told}{TOOLS_BEHIND}{call_shown}\n{CALLED}"


def _last_question(items: Sequence[Item]) -> int:
    """Up to the last message of the user that is not a tool's output in disguise."""
    for count in range(len(items), 0, -1):
        value = items[count - 1].value
        if isinstance(value, Message) and value.role == "user":
            text = text_of(value)
            if not (text.startswith("<tool_response>") and text.endswith("</tool_response>")):
                return count
    return 0
