"""What runs the Python code of a turn? One interpreter in a container, which keeps its variables.

The container is the one that the request names, that of the turn's shell, that of an earlier call, or a new one; files
of the input are put there. Trouble while code runs is an output, never an error of the response. Where the container
has ended meanwhile, the code is run in a new one, and the output says what is lost.
"""

from __future__ import annotations

import asyncio
from base64 import b64encode
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import replace
from itertools import chain, takewhile
from time import monotonic

import msgspec
from msgspec import Raw, Struct, UnsetType

from segue.errors import ApiError, Forbidden, InvalidRequest
from segue.ids import new_id
from segue.interpreter.tool import (
    OUTPUTS,
    AskedCode,
    Drawn,
    PrintedLogs,
    code_in,
    code_interpreter,
    text_of,
    written_in,
)
from segue.sandbox.citations import DATA, cite, picture_citations
from segue.sandbox.client import KeeperClient
from segue.sandbox.messages import CommandEnd, ContainerSpec, RunCommand
from segue.sandbox.output import CHARS_USUAL
from segue.sandbox.tool import (
    START_S,
    Preparation,
    check_place,
    container_in,
    files_of,
    last_called,
)
from segue.seams.history import Owner
from segue.seams.tools import HostedCall, HostedTool, Prepared, Source, ToolResult, TurnAhead
from segue.wire.codec import as_item, encode
from segue.wire.events import CodeInterpreting
from segue.wire.files import contents
from segue.wire.items import CodeInterpreterCall, InputFile, Item, Message
from segue.wire.requests import RawField
from segue.wire.tools import CodeInterpreterTool, ShellEnvironment, ToolDefinition, Tools

SCOPE = "code"
# What of the pictures of one call is shown to clients; a larger one stays in its container.
PICTURES_BYTES_MAX = 8 * 1024 * 1024
PNG = b"\x89PNG\r\n\x1a\n"
# Containers that no call has needed yet are only names; of so many turns.
UNMADE_MAX = 10_000
ENDED = ("container_expired", "container_not_found")
ANEW = (
    "[The container had ended. This is a new one: files in /mnt/data and variables of earlier code "
    "are lost.]\n"
)


class _Auto(Struct, frozen=True):
    type: str = ""
    file_ids: list[str] | UnsetType | None = msgspec.UNSET
    memory_limit: str | UnsetType | None = msgspec.UNSET
    network_policy: RawField = msgspec.UNSET


class Picture(Source, frozen=True):
    """A picture that code has drawn: an answer cites it also where it does not link it."""


def place_of(definition: CodeInterpreterTool, at: str) -> ShellEnvironment:
    """The container that a definition asks for."""
    raw = definition.container
    if not isinstance(raw, Raw) or bytes(raw) == b"null":
        raise InvalidRequest(f"Missing required parameter: '{at}'.", param=at)
    try:
        asked = msgspec.json.decode(raw, type=str | _Auto)
    except msgspec.MsgspecError as error:
        message = f"Invalid value for '{at}': it must be a container's id or an object. {error}"
        raise InvalidRequest(message, code="invalid_value", param=at) from None
    if isinstance(asked, str):
        return ShellEnvironment("container_reference", container_id=asked)
    if asked.type != "auto":
        message = f"Invalid value for '{at}.type': it must be 'auto'."
        raise InvalidRequest(message, code="invalid_value", param=f"{at}.type")
    return ShellEnvironment(
        "container_auto",
        memory_limit=asked.memory_limit,
        file_ids=asked.file_ids,
        network_policy=asked.network_policy,
    )


def _definitions(tools: Sequence[ToolDefinition]) -> Iterator[tuple[str, CodeInterpreterTool]]:
    for index, tool in enumerate(tools):
        if isinstance(tool, CodeInterpreterTool):
            yield f"tools[{index}].container", tool


