"""How do the events of a turn look to a client of this API? Each event in, its own events out.

Theory of operation. A `MessageEvents` writes one turn. Nothing leaves before the model has said something or the first
heartbeat has passed: until then a turn that fails is answered with a status. Then comes `message_start`, and from there
on each heartbeat is a `ping`.

    state    an item begins        text or arguments     the item is done             the turn has ended
    no block  -> block, for a call  -> block             its result, as a whole block  message_delta, message_stop
    block     closed, then so       a delta               -> no block                  closed, then so

One block is open at a time, and the numbers of blocks have no gaps. The items of our own tools may end in another order
than they began: a call is a block that is closed when something else begins, its result a whole block of its own. A
text without a character has no block. A thought ends with its signature, in one piece.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Raw, Struct

from segue.listener.subscribers import SseSubscriber
from segue.messages.answer import (
    DELTA_USAGE,
    Annotation,
    Block,
    Ending,
    OutputItem,
    SealText,
    arguments_of,
    citation,
    ending_of,
    message_of,
    read_item,
    refusal,
    server_call,
    server_result,
    thought_of,
    tool_use,
    usage_of,
)
from segue.messages.errors import error_body
from segue.messages.request import AskedTurn
from segue.turn.running import Running
from segue.wire.codec import encode
from segue.wire.events import Event
from segue.wire.response import NO_USAGE, InputDetails, OutputDetails, Usage

# Blocks of calls: where something else begins before their result is there, they are closed.
PING = b'event: ping\ndata: {"type":"ping"}\n\n'
STOP = b'event: message_stop\ndata: {"type":"message_stop"}\n\n'
# By the type of a delta of the turn: that of ours, and its field.
DELTAS: dict[str, tuple[bytes, bytes]] = {
    "response.output_text.delta": (b"text_delta", b"text"),
    "response.refusal.delta": (b"text_delta", b"text"),
    "response.reasoning_text.delta": (b"thinking_delta", b"thinking"),
    "response.reasoning_summary_text.delta": (b"thinking_delta", b"thinking"),
    "response.function_call_arguments.delta": (b"input_json_delta", b"partial_json"),
    "response.mcp_call_arguments.delta": (b"input_json_delta", b"partial_json"),
}
EMPTY = b'""'
INPUT_BLOCKED = "invalid_prompt"


class _Delta(Struct, frozen=True):
    delta: Raw


class _OfItem(Struct, frozen=True):
    item: Raw


class _Annotated(Struct, frozen=True):
    annotation: Annotation


_read_delta = msgspec.json.Decoder(_Delta).decode
_read_of_item = msgspec.json.Decoder(_OfItem).decode
_read_annotated = msgspec.json.Decoder(_Annotated).decode


class MessageEvents:
    """Writes the events of one turn."""

    # Who reads them, and knows the turn.
    subscriber: SseSubscriber

    def __init__(self, asked: AskedTurn, seal: SealText, request_id: str) -> None:
        self._asked = asked
        self._seal = seal
        self._request_id = request_id
        self._has_started = False
        # Whether the turn itself has said that it runs: the next time it says so is a heartbeat.
        self._has_begun = False
        self._index = 0
        # The item whose block is open or may be opened, and the type of the open block.
        self._item: OutputItem | None = None
        self._open = ""
        # The head of the deltas of the open block.
        self._delta = b""

    @property
    def _running(self) -> Running:
        running = self.subscriber.running
        assert running is not None, "events come from a turn"
        return running

    def write(self, events: Sequence[Event]) -> list[bytes]:
        """These events in the words of this API."""
        written: list[bytes] = []
        for event in events:
            if event.type in DELTAS:
                self._write_delta(event, written)
            elif event.is_terminal:
                self._end(event, written)
            else:
                self._write_other(event, written)
        return written

    def _write_other(self, event: Event, written: list[bytes]) -> None:
        match event.type:
            case "response.in_progress" | "response.queued":
                self._beat(written)
            case "response.output_item.added":
                self._begin(read_item(_read_of_item(event.data).item), written)
            case "response.output_item.done":
                self._finish(read_item(_read_of_item(event.data).item), written)
            case "response.output_text.annotation.added" if self._open == "text":
                found = _read_annotated(event.data).annotation
                delta = {"type": "citations_delta", "citation": citation(found)}
                written.append(self._block_event("content_block_delta", delta=delta))
            case _:
                pass

    # --- the message ---

    def _start(self, written: list[bytes]) -> None:
        if self._has_started:
            return
        self._has_started = True
        response, asked = self._running.response, self._asked
        usage = usage_of(self._usage_so_far(), asked, response.service_tier)
        message = message_of(response, asked, [], None, usage)
        written.append(_event("message_start", message=message))

    def _usage_so_far(self) -> Usage:
        """What is known of the prompt when the model begins to speak; the end says what it was."""
        tally = self._running.tally
        length = tally.tokens_tokenized + tally.tokens_reused
        cached = min(tally.started.cached_tokens or 0, length)
        is_known = tally.started.cached_tokens is not None
        details = InputDetails(cached, length - cached if is_known else 0)
        return Usage(length, details, 1, OutputDetails(), length + 1)

    def _beat(self, written: list[bytes]) -> None:
        if self._has_begun:
            self._start(written)
            written.append(PING)
        self._has_begun = True

    def _end(self, event: Event, written: list[bytes]) -> None:
        running = self._running
        error = running.error
        if error is not None and error.code != INPUT_BLOCKED:
            # Before anything was written it is a status.
            if self._has_started:
                body = error_body(error, self._request_id)
                written.append(b"event: error\ndata: %b\n\n" % body)
            return
        self._start(written)
        self._close(written)
        response, asked = running.response, self._asked
        items = [read_item(raw) for raw in response.output]
        ending = (
            refusal(error.message)
            if error is not None
            else ending_of(response, items, running.tally.stop_string, asked.tokens_max)
        )
        usage = usage_of(response.usage or NO_USAGE, asked, response.service_tier, items)
        written.append(_last_delta(ending, usage, asked))
        written.append(STOP)

    # --- blocks ---

    def _begin(self, item: OutputItem, written: list[bytes]) -> None:
        """Text and thoughts have a block from their first character on, calls at once."""
        self._start(written)
        self._close(written)
        self._item = item
        if item.is_clients_call:
            self._open_block(tool_use(item, {}), written)
        elif (call := server_call(item)) is not None:
            asked = call["input"]
            self._open_block({**call, "input": {}}, written)
            if item.type != "mcp_call" and (text := encode(asked)) != b"{}":
                self._write_json(text.decode(), written)

    def _write_delta(self, event: Event, written: list[bytes]) -> None:
        text = bytes(_read_delta(event.data).delta)
        if text == EMPTY or self._item is None:
            return
        if not self._open:
            self._open_first(written)
        if self._open == "thinking" and self._asked.hides_thinking:
            return
        if not self._delta:
            kind, field = DELTAS[event.type]
            self._delta = (
                b'event: content_block_delta\ndata: {"type":"content_block_delta","index":%d,'
                b'"delta":{"type":"%b","%b":' % (self._index, kind, field)
            )
        written.append(b"%b%b}}\n\n" % (self._delta, text))

    def _open_first(self, written: list[bytes]) -> None:
        assert self._item is not None
        if self._item.type == "reasoning":
            self._open_block({"type": "thinking", "thinking": "", "signature": ""}, written)
        elif self._item.type == "message":
            self._open_block({"type": "text", "text": "", "citations": None}, written)

    def _finish(self, item: OutputItem, written: list[bytes]) -> None:
        is_current = self._item is not None and self._item.id == item.id
        if item.type == "reasoning" and is_current:
            self._finish_thought(item, written)
        if is_current and item.type == "tool_search_call":
            # What is searched for is known when it is whole.
            self._write_json(arguments_of(item), written)
        if is_current:
            self._close(written)
            self._item = None
        for block in server_result(item, self._seal):
            self._close(written)
            self._open_block(block, written)
            self._close(written)

    def _finish_thought(self, item: OutputItem, written: list[bytes]) -> None:
        if not self._open:
            if not thought_of(item) and (item.content or item.summary):
                return
            # The operator hides it: there is the signature alone.
            self._open_first(written)
        signature = {"type": "signature_delta", "signature": item.encrypted_content or ""}
        written.append(self._block_event("content_block_delta", delta=signature))

    def _open_block(self, block: Block, written: list[bytes]) -> None:
        self._open = str(block["type"])
        self._delta = b""
        written.append(self._block_event("content_block_start", content_block=block))

    def _close(self, written: list[bytes]) -> None:
        if self._open:
            written.append(self._block_event("content_block_stop"))
            self._open = ""
            self._delta = b""
            self._index += 1

    def _write_json(self, text: str, written: list[bytes]) -> None:
        delta = {"type": "input_json_delta", "partial_json": text}
        written.append(self._block_event("content_block_delta", delta=delta))

    def _block_event(self, kind: str, **fields: object) -> bytes:
        return _event(kind, index=self._index, **fields)


def _event(kind: str, **fields: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def _last_delta(ending: Ending, usage: Block, asked: AskedTurn) -> bytes:
    delta = {
        "stop_reason": ending.stop_reason,
        "stop_sequence": ending.stop_sequence,
        "stop_details": ending.stop_details,
        "container": None,
    }
    last = {name: usage[name] for name in DELTA_USAGE if name in usage}
    beta: Block = {"context_management": None} if asked.is_beta else {}
    return _event("message_delta", delta=delta, usage=last, **beta)
