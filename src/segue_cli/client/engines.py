"""How does an operator take a replica of an engine out of service, and return it? `segue engines`.

Through the control socket of a server on this machine. The order holds for all servers that share its store.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec

from segue.errors import Misconfigured
from segue.printable import say
from segue.seams.engine_status import EngineStatus
from segue.server.control import DrainOrder, FleetStatus
from segue.workers.orders import give_order
from segue_cli.client.operate import NOT_RUNNING, our_server
from segue_cli.client.talk import add_server

# How often a replica that drains is looked at, and how long by default.
LOOK_S = 0.5
WAIT_S = 600.0
STILL_RUNNING = 1

EPILOG = """\
A drained engine finishes the responses that run there and gets no new ones; conversations go on at other engines,
which read their prompts again once. An order holds in all workers, and on all machines that share a PostgreSQL store.
It survives `segue reload`, and is forgotten when all of them have been restarted. To keep an engine out of service for
longer, list it in the setting engine_drained.

To upgrade an engine:

  segue engines drain http://10.0.0.5:8000
  ... restart the engine ...
  segue engines return http://10.0.0.5:8000"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The action, the engine, and how long to wait."""
    actions = ("list", "drain", "return")
    about = "list (the default), drain or return"
    parser.add_argument(
        "action", nargs="?", default="list", choices=actions, metavar="ACTION", help=about
    )
    about = "URL of an engine, or its HOST:PORT, as `segue engines` lists it"
    parser.add_argument("engine", nargs="?", metavar="ENGINE", help=about)
    about = "drain the last engine of a model too: its requests fail with status 503 until it is returned"
    parser.add_argument("--force", action="store_true", help=about)
    about = f"seconds that `drain` waits until nothing runs there (default: {WAIT_S:g}; 0: do not wait); exit status 1 "
    parser.add_argument(
        "--wait", type=float, default=WAIT_S, metavar="S", help=about + "if responses still run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    add_server(parser)
    parser.epilog = EPILOG
    parser.formatter_class = lambda prog: argparse.RawDescriptionHelpFormatter(
        prog, max_help_position=34
    )


def run(options: argparse.Namespace) -> int:
    """Run the command; returns the exit status."""
    if (options.action == "list") != (options.engine is None):
        needs = "takes no engine" if options.engine else "needs the URL of an engine"
        raise Misconfigured(f"`segue engines {options.action}` {needs}.")
    found = our_server(options)
    if found is None:
        return NOT_RUNNING
    path = found[0]
    if options.action == "list":
        _show(options, _ask(path, "engines"))
        return 0
    order = DrainOrder(options.engine, options.action == "drain", options.force)
    fleet = _ask(path, "drain", msgspec.json.encode(order))
    status = 0
    if order.is_drained and options.wait > 0:
        fleet, status = _wait(path, order.engine, fleet, options.wait)
    _show(options, fleet)
    _say_how_long(order, fleet)
    return status


def _say_how_long(order: DrainOrder, fleet: FleetStatus) -> None:
    """Until when the order holds, where the settings say something else."""
    name = next((one.name for one in fleet.engines if _is_meant(order.engine, one)), order.engine)
    if order.is_drained == (name in fleet.engine_drained):
        return
    until = "until all servers that share the store have been restarted"
    if order.is_drained:
        words = f"{name} is drained {until}, or returned; to keep it so, add it to engine_drained"
    else:
        words = f"{name} is in service {until}; it is listed in engine_drained, remove it there"
    say(f"note: {words}.", file=sys.stderr)


def _ask(path: Path, verb: str, body: bytes = b"") -> FleetStatus:
    return msgspec.json.decode(asyncio.run(give_order(path, verb, body)), type=FleetStatus)


def _wait(path: Path, engine: str, fleet: FleetStatus, wait_s: float) -> tuple[FleetStatus, int]:
    """Wait until nothing runs there; what was seen last, and the exit status."""
    until, said = time.monotonic() + wait_s, 0
    while left := sum(one.running or 0 for one in fleet.engines if _is_meant(engine, one)):
        if time.monotonic() > until:
            words = f"{left} responses still run at {engine}, which stays drained"
            say(f"{words}: waited {wait_s:g} s.", file=sys.stderr)
            return fleet, STILL_RUNNING
        if left != said:
            say(f"Draining {engine}: {left} responses running.", file=sys.stderr)
        said = left
        time.sleep(LOOK_S)
        fleet = _ask(path, "engines")
    return fleet, 0


def _is_meant(engine: str, one: EngineStatus) -> bool:
    return one.name.rstrip("/").endswith(engine.rstrip("/"))


def _show(options: argparse.Namespace, fleet: FleetStatus) -> None:
    if options.json:
        say(msgspec.json.encode(fleet).decode())
    else:
        say("\n".join(_lines(fleet)))
    if fleet.answered < fleet.workers:
        missing = fleet.workers - fleet.answered
        words = f"warning: {missing} of {fleet.workers} worker processes did not answer; run this command again"
        say(f"{words}.", file=sys.stderr)


def _lines(fleet: FleetStatus) -> Iterator[str]:
    if not fleet.engines:
        yield "This server has no engines with a URL."
        return
    models, names = (
        max(len(getattr(one, field)) for one in fleet.engines) for field in ("model", "name")
    )
    for one in fleet.engines:
        load = f"{one.running or 0} running, {one.waiting or 0} waiting"
        yield f"{one.model:{models}}  {one.name:{names}}  {one.state:7}  {load}"
