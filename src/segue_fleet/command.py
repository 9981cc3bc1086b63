"""How does a person start, watch and end a fleet on this machine? `segue fleet up`, `status` and `down`.

`up` stays in the terminal until Ctrl-C or `down`, and removes its folder then. A process of the fleet that ends,
because it was killed for a demonstration, is started again after a moment.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
import time
import urllib.request
from pathlib import Path

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured
from segue.printable import say
from segue_fleet.blocks import ReplicaShape
from segue_fleet.fleet import (
    Fleet,
    FleetMember,
    FleetShape,
    answers,
    kill_session,
    remove_folder,
)
from segue_fleet.programs import find_haproxy, find_postgres
from segue_fleet.replica import ReplicaCounters

ACTIONS = ("up", "status", "down")
RECORD = "fleet.json"
WATCH_S = 0.2
BACK_S = 5.0
DOWN_S = 60.0


class FleetRecord(Struct, frozen=True):
    """What `status` and `down` know of a fleet."""

    pid: int
    members: list[FleetMember]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = FleetShape()
    replica = ReplicaShape()
    parser.add_argument(
        "action", choices=ACTIONS, help="up: start, and run until Ctrl-C; status; down: end it"
    )
    parser.add_argument("--folder", metavar="FOLDER", help=f"default: {default_folder()}")
    parser.add_argument("--json", action="store_true", help="status as JSON")
    parser.add_argument("--port", type=int, default=0, help="port of the API; 0: a free one")
    for name, value, about in (
        ("machines", shape.machines, "Segue servers"),
        ("workers", shape.workers, "processes of each server"),
        ("replicas", shape.replicas, "replicas of the engine"),
        ("kv-tokens", replica.kv_tokens, "KV room of a replica in tokens"),
        ("slots", replica.slots, "requests that a replica runs at a time"),
    ):
        parser.add_argument(
            f"--{name}", type=int, metavar="N", default=value, help=f"{about} (default: {value})"
        )
    parser.add_argument(
        "--time-factor", type=float, metavar="N", default=1.0,
        help="simulated seconds of a replica in a second (default: 1)",
    )  # fmt: skip
    parser.add_argument("--no-prometheus", action="store_true", help="without Prometheus")


def run(options: argparse.Namespace) -> int:
    folder = Path(options.folder).absolute() if options.folder else default_folder()
    match options.action:
        case "up":
            return _up(folder, options)
        case "status":
            return _status(folder, is_json=options.json)
        case _:
            return _down(folder)


def default_folder() -> Path:
    return Path(tempfile.gettempdir()) / f"segue-fleet-{os.getuid()}"


# --- up -----------------------------------------------------------------------------------------------


def _up(folder: Path, options: argparse.Namespace) -> int:
    shape = _shape(options)
    # What is missing is said before anything is made.
    find_postgres()
    find_haproxy()
    _make_folder(folder)
    fleet = Fleet(folder, shape)
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        say(f"starting a fleet in {folder}")
        fleet.start(lambda line: say(f"  {line}"))
        _record(fleet)
        say(_welcome(fleet))
        _restart_forever(fleet)
    except KeyboardInterrupt:
        say("\nending the fleet")
    finally:
        # A second Ctrl-C would leave processes running.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        fleet.stop()
        remove_folder(folder)
        signal.signal(signal.SIGTERM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)
    return 0


def _shape(options: argparse.Namespace) -> FleetShape:
    for name, most in (("machines", 10), ("workers", 32), ("replicas", 64)):
        if not 1 <= getattr(options, name) <= most:
            raise Misconfigured(f"--{name} must be between 1 and {most}.")
    for name in ("kv_tokens", "slots", "time_factor"):
        if getattr(options, name) <= 0:
            raise Misconfigured(f"--{name.replace('_', '-')} must be more than 0.")
    return FleetShape(
        machines=options.machines,
        workers=options.workers,
        replicas=options.replicas,
        replica=ReplicaShape(kv_tokens=options.kv_tokens, slots=options.slots),
        time_factor=options.time_factor,
        port=options.port,
        with_prometheus=not options.no_prometheus,
    )


def _make_folder(folder: Path) -> None:
    record = _read(folder)
    if record is not None and _is_alive(record.pid):
        raise Misconfigured(
            f"fleet: one runs already in {folder} (process {record.pid}). `segue fleet down` ends it, --folder names "
            "another folder."
        )
    if record is not None:
        # It was killed: its processes may live on.
        _kill_left(record)
        remove_folder(folder)
    try:
        # PostgreSQL may run as another user, who must be able to go through.
        folder.mkdir(mode=0o711)
    except FileExistsError:
        raise Misconfigured(
            f"fleet: {folder} exists and is no fleet's. Remove it, or name another by --folder."
        ) from None
    except OSError as error:
        raise Misconfigured(f"fleet: {folder} cannot be made: {error.strerror}.") from None


def _record(fleet: Fleet) -> None:
    record = FleetRecord(os.getpid(), fleet.seen())
    path = fleet.folder / RECORD
    path.with_suffix(".new").write_bytes(msgspec.json.encode(record))
    path.with_suffix(".new").replace(path)


def _welcome(fleet: Fleet) -> str:
    url = fleet.url
    machines = [fleet.members[name].url for name in fleet.machines]
    where = "" if fleet.folder == default_folder() else f" --folder {fleet.folder}"
    lines = [
        "",
        f"API            {url}/v1   (HAProxy, in turns to {len(machines)} machines)",
        *(f"dashboard      {machine}/" for machine in machines),
        f"replicas       {' '.join(fleet.members[name].url for name in fleet.replicas)}",
        f"Prometheus     {fleet.members['prometheus'].url}"
        if fleet.has_prometheus
        else "Prometheus     not installed (apt install prometheus); the fleet runs without it",
        "",
        "try it:",
        f"  segue chat --url {url}",
        f"  curl {url}/v1/responses -H 'content-type: application/json' "
        '-d \'{"model": "counted", "input": "Hello"}\'',
        f"  segue fleet status{where:12}what the replicas found of their prompts",
        "  kill -9 PID                   of a replica or machine (segue fleet status): it comes back in 5 s",
        "",
        f"The replicas have no model: they answer with random words. Ctrl-C, or `segue fleet down{where}`, ends all.",
    ]
    return "\n".join(lines)


def _restart_forever(fleet: Fleet) -> None:
    """Until Ctrl-C: a process that ended is started again."""
    back_at: dict[str, float] = {}
    while True:
        now = time.monotonic()
        for name in fleet.ended():
            if name not in back_at:
                back_at[name] = now + BACK_S
                say(f"{name} has ended; it is started again in {BACK_S:g} s")
            elif now >= back_at[name]:
                del back_at[name]
                fleet.signal(name, signal.SIGKILL)
                try:
                    fleet.run(name)
                except Misconfigured as error:
                    say(str(error))
                    continue
                _record(fleet)
                say(f"{name} is up again")
        time.sleep(WATCH_S)


# --- status and down ------------------------------------------------------------------------------------


def _read(folder: Path) -> FleetRecord | None:
    try:
        return msgspec.json.decode((folder / RECORD).read_bytes(), type=FleetRecord)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.MsgspecError) as error:
        raise Misconfigured(f"fleet: {folder / RECORD} cannot be read: {error}") from None


def _running(folder: Path) -> FleetRecord:
    record = _read(folder)
    if record is None or not _is_alive(record.pid):
        raise Misconfigured(f"fleet: none runs in {folder}. `segue fleet up` starts one.")
    return record


def _status(folder: Path, *, is_json: bool) -> int:
    record = _running(folder)
    rows = [_row(member) for member in record.members]
    if is_json:
        say(json.dumps({"pid": record.pid, "folder": str(folder), "members": rows}, indent=2))
        return 0
    say(f"a fleet in {folder} (process {record.pid})")
    for row in rows:
        state = "up" if row["is_up"] else "DOWN"
        say(f"  {row['name']:12} {state:5} pid {row['pid']!s:8} {row['url']}  {row['about']}")
    return 0


def _row(member: FleetMember) -> dict[str, object]:
    is_up = _is_alive(member.pid)
    about = ""
    if member.name.startswith("replica-"):
        counters = _counters(member.url)
        is_up = counters is not None
        if counters is not None:
            share = counters.found_tokens / max(1, counters.prompt_tokens)
            about = (
                f"{counters.requests} requests, {share:.1%} of their tokens found, {counters.running} running, "
                f"{counters.waiting} waiting, KV {counters.kv_tokens / counters.kv_tokens_max:.0%}"
            )
    elif member.name.startswith("machine-"):
        is_up = answers(member.url + "/ready")
    return {
        "name": member.name, "is_up": is_up, "pid": member.pid, "url": member.url, "about": about,
    }  # fmt: skip


def _counters(url: str) -> ReplicaCounters | None:
    try:
        with urllib.request.urlopen(url + "/counters", timeout=2) as page:
            return msgspec.json.decode(page.read(), type=ReplicaCounters)
    except OSError:
        return None


def _down(folder: Path) -> int:
    record = _running(folder)
    os.kill(record.pid, signal.SIGTERM)
    until = time.monotonic() + DOWN_S
    while (folder / RECORD).exists() and _is_alive(record.pid):
        if time.monotonic() > until:
            raise Misconfigured(f"fleet: process {record.pid} did not end within {DOWN_S:g} s.")
        time.sleep(0.1)
    say("the fleet has ended")
    return 0


def _is_alive(pid: int) -> bool:
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def _kill_left(record: FleetRecord) -> None:
    """Processes of a fleet whose own process was killed: those that still are what they were."""
    for member in record.members:
        try:
            command = Path(f"/proc/{member.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if b"segue" in command:
            kill_session(member.pid)
