"""How does a person chat with a model? `segue chat`: a conversation in the terminal, over one WebSocket.

In: lines that are typed. Out: the answer as it streams, its token counts and the time to its first token. The
conversation is not stored: it lives on the socket, and here. When the socket is lost, the next question opens another
one and sends the whole conversation. Ctrl-C stops an answer, Ctrl-D ends the conversation. Lines can be edited, and
earlier ones fetched with the arrow keys; nothing of them is written to a file.
"""

from __future__ import annotations

import argparse
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress

import msgspec
from msgspec import UNSET, Struct
from rich.console import Console
from rich.markdown import Markdown
from websockets.exceptions import InvalidStatus, WebSocketException
from websockets.sync.client import ClientConnection, connect

from segue.errors import Misconfigured
from segue.printable import printable
from segue_cli.client.talk import (
    RunningServer,
    add_model,
    add_server,
    find_endpoint,
    message_of,
    server_of,
)

# The server sends a heartbeat every 15 s while a turn runs: after this much silence the connection is lost.
SILENCE_S_MAX = 60.0
OPEN_S_MAX = 10.0
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
# Error codes after which the whole conversation is sent on a new socket.
NEW_SOCKET = {"previous_response_not_found", "websocket_connection_limit_reached"}
HELP = """\
/new          start a new conversation
/models       list the models of this server
/model NAME   go on with another model
/help         print this
/quit         exit (or Ctrl-D)
Ctrl-C stops an answer; the question and its answer are then not part of the conversation."""
# Between these marks readline counts no columns.
PROMPT = "\001\033[1;36m\002> \001\033[0m\002"

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


ENDS = {"response.completed", "response.failed", "response.incomplete", "error"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue chat`."""
    add_server(parser)
    add_model(parser)
    parser.add_argument("--instructions", help="instructions for the model (system prompt)")
    markdown = "render each answer as Markdown when it is complete, instead of streaming it"
    parser.add_argument("--markdown", action="store_true", help=markdown)


def run(options: argparse.Namespace) -> int:
    """Chat until the person quits; returns the exit status."""
    # Shells start background commands with interrupts ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with suppress(ImportError):
        # Line editing and history for `input`; some builds of Python have none.
        import readline  # noqa: F401
    server = server_of(options)
    model = find_endpoint(server, options.model).model
    talk = Talk(server.base_url, model, options.instructions, server.key)
    console = Console(highlight=False)
    _say(console, model, style="bold", end="")
    _say(console, f" at {server.url}. Type /help for help.")
    try:
        while (line := _line(console)) is not None:
            if line.startswith("/"):
                if not _run_command(line, talk, server, console):
                    break
            elif line:
                _answer(talk, line, console, is_markdown=options.markdown)
    finally:
        talk.drop()
    return 0


def _say(console: Console, text: str, style: str | None = None, end: str = "\n") -> None:
    """Print what a server or a model says: as it is, but for orders to the terminal."""
    console.print(printable(text), style=style, end=end, markup=False, soft_wrap=True)


def _line(console: Console) -> str | None:
    """The next line; None at the end of the input."""
    is_person = console.is_terminal and sys.stdin.isatty()
    try:
        return input(("> " if console.no_color else PROMPT) if is_person else "").strip()
    except EOFError:
        console.print()
        return None
    except KeyboardInterrupt:
        console.print("\n[dim]Nothing runs. /quit or Ctrl-D exits.[/dim]" if is_person else "")
        return "" if is_person else None


def _run_command(line: str, talk: Talk, server: RunningServer, console: Console) -> bool:
    """Run a /command; False ends the conversation."""
    word, _, rest = line.partition(" ")
    match word:
        case "/quit" | "/exit":
            return False
        case "/new":
            talk.forget()
            said = "New conversation."
        case "/models":
            said = _listed(server, talk.model)
        case "/model" if rest.strip():
            said = _change_model(talk, server, rest.strip())
        case "/model":
            said = f"The model is {talk.model}. /models lists all, /model NAME changes it."
        case "/help":
            said = HELP
        case _:
            said = f"There is no command {word}.\n{HELP}"
    _say(console, said, style="dim")
    return True


def _listed(server: RunningServer, current: str) -> str:
    try:
        names = [model.id for model in server.models()]
    except Misconfigured as error:
        return str(error)
    return "\n".join(f"{'*' if name == current else ' '} {name}" for name in names)


def _change_model(talk: Talk, server: RunningServer, name: str) -> str:
    try:
        talk.model = server.model(name).id
    except Misconfigured as error:
        return f"{error} The model is still {talk.model}."
    return f"The model is now {talk.model}."


def _answer(talk: Talk, line: str, console: Console, *, is_markdown: bool = False) -> None:
    began = time.perf_counter()
    first: float | None = None
    answer = ""
    try:
        for event in talk.ask(line):
            if event.delta is not UNSET:
                first = first or time.perf_counter()
                is_thought = event.type.startswith("response.reasoning")
                style = "dim italic" if is_thought else None
                if is_markdown and not is_thought:
                    answer += event.delta
                else:
                    _say(console, event.delta, style=style, end="")
            if event.type == AGAIN and first is not None:
                answer = ""
                console.print("\n[dim]Connection lost; asking again:[/dim]")
            if event.type == "response.reasoning_text.done":
                console.print()
            if event.type in ENDS:
                console.print(Markdown(printable(answer), hyperlinks=False) if answer else "")
                _close(event, (first or time.perf_counter()) - began, console)
    except KeyboardInterrupt:
        talk.drop()
        console.print(
            "\n[dim]Stopped. This question and its answer are not part of the conversation.[/dim]"
        )


def _close(event: _Event, first_s: float, console: Console) -> None:
    """The line after an answer: token counts and time, or the error."""
    response = event.response
    problem = event.error or (response and response.error)
    if problem:
        _say(console, f"{problem.code}: {problem.message}", style="red")
    elif response:
        usage, cut = response.usage or _Usage(), response.incomplete_details
        figures = f"{usage.input_tokens} tokens in, {usage.output_tokens} out, first token {first_s * 1000:.0f} ms"
        figures += f", incomplete: {cut.reason}" if cut else ""
        _say(console, figures, style="dim")
