"""How does gpt-oss write and read? Harmony: messages with a channel, and tools in namespaces.

A message is `<|start|>`, who speaks, `<|channel|>` and its name, `<|message|>`, the text, `<|end|>`. The model thinks
in the channel `analysis`, calls tools in `commentary` (there the header says `to=functions.name`, and `<|call|>` ends
the message), and answers in `final`, which `<|return|>` ends; in history that is an `<|end|>`. All marks are special
tokens, so that no text can be mistaken for one:

    state      at                                            goes to
    header     text; <|channel|>, <|constrain|>              stays, noting what it says
    header     <|message|>                                   body, and opens a call; text is opened by its first letter
    body       text                                          stays, and says it
    any        <|end|>, <|start|>                            closes what is open, header
    any        <|call|>, <|return|>                          the turn is over

A message to a tool that `tool_choice` forbids is text. Where calls may not be parallel, the first one ends the turn.

The system message says what day it is (the day on which the chain began), how much to think, and which channels there
are; instructions and tools are the developer's message. What was thought before the last final answer is forgotten.
"""

from __future__ import annotations

import re
from array import array
from codecs import getincrementaldecoder
from collections.abc import Sequence
from datetime import UTC, datetime

from msgspec.structs import replace

from segue.dialects.grammar import QUOTE, UNQUOTE, Held, HeldReader, held_offer
from segue.dialects.inputs import InputReader
from segue.dialects.logprobs import Margin
from segue.dialects.offers import (
    added_by,
    arguments_schema,
    forced,
    format_schema,
    may_call,
    offer_in,
    opened_call,
)
from segue.dialects.parts import Part, part_of, text_of
from segue.dialects.typescript import FUNCTIONS, tools_section
from segue.dialects.vocabulary import Vocabulary
from segue.dialects.warm import Hand, NameOf, is_alike_by_words, render
from segue.errors import InvalidRequest
from segue.turn.values import (
    NO_IDS,
    Grammar,
    Head,
    IdArray,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Piece,
    Rendered,
    Round,
    Scene,
    TokenLogprob,
    TurnClosed,
    id_array,
)
from segue.wire.items import (
    AdditionalTools,
    ConfigurationUpdate,
    Item,
    Message,
    Reasoning,
    ReasoningUpdate,
    ToolSearchOutput,
)
from segue.wire.kinds import is_model_written

START, END, MESSAGE, CHANNEL = "<|start|>", "<|end|>", "<|message|>", "<|channel|>"
CONSTRAIN, CALL, RETURN = "<|constrain|>", "<|call|>", "<|return|>"
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "harmony1"

# The words of the family's own library.
SYSTEM = (
    "You are ChatGPT, a large language model trained by OpenAI.\n"
    "Knowledge cutoff: 2024-06\nCurrent date: {day}\n\nReasoning: {effort}\n\n"
    "# Valid channels: analysis, commentary, final. Channel must be included for every message."
)
CALLS = "\nCalls to these tools must go to the commentary channel: 'functions'."
# How much to think, where that is not "medium".
EFFORTS = {
    "none": "low", "minimal": "low", "low": "low", "high": "high", "xhigh": "high", "max": "high",
}  # fmt: skip
RECIPIENT = re.compile(r"\bto=(\S+)")
# Whom the model may speak to without calling anything.
PEOPLE = {"assistant", "user", "all"}


