"""Where are the bytes of files of several machines? In a bucket of an object store that speaks S3.

The library makes the requests, signs and retries them; the credentials are those of its own environment variables
(`AWS_ACCESS_KEY_ID`, `AWS_SECRET_ACCESS_KEY`, `AWS_ENDPOINT_URL` …). A large file travels in parts and appears as a
whole, or not at all.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress

import obstore
from obstore.exceptions import BaseError
from obstore.store import ObjectStore, from_url

from segue.errors import Misconfigured, Unavailable
from segue.files.objects import READ_BYTES, ObjectUpload

log = logging.getLogger(__name__)


def open_bucket(url: str) -> BucketObjects:
    """The bucket with this URL; whether it can be reached is seen with the first request."""
    try:
        # Plain HTTP is for a store on the same machine or network, by its own variable.
        return BucketObjects(from_url(url, client_options={"allow_http": True}))
    except (BaseError, ValueError) as error:
        raise Misconfigured(f"files_url: '{url}' is not the URL of a bucket: {error}.") from None


class BucketObjects:
    """Files in a bucket, by their ids."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store

    async def begin(self, file_id: str) -> ObjectUpload:
        return _BucketUpload(self._store, file_id)

    async def read(self, file_id: str) -> AsyncGenerator[bytes, None]:
        with _border():
            found = await obstore.get_async(self._store, file_id)
            async for part in found.stream(min_chunk_size=READ_BYTES):
                yield bytes(part)

    async def delete(self, file_id: str) -> None:
        with _border(), suppress(FileNotFoundError):
            await obstore.delete_async(self._store, file_id)

    async def ids(self, before: float) -> list[str]:
        with _border():
            return [
                entry["path"]
                async for entries in obstore.list(self._store)
                for entry in entries
                if entry["last_modified"].timestamp() < before
            ]

    async def tidy(self) -> None:
        """Parts of uploads that a crash has cut off are not listed as objects: a rule of the bucket deletes them."""


class _CutOff(Exception):
    """The upload is given up."""


class _BucketUpload:
    """The parts of a file on their way; the library asks for them one by one."""

    def __init__(self, store: ObjectStore, file_id: str) -> None:
        # None: the file is whole; an exception: it never will be.
        self._parts: asyncio.Queue[bytes | _CutOff | None] = asyncio.Queue(1)
        self._put = asyncio.ensure_future(
            obstore.put_async(store, file_id, self._feed(), max_concurrency=1)
        )

    async def write(self, data: bytes) -> None:
        await self._offer(data)

    async def finish(self) -> None:
        await self._offer(None)
        with _border():
            await self._put

    async def abort(self) -> None:
        with suppress(BaseException):
            await self._offer(_CutOff())
            await self._put

    async def _feed(self) -> AsyncIterator[bytes]:
        while (part := await self._parts.get()) is not None:
            if isinstance(part, _CutOff):
                raise part
            yield part

    async def _offer(self, part: bytes | _CutOff | None) -> None:
        """Hand over a part, unless the upload has failed meanwhile."""
        offering = asyncio.ensure_future(self._parts.put(part))
        await asyncio.wait((offering, self._put), return_when=asyncio.FIRST_COMPLETED)
        if not offering.done():
            offering.cancel()
            with _border():
                await self._put


@contextmanager
def _border() -> Iterator[None]:
    """Nothing foreign leaves. For what is not there the library raises Python's own error."""
    try:
        yield
    except (BaseError, FileNotFoundError) as error:
        log.warning("the bucket of files cannot be used: %s", str(error).partition("\n")[0])
        raise Unavailable("The files of this server cannot be reached at the moment.") from error
