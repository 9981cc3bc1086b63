"""Which transport for a turn? The same turn over WebSocket, SSE on HTTP/1.1, SSE on HTTP/2, and gRPC.

    python -m venv V && V/bin/pip install uvicorn httptools uvloop websockets hypercorn h2 grpcio msgspec
    PYTHONPATH=src V/bin/python bench/transports.py [--turns 60] [--rounds 8]

A turn is what an agent's turn is here: 21 kB up (19 kB of tools and a tool's output), 100 small events down, each
written for itself as a model writes them, and a last event of 22 kB. No Segue server answers: each server decodes
nothing and makes nothing, so the figures are what the transport and its library cost. One process serves, this one
asks, over one connection; the candidates take turns. `segue` is our own socket class, imported from the tree. A
candidate whose packages are missing is named and left out. Bytes are counted by a relay, in turns of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import uvloop

from segue_bench.client import frame, local, upgrade_request
from segue_bench.figures import percentile
from segue_bench.rounds import installed, interleaved, print_table
from segue_bench.server import ServerProcess, spawn

UP = b'{"type":"response.create","tools":"' + b"t" * 21_000 + b'"}'
EVENT = b'{"type":"response.output_text.delta","delta":"' + b"d" * 170 + b'"}'
LAST = b'{"type":"response.completed","response":"' + b"r" * 22_000 + b'"}'
EVENTS = 100
KINDS = {
    "websocket (segue)": ("uvicorn", "websockets", "msgspec"),
    "websocket (library)": ("websockets",),
    "sse, http/1.1": ("uvicorn", "httptools"),
    "sse, http/2": ("hypercorn", "h2"),
    "grpc bidi": ("grpc",),
}
Turn = Callable[[], Awaitable[int]]


async def events() -> AsyncIterator[bytes]:
    """What a model writes: one event at a time."""
    for _ in range(EVENTS):
        yield EVENT
        await asyncio.sleep(0)
    yield LAST


def listening(port: int) -> None:
    print(f"port {port}", flush=True)


# --- servers --------------------------------------------------------------------------------------


async def serve_segue() -> None:
    import uvicorn

    from segue.listener.edge_limits import EdgeLimits
    from segue.listener.socket import Socket, SocketClosed, socket_class

    tasks: set[asyncio.Task[None]] = set()

    class Session:
        def opened(self, socket: Socket) -> None:
            self.socket = socket

        def received(self, text: bytes) -> None:
            task = asyncio.get_running_loop().create_task(self.answer())
            tasks.add(task)
            task.add_done_callback(tasks.discard)

        async def answer(self) -> None:
            async for event in events():
                self.socket.send([event])

        def refused(self, kind: str, size: int) -> bytes | None:
            return None

        def resumed(self) -> None: ...

        def closed(self, how: SocketClosed) -> None: ...

    ws = socket_class(lambda request: Session(), EdgeLimits(ping_s=3600))
    await run_uvicorn(uvicorn.Config(no_http, port=0, ws=ws, lifespan="off", log_config=None))


async def no_http(scope: Any, receive: Any, send: Any) -> None:
    raise AssertionError("only sockets are served here")


async def run_uvicorn(config: Any) -> None:
    import uvicorn

    server = uvicorn.Server(config)
    task = asyncio.create_task(server.serve())
    while not server.started:  # noqa: ASYNC110  # uvicorn has no event for it
        await asyncio.sleep(0.01)
    listening(server.servers[0].sockets[0].getsockname()[1])
    await task


async def serve_library() -> None:
    from websockets.asyncio.server import serve

    async def answer(socket: Any) -> None:
        async for _ in socket:
            async for event in events():
                await socket.send(event, text=True)

    async with serve(answer, "127.0.0.1", 0, compression=None, max_size=None) as server:
        listening(server.sockets[0].getsockname()[1])
        await asyncio.Future()


async def asgi_sse(scope: Any, receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        while True:  # hypercorn insists on a lifespan
            message = await receive()
            await send({"type": message["type"] + ".complete"})
            if message["type"] == "lifespan.shutdown":
                return
    while (await receive()).get("more_body"):
        pass
    headers = [(b"content-type", b"text/event-stream")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    async for event in events():
        data = b"event: x\ndata: " + event + b"\n\n"
        await send({"type": "http.response.body", "body": data, "more_body": True})
    await send({"type": "http.response.body", "body": b""})


async def serve_http1() -> None:
    import uvicorn

    await run_uvicorn(
        uvicorn.Config(
            asgi_sse, port=0, http="httptools", lifespan="off", log_config=None, access_log=False
        )
    )


async def serve_http2() -> None:
    from hypercorn.asyncio import serve
    from hypercorn.config import Config

    config = Config()
    config.bind = ["127.0.0.1:0"]
    config.loglevel = "WARNING"
    config.h2_max_inbound_frame_size = 2**18
    made = config.create_sockets()
    made.insecure_sockets[0].listen()
    config.create_sockets = lambda: made  # type: ignore[method-assign]
    listening(made.insecure_sockets[0].getsockname()[1])
    await serve(asgi_sse, config)  # type: ignore[arg-type]


async def serve_grpc() -> None:
    import grpc

    async def answer(requests: Any, context: Any) -> AsyncIterator[bytes]:
        async for _ in requests:
            async for event in events():
                yield event

    calls = {"Turns": grpc.stream_stream_rpc_method_handler(answer)}
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("bench.Loop", calls),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    listening(port)
    await server.wait_for_termination()


SERVERS = dict(
    zip(KINDS, (serve_segue, serve_library, serve_http1, serve_http2, serve_grpc), strict=True)
)


# --- clients: each gives a call that plays one turn and returns how many events came ---------------


@asynccontextmanager
async def over_websocket(port: int) -> AsyncIterator[Turn]:
    """By hand, as the HTTP clients are, so that no client library is measured where none is needed."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    writer.write(upgrade_request(local(port)))
    assert b" 101 " in await reader.readuntil(b"\r\n\r\n")
    request = frame(UP)

    async def turn() -> int:
        writer.write(request)
        count = 0
        while True:
            size = (await reader.readexactly(2))[1]
            if size == 126:
                size = int.from_bytes(await reader.readexactly(2), "big")
            await reader.readexactly(size)
            count += 1
            if size == len(LAST):
                return count

    yield turn
    writer.write(frame(b"", 8))
    await reader.read(1 << 16)
    writer.close()


