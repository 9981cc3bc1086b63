"""What was the body before it was compressed? gzip, deflate and zstd, never more than the limit."""

from __future__ import annotations

import asyncio
import zlib
from collections.abc import Iterator
from io import BytesIO

import zstandard

from segue.errors import InvalidRequest, Refused, too_large
from segue.rests import rested

# Below these sizes, of the body and of the limit for what it may become, a thread costs more than the work.
INLINE_BYTES = 16 * 1024
INLINE_PLAIN_BYTES = 1024 * 1024
# A window that no real client exceeds; otherwise the frame header would choose our memory use.
ZSTD_WINDOW_BYTES = 8 * 1024 * 1024

# Several gzip members are one body (RFC 1952, 2.2). Clients send one.
MEMBERS_MAX = 16
# What zlib is given at once, and may make of it: what is left of the first is copied each time.
ZLIB_STEP_BYTES, PIECE_BYTES = 16 * 1024, 64 * 1024

# Four bytes may expand to 128 KiB: in small steps a bomb is noticed before it has filled memory.
ZSTD_STEP_BYTES = 1024


async def inflate(body: bytes | bytearray, encoding: str, bytes_max: int) -> bytes | bytearray:
    """The plain body, or a refusal: an unknown encoding, broken data, a bomb."""
    match encoding:
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            pieces = _unzipped(body)
        case "zstd":
            pieces = _unzstd(body)
        case _:
            raise Refused(
                f"Content-Encoding '{encoding[:64]}' is not supported: use gzip, deflate or zstd.",
                status=415,
                code="unsupported_encoding",
            )
    try:
        if len(body) <= INLINE_BYTES and bytes_max <= INLINE_PLAIN_BYTES:
            return _plain(pieces, bytes_max)
        return await asyncio.to_thread(_plain, pieces, bytes_max)
    except (zlib.error, zstandard.ZstdError):
        message = f"The request body is not valid {encoding}."
        raise InvalidRequest(message, code="invalid_encoding") from None


def _plain(pieces: Iterator[bytes], bytes_max: int) -> bytes:
    """All of it, as far as it is no bomb."""
    plain = BytesIO()
    for piece in rested(pieces):
        plain.write(piece)
        if plain.tell() > bytes_max:
            raise too_large(plain.tell(), bytes_max)
    return plain.getvalue()


def _unzipped(body: bytes | bytearray) -> Iterator[bytes]:
    # 32: zlib detects whether this is gzip or deflate.
    streams = (zlib.decompressobj(wbits=32 + zlib.MAX_WBITS) for _ in range(MEMBERS_MAX))
    stream = next(streams)
    for start in range(0, len(body), ZLIB_STEP_BYTES):
        data = bytes(body[start : start + ZLIB_STEP_BYTES])
        while data:
            if stream.eof and (stream := next(streams, stream)).eof:
                raise zlib.error("too many members")
            yield stream.decompress(data, PIECE_BYTES)
            data = stream.unconsumed_tail or stream.unused_data
    while piece := stream.decompress(b"", PIECE_BYTES):
        yield piece
    if not stream.eof:
        raise zlib.error("truncated")


def _unzstd(body: bytes | bytearray) -> Iterator[bytes]:
    stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
    for start in range(0, len(body), ZSTD_STEP_BYTES):
        yield stream.decompress(body[start : start + ZSTD_STEP_BYTES])
        if stream.eof and not stream.unused_data and start + ZSTD_STEP_BYTES >= len(body):
            return
        if stream.eof:
            raise zstandard.ZstdError("bytes after the end")
    raise zstandard.ZstdError("truncated")
