"""A tool that prints slowly: what does it gain that the engine reads its output while it runs? `ahead.py` asks.

It stands in the place of a shell in a container. The last message of the user says what it does, as `Order` in JSON. A
call has only one form, so that a model of made weights, which is held to its schema, writes it.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import cast

import msgspec
from msgspec import Raw, Struct, structs

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
from segue.wire.calls import shell_action
from segue.wire.codec import as_item, encode
from segue.wire.drafts import SHELL_COMMANDS, Draft, Streamed
from segue.wire.effects import Effects
from segue.wire.events import ShellOutputDelta, ShellOutputDone
from segue.wire.items import (
    ItemValue,
    Message,
    ShellCall,
    ShellCallOutput,
    ShellExit,
    ShellOutput,
)
from segue.wire.tools import FunctionTool, Offer, ShellTool, ToolDefinition, Tools

CONTAINER = Raw(b'{"type":"container_reference","container_id":"cntr_1"}')
PARAMETERS = Raw(
    b'{"type":"object","properties":{"commands":{"type":"array","items":{"enum":["go"]},"minItems":1,'
    b'"maxItems":1}},"required":["commands"],"additionalProperties":false}'
)
OFFER = Offer(
    FunctionTool(name="shell", description="Prints.", parameters=PARAMETERS),
    builtin="shell",
    execution="server",
)
PARTS_PER_S = 20


class Order(Struct, frozen=True):
    """What is printed: this text, over so long."""

    text: str
    seconds: float
    # Whether the engine may read it meanwhile.
    shows: bool = True
    # What the model gets instead in the end.
    instead: str | None = None


class SlowShell:
    """Prints what it is told."""

    async def call(self, call: HostedCall) -> ToolResult:
        order = _order(call)
        parts = max(1, round(order.seconds * PARTS_PER_S))
        size = -(-len(order.text) // parts)
        began = time.monotonic()
        for number in range(parts):
            await asyncio.sleep(
                max(0.0, began + (number + 1) * order.seconds / parts - time.monotonic())
            )
            part = order.text[number * size : (number + 1) * size]
            delta = Raw(encode({"stdout": part}))
            await call.emit(ShellOutputDelta, command_index=0, delta=delta)
            if order.shows:
                call.show(order.text[: (number + 1) * size], lambda text: _result(call, text))
        result = _result(call, order.text if order.instead is None else order.instead)
        output = cast(ShellCallOutput, result.item.value).output
        await call.emit(ShellOutputDone, command_index=0, output=[Raw(encode(output[0]))])
        return result


def _order(call: HostedCall) -> Order:
    assert call.scene is not None
    (said,) = (one.value for one in call.scene.given if isinstance(one.value, Message))
    text = said.content if isinstance(said.content, str) else getattr(said.content[0], "text", "")
    return msgspec.json.decode(text, type=Order)


def _result(call: HostedCall, text: str) -> ToolResult:
    shown = [ShellOutput(text, "", ShellExit(0))]
    item = ShellCallOutput(id=call.item_id, call_id=call.name, output=shown, status="completed")
    return ToolResult("", as_item(item))


def _answer(call: ItemValue, new_id: Callable[[type[ItemValue]], str]) -> ShellCallOutput | None:
    if not isinstance(call, ShellCall) or call.environment != CONTAINER:
        return None
    return ShellCallOutput(
        id=new_id(ShellCallOutput), call_id=call.call_id, output=[], status="in_progress"
    )


KIND: HostedKind[ShellCall, ShellCallOutput] = HostedKind(
    struct=ShellCallOutput,
    tool=SlowShell(),
    request=lambda call: ToolRequest("shell", call.call_id, "{}"),
    begun=(),
    emitted=(ShellOutputDelta, ShellOutputDone),
    answer=_answer,
    failed=lambda value, message, code: structs.replace(
        value, status="completed", output=[ShellOutput("", message, ShellExit(1))]
    ),
    stopped=lambda value: structs.replace(value, status="incomplete"),
)


def _call(draft: Draft) -> ShellCall:
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


def build(settings: Settings, stack: AsyncExitStack, fetcher: Fetcher) -> HostedTool:
    """What the setting `hosted_tools` names."""
    return TOOL
