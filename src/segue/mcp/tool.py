"""How does a turn use MCP servers? The hosted tool `mcp`.

A server lists its tools before the model speaks, in an `mcp_list_tools` of the response, once in a history. A call that
needs no approval is made when the model has written it. One that needs it is an `mcp_approval_request`: the client
answers, and the approved call is made before the model goes on.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import cast

import msgspec
from msgspec import Raw, structs

from segue.mcp.definitions import (
    ErrorKind,
    check_servers,
    error_of,
    listed_offers,
    servers_of,
    still_listed,
    with_secrets,
)
from segue.mcp.sessions import McpServers
from segue.seams.tools import (
    AnyHostedKind,
    HostedKind,
    HostedTool,
    Task,
    Tool,
    ToolRequest,
    ToolResult,
    TurnStart,
)
from segue.wire.codec import encode
from segue.wire.events import (
    McpCallCompleted,
    McpCallFailed,
    McpCallInProgress,
    McpListCompleted,
    McpListFailed,
    McpListInProgress,
)
from segue.wire.items import (
    ItemValue,
    McpApprovalRequest,
    McpApprovalResponse,
    McpCall,
    McpListTools,
)
from segue.wire.requests import Create
from segue.wire.tools import McpTool, ToolDefinition, Tools

STOPPED = Raw(b'"The response ended before the server had answered."')


def mcp(servers: McpServers | None) -> HostedTool:
    """The tools of these servers. Without servers a definition is accepted, and the model does not see it."""

    def check(tools: Tools, may: Container[str]) -> None:
        check_servers(tools)
        if servers is not None:
            servers.check(tools, may)

    def begin(start: TurnStart) -> Sequence[Task]:
        approved = approved_calls(start)
        is_listing = servers is not None and not start.is_appended
        return [*approved, *(unlisted(start) if is_listing else ())]

    return HostedTool(
        name="mcp",
        definitions=(McpTool,),
        key=_label,
        kinds=(_call_kind(servers), _list_kind(None if servers is None else servers.lister)),
        offers=listed_offers,
        words=words_of,
        public=_public,
        with_secrets=with_secrets,
        check=check,
        begin=begin,
        acts_on=(McpApprovalResponse,),
    )


def _label(tool: ToolDefinition) -> str:
    assert isinstance(tool, McpTool)
    return tool.server_label


def _call_kind(tool: Tool | None) -> AnyHostedKind:
    kind: HostedKind[McpCall, McpCall] = HostedKind(
        struct=McpCall,
        tool=tool,
        request=lambda value: ToolRequest(value.server_label, value.name, value.arguments),
        begun=(McpCallInProgress,),
        ended=lambda value: McpCallCompleted if value.status == "completed" else McpCallFailed,
        failed=_failed_call,
        stopped=lambda value: structs.replace(value, status="incomplete"),
        apart=lambda value: (structs.replace(value, arguments=""), value.arguments),
    )
    return cast("AnyHostedKind", kind)


def _failed_call(value: McpCall, message: str, code: int) -> McpCall:
    error = error_of("mcp_protocol_error", message, code)
    return structs.replace(value, status="failed", error=error)


def _list_kind(tool: Tool | None) -> AnyHostedKind:
    kind: HostedKind[McpListTools, McpListTools] = HostedKind(
        struct=McpListTools,
        tool=tool,
        request=lambda value: ToolRequest(value.server_label, "", ""),
        begun=(McpListInProgress,),
        ended=lambda value: McpListFailed if isinstance(value.error, Raw) else McpListCompleted,
        failed=lambda value, message, _: structs.replace(value, error=Raw(encode(message))),
        stopped=lambda value: structs.replace(value, error=STOPPED),
        is_call=False,
    )
    return cast("AnyHostedKind", kind)


# --- before the model speaks ----------------------------------------------------------------------


def unlisted(start: TurnStart) -> list[Task]:
    """The lists of the servers that have not listed their tools in this history."""
    tools = start.tools
    before = still_listed(tools, start.effects, start.tools_before)
    known = {listed.server_label for listed in before}
    return [
        Task(McpListTools(id=start.new_id(McpListTools), server_label=label, tools=[]))
        for label in servers_of(tools)
        if label not in known
    ]


def approved_calls(start: TurnStart) -> list[Task]:
    """The calls that these items approve, and that no call among them has followed."""
    given = start.given
    made = {item.value.approval_request_id for item in given if isinstance(item.value, McpCall)}
    requests = {
        item.value.id: item.value
        for item in (*start.earlier, *given)
        if isinstance(item.value, McpApprovalRequest)
    }
    calls: dict[str, Task] = {}
    for item in given:
        match item.value:
            case McpApprovalResponse(approve=True, approval_request_id=request_id):
                request = requests.get(request_id)
                if request is not None and request_id not in made and request_id not in calls:
                    calls[request_id] = Task(_made_for(request, start), after=item)
            case _:
                pass
    return [*calls.values()]


def _made_for(request: McpApprovalRequest, start: TurnStart) -> McpCall:
    return McpCall(
        id=start.new_id(McpCall),
        status="in_progress",
        server_label=request.server_label,
        name=request.name,
        arguments=request.arguments,
        approval_request_id=request.id,
    )


# --- what clients and models read -----------------------------------------------------------------


def _public(result: ToolResult, begun: ItemValue, create: Create) -> ItemValue:
    """Still tied to its approval, and with no more output than the model reads."""
    value = result.item.value
    if not isinstance(value, McpCall) or not isinstance(begun, McpCall):
        return value
    output = result.text if isinstance(value.output, str) else value.output
    return structs.replace(
        value,
        approval_request_id=begun.approval_request_id,
        output=output,
        error=_shortened(value.error, result.text) if isinstance(value.error, Raw) else value.error,
    )


def _shortened(error: Raw, text: str) -> Raw:
    """An error with no more words than the model reads."""
    words = text.removeprefix("Error: ")
    match msgspec.json.decode(error):
        case {"type": "mcp_tool_execution_error"}:
            return error_of("mcp_tool_execution_error", words)
        case {"type": str() as kind, "code": int() as code}:
            return error_of(cast("ErrorKind", kind), words, code)
        case _:
            return error


def words_of(value: ItemValue) -> str | None:
    """The output of a call that a client has sent, as the model reads it."""
    if not isinstance(value, McpCall):
        return None
    if isinstance(value.output, str):
        return value.output
    if not isinstance(value.error, Raw) or bytes(value.error) == b"null":
        # Chat endpoints refuse a call without an output.
        return "[The output of this call is not available.]"
    match msgspec.json.decode(value.error):
        case {"message": str() as message}:
            return f"Error: {message}"
        case {"content": list() as content}:
            texts = [str(one.get("text", "")) for one in content if isinstance(one, dict)]
            return "Error: " + "\n".join(texts)
        case str() as message:
            return f"Error: {message}"
        case _:
            return "Error: the call failed."
