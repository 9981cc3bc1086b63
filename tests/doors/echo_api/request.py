"""What does a client of the echo API ask for? Its own words in, the request of a turn out."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from segue.errors import InvalidRequest
from segue.wire.requests import Create


class Shout(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/shouts`."""

    voice: str
    words: str
    after: str | None = None
    live: bool = False


def decode_shout(body: bytes | bytearray) -> Shout:
    try:
        return msgspec.json.decode(body, type=Shout)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"This is not a shout: {error}.", code="not_a_shout") from None


def to_create(shout: Shout) -> Create:
    return Create(model=shout.voice, input=shout.words, previous_response_id=shout.after)
