"""How does a turn use a shell in a container? The hosted tool `shell`.

The request says who runs the commands: those of a shell without an environment, or of a local one, are the client's;
in a container they are run here. The container is made when the turn is prepared, beside the first prompt, or is the
parent's; the response shows it from its first event on. What a command prints streams, and is an item of its own.
Trouble while a command runs is an output, never an error of the response.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import (
    Awaitable,
    Callable,
    Container,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import aclosing
from functools import partial
from itertools import chain
from typing import cast

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.egress.domains import asked_domains
from segue.egress.domains import check_scope as check_network_scope
from segue.errors import ApiError, Forbidden, InvalidRequest
from segue.ids import new_id
from segue.sandbox.citations import cite, sources
from segue.sandbox.client import KeeperClient
from segue.sandbox.messages import (
    MEMORY_LIMITS,
    CommandEnd,
    ContainerSpec,
    Printed,
    RunCommand,
)
from segue.sandbox.messages import Container as About
from segue.sandbox.output import chars_of
from segue.sandbox.skills import SKILLS_MAX, Bundle, folder_of, note, unpack
from segue.seams.history import Owner
from segue.seams.tools import (
    AnyHostedKind,
    HostedCall,
    HostedKind,
    HostedTool,
    Prepared,
    Source,
    ToolRequest,
    ToolResult,
    TurnAhead,
)
from segue.wire.calls import shell_action
from segue.wire.codec import as_item, encode, user_message
from segue.wire.drafts import SHELL_COMMANDS, Draft, Streamed
from segue.wire.effects import Effects
from segue.wire.events import ShellOutputDelta, ShellOutputDone
from segue.wire.items import (
    CodeInterpreterCall,
    Item,
    ItemValue,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
    ShellTimeout,
)
from segue.wire.tools import (
    SHELL_PARAMETERS,
    FunctionTool,
    Offer,
    ShellEnvironment,
    ShellTool,
    Skill,
    ToolDefinition,
    Tools,
)

NAME = SCOPE = "shell"
SKILLS_SCOPE = "skills"
ABOUT = (
    "Runs commands in a shell of a container of its own (Linux, {network}, no sudo, no terminal). Each command is run "
    "in a new shell in /mnt/data: variables and `cd` do not last, files and background processes do. Files for the "
    "user go to /mnt/data; link them as [name](sandbox:/mnt/data/name)."
)
NO_NETWORK = "no network"
# The same for all requests: which domains a container may reach must not change the head of a prompt.
SOME_NETWORK = "network only for HTTP and HTTPS to allowed domains, by the proxy that is set"
# More in one call than any model writes on purpose.
COMMANDS_MAX = 64
# Files of a container that an answer may link, and that a request may bring.
CITED_MAX = 1_000
FILES_MAX, FILE_BYTES_MAX = 32, 512 * 1024 * 1024
# Notes of turns that were prepared and never begun are few.
NOTES_MAX = 1_000
# For starting the container, beyond the time of the commands.
START_S = 30.0

# Reads a file that the owner has uploaded: its name and its bytes, in pieces.
ReadUpload = Callable[[Owner, str, int], Awaitable[tuple[str, bytes]]]


class _Reference(Struct, frozen=True, tag_field="type", tag="container_reference"):
    container_id: str


class _Source(Struct, frozen=True):
    type: str
    data: str


class _ShownEnvironment(Struct, frozen=True):
    type: str = ""
    container_id: str | None = None


class _ShownTool(Struct, frozen=True):
    type: str = ""
    environment: _ShownEnvironment | None = None


class _Asked(Struct, frozen=True):
    """What a call asks for."""

    container_id: str
    commands: list[str]
    timeout_ms: int | None = None
    max_output_length: int | None = None


_shown: msgspec.json.Decoder[list[_ShownTool]] = msgspec.json.Decoder(list[_ShownTool])
_raws: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])


def shell(client: KeeperClient, s_max: float, read_upload: ReadUpload | None = None) -> HostedTool:
    """The shell in the containers of a keeper; a command may take so long."""
    kind: HostedKind[ShellCall, ShellCallOutput] = HostedKind(
        struct=ShellCallOutput,
        tool=ContainerShell(client, s_max),
        request=_request,
        begun=(),
        emitted=(ShellOutputDelta, ShellOutputDone),
        answer=_answer,
        failed=lambda value, message, code: structs.replace(
            value, status="completed", output=[_error(message)]
        ),
        stopped=lambda value: structs.replace(value, status="incomplete"),
    )
    preparation = Preparation(client, read_upload)
    return HostedTool(
        name=NAME,
        definitions=(ShellTool,),
        key=lambda definition: NAME,
        kinds=(cast("AnyHostedKind", kind),),
        streamed=_streamed,
        offers=partial(_offers, _offer(SOME_NETWORK if client.domains else NO_NETWORK)),
        check=partial(check, client.domains),
        prepare=preparation.prepare,
        notes=preparation.notes,
        cite=cite,
        call_s_max=s_max + START_S,
    )


# --- what a request asks for ---------------------------------------------------------------------------


def contained(tools: Sequence[ToolDefinition]) -> Iterator[tuple[int, ShellEnvironment]]:
    """The shells of these tools that are in a container, with their places."""
    for index, tool in enumerate(tools):
        if isinstance(tool, ShellTool) and (place := tool.environment) and place.type != "local":
            yield index, place


def _offer(network: str) -> Offer:
    about = ABOUT.format(network=network)
    tool = FunctionTool(name="shell", description=about, parameters=SHELL_PARAMETERS)
    return Offer(tool, builtin="shell", execution="server")


def _offers(
    offer: Offer, tools: Tools, effects: Effects, tools_before: Tools | None
) -> Sequence[Offer]:
    return [offer] if any(contained(tools.definitions)) else []


def check(domains: tuple[str, ...], tools: Tools, may: Container[str]) -> None:
    """Refuse a shell in a container that the key may not use, or that is asked for in a way that nothing here has."""
    for index, place in contained(tools.definitions):
        if SCOPE not in may:
            raise Forbidden(f"This API key may not run commands: it has not the scope '{SCOPE}'.")
        at = f"tools[{index}].environment"
        if place.type not in ("container_auto", "container_reference"):
            raise _refused(f"{at}.type", "'container_auto', 'container_reference' or 'local'")
        if place.type == "container_reference" and not place.container_id:
            raise InvalidRequest(
                f"Missing required parameter: '{at}.container_id'.", param=f"{at}.container_id"
            )
        if place.skills:
            check_skills(place, f"{at}.skills", may)
        check_place(place, at, domains, may)


def check_place(
    place: ShellEnvironment, at: str, domains: tuple[str, ...], may: Container[str]
) -> None:
    """Refuse a container that nothing here can be."""
    if place.memory_limit and place.memory_limit not in MEMORY_LIMITS:
        raise _refused(f"{at}.memory_limit", ", ".join(MEMORY_LIMITS))
    if place.file_ids and len(place.file_ids) > FILES_MAX:
        raise _refused(f"{at}.file_ids", f"at most {FILES_MAX} files")
    asked = asked_domains(place.network_policy, f"{at}.network_policy", domains, may)
    if asked and place.type != "container_auto":
        raise _refused(f"{at}.network_policy", "left out with a 'container_reference'")


def check_skills(place: ShellEnvironment, at: str, may: Container[str]) -> None:
    """Refuse skills that the key may not bring, and those that are not in the request itself."""
    if SKILLS_SCOPE not in may:
        message = f"This API key may not bring skills: it has not the scope '{SKILLS_SCOPE}'."
        raise Forbidden(message)
    if place.type != "container_auto":
        raise _refused(at, "left out with a 'container_reference'")
    if len(place.skills or ()) > SKILLS_MAX:
        raise _refused(at, f"at most {SKILLS_MAX} skills")
    for index, skill in enumerate(place.skills or ()):
        if skill.type == "skill_reference":
            message = "This server keeps no skills: send the skill inline."
            raise InvalidRequest(message, code="skill_not_found", param=f"{at}[{index}]")
        _source(skill, f"{at}[{index}]")


def _source(skill: Skill, at: str) -> str:
    """The zip of an inline skill, in base64."""
    try:
        source = msgspec.json.decode(skill.source or b"", type=_Source)
    except msgspec.MsgspecError:
        raise _refused(f"{at}.source", "a zip in base64") from None
    if skill.type != "inline" or source.type != "base64" or not source.data:
        raise _refused(at, "an inline skill with a source in base64")
    return source.data


def _refused(param: str, wanted: str) -> InvalidRequest:
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, code="invalid_value", param=param)


# --- the container of a turn ----------------------------------------------------------------------------


class Preparation:
    """Finds or makes the container of a turn."""

    def __init__(self, client: KeeperClient, read_upload: ReadUpload | None) -> None:
        self._client = client
        self._read_upload = read_upload
        # What models are to read of their containers, until their turns begin.
        self._notes: dict[str, Item] = {}

    async def prepare(self, ahead: TurnAhead) -> Prepared:
        """The tools with the container that the turn uses."""
        found = next(contained(ahead.tools.definitions), None)
        if found is None:
            return Prepared(ahead.shown)
        index, place = found
        try:
            container_id = await self.container(ahead, place)
        except ApiError as error:
            error.param = error.param or f"tools[{index}].environment"
            raise
        raws = _raws.decode(ahead.shown)
        environment = _Reference(container_id)
        raws[index] = Raw(encode({"type": NAME, "environment": environment}))
        return Prepared(Raw(encode(raws)))

    async def container(self, ahead: TurnAhead, place: ShellEnvironment) -> str:
        """The container that is asked for: that one, or of an earlier turn, or a new one."""
        owner = ahead.owner
        known = await self.known(ahead, place)
        skills = [(skill, _source(skill, "skills")) for skill in place.skills or ()]
        bundles = {folder_of(skill.name or "", data): (skill, data) for skill, data in skills}
        if known is not None:
            has = known.skills
            missing = [each for folder, each in bundles.items() if folder not in has]
            await self._add_skills(owner, known.id, missing)
            return known.id
        # Before the container: a bad skill leaves nothing behind.
        unpacked = await self._unpack([*bundles.values()])
        spec = ContainerSpec(
            memory_limit=place.memory_limit or "1g",
            is_volatile=not ahead.is_stored,
            domains=self.domains(ahead, place),
        )
        made = await self.make(owner, spec, place.file_ids or (), unpacked)
        return made.id

    def domains(self, ahead: TurnAhead, place: ShellEnvironment) -> tuple[str, ...]:
        """What a new container may reach."""
        at = "tools.environment.network_policy"
        return asked_domains(place.network_policy, at, self._client.domains, ahead.may)

    async def known(self, ahead: TurnAhead, place: ShellEnvironment) -> About | None:
        """The container that is there already: the one that is named, or that of an earlier turn."""
        if place.type == "container_reference":
            about = await self._client.find(ahead.owner, place.container_id or "")
            if about.status != "active":
                message = f"Container with id '{about.id}' has expired."
                raise InvalidRequest(message, code="container_expired")
            if about.domains:
                check_network_scope(ahead.may)
            return about
        domains = self.domains(ahead, place)
        for container_id in _before(ahead):
            if (reused := await self._reusable(ahead, container_id, domains)) is not None:
                return reused
        return None

    async def make(
        self,
        owner: Owner,
        spec: ContainerSpec,
        file_ids: Sequence[str],
        bundles: Sequence[Bundle] = (),
        container_id: str = "",
    ) -> About:
        """A new container with these files and skills; none stays where they cannot be put there."""
        made = await self._client.create(owner, container_id or new_id("cntr"), spec)
        try:
            for each in file_ids:
                await self.copy(owner, made.id, each)
            await self._write_skills(owner, made.id, bundles)
        except ApiError:
            await self._client.delete(owner, made.id)
            raise
        return made

    async def _add_skills(
        self, owner: Owner, container_id: str, skills: list[tuple[Skill, str]]
    ) -> None:
        await self._write_skills(owner, container_id, await self._unpack(skills))

    async def _unpack(self, skills: list[tuple[Skill, str]]) -> list[Bundle]:
        """The skills with their files. Beside the event loop: a zip may be large."""
        return [
            await asyncio.to_thread(
                unpack, skill.name or "", skill.description or "", data, "tools.environment.skills"
            )
            for skill, data in skills
        ]

    async def _write_skills(
        self, owner: Owner, container_id: str, bundles: Sequence[Bundle]
    ) -> None:
        """Put the skills into the container; the model reads of them when the turn begins."""
        for bundle in bundles:
            for path, data in bundle.files.items():
                place = f"skills/{bundle.folder}/{path}"
                await self._client.write_file(owner, container_id, place, data, is_skill=True)
        if bundles:
            self._notes[container_id] = user_message(note(bundles))
            if len(self._notes) > NOTES_MAX:
                del self._notes[next(iter(self._notes))]

    def notes(self, shown: Raw) -> Sequence[Item]:
        """What the model reads of its container, once."""
        if not self._notes:
            return ()
        item = self._notes.pop(container_of(shown) or "", None)
        return () if item is None else (item,)

    async def _reusable(
        self, ahead: TurnAhead, container_id: str, domains: tuple[str, ...]
    ) -> About | None:
        """The container of an earlier turn, if it can be used: it is alive, keeps no more than this turn may, and
        reaches what this turn asks for and nothing else."""
        try:
            about = await self._client.find(ahead.owner, container_id)
        except ApiError as error:
            if error.code != "container_not_found":
                raise
            return None
        is_fitting = about.status == "active" and (about.is_volatile or ahead.is_stored)
        is_fitting = is_fitting and set(about.domains) == set(domains)
        return about if is_fitting else None

    async def check_uploads(self, owner: Owner, upload_ids: Sequence[str]) -> None:
        """Refuse files that are not there; they are not read yet."""
        for upload_id in upload_ids:
            try:
                await self._upload(owner, upload_id, 0)
            except InvalidRequest:
                # It is there, and has some bytes.
                if self._read_upload is None:
                    raise

    async def copy(self, owner: Owner, container_id: str, upload_id: str) -> str:
        """Put a file that the client has uploaded into the container; returns its path."""
        name, data = await self._upload(owner, upload_id, FILE_BYTES_MAX)
        await self._client.write_file(owner, container_id, name, data)
        return name

    async def _upload(self, owner: Owner, upload_id: str, bytes_max: int) -> tuple[str, bytes]:
        if self._read_upload is None:
            raise InvalidRequest("This server has no Files API.", code="unsupported_value")
        return await self._read_upload(owner, upload_id, bytes_max)


def _before(ahead: TurnAhead) -> Iterator[str]:
    """The containers of this turn's other tools and of earlier turns, the newest first: of the parent, or of a call."""
    if known := container_of(ahead.shown):
        yield known
    if ahead.shown_before is not None and (known := container_of(ahead.shown_before)):
        yield known
    for item in chain(reversed(ahead.given), ahead.earlier()):
        if container_id := container_in(item.value):
            yield container_id
            return


