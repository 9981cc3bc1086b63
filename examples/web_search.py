"""A search over your own documents: `segue index DIR`, then a server with `--search-index segue.index`."""

from __future__ import annotations

import sys

from server import client, model

question = " ".join(sys.argv[1:]) or "When does the ferry leave?"
response = client.responses.create(
    model=model,
    input=question,
    tools=[{"type": "web_search"}],
    tool_choice="required",
    include=["web_search_call.action.sources"],
)
for item in response.output:
    if item.type == "web_search_call":
        print("searched:", item.action.query)
        print("found:", *(source.url for source in item.action.sources or []))
print(response.output_text)
