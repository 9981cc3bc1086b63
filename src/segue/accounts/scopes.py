"""What may an API key be good for? The names of all scopes.

`responses` and `models` are the API. `metrics` and `dashboard` show figures of the process: the first of no owner in
particular, the second of the key's own owner; an operator sees figures of all owners on both. The tool scopes let a
request use tools that the server runs. `priority` lets it go before others (`service_tier`).
"""

from __future__ import annotations

API_SCOPES = ("responses", "models")
OPERATOR = "operator"
TOOL_SCOPES = ("web_search", "mcp", "mcp_url", "shell", "code", "skills", "network")
SCOPES = (*API_SCOPES, "metrics", "dashboard", OPERATOR, *TOOL_SCOPES, "priority")
