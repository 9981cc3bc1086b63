"""How does a person ask a model one question? `segue ask "…"`: the answer on standard output, the rest on stderr.

In: the question, and what a pipe holds. Out: the answer as it streams, or with --json the whole response object. The
server stores nothing. Exit status: 0 answered, 1 no answer or only a part of it, 2 not asked.
"""

from __future__ import annotations

import argparse
import sys
import time

from msgspec import UNSET

from segue.errors import Misconfigured
from segue.printable import say
from segue_cli.client.asking import decoded
from segue_cli.client.conversation import (
    AGAIN,
    ENDS,
    Talk,
    TalkResponse,
    figures_of,
)
from segue_cli.client.talk import (
    RunningServer,
    ServerRefused,
    add_model,
    add_server,
    find_endpoint,
    server_of,
)

ANSWERED, FAILED = 0, 1
EXIT_STATUS = (
    "exit status: 0 answered; 1 no answer, or only a part of it; "
    "2 not asked (no server, wrong key, unknown model)"
)
# With --json nothing is heard until the answer is whole.
ANSWER_S_MAX = 3600.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue ask`."""
    about = "the question; what is piped in is added to it"
    parser.add_argument("words", nargs="*", metavar="QUESTION", help=about)
    add_server(parser)
    add_model(parser)
    parser.add_argument("--instructions", help="instructions for the model (system prompt)")
    about = "print the response object, as the API returns it, when it is complete"
    parser.add_argument("--json", action="store_true", help=about)
    parser.epilog = EXIT_STATUS


def run(options: argparse.Namespace) -> int:
    """Ask, and print the answer; returns the exit status."""
    question = _question(options.words)
    server = server_of(options)
    model = find_endpoint(server, options.model).model
    say(f"{model} at {server.url}", file=sys.stderr)
    if options.json:
        return _print_json(server, model, question, options.instructions)
    return _stream(server, model, question, options.instructions)


def _question(words: list[str]) -> str:
    """The words of the command line, and below them what is piped in."""
    piped = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read().strip()
    question = "\n\n".join(filter(None, (" ".join(words), piped)))
    if not question:
        raise Misconfigured('nothing to ask: segue ask "Name a fruit.", or pipe a text into it.')
    return question


def _stream(server: RunningServer, model: str, question: str, instructions: str | None) -> int:
    talk = Talk(server.base_url, model, instructions, server.key)
    began = time.perf_counter()
    first: float | None = None
    try:
        for event in talk.ask(question):
            if event.type == AGAIN and first is not None:
                say()
                say("segue: the connection was lost in the middle of the answer.", file=sys.stderr)
                return FAILED
            if event.delta is not UNSET:
                first = first or time.perf_counter()
                # What the model thinks first is no part of the answer.
                is_answer = event.type == "response.output_text.delta"
                say(event.delta, end="", file=sys.stdout if is_answer else sys.stderr)
            if event.type == "response.reasoning_text.done":
                say(file=sys.stderr)
            if event.type not in ENDS:
                continue
            say()
            if problem := event.error or (event.response and event.response.error):
                say(f"segue: {problem.code}: {problem.message}", file=sys.stderr)
            elif event.response:
                took_s = (first or time.perf_counter()) - began
                say(figures_of(event.response, took_s), file=sys.stderr)
            return ANSWERED if event.type == "response.completed" else FAILED
    finally:
        talk.drop()
    return FAILED


def _print_json(server: RunningServer, model: str, question: str, instructions: str | None) -> int:
    body = {"model": model, "input": question, "store": False, "instructions": instructions}
    began = time.perf_counter()
    try:
        text = server.ask("/v1/responses", method="POST", body=body, wait_s=ANSWER_S_MAX)
    except ServerRefused as error:
        if error.status == 401:
            raise
        say(f"segue: {error}", file=sys.stderr)
        return FAILED
    response = decoded(text, TalkResponse, "a response")
    say(text.decode())
    say(figures_of(response, time.perf_counter() - began), file=sys.stderr)
    return FAILED if response.error or response.incomplete_details else ANSWERED
