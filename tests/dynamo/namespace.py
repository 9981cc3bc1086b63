"""A command in a network namespace of its own, with loopback and nothing else.

    python -m tests.dynamo.namespace COMMAND…

What listens on all interfaces there is reachable from nowhere else. Needs Linux, and root or user namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import socket
import struct
import sys
from pathlib import Path

CLONE_NEWUSER, CLONE_NEWNET = 0x1000_0000, 0x4000_0000
SIOCSIFFLAGS, IFF_UP = 0x8914, 0x1


def enter() -> None:
    """Leave the network of the machine."""
    libc = ctypes.CDLL(None, use_errno=True)
    user, group = os.getuid(), os.getgid()
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            reason = os.strerror(ctypes.get_errno())
            sys.exit(f"no network namespace: {reason}. Run it as root, or allow user namespaces.")
        Path("/proc/self/setgroups").write_text("deny")
        Path("/proc/self/uid_map").write_text(f"0 {user} 1")
        Path("/proc/self/gid_map").write_text(f"0 {group} 1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        fcntl.ioctl(probe, SIOCSIFFLAGS, struct.pack("16sh", b"lo", IFF_UP))


if __name__ == "__main__":
    enter()
    os.execvp(sys.argv[1], sys.argv[1:])
