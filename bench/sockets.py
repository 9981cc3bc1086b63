"""Which socket class? Four candidates, the same questions, one command.

    python bench/sockets.py              all tables (Autobahn only if --wstest names its command)
    python bench/sockets.py memory       only this table: endings, memory, stream, autobahn
    python bench/sockets.py autobahn --wstest VENV27/bin/wstest

Each candidate runs in a process of its own on loopback, on core 0 where there are two; the client
is this process, on core 1. CPU is the server's time on the processor as the scheduler counts it.
Frames carry 220 bytes; pings are off. A candidate whose package is missing is named and left out.
`segue` is our own; run this where Segue is installed, or with `src` on the path.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import select
import socket as net
import statistics
import struct
import subprocess
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from segue_bench.client import frame, local, open_websocket
from segue_bench.rounds import installed, interleaved
from segue_bench.server import ServerProcess, apart, spawn

KINDS = {
    "sansio": ("uvicorn", "websockets"),
    "segue": ("uvicorn", "websockets"),
    "wsproto": ("uvicorn", "wsproto"),
    "aiohttp": ("aiohttp",),
}
PAYLOAD = b"x" * 220
FRAME_BYTES = 4 + len(PAYLOAD)
IDLE_COUNT = 2000
STREAM_COUNT = 64
REPEATS = 8
MESSAGE_BYTES_MAX = 64 * 1024 * 1024
Send = Callable[[list[bytes]], Awaitable[None]]


# --- the servers ---------------------------------------------------------------------------------


async def command(text: bytes, send: Send) -> None:
    """What every candidate does with a message: stream frames, collect garbage, or echo."""
    verb, _, number = text.partition(b" ")
    if verb in (b"tick", b"join"):
        batch = [PAYLOAD] * (8 if verb == b"join" else 1)
        for _ in range(int(number) // len(batch)):
            await send(batch)
            await asyncio.sleep(0)
    elif verb == b"gc":
        gc.collect()
        await send([b"done"])
    else:
        await send([text])


def report(what: dict[str, Any]) -> None:
    print(json.dumps(what), flush=True)


async def asgi(scope: Any, receive: Any, send: Any) -> None:
    assert scope["type"] == "websocket"
    await receive()
    await send({"type": "websocket.accept"})

    async def send_all(messages: list[bytes]) -> None:
        for message in messages:
            await send({"type": "websocket.send", "text": message.decode()})

    while (event := await receive())["type"] == "websocket.receive":
        if event.get("bytes") is not None:
            await send({"type": "websocket.send", "bytes": event["bytes"]})
        else:
            await command(event["text"].encode(), send_all)
    report({"ended": {k: v for k, v in event.items() if k != "type"}})


def segue_class(size_max: int) -> type[asyncio.Protocol]:
    from segue.listener.edge_limits import EdgeLimits
    from segue.listener.socket import Socket, SocketClosed, socket_class

    class Bench:
        __slots__ = ("resumption", "socket")

        def opened(self, socket: Socket) -> None:
            self.socket = socket
            self.resumption: asyncio.Event | None = None

        def received(self, text: bytes) -> None:
            if text[:5] in (b"tick ", b"join ") or text == b"gc":
                task = asyncio.get_running_loop().create_task(command(text, self.send))
                TASKS.add(task)
                task.add_done_callback(TASKS.discard)
            else:
                self.socket.send([text])

        async def send(self, messages: list[bytes]) -> None:
            self.socket.send(messages)
            if self.socket.is_full:
                self.resumption = asyncio.Event()
                await self.resumption.wait()

        def refused(self, kind: str, size: int) -> bytes | None:
            if kind == "invalid":  # Autobahn wants nothing but the close frame
                return None
            return json.dumps({"type": "error", "code": kind, "size": size}).encode()

        def resumed(self) -> None:
            if self.resumption is not None:
                self.resumption.set()

        def closed(self, how: SocketClosed) -> None:
            report({"ended": {"code": how.code, "is_lost": how.is_lost}})

    limits = EdgeLimits(body_bytes_max=size_max, ping_s=3600)
    return socket_class(lambda request: Bench(), limits)


TASKS: set[asyncio.Task[None]] = set()


def wsproto_class(size_max: int) -> type[asyncio.Protocol]:
    """The least that answers the questions: wsproto reads, frames go out by hand."""
    from wsproto import ConnectionType, WSConnection, events
    from wsproto.utilities import RemoteProtocolError

    class WsprotoSocket(asyncio.Protocol):
        def __init__(self, config: Any, server_state: Any, app_state: Any) -> None:
            self.connections = server_state.connections
            self.conn = WSConnection(ConnectionType.SERVER)
            self.queue: list[bytes] = []
            self.is_due = False
            self.size = 0
            self.parts: list[Any] = []
            self.how: dict[str, Any] = {"code": None, "is_lost": True}
            self.writable = asyncio.Event()
            self.writable.set()

        def connection_made(self, transport: Any) -> None:
            self.transport = transport
            self.connections.add(self)

        def connection_lost(self, exc: Exception | None) -> None:
            self.connections.discard(self)
            report({"ended": self.how})

        def pause_writing(self) -> None:
            self.writable.clear()

        def resume_writing(self) -> None:
            self.writable.set()

        def shutdown(self) -> None:
            self.transport.close()

        def data_received(self, data: bytes) -> None:
            try:
                self.conn.receive_data(data)
                for event in self.conn.events():
                    self.take(event)
            except RemoteProtocolError as exc:
                if exc.event_hint is not None:
                    self.transport.write(self.conn.send(exc.event_hint))
                self.transport.close()

        def take(self, event: Any) -> None:
            match event:
                case events.Request():
                    self.transport.write(self.conn.send(events.AcceptConnection()))
                case events.Ping():
                    self.transport.write(self.conn.send(event.response()))
                case events.CloseConnection():
                    self.how = {"code": int(event.code), "is_lost": False}
                    if self.conn.state.name == "REMOTE_CLOSING":
                        self.transport.write(self.conn.send(event.response()))
                    self.transport.close()
                case events.Message():
                    self.join(event)

        def join(self, event: Any) -> None:
            self.size += len(event.data)
            if self.size > size_max:
                text = events.Message(data=json.dumps({"type": "error", "code": "too_big"}))
                close = events.CloseConnection(code=1009)
                self.transport.write(self.conn.send(text) + self.conn.send(close))
                self.transport.close()
                return
            self.parts.append(event.data)
            if not event.message_finished:
                return
            whole = self.parts[0][:0].join(self.parts)
            self.parts, self.size = [], 0
            if isinstance(whole, str):
                task = asyncio.get_running_loop().create_task(command(whole.encode(), self.send))
                TASKS.add(task)
                task.add_done_callback(TASKS.discard)
            else:
                self.transport.write(self.conn.send(events.BytesMessage(data=bytes(whole))))

        async def send(self, messages: list[bytes]) -> None:
            for message in messages:
                size = len(message)
                if size < 126:
                    self.queue.append(bytes((0x81, size)))
                elif size < 65536:
                    self.queue.append(struct.pack("!BBH", 0x81, 126, size))
                else:
                    self.queue.append(struct.pack("!BBQ", 0x81, 127, size))
                self.queue.append(message)
            if not self.is_due:
                self.is_due = True
                asyncio.get_running_loop().call_soon(self.flush)
            await self.writable.wait()

        def flush(self) -> None:
            self.is_due = False
            if not self.transport.is_closing():
                self.transport.write(b"".join(self.queue))
            self.queue.clear()

    return WsprotoSocket


def serve_aiohttp(listening: net.socket, size_max: int) -> None:
    import aiohttp
    import uvloop
    from aiohttp import web

    async def talk(request: web.Request) -> web.WebSocketResponse:
        ws = web.WebSocketResponse(max_msg_size=size_max, compress=False)
        await ws.prepare(request)

        async def send(messages: list[bytes]) -> None:
            for message in messages:
                await ws.send_str(message.decode())

        message = None
        async for message in ws:
            if message.type is aiohttp.WSMsgType.BINARY:
                await ws.send_bytes(message.data)
            elif message.type is aiohttp.WSMsgType.TEXT:
                await command(message.data.encode(), send)
        report({"ended": {"code": ws.close_code, "exception": repr(ws.exception())}})
        return ws

    async def main() -> None:
        app = web.Application()
        app.router.add_get("/{path:.*}", talk)
        runner = web.AppRunner(app, access_log=None)
        await runner.setup()
        await web.SockSite(runner, listening, backlog=4096).start()
        await asyncio.Event().wait()

    uvloop.run(main())


def serve(kind: str, size_max: int) -> None:
    listening = net.create_server(("127.0.0.1", 0), backlog=4096)
    report({"port": listening.getsockname()[1]})
    if kind == "aiohttp":
        serve_aiohttp(listening, size_max)
        return
    import uvicorn

    classes: dict[str, Any] = {
        "sansio": lambda _: "websockets-sansio",
        "segue": segue_class,
        "wsproto": wsproto_class,
    }
    config = uvicorn.Config(
        asgi,
        ws=classes[kind](size_max),
        http="httptools",
        loop="uvloop",
        lifespan="off",
        log_level="critical",
        ws_per_message_deflate=False,
        ws_max_size=size_max,
        ws_ping_interval=None,
    )
    uvicorn.Server(config).run(sockets=[listening])


# --- the client ----------------------------------------------------------------------------------


@contextmanager
def serving(kind: str, size_max: int = MESSAGE_BYTES_MAX) -> Iterator[ServerProcess]:
    """A candidate in a process of its own."""
    arguments = [__file__, "serve", "--kind", kind, "--size-max", str(size_max)]
    with (
        tempfile.TemporaryDirectory(prefix="segue-bench-") as folder,
        spawn(arguments, r'"port": (\d+)', Path(folder)) as process,
        apart(process),
    ):
        yield process


def read_report(process: ServerProcess) -> dict[str, Any]:
    """The next line of the server."""
    assert process.output is not None
    ready, _, _ = select.select([process.output], [], [], 20)
    if not ready:
        return {"ended": "nothing within 20 s"}
    line: dict[str, Any] = json.loads(process.output.readline())
    return line


def connect(process: ServerProcess) -> net.socket:
    return open_websocket(local(process.port)).socket


def drain(client: net.socket) -> bytes:
    got = b""
    try:
        while data := client.recv(65536):
            got += data
    except OSError:
        pass
    return got


# --- the questions -------------------------------------------------------------------------------


def measure_endings(kind: str) -> dict[str, str]:
    """What the application learns of each ending, and whether an event precedes close 1009."""
    endings: dict[str, str] = {}
    with serving(kind, size_max=1024) as server:
        for name, last in (
            ("close 1000", frame(struct.pack("!H", 1000), 8)),
            ("close, no status", frame(b"", 8)),
            ("end of stream", b""),
            ("reset", None),
        ):
            client = connect(server)
            client.sendall(frame(b"hello"))
            client.recv(100)
            if last is None:
                client.setsockopt(net.SOL_SOCKET, net.SO_LINGER, struct.pack("ii", 1, 0))
            elif last:
                client.sendall(last)
                client.recv(100)
            client.close()
            endings[name] = json.dumps(read_report(server)["ended"])
        client = connect(server)
        client.sendall(frame(b"y" * 2048))
        client.settimeout(3)
        got = drain(client)
        client.close()
        is_first = got[:1] == b"\x81" and struct.pack("!H", 1009) in got
        endings["event before 1009"] = "yes" if is_first else "no"
    return endings


def measure_memory(kind: str) -> dict[str, str]:
    with serving(kind) as server:
        for client in [connect(server) for _ in range(100)]:
            client.close()
        control = connect(server)
        settle(control)
        before = server.memory_bytes() or 0
        clients = [connect(server) for _ in range(IDLE_COUNT)]
        settle(control)
        each = ((server.memory_bytes() or 0) - before) / IDLE_COUNT
        for client in clients:
            client.close()
        control.close()
    return {"KiB per idle socket": f"{each / 1024:.1f}"}


def settle(control: net.socket) -> None:
    time.sleep(0.3)
    control.sendall(frame(b"gc"))
    assert control.recv(100)


def measure_stream(kinds: list[str]) -> dict[str, dict[str, str]]:
    """CPU per frame, min / median; the candidates take turns, because the machine's load drifts."""
    figures: dict[str, dict[str, str]] = {kind: {} for kind in kinds}
    with ExitStack() as stack:
        servers = {kind: stack.enter_context(serving(kind)) for kind in kinds}
        clients = {
            kind: [stack.enter_context(connect(server)) for _ in range(STREAM_COUNT)]
            for kind, server in servers.items()
        }
        for verb, count in (("tick", 1000), ("join", 4000)):
            candidates = {
                kind: partial(stream_once, servers[kind], clients[kind], verb, count)
                for kind in kinds
            }
            for kind, runs in interleaved(candidates, REPEATS).items():
                value = f"{min(runs):.2f} / {statistics.median(runs):.2f}"
                figures[kind][f"us per frame, {verb}"] = value
    return figures


