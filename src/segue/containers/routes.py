"""How are containers and their files made, listed, read and deleted by HTTP? The handlers of `/v1/containers`."""

from __future__ import annotations

from contextlib import AsyncExitStack
from functools import partial
from typing import Literal

import msgspec
from msgspec import Raw, Struct

from segue.aio import off_loop
from segue.egress.domains import asked_domains
from segue.errors import InvalidRequest, NotFound
from segue.files.form import FileForm
from segue.files.pages import DeletedObject, answer_file, answer_page
from segue.isolation.limits import HeldBy
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.sandbox.citations import DATA, file_id
from segue.sandbox.client import KeeperClient, WritePiece
from segue.sandbox.messages import (
    MEMORY_LIMITS,
    NAME_CHARS_MAX,
    Container,
    ContainerSpec,
    FileEntry,
)
from segue.sandbox.skills import Supplies, check_skills
from segue.sandbox.tool import FILES_MAX, Preparation
from segue.wire.codec import decode_body
from segue.wire.requests import Whole
from segue.wire.tools import Skill

PAGE_USUAL, PAGE_MAX = 20, 100
BODY_BYTES_MAX = 1024 * 1024
# Beside the file, a form has boundaries and a few short fields.
FORM_BYTES = 64 * 1024
FILE_BYTES_MAX = 1024 * 1024 * 1024
MINUTES_MAX = 24 * 60


class ExpiresAfter(Struct, frozen=True):
    """How long a container may be idle."""

    minutes: Whole
    anchor: Literal["last_active_at"] = "last_active_at"


class ShownPolicy(Struct, frozen=True, omit_defaults=True):
    """What a container may reach."""

    type: str
    allowed_domains: tuple[str, ...] = ()


class NewContainer(Struct, frozen=True):
    """The body of a request for a container."""

    name: str
    expires_after: ExpiresAfter | None = None
    file_ids: list[str] | None = None
    memory_limit: str | None = None
    network_policy: Raw = Raw(b"null")
    skills: list[Skill] | None = None


class NewContainerFile(Struct, frozen=True):
    """The body of a request for a file that the client has uploaded before."""

    file_id: str


_container = msgspec.json.Decoder(NewContainer)
_file = msgspec.json.Decoder(NewContainerFile)


class ContainerUse(Struct, frozen=True):
    """What a container holds now, and has used since it was made."""

    memory_bytes: int
    cpu_s: float
    sent_bytes: int
    received_bytes: int


class ContainerObject(Struct, frozen=True, kw_only=True):
    """A container as clients see it. `isolation`, `limits_by` and `usage` are our own."""

    id: str
    object: str = "container"
    created_at: int
    name: str
    status: str
    last_active_at: int
    expires_after: ExpiresAfter
    memory_limit: str
    network_policy: ShownPolicy
    isolation: str
    limits_by: HeldBy
    usage: ContainerUse


class ContainerFileObject(Struct, frozen=True, kw_only=True):
    """A file of a container as clients see it."""

    id: str
    object: str = "container.file"
    container_id: str
    created_at: int
    bytes: int
    path: str
    source: Literal["user", "assistant"]


