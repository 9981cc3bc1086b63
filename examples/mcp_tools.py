"""Tools of an MCP server that Segue calls: the server `clock` of examples/segue.toml."""

from __future__ import annotations

from server import client, model

response = client.responses.create(
    model=model,
    input="What time is it?",
    tools=[{"type": "mcp", "server_label": "clock", "require_approval": "never"}],
    tool_choice="required",
)
for item in response.output:
    if item.type == "mcp_list_tools":
        print("tools:", *(tool.name for tool in item.tools))
    if item.type == "mcp_call":
        print(f"called: {item.name} -> {item.output or item.error}")
print(response.output_text)
