"""The keeper as a process of its own: without secrets, gone with its server, its containers apart by owner."""

from __future__ import annotations

import asyncio
import fnmatch
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from segue.errors import ApiError, Misconfigured
from segue.ids import new_id
from segue.isolation.limits import processes_of
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.folders import OLD, own_folder
from segue.sandbox.messages import CommandEnd, ContainerSpec, Printed, RunCommand
from tests.escapes.conftest import outside, sandboxes_can_be_made
from tests.escapes.places import runsc
from tests.support import until

__all__ = ["outside", "sandboxes_can_be_made"]


@pytest.fixture(scope="module")
def keeper() -> Iterator[KeeperProcess]:
    process = KeeperProcess("", 8)
    process.start()
    yield process
    process.close()


@pytest.fixture
def client(keeper: KeeperProcess) -> KeeperClient:
    return KeeperClient(keeper.socket)


async def container(client: KeeperClient, owner: str = "me", **spec: object) -> str:
    made = await client.create(owner, new_id("cntr"), ContainerSpec(**spec))  # type: ignore[arg-type]
    return made.id


async def run(
    client: KeeperClient, name: str, command: str, s_max: float = 20
) -> tuple[str, CommandEnd]:
    said, outcome = "", None
    async for piece in client.run(RunCommand("me", name, command, s_max, 10_000)):
        if isinstance(piece, Printed):
            said += piece.stdout + piece.stderr
        else:
            outcome = piece
    assert outcome is not None
    return said + outcome.stdout + outcome.stderr, outcome


async def test_commands_and_files(client: KeeperClient) -> None:
    name = await container(client, name="first")
    await client.write_file("me", name, "in/a.csv", b"1,2\n")
    said, outcome = await run(client, name, "cat in/a.csv; echo err >&2; echo out > b.txt; exit 3")
    assert (sorted(said.split()), outcome.exit_code) == (["1,2", "err"], 3)
    found = {entry.path: entry.is_uploaded for entry in await client.list_files("me", name)}
    assert found == {"b.txt": False, "in/a.csv": True}
    assert b"".join([data async for data in client.read_file("me", name, "b.txt")]) == b"out\n"
    await client.delete_file("me", name, "b.txt")
    assert len(await client.list_files("me", name)) == 1
    about = await client.find("me", name)
    assert (about.status, about.name, about.isolation) == ("active", "first", "kernel-shared")
    await client.delete("me", name)
    with pytest.raises(ApiError) as gone:
        await run(client, name, "true")
    assert (gone.value.status, gone.value.code) == (404, "container_not_found")


async def test_output_comes_while_the_command_runs(client: KeeperClient) -> None:
    name = await container(client)
    running = client.run(RunCommand("me", name, "echo first; read x < fifo; echo $x", 20, 1_000))
    await run(client, name, "mkfifo fifo")
    assert await anext(running) == Printed("first\n")
    await run(client, name, "echo second > fifo")
    assert "".join([piece.stdout async for piece in running]) == "second\n"
    await client.delete("me", name)


async def test_client_that_leaves_stops_its_command(client: KeeperClient) -> None:
    name = await container(client)
    running = client.run(RunCommand("me", name, "echo begun; sleep 60; touch late", 60, 1_000))
    await anext(running)
    await running.aclose()

    async def alone() -> bool:
        return (await run(client, name, "ps ax | grep -c '[s]leep 60'"))[0] == "0\n"

    async with asyncio.timeout(5):
        while not await alone():
            pass
    await client.delete("me", name)


async def test_owners_do_not_see_each_other(client: KeeperClient) -> None:
    name = await container(client, "you")
    assert name not in [each.id for each in await client.list_all("me")]
    words = []
    for wrong in (name, new_id("cntr")):
        with pytest.raises(ApiError) as refused:
            await client.find("me", wrong)
        words.append(refused.value.message.replace(wrong, ""))
    assert words[0] == words[1]
    await client.delete("you", name)


