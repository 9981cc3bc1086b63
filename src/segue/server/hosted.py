"""When does a server load its tools? At the start if the operator has configured some, else with the first request that
needs them: most servers never read a PDF.
"""

from __future__ import annotations

from collections.abc import Container
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from segue.settings.values import Settings
from segue.turn.plan import Plan
from segue.turn.resources import Gate, HostedCalls
from segue.turn.running import Running
from segue.wire.items import Item
from segue.wire.tools import Tools

if TYPE_CHECKING:
    from segue.documents.pdf import PdfTexts
    from segue.tools.hosted import ServerTools


class HostedTools(AsyncExitStack):
    """The tools that this server runs; closes them on the way out."""

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._settings = settings
        self._loaded: tuple[ServerTools, PdfTexts] | None = None
        self.reads_urls = settings.fetch != "off"
        self.has_web = self.reads_urls or bool(settings.search_index or settings.search_url)
        if self.has_web or settings.mcp or settings.mcp_hosts:
            self._load()

    def _load(self) -> ServerTools:
        if self._loaded is None:
            from segue.server.tools import build_tools

            self._loaded = build_tools(self._settings, self)
        return self._loaded[0]

    @property
    def bytes(self) -> int:
        """The bytes of the PDF texts in memory."""
        return 0 if self._loaded is None else self._loaded[1].bytes

    def check(self, tools: Tools, may: Container[str]) -> None:
        self._load().check(tools, may)

    async def fetch(self, items: tuple[Item, ...]) -> tuple[Item, ...]:
        return await self._load().fetch(items) if self.reads_urls else items

    async def read_files(self, plan: Plan) -> Plan:
        return await self._load().read_files(plan)

    def open(self, plan: Plan, running: Running, gate: Gate | None) -> HostedCalls:
        return self._load().open(plan, running, gate)
