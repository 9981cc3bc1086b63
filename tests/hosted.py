"""Hosted tools that are loaded already, for tests without a server."""

from __future__ import annotations

from typing import Any

from segue.server.hosted import asking_of
from segue.tools.hosted import ServerTools


class AtHand:
    """These tools; or any object in place of them, that no request asks for."""

    def __init__(self, tools: ServerTools | Any) -> None:
        rows = [asking_of(tool) for tool in getattr(tools, "tools", ())]
        self._tools = tools
        self.definitions = tuple(one for row in rows for one in row.definitions)
        self.acts_on = frozenset(one for row in rows for one in row.acts_on)
        self.has_words = frozenset(one for row in rows for one in row.has_words)

    def load(self) -> Any:
        return self._tools
