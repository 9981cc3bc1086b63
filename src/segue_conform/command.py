"""How does a person run the suite? `segue conform`, or `segue-conform` where only the suite is installed."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import aiohttp
from aiohttp import web

from segue_conform.case import Case, Result, printable
from segue_conform.report import Report, as_badge, as_json, as_page, as_text
from segue_conform.suite import CASES, run_suite
from segue_conform.target import ANSWER_S, Target
from segue_conform.upstream import MODEL, Upstream

# With the name by which the command is installed.
EXAMPLES = """\
examples:
  {name} --url http://127.0.0.1:8080
  {name} upstream --port 9999        # then start your server with http://127.0.0.1:9999/v1 as its model endpoint
  {name} --url http://127.0.0.1:8080 --upstream http://127.0.0.1:9999 --html report.html
  {name} list                        # every case with its level and its source
"""
ADDRESS = re.compile("https?://[^/]")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.epilog = EXAMPLES.format(name=parser.prog)
    parser.set_defaults(program=parser.prog)
    add = parser.add_argument
    add(
        "what",
        nargs="?",
        choices=("run", "upstream", "list"),
        default="run",
        help="run the suite (default), serve the scripted model endpoint for it, or list the cases",
    )
    add("--url", help="the server under test, such as http://127.0.0.1:8080; `/v1` may be left out")
    add("--key", help="an API key of it")
    add("--model", help="the model to ask for (default: the first that the server lists)")
    add(
        "--upstream",
        metavar="URL",
        help="the scripted upstream after it, for cases that look at what reaches it",
    )
    add(
        "--only",
        metavar="TEXT",
        action="append",
        default=[],
        help="cases whose name begins so, such as responses.lanes; may be repeated",
    )
    add(
        "--answer-s",
        type=float,
        default=ANSWER_S,
        metavar="S",
        help=f"how long one answer may take (default {ANSWER_S:g}); more for a real model on a slow machine",
    )
    add("--all", action="store_true", help="print what passed, too")
    add("--json", metavar="FILE", help="write the report as JSON ('-' for standard output)")
    add("--html", metavar="FILE", help="write the report as one page")
    add("--badge", metavar="FILE", help="write a badge as SVG")
    add(
        "--host", default="127.0.0.1", help="upstream: the address to listen on (default 127.0.0.1)"
    )
    add("--port", type=int, default=9999, help="upstream: the port (default 9999)")


def run(options: argparse.Namespace) -> int:
    """0: every `must` that could be tried passed; 1: not so; 2: the server could not be asked."""
    if options.what == "list":
        for case in CASES:
            print(f"{case.level:7} {case.name:38} {case.claim}  [{case.source}]")
        return 0
    if options.what == "upstream":
        return serve_upstream(options)
    cases = chosen(options.only)
    if options.url is None or not cases:
        nothing = f"no case begins with {options.only}: see '{options.program} list'"
        say(options, "name a server by --url" if cases else nothing)
        return 2
    if odd := [url for url in (options.url, options.upstream) if url and not ADDRESS.match(url)]:
        say(options, f"'{odd[0]}' is no address such as http://127.0.0.1:8080")
        return 2
    try:
        report = asyncio.run(report_on(options, cases))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        say(options, f"{options.url} does not answer: {str(error) or type(error).__name__}")
        return 2
    try:
        write(options, report)
    except (FileNotFoundError, IsADirectoryError, PermissionError) as error:
        say(options, f"{error.filename} cannot be written: {error.strerror}")
        return 2
    return 0 if report.holds else 1


def say(options: argparse.Namespace, words: str) -> None:
    """What went wrong, after the name of the command."""
    print(f"{options.program}: {printable(words)}", file=sys.stderr)


def serve_upstream(options: argparse.Namespace) -> int:
    """The scripted model endpoint, until it is ended."""

    def started(*_: object) -> None:
        print(
            f"scripted upstream on http://{options.host}:{options.port}/v1, model '{MODEL}'",
            flush=True,
        )

    try:
        web.run_app(
            Upstream().app(),
            host=options.host,
            port=options.port,
            print=started,
            handle_signals=True,
            handler_cancellation=True,
        )
    except OSError as error:
        why = os.strerror(error.errno) if error.errno else str(error)
        say(options, f"port {options.port} on {options.host} cannot be used: {why}")
        return 2
    return 0


def chosen(beginnings: Sequence[str]) -> list[Case]:
    return [case for case in CASES if not beginnings or case.name.startswith(tuple(beginnings))]


async def report_on(options: argparse.Namespace, cases: Sequence[Case]) -> Report:
    base = options.url.rstrip("/")
    base = base if base.endswith("/v1") else f"{base}/v1"
    upstream = options.upstream and options.upstream.rstrip("/").removesuffix("/v1")
    # A server may end a connection that is kept at any time: clients try again, and a case must not fail of it.
    connector = aiohttp.TCPConnector(force_close=True)
    timeout = aiohttp.ClientTimeout(total=None, connect=10)
    async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
        target = Target(session, base, options.model or "", options.key, upstream)
        target.answer_s = options.answer_s
        listed = await first_model(target)
        target.model = target.model or listed
        began = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
        results = await run_suite(target, cases, progress(len(cases)))
    return Report(base, target.model, began, installed_version(), results)


async def first_model(target: Target) -> str:
    """The first model that the server lists; raises where it does not answer at all."""
    answer = await target.get("/models")
    rows = answer.body.get("data") if isinstance(answer.body, dict) else None
    return str(rows[0].get("id")) if rows else "default"


def progress(total: int) -> Callable[[Result], None]:
    """A line that counts, where standard error is a terminal."""
    done = 0

    def on_result(result: Result) -> None:
        nonlocal done
        done += 1
        if sys.stderr.isatty():
            print(
                f"\r{done} of {total}",
                end="" if done < total else "\r\033[K",
                file=sys.stderr,
                flush=True,
            )

    return on_result


def installed_version() -> str:
    for name in ("segue-conform", "segue"):
        try:
            return f"{name} {version(name)}"
        except PackageNotFoundError:
            continue
    return "unknown"


def write(options: argparse.Namespace, report: Report) -> None:
    if options.json == "-":
        print(json.dumps(as_json(report), indent=2))
    else:
        print(as_text(report, options.all))
    if options.json not in (None, "-"):
        Path(options.json).write_text(json.dumps(as_json(report), indent=2) + "\n")
    if options.html:
        Path(options.html).write_text(as_page(report))
    if options.badge:
        Path(options.badge).write_text(as_badge(report))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        "segue-conform",
        description="A conformance suite for servers of the Responses API, Messages and Chat Completions.",
    )
    add_arguments(parser)
    try:
        return run(parser.parse_args(arguments))
    except BrokenPipeError:
        # The reader of a pipe has left, as `head` does: what is left to print goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        return 130
