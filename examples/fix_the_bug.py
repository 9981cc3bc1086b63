"""A coding agent that recovers: one WebSocket connection, only the new items in each turn, retries after every failure.

    python examples/fix_the_bug.py FOLDER [--forced] [--plain]

OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. While it works it draws a waterfall of its turns:
how long until the first token, how long the model wrote, how long the tool ran, and what was sent and reused.

How it recovers (docs/clients/openai-python.md): after a lost connection, an unknown parent and the age limit it opens a
new connection and sends the whole history once. A failed response is retried with the whole history. Where WebSocket is
switched off (426), it continues over HTTP.

`--forced` names the tool of each turn. Small models do not plan; with the call forced, their arguments at least have
the right shape.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from typing import Any

import openai
import websockets.exceptions
from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text
from workspace import INSTRUCTIONS, TASK, TOOLS, Workspace

TURNS_MAX = 30
# Consecutive attempts at one turn, and the first wait between them, which doubles.
TRIES_MAX = 6
WAIT_S = 0.2
BAR_CELLS = 24
# A small model that is held to a schema can still fill a string for ever.
FORCED_TOKENS_MAX = 200
FORCED = ("list_files", "read_file", "edit_file", "run_tests")
NEW_SOCKET = {"previous_response_not_found", "websocket_connection_limit_reached"}


class Again(Exception):
    """This attempt is lost; the whole history on a new socket may succeed."""


class Final(Exception):
    """No attempt will succeed: the server's message says why."""


@dataclass
class Step:
    """One turn in the waterfall; times are seconds since the run began."""

    began: float
    first: float = 0.0
    ended: float = 0.0
    tools_ended: float = 0.0
    does: str = ""
    sent_items: int = 0
    input_tokens: int = 0
    output_tokens: int = 0
    retries: list[str] = field(default_factory=list)


class Waterfall:
    """Draws the turns: waiting, speaking, tool."""

    def __init__(self, console: Console) -> None:
        self.console = console
        self.steps: list[Step] = []
        self.began = time.monotonic()

    def tell(self, step: Step) -> None:
        """A line for each turn, where nobody sees the drawing grow."""
        if not self.console.is_terminal:
            took = f"{(step.ended - step.began) * 1000:.0f} ms"
            self.console.print(f"turn {len(self.steps)}: {step.does} ({took})", markup=False)

    def now(self) -> float:
        return time.monotonic() - self.began

    def __rich__(self) -> Table:
        table = Table(box=None, pad_edge=False)
        table.add_column("#")
        table.add_column("does", no_wrap=True, max_width=24)
        for name in ("sent", "in", "out", "ms"):
            table.add_column(name, justify="right")
        table.add_column("░ wait █ speak ▒ tool", no_wrap=True)
        whole = max(self.now(), 1e-3)
        for number, step in enumerate(self.steps, 1):
            ended = step.ended or self.now()
            table.add_row(
                str(number),
                f"{len(step.retries)}x again: {step.does}" if step.retries else step.does,
                str(step.sent_items),
                str(step.input_tokens or ""),
                str(step.output_tokens or ""),
                f"{(ended - step.began) * 1000:.0f}",
                self._bar(step, whole),
            )
        return table

    def _bar(self, step: Step, whole: float) -> Text:
        def cells(until: float) -> int:
            return round(until / whole * BAR_CELLS)

        ended = step.ended or self.now()
        first = min(step.first or ended, ended)
        marks = [
            (step.began, " ", ""),
            (first, "░", "dim"),
            (ended, "█", "green"),
            (step.tools_ended, "▒", "yellow"),
        ]
        bar, at = Text(), 0
        for until, sign, style in marks:
            width = max(cells(until) - at, 0)
            bar.append(sign * width, style)
            at += width
        return bar


class Line:
    """The road to the server: a socket that can be opened again, or HTTP where there are no sockets."""

    def __init__(self, client: openai.OpenAI) -> None:
        self._client = client
        self._open = ExitStack()
        self._socket: Any = None
        self._is_http = False

    def turn(self, fields: dict[str, Any]) -> Iterator[Any]:
        """The events of one turn; `Again` where the road broke."""
        try:
            if not self._is_http:
                yield from self._by_socket(fields)
            if self._is_http:
                yield from self._client.responses.create(stream=True, **fields)
        except websockets.exceptions.InvalidStatus as error:
            raise Again(f"the handshake was refused ({error.response.status_code})") from None
        except (
            websockets.exceptions.WebSocketException,
            OSError,
            openai.APIConnectionError,
        ) as error:
            raise Again(str(error) or type(error).__name__) from None
        except openai.APIStatusError as error:
            raise (Again if error.status_code >= 500 or error.code in NEW_SOCKET else Final)(
                str(error)
            ) from None

    def _by_socket(self, fields: dict[str, Any]) -> Iterator[Any]:
        if self._socket is None:
            try:
                self._socket = self._open.enter_context(self._client.responses.connect())
            except websockets.exceptions.InvalidStatus as error:
                if error.response.status_code != 426:
                    raise
                self._is_http = True
                return
        self._socket.response.create(**fields)
        yield from self._socket

    def drop(self) -> None:
        """Close the socket; the next turn opens another."""
        self._socket = None
        with suppress(websockets.exceptions.WebSocketException, OSError):
            self._open.close()


