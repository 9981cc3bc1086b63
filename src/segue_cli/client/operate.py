"""How does an operator look at a running server, stop it and reload it? `segue status`, `segue stop`, `segue reload`.

A server of this user on this machine is reached through its control socket (`control.py`), without a key. Of any other
one only `/ready` can be asked.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import select
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from segue.errors import Misconfigured
from segue.printable import say
from segue.seams.engine_status import joined
from segue.server.control import RELOAD_S_MAX, NotRunning, Reloaded, ServerStatus
from segue.workers.orders import find_control, give_order
from segue_cli.client.talk import (
    NotReachable,
    RunningServer,
    ServerRefused,
    add_server,
    server_of,
)

READY, NOT_READY, FAILED, NOT_RUNNING = 0, 1, 2, 3
EXIT_STATUS = "exit status: 0 running and ready, 1 running but not ready, 2 error, 3 not running"
# How often a server that stops is looked at, and how long after its grace period.
LOOK_S = 0.3
END_S_MAX = 60.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of these commands."""
    add_server(parser)
    verb = parser.prog.split()[-1]
    if verb == "stop":
        now = "end running responses now, instead of waiting up to grace_s for them"
        parser.add_argument("--now", action="store_true", help=now)
    else:
        parser.add_argument("--json", action="store_true", help="print JSON")
    if verb == "status":
        parser.epilog = EXIT_STATUS


def run(options: argparse.Namespace) -> int:
    """Run one of the commands; returns the exit status."""
    server, control = _addressed(options)
    return {"status": _status, "stop": _stop, "reload": _reload}[options.verb](
        options, server, control
    )


def _addressed(options: argparse.Namespace) -> tuple[RunningServer, Path | None]:
    """The server that the flags name, and its control socket on this machine."""
    server = server_of(options)
    parts = urlsplit(server.url)
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return server, find_control(parts.hostname or "", port)


def our_server(options: argparse.Namespace) -> tuple[Path, ServerStatus] | None:
    """The control socket of the server that the flags name, and its status; None if none is running."""
    return _ours(*_addressed(options))


# --- status ---


def _status(options: argparse.Namespace, server: RunningServer, control: Path | None) -> int:
    status = _ask_status(control)
    if status is None:
        return _status_from_afar(options, server)
    if options.json:
        say(_json(status))
    else:
        say("\n".join(_lines(status)))
    return READY if status.is_ready else NOT_READY


def _ask_status(control: Path | None) -> ServerStatus | None:
    """None if no server listens there; a name may be left of one that was killed."""
    if control is None:
        return None
    try:
        return msgspec.json.decode(asyncio.run(give_order(control, "status")), type=ServerStatus)
    except NotRunning:
        return None


def _json(status: ServerStatus) -> str:
    whole = {"is_running": True, "is_ready": status.is_ready} | msgspec.to_builtins(status)
    return msgspec.json.encode(whole).decode()


def _lines(status: ServerStatus) -> Iterator[str]:
    problems = sorted(
        {name for one in status.workers for name, is_well in one.checks.items() if not is_well}
    )
    if missing := status.workers_wanted - len(status.workers):
        problems.append(f"{missing} of {status.workers_wanted} workers do not answer")
    is_stopping = "accepting" in problems
    state = "is stopping" if is_stopping else "is running, not ready" if problems else "is running"
    yield f"Segue {status.version} {state} at {status.url}/v1"
    if problems:
        yield f"  not ready    {', '.join(problems)}"
    yield f"  process      {status.pid}, since {_when(status.started_at)}"
    if status.reloaded_at is not None:
        yield f"  reloaded     {_when(status.reloaded_at)}"
    if status.workers_wanted > 1:
        yield f"  workers      {', '.join(str(one.pid) for one in status.workers)}"
    yield f"  store        {status.store}"
    if status.workers:
        yield f"  models       {', '.join(status.workers[0].models)}"
    for one in joined(engine for worker in status.workers for engine in worker.engines):
        load = "" if one.running is None else f", {one.running} running, {one.waiting} waiting"
        yield f"  engine       {one.model}: {one.name}, {one.state}{load}"
    yield f"  responses    {sum(one.responses_running for one in status.workers)} running"
    yield f"  connections  {sum(one.connections for one in status.workers)} WebSocket"
    held, may, all_of_it = (
        sum(getattr(one, name) for one in status.workers) / 1e6
        for name in ("memory_bytes", "memory_bytes_max", "resident_bytes")
    )
    yield f"  memory       {all_of_it:,.0f} MB; histories and caches hold {held:,.0f} MB of at most {may:,.0f}"


