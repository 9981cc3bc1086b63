"""Python code in a real sandbox: its state, its values and pictures, and how it is stopped."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import pytest

from segue.isolation import channel
from segue.sandbox.client import KeeperClient, KeeperProcess
from segue.sandbox.messages import CommandEnd, Printed, RunCommand
from tests.escapes.conftest import sandboxes_can_be_made
from tests.sandbox.test_keeper import container, keeper

__all__ = ["keeper", "sandboxes_can_be_made"]


@pytest.fixture
async def client(keeper: KeeperProcess) -> AsyncIterator[KeeperClient]:
    """A client whose containers are gone after the test: an owner may have few."""
    asking = KeeperClient(keeper.socket)
    yield asking
    for each in await asking.list_all("me"):
        await asking.delete("me", each.id)


# As much of matplotlib as is asked.
PYPLOT = """
import os
os.makedirs("matplotlib", exist_ok=True)
open("matplotlib/__init__.py", "w").close()
with open("matplotlib/pyplot.py", "w") as file:
    file.write('''
open_figures = [1, 2]
class Figure:
    def savefig(self, path, **options):
        with open(path, "wb") as file:
            file.write(b"picture")
def get_fignums(): return list(open_figures)
def figure(number): return Figure()
def close(which): open_figures.clear()
''')
"""


async def code(
    client: KeeperClient, name: str, text: str, s_max: float = 20.0
) -> tuple[str, CommandEnd]:
    said = ""
    async for piece in client.run(RunCommand("me", name, text, s_max, 10_000, "python")):
        said += piece.stdout + piece.stderr
        if not isinstance(piece, Printed):
            return said, piece
    raise AssertionError("code has an end")


async def test_variables_values_and_errors_are_those_of_a_notebook(client: KeeperClient) -> None:
    name = await container(client)
    assert (await code(client, name, "import math\nx = 20"))[0] == ""
    said, end = await code(client, name, "print('a')\nx + 1")
    assert (said, end.exit_code, end.note) == ("a\n21\n", 0, "")
    said, end = await code(client, name, "def f():\n    return 1 / 0\nf()")
    assert said.startswith("Traceback (most recent call last):\n")
    assert "return 1 / 0" in said
    assert said.endswith("ZeroDivisionError: division by zero\n")
    assert "interpreter" not in said
    assert (end.exit_code, end.note) == (1, "")
    assert "SyntaxError" in (await code(client, name, "x ="))[0]
    assert "input() cannot be used here" in (await code(client, name, "input('Name? ')"))[0]
    assert (await code(client, name, "raise SystemExit(3)"))[1].note == ""
    assert (await code(client, name, "import asyncio\nawait asyncio.sleep(0, 'late')"))[
        0
    ] == "'late'\n"
    # Programs that it starts, and files; the shell sees the same folder.
    assert (await code(client, name, "import subprocess\nsubprocess.run(['pwd']).returncode"))[
        0
    ] == "/mnt/data\n0\n"
    assert (await code(client, name, "x, __name__"))[0] == "(20, '__main__')\n"
    said, end = await code(client, name, "for n in range(100000): print(n)")
    assert said.startswith("0\n1\n")
    assert "characters left out" in said
    assert said.endswith("99999\n")


async def test_open_figures_are_pictures(client: KeeperClient) -> None:
    name = await container(client)
    await code(client, name, PYPLOT)
    _, end = await code(client, name, "import matplotlib.pyplot")
    assert end.pictures == ["figure-1.png", "figure-2.png"]
    data = [piece async for piece in client.read_file("me", name, "figure-2.png")]
    assert b"".join(data) == b"picture"
    assert (await code(client, name, "1"))[1].pictures == []


async def test_code_that_takes_too_long_is_interrupted_and_keeps_its_variables(
    client: KeeperClient,
) -> None:
    name = await container(client)
    said, end = await code(client, name, "y = 5\nprint('begun')\nwhile True: pass", s_max=0.5)
    assert said.startswith("begun\n")
    assert "KeyboardInterrupt" in said
    assert end.exit_code is None
    assert end.note == "It was interrupted after 0.5 s. The variables are kept."
    assert (await code(client, name, "y"))[0] == "5\n"


@pytest.mark.parametrize(
    "deadly, s_max",
    [
        ("import os\nos._exit(3)", 20.0),
        # It does not heed the interruption.
        ("import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass", 0.3),
        # It speaks in the place of its own interpreter.
        ("import os, time\nos.write(4, b'x' * 100000)\ntime.sleep(60)", 20.0),
        ("import os, time\nos.close(4)\ntime.sleep(60)", 20.0),
    ],
)
async def test_dead_interpreter_says_so_and_the_next_code_has_another(
    deadly: str, s_max: float, client: KeeperClient
) -> None:
    name = await container(client)
    await code(client, name, "y = 5")
    _, end = await code(client, name, deadly, s_max)
    assert "its variables are lost" in end.note
    said, end = await code(client, name, "y")
    assert "NameError" in said
    assert (await code(client, name, "6 * 7"))[0] == "42\n"


FLOODING = """
import os, threading, time
def flood():
    until, size = time.monotonic() + 0.5, 0
    while time.monotonic() < until:
        size += os.write(1, b"late" * 16384)
    with open("new", "w") as file:
        file.write(str(size))
    os.rename("new", "size")
threading.Thread(target=flood).start()
"""


async def test_thread_that_prints_after_its_code_is_slowed_and_belongs_to_no_code(
    client: KeeperClient,
) -> None:
    name = await container(client)
    await code(client, name, FLOODING)
    async with asyncio.timeout(20):
        while "size" not in [entry.path for entry in await client.list_files("me", name)]:
            pass
    size = int(b"".join([data async for data in client.read_file("me", name, "size")]))
    assert 0 < size < channel.BYTES_S
    assert (await code(client, name, "6 * 7"))[0] == "42\n"


async def test_forged_answers_reach_nobody_else(client: KeeperClient) -> None:
    name, other = await container(client), await container(client)
    forged = b'1["../../etc/passwd", "a.png"]'
    text = f"import os, signal\nos.write(4, ({len(forged)}).to_bytes(4, 'little') + {forged!r})\nsignal.pause()"
    _, end = await code(client, name, text)
    assert end.pictures == ["../../etc/passwd", "a.png"]
    assert (await code(client, other, "1"))[0] == "1\n"


async def test_code_runs_one_after_the_other_and_ends_with_its_client(client: KeeperClient) -> None:
    name = await container(client)
    await code(client, name, "seen = []")
    first = "import time\nseen.append(1)\ntime.sleep(0.2)\nseen.append(2)"
    await asyncio.gather(code(client, name, first), code(client, name, "seen.append(3)"))
    assert (await code(client, name, "seen"))[0] in ("[1, 2, 3]\n", "[3, 1, 2]\n")
    leaving = asyncio.create_task(code(client, name, "while True: pass"))
    await asyncio.sleep(0)
    leaving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leaving
    assert (await code(client, name, "len(seen)"))[0] == "3\n"


async def test_interpreter_is_ready_soon(keeper: KeeperProcess, client: KeeperClient) -> None:
    name = await container(client)
    took = []
    for _ in range(6):
        began = time.perf_counter()
        assert (await code(client, name, "1"))[0] == "1\n"
        took.append(time.perf_counter() - began)
    print(f"python cold {took[0] * 1000:.0f} ms, warm {min(took[1:]) * 1000:.1f} ms")
    assert took[0] < 5