def container_of(shown: Raw) -> str | None:
    """The container of a response, by its tools."""
    for tool in _shown.decode(shown):
        if tool.type == NAME and tool.environment is not None and tool.environment.container_id:
            return tool.environment.container_id
    return None


def container_in(value: ItemValue) -> str | None:
    """The container of a call, of the shell or of Python code."""
    if isinstance(value, CodeInterpreterCall):
        return value.container_id or None
    return _reference(value)


def _reference(value: ItemValue) -> str | None:
    """The container of a call."""
    if not isinstance(value, ShellCall) or not isinstance(value.environment, Raw):
        return None
    try:
        place = msgspec.json.decode(value.environment, type=_ShownEnvironment)
    except msgspec.MsgspecError:
        return None
    return place.container_id if place.type == "container_reference" else None


# --- calls ----------------------------------------------------------------------------------------------


def _streamed(shown: Raw) -> Mapping[type[ItemValue], Streamed]:
    """As the model writes a call: like the client's, in the container of the turn."""
    container_id = container_of(shown)
    if container_id is None:
        return {}
    environment = Raw(encode(_Reference(container_id)))

    def build(draft: Draft) -> ShellCall:
        return ShellCall(
            id=draft.id,
            status=draft.status,
            call_id=draft.call_id,
            action=shell_action(draft.text, draft.commands),
            environment=environment,
        )

    return {ShellCall: Streamed(SHELL_COMMANDS, build)}


