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
    AsyncGenerator,
    Callable,
    Container,
    Iterator,
    Mapping,
    Sequence,
)
from contextlib import ExitStack, aclosing, suppress
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
    SkillEntry,
)
from segue.sandbox.messages import Container as About
from segue.sandbox.output import chars_of
from segue.sandbox.skills import SkillRack, Supplies, WantedSkill, check_skills, note
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
    Message,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
    ShellTimeout,
)
from segue.wire.requests import Whole
from segue.wire.tools import (
    SHELL_PARAMETERS,
    FunctionTool,
    Offer,
    ShellEnvironment,
    ShellTool,
    ToolDefinition,
    Tools,
)

NAME = SCOPE = "shell"
ABOUT = (
    "Runs commands in a shell of a container of its own (Linux, {network}, no sudo, no terminal). Each command is run "
    "in a new shell in /mnt/data: variables and `cd` do not last, files and background processes do. Files for the "
    "user go to /mnt/data; link them as [name](sandbox:/mnt/data/name)."
)
NO_NETWORK = "no network"
# The same for all requests: which domains a container may reach must not change the head of a prompt.
SOME_NETWORK = "network only for HTTP and HTTPS to allowed domains, by the proxy that is set"
# Said once where a history has commands of another container.
GONE = "Commands run in a new container from here on: files that earlier commands have made in /mnt/data are not in it."
# More in one call than any model writes on purpose.
COMMANDS_MAX = 64
# Files of a container that an answer may link, and that a request may bring.
CITED_MAX = 1_000
FILES_MAX = 32
# How far back a container is looked for: a turn without a shell, or a compaction, may be in between.
BACK_MAX = 8
# For starting the container, beyond the time of the commands.
START_S = 30.0


class _Reference(Struct, frozen=True, tag_field="type", tag="container_reference"):
    container_id: str


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
    timeout_ms: Whole | None = None
    max_output_length: Whole | None = None


_shown: msgspec.json.Decoder[list[_ShownTool]] = msgspec.json.Decoder(list[_ShownTool])
_raws: msgspec.json.Decoder[list[Raw]] = msgspec.json.Decoder(list[Raw])