def stream_once(server: ServerProcess, clients: list[net.socket], verb: str, count: int) -> float:
    count -= count % 8
    left = dict.fromkeys((c.fileno() for c in clients), count * FRAME_BYTES)
    poll = select.poll()
    started = server.cpu_s() or 0.0
    for client in clients:
        poll.register(client, select.POLLIN)
        client.sendall(frame(b"%s %d" % (verb.encode(), count)))
    while left:
        for fd, _ in poll.poll(10_000):
            data = os.read(fd, 1 << 20)
            assert data, "the server closed"
            left[fd] -= len(data)
            if left[fd] == 0:
                del left[fd]
                poll.unregister(fd)
    return ((server.cpu_s() or 0.0) - started) * 1e6 / (count * len(clients))


# Segue refuses binary messages by contract, so for it the binary twins of text cases are left out.
BINARY_CASES = ["1.2.*", "9.2.*", "9.4.*", "9.6.*", "9.8.*"]
# 12 and 13 are about compression, which is off.
OTHER_CASES = ["12.*", "13.*"]


def measure_autobahn(kind: str, wstest: str) -> dict[str, str]:
    with serving(kind) as server, tempfile.TemporaryDirectory() as folder:
        skipped = OTHER_CASES + (BINARY_CASES if kind == "segue" else [])
        spec = {
            "outdir": folder,
            "servers": [{"agent": kind, "url": f"ws://127.0.0.1:{server.port}"}],
            "cases": ["*"],
            "exclude-cases": skipped,
        }
        path = Path(folder, "spec.json")
        path.write_text(json.dumps(spec))
        connect(server).close()
        line = [wstest, "-m", "fuzzingclient", "-s", str(path)]
        # The server's own lines are not read meanwhile; there are too few to fill the pipe.
        subprocess.run(line, stdout=subprocess.DEVNULL, timeout=500, check=True)
        results = json.loads(Path(folder, "index.json").read_text())[kind]
    verdicts: dict[str, list[str]] = {}
    for case, result in results.items():
        verdicts.setdefault(result["behavior"], []).append(case)
    figures = {"cases": str(len(results))}
    for verdict, cases in sorted(verdicts.items()):
        few = len(cases) <= 8 and verdict != "OK"
        figures[verdict] = f"{len(cases)}" + (f" ({', '.join(sorted(cases))})" if few else "")
    return figures


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    tables: dict[str, Callable[[str], dict[str, str]]] = {
        "endings": measure_endings,
        "memory": measure_memory,
    }
    names = [*tables, "stream", "autobahn"]
    parser.add_argument("table", nargs="?", choices=[*names, "all", "serve"], default="all")
    parser.add_argument("--kind", choices=list(KINDS), help="only this candidate")
    parser.add_argument("--wstest", help="the command of autobahntestsuite, a Python 2.7 program")
    parser.add_argument("--size-max", type=int, default=MESSAGE_BYTES_MAX)
    options = parser.parse_args(arguments)
    if options.table == "serve":
        serve(options.kind, options.size_max)
        return
    if options.wstest:
        tables["autobahn"] = partial(measure_autobahn, wstest=options.wstest)
    elif options.table in ("autobahn", "all"):
        print("autobahn: not run; --wstest names no command")
    kinds = installed({k: v for k, v in KINDS.items() if options.kind in (None, k)})
    for table, measure in tables.items():
        if options.table in (table, "all"):
            for kind in kinds:
                show(table, kind, measure(kind))
    if options.table in ("stream", "all"):
        for kind, figures in measure_stream(kinds).items():
            show("stream", kind, figures)


def show(table: str, kind: str, figures: dict[str, str]) -> None:
    for name, value in figures.items():
        print(f"{table:9} {kind:8} {name:22} {value}", flush=True)


if __name__ == "__main__":
    main()
