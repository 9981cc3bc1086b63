"""The order and the numbers of events: the only place that knows them. Pure.

Theory of operation. An `Assembler` is the writer of one response. What the model wrote goes in, in order; events
come out, numbered from 0 without a gap. It has three states, and every call is legal in exactly one of them:

    state      start()   feed()      heartbeat()   end()      accept()   pend(), fail()
    new        -> open   refused     refused       refused    refused    refused
    open       refused   stays       stays         -> ended   stays      stays
    ended      refused   refused     refused       refused    refused    stays

The last three report on a steer; only their events may follow the terminal event (docs/protocol.md 6.10).

Inside `open` at most one item is open. An item is `added`, then its inner events, then `done`; what is still open at
the end is closed first, as incomplete, so that the terminal event always repeats finished items only
(docs/protocol.md 5.2). A violation here is a bug of ours and raises; the caller turns it into a failed response.

A call that one of our own tools answers is closed by the model and then *pending*: it has its place in the output, and
is done when the tool is. So it is with an item that no model wrote, from `begin` to `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Literal, Unpack, assert_never

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import ApiError, InvalidRequest, ServerFault
from segue.seams.model import ItemClosed, ItemOpened, ItemText, Parsed, TurnClosed
from segue.seams.prompt import NO_IDS, IdArray
from segue.seams.tools import AnyHostedKind
from segue.turn.decide import End
from segue.turn.notices import Steer
from segue.turn.plan import ReasoningView
from segue.wire.calls import CommandPiece, CommandScanner
from segue.wire.codec import DeltaTemplate, as_item, encode, encode_event, snapshot_event
from segue.wire.drafts import REASONING, CommandEvents, Draft, Streamed, TextEvents, Where
from segue.wire.events import (
    AnnotationAdded,
    Compacting,
    Completed,
    ContentPartAdded,
    ContentPartDone,
    Created,
    Done,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Inside,
    Numbered,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    Queued,
    SteerAccepted,
    SteerError,
    SteerFailed,
    SteerPending,
    SteerRef,
    SummaryPartAdded,
    SummaryPartDone,
)
from segue.wire.items import (
    Compaction,
    Item,
    ItemStatus,
    ItemValue,
    Message,
    Reasoning,
    Required,
    SummaryText,
)
from segue.wire.kinds import KINDS, NAMED, AnyItemKind, call_id_of, prefix_of, required_by
from segue.wire.response import Fault, IncompleteDetails, Response, Usage

NewId = Callable[[str], str]
# Makes an opaque text that only we can open, for the same owner.
Seal = Callable[[bytes], str]

# Failures of a response that its caller must mend.
CALLERS_FAULTS = ("context_length_exceeded", "invalid_prompt")
# Where a text may be cut so that it reads as finished: after a sentence or a line.
SENTENCE_ENDS = (".", "!", "?", "\n", ":", "。", "！", "？")


class _OpenItem(Struct):
    """The item that the model is writing."""

    kind: AnyItemKind
    # What a tool of this server does with it, where one does.
    hosted: AnyHostedKind | None
    streamed: Streamed
    draft: Draft
    index: int
    # Finds commands among the arguments as they are written.
    commands: CommandScanner | None
    delta: DeltaTemplate | None = None
    pieces: list[str] = []
    # Of a message, where they were asked for.
    logprobs: list[Raw] = []


class Assembler:
    """Writes the events of one response."""

    def __init__(
        self,
        response: Response,
        new_id: NewId,
        reasoning: ReasoningView = "text",
        seal: Seal | None = None,
        first: int = 0,
    ) -> None:
        # The number of its first event; above 0 another process has sent those before it.
        self.first = first
        # As it stands: final once the turn has ended.
        self.response = response
        # What it was before it was known how it ends.
        self._begun = response
        self._new_id = new_id
        self._reasoning = REASONING[reasoning]
        self._seal = seal
        self._state: Literal["new", "open", "ended"] = "new"
        self.numbers = count(first)
        self._open: _OpenItem | None = None
        self._snapshot = b""
        self._compaction_id = ""
        # The types of items that tools of this server work on, and the places of those that they work on now.
        self._hosted: Mapping[type[ItemValue], AnyHostedKind] = {}
        self._streamed: Mapping[type[ItemValue], Streamed] = {}
        self._pending: dict[str, int] = {}
        # Finds what the text of a whole message cites; set where our own tools have found sources.
        self.cite: Callable[[str], list[Raw]] | None = None
        self.items: list[Item] = []
        # Calls that have their outputs, of our own tools or of a rollout's client.
        self.answered: set[str] = set()
        self.ids: list[IdArray[int]] = []
        self.tail: IdArray[int] = NO_IDS
        # Why the response failed, if it did.
        self.error: ApiError | None = None

    @classmethod
    def over(cls, response: Response, first: int = 0) -> Assembler:
        """The writer of a response that has ended before, or is written by another process."""
        assembler = cls(response, lambda prefix: "", first=first)
        assembler._state = "ended"
        fault = response.error
        if fault is not None:
            kind = InvalidRequest if fault.code in CALLERS_FAULTS else ServerFault
            assembler.error = kind(fault.message, code=fault.code)
        return assembler

    @property
    def visible(self) -> Response:
        """The response as clients may see it: its end is published after it is saved, with the terminal event."""
        return self.response if self._state == "ended" else self._begun

    def start(self) -> list[Event]:
        """The events that every turn begins with; the parent is bound by now. One in the background is queued."""
        assert self._state == "new", self._state
        self._state = "open"
        snapshot = self._snapshot = encode(self.response)
        created = [] if self.first else [snapshot_event(Created, next(self.numbers), snapshot)]
        return [*created, self.heartbeat()]

    def leave_queue(self) -> Event:
        """A turn in the background is queued no more."""
        assert self.response.status == "queued", self.response.status
        self._begun = self.response = msgspec.structs.replace(self.response, status="in_progress")
        self._snapshot = encode(self.response)
        return self.heartbeat()

    @property
    def is_at_boundary(self) -> bool:
        """Whether the model may be stopped here: between items, or in a text after a sentence; never in a call, and
        never after a call that the client must answer, because then it is about to finish anyway."""
        item = self._open
        if item is None:
            return not self._pending and not self.required
        if not self.is_in_text or not item.pieces:
            return False
        return item.pieces[-1].rstrip(" ").endswith(SENTENCE_ENDS)

    @property
    def is_in_text(self) -> bool:
        """Whether the open item is a text, which may be cut where it must be."""
        return self._open is not None and self._open.kind.pairing is None

    @property
    def required(self) -> list[Required]:
        """What the client has to send for the calls of this turn that nothing has answered."""
        return [
            owed
            for item in self.items
            if call_id_of(item.value) not in self.answered
            if (owed := required_by(item.value)) is not None
        ]

    def accept(self, steer: Steer) -> Event:
        """A steer is accepted; it is not applied yet."""
        assert self._state == "open", self._state
        ref = SteerRef(previous_response_id=self.response.id, id=steer.id)
        return self._event(SteerAccepted, steer=ref)

    def pend(self, steer: Steer, required: Sequence[Required]) -> Event:
        """A steer waits for what the client owes."""
        assert self._state == "ended", self._state
        ref = SteerRef(previous_response_id=self.response.id, id=steer.id)
        return self._event(SteerPending, steer=ref, required_input=list(required))

    def fail(self, error: ApiError, given: Raw, steer: Steer | None = None) -> Event:
        """A steer is refused, or one that was accepted could not be applied: its input goes back."""
        ref = SteerRef(
            previous_response_id=self.response.id,
            id=UNSET if steer is None else steer.id,
            input=given,
        )
        return steer_failed(ref, error, next(self.numbers))

    def wait_for(self, required: Sequence[Required]) -> Event:
        """A rollout waits for these outputs of its client; the response goes on."""
        assert self._state == "open", self._state
        return self._event(Done, response_id=self.response.id, required_input=list(required))

    def compact(self) -> list[Event]:
        """A compaction begins; what the model writes for it is not shown."""
        assert self._state == "open", self._state
        self._compaction_id = item_id = self.item_id(Compaction)
        added = self._added_event(Compaction(id=item_id, encrypted_content=""))
        return [added, self._inside(Compacting, item_id, len(self.items))]

    def compacted(self, body: bytes) -> list[Event]:
        """The compaction is done: its content is sealed, so that only this server can read it."""
        assert self._state == "open", self._state
        assert self._seal is not None, "nothing is compacted where nothing can be sealed"
        done = as_item(Compaction(id=self._compaction_id, encrypted_content=self._seal(body)))
        event = self._done_event(done, len(self.items))
        self.items.append(done)
        self.ids.append(NO_IDS)
        return [event]

    def item_id(self, struct: type[ItemValue]) -> str:
        """A new id for an item of this response."""
        return self._new_id(prefix_of(struct))

    def host(
        self,
        kinds: Mapping[type[ItemValue], AnyHostedKind],
        streamed: Mapping[type[ItemValue], Streamed],
    ) -> None:
        """Tools of this server work on these types of items; and so a model writes those of their calls that are not
        written like the client's."""
        self._hosted = kinds
        self._streamed = streamed

    def begin(self, begun: Item) -> list[Event]:
        """One of our own tools begins to work on an item that no model wrote."""
        assert self._state == "open", self._state
        value, index = begun.value, len(self.items)
        hosted, item_id = self._hosted[type(value)], _id_of(value)
        added, arguments = (value, None) if hosted.apart is None else hosted.apart(value)
        events = [self._added_event(added), *self._begun_events(hosted, item_id, index)]
        if arguments is not None:
            draft = Draft(id=item_id, text=arguments)
            events += self._whole_text(KINDS[type(value)], draft, index)
        self._pending[item_id] = index
        self.items.append(begun)
        self.ids.append(NO_IDS)
        return events

    def progress(self, item_id: str, event: type[Inside], fields: Mapping[str, object]) -> Event:
        """What a tool says while it works on this item."""
        assert self._state == "open", self._state
        place = {"item_id": item_id, "output_index": self._pending[item_id]}
        return self._event(event, **place, **fields)

    def finish(self, done: Item) -> list[Event]:
        """The tool is done with this item."""
        assert self._state == "open", self._state
        value = done.value
        item_id = _id_of(value)
        index = self._pending.pop(item_id)
        self.items[index] = done
        ended = self._hosted[type(value)].ended(value)
        events = [] if ended is None else [self._inside(ended, item_id, index)]
        return [*events, self._done_event(done, index)]

    def abandon(self) -> list[Event]:
        """End what is pending: no tool will answer it any more."""
        events: list[Event] = []
        for index in sorted(self._pending.values()):
            value = self.items[index].value
            events += self.finish(as_item(self._hosted[type(value)].stopped(value)))
        return events

    def _begun_events(self, hosted: AnyHostedKind, item_id: str, index: int) -> list[Event]:
        return [self._inside(event, item_id, index) for event in hosted.begun]

    def _event(self, kind: Callable[..., Numbered], **fields: object) -> Event:
        """The next event: of this kind, with these fields."""
        return encode_event(kind(sequence_number=next(self.numbers), **fields))

    def _inside(self, kind: type[Inside], item_id: str, index: int) -> Event:
        return self._event(kind, item_id=item_id, output_index=index)

    def heartbeat(self) -> Event:
        """A sign of life: an ordinary numbered event that every client may ignore."""
        assert self._state == "open", self._state
        kind = Queued if self.response.status == "queued" else InProgress
        return snapshot_event(kind, next(self.numbers), self._snapshot)

    def feed(self, parsed: Sequence[Parsed]) -> list[Event]:
        """The events for what the model wrote."""
        assert self._state == "open", self._state
        events: list[Event] = []
        for fragment in parsed:
            # Nearly all of them: what a match or a call costs would be paid for each token.
            if type(fragment) is ItemText and not fragment.logprobs:
                item, text = self._open, fragment.text
                if item is not None and item.delta is not None and item.commands is None:
                    item.pieces.append(text)
                    events.append(item.delta.event(next(self.numbers), text))
                else:
                    self._write(text, events)
                continue
            match fragment:
                case ItemText():
                    self._write_likely(fragment, events)
                case ItemOpened():
                    self._open_item(fragment, events)
                case ItemClosed():
                    self._close_item(fragment, events)
                case TurnClosed():
                    self.tail = fragment.ids
                case _:
                    assert_never(fragment)
        return events

    def conclude(self, end: End, usage: Usage, now: int) -> Response:
        """The response as it will be saved and sent. Only a failure may leave an item unfinished."""
        assert self._state == "open", self._state
        if self._open is not None and end.status != "failed":
            raise AssertionError("an item is open at the end of a turn")
        self.error = error = end.error
        self.response = msgspec.structs.replace(
            self.response,
            status=end.status,
            completed_at=now if end.status == "completed" else None,
            error=None if error is None else Fault(error.code, error.message, error.param or UNSET),
            incomplete_details=None if end.reason is None else IncompleteDetails(end.reason),
            output=[Raw(item.raw) for item in self.items],
            usage=usage,
        )
        return self.response

    def end(self) -> Event:
        """The terminal event; nothing may follow it."""
        assert self._state == "open", self._state
        self._state = "ended"
        # A cancelled response leaves as incomplete: the contract has no event of its own for it.
        kind = {"completed": Completed, "failed": Failed}.get(self.response.status, Incomplete)
        # Whoever keeps the assembler keeps no copy of it.
        self._snapshot = b""
        return snapshot_event(kind, next(self.numbers), encode(self.response))

    def _open_item(self, opened: ItemOpened, events: list[Event]) -> None:
        if self._open is not None:
            raise AssertionError("an item is opened inside another")
        kind = NAMED[opened.kind]
        hosted = self._hosted.get(kind.struct) if opened.execution == "server" else None
        streamed = self._reasoning if kind.struct is Reasoning else kind.streamed
        if opened.execution == "server":
            streamed = self._streamed.get(kind.struct, streamed)
        assert streamed is not None, f"no model writes a {kind.type}"
        draft = Draft(
            call_id="" if kind.pairing is None else self._new_id("call"),
            id=self._new_id(kind.prefix or ""),
            name=opened.name,
            namespace=opened.namespace,
            is_async=opened.is_async,
            execution=opened.execution,
        )
        commands = CommandScanner() if isinstance(streamed.progress, CommandEvents) else None
        self._open = item = _OpenItem(kind, hosted, streamed, draft, len(self.items), commands)
        if item.streamed.progress == "held":
            return
        events.append(self._added_event(streamed.build(draft)))
        if isinstance(streamed.progress, TextEvents):
            item.delta = _delta(streamed.progress, draft.id, item.index)
            events.extend(self._part_events(streamed.progress, draft, item.index))
        if hosted is not None:
            events.extend(self._begun_events(hosted, draft.id, item.index))

    def _added_event(self, value: ItemValue) -> Event:
        return self._event(OutputItemAdded, output_index=len(self.items), item=Raw(encode(value)))

    def _done_event(self, done: Item, index: int) -> Event:
        return self._event(OutputItemDone, output_index=index, item=Raw(done.raw))

    def _write(self, text: str, events: list[Event]) -> None:
        item = self._open
        if item is None:
            raise AssertionError("text outside of any item")
        item.pieces.append(text)
        if item.commands is not None:
            events.extend(self._command_events(item, item.commands.feed(text)))
        elif item.delta is not None:
            events.append(item.delta.event(next(self.numbers), text))

    def _write_likely(self, wrote: ItemText, events: list[Event]) -> None:
        """Text with how likely its tokens were, which only messages have a place for."""
        item = self._open
        if item is None or item.kind.struct is not Message:
            self._write(wrote.text, events)
            return
        item.pieces.append(wrote.text)
        logprobs = [Raw(encode(logprob)) for logprob in wrote.logprobs]
        item.logprobs.extend(logprobs)
        at = {"item_id": item.draft.id, "output_index": item.index, "content_index": 0}
        events.append(self._event(OutputTextDelta, **at, delta=wrote.text, logprobs=logprobs))

    def _close_item(self, closed: ItemClosed, events: list[Event]) -> None:
        item = self._open
        if item is None:
            raise AssertionError("an item is closed that is not open")
        self._open = None
        text, commands = "".join(item.pieces), []
        if item.commands is not None:
            events.extend(self._command_events(item, item.commands.close(text)))
            commands = item.commands.commands
        is_pending = item.hosted is not None and not closed.is_cut
        status: ItemStatus = "incomplete" if closed.is_cut else "completed"
        draft = msgspec.structs.replace(
            item.draft,
            text=text,
            status="in_progress" if is_pending else status,
            is_added=False,
            commands=commands,
            logprobs=item.logprobs,
        )
        if isinstance(item.streamed.progress, TextEvents):
            draft = self._end_text(item, item.streamed.progress, draft, events)
        if item.streamed.progress == "held":
            added = msgspec.structs.replace(draft, is_added=True, status="in_progress")
            events.append(self._added_event(item.streamed.build(added)))
            if item.hosted is not None and is_pending:
                events.extend(self._begun_events(item.hosted, draft.id, item.index))
        value = item.streamed.build(draft)
        if isinstance(value, Reasoning) and self._seal is not None:
            value = msgspec.structs.replace(value, encrypted_content=self._seal(text.encode()))
        done = as_item(value)
        self.items.append(done)
        self.ids.append(closed.ids)
        if is_pending:
            self._pending[draft.id] = item.index
        else:
            events.append(self._done_event(done, item.index))

    def _end_text(
        self, item: _OpenItem, text: TextEvents, draft: Draft, events: list[Event]
    ) -> Draft:
        """The text is whole; the draft has what it cites."""
        if item.delta is not None and not item.pieces:
            # Strict clients want one delta at least, even for an empty text (docs/protocol.md 5.2 rule 5).
            events.append(item.delta.event(next(self.numbers), ""))
        if self.cite is not None and item.kind.struct is Message:
            draft = msgspec.structs.replace(draft, annotations=self.cite(draft.text))
        for number, annotation in enumerate(draft.annotations):
            at = {"item_id": draft.id, "output_index": item.index, "content_index": 0}
            added = {"annotation_index": number, "annotation": annotation}
            events.append(self._event(AnnotationAdded, **at, **added))
        events.extend(self._text_done(text, draft, item.index))
        return draft

    def _command_events(self, item: _OpenItem, parsed: Sequence[CommandPiece]) -> list[Event]:
        """Commands one by one, by their index and without the id of the item."""
        events: list[Event] = []
        kinds = item.streamed.progress
        assert isinstance(kinds, CommandEvents), "its commands are streamed"
        for what, index, text in parsed:
            place = {"output_index": item.index, "command_index": index}
            match what:
                case "begun":
                    item.delta = DeltaTemplate(str(kinds.delta.__struct_config__.tag), {**place})
                    events.append(self._event(kinds.added, command="", **place))
                case "more":
                    assert item.delta is not None
                    events.append(item.delta.event(next(self.numbers), text))
                case "whole":
                    if item.delta is not None and not text:
                        events.append(item.delta.event(next(self.numbers), ""))
                    item.delta = None
                    events.append(self._event(kinds.done, command=text, **place))
                case _:
                    assert_never(what)
        return events

    def _whole_text(self, kind: AnyItemKind, draft: Draft, index: int) -> list[Event]:
        """A text that no model wrote, in one delta."""
        text = kind.streamed.progress if kind.streamed is not None else None
        assert isinstance(text, TextEvents), f"a {kind.type} has no text"
        delta = _delta(text, draft.id, index).event(next(self.numbers), draft.text)
        return [delta, *self._text_done(text, draft, index)]

    def _text_done(self, text: TextEvents, draft: Draft, index: int) -> list[Event]:
        done = self._event(partial(_done, text, draft), item_id=draft.id, output_index=index)
        return [done, *self._part_events(text, draft, index)]

    def _part_events(self, text: TextEvents, draft: Draft, index: int) -> list[Event]:
        """That the content part around a text is added, or done; some texts have none."""
        if text.part is None:
            return []
        part, at = text.part(draft), {"item_id": draft.id, "output_index": index}
        if isinstance(part, SummaryText):
            in_summary = SummaryPartAdded if draft.is_added else SummaryPartDone
            return [self._event(in_summary, **at, summary_index=0, part=part)]
        in_content = ContentPartAdded if draft.is_added else ContentPartDone
        return [self._event(in_content, **at, content_index=0, part=part)]


def _id_of(value: ItemValue) -> str:
    assert isinstance(value.id, str), "an item of ours has an id"
    return value.id


def _done(text: TextEvents, draft: Draft, **at: Unpack[Where]) -> Numbered:
    return text.done(at, draft)


def _delta(events: TextEvents, item_id: str, index: int) -> DeltaTemplate:
    place: dict[str, str | int | list[Raw]] = {"item_id": item_id, "output_index": index}
    return DeltaTemplate(str(events.delta.__struct_config__.tag), {**place, **events.place})


def steer_failed(ref: SteerRef, error: ApiError, number: int = 0) -> Event:
    """A steer failed; one whose target is unknown belongs to no response and is numbered 0."""
    detail = SteerError(type=error.type, code=error.code, message=error.message)
    return encode_event(SteerFailed(sequence_number=number, steer=ref, error=detail))