async def test_owner_has_so_many_containers(client: KeeperClient) -> None:
    names = [await container(client) for _ in range(4)]
    with pytest.raises(ApiError) as refused:
        await container(client)
    assert (refused.value.status, refused.value.code) == (429, "too_many_containers")
    for name in names:
        await client.delete("me", name)


async def test_unstored_container_touches_no_disk(
    client: KeeperClient, keeper: KeeperProcess
) -> None:
    name = await container(client, is_volatile=True)
    await client.write_file("me", name, "in/a", b"words")
    assert (await run(client, name, "cat in/a; echo more >> in/a"))[0] == "words"
    await run(client, name, "echo canary-in-memory > /mnt/data/x; df /mnt/data | grep tmpfs")
    folder = Path(tempfile.gettempdir(), f"segue-sandboxes-{os.geteuid()}")
    assert not _contains(folder, "canary-in-memory")
    data = [data async for data in client.read_file("me", name, "x")]
    assert b"".join(data) == b"canary-in-memory\n"
    await client.delete("me", name)


async def test_name_with_a_zero_byte_is_refused_in_words(client: KeeperClient) -> None:
    name = await container(client)
    await client.write_file("me", name, "a", b"words")
    for path in ("a\0b", "in/a\0b", "a\0/b"):
        with pytest.raises(ApiError, match="has at most 255 bytes") as refused:
            await client.write_file("me", name, path, b"x")
        assert (refused.value.status, refused.value.code) == (400, "invalid_value")
        with pytest.raises(ApiError, match="has at most 255 bytes"):
            await anext(client.read_file("me", name, path))
    assert [entry.path for entry in await client.list_files("me", name)] == ["a"]
    await client.delete("me", name)


def test_keeper_has_no_environment(keeper: KeeperProcess) -> None:
    # Python itself sets the locale.
    names = Path(f"/proc/{keeper.pid}/environ").read_bytes()
    assert names.replace(b"LC_CTYPE=C.UTF-8", b"").strip(b"\0") == b""


async def test_crashes_inside_are_not_handed_to_the_host(
    client: KeeperClient, keeper: KeeperProcess
) -> None:
    """A program of the host that takes crashes runs as root and may write them to a disk, whatever the limit of their
    size is, unless it is 1: see `RLIMIT_CORE` in core(5) and in the kernel's fs/coredump.c."""
    name = await container(client)
    inside = "import resource; print(resource.getrlimit(resource.RLIMIT_CORE))"
    assert (await run(client, name, f"python3 -c '{inside}'"))[0] == "(1, 1)\n"
    assert {*map(_core_limits, processes_of(keeper.pid))} == {("1", "1")}
    await client.delete("me", name)


def _core_limits(pid: int) -> tuple[str, ...]:
    lines = Path(f"/proc/{pid}/limits").read_text().splitlines()
    return next(tuple(line.split()[4:6]) for line in lines if line.startswith("Max core file size"))


# A server and a process of the same user that it has started; where nobody is root, that is what a keeper is to it.
SAME_USER = """
import ctypes, os
from segue.sandbox.client import close_to_same_user
if os.geteuid() == 0:
    os.setresgid(65534, 65534, 65534)
    os.setresuid(65534, 65534, 65534)
    ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
def look():
    if os.fork() == 0:
        for name in ("environ", "mem", "fd"):
            try:
                place = f"/proc/{os.getppid()}/{name}"
                os.listdir(place) if name == "fd" else os.open(place, os.O_RDONLY)
                print(name, "seen", flush=True)
            except PermissionError:
                print(name, "closed", flush=True)
        os._exit(0)
    os.wait()
look()
close_to_same_user()
look()
print(len(os.listdir("/proc/self/fd")) > 2)
"""


