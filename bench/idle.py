"""What does an idle connection cost? Resident memory of the server, divided by the connections that it holds open.

python -m bench idle
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.peer import Client, server


def main(arguments: Sequence[str]) -> None:
    """Print the figure."""
    parser = argparse.ArgumentParser(prog="python -m bench idle", description=__doc__)
    parser.add_argument("--connections", type=int, default=2_000)
    options = parser.parse_args(arguments)
    with server() as peer:
        warm = [Client(peer.port) for _ in range(200)]
        before = peer.rss_bytes()
        clients = [Client(peer.port) for _ in range(options.connections)]
        each = (peer.rss_bytes() - before) / options.connections
        print(f"{options.connections:,} idle connections: {each / 1024:.1f} KiB each")
        for client in (*warm, *clients):
            client.close()
