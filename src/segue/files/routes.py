"""How are files uploaded, listed, read and deleted by HTTP? The handlers of `/v1/files`."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from segue.errors import InvalidRequest, Refused
from segue.files.depot import Depot
from segue.listener.exchange import Exchange, listening, text_header
from segue.listener.services import Services
from segue.seams.files import StoredFile

PAGE_MAX = 10_000
# Beside the file, a form has boundaries and a few short fields.
FORM_BYTES = 64 * 1024


class FileObject(Struct, frozen=True, kw_only=True):
    """A file as clients see it."""

    id: str
    object: str = "file"
    bytes: int
    created_at: int
    expires_at: int | UnsetType = UNSET
    filename: str
    purpose: str
    status: str = "processed"


class FileList(Struct, frozen=True, kw_only=True):
    object: str = "list"
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(Struct, frozen=True, kw_only=True):
    id: str
    object: str = "file"
    deleted: bool = True


class FileRoutes:
    """The handlers of `/v1/files`."""

    def __init__(self, services: Services, load: Callable[[], Depot]) -> None:
        self._services = services
        self._load = load

    async def upload(self, exchange: Exchange) -> None:
        """Keep the file of a form; it is durable when this is answered."""
        depot = self._load()
        if exchange.header(b"content-encoding") not in ("", "identity"):
            message = "Send the form without a content encoding."
            raise Refused(message, status=415, code="unsupported_encoding")
        bytes_max = depot.file_bytes_max + FORM_BYTES
        content_type = exchange.header(b"content-type")
        file = await depot.receive(exchange.owner, content_type, exchange.parts(bytes_max))
        await exchange.answer(200, msgspec.json.encode(as_object(file)))

    async def list(self, exchange: Exchange) -> None:
        """A page of the caller's files."""
        query = exchange.query
        limit, order = query.get("limit", str(PAGE_MAX)), query.get("order", "desc")
        if not re.fullmatch("[0-9]{1,5}", limit) or not 1 <= int(limit) <= PAGE_MAX:
            raise InvalidRequest(f"'limit' must be from 1 to {PAGE_MAX}.", param="limit")
        if order not in ("asc", "desc"):
            raise InvalidRequest("'order' must be 'asc' or 'desc'.", param="order")
        files = await self._load().newest(exchange.owner, query.get("purpose"))
        if order == "asc":
            files.reverse()
        if (after := query.get("after")) is not None:
            places = [place for place, file in enumerate(files) if file.id == after]
            if not places:
                raise InvalidRequest(f"No file with id '{after[:128]}' found.", param="after")
            files = files[places[0] + 1 :]
        page = [as_object(file) for file in files[: int(limit)]]
        answer = FileList(
            data=page,
            first_id=page[0].id if page else None,
            last_id=page[-1].id if page else None,
            has_more=len(files) > len(page),
        )
        await exchange.answer(200, msgspec.json.encode(answer))

    async def retrieve(self, exchange: Exchange) -> None:
        """What is known of a file."""
        file = await self._load().find(exchange.owner, exchange.arguments["id"])
        await exchange.answer(200, msgspec.json.encode(as_object(file)))

    async def content(self, exchange: Exchange) -> None:
        """The bytes of a file, at the pace of the client."""
        depot = self._load()
        file = await depot.find(exchange.owner, exchange.arguments["id"])
        headers = (
            (b"content-type", b"application/octet-stream"),
            (b"content-length", str(file.bytes).encode()),
            text_header(b"content-disposition", f'attachment; filename="{_quoted(file.filename)}"'),
            # It is a client's own, and no page of this server.
            (b"x-content-type-options", b"nosniff"),
        )
        left = file.bytes
        async with listening(exchange):
            async for part in depot.read(file):
                if not exchange.has_started:
                    await exchange.start(200, headers)
                left -= len(part)
                async with asyncio.timeout(self._services.limits.write_s_max):
                    await exchange.write(part, is_last=left == 0)

    async def delete(self, exchange: Exchange) -> None:
        """Delete a file; its bytes are gone when this is answered."""
        file_id = exchange.arguments["id"]
        await self._load().delete(exchange.owner, file_id)
        await exchange.answer(200, msgspec.json.encode(DeletedFile(id=file_id)))


def as_object(file: StoredFile) -> FileObject:
    """A file as clients see it."""
    return FileObject(
        id=file.id,
        bytes=file.bytes,
        created_at=file.created_at,
        expires_at=UNSET if file.expires_at is None else file.expires_at,
        filename=file.filename,
        purpose=file.purpose,
    )


def _quoted(name: str) -> str:
    return name.replace("\\", "_").replace('"', "_")
