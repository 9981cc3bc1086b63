"""What is the first process of a sandbox in gVisor before it is the supervisor? One file of the standard library.

It starts as user 0 of gVisor, because files belong to that user there, and without any capability of it. It makes a
user namespace in which it is 1000, takes from all that it starts what a root could do, loads the filter of system
calls, and then runs the supervisor in its place. Everything here is done within gVisor: no call reaches the host.
"""

from __future__ import annotations

import ctypes
import os
import sys
from contextlib import suppress

NEW_USERS = 0x10000000
SET_SECCOMP, FILTER_MODE, DROP_BOUND, NO_NEW_PRIVILEGES = 22, 2, 24, 38
INSTRUCTION_BYTES = 8
CAPABILITIES_MAX = 64

libc = ctypes.CDLL(None, use_errno=True)


class CallFilter(ctypes.Structure):
    """`struct sock_fprog`."""

    _fields_ = (("count", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def check(result: int, what: str) -> None:
    if result:
        raise OSError(ctypes.get_errno(), f"{what} failed")


def become_user() -> None:
    """User 1000 in a user namespace of its own; what is started from here has no capability, whoever runs it."""
    check(libc.unshare(NEW_USERS), "unshare")
    for name in ("uid_map", "gid_map"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write("1000 0 1")
    for number in range(CAPABILITIES_MAX):
        if libc.prctl(DROP_BOUND, number, 0, 0, 0):
            break


def load(data: bytes) -> None:
    """A filter of system calls."""
    buffer = ctypes.create_string_buffer(data, len(data))
    program = CallFilter(len(data) // INSTRUCTION_BYTES, ctypes.addressof(buffer))
    check(libc.prctl(SET_SECCOMP, FILTER_MODE, ctypes.byref(program), 0, 0), "seccomp")


def main() -> None:
    # Devices can be written only where their folder is not read-only; so that nothing else is put there.
    for folder in ("/dev", "/dev/net"):
        with suppress(FileNotFoundError):
            os.chmod(folder, 0o555)
    check(libc.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0), "no_new_privs")
    if sys.argv.pop() == "user":
        become_user()
    with open("/etc/sandbox/filter", "rb") as file:
        data = file.read()
    if data:
        load(data)


if __name__ == "__main__":
    main()
    path = "/etc/sandbox/supervisor.py"
    with open(path) as source:
        exec(compile(source.read(), path, "exec"), {"__name__": "__main__"})