def test_server_with_sandboxes_is_closed_to_its_own_user() -> None:
    done = subprocess.run([sys.executable, "-c", SAME_USER], capture_output=True, text=True)
    names = ("environ", "mem", "fd")
    expected = [*(f"{name} seen" for name in names), *(f"{name} closed" for name in names), "True"]
    assert done.stdout.splitlines() == expected, done.stderr


SERVER = """
import asyncio, sys
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.messages import RunCommand, ContainerSpec
async def main():
    keeper = KeeperProcess("", 4, adapter=sys.argv[1], runsc=sys.argv[2])
    keeper.start()
    client = KeeperClient(keeper.socket)
    await client.create("me", "cntr_1", ContainerSpec())
    async for piece in client.run(RunCommand("me", "cntr_1", "setsid sleep 61 & echo here; exec sleep 60", 60, 100)):
        print(keeper.pid, flush=True)
asyncio.run(main())
"""


@pytest.mark.parametrize("adapter", ["bwrap", "gvisor"])
@pytest.mark.parametrize("killed", ["server", "keeper"])
async def test_nothing_runs_a_second_after_a_kill(killed: str, adapter: str) -> None:
    server = _started(SERVER, adapter, runsc())
    assert server.stdout is not None
    keeper = int(server.stdout.readline())
    # But what removes the folders of dead keepers, which no sandbox is in.
    processes = [pid for pid in processes_of(keeper) if b"rm -rf" not in _command(pid)]
    assert len(processes) >= 4
    os.kill(server.pid if killed == "server" else keeper, signal.SIGKILL)
    async with asyncio.timeout(1.0):
        await until(lambda: not any(map(_is_alive, processes)))
    server.kill()
    server.wait()
    server.stdout.close()


def test_folders_of_dead_keepers_are_gone_at_the_next_start(tmp_path: Path) -> None:
    program = "import sys; from pathlib import Path; from segue.sandbox.folders import own_folder\n"
    program += "print(own_folder(Path(sys.argv[1])))"
    words = [sys.executable, "-c", program, tmp_path]
    dead = Path(subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip())
    (dead / "1/data").mkdir(parents=True)
    alive = own_folder(tmp_path)
    assert not dead.exists()
    assert own_folder(tmp_path) != alive
    assert alive.exists()


def test_folder_that_is_a_link_is_refused_and_what_it_leads_to_is_left_alone(
    tmp_path: Path,
) -> None:
    """Its name can be guessed: whoever may write beside it can lay a link there before the first start."""
    victim = tmp_path / "victim"
    (victim / "package").mkdir(parents=True)
    (victim / "package/lock").touch()
    victim.chmod(0o755)
    link = tmp_path / "segue-sandboxes-0"
    link.symlink_to(victim)
    with pytest.raises(Misconfigured, match="is not a folder of this user"):
        own_folder(link)
    assert (victim / "package/lock").exists()
    assert victim.stat().st_mode & 0o777 == 0o755


async def test_nothing_is_left_of_a_server_and_a_keeper_that_were_killed(
    outside: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(outside))
    server = _started(SERVER, "bwrap", "", TMPDIR=str(outside))
    assert server.stdout is not None
    os.kill(int(server.stdout.readline()), signal.SIGKILL)
    server.kill()
    server.wait()
    server.stdout.close()
    base = outside / f"segue-sandboxes-{os.geteuid()}"
    assert _below(outside, "data")
    dead = set(os.listdir(base))
    assert len(dead) == 2
    another = KeeperProcess("", 4)
    another.start()
    left = {*dead, *(name + OLD for name in dead)}
    await until(lambda: left.isdisjoint(os.listdir(base)))
    another.close()
    assert os.listdir(outside) == [base.name]


