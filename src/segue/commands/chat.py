"""How does a person chat with a model? `segue chat`: a conversation in the terminal, over one WebSocket.

In: lines that are typed. Out: the answer as it streams, its token counts and the time to its first token. The
conversation is not stored: it lives on the socket, and here. When the socket is lost, the next question opens another
one and sends the whole conversation. Ctrl-C ends an answer, Ctrl-D the conversation.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec
from msgspec import UNSET, Struct
from rich.console import Console
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from segue.commands.connect import add_endpoint, base_url_of, find_endpoint
from segue.errors import Misconfigured

# The server sends a heartbeat every 15 s while a turn runs: after this much silence the connection is lost.
SILENCE_S_MAX = 60.0
OPEN_S_MAX = 10.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# Error codes after which the whole conversation is sent on a new socket.
NEW_SOCKET = {"previous_response_not_found", "websocket_connection_limit_reached"}
HELP = "/new starts a new conversation, /model NAME changes the model, /quit exits. Ctrl-C stops an answer."

# Our own event, never on the wire: the answer starts again on another socket.
AGAIN = "again"

_Item = dict[str, object]


class _Problem(Struct):
    code: str | None = None
    message: str = ""


class _Usage(Struct):
    input_tokens: int = 0
    output_tokens: int = 0


class _Reason(Struct):
    reason: str = ""


class _Response(Struct):
    id: str
    output: list[_Item] = []
    usage: _Usage | None = None
    error: _Problem | None = None
    incomplete_details: _Reason | None = None


class _Event(Struct):
    type: str
    delta: str | msgspec.UnsetType = UNSET
    response: _Response | None = None
    error: _Problem | None = None


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

    def ask(self, text: str) -> Iterator[_Event]:
        """The events of an answer, to its end. A completed answer becomes part of the conversation."""
        question: _Item = {"role": "user", "content": text}
        try:
            yield from self._turn(question)
        except ConnectionLost:
            self.drop()
            yield _Event(AGAIN)
            try:
                yield from self._turn(question)
            except ConnectionLost as error:
                raise Misconfigured(f"url: connection to {self._url} lost: {error}") from None

    def _turn(self, question: _Item) -> Iterator[_Event]:
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

    def _events(self, create: dict[str, object]) -> Iterator[_Event]:
        try:
            if self._socket is None:
                self._socket = self._open()
            self._socket.send(msgspec.json.encode(create).decode())
            while True:
                event = msgspec.json.decode(self._socket.recv(SILENCE_S_MAX), type=_Event)
                yield event
                if event.type in ENDS:
                    return
        except (WebSocketException, OSError) as error:
            raise ConnectionLost(str(error) or type(error).__name__) from None

    def _open(self) -> ClientConnection:
        url, headers, size = self._url, self._headers, MESSAGE_BYTES_MAX
        opening = connect(url, additional_headers=headers, open_timeout=OPEN_S_MAX, max_size=size)
        try:
            return self._closing.enter_context(opening)
        except InvalidStatus as error:
            status = error.response.status_code
            raise Misconfigured(f"url: {url} refused the WebSocket with status {status}.") from None

    def drop(self) -> None:
        """Close the socket; the server then cancels a running answer."""
        self._socket = self._parent = None
        with suppress(WebSocketException, OSError):
            self._closing.close()

    def forget(self) -> None:
        """Start a new conversation."""
        self._items.clear()
        self._parent = None


ENDS = {"response.completed", "response.failed", "response.incomplete", "error"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue chat`."""
    add_endpoint(parser)
    parser.add_argument("--instructions", help="instructions for the model (system prompt)")
    parser.add_argument("--key", help="API key, if the server needs one")


def run(options: argparse.Namespace) -> int:
    """Chat until the person quits; returns the exit status."""
    # Shells start background commands with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    base_url = base_url_of(options.url)
    model = options.model or find_endpoint(base_url, None).model
    talk = Talk(base_url, model, options.instructions, options.key)
    console = Console(highlight=False)
    console.print(f"[bold]{model}[/bold] at {base_url}. Type /help for help.")
    try:
        while (line := _line(console)) is not None:
            if line.startswith("/"):
                if not _run_command(line, talk, console):
                    break
            elif line:
                _answer(talk, line, console)
    finally:
        talk.drop()
    return 0


def _line(console: Console) -> str | None:
    """The next line; None at the end of the input."""
    try:
        return console.input("[bold cyan]> [/bold cyan]" if console.is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _run_command(line: str, talk: Talk, console: Console) -> bool:
    """Run a /command; False ends the conversation."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return False
        case "/new":
            talk.forget()
            console.print("[dim]New conversation.[/dim]")
        case "/model" if rest.strip():
            talk.model = rest.strip()
            console.print(f"[dim]The model is now {talk.model}.[/dim]", markup=True)
        case _:
            console.print(f"[dim]{HELP}[/dim]")
    return True


def _answer(talk: Talk, line: str, console: Console) -> None:
    began = time.perf_counter()
    first: float | None = None
    try:
        for event in talk.ask(line):
            if event.delta is not UNSET:
                first = first or time.perf_counter()
                is_thought = event.type.startswith("response.reasoning")
                style = "dim italic" if is_thought else None
                console.print(event.delta, end="", style=style, markup=False, soft_wrap=True)
            if event.type == AGAIN and first is not None:
                console.print("\n[dim]Connection lost; asking again:[/dim]")
            if event.type == "response.reasoning_text.done":
                console.print()
            if event.type in ENDS:
                console.print()
                _close(event, (first or time.perf_counter()) - began, console)
    except KeyboardInterrupt:
        talk.drop()
        console.print("\n[dim]Stopped. This question and its answer are not kept.[/dim]")


def _close(event: _Event, first_s: float, console: Console) -> None:
    """The line after an answer: token counts and time, or the error."""
    response = event.response
    problem = event.error or (response and response.error)
    if problem:
        console.print(f"{problem.code}: {problem.message}", style="red", markup=False)
    elif response:
        usage, cut = response.usage or _Usage(), response.incomplete_details
        figures = f"{usage.input_tokens} tokens in, {usage.output_tokens} out, first token {first_s * 1000:.0f} ms"
        figures += f", incomplete: {cut.reason}" if cut else ""
        console.print(figures, style="dim", markup=False)
