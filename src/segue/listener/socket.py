"""How do the bytes of one WebSocket connection arrive and leave, and how did it end?

In come the upgrade request and the frames of a peer, from uvicorn's `ws=` hook; out go whole text
messages to a `SocketListener`, and the listener's messages as frames: the first of a millisecond
at once, what follows it joined into one write a tick.
It never parses a message, never logs one, and never holds more than its limits.

The parser, the handshake and the answers to control frames are those of websockets' sans-I/O
`ServerProtocol`; large frames come in pieces. Outgoing text is framed here: that is the hot path.
docs/decisions/0002 says why.

    state     entered by             what comes in                 left by
    NEW       uvicorn's upgrade      the upgrade request           101: OPEN; a refusal: ENDED
                                     nothing during the decision
    OPEN      101                    messages go to the listener   `close`: CLOSING; otherwise ENDED
    CLOSING   `close`                only a close frame counts     close frame, loss, close_s_max
    ENDED     `closed` was called    dropped unread                the transport's end

ENDED is the listener's view. The transport may outlive it by a few seconds, so that a peer that is
still sending can read why it was closed: closing with unread bytes would reset the connection and
lose our last event.
"""

from __future__ import annotations

import asyncio
import codecs
import enum
import logging
import struct
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from http import HTTPStatus
from io import BytesIO
from time import thread_time
from typing import Literal, Protocol, cast

from uvicorn import Config
from uvicorn.server import ServerState
from websockets.exceptions import PayloadTooBig
from websockets.frames import CloseCode, Frame, Opcode
from websockets.http11 import Request, Response
from websockets.protocol import State as ParserState
from websockets.typing import Subprotocol

from segue.errors import ApiError, Refused, ServerFault
from segue.ids import new_id
from segue.listener.auth import PROTOCOL
from segue.listener.edge_limits import EdgeLimits
from segue.listener.exchange import raw_refusal
from segue.listener.pieces import PIECE_BYTES, PiecesParser
from segue.memory.budget import Unread
from segue.memory.intake import Inflow

_log = logging.getLogger(__name__)

# The parser logs payloads at DEBUG, and no payload may reach a log: its logger hangs on no other.
_muted = logging.Logger("websockets", logging.CRITICAL)

# No message in fragments; never written to.
_NOTHING = BytesIO()
_DATA = (Opcode.TEXT, Opcode.BINARY, Opcode.CONT)
_PROTOCOL = Subprotocol(PROTOCOL)
_PING = b"\x89\x00"
_MEDIUM_HEADER = struct.Struct("!BBH")
_LONG_HEADER = struct.Struct("!BBQ")
# The headers of short text frames by the size of the message: nearly all deltas are such.
_HEADERS = (
    *(bytes((0x81, size)) for size in range(126)),
    *(_MEDIUM_HEADER.pack(0x81, 126, size) for size in range(126, 1_024)),
)
# A close reason shares the 125 bytes of a control frame with its code (RFC 6455, 5.5).
_REASON_BYTES_MAX = 123
# What the transport may hold before the rest waits here, where a pong can still overtake it.
_TRANSPORT_BYTES_MAX = 64 * 1024
# So many frames that wait become one block: small objects take twice the memory, and leave it in fragments.
_LOOSE_MAX = 256
# Frames are parsed in slices of this size, or smaller where frames are small: of about so many frames.
_SLICE_BYTES = 16 * 1024
_SLICE_BYTES_MIN = 128
_FRAMES_A_SLICE = 16
# After so much processor time, of which one connection had all, the others have the loop for so many times as long.
_TURN_S = 0.001
_REST_TIMES = 3
# A refused upload that pauses for longer than this has most likely been given up.
_PAUSE_S = 0.1


@dataclass(frozen=True, slots=True)
class SocketClosed:
    """How the connection ended: by the peer's close frame, or lost without one."""

    code: int | None  # the peer's code, 1005 when its close frame had none; None without a frame
    is_lost: bool  # no close frame came: end of stream, reset, missed pongs, a peer we cut
    reason: str


