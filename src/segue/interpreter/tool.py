"""What do clients and models read of Python code? The hosted tool `code_interpreter`.

The code's own item stays open until the code has run. What it printed, errors included, is its output: for the model in
words, for a client that asks for it (`include`) in the item. A call that a client sends back has the same words, if its
outputs are there. What runs the code is in `runner.py`, and is loaded only where there are sandboxes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import msgspec
from msgspec import UNSET, Raw, Struct, structs

from segue.seams.tools import AnyHostedKind, HostedKind, HostedTool, Tool, ToolRequest, ToolResult
from segue.wire.calls import PYTHON
from segue.wire.codec import encode
from segue.wire.drafts import CODE, Draft, Streamed
from segue.wire.effects import Effects
from segue.wire.events import CodeCompleted, CodeInProgress, CodeInterpreting
from segue.wire.items import CodeInterpreterCall, ItemValue
from segue.wire.requests import Create
from segue.wire.tools import (
    CodeInterpreterTool,
    FunctionTool,
    Offer,
    Tools,
    described,
    parameters_of,
)

NAME = "code_interpreter"
# The value of `include` that shows what the code has printed and drawn.
OUTPUTS = "code_interpreter_call.outputs"
NULL, NONE_YET = Raw(b"null"), Raw(b"[]")
ABOUT = (
    "Runs Python code in a container of its own (Linux, no sudo, no terminal) and returns what it printed, and the "
    "value of its last expression. Variables and imports last from one call to the next, as in a notebook. The user's "
    "files are in /mnt/data; save files for the user there, and link them as [name](sandbox:/mnt/data/name)."
)
OFFER = Offer(
    FunctionTool(
        name=PYTHON,
        description=ABOUT,
        parameters=parameters_of({"code": described("string", "The code, as it is.")}, "code"),
    ),
    builtin=NAME,
    execution="server",
)
NOTHING_PRINTED = "[The code printed nothing.]"
LOST = "[What the code printed then is not at hand any more.]"
IMAGE = "[An image, which was shown to the user.]"


class PrintedLogs(Struct, frozen=True, tag_field="type", tag="logs"):
    """What code has printed."""

    logs: str


class Drawn(Struct, frozen=True, tag_field="type", tag="image"):
    """A picture that code has drawn."""

    url: str


class AskedCode(Struct, frozen=True):
    """What a call asks for."""

    container_id: str
    code: str


_outputs: msgspec.json.Decoder[list[PrintedLogs | Drawn]] = msgspec.json.Decoder(
    list[PrintedLogs | Drawn]
)


def code_interpreter(runner: Tool | None) -> HostedTool:
    """The tool with what runs its code. Without that a definition is accepted, and the model does not see it."""
    kind: HostedKind[CodeInterpreterCall, CodeInterpreterCall] = HostedKind(
        struct=CodeInterpreterCall,
        tool=runner,
        request=_request,
        begun=(CodeInProgress,),
        emitted=(CodeInterpreting,),
        ended=lambda value: CodeCompleted if value.status == "completed" else None,
        failed=lambda value, message, code: structs.replace(value, status="failed"),
        stopped=lambda value: structs.replace(value, status="incomplete"),
    )

    def offers(tools: Tools, effects: Effects, tools_before: Tools | None) -> Sequence[Offer]:
        return () if runner is None else (OFFER,)

    return HostedTool(
        name=NAME,
        definitions=(CodeInterpreterTool,),
        key=lambda definition: NAME,
        kinds=(cast("AnyHostedKind", kind),),
        offers=offers,
        words=words_of,
        public=_public,
        # There is one interpreter in a container, and code is run in the order in which it was written.
        is_serial=True,
    )


def written_in(container_id: str, *, shows_outputs: bool) -> Streamed:
    """How a model writes code that is run in this container."""
    outputs = NONE_YET if shows_outputs else NULL

    def build(draft: Draft) -> CodeInterpreterCall:
        return CodeInterpreterCall(
            id=draft.id,
            code=draft.text,
            container_id=container_id,
            outputs=outputs,
            status=draft.status,
        )

    return Streamed(CODE, build)


def _request(call: CodeInterpreterCall) -> ToolRequest:
    asked = AskedCode(call.container_id or "", call.code or "")
    return ToolRequest(NAME, str(call.id), encode(asked).decode())


def _public(result: ToolResult, begun: ItemValue, create: Create) -> ItemValue:
    value = result.item.value
    if isinstance(value, CodeInterpreterCall) and OUTPUTS not in (create.include or ()):
        return structs.replace(value, outputs=NULL)
    return value


# --- what the model reads -----------------------------------------------------------------------------


def words_of(value: ItemValue) -> str | None:
    """The output of code that a client has sent again."""
    if not isinstance(value, CodeInterpreterCall):
        return None
    if value.outputs is UNSET or bytes(value.outputs or b"null") == b"null":
        return LOST
    try:
        return text_of(_outputs.decode(value.outputs or b"[]"))
    except msgspec.MsgspecError:
        return LOST


def text_of(outputs: Sequence[PrintedLogs | Drawn]) -> str:
    """These outputs in words. What was printed says which pictures were saved, where it was printed here."""
    logs = [output.logs for output in outputs if isinstance(output, PrintedLogs) and output.logs]
    is_drawn = any(isinstance(output, Drawn) for output in outputs)
    return "\n".join(logs) or (IMAGE if is_drawn else NOTHING_PRINTED)


def code_in(text: str) -> str:
    """The code that a model has written; some models put it into a fence."""
    bare = text.strip()
    if bare.startswith("```") and bare.endswith("```") and bare.count("```") == 2:
        first, _, rest = bare.removesuffix("```").partition("\n")
        if first.removeprefix("```").strip().lower() in ("", "python", "py", "python3"):
            return rest
    return text