def shell(client: KeeperClient, s_max: float, supplies: Supplies | None = None) -> HostedTool:
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
    preparation = Preparation(client, supplies)
    return HostedTool(
        name=NAME,
        definitions=(ShellTool,),
        key=lambda definition: NAME,
        kinds=(cast("AnyHostedKind", kind),),
        streamed=_streamed,
        offers=partial(_offers, _offer(SOME_NETWORK if client.domains else NO_NETWORK)),
        check=partial(check, client.domains),
        prepare=preparation.prepare,
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
        check_skills(place.skills or (), f"{at}.skills", may)
        if place.skills and place.type != "container_auto":
            raise _refused(f"{at}.skills", "left out with a 'container_reference'")
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


def _refused(param: str, wanted: str) -> InvalidRequest:
    message = f"Invalid value for '{param}': it must be {wanted}."
    return InvalidRequest(message, code="invalid_value", param=param)


# --- the container of a turn ----------------------------------------------------------------------------


class Preparation:
    """Finds or makes the container of a turn."""

    def __init__(self, client: KeeperClient, supplies: Supplies | None) -> None:
        self._client = client
        self._supplies = supplies
        self.rack = SkillRack(client, supplies)

    async def prepare(self, ahead: TurnAhead) -> Prepared:
        """The tools with the container that the turn uses, and what its model must hear of it."""
        found = next(contained(ahead.tools.definitions), None)
        if found is None:
            return Prepared(ahead.shown)
        index, place = found
        at = f"tools[{index}].environment"
        try:
            container_id, skills, is_new = await self.container(ahead, place, at)
        except ApiError as error:
            error.param = error.param or at
            raise
        raws = _raws.decode(ahead.shown)
        environment = _Reference(container_id)
        raws[index] = Raw(encode({"type": NAME, "environment": environment}))
        leave = partial(self._leave, ahead.owner, container_id) if is_new else None
        # A history may be long: it is not walked on the event loop.
        notes = await asyncio.to_thread(note, skills, ahead) if skills else ()
        gone = await asyncio.to_thread(_gone, ahead) if is_new else ()
        return Prepared(Raw(encode(raws)), notes=(*notes, *gone), leave=leave)

    async def _leave(self, owner: Owner, container_id: str) -> None:
        """End a container that its turn made and has not used: clients that keep no state would collect them."""
        with suppress(ApiError):
            await self._client.delete(owner, container_id, unless_used=True)

    async def container(
        self, ahead: TurnAhead, place: ShellEnvironment, at: str
    ) -> tuple[str, list[SkillEntry], bool]:
        """The container that is asked for: that one, or of an earlier turn, or a new one; the skills in it that its
        model may use; and whether it is new."""
        owner = ahead.owner
        known = await self.known(ahead, place)
        if known is not None and place.type == "container_reference":
            return known.id, known.skills, False
        skills = await self.rack.find(owner, place.skills or (), f"{at}.skills")
        if known is not None:
            has = {skill.folder: skill for skill in known.skills}
            missing = [skill for skill in skills if skill.folder not in has]
            has |= await self._add_skills(owner, known.id, missing)
            return known.id, [has[skill.folder] for skill in skills], False
        spec = ContainerSpec(
            memory_limit=place.memory_limit or "1g",
            is_volatile=not ahead.is_stored,
            domains=self.domains(ahead, place),
        )
        made, has = await self.make(owner, spec, place.file_ids or (), skills)
        return made.id, [*has.values()], True

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
        for container_id in _shown_before(ahead):
            if (reused := await self._reusable(ahead, container_id, domains)) is not None:
                return reused
        called = await asyncio.to_thread(last_called, ahead)
        return None if called is None else await self._reusable(ahead, called, domains)

    async def make(
        self,
        owner: Owner,
        spec: ContainerSpec,
        file_ids: Sequence[str],
        skills: Sequence[WantedSkill] = (),
        container_id: str = "",
    ) -> tuple[About, dict[str, SkillEntry]]:
        """A new container with these files and skills; none stays where they cannot be put there."""
        with ExitStack() as stack:
            # Before the container: a bad skill leaves nothing behind.
            loaded = await self.rack.load(skills, stack)
            made = await self._client.create(owner, container_id or new_id("cntr"), spec)
            try:
                for each in file_ids:
                    await self.copy(owner, made.id, each)
                await self.rack.put(owner, made.id, loaded)
            except BaseException:
                # Also when the client leaves meanwhile.
                await asyncio.shield(self._client.delete(owner, made.id))
                raise
        return made, {skill.folder: skill.entry for skill in loaded}

    async def _add_skills(
        self, owner: Owner, container_id: str, skills: Sequence[WantedSkill]
    ) -> dict[str, SkillEntry]:
        with ExitStack() as stack:
            loaded = await self.rack.load(skills, stack)
            await self.rack.put(owner, container_id, loaded)
        return {skill.folder: skill.entry for skill in loaded}

    async def _reusable(
        self, ahead: TurnAhead, container_id: str, domains: tuple[str, ...]
    ) -> About | None:
        """The container of an earlier turn, if it can be used: it is alive, keeps no more than this turn may, and
        reaches what this turn asks for and nothing else."""
        try:
            # The shell's container is not used yet when the code of the same turn finds it.
            is_earlier = container_id != container_of(ahead.shown)
            about = await self._client.find(ahead.owner, container_id, refreshes=is_earlier)
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
            _, _, parts = await self._upload(owner, upload_id)
            await parts.aclose()

    async def copy(self, owner: Owner, container_id: str, upload_id: str) -> str:
        """Put a file that the client has uploaded into the container; returns its path."""
        name, _, parts = await self._upload(owner, upload_id)
        async with aclosing(parts), self._client.writing(owner, container_id, name) as write:
            async for part in parts:
                await write(part)
        return name

    async def _upload(
        self, owner: Owner, upload_id: str
    ) -> tuple[str, int, AsyncGenerator[bytes, None]]:
        if self._supplies is None:
            raise InvalidRequest("This server has no Files API.", code="unsupported_value")
        return await self._supplies.open_file(owner, upload_id)


def _shown_before(ahead: TurnAhead) -> Iterator[str]:
    """The containers of this turn's other tools, and of the nearest parent that had one."""
    if known := container_of(ahead.shown):
        yield known
    turn = ahead.parent
    for _ in range(BACK_MAX):
        if turn is None:
            break
        if known := container_of(turn.response.tools):
            yield known
            break
        turn = turn.parent


def last_called(ahead: TurnAhead) -> str | None:
    """The container of the newest call in the history. Slow where the history is long."""
    items = chain(reversed(ahead.given), ahead.earlier())
    return next(filter(None, (container_in(item.value) for item in items)), None)


def _gone(ahead: TurnAhead) -> tuple[Item, ...]:
    """What the model hears of a new container where it has used another one, unless it was told so since."""
    for item in chain(reversed(ahead.given), ahead.earlier()):
        if isinstance(item.value, Message) and GONE.encode() in item.raw:
            break
        if container_in(item.value):
            return (user_message(GONE),)
    return ()


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
            whole = partial(_result, call, asked, tuple(outputs))
            outputs.append(await self._run(call, asked, index, command, left_s, whole))
            done = [Raw(encode(outputs[-1]))]
            await call.emit(ShellOutputDone, command_index=index, output=done)
        if not asked.commands:
            outputs.append(_error("The call has no command."))
        sources = await files_of(self._client, call.owner, asked.container_id)
        return structs.replace(_result(call, asked, tuple(outputs)), sources=sources)

    async def _run(
        self,
        call: HostedCall,
        asked: _Asked,
        index: int,
        command: str,
        s_max: float,
        whole: Callable[[str], ToolResult],
    ) -> ShellOutput:
        """One command, to its end or to its time. `whole`: all results, if this one has printed so much."""
        said = {"stdout": "", "stderr": ""}

        async def show(printed: Printed | CommandEnd) -> None:
            for stream in said:
                if text := getattr(printed, stream):
                    said[stream] += text
                    delta = Raw(encode({stream: text}))
                    await call.emit(ShellOutputDelta, command_index=index, delta=delta)
            call.show(said["stdout"], whole)

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


def _result(
    call: HostedCall, asked: _Asked, outputs: tuple[ShellOutput, ...], printed: str | None = None
) -> ToolResult:
    """These outputs; `printed`: and that of a command that has not ended yet."""
    running = () if printed is None else (ShellOutput(printed, "", ShellExit(0)),)
    output = ShellCallOutput(
        id=call.item_id,
        call_id=call.name,
        output=[*outputs, *running],
        max_output_length=_unless_none(asked.max_output_length),
        status="completed",
    )
    return ToolResult("", as_item(output))


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
