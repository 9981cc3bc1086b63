"""Which APIs does a server have? One row for each; `open_app` serves those that it is given."""

from __future__ import annotations

from segue.listener.api import Api
from segue.responses.api import RESPONSES

APIS: dict[str, Api] = {"responses": RESPONSES}

# Sentences for the paths of APIs that clients try and Segue does not have (Chat Completions, Completions, Messages),
# by how the paths end.
HINTS = dict.fromkeys(
    ("/completions", "/messages"), "Segue serves the Responses API: POST /v1/responses."
)
