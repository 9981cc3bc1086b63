"""What does the body of a request mean, as far as it has not been read before?

A message, a system prompt and a list of tools are translated once: the memo of the process keeps what their bytes
became, so that a history that is sent again costs a look at its bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from msgspec import UNSET, Raw

from segue.messages.history import System, TranslatedMessage, translate, translate_system
from segue.messages.request import (
    NONE_SHOWN,
    AskedTurn,
    MessagesBody,
    ShownTools,
    Surroundings,
    compile_request,
    read_body,
)
from segue.messages.served import Unseal
from segue.messages.tools import NO_TOOLING, Tooling, translate_tools, with_servers
from segue.resent.memo import Memo, key_of
from segue.seams.history import Owner
from segue.wire.requests import Create

T = TypeVar("T")

# What the memo keeps under the bytes of a message, of the system prompt and of tools.
MESSAGE, SYSTEM, TOOLS = b"messages:", b"messages.system:", b"messages.tools:"


class MessageReading:
    """Reads the body of one request."""

    body: MessagesBody
    asked: AskedTurn

    def __init__(
        self,
        memo: Memo[object],
        owner: Owner,
        around: Surroundings,
        unseal: Unseal = lambda sealed: None,
    ) -> None:
        self._memo = memo
        self._owner = owner
        self._unseal = unseal
        self._around = around

    def decode(self, data: bytes | bytearray) -> Create:
        """The request of a turn; that of a thread is read later, with what the thread has said before. Slow work if the
        body is large."""
        self.body = read_body(data)
        return Create() if self.body.thread is not None else self.compile(self.body)

    def compile(self, body: MessagesBody, before: ShownTools = NONE_SHOWN) -> Create:
        """The request of a turn. `before`: what earlier turns of its thread have shown."""
        messages = self._messages(body.messages)
        system, tooling = self._system(body), self._tools(body)
        self.asked = compile_request(body, messages, system, tooling, self._around, before)
        return self.asked.create

    def _messages(self, raws: list[Raw]) -> list[TranslatedMessage]:
        keys = [key_of(MESSAGE, raw) for raw in raws]
        found = self._memo.find_all(self._owner, keys)
        return [
            known
            if isinstance(known, TranslatedMessage)
            else self._keep(keys[index], raws[index], translate(raws[index], index, self._unseal))
            for index, known in enumerate(found)
        ]

    def _system(self, body: MessagesBody) -> System:
        if body.system is UNSET:
            return System()
        return self._recall(SYSTEM, body.system, System, translate_system)

    def _tools(self, body: MessagesBody) -> Tooling:
        tooling = NO_TOOLING
        if body.tools is not UNSET:
            tooling = self._recall(TOOLS, body.tools, Tooling, translate_tools)
        servers = body.mcp_servers or ()
        return with_servers(tooling, servers) if servers or tooling.toolsets else tooling

    def _recall(self, prefix: bytes, raw: Raw, kind: type[T], translated: Callable[[Raw], T]) -> T:
        key = key_of(prefix, raw)
        known = self._memo.find(self._owner, key)
        if isinstance(known, kind):
            return known
        return self._keep(key, raw, translated(raw))

    def _keep(self, key: bytes, raw: Raw, value: T) -> T:
        # What became of the bytes is about as long, and there are some small objects.
        self._memo.put(self._owner, key, value, 2 * len(raw) + 1_000)
        return value