@asynccontextmanager
async def over_http1(port: int) -> AsyncIterator[Turn]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1 << 20)
    head = f"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: {len(UP)}\r\n\r\n".encode()

    async def turn() -> int:
        writer.write(head + UP)
        await reader.readuntil(b"\r\n\r\n")
        count = 0
        while size := int(await reader.readuntil(b"\r\n"), 16):
            await reader.readexactly(size + 2)
            count += 1
        await reader.readexactly(2)
        return count

    yield turn
    writer.close()


@asynccontextmanager
async def over_http2(port: int) -> AsyncIterator[Turn]:
    import h2.config
    import h2.connection
    import h2.events

    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    connection = h2.connection.H2Connection(h2.config.H2Configuration(header_encoding=None))
    connection.initiate_connection()
    connection.increment_flow_control_window(1 << 24)
    writer.write(connection.data_to_send())
    names = [(":method", "POST"), (":path", "/"), (":scheme", "http"), (":authority", "x")]

    async def turn() -> int:
        stream = connection.get_next_available_stream_id()
        connection.send_headers(stream, [*names, ("content-length", str(len(UP)))])
        frame = connection.max_outbound_frame_size
        for start in range(0, len(UP), frame):
            part = UP[start : start + frame]
            while connection.local_flow_control_window(stream) < len(part):
                connection.receive_data(await reader.read(1 << 16))
            connection.send_data(stream, part, end_stream=start + frame >= len(UP))
        writer.write(connection.data_to_send())
        count = 0
        while True:
            for event in connection.receive_data(await reader.read(1 << 16)):
                if isinstance(event, h2.events.DataReceived):
                    count += event.data.count(b"event: ")
                    size = event.flow_controlled_length
                    connection.acknowledge_received_data(size, stream)
                elif isinstance(event, h2.events.StreamEnded):
                    writer.write(connection.data_to_send())
                    return count
            writer.write(connection.data_to_send())

    yield turn
    writer.close()


