"""Which APIs does a server have? One row for each, by the name that the setting `apis` has for it."""

from __future__ import annotations

from segue.completions.api import CHAT
from segue.listener.api import Api
from segue.messages.api import MESSAGES
from segue.responses.api import RESPONSES
from segue.settings.values import API_NAMES, Settings

APIS: dict[str, Api] = {"responses": RESPONSES, "messages": MESSAGES, "chat": CHAT}


def is_on(api: Api, settings: Settings) -> bool:
    """Whether an API is served: the setting `apis` names it, or cannot name it, because it is not ours."""
    return api.name in settings.apis or api.name not in API_NAMES
