from __future__ import annotations

from pathlib import Path

import pytest
import websockets
from websockets.exceptions import InvalidStatus

from segue.listener.fd_limit import RESERVED
from tests.support import ServedProcess, fetch, metric, served_process, wire


def limited(flags: str) -> list[str]:
    """Run a command with this limit of open files."""
    return ["sh", "-c", f'ulimit {flags} && exec "$@"', "sh"]


async def open_many(served: ServedProcess, count: int) -> list[websockets.ClientConnection]:
    return [await websockets.connect(served.ws_url, compression=None) for _ in range(count)]


async def test_server_raises_a_low_limit_of_open_files_as_far_as_it_may(tmp_path: Path) -> None:
    flags = ("--store", "memory", "--connections-max", "300")
    with served_process(*flags, cwd=tmp_path, wrapper=limited("-Sn 64")) as served:
        opened = await open_many(served, 120)
        assert await metric(served, "segue_connections") == 120
        assert await metric(served, 'segue_limit{setting="connections_max"}') == 300
        for one in opened:
            await one.close()
        assert not [line for line in served.printed if "WARNING" in line]


async def test_connection_that_no_file_is_left_for_is_refused_in_words(tmp_path: Path) -> None:
    fitting = 20
    with served_process(
        *("--store", "memory"), cwd=tmp_path, wrapper=limited(f"-n {RESERVED + fitting}")
    ) as served:
        opened = await open_many(served, fitting)
        with pytest.raises(InvalidStatus) as caught:
            await websockets.connect(served.ws_url)
        assert caught.value.response.status_code == 503
        assert int(caught.value.response.headers["retry-after"]) >= 1
        assert (await fetch(served, "GET", "/health")).status == 200
        assert await metric(served, 'segue_limit{setting="connections_max"}') == fitting
        await opened.pop().close()
        async with wire(served) as socket:
            assert (await socket.turn(input="x"))["type"] == "response.completed"
        for one in opened:
            await one.close()
        told = [line for line in served.printed if "may open" in line]
        assert len(told) == 1
        assert f"accepts {fitting} connections" in told[0]