# Why a message is not accepted. The size that comes with "flood" is the number of frames a second.
MessageFault = Literal["binary", "too_big", "invalid", "flood", "late", "violation"]


class SocketListener(Protocol):
    """The user of a connection: called on the loop, must neither block nor raise."""

    # Counts what has come and is not a turn yet.
    inflow: Inflow

    def opened(self, socket: Socket) -> None:
        """The upgrade was answered; messages may be sent."""

    def received(self, text: bytes) -> None:
        """One whole text message, valid UTF-8."""

    def refused(self, fault: MessageFault, size: int) -> bytes | None:
        """The event to send before the connection closes with 1003, 1009, 1007, 1008 or 1002."""

    def resumed(self) -> None:
        """The outbox was full and has drained to half of its limit."""

    def closed(self, how: SocketClosed) -> None:
        """The last call, exactly once for each opened socket."""


# An error refuses the upgrade with a plain HTTP answer.
UpgradeAnswer = SocketListener | ApiError
# Decides an upgrade, at once where that is possible; the socket is for its address.
AcceptUpgrade = Callable[[Request, "Socket"], UpgradeAnswer | Awaitable[UpgradeAnswer]]


class _State(enum.Enum):
    NEW = enum.auto()
    OPEN = enum.auto()
    CLOSING = enum.auto()
    ENDED = enum.auto()


