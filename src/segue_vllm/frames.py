"""What do Segue and the plugin say to each other? MessagePack arrays in binary WebSocket messages. Pure.

A message to the engine is one `Ask`, `Cancel` or `Forget`. A message back is a list: all that one step of the engine
has for all streams of the connection, in order. Ids are four bytes each, little-endian, on the way in, and numbers on
the way back.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Sequence

import msgspec

# Both sides must have the same one.
PROTOCOL = 1
DIGEST_BYTES = 16
# More than any context, and less than what the WebSocket server takes at once (16 MiB).
MESSAGE_BYTES_MAX = 16 * 1024 * 1024


class Ask(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """Sample after the first `length` ids of what `handle` names, and then `ids`."""

    # The number of the answer on this connection, chosen by the client.
    stream: int
    # 0: there is nothing before `ids`.
    handle: int
    length: int
    # Of the ids that are not sent.
    digest: bytes
    ids: bytes
    owner: str
    model: str
    # Prompts with another salt share nothing.
    salt: str | None
    # Here the lowest goes first.
    priority: int
    # JSON, as `/inference/v1/generate` takes it.
    sampling: bytes


class Cancel(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """Nobody waits for the answer any longer."""

    stream: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """All of this owner was erased; its answers that run go on."""

    owner: str


class Hello(msgspec.Struct, frozen=True, array_like=True, tag=1):
    """The first that a client hears. Handles are worth nothing under another `instance`."""

    protocol: int
    instance: str
    step: int
    max_model_len: int


class Taken(msgspec.Struct, frozen=True, array_like=True, tag=2):
    """The request is in the engine; `handle` names its prompt, and what is sampled after it."""

    stream: int
    handle: int


class Tokens(msgspec.Struct, frozen=True, array_like=True, tag=3):
    """What was sampled in one step. `cached` comes with the first: how much of the prompt was not computed."""

    stream: int
    ids: Sequence[int]
    cached: int | None = None


class End(msgspec.Struct, frozen=True, array_like=True, tag=4):
    """Why no more comes; `stop` is the id of the stop that ended it, if there was one."""

    stream: int
    reason: str
    stop: int | None


class Refused(msgspec.Struct, frozen=True, array_like=True, tag=5):
    """The conversation is not known as it was asked for: send all ids."""

    stream: int
    # unknown, evicted, owner, model, adapter, salt, length, digest
    why: str
    words: str


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=6):
    """The request cannot be served, as an HTTP status says it."""

    stream: int
    status: int
    words: str


Asked = Ask | Cancel | Forget
Said = Hello | Taken | Tokens | End | Refused | Failed

_asked = msgspec.msgpack.Decoder(Asked)
_encode = msgspec.msgpack.Encoder().encode


def read_asked(data: bytes) -> Asked:
    """A message of a client; raises `msgspec.MsgspecError`."""
    return _asked.decode(data)


def write_said(said: Sequence[Said]) -> bytes:
    """A message to a client."""
    return _encode(said)


def ids_of(data: bytes) -> array[int]:
    """Ids as they were sent; raises `ValueError`."""
    ids = array("I")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids


def bytes_of(ids: array[int]) -> bytes:
    """Ids as they are sent, and as digests see them."""
    if sys.byteorder == "big":
        ids = array("I", ids)
        ids.byteswap()
    return ids.tobytes()