class Agent:
    """The loop, with the whole history at hand for the day when the chain breaks."""

    def __init__(
        self, client: openai.OpenAI, model: str, workspace: Workspace, *, is_forced: bool
    ) -> None:
        self._line = Line(client)
        self._model = model
        self._workspace = workspace
        self._is_forced = is_forced
        self._history: list[Any] = [{"role": "user", "content": TASK}]
        self._fresh: list[Any] = list(self._history)
        self._parent: str | None = None
        self.steps: list[Step] = []

    def run(self, waterfall: Waterfall) -> str:
        """Work until the model calls no more tools; its last words."""
        self.steps = waterfall.steps
        try:
            for number in range(TURNS_MAX):
                step = Step(waterfall.now())
                self.steps.append(step)
                response = self._insist(step, waterfall, number)
                calls = [item for item in response.output if item.type == "function_call"]
                step.does = (
                    ", ".join(f"{call.name} {short(call.arguments)}" for call in calls) or "says so"
                )
                waterfall.tell(step)
                if not calls:
                    return str(response.output_text)
                outputs = [self._answer(call) for call in calls]
                step.tools_ended = waterfall.now()
                self._history += [*response.output, *outputs]
                self._fresh, self._parent = outputs, response.id
        finally:
            self._line.drop()
        raise Final(f"the model went on for {TURNS_MAX} turns")

    def _insist(self, step: Step, waterfall: Waterfall, number: int) -> Any:
        """One turn, again and again while that may help."""
        for attempt in range(TRIES_MAX):
            try:
                return self._turn(step, waterfall, number)
            except Again as lost:
                step.retries.append(str(lost))
                waterfall.console.print(f"[dim]again with the whole history: {lost}[/dim]")
                self._line.drop()
                self._fresh, self._parent = list(self._history), None
                time.sleep(WAIT_S * 2**attempt if attempt else 0)
        raise Final(f"lost {TRIES_MAX} times: {step.retries[-1]}")

    def _turn(self, step: Step, waterfall: Waterfall, number: int) -> Any:
        step.sent_items = len(self._fresh)
        fields: dict[str, Any] = {"previous_response_id": self._parent} if self._parent else {}
        if self._is_forced:
            name = FORCED[number] if number < len(FORCED) else None
            fields["tool_choice"] = {"type": "function", "name": name} if name else "none"
            fields["max_output_tokens"] = FORCED_TOKENS_MAX
        events = self._line.turn(
            {
                "model": self._model,
                "instructions": INSTRUCTIONS,
                "tools": TOOLS,
                "input": self._fresh,
                "store": False,
                **fields,
            }
        )
        for event in events:
            if event.type.endswith(".delta") and not step.first:
                step.first = waterfall.now()
            is_last = self._is_forced and number >= len(FORCED)
            if event.type == "response.completed" or (
                is_last and event.type == "response.incomplete"
            ):
                # The last words of a small model may be cut: they are not the work.
                step.ended = waterfall.now()
                usage = event.response.usage
                step.input_tokens, step.output_tokens = usage.input_tokens, usage.output_tokens
                return event.response
            check(event)
        raise Again("the connection ended before the response")

    def _answer(self, call: Any) -> dict[str, str]:
        try:
            arguments = json.loads(call.arguments)
        except ValueError as error:
            output = f"error: the arguments are not JSON: {error}"
        else:
            output = self._workspace.call(call.name, arguments)
        return {"type": "function_call_output", "call_id": call.call_id, "output": output}


def check(event: Any) -> None:
    """Whether a turn has ended badly, and whether another attempt may help."""
    if event.type == "error":
        may_help = event.error.code in NEW_SOCKET or (getattr(event, "status", 0) or 0) >= 500
        raise (Again if may_help else Final)(f"{event.error.code}: {event.error.message}")
    if event.type == "response.failed":
        error = event.response.error
        is_ours = error.code in ("server_error", "rate_limit_exceeded")
        raise (Again if is_ours else Final)(f"{error.code}: {error.message}")
    if event.type == "response.incomplete":
        raise Final(f"the answer was cut: {event.response.incomplete_details.reason}")


def short(arguments: str) -> str:
    return arguments if len(arguments) <= 32 else arguments[:31] + "…"


def main() -> int:
    """Run the agent; the exit status says whether the tests pass now."""
    parser = argparse.ArgumentParser(description="Let a model fix a failing test.")
    parser.add_argument("folder")
    parser.add_argument(
        "--forced", action="store_true", help="name the tool of each turn, for small models"
    )
    parser.add_argument("--plain", action="store_true", help="draw the waterfall once, at the end")
    options = parser.parse_args()
    base_url = os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1")
    client = openai.OpenAI(
        base_url=base_url, api_key=os.environ.get("OPENAI_API_KEY", "none"), max_retries=0
    )
    model = os.environ.get("EXAMPLE_MODEL") or client.models.list().data[0].id
    console = Console()
    waterfall = Waterfall(console)
    workspace = Workspace(options.folder)
    agent = Agent(client, model, workspace, is_forced=options.forced)
    try:
        if options.plain or not console.is_terminal:
            words = agent.run(waterfall)
        else:
            with Live(waterfall, console=console, refresh_per_second=12, transient=True):
                words = agent.run(waterfall)
    except Final as error:
        console.print(waterfall)
        print(f"gave up: {error}", file=sys.stderr)
        return 1
    console.print(waterfall)
    console.print(words, markup=False)
    verdict = workspace.run_tests().splitlines()[-1]
    console.print(f"[bold]{verdict}[/bold]")
    return 0 if verdict == "the tests pass" else 1


if __name__ == "__main__":
    sys.exit(main())
