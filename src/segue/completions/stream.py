"""How do the events of a turn look to a client of Chat Completions? Each event in, chunks out. Pure.

Theory of operation. Chunks come in this order, each a line of `data`:

    role          one chunk, before everything else: at the first output, or at the first heartbeat
    deltas        text, thought and calls as they are written; a call begins with its name, its arguments follow
    annotations   one chunk, if the text cites pages
    finish        one chunk with `finish_reason`
    usage         one chunk without choices, if the client asked for it
    [DONE]

Before the first chunk a failure is a status, so nothing is written for `response.created`. Later a failure is an error
in place of all that would follow. A heartbeat is a comment: an empty chunk would be an answer to some clients.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from segue.completions.answer import (
    WrittenItem,
    annotations_of,
    completion_id,
    finish_reason,
    usage_of,
)
from segue.completions.request import AnswerForm
from segue.errors import InvalidRequest, ServerFault
from segue.turn.assemble import CALLERS_FAULTS
from segue.wire.codec import encode, encode_error_body
from segue.wire.events import Event
from segue.wire.response import Fault, IncompleteDetails, Usage

# Around the text of a delta, as `DeltaTemplate` in `wire/codec.py` writes it: in a text both would be escaped.
DELTA, NUMBER = b',"delta":', b',"sequence_number":'
# A delta without text.
NOTHING = b'""'
PING = b": ping\n\n"
CANCELLED = Fault("server_error", "The response was cancelled.")
DONE = b"data: [DONE]\n\n"
# Where a delta of a text goes.
TEXT_DELTAS = {
    "response.output_text.delta": b"content",
    "response.refusal.delta": b"refusal",
    "response.reasoning_text.delta": b"reasoning_content",
    "response.reasoning_summary_text.delta": b"reasoning_content",
}
CALL_DELTAS = {
    "response.function_call_arguments.delta": b'"function":{"arguments":',
    "response.custom_tool_call_input.delta": b'"custom":{"input":',
}


class DeltaRead(Struct, frozen=True):
    """What is read of a delta."""

    delta: Raw
    output_index: int
    logprobs: list[Raw] = []


class ItemRead(Struct, frozen=True):
    """What is read when an item begins."""

    output_index: int
    item: WrittenItem


class StartRead(Struct, frozen=True):
    """What is read of a response that begins."""

    id: str
    created_at: int
    model: str
    service_tier: str


class EndRead(Struct, frozen=True):
    """What is read of a response that has ended."""

    status: str
    output: list[WrittenItem]
    incomplete_details: IncompleteDetails | None = None
    usage: Usage | None = None
    error: Fault | None = None


class Started(Struct, frozen=True):
    response: StartRead


class Ended(Struct, frozen=True):
    response: EndRead


_read_delta = msgspec.json.Decoder(DeltaRead).decode
_read_item = msgspec.json.Decoder(ItemRead).decode
_read_start = msgspec.json.Decoder(Started).decode
_read_end = msgspec.json.Decoder(Ended).decode


class ChunkWriter:
    """Writes the chunks of one turn."""

    def __init__(self, form: AnswerForm) -> None:
        self._wants_usage = form.wants_usage
        self._is_old = form.is_old
        self._head = self._tail = self._text_tail = b""
        # What a chunk begins with, by the event whose text it has.
        self._text_heads: dict[str, bytes] = {}
        self._beats = 0
        self._has_begun = False
        # The places of calls in the list of calls, by their places in the output.
        self._calls: dict[int, int] = {}

    def write(self, events: Sequence[Event]) -> list[bytes]:
        """The chunks for these events."""
        chunks: list[bytes] = []
        for event in events:
            kind = event.type
            if (head := self._text_heads.get(kind)) is not None:
                # Nearly all of them, and nearly all in this form: what decoding costs would be paid for each token.
                data = event.data
                begin, end = data.find(DELTA) + len(DELTA), data.rfind(NUMBER)
                if begin < end - len(NOTHING):
                    chunks.append(b"".join((head, data[begin:end], self._text_tail)))
                else:
                    chunks += self._text_chunks(head, data)
            elif (opening := CALL_DELTAS.get(kind)) is not None:
                chunks += self._call_chunks(opening, event.data)
            elif kind == "response.output_item.added":
                self._begin(chunks)
                chunks += self._item_chunks(event.data)
            elif kind == "response.created":
                self._read_head(event.data)
            elif kind == "response.in_progress":
                self._beats += 1
                # The first one only says that the turn has begun.
                if self._beats > 1:
                    self._begin(chunks)
                    chunks.append(PING)
            elif event.is_terminal:
                chunks += self._last_chunks(event)
        return chunks

    def _read_head(self, data: bytes) -> None:
        """What all chunks begin and end with."""
        response = _read_start(data).response
        head = {
            "id": completion_id(response.id),
            "object": "chat.completion.chunk",
            "created": response.created_at,
            "model": response.model,
            "service_tier": response.service_tier,
        }
        self._head = b"data: " + encode(head)[:-1] + b',"choices":['
        self._tail = b"]" + b',"usage":null' * self._wants_usage + b"}\n\n"
        self._text_heads = {
            kind: b'%b{"index":0,"delta":{"%b":' % (self._head, name)
            for kind, name in TEXT_DELTAS.items()
        }
        self._text_tail = b'},"logprobs":null,"finish_reason":null}' + self._tail

    def _chunk(self, delta: bytes, logprobs: bytes = b"null", finish: bytes = b"null") -> bytes:
        return b'%b{"index":0,"delta":{%b},"logprobs":%b,"finish_reason":%b}%b' % (
            self._head,
            delta,
            logprobs,
            finish,
            self._tail,
        )

    def _begin(self, chunks: list[bytes]) -> None:
        if not self._has_begun:
            self._has_begun = True
            chunks.append(self._chunk(b'"role":"assistant","content":""'))

    def _text_chunks(self, head: bytes, data: bytes) -> list[bytes]:
        """A delta with how likely its tokens were, or without text."""
        read = _read_delta(data)
        text = bytes(read.delta)
        if read.logprobs:
            likely = encode({"content": read.logprobs, "refusal": None})
            return [
                b'%b%b},"logprobs":%b,"finish_reason":null}%b' % (head, text, likely, self._tail)
            ]
        return [] if text == NOTHING else [b"".join((head, text, self._text_tail))]

    def _item_chunks(self, data: bytes) -> list[bytes]:
        """A call begins with its id and its name, which come once."""
        read = _read_item(data)
        call = read.item.call
        if call is None:
            return []
        self._calls[read.output_index] = index = len(self._calls)
        if self._is_old:
            return [self._chunk(b'"function_call":' + encode(call.function))] if not index else []
        opening = encode({"index": index, **msgspec.to_builtins(call)})
        return [self._chunk(b'"tool_calls":[%b]' % opening)]

    def _call_chunks(self, opening: bytes, data: bytes) -> list[bytes]:
        read = _read_delta(data)
        index, text = self._calls.get(read.output_index), bytes(read.delta)
        if index is None or text == NOTHING:
            return []
        if self._is_old:
            delta = b'"function_call":{"arguments":%b}' % text
            return [self._chunk(delta)] if not index else []
        return [self._chunk(b'"tool_calls":[{"index":%d,%b%b}}]' % (index, opening, text))]

    def _last_chunks(self, event: Event) -> list[bytes]:
        response = _read_end(event.data).response
        if response.status not in ("completed", "incomplete"):
            return self._error_chunks(response.error or CANCELLED)
        chunks: list[bytes] = []
        self._begin(chunks)
        messages = (item for item in response.output if item.type == "message")
        parts = [part for item in messages for part in item.content or ()]
        if annotations := annotations_of(parts):
            chunks.append(self._chunk(b'"annotations":' + encode(annotations)))
        reason = finish_reason(
            response.incomplete_details, has_calls=bool(self._calls), is_old=self._is_old
        )
        chunks.append(self._chunk(b"", finish=encode(reason)))
        if self._wants_usage and response.usage is not None:
            usage = encode(usage_of(response.usage))
            chunks.append(b'%b],"usage":%b}\n\n' % (self._head, usage))
        return [*chunks, DONE]

    def _error_chunks(self, fault: Fault) -> list[bytes]:
        """Nothing, if nothing was written yet: then the failure is a status."""
        if not self._has_begun:
            return []
        kind = InvalidRequest if fault.code in CALLERS_FAULTS else ServerFault
        return [b"data: %b\n\n" % encode_error_body(kind(fault.message, code=fault.code))]