class HarmonyDialect:
    """A `Dialect` for token engines."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._start, self._end, self._message, self._channel, self._constrain, self._call = (
            id_array([vocabulary.special(text)])
            for text in (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL)
        )
        self._stops = frozenset(vocabulary.special(text) for text in (CALL, RETURN))
        self._flows: dict[int, ItemText | None] = {}
        self._hand = Hand(
            fingerprint=f"{VERSION}-{vocabulary.fingerprint}",
            cue=self._start + vocabulary.encode("assistant"),
            begin=self._begin,
            given=self._given,
            wrote=self._wrote,
            is_alike=_is_alike,
            turning=_last_final,
            kept=self._kept,
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
        """The prompt: head, history, what is given now, the cue, and where the answer is forced, its header."""
        rendered = render(self._hand, scene)
        lead, schema = self._lead(scene)
        return replace(rendered, lead=lead, schema=schema) if schema else rendered

    def write(self, items: Sequence[Item]) -> IdArray[int]:
        """What the model would sample behind the cue to say these items, its end mark included."""
        ids = self._wrote(items)
        is_call = ids[-1] == self._call[0]
        return ids[:-1] + (self._call if is_call else id_array([self._vocabulary.special(RETURN)]))

    def reader(self, scene: Scene) -> HarmonyReader | HeldReader:
        """A reader for the answer to this scene, which knows the tools by name."""
        if (held := self._held(scene)) is not None:
            return HeldReader(self._vocabulary, self._stops, held)
        return HarmonyReader(self._vocabulary, self._flows, scene)

    def _held(self, scene: Scene) -> Held | None:
        """A call that is held to a grammar, if there is to be one."""
        if (found := held_offer(scene)) is None:
            return None
        offer, grammar = found
        lead = self._call_header(offer.qualified_name) + self._encode(QUOTE)
        return Held(offer, grammar, lead, self._encode(UNQUOTE), self._call)

    def _lead(self, scene: Scene) -> tuple[IdArray[int], bytes | Grammar | None]:
        """The header of a forced call, or of an answer in JSON."""
        if not scene.can_constrain:
            return NO_IDS, None
        if (held := self._held(scene)) is not None:
            return held.lead, held.grammar
        offers = forced(scene)
        if len(offers) > 1:
            raise InvalidRequest(
                "This model can be made to call one tool by name, but not one of several.",
                code="unsupported_value",
                param="tool_choice",
            )
        if offers:
            return self._call_header(offers[0].qualified_name), arguments_schema(offers[0])
        if scene.offers and scene.head.tool_choice != "none":
            # It may still want to call a tool, and a call is not in this channel: one schema cannot hold both.
            if scene.format is not None:
                raise InvalidRequest(
                    "This model cannot be held to 'text.format' while it may also call tools. Leave one of "
                    "them out, or say 'tool_choice': 'none' for the answer.",
                    code="unsupported_value",
                    param="text.format",
                )
            return NO_IDS, None
        return self._channel_header("final"), format_schema(scene)

    # --- writing ---

    def _begin(
        self, head: Head, items: Sequence[Item], root_at: int, name_of: NameOf
    ) -> IdArray[int]:
        instructions = head.instructions
        first = items[0].value if items else None
        is_led = isinstance(first, Message) and first.role in ("system", "developer")
        if instructions is None and isinstance(first, Message) and is_led:
            instructions, items = text_of(first), items[1:]
        offers = head.tools.offers
        day = datetime.fromtimestamp(root_at, UTC).date().isoformat()
        system = SYSTEM.format(day=day, effort=_effort(head))
        if any(offer.namespace is None for offer in offers):
            system += CALLS
        sections = [] if instructions is None else [_instructions(instructions)]
        sections.extend([tools_section(offers)] if offers else [])
        ids = self._plain("system", system)
        if sections:
            ids.extend(self._plain("developer", "\n\n".join(sections)))
        return ids + self._given(items, name_of)

    def _given(self, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
        ids = id_array()
        finals = _finals(items)
        names: dict[str, str] = {}
        for n, item in enumerate(items):
            if isinstance(item.value, AdditionalTools | ConfigurationUpdate):
                ids.extend(self._told(item))
                continue
            part = part_of(item)
            if part.kind == "call":
                names[part.call_id] = part.name
            name = part.kind == "response" and (names.get(part.call_id) or name_of(part.call_id))
            if isinstance(item.value, ToolSearchOutput):
                name = "tool_search"
                if added := added_by(item):
                    part = part._replace(text=tools_section(added))
            ids.extend(self._part(part, name or "tool", is_final=n in finals))
        return ids

    def _told(self, item: Item) -> IdArray[int]:
        """Tools and settings that come on the way, where they come, so that nothing before them changes."""
        match item.value:
            case ConfigurationUpdate(reasoning=ReasoningUpdate(effort=str() as effort), text=text):
                # As the family has it in its first message.
                told = self._plain("system", f"Reasoning: {EFFORTS.get(effort, 'medium')}")
                return told + self._part(part_of(item), "", is_final=False) if text else told
            case AdditionalTools():
                added = added_by(item)
                return self._plain("developer", tools_section(added)) if added else NO_IDS
            case _:
                return self._part(part_of(item), "", is_final=False)

    def _part(self, part: Part, name: str, *, is_final: bool) -> IdArray[int]:
        """One message; `name` is who was called, where this is the answer."""
        match part.kind:
            case "user":
                return self._plain("user", part.text)
            case "response":
                header = self._channel_header("commentary to=assistant")
                opening = self._start + self._encode(_recipient(name)) + header
                return opening + self._encode(part.text) + self._end
            case "think" if not part.text:
                return NO_IDS
            case "think" | "talk" | "call":
                return self._hand.cue + self._parsed(part, is_final=is_final)
            case _:
                return self._plain("developer", _instructions(part.text))

    def _plain(self, role: str, text: str) -> IdArray[int]:
        opening = self._start + self._encode(role) + self._message
        return opening + self._encode(text) + self._end

    def _wrote(self, items: Sequence[Item]) -> IdArray[int]:
        """A model turn behind the cue, as it stands in history. Only the last call ends as a call, since a reader
        stops there."""
        finals = _finals(items)
        ids = id_array()
        for n, item in enumerate(items):
            part = part_of(item)
            if part.kind in ("think", "talk", "call") and (part.text or part.kind != "think"):
                if ids and ids[-1] == self._call[0]:
                    ids[-1] = self._end[0]
                ids.extend((self._hand.cue if ids else NO_IDS) + self._parsed(part, n in finals))
        return ids or self._end[:]

    def _parsed(self, part: Part, is_final: bool) -> IdArray[int]:
        """What the model says in one message, behind the cue."""
        if part.kind == "call":
            return self._call_header(part.name) + self._encode(part.text) + self._call
        channel = "analysis" if part.kind == "think" else "final" if is_final else "commentary"
        return self._channel_header(channel) + self._encode(part.text) + self._end

    def _call_header(self, name: str) -> IdArray[int]:
        told = self._encode(f"commentary to={_recipient(name)} ")
        return self._channel + told + self._constrain + self._encode("json") + self._message

    def _channel_header(self, channel: str) -> IdArray[int]:
        return self._channel + self._encode(channel) + self._message

    def _encode(self, text: str) -> IdArray[int]:
        return self._vocabulary.encode(text)

    def _kept(self, round: Round, forgotten: int) -> IdArray[int]:
        """What was sampled, less what is forgotten; what is first then needs no `<|start|>` behind the cue."""
        joined = id_array()
        for n, (item, ids) in enumerate(zip(round.wrote, round.ids, strict=True)):
            if n >= forgotten or not isinstance(item.value, Reasoning):
                joined.extend(ids)
        joined.extend(round.tail)
        cue = self._hand.cue
        return joined[len(cue) :] if joined[: len(cue)] == cue else joined


def _instructions(text: str) -> str:
    return f"# Instructions\n\n{text}"


def _recipient(name: str) -> str:
    return name if "." in name else f"{FUNCTIONS}.{name}"


def _effort(head: Head) -> str:
    return EFFORTS.get(head.reasoning.effort or "", "medium")


def _is_alike(one: Head, other: Head) -> bool:
    return _effort(one) == _effort(other) and is_alike_by_words(one, other)


def _finals(items: Sequence[Item]) -> set[int]:
    """Which of these are final answers: what the model says to the user with no call behind it in the same turn."""
    found: set[int] = set()
    is_calling = False
    for n in range(len(items) - 1, -1, -1):
        value = items[n].value
        if isinstance(value, Message) and value.role == "assistant":
            if not is_calling and value.phase != "commentary":
                found.add(n)
        elif is_model_written(value):
            is_calling = is_calling or not isinstance(value, Reasoning)
        else:
            is_calling = False
    return found


def _last_final(items: Sequence[Item]) -> int:
    """Up to the last final answer."""
    return max(_finals(items), default=-1) + 1


# --- reading --------------------------------------------------------------------------------------


class HarmonyReader:
    """A `Reader`: see the table of states at the top."""

    def __init__(
        self, vocabulary: Vocabulary, flows: dict[int, ItemText | None], scene: Scene
    ) -> None:
        """`flows` is shared by all readers: tokens that are whole characters, ready to be said."""
        self._vocabulary = vocabulary
        self._flows = flows
        self._scene = scene
        names = (START, END, MESSAGE, CHANNEL, CONSTRAIN, CALL, RETURN)
        self._marks = {vocabulary.special(name): name for name in names}
        self._decode = getincrementaldecoder("utf-8")("replace")
        # Whether text tokens may pass as they are.
        self._is_flowing = False
        self._parsed: list[Parsed] = []
        # Sampled since the last closed item.
        self._ids = array("I")
        self._is_stopped = False
        # Whether nothing was sampled behind the last `<|end|>`.
        self._is_ended = False
        # The header so far: who speaks, and behind each mark what it says.
        self._header = {"": ""}
        self._section = ""
        # What the body is; None in a header. Text is opened by its first letter.
        self._body: ItemOpened | None = None
        self._is_open = False
        self._input = InputReader()
        # Whether the one call that there may be is whole.
        self.is_over = False
        # Where odds are asked for: those of tokens whose text is not said yet.
        self._margin: Margin | None = None

    def feed(self, piece: Piece) -> list[Parsed]:
        """What has become certain with these ids."""
        assert isinstance(piece, Ids), "this dialect reads tokens"
        parsed = self._parsed = []
        if piece.logprobs or self._margin is not None:
            self._margin = self._margin or Margin(self._vocabulary)
            for id, logprobs in zip(
                piece.ids, piece.logprobs or [None] * len(piece.ids), strict=True
            ):
                self._take(id, logprobs)
            return parsed
        flows = self._flows
        for id in piece.ids:
            if self._is_flowing:
                wrote = flows.get(id)
                if wrote is not None:
                    self._ids.append(id)
                    parsed.append(wrote)
                    continue
            self._take(id)
        return parsed

    def close(self, *, is_cut: bool) -> list[Parsed]:
        """Close the open item, and seal the turn."""
        parsed = self._parsed = []
        is_call = self._body is not None and self._body.is_call
        self._end(is_cut=is_cut and not (self._is_stopped or self.is_over))
        if not self._is_ended:
            self._ids.append(self._id_of(CALL if is_call else END))
        parsed.append(TurnClosed(self._ids))
        return parsed

    def _take(self, id: int, logprobs: TokenLogprob | None = None) -> None:
        if self._is_done():
            return
        mark = self._marks.get(id)
        if mark in (CALL, RETURN):
            self._is_stopped = True
            self._is_flowing = False
            return
        if mark == START or (mark == CHANNEL and self._body is not None):
            # The message before it has no end of its own.
            self._end()
            if self._is_done():
                return
        self._ids.append(id)
        self._is_ended = mark == END
        if mark == END:
            self._end()
        elif self._body is not None:
            self._take_text(id, logprobs)
        elif mark == MESSAGE:
            self._open_body()
        elif mark in (CHANNEL, CONSTRAIN):
            self._section = mark
            self._header[mark] = ""
        else:
            self._header[self._section] += self._decode.decode(self._vocabulary.bytes_of(id))

    def _is_done(self) -> bool:
        return self._is_stopped or self.is_over

    def _take_text(self, id: int, logprobs: TokenLogprob | None) -> None:
        data = self._vocabulary.bytes_of(id)
        if id not in self._flows:
            self._flows[id] = _flow(data)
        text = self._decode.decode(data)
        if self._margin is not None:
            self._margin.take(id, logprobs, len(text))
        self._say(text)
        self._is_flowing = (
            self._is_open
            and self._body is not None
            and self._body.kind != "custom"
            and not self._decode.getstate()[0]
        )

    def _open_body(self) -> None:
        """The header is whole: it says what follows."""
        channel = self._header.get(CHANNEL, "")
        found = RECIPIENT.search(self._header[""]) or RECIPIENT.search(channel)
        name = "" if found is None else found[1].removeprefix(f"{FUNCTIONS}.")
        if (
            found is not None
            and found[1] not in PEOPLE
            and may_call(self._scene, offer_in(self._scene, name))
        ):
            self._body = opened_call(name, offer_in(self._scene, name))
            self._open(self._body)
        else:
            is_thought = channel.split()[:1] == ["analysis"]
            self._body = ItemOpened("reasoning" if is_thought else "message")
            if self._margin is not None:
                self._margin.begin(0)

    def _say(self, text: str) -> None:
        assert self._body is not None
        if not text:
            return
        if not self._is_open:
            self._open(self._body)
        if self._body.kind == "custom":
            if text := self._input.feed(text):
                self._parsed.append(ItemText(text))
        elif self._margin is not None and self._body.kind == "message":
            self._parsed.append(ItemText(text, self._margin.say(len(text))))
        else:
            self._parsed.append(ItemText(text))

    def _open(self, body: ItemOpened) -> None:
        self._is_open = True
        self._parsed.append(body)

    def _end(self, *, is_cut: bool = False) -> None:
        """The message is over, whether it said so or not."""
        rest = "" if is_cut else self._decode.decode(b"", final=True)
        self._decode.reset()
        if self._margin is not None:
            self._margin.add(len(rest))
        stray = "" if CHANNEL in self._header else self._header[""].removeprefix("assistant")
        if self._body is None and stray.strip():
            # No message at all, only text: an untrained model, or a broken prompt. Nobody kept its odds.
            self._body, rest = ItemOpened("message"), stray + rest
        if self._body is not None:
            self._say(rest)
        if self._is_open:
            if text := self._input.close():
                self._parsed.append(ItemText(text))
            self._parsed.append(ItemClosed(self._ids, is_cut))
            self._ids = array("I")
            is_call = self._body is not None and self._body.is_call
            self.is_over = is_call and not self._scene.head.parallel_tool_calls
        self._header, self._section, self._input = {"": ""}, "", InputReader()
        self._body, self._is_open, self._is_flowing = None, False, False

    def _id_of(self, mark: str) -> int:
        return self._vocabulary.special(mark)


def _flow(data: bytes) -> ItemText | None:
    """The token as said, if it is whole characters."""
    try:
        text = data.decode()
    except UnicodeDecodeError:
        return None
    return ItemText(text) if text else None