@dataclass(slots=True, eq=False)
class Socket(asyncio.Protocol):
    """One connection; `socket_class` makes the kind that uvicorn can create."""

    _accept: AcceptUpgrade
    _limits: EdgeLimits
    _connections: set[asyncio.Protocol]
    _unread: Unread
    # Of the upgrade; the ids of its turns begin with it.
    request_id: str = ""
    # The name that the client gives itself.
    client: str = ""
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.get_running_loop)
    _state: _State = _State.NEW
    _parser: PiecesParser = field(init=False)
    _inflow: Inflow = field(init=False)
    _listener: SocketListener = field(init=False)
    _transport: asyncio.Transport = field(init=False)
    _deciding: asyncio.Task[None] | None = None
    _frames_left: float = field(init=False)
    _frames_at: float = field(init=False)
    # A message in fragments: one growing buffer, because a list of one-byte parts would
    # take fifty times what they hold. At the end it is the message, without a copy.
    _partial: BytesIO = _NOTHING
    _decoder: codecs.IncrementalDecoder | None = None
    # What came and is not parsed yet, while reading is paused.
    _late: bytearray | None = None
    _is_held: bool = False
    # What was spent since when, without a rest.
    _turn_at: float = 0.0
    _spent_s: float = 0.0
    _slice_bytes: int = _SLICE_BYTES_MIN
    _waits_for_room: bool = False
    # The outbox. It holds whole frames, so that a control frame may go between any two writes.
    _queue: list[bytes] = field(default_factory=list)
    _blocks: int = 0
    _queued_bytes: int = 0
    _pong: bytes | None = None
    _flush_is_due: bool = False
    # When something was written at once: only the first send of a millisecond is.
    _written_ms: int = 0
    _resume_is_owed: bool = False
    _is_paused: bool = False
    _paused_bytes: int = 0
    _silent_s: float = 0.0
    # How long the same message has been on its way, counted in pings.
    _unfinished_s: float = 0.0
    # The heartbeat while OPEN, afterwards the limit of the ending.
    _timer: asyncio.TimerHandle | None = None
    _write_timer: asyncio.TimerHandle | None = None
    _rest_timer: asyncio.TimerHandle | None = None

    def __post_init__(self) -> None:
        limits = self._limits
        self._parser = PiecesParser(
            select_subprotocol=_select_protocol, max_size=limits.body_bytes_max, logger=_muted
        )
        self._frames_left = float(limits.frames_burst_max)
        self._frames_at = self._loop.time()

    # What the listener calls.

    def send(self, messages: Sequence[bytes]) -> None:
        """Send each as a text message: at once, or in one write with all else that is sent in this tick."""
        if self._state is not _State.OPEN:
            return
        queue = self._queue
        queued = len(queue)
        for message in messages:
            size = len(message)
            if size < 1_024:
                header = _HEADERS[size]
            elif size < 65536:
                header = _MEDIUM_HEADER.pack(0x81, 126, size)
            else:
                header = _LONG_HEADER.pack(0x81, 127, size)
            queue += (header, message)
        self._queued_bytes = queued_bytes = self._queued_bytes + sum(map(len, queue[queued:]))
        if self._is_paused or queued_bytes > self._limits.outbox_bytes_max:
            self._resume_is_owed = self._resume_is_owed or self.is_full
            if len(queue) - self._blocks > _LOOSE_MAX:
                queue[self._blocks :] = [b"".join(queue[self._blocks :])]
                self._blocks += 1
        if self._flush_is_due or self._is_paused:
            return
        # uvloop's own clock, which stands still during a tick.
        now_ms = int(self._loop.time() * 1e3)
        if now_ms != self._written_ms:
            self._written_ms = now_ms
            self._flush()
        else:
            self._flush_is_due = True
            self._loop.call_soon(self._flush)

    @property
    def address(self) -> str:
        """The address of the peer; a system call."""
        peer = self._transport.get_extra_info("peername")
        return str(peer[0]) if peer else ""

    @property
    def unread_bytes(self) -> int:
        """What waits for the peer to read, as far as it waits here."""
        # A transport that is not paused holds next to nothing, and asking it is not free.
        held = self._transport.get_write_buffer_size() if self._is_paused else 0
        return self._queued_bytes + held

    @property
    def is_full(self) -> bool:
        """Whether to wait for `SocketListener.resumed` before sending more."""
        bytes_max = self._limits.outbox_bytes_max
        if not self._is_paused:
            return self._queued_bytes > bytes_max
        return self.unread_bytes > min(bytes_max, self._unread.share)

    def hold(self) -> None:
        """Read nothing more until `release`; what was parsed already still comes."""
        self._is_held = True

    def release(self) -> None:
        """Read on."""
        if self._is_held:
            self._is_held = False
            if self._late is not None:
                self._loop.call_soon(self._read_on)

    def close(self, code: int, reason: str = "") -> None:
        """Send what is queued and a close frame, and wait for the peer's, but not for long."""
        # While a chunk of input is worked off, the parser may be past a close frame or a violation
        # that ends the connection anyway; then there is nothing left to close.
        if self._state is not _State.OPEN or self._parser.state is not ParserState.OPEN:
            return
        self._state = _State.CLOSING
        self._partial, self._decoder = _NOTHING, None
        self._parser.send_close(code, reason.encode()[:_REASON_BYTES_MAX].decode(errors="ignore"))
        self._queue += self._parser.data_to_send()
        self._flush()
        self._set_timer(self._limits.close_s_max, self._close_is_late)

    # What uvicorn and the transport call.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        # uvicorn does this after the first `data_received`: too late if that call fails.
        transport.set_protocol(self)
        self._connections.add(self)
        high = min(_TRANSPORT_BYTES_MAX, self._limits.outbox_bytes_max // 4)
        self._transport.set_write_buffer_limits(high)

    def data_received(self, data: bytes) -> None:
        self._silent_s = 0.0
        if self._state is _State.ENDED:
            return
        if self._state is _State.NEW:
            self._parser.receive_data(data)
            self._decide_upgrade()
        elif self._late is not None:
            self._late += data  # A transport with TLS may have had some when reading was paused.
        else:
            self._parse_slices(data)
            self._count_arriving()

    def eof_received(self) -> None:
        if self._state is not _State.ENDED:
            self._lose("the peer ended the stream without a close frame")

    def connection_lost(self, exc: Exception | None) -> None:
        if self._deciding is not None:
            self._deciding.cancel()
        self._end(SocketClosed(None, True, f"connection lost: {exc or 'end of stream'}"))
        self._set_timer(None)
        self._set_write_timer(None)
        if self._rest_timer is not None:
            self._rest_timer.cancel()
        self._unread.writers.discard(self)
        self._connections.discard(self)
        # The parser holds itself, and perhaps half a message; the listener holds us, and a whole history: the garbage
        # collector may come late.
        self._parser.reader.buffer.clear()
        self._late = None
        if hasattr(self, "_listener"):
            del self._listener

    def pause_writing(self) -> None:
        self._is_paused = True
        self._unread.writers.add(self)
        self._paused_bytes = self._transport.get_write_buffer_size()
        # What the transport holds counts only from here on.
        self._resume_is_owed = self._resume_is_owed or self.is_full
        self._set_write_timer(self._limits.write_s_max)

    def resume_writing(self) -> None:
        self._is_paused = False
        self._unread.writers.discard(self)
        self._set_write_timer(None)
        self._flush()

    def shutdown(self) -> None:
        """Called by uvicorn when the server stops."""
        self.close(CloseCode.SERVICE_RESTART, "the server is restarting")

    # The upgrade.

    def _decide_upgrade(self) -> None:
        match self._parser.events_received():
            case [Request() as request]:
                response = self._parser.accept(request)
            case _:
                self._refuse_handshake(HTTPStatus.BAD_REQUEST)
                return
        if response.status_code != HTTPStatus.SWITCHING_PROTOCOLS:
            self._refuse_handshake(response.status_code)
            return
        answer: UpgradeAnswer | Awaitable[UpgradeAnswer]
        try:
            answer = self._accept(request, self)
        except Exception:
            answer = _undecided()
        if isinstance(answer, Awaitable):
            # Nothing is read meanwhile: an unknown peer holds no more of our memory than its request.
            self._transport.pause_reading()
            self._set_timer(self._limits.handshake_s_max, self._transport.abort)
            self._deciding = self._loop.create_task(
                self._wait_for_answer(answer, request, response)
            )
        else:
            self._answer_upgrade(answer, request, response)

    async def _wait_for_answer(
        self, awaited: Awaitable[UpgradeAnswer], request: Request, response: Response
    ) -> None:
        """Answer the upgrade once it is decided, unless the peer has left meanwhile."""
        try:
            answer = await awaited
        except Exception:
            answer = _undecided()
        self._deciding = None
        if self._state is _State.NEW:
            self._answer_upgrade(answer, request, response)
            self._transport.resume_reading()

    def _answer_upgrade(self, answer: UpgradeAnswer, request: Request, response: Response) -> None:
        # The parser keeps the request, and its headers may hold a secret.
        request.headers.clear()
        if isinstance(answer, ApiError):
            self._refuse_upgrade(raw_refusal(answer))
            return
        self.request_id = response.headers["x-request-id"] = new_id("req")
        self._parser.send_response(response)
        self._transport.write(b"".join(self._parser.data_to_send()))
        self._listener, self._inflow = answer, answer.inflow
        self._state = _State.OPEN
        self._set_timer(self._limits.ping_s, self._ping)
        answer.opened(self)

    def _refuse_handshake(self, status: int) -> None:
        message = f"Invalid WebSocket upgrade: {self._parser.handshake_exc}."
        error = Refused(message, status=status, code="invalid_upgrade")
        # RFC 6455, 4.4: a client of another version must learn ours.
        self._refuse_upgrade(raw_refusal(error, ((b"Sec-WebSocket-Version", b"13"),)))

    def _refuse_upgrade(self, answer: bytes) -> None:
        self._state = _State.ENDED
        self._transport.write(answer)
        self._transport.close()
        self._set_timer(self._limits.handshake_s_max, self._transport.abort)

    # What comes in.

    def _parse_slices(self, data: bytes | bytearray) -> None:
        """Parse as much of this as may be parsed before a rest; uvloop calls up to 32 times in a turn of the loop."""
        now = self._loop.time()
        if now - self._turn_at > (1 + _REST_TIMES) * self._spent_s:
            self._turn_at, self._spent_s = now, 0.0
        start, began_s = 0, thread_time() - self._spent_s
        while start < len(data):
            end = start + self._slice_bytes
            frames = self._parse(data[start:end])
            wanted = self._slice_bytes * _FRAMES_A_SLICE // max(frames, 1)
            self._slice_bytes = min(max(wanted, _SLICE_BYTES_MIN), _SLICE_BYTES)
            start = end
            if self._state is _State.ENDED:
                return
            spent_s = self._spent_s = thread_time() - began_s
            if self._is_held or spent_s > _TURN_S:
                self._late = bytearray(data[end:])
                self._transport.pause_reading()
                if not self._is_held:
                    rest_s = _REST_TIMES * spent_s
                    self._rest_timer = self._loop.call_later(rest_s, self._read_on)
                return

    def _read_on(self) -> None:
        if self._late is None or self._is_held:
            return
        data, self._late = self._late, None
        if self._state is not _State.ENDED:
            self._parse_slices(data)
            self._count_arriving()
        self._resume_reading()

    def _resume_reading(self) -> None:
        # Reading may have been paused again, or the transport may be closing.
        is_paused = self._late is not None or self._waits_for_room
        if not is_paused and not self._transport.is_closing():
            self._transport.resume_reading()

    def _parse(self, data: bytes | bytearray) -> int:
        """Parse these bytes and deliver their frames; how many there were."""
        parser = self._parser
        parser.receive_data(data)
        frames = cast("list[Frame]", parser.events_received())
        # Pieces of a frame are none.
        count = sum(frame.fin or len(frame.data) != PIECE_BYTES for frame in frames)
        per_s = self._limits.frames_per_s
        if per_s and self._is_flood(count):
            reason = f"more than {per_s:g} frames a second"
            self._refuse("flood", int(per_s), CloseCode.POLICY_VIOLATION, reason)
            return count
        # What is answered meanwhile leaves after the parser's own replies.
        self._flush_is_due = True
        for frame in frames:
            self._on_frame(frame)
        self._conclude()
        self._flush()
        return count

    def _is_flood(self, count: int) -> bool:
        """Whether the peer sends too many frames; pings and fragments count too."""
        limits = self._limits
        if self._state is not _State.OPEN:
            return False
        self._frames_left -= count
        if self._frames_left >= 0:
            return False
        # The clock is read only when the burst seems used up.
        now = self._loop.time()
        gained = (now - self._frames_at) * limits.frames_per_s
        self._frames_left = min(limits.frames_burst_max, self._frames_left + gained)
        self._frames_at = now
        return self._frames_left < 0

    def _count_arriving(self) -> None:
        """Count the message that is not complete, and read no more of it while there is no room."""
        inflow = self._inflow
        arriving = len(self._parser.reader.buffer) + self._partial.tell() + len(self._late or b"")
        if self._state is not _State.OPEN or not (arriving or inflow.arriving):
            return
        inflow.count(arriving, inflow.held)
        if arriving and not inflow.read_on(self._room_came) and not self._waits_for_room:
            self._waits_for_room = True
            self._transport.pause_reading()

    def _room_came(self) -> None:
        if self._waits_for_room:
            self._waits_for_room = False
            self._resume_reading()

    def _on_frame(self, frame: Frame) -> None:
        """Deliver a text message when it is whole; end the connection for any other."""
        if self._state is not _State.OPEN or frame.opcode not in _DATA:
            return
        if frame.opcode is Opcode.BINARY:
            reason = "binary messages are not supported"
            self._refuse("binary", len(frame.data), CloseCode.UNSUPPORTED_DATA, reason)
            return
        text: bytes | None
        try:
            if frame.opcode is not Opcode.TEXT or not frame.fin:
                text = self._join(frame)
            elif not (text := bytes(frame.data)).isascii():
                text.decode()
        except UnicodeDecodeError:
            size = len(frame.data) + self._partial.tell()
            self._refuse("invalid", size, CloseCode.INVALID_DATA, "the text is not UTF-8")
            return
        if text is not None:
            self._unfinished_s = 0.0
            self._listener.received(text)

    def _join(self, frame: Frame) -> bytes | None:
        """The whole message, if this fragment completes one.

        Each fragment is checked as it comes: a bad byte must not wait for the last fragment.
        """
        if self._decoder is None:
            self._decoder = codecs.getincrementaldecoder("utf-8")()
            self._partial = BytesIO()
        self._decoder.decode(frame.data, frame.fin)
        self._partial.write(frame.data)
        if not frame.fin:
            return None
        whole = self._partial.getvalue()
        self._partial, self._decoder = _NOTHING, None
        return whole

    def _conclude(self) -> None:
        """Act on what the parser itself did with this chunk."""
        parser, exc = self._parser, self._parser.parser_exc
        if self._state is _State.ENDED:
            return
        if parser.close_rcvd is not None:
            self._finish(parser.close_rcvd.reason)
            self._hang_up()
        elif isinstance(exc, PayloadTooBig) and self._state is _State.OPEN:
            size = (exc.size or 0) + (exc.current_size or 0)
            self._refuse("too_big", size, CloseCode.MESSAGE_TOO_BIG, str(exc))
        elif exc is not None and self._state is _State.OPEN:
            self._refuse("violation", 0, CloseCode.PROTOCOL_ERROR, str(exc))
        elif exc is not None:
            self._turn_away(str(exc))
        elif (replies := parser.data_to_send()) and self._state is _State.OPEN:
            self._answer(replies)

    def _refuse(self, fault: MessageFault, size: int, code: CloseCode, reason: str) -> None:
        event = self._listener.refused(fault, size)
        if event is not None:
            self.send([event])
        if self._parser.state is ParserState.OPEN:
            self._parser.fail(code, reason)
        self._turn_away(reason)

    # What goes out.

    def _answer(self, replies: list[bytes]) -> None:
        # A peer that floods us with pings and never reads must not fill our memory with pongs, so
        # a paused transport gets only the latest (RFC 6455, 5.5.3), ahead of the outbox.
        if self._is_paused:
            self._pong = replies[-1]
        else:
            self._transport.write(b"".join(replies))

    def _flush(self) -> None:
        self._flush_is_due = False
        if self._is_paused or self._state is _State.ENDED:
            return
        self._write_all()
        if self._resume_is_owed and self.unread_bytes <= self._limits.outbox_bytes_max // 2:
            self._resume_is_owed = False
            if self._state is _State.OPEN:
                self._listener.resumed()

    def _write_all(self) -> None:
        if self._pong is not None:
            self._queue.insert(0, self._pong)
            self._pong = None
        if self._queue:
            frames = b"".join(self._queue)
            self._queue.clear()
            self._queued_bytes = self._blocks = 0
            self._transport.write(frames)

    # Time.

    def _ping(self) -> None:
        """Ping, and cut a peer from which nothing has come since the last pings."""
        # Silence is counted in pings, not read from a clock: if our own loop stood still, the
        # peer's bytes are waiting to be read and a clock would blame the peer.
        if self._silent_s >= self._limits.pong_s_max:
            self._cut(f"no bytes for {self._limits.pong_s_max:g} s after a ping")
            return
        if self._unfinished_s > self._limits.body_s_max:
            reason = f"a message was not complete after {self._limits.body_s_max:g} s"
            _log.warning("WebSocket connection closed: %s", reason)
            self._refuse("late", 0, CloseCode.POLICY_VIOLATION, reason)
            return
        wait_s = self._limits.ping_s
        if not self._is_paused:  # else the ping would wait, and the write timer watches already
            self._transport.write(_PING)
            wait_s = min(wait_s, self._limits.pong_s_max - self._silent_s)
            # What we do not read is no silence of the peer.
            self._silent_s += 0.0 if self._waits_for_room else wait_s
        is_on_its_way = self._decoder is not None or bool(self._parser.reader.buffer)
        self._unfinished_s = self._unfinished_s + wait_s if is_on_its_way else 0.0
        self._set_timer(wait_s, self._ping)

    def _write_is_late(self) -> None:
        """Cut a peer that does not read; a slow one that takes 64 KiB each time may go on."""
        left_bytes = self._transport.get_write_buffer_size()
        if self._paused_bytes - left_bytes < _TRANSPORT_BYTES_MAX:
            self._cut(f"the peer has not read for {self._limits.write_s_max:g} s")
            return
        self._paused_bytes = left_bytes
        self._set_write_timer(self._limits.write_s_max)

    def _close_is_late(self) -> None:
        if self._is_paused:  # our own close frame is still on its way, and the write timer watches
            self._set_timer(self._limits.close_s_max, self._close_is_late)
        else:
            self._lose(f"no close frame within {self._limits.close_s_max:g} s of ours")

    def _set_timer(self, delay_s: float | None, call: Callable[[], None] | None = None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = None
        if delay_s is not None and call is not None:
            self._timer = self._loop.call_later(delay_s, call)

    def _set_write_timer(self, delay_s: float | None) -> None:
        if self._write_timer is not None:
            self._write_timer.cancel()
        self._write_timer = None
        if delay_s is not None:
            self._write_timer = self._loop.call_later(delay_s, self._write_is_late)

    # The end.

    def _turn_away(self, reason: str) -> None:
        """End a connection that broke the rules, after the peer has had time to read why."""
        self._finish(reason)
        self._linger(self._limits.close_s_max)

    def _linger(self, left_s: float) -> None:
        """Drop what the peer is still sending, and close when it pauses.

        Ending our half of the stream earlier would be legal, but asyncio's own client transport
        fails on an end of stream that arrives while it has bytes to send.
        """
        if self._silent_s > 0 or left_s <= 0:
            self._hang_up()
            return
        self._silent_s = _PAUSE_S
        self._set_timer(_PAUSE_S, lambda: self._linger(left_s - _PAUSE_S))

    def _hang_up(self) -> None:
        self._transport.close()
        self._set_timer(self._limits.close_s_max, self._transport.abort)

    def _finish(self, reason: str) -> None:
        """Send the last frames and call the listener."""
        self._queue += self._last_replies()
        self._write_all()
        close = self._parser.close_rcvd
        code = None if close is None else close.code
        self._end(SocketClosed(code, close is None, reason if close is None else close.reason))

    def _last_replies(self) -> list[bytes]:
        replies = self._parser.data_to_send()
        close, exc = self._parser.close_rcvd, self._parser.parser_exc
        if close is not None and exc is not None and self._state is _State.OPEN:
            # The parser answers a close frame between two fragments with 1002, although control
            # frames may stand there (RFC 6455, 5.4). Echo it as anywhere else.
            payload = b"" if close.code == CloseCode.NO_STATUS_RCVD else close.serialize()
            replies[-2:] = [Frame(Opcode.CLOSE, payload).serialize(mask=False)]
        return replies

    def _cut(self, reason: str) -> None:
        _log.warning("WebSocket connection cut: %s", reason)
        self._lose(reason)

    def _lose(self, reason: str) -> None:
        self._end(SocketClosed(None, True, reason))
        self._transport.abort()

    def _end(self, how: SocketClosed) -> None:
        state, self._state = self._state, _State.ENDED
        self._queue, self._queued_bytes, self._pong = [], 0, None
        self._partial, self._decoder = _NOTHING, None
        self._is_paused = False  # uvloop raises on a transport that has ended
        if state in (_State.OPEN, _State.CLOSING):
            self._listener.closed(how)
            self._inflow.count(0, 0)
            # What still comes is dropped; unread, it would reset the connection and lose our last event.
            self._room_came()


def socket_class(
    accept: AcceptUpgrade, limits: EdgeLimits, unread: Unread
) -> type[asyncio.Protocol]:
    """The class for uvicorn's `ws=`; `accept` decides each upgrade, its path included."""

    class ServedSocket(Socket):
        __slots__ = ()

        def __init__(
            self, config: Config, server_state: ServerState, app_state: dict[str, object]
        ) -> None:
            connections = cast("set[asyncio.Protocol]", server_state.connections)
            super().__init__(accept, limits, connections, unread)

    return ServedSocket


def _select_protocol(parser: object, offered: Sequence[Subprotocol]) -> Subprotocol | None:
    """Our protocol, where it is offered. Another offer may be a key, and is never answered."""
    return _PROTOCOL if _PROTOCOL in offered else None


def _undecided() -> ServerFault:
    _log.exception("a WebSocket upgrade could not be decided")
    return ServerFault("Internal error.")
