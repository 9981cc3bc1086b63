"""How does a person talk to a model? `segue chat`: a conversation in the terminal, over one socket.

In: lines that are typed. Out: the answer while it is spoken, and what the turn cost. The conversation is not stored:
it lives on the socket, and here. Where the socket ends, for whatever reason, the next question opens another and
brings the whole conversation along. Ctrl-C ends an answer, Ctrl-D the conversation.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec
from msgspec import UNSET, Struct
from rich.console import Console
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from segue.commands.connect import URL, base_url_of, find_place
from segue.errors import Misconfigured

# Segue speaks at least every 15 s while a turn runs, so that a silence this long is the network's.
SILENCE_S_MAX = 60.0
OPEN_S_MAX = 10.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# Codes after which the whole conversation on a new socket is the answer.
NEW_SOCKET = {"previous_response_not_found", "websocket_connection_limit_reached"}
HELP = "/new forgets the conversation, /model NAME changes the model, /quit ends. Ctrl-C ends an answer."

# Our own, never on the wire: the answer begins anew on another socket.
AGAIN = "again"

Item = dict[str, object]


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
    output: list[Item] = []
    usage: _Usage | None = None
    error: _Problem | None = None
    incomplete_details: _Reason | None = None


class _Event(Struct):
    type: str
    delta: str | msgspec.UnsetType = UNSET
    response: _Response | None = None
    error: _Problem | None = None


class Lost(Exception):
    """The socket or what it remembered is gone; another one may do."""


class Talk:
    """One conversation: on a socket while it lasts, and whole in memory."""

    def __init__(
        self, base_url: str, model: str, instructions: str | None, key: str | None
    ) -> None:
        self._url = base_url.replace("http", "ws", 1) + "/responses"
        self.model = model
        self._instructions = instructions
        self._headers = {"Authorization": f"Bearer {key}"} if key else {}
        self._items: list[Item] = []
        self._parent: str | None = None
        self._socket: ClientConnection | None = None
        self._closing = ExitStack()

    def ask(self, text: str) -> Iterator[_Event]:
        """The events of an answer, to its end. What was said is remembered if it was said whole."""
        question: Item = {"role": "user", "content": text}
        try:
            yield from self._turn(question)
        except Lost:
            self.drop()
            yield _Event(AGAIN)
            try:
                yield from self._turn(question)
            except Lost as error:
                raise Misconfigured(f"the connection is lost: {error}") from None

    def _turn(self, question: Item) -> Iterator[_Event]:
        fields: dict[str, object] = {"input": [*self._items, question]}
        if self._parent is not None and self._socket is not None:
            fields = {"input": [question], "previous_response_id": self._parent}
        if self._instructions:
            fields["instructions"] = self._instructions
        create = {"type": "response.create", "model": self.model, "store": False, **fields}
        has_begun = False
        for event in self._events(create):
            if event.error is not None and event.error.code in NEW_SOCKET and not has_begun:
                raise Lost(event.error.message)
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
            raise Lost(str(error) or type(error).__name__) from None

    def _open(self) -> ClientConnection:
        try:
            return self._closing.enter_context(
                connect(
                    self._url,
                    additional_headers=self._headers,
                    open_timeout=OPEN_S_MAX,
                    max_size=MESSAGE_BYTES_MAX,
                )
            )
        except InvalidStatus as error:
            status = error.response.status_code
            raise Misconfigured(f"{self._url} refuses a WebSocket with status {status}.") from None

    def drop(self) -> None:
        """Close the socket: an answer that still comes is cancelled by that."""
        self._socket = self._parent = None
        with suppress(WebSocketException, OSError):
            self._closing.close()

    def forget(self) -> None:
        """Begin anew."""
        self._items.clear()
        self._parent = None


ENDS = {"response.completed", "response.failed", "response.incomplete", "error"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue chat`."""
    parser.add_argument("--url", default=URL, help=f"the server's address (default: {URL})")
    parser.add_argument("--model", help="the model's name (default: the first that is served)")
    parser.add_argument("--instructions", help="what the model is told first")
    parser.add_argument("--key", help="the key, where the server wants one")


def run(options: argparse.Namespace) -> int:
    """Talk until the person has had enough."""
    base_url = base_url_of(options.url)
    model = options.model or find_place(base_url, None).model
    talk = Talk(base_url, model, options.instructions, options.key)
    console = Console(highlight=False)
    console.print(f"[bold]{model}[/bold] at {base_url}. /help says what else there is.")
    try:
        while (line := _line(console)) is not None:
            if line.startswith("/"):
                if not _obey(line, talk, console):
                    break
            elif line:
                _answer(talk, line, console)
    finally:
        talk.drop()
    return 0


def _line(console: Console) -> str | None:
    """What is typed next; None once there is nothing more."""
    try:
        return console.input("[bold cyan]> [/bold cyan]" if console.is_terminal else "").strip()
    except (EOFError, KeyboardInterrupt):
        console.print()
        return None


def _obey(line: str, talk: Talk, console: Console) -> bool:
    """A word to us, not to the model; False ends the conversation."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return False
        case "/new":
            talk.forget()
            console.print("[dim]A new conversation.[/dim]")
        case "/model" if rest.strip():
            talk.model = rest.strip()
            console.print(f"[dim]Now {talk.model}.[/dim]", markup=True)
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
                console.print("\n[dim]The connection was lost; once more:[/dim]")
            if event.type == "response.reasoning_text.done":
                console.print()
            if event.type in ENDS:
                console.print()
                _close(event, (first or time.perf_counter()) - began, console)
    except KeyboardInterrupt:
        talk.drop()
        console.print("\n[dim]Stopped. What was half said is forgotten.[/dim]")


def _close(event: _Event, first_s: float, console: Console) -> None:
    """The line behind an answer: what it cost, or what went wrong."""
    problem = event.error or (event.response.error if event.response else None)
    if problem is not None:
        console.print(f"{problem.code}: {problem.message}", style="red", markup=False)
        return
    response = event.response
    if response is None:
        return
    cut = response.incomplete_details
    usage = response.usage or _Usage()
    told = f"{usage.input_tokens} in, {usage.output_tokens} out, first word {first_s * 1000:.0f} ms"
    console.print(told + (f", cut short: {cut.reason}" if cut else ""), style="dim", markup=False)