def _answer(call: ItemValue, new_item: Callable[[type[ItemValue]], str]) -> ShellCallOutput | None:
    if not isinstance(call, ShellCall) or call.status != "completed" or _reference(call) is None:
        return None
    # As recorded of OpenAI: it is "completed" from its beginning.
    return ShellCallOutput(
        id=new_item(ShellCallOutput),
        call_id=call.call_id,
        output=[],
        max_output_length=_unless_none(call.action.max_output_length),
        status="completed",
    )


def _request(call: ShellCall) -> ToolRequest:
    action = call.action
    asked = _Asked(
        _reference(call) or "",
        action.commands,
        action.timeout_ms or None,
        action.max_output_length or None,
    )
    return ToolRequest(NAME, call.call_id, encode(asked).decode())


class ContainerShell:
    """Runs the commands of a call, one after the other."""

    def __init__(self, client: KeeperClient, s_max: float) -> None:
        self._client = client
        self._s_max = s_max

    async def call(self, call: HostedCall) -> ToolResult:
        """Run them; what they print is sent meanwhile."""
        asked = msgspec.json.decode(call.arguments, type=_Asked)
        wanted_s = self._s_max if asked.timeout_ms is None else max(0, asked.timeout_ms) / 1000
        until = time.monotonic() + min(wanted_s, self._s_max)
        outputs: list[ShellOutput] = []
        for index, command in enumerate(asked.commands[:COMMANDS_MAX]):
            left_s = max(0.0, until - time.monotonic())
            outputs.append(await self._run(call, asked, index, command, left_s))
            done = [Raw(encode(outputs[-1]))]
            await call.emit(ShellOutputDone, command_index=index, output=done)
        if not asked.commands:
            outputs.append(_error("The call has no command."))
        output = ShellCallOutput(
            id=call.item_id,
            call_id=call.name,
            output=outputs,
            max_output_length=_unless_none(asked.max_output_length),
            status="completed",
        )
        return ToolResult(
            "", as_item(output), await files_of(self._client, call.owner, asked.container_id)
        )

    async def _run(
        self, call: HostedCall, asked: _Asked, index: int, command: str, s_max: float
    ) -> ShellOutput:
        """One command, to its end or to its time."""
        said = {"stdout": "", "stderr": ""}

        async def show(printed: Printed | CommandEnd) -> None:
            for stream in said:
                if text := getattr(printed, stream):
                    said[stream] += text
                    delta = Raw(encode({stream: text}))
                    await call.emit(ShellOutputDelta, command_index=index, delta=delta)

        began = time.monotonic()
        request = RunCommand(
            call.owner, asked.container_id, command, s_max, chars_of(asked.max_output_length)
        )
        end = CommandEnd(1)
        try:
            async with aclosing(self._client.run(request)) as running:
                async for piece in running:
                    await show(piece)
                    if isinstance(piece, CommandEnd):
                        end = piece
        except ApiError as error:
            end = CommandEnd(1, note=error.message)
        if end.note:
            await show(Printed(stderr=f"\n[{end.note}]\n"))
        took_s = time.monotonic() - began
        self._client.note_command(
            call.owner, asked.container_id, end.exit_code, end.printed_bytes, took_s
        )
        outcome = ShellTimeout() if end.exit_code is None else ShellExit(end.exit_code)
        return ShellOutput(said["stdout"], said["stderr"], outcome)


async def files_of(client: KeeperClient, owner: Owner, container_id: str) -> tuple[Source, ...]:
    """What an answer may link of a container."""
    try:
        found = await client.list_files(owner, container_id)
    except ApiError:
        return ()
    newest = sorted(found, key=lambda entry: -entry.changed_at)[:CITED_MAX]
    return sources(container_id, [entry.path for entry in newest])


def _unless_none(length: int | UnsetType | None) -> int | UnsetType:
    return UNSET if length is None else length


def _error(message: str) -> ShellOutput:
    return ShellOutput("", message, ShellExit(1))
