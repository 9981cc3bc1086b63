"""A made-up hosted tool: a shell in a container that is not there. It prints what it is told, word by word.

This file is all that such a tool needs, beside a name in the setting `hosted_tools`. The request says who runs the
commands: a shell without an environment, or a local one, is the client's as ever; one in a container is run here. What
is printed streams, and is an item of its own. `wait PATH` prints a word and then waits until the file is there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import cast

import msgspec
from msgspec import Raw, structs

from segue.seams.tools import (
    AnyHostedKind,
    HostedCall,
    HostedKind,
    HostedTool,
    ToolRequest,
    ToolResult,
)
from segue.settings.values import Settings
from segue.web.fetch import Fetcher
from segue.wire.calls import arguments_of, shell_action
from segue.wire.codec import as_item, encode
from segue.wire.drafts import SHELL_COMMANDS, Draft, Streamed
from segue.wire.effects import Effects
from segue.wire.events import ShellOutputDelta, ShellOutputDone
from segue.wire.items import ItemValue, ShellCall, ShellCallOutput, ShellExit, ShellOutput
from segue.wire.tools import (
    SHELL_PARAMETERS,
    FunctionTool,
    Offer,
    ShellTool,
    ToolDefinition,
    Tools,
)
from tests.support import until

CONTAINER = Raw(b'{"type":"container_reference","container_id":"cntr_1"}')
OFFER = Offer(
    FunctionTool(name="shell", description="Prints words.", parameters=SHELL_PARAMETERS),
    builtin="shell",
    execution="server",
)


class EchoShell:
    async def call(self, call: HostedCall) -> ToolResult:
        """Print each command, word by word, while the client reads."""
        outputs: list[ShellOutput] = []
        for index, command in enumerate(msgspec.json.decode(call.arguments)["commands"]):
            make, said = partial(_printing, call, tuple(outputs)), ""
            for word in command.split():
                delta = Raw(encode({"stdout": f"{word} "}))
                await call.emit(ShellOutputDelta, command_index=index, delta=delta)
                said += f"{word} "
                call.show(said, make)
            if command.startswith("wait "):
                await until(Path(command.removeprefix("wait ")).exists)
            outputs.append(ShellOutput(f"{command} ", "", ShellExit(0)))
            done = [Raw(encode(outputs[-1]))]
            await call.emit(ShellOutputDone, command_index=index, output=done)
        return ToolResult("", as_item(_output(call.item_id, call.name, outputs, "completed")))


def _printing(call: HostedCall, outputs: tuple[ShellOutput, ...], said: str) -> ToolResult:
    """The result if the command that runs had ended with this."""
    shown = [*outputs, ShellOutput(said, "", ShellExit(0))]
    return ToolResult("", as_item(_output(call.item_id, call.name, shown, "completed")))


def _output(item_id: str, call_id: str, output: list[ShellOutput], status: str) -> ShellCallOutput:
    return ShellCallOutput(id=item_id, call_id=call_id, output=output, status=status)


def _answer(call: ItemValue, new_id: Callable[[type[ItemValue]], str]) -> ShellCallOutput | None:
    if not isinstance(call, ShellCall) or call.environment != CONTAINER:
        return None
    return _output(new_id(ShellCallOutput), call.call_id, [], "in_progress")


def _request(call: ShellCall) -> ToolRequest:
    return ToolRequest("shell", call.call_id, encode(arguments_of(call)).decode())


KIND: HostedKind[ShellCall, ShellCallOutput] = HostedKind(
    struct=ShellCallOutput,
    tool=EchoShell(),
    request=_request,
    begun=(),
    emitted=(ShellOutputDelta, ShellOutputDone),
    answer=_answer,
    failed=lambda value, message, code: structs.replace(
        value, status="completed", output=[ShellOutput("", message, ShellExit(1))]
    ),
    stopped=lambda value: structs.replace(value, status="incomplete"),
)


def _call(draft: Draft) -> ShellCall:
    """As the model writes it: like the client's, in the container."""
    return ShellCall(
        id=draft.id,
        status=draft.status,
        call_id=draft.call_id,
        action=shell_action(draft.text, draft.commands),
        environment=CONTAINER,
    )


def _is_ours(definition: ToolDefinition) -> bool:
    place = definition.environment if isinstance(definition, ShellTool) else None
    return bool(place) and place.type.startswith("container")


def _offers(tools: Tools, effects: Effects, tools_before: Tools | None) -> Sequence[Offer]:
    return [OFFER] if any(map(_is_ours, tools.known)) else []


TOOL = HostedTool(
    name="shell",
    definitions=(ShellTool,),
    key=lambda definition: "shell",
    kinds=(cast("AnyHostedKind", KIND),),
    streamed=lambda shown: {ShellCall: Streamed(SHELL_COMMANDS, _call)},
    offers=_offers,
)


def echo_shell(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
    """What `hosted_tools` names."""
    return TOOL


# --- the same, with a part that is missing or taken -----------------------------------------------


class NoDefinition(ShellTool, tag="no_definition", frozen=True, kw_only=True):
    """A type that the contract does not have."""


def _with_kind(**facts: object) -> HostedTool:
    kind = replace(KIND, **facts)  # type: ignore[arg-type]
    return replace(TOOL, kinds=(cast("AnyHostedKind", kind),))


Build = Callable[[Settings, AsyncExitStack, Fetcher], object]


def _building(tool: object) -> Build:
    return lambda settings, stack, fetcher: tool


without_definition = _building(replace(TOOL, definitions=()))
of_no_contract = _building(replace(TOOL, definitions=(NoDefinition,)))
without_kinds = _building(replace(TOOL, kinds=()))
# The item is the call itself, and nothing says that the work has begun.
without_events = _building(_with_kind(struct=ShellCall, answer=None))
without_prefix = _building(_with_kind(struct=type(None)))
with_strange_scope = _building(replace(TOOL, scope="dance"))
with_taken_name = _building(replace(TOOL, name="mcp"))
twice = _building(replace(TOOL, name="other"))
no_tool = _building("a text")
