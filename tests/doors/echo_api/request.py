"""What does a client of the echo API ask for? Its own words in, the request of a turn out."""

from __future__ import annotations

import msgspec
from msgspec import Struct

from segue.errors import InvalidRequest
from segue.wire.codec import LARGE_BYTES, check_shape
from segue.wire.requests import Create


class Shout(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/shouts`."""

    voice: str
    words: str
    after: str | None = None
    live: bool = False


def decode_shout(body: bytes | bytearray) -> Create:
    """A large body comes here beside the event loop; what is nested too deep is refused before it is decoded."""
    if len(body) > LARGE_BYTES:
        check_shape(body)
    try:
        shout = msgspec.json.decode(body, type=Shout)
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"This is not a shout: {error}.", code="not_a_shout") from None
    return Create(
        model=shout.voice,
        input=shout.words,
        previous_response_id=shout.after,
        stream=shout.live,
    )