class ContainerRoutes:
    """The handlers of `/v1/containers`."""

    def __init__(self, services: Services, client: KeeperClient, supplies: Supplies) -> None:
        self._services = services
        self._client = client
        self._preparation = Preparation(client, supplies)

    # --- containers ---

    async def create(self, exchange: Exchange) -> None:
        """Make a container."""
        # A skill may be inside.
        body = await exchange.text(self._services.limits.body_bytes_max)
        asked = await off_loop(len(body) > BODY_BYTES_MAX, decode_body, _container, body)
        memory = asked.memory_limit or "1g"
        idle = asked.expires_after
        if not 1 <= len(asked.name) <= NAME_CHARS_MAX:
            raise InvalidRequest(f"'name' has 1 to {NAME_CHARS_MAX} characters.", param="name")
        if memory not in MEMORY_LIMITS:
            known = ", ".join(MEMORY_LIMITS)
            raise InvalidRequest(f"'memory_limit' must be one of {known}.", param="memory_limit")
        if idle is not None and not 1 <= idle.minutes <= MINUTES_MAX:
            message = f"'expires_after.minutes' must be from 1 to {MINUTES_MAX}."
            raise InvalidRequest(message, param="expires_after")
        check_skills(asked.skills or (), "skills", exchange.account.scopes)
        if len(asked.file_ids or ()) > FILES_MAX:
            raise InvalidRequest(f"At most {FILES_MAX} files.", param="file_ids")
        domains = asked_domains(
            asked.network_policy,
            "network_policy",
            self._client.domains,
            exchange.account.scopes,
        )
        spec = ContainerSpec(
            name=asked.name,
            memory_limit=memory,
            idle_s=None if idle is None else idle.minutes * 60.0,
            domains=domains,
        )
        preparation = self._preparation
        skills = await preparation.rack.find(exchange.owner, asked.skills or (), "skills")
        made, _ = await preparation.make(exchange.owner, spec, asked.file_ids or (), skills)
        await exchange.answer(200, msgspec.json.encode(as_object(made)))

    async def list(self, exchange: Exchange) -> None:
        """A page of the caller's containers."""
        found = await self._client.list_all(exchange.owner)
        name = exchange.query.get("name")
        shown = [each for each in found if name in (None, each.name)]
        await answer_page(exchange, shown, as_object, PAGE_USUAL, PAGE_MAX)

    async def retrieve(self, exchange: Exchange) -> None:
        """What is known of a container; asking for it keeps it alive."""
        about = await self._client.find(exchange.owner, exchange.arguments["id"])
        await exchange.answer(200, msgspec.json.encode(as_object(about)))

    async def delete(self, exchange: Exchange) -> None:
        """Delete a container; its processes and files are gone when this is answered."""
        name = exchange.arguments["id"]
        await self._client.delete(exchange.owner, name)
        answer = DeletedObject(id=name, object="container.deleted")
        await exchange.answer(200, msgspec.json.encode(answer))

    # --- files ---

    async def add_file(self, exchange: Exchange) -> None:
        """Put a file into a container: of a form, or one that was uploaded before."""
        owner, name = exchange.owner, exchange.arguments["id"]
        content_type = exchange.header(b"content-type")
        if content_type.startswith("application/json"):
            asked = decode_body(_file, await exchange.text(BODY_BYTES_MAX))
            path = await self._preparation.copy(owner, name, asked.file_id)
        else:
            path = await self._receive(exchange, content_type)
        found = await self._find_file(exchange, file_id(name, path))
        await exchange.answer(200, msgspec.json.encode(as_file(name, found)))

    async def _receive(self, exchange: Exchange, content_type: str) -> str:
        form = FileForm(content_type)
        writing: WritePiece | None = None
        async with AsyncExitStack() as stack:

            async def write(data: bytes) -> None:
                nonlocal writing
                if writing is None:
                    container = exchange.arguments["id"]
                    opening = self._client.writing(exchange.owner, container, form.filename or "")
                    writing = await stack.enter_async_context(opening)
                await writing(data)

            await form.read(exchange.parts(FILE_BYTES_MAX + FORM_BYTES), write)
            # A file without a byte has not been begun.
            await write(b"")
        return form.filename or ""

    async def list_files(self, exchange: Exchange) -> None:
        """A page of the files of a container."""
        name = exchange.arguments["id"]
        found = await self._client.list_files(exchange.owner, name)
        await answer_page(exchange, found, partial(as_file, name), PAGE_USUAL, PAGE_MAX)

    async def retrieve_file(self, exchange: Exchange) -> None:
        """What is known of a file."""
        entry = await self._find_file(exchange, exchange.arguments["file_id"])
        answer = as_file(exchange.arguments["id"], entry)
        await exchange.answer(200, msgspec.json.encode(answer))

    async def delete_file(self, exchange: Exchange) -> None:
        """Delete a file."""
        entry = await self._find_file(exchange, exchange.arguments["file_id"])
        await self._client.delete_file(exchange.owner, exchange.arguments["id"], entry.path)
        answer = DeletedObject(id=exchange.arguments["file_id"], object="container.file.deleted")
        await exchange.answer(200, msgspec.json.encode(answer))

    async def content(self, exchange: Exchange) -> None:
        """The bytes of a file, at the pace of the client. A file may change while it is read: it has no length."""
        entry = await self._find_file(exchange, exchange.arguments["file_id"])
        owner, container = exchange.owner, exchange.arguments["id"]
        parts = self._client.read_file(owner, container, entry.path)
        await answer_file(exchange, self._services, entry.path.rpartition("/")[2], parts)

    async def _find_file(self, exchange: Exchange, wanted: str) -> FileEntry:
        container = exchange.arguments["id"]
        for entry in await self._client.list_files(exchange.owner, container):
            if file_id(container, entry.path) == wanted:
                return entry
        message = f"Container file with id '{wanted[:NAME_CHARS_MAX]}' not found."
        raise NotFound(message, code="container_file_not_found")


def as_object(about: Container) -> ContainerObject:
    """A container as clients see it."""
    return ContainerObject(
        id=about.id,
        created_at=int(about.created_at),
        name=about.name,
        status=about.status,
        last_active_at=int(about.last_active_at),
        expires_after=ExpiresAfter(int(about.idle_s // 60)),
        memory_limit=about.memory_limit,
        network_policy=ShownPolicy("allowlist" if about.domains else "disabled", about.domains),
        isolation=about.isolation,
        limits_by=about.held_by,
        usage=ContainerUse(about.memory_bytes, about.cpu_s, about.sent_bytes, about.received_bytes),
    )


def as_file(container_id: str, entry: FileEntry) -> ContainerFileObject:
    """A file of a container as clients see it."""
    return ContainerFileObject(
        id=file_id(container_id, entry.path),
        container_id=container_id,
        created_at=int(entry.changed_at),
        bytes=entry.size,
        path=f"{DATA}/{entry.path}",
        source="user" if entry.is_uploaded else "assistant",
    )
