"""How are skills uploaded, listed, read and deleted by HTTP? The handlers of `/v1/skills`."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from msgspec import Struct

from segue.bundles.zips import FILES_MAX, ZIP_BYTES_MAX
from segue.files.pages import DeletedObject, answer_file, answer_page, check_form
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.seams.skills import SkillVersion
from segue.skills.shelf import KeptSkill, Shelf
from segue.wire.codec import decode_body
from segue.wire.requests import Whole

PAGE_USUAL, PAGE_MAX = 20, 100
BODY_BYTES_MAX = 64 * 1024
# Beside the files, a form has boundaries, headers for each of them and a few short fields.
FORM_BYTES = 64 * 1024 + FILES_MAX * 2048


class SkillObject(Struct, frozen=True, kw_only=True):
    """A skill as clients see it; the numbers of versions are texts."""

    id: str
    object: str = "skill"
    created_at: int
    name: str
    description: str
    default_version: str
    latest_version: str


class SkillVersionObject(Struct, frozen=True, kw_only=True):
    """A version of a skill as clients see it."""

    id: str
    object: str = "skill.version"
    skill_id: str
    version: str
    name: str
    description: str
    created_at: int


class DeletedVersion(DeletedObject, frozen=True, kw_only=True):
    version: str


class NewDefault(Struct, frozen=True):
    """The body of a change: which version is to be the default."""

    default_version: str | Whole


_change = msgspec.json.Decoder(NewDefault)


class SkillRoutes:
    """The handlers of `/v1/skills`."""

    def __init__(self, services: Services, load: Callable[[], Shelf]) -> None:
        self._services = services
        self._load = load

    # --- skills ---

    async def create(self, exchange: Exchange) -> None:
        """Keep the skill of a form; it is durable when this is answered."""
        version = await self._receive(exchange, None)
        await _answer(exchange, as_skill(KeptSkill(version, version)))

    async def list(self, exchange: Exchange) -> None:
        """A page of the caller's skills."""
        found = await self._load().newest(exchange.owner)
        await answer_page(exchange, found, as_skill, PAGE_USUAL, PAGE_MAX)

    async def retrieve(self, exchange: Exchange) -> None:
        """What is known of a skill."""
        skill = await self._load().find(exchange.owner, exchange.arguments["id"])
        await _answer(exchange, as_skill(skill))

    async def update(self, exchange: Exchange) -> None:
        """Choose the default version."""
        shelf = self._load()
        wanted = decode_body(_change, await exchange.text(BODY_BYTES_MAX)).default_version
        name = exchange.arguments["id"]
        await _answer(
            exchange, as_skill(await shelf.make_default(exchange.owner, name, str(wanted)))
        )

    async def delete(self, exchange: Exchange) -> None:
        """Delete a skill with its versions; their bytes are gone when this is answered."""
        name = exchange.arguments["id"]
        await self._load().delete(exchange.owner, name)
        await _answer(exchange, DeletedObject(id=name, object="skill.deleted"))

    async def content(self, exchange: Exchange) -> None:
        """The zip of the default version."""
        await self._send(exchange, None)

    # --- versions ---

    async def create_version(self, exchange: Exchange) -> None:
        """Keep another version of a skill."""
        await _answer(exchange, as_version(await self._receive(exchange, exchange.arguments["id"])))

    async def list_versions(self, exchange: Exchange) -> None:
        """A page of the versions of a skill."""
        found = await self._load().versions(exchange.owner, exchange.arguments["id"])
        await answer_page(exchange, found, as_version, PAGE_USUAL, PAGE_MAX)

    async def retrieve_version(self, exchange: Exchange) -> None:
        """What is known of a version."""
        await _answer(exchange, as_version(await self._version(exchange)))

    async def delete_version(self, exchange: Exchange) -> None:
        """Delete a version that is not the default, or the last one with its skill."""
        name, wanted = exchange.arguments["id"], exchange.arguments["version"]
        gone = await self._load().delete_version(exchange.owner, name, wanted)
        answer = DeletedVersion(
            id=gone.id, object="skill.version.deleted", version=str(gone.version)
        )
        await _answer(exchange, answer)

    async def version_content(self, exchange: Exchange) -> None:
        """The zip of a version."""
        await self._send(exchange, exchange.arguments["version"])

    async def _receive(self, exchange: Exchange, skill_id: str | None) -> SkillVersion:
        shelf, content_type = self._load(), check_form(exchange)
        parts = exchange.parts(ZIP_BYTES_MAX + FORM_BYTES)
        return await shelf.receive(exchange.owner, content_type, parts, skill_id)

    async def _version(self, exchange: Exchange) -> SkillVersion:
        name, wanted = exchange.arguments["id"], exchange.arguments["version"]
        return await self._load().version(exchange.owner, name, wanted)

    async def _send(self, exchange: Exchange, wanted: str | None) -> None:
        shelf, name = self._load(), exchange.arguments["id"]
        version = await shelf.version(exchange.owner, name, wanted)
        file = f"{version.name}-{version.version}.zip"
        await answer_file(exchange, self._services, file, shelf.read(version), version.bytes)


async def _answer(exchange: Exchange, value: Struct) -> None:
    await exchange.answer(200, msgspec.json.encode(value))


def as_skill(skill: KeptSkill) -> SkillObject:
    """A skill as clients see it: it is called what its default version is called."""
    default = skill.default
    return SkillObject(
        id=default.skill_id,
        created_at=default.skill_created_at,
        name=default.name,
        description=default.description,
        default_version=str(default.version),
        latest_version=str(skill.latest.version),
    )


def as_version(version: SkillVersion) -> SkillVersionObject:
    """A version as clients see it."""
    return SkillVersionObject(
        id=version.id,
        skill_id=version.skill_id,
        version=str(version.version),
        name=version.name,
        description=version.description,
        created_at=version.created_at,
    )