@asynccontextmanager
async def over_grpc(port: int) -> AsyncIterator[Turn]:
    import grpc

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = channel.stream_stream("/bench.Loop/Turns")()

        async def turn() -> int:
            await call.write(UP)
            count = 0
            while True:
                event = await call.read()
                count += 1
                if len(event) == len(LAST):
                    return count

        yield turn
        await call.done_writing()


CLIENTS = dict(
    zip(KINDS, (over_websocket, over_websocket, over_http1, over_http2, over_grpc), strict=True)
)


# --- measuring ------------------------------------------------------------------------------------


@contextmanager
def server(kind: str) -> Iterator[ServerProcess]:
    """A server in a process of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="segue-bench-") as folder,
        spawn([__file__, "--serve", kind], r"port (\d+)", Path(folder)) as process,
    ):
        yield process


async def bytes_of(kind: str, port: int) -> tuple[int, int]:
    """Bytes up and down of one turn, the handshake of the connection not counted."""
    counts = [0, 0]

    async def carry(reader: Any, writer: Any, way: int) -> None:
        with suppress(OSError):
            while data := await reader.read(1 << 16):
                counts[way] += len(data)
                writer.write(data)
        writer.close()

    async def accept(near: Any, back: Any) -> None:
        far, forth = await asyncio.open_connection("127.0.0.1", port)
        with suppress(asyncio.CancelledError):  # The loop ends with the measurement.
            await asyncio.gather(carry(near, forth, 0), carry(far, back, 1))

    between = await asyncio.start_server(accept, "127.0.0.1", 0)
    async with CLIENTS[kind](between.sockets[0].getsockname()[1]) as turn:
        await turn()
        before = list(counts)
        for _ in range(10):
            await turn()
        found = (counts[0] - before[0]) // 10, (counts[1] - before[1]) // 10
    between.close()
    return found


class Round(NamedTuple):
    """Seconds of each turn, and the processor time of a turn on either side."""

    walls: list[float]
    cpu_s: float
    client_s: float


async def play(kind: str, process: ServerProcess, turns: int) -> Round:
    """Some turns over one connection."""
    async with CLIENTS[kind](process.port) as turn:
        assert await turn() == EVENTS + 1, f"{kind} lost events"
        walls = []
        cpu, own = process.cpu_s() or 0.0, time.process_time()
        for _ in range(turns):
            began = time.perf_counter()
            await turn()
            walls.append(time.perf_counter() - began)
        spent = (process.cpu_s() or 0.0) - cpu
        return Round(walls, spent / turns, (time.process_time() - own) / turns)


def run(kind: str, work: Any) -> Any:
    """gRPC brings a loop of its own; the others run on uvloop."""
    return asyncio.run(work) if kind.startswith("grpc") else uvloop.run(work)


def round_of(kind: str, turns: int) -> Round:
    """One round against a new server."""
    with server(kind) as process:
        result: Round = run(kind, play(kind, process, turns))
        return result


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python bench/transports.py", description=__doc__)
    parser.add_argument("--turns", type=int, default=60, help="turns of a round")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--serve", choices=tuple(KINDS), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve:
        run(options.serve, SERVERS[options.serve]())
        return
    candidates = {kind: partial(round_of, kind, options.turns) for kind in installed(KINDS)}
    rows = []
    for kind, rounds in interleaved(candidates, options.rounds).items():
        with server(kind) as process:
            up, down = run(kind, bytes_of(kind, process.port))
        walls = [wall * 1e3 for result in rounds for wall in result.walls]
        times = (statistics.median(walls), percentile(walls, 0.99))
        cpus = [result.cpu_s * 1e3 for result in rounds]
        client = statistics.median(result.client_s * 1e3 for result in rounds)
        sizes = (up / 1e3, down / 1e3)
        rows.append((kind, *times, min(cpus), statistics.median(cpus), client, *sizes))
    turn, cpu = (
        "turn ms p50 {:.2f}|p99 {:.1f}",
        "server CPU ms min {:.2f}|median {:.2f}|client {:.2f}",
    )
    print_table(f"transport {{}}|{turn}|{cpu}|kB up {{:.1f}}|kB down {{:.1f}}", rows)


if __name__ == "__main__":
    main(sys.argv[1:])
