"""Compressed bodies: whole ones come back, broken ones and bombs are refused."""

from __future__ import annotations

import asyncio
import gzip
import zlib

import pytest
import zstandard

from segue.errors import ApiError
from segue.listener.inflate import inflate

PLAIN = b'{"input":"hello"}' * 2_000
PACK = {
    "gzip": gzip.compress,
    "deflate": zlib.compress,
    "zstd": zstandard.ZstdCompressor(write_checksum=True).compress,
}


@pytest.mark.parametrize("encoding", PACK)
async def test_body_comes_back_whole(encoding: str) -> None:
    assert await inflate(PACK[encoding](PLAIN), encoding, len(PLAIN)) == PLAIN


@pytest.mark.parametrize("encoding", PACK)
@pytest.mark.parametrize("lost", [1, 4, 20])
async def test_body_that_was_cut_is_refused(encoding: str, lost: int) -> None:
    with pytest.raises(ApiError) as refused:
        await inflate(PACK[encoding](PLAIN)[:-lost], encoding, len(PLAIN))
    assert (refused.value.status, refused.value.code) == (400, "invalid_encoding")


@pytest.mark.parametrize("encoding", PACK)
async def test_bomb_is_refused(encoding: str) -> None:
    bomb = PACK[encoding](bytes(50_000_000))
    with pytest.raises(ApiError) as refused:
        await inflate(bomb, encoding, 1_000_000)
    assert (refused.value.status, refused.value.code) == (413, "payload_too_large")


async def test_small_body_that_becomes_large_does_not_stop_the_loop() -> None:
    turned = asyncio.create_task(asyncio.sleep(0))
    plain = bytes(4_000_000)
    assert await inflate(gzip.compress(plain), "gzip", len(plain)) == plain
    assert turned.done()


async def test_unknown_encoding_is_refused() -> None:
    with pytest.raises(ApiError) as refused:
        await inflate(b"", "br", 10)
    assert (refused.value.status, refused.value.code) == (415, "unsupported_encoding")