def _when(at: float) -> str:
    minutes = int(time.time() - at) // 60
    clock = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [f"{count} {unit}" for count, unit in ((days, "d"), (hours, "h"), (minutes, "min"))]
    age = " ".join(part for part in parts if part[0] != "0") or "less than a minute"
    return f"{clock} ({age})"


def _status_from_afar(options: argparse.Namespace, server: RunningServer) -> int:
    """Of a server that is not ours there is only what it answers over HTTP."""
    is_running, is_ready, problem = True, True, ""
    try:
        server.ask("/ready")
    except NotReachable as error:
        is_running, is_ready, problem = False, False, str(error)
    except ServerRefused as error:
        is_ready, problem = False, str(error)
    if options.json:
        found = {"is_running": is_running, "is_ready": is_ready, "url": server.url}
        say(msgspec.json.encode(found).decode())
    elif not is_running:
        say(f"Not running: {problem}")
    else:
        state = "is running" if is_ready else f"is running, not ready ({problem})"
        say(f"A server {state} at {server.base_url}.\n  {NOT_OURS}")
    return NOT_RUNNING if not is_running else READY if is_ready else NOT_READY


NOT_OURS = (
    "It was started by another user, in a container or on another machine: run this command there for details, "
    "to stop it or to reload it."
)


def _ours(server: RunningServer, control: Path | None) -> tuple[Path, ServerStatus] | None:
    """The server that can be stopped and reloaded from here; None if none is running."""
    status = _ask_status(control)
    if control is not None and status is not None:
        return control, status
    try:
        server.ask("/health")
    except NotReachable:
        say(f"No server is running at {server.url}.", file=sys.stderr)
        return None
    except ServerRefused as error:
        raise Misconfigured(f"url: {server.url} is no Segue: {error}") from None
    raise Misconfigured(f"url: a server is running at {server.url}. {NOT_OURS}")


# --- stop ---


def _stop(options: argparse.Namespace, server: RunningServer, control: Path | None) -> int:
    found = _ours(server, control)
    if found is None:
        return NOT_RUNNING
    path, status = found
    ended = _watch_process(status.pid)
    asyncio.run(give_order(path, "stop", b"now" if options.now else b""))
    give_up_at = time.monotonic() + END_S_MAX + (0 if options.now else status.grace_s)
    said = ""
    while not ended(LOOK_S):
        if time.monotonic() > give_up_at:
            raise Misconfigured(
                f"process {status.pid} still runs. If it hangs: kill -KILL {status.pid}"
            )
        said = _show_rest(path, said)
    say(f"Segue at {server.url} has stopped (process {status.pid}).")
    return 0


def _show_rest(path: Path, said: str) -> str:
    """Print how many responses still run, where that has changed; what was printed last."""
    try:
        status = _ask_status(path)
    except Misconfigured:
        return said
    left = 0 if status is None else sum(one.responses_running for one in status.workers)
    words = f"Stopping: waiting for running responses ({left})." if left else said
    if words != said:
        say(words, file=sys.stderr)
    return words


def _watch_process(pid: int) -> Callable[[float], bool]:
    """A function that waits so long for the end of this process, and says whether it has ended. It is held by a
    descriptor where there is one: its number may be given to another process later."""
    if not hasattr(os, "pidfd_open"):
        return lambda wait_s: not _exists(pid, wait_s)
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return lambda wait_s: True
    return lambda wait_s: bool(select.select([descriptor], [], [], wait_s)[0])


def _exists(pid: int, wait_s: float) -> bool:
    time.sleep(wait_s)
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


# --- reload ---


def _reload(options: argparse.Namespace, server: RunningServer, control: Path | None) -> int:
    found = _ours(server, control)
    if found is None:
        return NOT_RUNNING
    path, status = found
    try:
        answer = asyncio.run(give_order(path, "reload", s_max=RELOAD_S_MAX))
    except Misconfigured as error:
        raise Misconfigured(f"nothing was changed: {error}") from None
    if options.json:
        say(answer.decode())
        return 0
    result = msgspec.json.decode(answer, type=Reloaded)
    say(f"Reloaded Segue at {status.url} (process {status.pid}).")
    say(f"  changed: {', '.join(result.changed) or 'nothing'}")
    if result.needs_restart:
        say(f"  not changed, needs a restart: {', '.join(result.needs_restart)}")
    if result.silent_engines:
        say(f"  warning: these engines do not answer: {', '.join(result.silent_engines)}")
    return 0
