"""How do we and the plugin `segue-vllm` understand each other? MessagePack in binary WebSocket messages. Pure.

In: what is asked, and bytes as they arrive, cut anywhere. Out: bytes to send, and all that one step of the engine had
for all streams. The plugin has the other half (`segue_vllm/frames.py`): tests hold the two against each other.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from typing import Annotated

import msgspec
from msgspec import Meta, Struct
from websockets.frames import apply_mask  # type: ignore[attr-defined]  # it is not named

from segue.seams.prompt import IdArray

# Both sides must have the same one.
PROTOCOL = 1
DIGEST_BYTES = 16
# More than the plugin sends at once, and read within some 15 ms; a message to the engine is limited by its own server.
MESSAGE_BYTES_MAX = 1024 * 1024
# What a message says at most: the plugin says a thousand things at once.
SAID_MAX = 4_096
HEAD_BYTES_MAX = 16 * 1024
_BINARY, _CLOSE, _PING, _PONG = 2, 8, 9, 10
_GUID = b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11"


class ProtocolBroken(Exception):
    """The other side is not what it said, or what it sent cannot be read."""


# --- messages ----------------------------------------------------------------------------------------


class SessionAsk(Struct, frozen=True, array_like=True, tag=1):
    """Sample after the first `length` ids of what `handle` names, and then `ids`."""

    stream: int
    # 0: nothing is before `ids`.
    handle: int
    length: int
    # Of the ids that are not sent.
    digest: bytes
    ids: bytes
    owner: str
    model: str
    salt: str | None
    priority: int
    # JSON.
    sampling: bytes


class SessionCancel(Struct, frozen=True, array_like=True, tag=2):
    """Nobody waits for the answer any longer."""

    stream: int


class SessionForget(Struct, frozen=True, array_like=True, tag=3):
    """All of this owner was erased; its answers that run go on."""

    owner: str


class SessionHello(Struct, frozen=True, array_like=True, tag=1):
    """The first message. Handles are worth nothing under another `instance`."""

    protocol: int
    instance: str
    step: int
    max_model_len: int


class SessionTaken(Struct, frozen=True, array_like=True, tag=2):
    """The request is in the engine, under this handle."""

    stream: int
    handle: int


class SessionTokens(Struct, frozen=True, array_like=True, tag=3):
    """What was sampled in one step; with the first, how much of the prompt was not computed."""

    stream: int
    ids: list[int]
    cached: int | None = None


class SessionEnd(Struct, frozen=True, array_like=True, tag=4):
    """Why no more comes, and which stop it was."""

    stream: int
    reason: str
    stop: int | None


class SessionRefused(Struct, frozen=True, array_like=True, tag=5):
    """All ids are to be sent; `why` is one word."""

    stream: int
    why: str
    words: str


class SessionFailed(Struct, frozen=True, array_like=True, tag=6):
    """The request cannot be served, as an HTTP status says it."""

    stream: int
    status: int
    words: str


SessionSaid = (
    SessionHello | SessionTaken | SessionTokens | SessionEnd | SessionRefused | SessionFailed
)

_encode = msgspec.msgpack.Encoder().encode
_said: msgspec.msgpack.Decoder[list[SessionSaid]] = msgspec.msgpack.Decoder(
    Annotated[list[SessionSaid], Meta(max_length=SAID_MAX)]
)


def read_said(data: bytes) -> list[SessionSaid]:
    """A message of the plugin."""
    try:
        return _said.decode(data)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolBroken("a message cannot be read") from error


def id_bytes(ids: IdArray[int]) -> bytes:
    """Ids as they are sent, and as digests see them: four bytes each, little-endian."""
    if sys.byteorder == "big":
        ids = ids[:]
        ids.byteswap()
    return ids.tobytes()


# --- WebSocket ---------------------------------------------------------------------------------------


def new_key() -> str:
    """What the server must answer to."""
    return base64.b64encode(os.urandom(16)).decode()


def accepted(head: bytes, key: str) -> bool:
    """Whether this response opens the WebSocket that was asked for with this key."""
    line, *fields = head.split(b"\r\n")
    if not line.startswith(b"HTTP/1.1 101"):
        return False
    wanted = base64.b64encode(hashlib.sha1(key.encode() + _GUID).digest())
    named = {
        name.strip().lower(): value.strip()
        for name, _, value in (f.partition(b":") for f in fields)
    }
    return named.get(b"sec-websocket-accept") == wanted


def binary_message(message: SessionAsk | SessionCancel | SessionForget) -> bytes:
    """A whole message in one frame, masked as a client must."""
    return _frame(_BINARY, _encode(message))


def ping() -> bytes:
    """Asks for an answer, which is a pong."""
    return _frame(_PING, b"")


def pong(data: bytes) -> bytes:
    """The answer to a ping."""
    return _frame(_PONG, data)


def _frame(opcode: int, data: bytes) -> bytes:
    size = len(data)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2)
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8)
    mask = os.urandom(4)
    return head + mask + apply_mask(data, mask)


class Incoming:
    """The frames of a server, as they arrive."""

    def __init__(self) -> None:
        self._unread = bytearray()
        self._parts: list[bytes] = []
        self._size = 0
        # What a server wants to hear again.
        self.pings: list[bytes] = []
        self.is_closed = False

    def feed(self, data: bytes) -> list[bytes]:
        """The messages that are whole with these bytes."""
        self._unread += data
        messages: list[bytes] = []
        while not self.is_closed and (found := self._next()) is not None:
            first, payload = found
            opcode = first & 0x0F
            if first & 0x70:
                raise ProtocolBroken("a frame has an extension")
            if opcode == _PING:
                self.pings.append(payload)
            elif opcode == _CLOSE:
                self.is_closed = True
            elif (opcode == _BINARY and not self._parts) or (opcode == 0 and self._parts):
                self._add(payload, messages, is_last=first >= 0x80)
            elif opcode != _PONG:
                raise ProtocolBroken("a frame has another kind than it may have here")
        return messages

    def _add(self, payload: bytes, messages: list[bytes], *, is_last: bool) -> None:
        self._size += len(payload)
        if self._size > MESSAGE_BYTES_MAX:
            raise ProtocolBroken("a message is too long")
        # An empty first part must be seen, too; others would be held for nothing.
        if payload or not self._parts:
            self._parts.append(payload)
        if is_last:
            messages.append(b"".join(self._parts))
            self._parts, self._size = [], 0

    def _next(self) -> tuple[int, bytes] | None:
        unread = self._unread
        if len(unread) < 2:
            return None
        size, begin = unread[1], 2
        if size >= 0x80:
            raise ProtocolBroken("a server's frame is masked")
        if size >= 126:
            begin = 4 if size == 126 else 10
            if len(unread) < begin:
                return None
            size = int.from_bytes(unread[2:begin])
        if size > MESSAGE_BYTES_MAX:
            raise ProtocolBroken("a frame is too long")
        if len(unread) < begin + size:
            return None
        first, payload = unread[0], bytes(unread[begin : begin + size])
        del unread[: begin + size]
        return first, payload
