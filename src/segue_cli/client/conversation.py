"""How is a conversation held with a running server? Over one WebSocket, and whole in memory.

In: questions. Out: the events of each answer. The server stores nothing. When the socket is lost, the next question
opens another one and sends the whole conversation.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec
from msgspec import UNSET, Struct
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from segue.errors import Misconfigured
from segue_cli.client.asking import decoded, shown
from segue_cli.client.talk import message_of

# The server sends a heartbeat every 15 s while a turn runs: after this much silence the connection is lost.
SILENCE_S_MAX = 60.0
OPEN_S_MAX = 10.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# All events of an answer: one of 100,000 tokens has some 25 million.
ANSWER_CHARS_MAX = 256 * 1024 * 1024
# Error codes after which the whole conversation is sent on a new socket.
NEW_SOCKET = {"previous_response_not_found", "websocket_connection_limit_reached"}
ENDS = {"response.completed", "response.failed", "response.incomplete", "error"}
# Our own event, never on the wire: the answer starts again on another socket.
AGAIN = "again"

_Item = dict[str, object]


class TalkProblem(Struct):
    code: str | None = None
    message: str = ""


class TalkUsage(Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class TalkReason(Struct):
    reason: str = ""


class TalkResponse(Struct):
    id: str
    output: list[_Item] = []
    usage: TalkUsage | None = None
    error: TalkProblem | None = None
    incomplete_details: TalkReason | None = None


class TalkEvent(Struct):
    type: str
    delta: str | msgspec.UnsetType = UNSET
    response: TalkResponse | None = None
    error: TalkProblem | None = None


class ConnectionLost(Exception):
    """The socket, or the state that the server kept for it, is gone; a new socket may work."""


class Talk:
    """One conversation: on a socket while it is open, and whole in memory."""

    def __init__(
        self, base_url: str, model: str, instructions: str | None, key: str | None
    ) -> None:
        self._url = base_url.replace("http", "ws", 1) + "/responses"
        self.model = model
        self._instructions = instructions
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._items: list[_Item] = []
        self._parent: str | None = None
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()

    def ask(self, text: str) -> Iterator[TalkEvent]:
        """The events of an answer, to its end. A completed answer becomes part of the conversation."""
        question: _Item = {"role": "user", "content": text}
        try:
            yield from self._turn(question)
        except ConnectionLost:
            self.drop()
            yield TalkEvent(AGAIN)
            try:
                yield from self._turn(question)
            except ConnectionLost as error:
                raise Misconfigured(f"url: connection to {self._url} lost: {error}") from None

    def _turn(self, question: _Item) -> Iterator[TalkEvent]:
        fields: dict[str, object] = {"input": [*self._items, question]}
        if self._parent is not None and self._socket is not None:
            fields = {"input": [question], "previous_response_id": self._parent}
        if self._instructions:
            fields["instructions"] = self._instructions
        create = {"type": "response.create", "model": self.model, "store": False, **fields}
        has_begun = False
        for event in self._events(create):
            if event.error is not None and event.error.code in NEW_SOCKET and not has_begun:
                raise ConnectionLost(event.error.message)
            has_begun = has_begun or event.delta is not UNSET
            if event.type == "response.completed" and event.response is not None:
                self._parent = event.response.id
                self._items += [question, *event.response.output]
            yield event

    def _events(self, create: dict[str, object]) -> Iterator[TalkEvent]:
        try:
            if self._socket is None:
                self._socket = self._open()
            self._socket.send(msgspec.json.encode(create).decode())
            left = ANSWER_CHARS_MAX
            while True:
                message = self._socket.recv(SILENCE_S_MAX)
                left -= len(message)
                if left < 0:
                    raise Misconfigured(f"url: {self._url} does not end its answer.")
                event = decoded(message, TalkEvent, "events of a response")
                yield event
                if event.type in ENDS:
                    return
        except (WebSocketException, OSError) as error:
            raise ConnectionLost(shown(str(error)) or type(error).__name__) from None

    def _open(self) -> ClientConnection:
        url, headers, size = self._url, self._headers, MESSAGE_BYTES_MAX
        try:
            # It connects when it is called, not when it is entered.
            return self._closing.enter_context(
                connect(url, additional_headers=headers, open_timeout=OPEN_S_MAX, max_size=size)
            )
        except InvalidStatus as error:
            status = error.response.status_code
            if status == 401:
                raise Misconfigured(
                    f"key: {url} refused the API key: it is wrong, expired or revoked."
                ) from None
            why = message_of(bytes(error.response.body or b""))
            refused = f"url: {url} refused the WebSocket with status {status}. {why}".rstrip()
            raise Misconfigured(refused) from None

    def drop(self) -> None:
        """Close the socket; the server then cancels a running answer."""
        self._socket = self._parent = None
        with suppress(WebSocketException, OSError):
            self._closing.close()

    def forget(self) -> None:
        """Start a new conversation."""
        self._items.clear()
        self._parent = None


def figures_of(response: TalkResponse, first_s: float) -> str:
    """The tokens of an answer, as far as the engine has counted them, its time, and what cut it."""
    usage, cut = response.usage or TalkUsage(), response.incomplete_details
    counts = [f"{usage.input_tokens} tokens in"] * bool(usage.input_tokens)
    counts += [f"{usage.output_tokens} tokens out", f"first token {first_s * 1000:.0f} ms"]
    return ", ".join([*counts, f"incomplete: {cut.reason}"] if cut else counts)
