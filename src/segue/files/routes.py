"""How are files uploaded, listed, read and deleted by HTTP? The handlers of `/v1/files`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import UNSET, Struct, UnsetType

from segue.files.depot import Depot
from segue.files.pages import DeletedObject, answer_file, answer_page, check_form
from segue.listener.exchange import Exchange
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


class FileRoutes:
    """The handlers of `/v1/files`."""

    def __init__(self, services: Services, load: Callable[[], Depot]) -> None:
        self._services = services
        self._load = load

    async def upload(self, exchange: Exchange) -> None:
        """Keep the file of a form; it is durable when this is answered."""
        depot = self._load()
        content_type = check_form(exchange)
        bytes_max = depot.file_bytes_max + FORM_BYTES
        file = await depot.receive(exchange.owner, content_type, exchange.parts(bytes_max))
        await exchange.answer(200, msgspec.json.encode(as_object(file)))

    async def list(self, exchange: Exchange) -> None:
        """A page of the caller's files."""
        files = await self._load().newest(exchange.owner, exchange.query.get("purpose"))
        await answer_page(exchange, files, as_object, PAGE_MAX, PAGE_MAX)

    async def retrieve(self, exchange: Exchange) -> None:
        """What is known of a file."""
        file = await self._load().find(exchange.owner, exchange.arguments["id"])
        await exchange.answer(200, msgspec.json.encode(as_object(file)))

    async def content(self, exchange: Exchange) -> None:
        """The bytes of a file, at the pace of the client."""
        depot = self._load()
        file = await depot.find(exchange.owner, exchange.arguments["id"])
        parts = depot.read(file)
        await answer_file(exchange, self._services, file.filename, parts, file.bytes)

    async def delete(self, exchange: Exchange) -> None:
        """Delete a file; its bytes are gone when this is answered."""
        file_id = exchange.arguments["id"]
        await self._load().delete(exchange.owner, file_id)
        await exchange.answer(200, msgspec.json.encode(DeletedObject(id=file_id, object="file")))


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
