"""What was the body before it was compressed? gzip, deflate and zstd, never more than the limit."""

from __future__ import annotations

import asyncio
import zlib

import zstandard

from segue.errors import InvalidRequest, Refused, too_large

# Below these sizes, of the body and of the limit for what it may become, a thread costs more than the work.
INLINE_BYTES = 16 * 1024
INLINE_PLAIN_BYTES = 1024 * 1024
# A window that no real client exceeds; otherwise the frame header would choose our memory use.
ZSTD_WINDOW_BYTES = 8 * 1024 * 1024

# Several gzip members are one body (RFC 1952, 2.2). Clients send one; each further one copies the rest.
MEMBERS_MAX = 16

# Four bytes may expand to 128 KiB: in small steps a bomb is noticed before it has filled memory.
ZSTD_STEP_BYTES = 1024


async def inflate(body: bytes | bytearray, encoding: str, bytes_max: int) -> bytes | bytearray:
    """The plain body, or a refusal: an unknown encoding, broken data, a bomb."""
    match encoding:
        case "" | "identity":
            return body
        case "gzip" | "x-gzip" | "deflate":
            call = _inflate_zlib
        case "zstd":
            call = _inflate_zstd
        case _:
            raise Refused(
                f"Content-Encoding '{encoding[:64]}' is not supported: use gzip, deflate or zstd.",
                status=415,
                code="unsupported_encoding",
            )
    try:
        if len(body) <= INLINE_BYTES and bytes_max <= INLINE_PLAIN_BYTES:
            return call(body, bytes_max)
        return await asyncio.to_thread(call, body, bytes_max)
    except (zlib.error, zstandard.ZstdError):
        message = f"The request body is not valid {encoding}."
        raise InvalidRequest(message, code="invalid_encoding") from None


def _inflate_zlib(body: bytes | bytearray, bytes_max: int) -> bytes:
    plain = b""
    for _ in range(MEMBERS_MAX):
        # 32: zlib detects whether this is gzip or deflate.
        stream = zlib.decompressobj(wbits=32 + zlib.MAX_WBITS)
        plain += stream.decompress(body, bytes_max + 1 - len(plain))
        if len(plain) > bytes_max:
            raise too_large(len(plain), bytes_max)
        if not stream.eof:
            raise zlib.error("truncated")
        if not stream.unused_data:
            return plain
        body = stream.unused_data
    raise zlib.error("too many members")


def _inflate_zstd(body: bytes | bytearray, bytes_max: int) -> bytes:
    stream = zstandard.ZstdDecompressor(max_window_size=ZSTD_WINDOW_BYTES).decompressobj()
    chunks: list[bytes] = []
    size = 0
    for start in range(0, len(body), ZSTD_STEP_BYTES):
        chunks.append(stream.decompress(body[start : start + ZSTD_STEP_BYTES]))
        size += len(chunks[-1])
        if size > bytes_max:
            raise too_large(size, bytes_max)
        if stream.eof and not stream.unused_data and start + ZSTD_STEP_BYTES >= len(body):
            return b"".join(chunks)
        if stream.eof:
            raise zstandard.ZstdError("bytes after the end")
    raise zstandard.ZstdError("truncated")
