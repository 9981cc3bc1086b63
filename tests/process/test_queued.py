"""The request of a queued turn: sealed for its owner, read again by any version that can, refused cleanly by others."""

from __future__ import annotations

import msgspec
import pytest
from msgspec.structs import replace

from segue.errors import ApiError, ServerFault
from segue.process.sealed_requests import asked_of, with_request
from segue.seals.cipher import RingSeals, new_key
from segue.wire.codec import decode_create, encode
from tests.contracts.turns import make_turn

SECRET = b"hush-71"
ASKED = b'{"model":"m","input":"Hi","background":true,"tools":[{"authorization":"hush-71"}]}'
SEALS = RingSeals([new_key()])


async def test_request_is_sealed_and_read_again() -> None:
    queued = await with_request(make_turn("a"), decode_create(ASKED), "key", SEALS)
    assert SECRET not in queued.request
    key, create = asked_of(queued, SEALS)
    assert (key, encode(create)) == ("key", encode(decode_create(ASKED)))


async def test_large_request_is_sealed_in_parts() -> None:
    asked = b'{"model":"m","input":"%b"}' % (b"x" * 3_000_000)
    queued = await with_request(make_turn("a"), decode_create(asked), "key", SEALS)
    assert b"xxxxxxxx" not in queued.request
    assert asked_of(queued, SEALS) == ("key", decode_create(asked))


def test_request_that_an_older_version_has_queued_is_read() -> None:
    """It stands there as it came."""
    older = replace(make_turn("a"), request=msgspec.msgpack.encode(("key", ASKED)))
    assert asked_of(older, SEALS) == ("key", decode_create(ASKED))


async def test_older_version_refuses_a_sealed_request_as_any_other_that_is_no_json() -> None:
    queued = await with_request(make_turn("a"), decode_create(ASKED), "key", SEALS)
    _, body = msgspec.msgpack.decode(queued.request, type=tuple[str, bytes])
    with pytest.raises(ApiError):
        decode_create(body)


async def test_request_that_cannot_be_read_is_an_error_that_ends_its_turn() -> None:
    queued = await with_request(make_turn("a"), decode_create(ASKED), "key", SEALS)
    with pytest.raises(ServerFault, match="seal keys"):
        asked_of(queued, RingSeals([new_key()]))
    with pytest.raises(ServerFault, match="seal keys"):
        asked_of(replace(queued, request=msgspec.msgpack.encode(("key", b"\xff"))), SEALS)
    with pytest.raises(ServerFault, match="seal keys"):
        asked_of(replace(queued, owner="somebody-else"), SEALS)
    for newer in (b"\xff\xff", msgspec.msgpack.encode(("key", "a", "b"))):
        with pytest.raises(ServerFault, match="newer version"):
            asked_of(replace(queued, request=newer), SEALS)
