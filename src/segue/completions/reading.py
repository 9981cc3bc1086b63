"""Which turn does a request for a completion ask for, and what of it was read before?

In: the body of a request. Out: a `Create`. A client that resends its history sends most messages to the byte as before:
what these became is remembered, and only new messages are read. Errors of the turn name our fields; here they get the
names that the client has sent.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from itertools import accumulate, chain

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.completions.messages import translate
from segue.completions.request import AnswerForm, ChatRequest, decode_chat, given, to_create
from segue.completions.tools import offered_tools
from segue.errors import ApiError
from segue.resent.memo import Memo, key_of
from segue.seams.history import Owner
from segue.wire.requests import Create, RawField

# What the keys of the memo begin with: the bytes of a message, of a message that answers a custom call, of tools.
MESSAGE, CUSTOM_OUTPUT, TOOLS, FUNCTIONS = (
    b"chat:",
    b"chat custom:",
    b"chat tools:",
    b"chat functions:",
)
CUSTOM_CALL = b'{"type":"custom_tool_call",'

# Our fields, by the names that they have in this API.
FIELD_NAMES = {
    "max_output_tokens": "max_completion_tokens",
    "text.format.schema": "response_format.json_schema.schema",
    "text.format": "response_format",
}
_ITEM = re.compile(r"\binput\[(\d+)\](?:[.\[][\w.\[\]]*)?")


class _Call(Struct, frozen=True):
    """A call among our items."""

    call_id: str


class _Answer(Struct, frozen=True):
    """A message that may answer a call; it was read before."""

    tool_call_id: str | None = None


_read_call = msgspec.json.Decoder(_Call).decode
_read_answer = msgspec.json.Decoder(_Answer).decode


class ChatReading:
    """Reads one request."""

    def __init__(self, memo: Memo[tuple[Raw, ...]], owner: Owner, session: str | None) -> None:
        """`session`: what the client calls its conversation."""
        self._memo = memo
        self._owner = owner
        self._session = session
        # The items of each message.
        self._translated: list[tuple[Raw, ...]] = []
        self.form = AnswerForm()

    def decode(self, body: bytes | bytearray) -> Create:
        """The turn that a body asks for."""
        request = decode_chat(body)
        self.form = request.form
        items = self._items(request.messages)
        return to_create(request, items, self._tools(request), self._session)

    def _items(self, messages: list[Raw]) -> list[Raw]:
        """The items of all messages."""
        keys = [key_of(MESSAGE, message) for message in messages]
        known = self._memo.find_all(self._owner, keys)
        self._translated = found = [
            self._translate(messages, index, keys[index]) if items is None else items
            for index, items in enumerate(known)
        ]
        items = [*chain.from_iterable(found)]
        # What a tool has answered depends on the kind of call that it answers.
        custom = {_read_call(item).call_id for item in items if item.startswith(CUSTOM_CALL)}
        if custom:
            for index, message in enumerate(messages):
                if _read_answer(message).tool_call_id in custom:
                    key = key_of(CUSTOM_OUTPUT, message)
                    found[index] = self._translate(messages, index, key, is_custom=True)
            items = [*chain.from_iterable(found)]
        return items

    def _translate(
        self, messages: list[Raw], index: int, key: bytes, *, is_custom: bool = False
    ) -> tuple[Raw, ...]:
        message, is_newest = messages[index], index == len(messages) - 1
        # The same message may have stood earlier in this request.
        found = self._memo.find(self._owner, key)
        if found is None:
            path = f"messages[{index}]"
            found, is_lasting = translate(message, path, is_newest=is_newest, is_custom=is_custom)
            if is_lasting:
                self._memo.put(self._owner, key, found, sum(map(len, found)))
        return found

    def _tools(self, request: ChatRequest) -> RawField:
        """The tools as the turn has them: the very same bytes for a list that was sent before."""
        listed = given(request.tools) or given(request.functions)
        search = given(request.web_search_options)
        key = key_of(FUNCTIONS if request.is_old else TOOLS, Raw(b"") if listed is None else listed)
        if search is None and (found := self._memo.find(self._owner, key)):
            return found[0]
        tools = offered_tools(listed, search, is_old=request.is_old)
        if search is None and tools is not UNSET:
            self._memo.put(self._owner, key, (tools,), len(tools))
        return tools

    def in_clients_words(self, error: ApiError) -> ApiError:
        """An error of the turn, with the names that its fields have in this API."""
        if error.param is not None:
            error.param = self._name(error.param)
        error.message = _ITEM.sub(lambda found: self._name(found[0]), error.message)
        for ours, theirs in FIELD_NAMES.items():
            error.message = error.message.replace(f"'{ours}'", f"'{theirs}'")
        error.message = error.message.replace("'input'", "'messages'")
        return error

    def _name(self, param: str) -> str:
        if found := _ITEM.fullmatch(param):
            ends = [*accumulate(map(len, self._translated))]
            return f"messages[{bisect_right(ends, int(found[1]))}]"
        return "messages" if param == "input" else FIELD_NAMES.get(param, param)
