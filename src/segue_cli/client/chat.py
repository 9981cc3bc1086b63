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
from contextlib import suppress

from msgspec import UNSET
from rich.console import Console
from rich.markdown import Markdown

from segue.errors import Misconfigured
from segue.printable import printable
from segue_cli.client.conversation import AGAIN, ENDS, Talk, TalkEvent, figures_of
from segue_cli.client.talk import (
    RunningServer,
    add_model,
    add_server,
    find_endpoint,
    server_of,
)

HELP = """\
/new          start a new conversation
/models       list the models of this server
/model NAME   go on with another model
/help         print this
/quit         exit (or Ctrl-D)
Ctrl-C stops an answer; the question and its answer are then not part of the conversation."""
# Between these marks readline counts no columns.
PROMPT = "\001\033[1;36m\002> \001\033[0m\002"


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
    # What is no answer goes elsewhere where the questions come from a pipe.
    aside = console if sys.stdin.isatty() else Console(highlight=False, stderr=True)
    _say(aside, model, style="bold", end="")
    _say(aside, f" at {server.url}. Type /help for help.")
    try:
        while (line := _line(console)) is not None:
            if line.startswith("/"):
                if not _run_command(line, talk, server, console):
                    break
            elif line:
                _answer(talk, line, console, aside, is_markdown=options.markdown)
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


def _answer(
    talk: Talk, line: str, console: Console, aside: Console, *, is_markdown: bool = False
) -> None:
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
                aside.print("\n[dim]Connection lost; asking again:[/dim]")
            if event.type == "response.reasoning_text.done":
                console.print()
            if event.type in ENDS:
                console.print(Markdown(printable(answer), hyperlinks=False) if answer else "")
                _close(event, (first or time.perf_counter()) - began, aside)
    except KeyboardInterrupt:
        talk.drop()
        console.print(
            "\n[dim]Stopped. This question and its answer are not part of the conversation.[/dim]"
        )


def _close(event: TalkEvent, first_s: float, console: Console) -> None:
    """The line after an answer: token counts and time, or the error."""
    response = event.response
    problem = event.error or (response and response.error)
    if problem:
        _say(console, f"{problem.code}: {problem.message}", style="red")
    elif response:
        _say(console, figures_of(response, first_s), style="dim")