def _started(program: str, *words: str, **more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", program, *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, env={**os.environ, **more})


def _below(folder: Path, pattern: str) -> list[Path]:
    """What has such a name, also while it is being removed."""
    return [
        Path(place, name)
        for place, folders, files in os.walk(folder)
        for name in fnmatch.filter([*folders, *files], pattern)
    ]


def _contains(folder: Path, text: str) -> bool:
    return subprocess.run(["grep", "-rq", text, folder]).returncode == 0


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ")
    except OSError:
        return b""


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


async def test_what_dead_keepers_have_left_is_removed_beside_the_start(
    keeper: KeeperProcess,
) -> None:
    folder = Path(tempfile.gettempdir(), f"segue-sandboxes-{os.geteuid()}")
    left = folder / f"test-{new_id('x')}{OLD}"
    (left / "1/data").mkdir(parents=True)
    another = KeeperProcess("", 4)
    another.start()
    await until(lambda: left.name not in os.listdir(folder))
    another.close()


def test_keeper_that_cannot_make_a_sandbox_says_why(tmp_path: Path) -> None:
    empty = KeeperProcess(str(tmp_path), 4)
    with pytest.raises(Misconfigured, match="has no python3"):
        empty.start()
    empty.close()


# Root of a user namespace that has no id but its own, as in a container that was started without root.
ROOT_OF_ONE_ID = ("unshare", "--user", "--map-root-user")
NONE_MORE = ("sh", "-c", 'echo 0 > /proc/sys/user/max_user_namespaces; exec "$@"', "sh")


def test_root_that_has_no_other_user_ids_makes_sandboxes() -> None:
    words = [*ROOT_OF_ONE_ID, sys.executable, "-c", SERVER, "bwrap", ""]
    server = subprocess.Popen(words, stdout=subprocess.PIPE)
    assert server.stdout is not None
    assert int(server.stdout.readline())
    server.kill()
    server.wait()
    server.stdout.close()


MANY = """
import asyncio
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.messages import RunCommand, ContainerSpec
async def main():
    keeper = KeeperProcess("", 64)
    keeper.start()
    client = KeeperClient(keeper.socket)
    for number in range(16):
        await client.create("me", f"cntr_{number}", ContainerSpec())
        async for piece in client.run(RunCommand("me", f"cntr_{number}", "echo here", 60, 100)):
            print(piece.stdout, end="")
    keeper.close()
asyncio.run(main())
"""
FEW_FILES = ("sh", "-c", 'ulimit -Hn 900; ulimit -Sn 48; exec "$@"', "sh")


def test_keeper_may_open_what_its_containers_need() -> None:
    """Where the system gives a process few files at first, and in the end fewer than a sandbox may have."""
    words = [*FEW_FILES, sys.executable, "-c", MANY]
    done = subprocess.run(words, capture_output=True, text=True)
    assert (done.stdout.count("here"), done.returncode) == (16, 0), done.stderr


# As container runtimes and units of systemd have it: something lies over a part of /proc.
COVERED = ("unshare", "--user", "--map-root-user", "--mount")
COVERS = ("sh", "-c", 'mount --bind /proc/sys /proc/sys; exec "$@"', "sh")


def test_keeper_says_what_to_do_where_a_part_of_proc_is_covered() -> None:
    words = [*COVERED, *COVERS, sys.executable, "-c", SERVER, "bwrap", ""]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode
    assert "mount proc" in done.stderr
    assert "systempaths=unconfined" in done.stderr


@pytest.mark.parametrize("command", ["serve", "doctor"])
def test_nothing_weaker_is_taken_where_namespaces_are_forbidden(
    command: str, tmp_path: Path
) -> None:
    """`auto` too says why, and what to do."""
    segue = (sys.executable, "-m", "segue_cli.cli", command, "--environment", "auto")
    words = [*ROOT_OF_ONE_ID, *NONE_MORE, *segue, "--engine", "scripted", "--store", "memory"]
    words += ["--port", "0"]
    done = subprocess.run(words, capture_output=True, text=True, cwd=tmp_path)
    said = done.stdout + done.stderr
    assert done.returncode, said
    assert "no sandbox can be made here" in said
    assert "user.max_user_namespaces must be above 0" in " ".join(said.split())