class CodeRunner:
    """Runs code in the containers of a keeper; a `Tool`."""

    def __init__(self, client: KeeperClient, preparation: Preparation, s_max: float) -> None:
        self._client = client
        self._preparation = preparation
        self._s_max = s_max
        # Containers that are made by their first call, and those that took the place of others.
        self._unmade: dict[str, tuple[ContainerSpec, str]] = {}
        self._moved: dict[str, str] = {}

    def as_tool(self) -> HostedTool:
        """The tool that runs its code here."""
        return replace(
            code_interpreter(self),
            check=self.check,
            prepare=self.prepare,
            cite=_cite,
            call_s_max=self._s_max + START_S,
        )

    # --- before the turn ---

    def check(self, tools: Tools, may: Container[str]) -> None:
        """Refuse an interpreter that the key may not use, or that is asked for in a way that nothing here has."""
        for at, definition in _definitions(tools.known):
            if SCOPE not in may:
                raise Forbidden(f"This API key may not run code: it has not the scope '{SCOPE}'.")
            check_place(place_of(definition, at), at, self._client.domains, may)

    async def prepare(self, ahead: TurnAhead) -> Prepared:
        """The container of the turn. A new one is made by the first call: most turns have none. The response shows the
        tool as it came."""
        at, definition = next(_definitions(ahead.tools.known))
        place = place_of(definition, at)
        try:
            known = await self._preparation.known(ahead, place)
            if known is not None:
                items = chain(reversed(ahead.given), ahead.earlier())
                await self._put_files(ahead.owner, known.id, items)
            else:
                await self._preparation.check_uploads(ahead.owner, place.file_ids or ())
        except ApiError as error:
            error.param = error.param or at
            raise
        had_another = known is None and await asyncio.to_thread(last_called, ahead) is not None
        domains = self._preparation.domains(ahead, place)
        spec = _spec(place, domains, is_volatile=not ahead.is_stored)
        name = self._later(spec, ANEW if had_another else "") if known is None else known.id
        written = written_in(name, shows_outputs=OUTPUTS in ahead.include)
        return Prepared(ahead.shown, {CodeInterpreterCall: written})

    def _later(self, spec: ContainerSpec, words: str) -> str:
        """The name of a container that is made when it is needed; its first output begins with these words."""
        container_id = new_id("cntr")
        self._unmade[container_id] = (spec, words)
        if len(self._unmade) > UNMADE_MAX:
            del self._unmade[next(iter(self._unmade))]
        return container_id

    async def _put_files(
        self, owner: Owner, container_id: str, newest_first: Iterable[Item]
    ) -> None:
        """Put the files of these items there that came after the last call in this container: those before it are
        there, and code may have changed them."""
        newer = takewhile(lambda item: container_in(item.value) != container_id, newest_first)
        files = await asyncio.to_thread(
            lambda: [file for item in newer for file in _files_in(item)]
        )
        for name, data in reversed(files):
            content = await asyncio.to_thread(contents, data)
            if content is not None:
                await self._client.write_file(owner, container_id, name, content)

    # --- a call ---

    async def call(self, call: HostedCall) -> ToolResult:
        """Run the code; where its container has ended, in a new one."""
        await call.emit(CodeInterpreting)
        asked = msgspec.json.decode(call.arguments, type=AskedCode)
        container_id = self._moved.get(asked.container_id, asked.container_id)
        began = monotonic()
        printed, end, error = await self._run(call, container_id, asked.code)
        if error is not None and error.code in ENDED and _place(call).type == "container_auto":
            container_id = await self._move(call, asked.container_id, container_id)
            printed, end, error = await self._run(call, container_id, asked.code)
        client = self._client
        took_s = monotonic() - began
        client.note_command(call.owner, container_id, end.exit_code, end.printed_bytes, took_s)
        note = end.note if error is None else error.message
        lines = [f"[{note}]"] if note else []
        lines += [f"[A figure was saved as {DATA}/{name}.]" for name in end.pictures]
        logs = "\n".join([*([printed.removesuffix("\n")] if printed else []), *lines])
        images = await self._images(call.owner, container_id, end.pictures)
        outputs: list[PrintedLogs | Drawn] = [*([PrintedLogs(logs)] if logs else []), *images]
        item = CodeInterpreterCall(
            id=call.item_id,
            code=asked.code,
            container_id=container_id,
            outputs=Raw(encode(outputs)),
            status="completed",
        )
        drawn = [Picture(f"{DATA}/{name}", container_id) for name in end.pictures]
        found = await files_of(client, call.owner, container_id)
        return ToolResult(text_of(outputs), as_item(item), (*found, *drawn))

    async def _run(
        self, call: HostedCall, container_id: str, code: str
    ) -> tuple[str, CommandEnd, ApiError | None]:
        """What the code printed, and how it ended."""
        request = RunCommand(
            call.owner, container_id, code_in(code), self._s_max, CHARS_USUAL, kind="python"
        )
        pieces: list[str] = []
        end = CommandEnd(1)
        try:
            pieces.append(await self._make(call, container_id))
            async with aclosing(self._client.run(request)) as running:
                async for piece in running:
                    pieces.append(piece.stdout + piece.stderr)
                    if isinstance(piece, CommandEnd):
                        end = piece
        except ApiError as error:
            return "".join(pieces), end, error
        return "".join(pieces), end, None

    async def _make(self, call: HostedCall, container_id: str) -> str:
        """Make the container, if it is not made yet, with the files of the conversation; what is to be said of it."""
        later = self._unmade.pop(container_id, None)
        if later is None:
            return ""
        spec, words = later
        try:
            file_ids = _place(call).file_ids or ()
            await self._preparation.make(call.owner, spec, file_ids, container_id=container_id)
        except ApiError:
            self._unmade[container_id] = later
            raise
        if call.scene is not None:
            rounds = [*call.scene.history()]
            items = [item for one in rounds for item in (*one.given, *one.wrote)]
            newest_first = reversed((*items, *call.scene.given))
            await self._put_files(call.owner, container_id, newest_first)
        return words

    async def _move(self, call: HostedCall, asked_id: str, ended_id: str) -> str:
        """The name of a container in place of one that has ended."""
        try:
            about = await self._client.find(call.owner, ended_id)
            domains, is_volatile = tuple(about.domains), about.is_volatile
        except ApiError:
            # Nobody knows any more what it was: nothing touches a disk or a network.
            domains, is_volatile = (), True
        spec = _spec(_place(call), domains, is_volatile=is_volatile)
        self._moved[asked_id] = new = self._later(spec, ANEW)
        if len(self._moved) > UNMADE_MAX:
            del self._moved[next(iter(self._moved))]
        return new

    async def _images(self, owner: Owner, container_id: str, names: Sequence[str]) -> list[Drawn]:
        """The pictures as clients see them; the names are what the sandbox says."""
        images: list[Drawn] = []
        left = PICTURES_BYTES_MAX
        for name in names:
            data = await self._read(owner, container_id, name, left)
            if data is not None and data.startswith(PNG):
                left -= len(data)
                encoded = await asyncio.to_thread(b64encode, data)
                images.append(Drawn(f"data:image/png;base64,{encoded.decode()}"))
        return images

    async def _read(
        self, owner: Owner, container_id: str, name: str, bytes_max: int
    ) -> bytes | None:
        data = bytearray()
        try:
            async with aclosing(self._client.read_file(owner, container_id, name)) as pieces:
                async for piece in pieces:
                    data += piece
                    if len(data) > bytes_max:
                        return None
        except ApiError:
            return None
        return bytes(data)


def _spec(place: ShellEnvironment, domains: tuple[str, ...], *, is_volatile: bool) -> ContainerSpec:
    memory = place.memory_limit or "1g"
    return ContainerSpec(memory_limit=memory, is_volatile=is_volatile, domains=domains)


def _place(call: HostedCall) -> ShellEnvironment:
    assert isinstance(call.definition, CodeInterpreterTool)
    return place_of(call.definition, "container")


def _files_in(item: Item) -> Iterator[tuple[str, str]]:
    """The files of a message that came with their bytes: name and bytes in base64."""
    if not isinstance(item.value, Message) or isinstance(item.value.content, str):
        return
    for part in item.value.content:
        if isinstance(part, InputFile) and part.file_data and part.filename:
            name = part.filename.rpartition("/")[2]
            if name not in ("", ".", ".."):
                yield name, part.file_data


def _cite(text: str, found: Sequence[Source]) -> Sequence[Struct]:
    """Links to files, and pictures that are not linked."""
    linked = cite(text, found)
    drawn = dict.fromkeys(source for source in found if isinstance(source, Picture))
    return [*linked, *picture_citations([*drawn], linked)]
