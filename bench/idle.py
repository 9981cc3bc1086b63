"""What does an idle connection cost? Resident memory of the server, divided by the connections that it holds open.

python -m bench idle
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.peer import Client, server
from segue_bench.crowd_process import allow_files

WARM_UP = 200


def main(arguments: Sequence[str]) -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--connections", type=int, default=2_000)
    options = parser.parse_args(arguments)
    allow_files(WARM_UP + options.connections)
    with server() as process:
        clients = [Client(process.port) for _ in range(WARM_UP)]
        before = process.memory_bytes() or 0
        clients += [Client(process.port) for _ in range(options.connections)]
        each = ((process.memory_bytes() or 0) - before) / options.connections
        print(f"{options.connections:,} idle connections: {each / 1024:.1f} KiB each")
        for client in clients:
            client.close()
