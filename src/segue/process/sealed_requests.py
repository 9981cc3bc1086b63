"""How is the request of a queued turn kept, so that another process can run it?

It may hold secrets of the client (`authorization` of an MCP server), so it is sealed for its owner.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import structs

from segue.errors import ServerFault
from segue.seams.access import Seals
from segue.seams.history import Turn
from segue.wire.codec import decode_create, encode
from segue.wire.requests import Create

# A request is sealed in parts of this size, with pauses between them: some milliseconds each.
SEALED_BYTES_MAX = 1024 * 1024
PART_END = "."

_decode_request = msgspec.msgpack.Decoder(tuple[str, bytes]).decode


async def with_request(turn: Turn, create: Create, key: str, seals: Seals) -> Turn:
    """The turn with what is needed to run it elsewhere."""
    body = encode(create)
    parts: list[str] = []
    for start in range(0, len(body), SEALED_BYTES_MAX):
        if parts:
            await asyncio.sleep(0)
        parts.append(seals.seal(turn.owner, body[start : start + SEALED_BYTES_MAX]))
    return structs.replace(
        turn, request=msgspec.msgpack.encode((key, PART_END.join(parts).encode()))
    )


def asked_of(turn: Turn, seals: Seals) -> tuple[str, Create]:
    """The key and the request of a queued turn; one that cannot be read here is an error that ends the turn."""
    try:
        key, body = _decode_request(turn.request)
    except msgspec.DecodeError:
        raise ServerFault("This response was queued by a newer version of the server.") from None
    # Versions before 0.3.0 have written the request as it came. They refuse one that is sealed, as no JSON.
    if not body.startswith(b"{"):
        sealed = body.decode(errors="replace").split(PART_END)
        parts = [seals.open(turn.owner, part) for part in sealed]
        if None in parts:
            raise ServerFault("This response was queued by a server with other seal keys.")
        body = b"".join(filter(None, parts))
    return key, decode_create(body)
