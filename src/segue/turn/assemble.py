"""The order and the numbers of events: the only place that knows them. Pure.

Theory of operation. An `Assembler` is the writer of one response. What the model said goes in, in order; events
come out, numbered from 0 without a gap. It has three states, and every call is legal in exactly one of them:

    state      start()   feed()      heartbeat()   end()      accept()   pend(), fail()
    new        -> open   refused     refused       refused    refused    refused
    open       refused   stays       stays         -> ended   stays      stays
    ended      refused   refused     refused       refused    refused    stays

The last three tell what becomes of a steer; of them alone some may follow the terminal event (docs/protocol.md 6.10).

Inside `open` at most one item is open. An item is `added`, then its inner events, then `done`; what is still open at
the end is closed first, as incomplete, so that the terminal event always repeats finished items only
(docs/protocol.md 5.2). A violation here is a bug of ours and raises; the caller turns it into a failed response.

A call that one of our own tools answers is closed by the model and then *pending*: it has its place in the output, and
is done when the tool is. So it is with an item that no model wrote, from `begin` to `finish`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, assert_never

import msgspec
from msgspec import UNSET, Raw

from segue.errors import ApiError, InvalidRequest, ServerFault
from segue.tools.cite import cite
from segue.turn.decide import End
from segue.turn.open_item import PREFIX, OpenItem, last_commands, part_of, value_of
from segue.turn.plan import ReasoningView
from segue.turn.values import (
    NO_IDS,
    IdArray,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    Source,
    Steer,
    TurnClosed,
)
from segue.wire.calls import (
    CommandSaid,
)
from segue.wire.codec import DeltaTemplate, as_item, encode, encode_event, encode_response
from segue.wire.events import (
    AnnotationAdded,
    ArgumentsDone,
    Compacting,
    Completed,
    ContentPart,
    ContentPartAdded,
    ContentPartDone,
    Created,
    CustomInputDone,
    Done,
    Event,
    Failed,
    Incomplete,
    InProgress,
    Inside,
    McpArgumentsDone,
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListCompleted,
    McpListFailed,
    McpListInProgress,
    OutputItemAdded,
    OutputItemDone,
    OutputTextDelta,
    OutputTextDone,
    Queued,
    ReasoningTextDone,
    ShellCommandAdded,
    ShellCommandDone,
    SteerAccepted,
    SteerError,
    SteerFailed,
    SteerPending,
    SteerRef,
    SummaryPartAdded,
    SummaryPartDone,
    SummaryTextDone,
    WebSearchCompleted,
    WebSearchInProgress,
    WebSearchSearching,
)
from segue.wire.items import (
    Compaction,
    Item,
    McpCall,
    McpListTools,
    Reasoning,
    Required,
    Status,
    SummaryText,
    Value,
    WebSearchCall,
    required_by,
)
from segue.wire.response import Fault, IncompleteDetails, Response, Usage

NewId = Callable[[str], str]
# Makes an opaque text that only we can open, for the same owner.
Seal = Callable[[bytes], str]

# Failures of a response that its caller must mend.
CALLERS_FAULTS = ("context_length_exceeded", "invalid_prompt")
# Where a text may be cut so that it reads as finished: behind a sentence or a line.
SENTENCE_ENDS = (".", "!", "?", "\n", ":", "。", "！", "？")

# Calls whose fields are known only when their arguments are whole: they are added when they are done.
HELD = ("local_shell", "apply_patch", "mcp_approval", "web_search")
# Calls that are done when one of our own tools has answered.
HOSTED = ("mcp", "web_search")
# What is said when one of our own tools goes to work.
BEGUN: dict[type[Value], tuple[type[Inside], ...]] = {
    McpCall: (McpCallInProgress,),
    McpListTools: (McpListInProgress,),
    WebSearchCall: (WebSearchInProgress, WebSearchSearching),
}
STOPPED = Raw(b'"The response ended before the server had answered."')

DELTA_EVENT = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function": "response.function_call_arguments.delta",
    "custom": "response.custom_tool_call_input.delta",
    "mcp": "response.mcp_call_arguments.delta",
}


class Assembler:
    """Writes the events of one response."""

    def __init__(
        self,
        response: Response,
        new_id: NewId,
        reasoning: ReasoningView = "text",
        seal: Seal | None = None,
    ) -> None:
        self._response = response
        # What it was before it was known how it ends.
        self._begun = response
        self._new_id = new_id
        self._reasoning = reasoning
        self._seal = seal
        self._state: Literal["new", "open", "ended"] = "new"
        self._number = 0
        self._open: OpenItem | None = None
        self._snapshot = Raw(b"")
        self._compaction_id = ""
        # Where the items stand that our own tools are at work on.
        self._pending: dict[str, int] = {}
        # What our own tools have found, in the order in which the model was told of it: messages may cite it.
        self.sources: list[Source] = []
        self.items: list[Item] = []
        self.ids: list[IdArray[int]] = []
        self.tail: IdArray[int] = NO_IDS
        # Why the response failed, if it did.
        self.error: ApiError | None = None

    @classmethod
    def over(cls, response: Response) -> Assembler:
        """The writer of a response that has ended before."""
        assembler = cls(response, lambda prefix: "")
        assembler._state = "ended"
        fault = response.error
        if fault is not None:
            kind = InvalidRequest if fault.code in CALLERS_FAULTS else ServerFault
            assembler.error = kind(fault.message, code=fault.code)
        return assembler

    @property
    def response(self) -> Response:
        """The response as it stands: final once the turn has ended."""
        return self._response

    @property
    def visible(self) -> Response:
        """The response as anybody may hear of it: how it ends is told after it is saved, with the terminal event."""
        return self._response if self._state == "ended" else self._begun

    def start(self) -> list[Event]:
        """The events that every turn begins with; the parent is bound by now. One in the background is queued first."""
        self._require("new")
        self._state = "open"
        first = encode_response(self._response)
        events = [encode_event(Created(sequence_number=self._next(), response=first))]
        if self._response.status == "queued":
            events.append(encode_event(Queued(sequence_number=self._next(), response=first)))
            self._response = msgspec.structs.replace(self._response, status="in_progress")
        self._begun = self._response
        self._snapshot = encode_response(self._response)
        events.append(
            encode_event(InProgress(sequence_number=self._next(), response=self._snapshot))
        )
        return events

    @property
    def is_at_boundary(self) -> bool:
        """Whether the model may be stopped here: between items, or in a text behind a sentence; never in a call, and
        never behind one that the client must answer, because then it is about to finish anyway."""
        item = self._open
        if item is None:
            return not self._pending and not any(required_by(one.value) for one in self.items)
        if not self.is_in_text or not item.pieces:
            return False
        return item.pieces[-1].rstrip(" ").endswith(SENTENCE_ENDS)

    @property
    def is_in_text(self) -> bool:
        """Whether the open item is a text, which may be cut where it must be."""
        return self._open is not None and self._open.opened.kind in ("message", "reasoning")

    def accept(self, steer: Steer) -> Event:
        """A steer is ours now; it is not applied yet."""
        self._require("open")
        ref = SteerRef(previous_response_id=self._response.id, id=steer.id)
        return encode_event(SteerAccepted(sequence_number=self._next(), steer=ref))

    def pend(self, steer: Steer, required: Sequence[Required]) -> Event:
        """A steer waits for what the client owes."""
        self._require("ended")
        ref = SteerRef(previous_response_id=self._response.id, id=steer.id)
        return encode_event(
            SteerPending(sequence_number=self._next(), steer=ref, required_input=list(required))
        )

    def fail(self, error: ApiError, given: Raw, steer: Steer | None = None) -> Event:
        """A steer is refused, or one that was accepted could not be applied: its input goes back."""
        ref = SteerRef(
            previous_response_id=self._response.id,
            id=UNSET if steer is None else steer.id,
            input=given,
        )
        return steer_failed(ref, error, self._next())

    def wait_for(self, required: Sequence[Required]) -> Event:
        """A rollout stops for its client: these are owed, and nothing is over."""
        self._require("open")
        return encode_event(
            Done(
                sequence_number=self._next(),
                response_id=self._response.id,
                required_input=list(required),
            )
        )

    def compact(self) -> list[Event]:
        """A compaction begins; what the model writes for it is not shown."""
        self._require("open")
        item_id, index = self._new_id("cmp"), len(self.items)
        self._compaction_id = item_id
        added = as_item(Compaction(id=item_id, encrypted_content=""))
        return [
            encode_event(
                OutputItemAdded(
                    sequence_number=self._next(), output_index=index, item=Raw(added.raw)
                )
            ),
            encode_event(
                Compacting(sequence_number=self._next(), item_id=item_id, output_index=index)
            ),
        ]

    def compacted(self, body: bytes) -> list[Event]:
        """The compaction is done: this is what it holds, and nobody but us is to read it."""
        self._require("open")
        assert self._seal is not None, "nothing is compacted where nothing can be sealed"
        done = as_item(Compaction(id=self._compaction_id, encrypted_content=self._seal(body)))
        event = OutputItemDone(
            sequence_number=self._next(), output_index=len(self.items), item=Raw(done.raw)
        )
        self.items.append(done)
        self.ids.append(NO_IDS)
        return [encode_event(event)]

    def name(self, prefix: str) -> str:
        """A new id for an item of this response."""
        return self._new_id(prefix)

    def begin(self, begun: Item) -> list[Event]:
        """One of our own tools goes to work on an item that no model wrote."""
        self._require("open")
        value, index = begun.value, len(self.items)
        item_id = value.id
        assert isinstance(item_id, str), "an item of ours has an id"
        if isinstance(value, McpCall):
            events = [self._added_event(msgspec.structs.replace(value, arguments=""))]
            events += self._begun_events(value, item_id, index)
            place: dict[str, str | int | list[Raw]] = {"item_id": item_id, "output_index": index}
            delta = DeltaTemplate(DELTA_EVENT["mcp"], place)
            events.append(delta.event(self._next(), value.arguments))
            events.append(self._arguments_done(item_id, index, value.arguments))
        else:
            events = [self._added_event(value), *self._begun_events(value, item_id, index)]
        self._pending[item_id] = index
        self.items.append(begun)
        self.ids.append(NO_IDS)
        return events

    def finish(self, done: Item) -> list[Event]:
        """The tool is done with this item."""
        self._require("open")
        value = done.value
        assert isinstance(value.id, str), "an item of ours has an id"
        index = self._pending.pop(value.id)
        self.items[index] = done
        events = self._ended_events(value, value.id, index)
        last = OutputItemDone(sequence_number=self._next(), output_index=index, item=Raw(done.raw))
        return [*events, encode_event(last)]

    def abandon(self) -> list[Event]:
        """Nobody waits any longer for what is pending."""
        events: list[Event] = []
        for index in sorted(self._pending.values()):
            value = self.items[index].value
            if isinstance(value, McpListTools):
                value = msgspec.structs.replace(value, error=STOPPED)
            else:
                value = msgspec.structs.replace(value, status="incomplete")
            events += self.finish(as_item(value))
        return events

    def _begun_events(self, value: Value, item_id: str, index: int) -> list[Event]:
        return [self._inside(kind, item_id, index) for kind in BEGUN.get(type(value), ())]

    def _ended_events(self, value: Value, item_id: str, index: int) -> list[Event]:
        match value:
            case McpCall(status="completed"):
                return [self._inside(McpCallCompleted, item_id, index)]
            case McpCall():
                return [self._inside(McpCallFailed, item_id, index)]
            case McpListTools(error=Raw()):
                return [self._inside(McpListFailed, item_id, index)]
            case McpListTools():
                return [self._inside(McpListCompleted, item_id, index)]
            case WebSearchCall():
                return [self._inside(WebSearchCompleted, item_id, index)]
            case _:
                return []

    def _inside(self, kind: type[Inside], item_id: str, index: int) -> Event:
        return encode_event(kind(sequence_number=self._next(), item_id=item_id, output_index=index))

    def heartbeat(self) -> Event:
        """A sign of life: an ordinary numbered event that every client may ignore."""
        self._require("open")
        return encode_event(InProgress(sequence_number=self._next(), response=self._snapshot))

    def feed(self, parsed: Sequence[Parsed]) -> list[Event]:
        """The events for what the model has said."""
        self._require("open")
        events: list[Event] = []
        for one in parsed:
            match one:
                case ItemText(logprobs=()):
                    self._write(one.text, events)
                case ItemText():
                    self._write_likely(one, events)
                case ItemOpened():
                    self._open_item(one, events)
                case ItemClosed():
                    self._close_item(one, events)
                case TurnClosed():
                    self.tail = one.ids
                case _:
                    assert_never(one)
        return events

    def conclude(self, end: End, usage: Usage, now: int) -> Response:
        """The response as it will be told and saved. Only a failure may leave an item unfinished behind."""
        self._require("open")
        if self._open is not None and end.status != "failed":
            raise AssertionError("an item is open at the end of a turn")
        self.error = error = end.error
        self._response = msgspec.structs.replace(
            self._response,
            status=end.status,
            completed_at=now if end.status == "completed" else None,
            error=None if error is None else Fault(error.code, error.message, error.param or UNSET),
            incomplete_details=None if end.reason is None else IncompleteDetails(end.reason),
            output=[Raw(item.raw) for item in self.items],
            usage=usage,
        )
        return self._response

    def end(self) -> Event:
        """The terminal event; nothing may follow it."""
        self._require("open")
        self._state = "ended"
        kind = {"completed": Completed, "failed": Failed}.get(self._response.status, Incomplete)
        snapshot = encode_response(self._response)
        return encode_event(kind(sequence_number=self._next(), response=snapshot))

    def _require(self, state: str) -> None:
        if self._state != state:
            raise AssertionError(f"the response is {self._state}, not {state}")

    def _next(self) -> int:
        number = self._number
        self._number = number + 1
        return number

    def _open_item(self, opened: ItemOpened, events: list[Event]) -> None:
        if self._open is not None:
            raise AssertionError("an item is opened inside another")
        is_ours = opened.execution == "server"
        call_id = self._new_id("call") if opened.is_call and not is_ours else ""
        item = OpenItem(opened, self._new_id(PREFIX[opened.kind]), call_id, len(self.items))
        self._open = item
        if opened.kind in HELD:
            return
        added = value_of(item, "", "in_progress", self._reasoning, is_added=True)
        events.append(self._added_event(added))
        if (part := part_of(item, "", self._reasoning)) is not None:
            events.append(self._part_event(item, part, is_done=False))
        if opened.kind in HOSTED:
            events.extend(self._begun_events(added, item.id, item.index))
        item.delta = self._template(item)

    def _added_event(self, value: Value) -> Event:
        return encode_event(
            OutputItemAdded(
                sequence_number=self._next(),
                output_index=len(self.items),
                item=Raw(as_item(value).raw),
            )
        )

    def _write(self, text: str, events: list[Event]) -> None:
        item = self._open
        if item is None:
            raise AssertionError("text outside of any item")
        item.pieces.append(text)
        if item.commands is not None:
            events.extend(self._command_events(item, item.commands.feed(text)))
        elif item.delta is not None:
            number = self._number
            self._number = number + 1
            events.append(item.delta.event(number, text))

    def _write_likely(self, wrote: ItemText, events: list[Event]) -> None:
        """Text with how likely its tokens were, which only messages have a place for."""
        item = self._open
        if item is None or item.opened.kind != "message":
            self._write(wrote.text, events)
            return
        item.pieces.append(wrote.text)
        logprobs = [Raw(encode(one)) for one in wrote.logprobs]
        item.logprobs.extend(logprobs)
        events.append(
            encode_event(
                OutputTextDelta(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=item.index,
                    content_index=0,
                    delta=wrote.text,
                    logprobs=logprobs,
                )
            )
        )

    def _close_item(self, closed: ItemClosed, events: list[Event]) -> None:
        item = self._open
        if item is None:
            raise AssertionError("an item is closed that is not open")
        self._open = None
        text = "".join(item.pieces)
        if item.commands is not None:
            events.extend(self._command_events(item, last_commands(item.commands, text)))
        if item.delta is not None:
            if not item.pieces:
                # Strict clients want one delta at least, even for an empty text (docs/protocol.md 5.2 rule 5).
                events.append(item.delta.event(self._next(), ""))
            events.extend(self._cite(item, text))
            events.append(self._done_event(item, text))
        if (part := part_of(item, text, self._reasoning)) is not None:
            events.append(self._part_event(item, part, is_done=True))
        is_pending = item.opened.kind in HOSTED and not closed.is_cut
        status: Status = "incomplete" if closed.is_cut else "completed"
        status = "in_progress" if is_pending else status
        if item.opened.kind in HELD:
            added = value_of(item, text, "in_progress", self._reasoning, is_added=True)
            events.append(self._added_event(added))
            if is_pending:
                events.extend(self._begun_events(added, item.id, item.index))
        value = value_of(item, text, status, self._reasoning)
        if isinstance(value, Reasoning) and self._seal is not None:
            value = msgspec.structs.replace(value, encrypted_content=self._seal(text.encode()))
        done = as_item(value)
        self.items.append(done)
        self.ids.append(closed.ids)
        if is_pending:
            self._pending[item.id] = item.index
            return
        events.append(
            encode_event(
                OutputItemDone(
                    sequence_number=self._next(), output_index=item.index, item=Raw(done.raw)
                )
            )
        )

    def _cite(self, item: OpenItem, text: str) -> list[Event]:
        """What a message that is whole cites of the sources that were found."""
        if item.opened.kind != "message":
            return []
        item.annotations = [Raw(encode(one)) for one in cite(text, self.sources)]
        return [
            encode_event(
                AnnotationAdded(
                    sequence_number=self._next(),
                    item_id=item.id,
                    output_index=item.index,
                    content_index=0,
                    annotation_index=index,
                    annotation=annotation,
                )
            )
            for index, annotation in enumerate(item.annotations)
        ]

    def _template(self, item: OpenItem) -> DeltaTemplate | None:
        kind = item.opened.kind
        place: dict[str, str | int | list[Raw]] = {
            "item_id": item.id,
            "output_index": item.index,
        }
        match kind:
            case "message":
                place |= {"content_index": 0, "logprobs": []}
            case "reasoning" if self._reasoning == "hidden":
                return None
            case "reasoning" if self._reasoning == "summary":
                return DeltaTemplate(
                    "response.reasoning_summary_text.delta", place | {"summary_index": 0}
                )
            case "reasoning":
                place |= {"content_index": 0}
            case "function" | "custom" | "mcp":
                pass
            case _:
                return None
        return DeltaTemplate(DELTA_EVENT[kind], place)

    def _command_events(self, item: OpenItem, parsed: Sequence[CommandSaid]) -> list[Event]:
        """A shell call tells its commands one by one, by their index and without the id of the item."""
        events: list[Event] = []
        for what, index, text in parsed:
            place = {"output_index": item.index, "command_index": index}
            match what:
                case "begun":
                    item.delta = DeltaTemplate("response.shell_call_command.delta", {**place})
                    begun = ShellCommandAdded(sequence_number=self._next(), command="", **place)
                    events.append(encode_event(begun))
                case "more":
                    assert item.delta is not None
                    events.append(item.delta.event(self._next(), text))
                case "whole":
                    if item.delta is not None and not text:
                        events.append(item.delta.event(self._next(), ""))
                    item.delta = None
                    done = ShellCommandDone(sequence_number=self._next(), command=text, **place)
                    events.append(encode_event(done))
                case _:
                    assert_never(what)
        return events

    def _part_event(
        self, item: OpenItem, part: ContentPart | SummaryText, *, is_done: bool
    ) -> Event:
        number = self._next()
        if isinstance(part, SummaryText):
            in_summary = SummaryPartDone if is_done else SummaryPartAdded
            return encode_event(
                in_summary(
                    sequence_number=number,
                    item_id=item.id,
                    output_index=item.index,
                    summary_index=0,
                    part=part,
                )
            )
        in_content = ContentPartDone if is_done else ContentPartAdded
        return encode_event(
            in_content(
                sequence_number=number,
                item_id=item.id,
                output_index=item.index,
                content_index=0,
                part=part,
            )
        )

    def _done_event(self, item: OpenItem, text: str) -> Event:
        number, index = self._next(), item.index
        match item.opened.kind:
            case "message":
                return encode_event(
                    OutputTextDone(
                        sequence_number=number,
                        item_id=item.id,
                        output_index=index,
                        content_index=0,
                        text=text,
                        logprobs=item.logprobs,
                    )
                )
            case "reasoning" if self._reasoning == "summary":
                return encode_event(
                    SummaryTextDone(
                        sequence_number=number,
                        item_id=item.id,
                        output_index=index,
                        summary_index=0,
                        text=text,
                    )
                )
            case "reasoning":
                return encode_event(
                    ReasoningTextDone(
                        sequence_number=number,
                        item_id=item.id,
                        output_index=index,
                        content_index=0,
                        text=text,
                    )
                )
            case "function":
                return encode_event(
                    ArgumentsDone(
                        sequence_number=number, item_id=item.id, output_index=index, arguments=text
                    )
                )
            case "custom":
                return encode_event(
                    CustomInputDone(
                        sequence_number=number, item_id=item.id, output_index=index, input=text
                    )
                )
            case "mcp":
                return self._arguments_done(item.id, index, text, number)
            case kind:
                raise AssertionError(f"a call of kind {kind} has no text of its own")

    def _arguments_done(
        self, item_id: str, index: int, arguments: str, number: int | None = None
    ) -> Event:
        return encode_event(
            McpArgumentsDone(
                sequence_number=self._next() if number is None else number,
                item_id=item_id,
                output_index=index,
                arguments=arguments,
            )
        )


def steer_failed(ref: SteerRef, error: ApiError, number: int = 0) -> Event:
    """A steer failed; one whose target is unknown belongs to no response and is numbered 0."""
    told = SteerError(type=error.type, code=error.code, message=error.message)
    return encode_event(SteerFailed(sequence_number=number, steer=ref, error=told))
