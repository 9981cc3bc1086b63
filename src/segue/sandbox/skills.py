"""How do skills get into a container, and what does its model hear of them?

In: the skills that a request names, which it brings along or which its owner keeps here. Out: their files below one
folder of the container, and a message for the model. A container has a skill when all of its files are there; what
failed halfway is written again. The model is told where its history does not say it yet: not in the head of the
prompt, which would have to be computed again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Container, Iterator, Sequence
from contextlib import ExitStack, aclosing
from functools import partial
from hashlib import sha256
from io import BytesIO
from tempfile import TemporaryFile
from typing import IO, Protocol

import msgspec
from msgspec import Struct

from segue.bundles.bundle import Bundle, inline_bundle, refused, stored_bundle
from segue.bundles.zips import UNPACKED_BYTES_MAX, ZIP_BYTES_MAX, zip_reader
from segue.errors import Forbidden, InvalidRequest
from segue.sandbox.client import KeeperClient
from segue.sandbox.messages import SkillEntry
from segue.seams.history import Owner, Past, above
from segue.seams.skills import SkillVersion
from segue.seams.tools import TurnAhead
from segue.wire.codec import user_message
from segue.wire.files import from_base64
from segue.wire.items import Item
from segue.wire.tools import Skill

SCOPE = "skills"
# Below the home of the sandbox, which is in memory.
FOLDER = "/home/user/skills"
SKILLS_MAX = 16
HEAD = "Skills in the container of the shell:"
# How such a note begins.
NOTE = user_message(HEAD).raw.partition(HEAD.encode())[0] + HEAD.encode()


class Supplies(Protocol):
    """What owners keep on this server, for their containers."""

    async def open_file(
        self, owner: Owner, file_id: str
    ) -> tuple[str, int, AsyncGenerator[bytes, None]]:
        """The name, the size and the bytes of a file."""

    async def find_skill(self, owner: Owner, skill_id: str, version: str | None) -> SkillVersion:
        """A version of a skill; without a number its default one."""

    def read_skill(self, version: SkillVersion) -> AsyncGenerator[bytes, None]:
        """The zip of a version."""


class WantedSkill(Struct, frozen=True):
    """A skill that a container is to have: its folder, always the same for the same skill, and how it is unpacked."""

    folder: str
    load: Callable[[], Awaitable[LoadedSkill]]


class LoadedSkill(Struct, frozen=True):
    """A skill that was looked at; its zip is open."""

    folder: str
    bundle: Bundle
    file: IO[bytes]

    @property
    def entry(self) -> SkillEntry:
        """What its container knows of it."""
        path = f"{FOLDER}/{self.folder}/{self.bundle.manifest}"
        return SkillEntry(self.folder, self.bundle.name, self.bundle.description, path)


class _Source(Struct, frozen=True):
    type: str
    data: str


# --- what a request asks for ------------------------------------------------------------------------


def check_skills(skills: Sequence[Skill], at: str, may: Container[str]) -> None:
    """Refuse skills that the key may not use, and what is no skill at all."""
    if skills and SCOPE not in may:
        raise Forbidden(f"This API key may not use skills: it has not the scope '{SCOPE}'.")
    if len(skills) > SKILLS_MAX:
        raise _invalid(at, f"at most {SKILLS_MAX} skills")
    for index, skill in enumerate(skills):
        place = f"{at}[{index}]"
        if skill.type == "skill_reference":
            if not skill.skill_id:
                raise _invalid(f"{place}.skill_id", "the id of a skill")
            _version(skill, place)
        else:
            _data(skill, place)


def _data(skill: Skill, at: str) -> str:
    """The zip of an inline skill, in base64."""
    try:
        source = msgspec.json.decode(skill.source or b"", type=_Source)
    except msgspec.MsgspecError:
        raise _invalid(f"{at}.source", "a zip in base64") from None
    if skill.type != "inline" or source.type != "base64" or not source.data:
        raise _invalid(at, "a 'skill_reference', or 'inline' with a source in base64")
    return source.data


def _version(skill: Skill, at: str) -> str | None:
    """Clients write a number as a text or as a number."""
    try:
        wanted = msgspec.json.decode(skill.version or b"null", type=str | int | None)
    except msgspec.MsgspecError:
        raise _invalid(f"{at}.version", "a number or 'latest'") from None
    return None if wanted is None else str(wanted)


def _invalid(param: str, wanted: str) -> InvalidRequest:
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, code="invalid_value", param=param)


# --- into a container -------------------------------------------------------------------------------


class SkillRack:
    """Puts skills into containers."""

    def __init__(self, client: KeeperClient, supplies: Supplies | None) -> None:
        self._client = client
        self._supplies = supplies

    async def find(self, owner: Owner, skills: Sequence[Skill], at: str) -> list[WantedSkill]:
        """The skills that a request names, each once; refused where one is not there."""
        found: dict[str, WantedSkill] = {}
        for index, skill in enumerate(skills):
            place = f"{at}[{index}]"
            if skill.type == "skill_reference":
                wanted = await self._stored(owner, skill, place)
            else:
                wanted = await asyncio.to_thread(_inline, skill, place)
            found[wanted.folder] = wanted
        return [*found.values()]

    async def _stored(self, owner: Owner, skill: Skill, at: str) -> WantedSkill:
        supplies, skill_id = self._supplies, skill.skill_id or ""
        if supplies is None:
            raise InvalidRequest("This server keeps no skills.", code="skill_not_found", param=at)
        version = await supplies.find_skill(owner, skill_id, _version(skill, at))
        folder = f"{version.name}-{version.id[-8:]}"

        async def load() -> LoadedSkill:
            with ExitStack() as stack:
                file = stack.enter_context(TemporaryFile())
                async with aclosing(supplies.read_skill(version)) as parts:
                    async for part in parts:
                        await asyncio.to_thread(file.write, part)
                bundle = await asyncio.to_thread(stored_bundle, file, at)
                stack.pop_all()
            return LoadedSkill(folder, bundle, file)

        return WantedSkill(folder, load)

    async def load(self, skills: Sequence[WantedSkill], stack: ExitStack) -> list[LoadedSkill]:
        """The skills, looked at; the stack closes them. Refused as a whole, before anything is written."""
        loaded: list[LoadedSkill] = []
        for skill in skills:
            loaded.append(await skill.load())
            stack.enter_context(loaded[-1].file)
            if sum(each.bundle.bytes for each in loaded) > UNPACKED_BYTES_MAX:
                raise refused(f"all together have more than {UNPACKED_BYTES_MAX} bytes", "skills")
        return loaded

    async def put(self, owner: Owner, container_id: str, skills: Sequence[LoadedSkill]) -> None:
        """Write them into the container, which has each of them when it is whole."""
        for skill in skills:
            with zip_reader(skill.file) as read:
                for file in skill.bundle.files:
                    place = f"skills/{skill.folder}/{file.path}"
                    writing = self._client.writing(owner, container_id, place, is_skill=True)
                    async with writing as write:
                        for piece in read(file.entry):
                            await write(piece)
            await self._client.add_skill(owner, container_id, skill.entry)


def _inline(skill: Skill, at: str) -> WantedSkill:
    data = _data(skill, at)
    name, description = skill.name or "", skill.description or ""
    folder = f"{name}-{sha256(data.encode()).hexdigest()[:8]}"

    def unpack() -> LoadedSkill:
        if len(data) > ZIP_BYTES_MAX * 4 // 3 + 4:
            raise refused(f"it is larger than {ZIP_BYTES_MAX} bytes", at)
        try:
            packed = from_base64(data)
        except ValueError:
            raise refused("it is not a zip in base64", at) from None
        return LoadedSkill(folder, inline_bundle(name, description, packed, at), BytesIO(packed))

    return WantedSkill(folder, partial(asyncio.to_thread, unpack))


# --- what the model hears ---------------------------------------------------------------------------


def note(skills: Sequence[SkillEntry], ahead: TurnAhead) -> tuple[Item, ...]:
    """What the model reads of the skills of its container that its history does not tell it of."""
    untold = [*skills]
    for item in _shown(ahead) if skills else ():
        if item.raw.startswith(NOTE):
            untold = [skill for skill in untold if skill.path.encode() not in item.raw]
    lines = [f"- {each.name}: {each.description} (read {each.path} first)" for each in untold]
    return (user_message("\n".join([HEAD, *lines])),) if lines else ()


def _shown(ahead: TurnAhead) -> Iterator[Item]:
    """What the model of this turn was given, as far as it still sees it."""
    yield from ahead.given
    link: Past | None = ahead.parent
    while link is not None:
        for one in link.rounds:
            yield from one.given
        link = above(link)
