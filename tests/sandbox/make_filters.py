"""Makes the seccomp filters of the sandbox again, by libseccomp: `python -m tests.sandbox.make_filters`."""

from __future__ import annotations

import struct
import tempfile

import pyseccomp

from segue.isolation.seccomp import (
    ABSENT,
    ARCHITECTURES,
    CLONE_NEWUSER,
    DENIED,
    ERRORS,
    FAMILIES,
    NEWEST,
    PROTOCOL_MAX,
    RESERVES,
    SHARED_BYTES_MAX,
    SOCKET_LEVEL,
    SOCKET_SIZES,
    TIOCLINUX,
    TIOCSTI,
    UNSUPPORTED,
    filter_path,
)

NUMBERS = {"x86_64": pyseccomp.Arch.X86_64, "aarch64": pyseccomp.Arch.AARCH64}


def make_filter(architecture: str) -> bytes:
    """The filter of an architecture, as the kernel reads it."""
    made = pyseccomp.SyscallFilter(pyseccomp.ALLOW)
    # A call by another ABI of the same machine.
    made.set_attr(pyseccomp.Attr.ACT_BADARCH, pyseccomp.KILL_PROCESS)
    if not made.exist_arch(NUMBERS[architecture]):
        made.add_arch(NUMBERS[architecture])
        made.remove_arch(pyseccomp.system_arch())
    for name in DENIED:
        made.add_rule(pyseccomp.ERRNO(ERRORS["denied"]), name)
    for names, why in ((ABSENT, "absent"), (UNSUPPORTED, "unsupported")):
        for name in names:
            made.add_rule(pyseccomp.ERRNO(ERRORS[why]), name)
    flags = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER)
    made.add_rule(pyseccomp.ERRNO(ERRORS["denied"]), "clone", flags)
    for request in (TIOCSTI, TIOCLINUX, *RESERVES):
        # The kernel reads the lower half alone.
        asked = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request)
        made.add_rule(pyseccomp.ERRNO(ERRORS["denied"]), "ioctl", asked)
    for size in SOCKET_SIZES:
        asked = [
            pyseccomp.Arg(place, pyseccomp.MASKED_EQ, 0xFFFFFFFF, value)
            for place, value in ((1, SOCKET_LEVEL), (2, size))
        ]
        made.add_rule(pyseccomp.ERRNO(ERRORS["done"]), "setsockopt", *asked)
    larger = pyseccomp.Arg(1, pyseccomp.GT, SHARED_BYTES_MAX)
    made.add_rule(pyseccomp.ERRNO(ERRORS["large"]), "shmget", larger)
    others = [family for family in range(max(FAMILIES)) if family not in FAMILIES]
    for name in ("socket", "socketpair"):
        for family in others:
            known = pyseccomp.Arg(0, pyseccomp.EQ, family)
            made.add_rule(pyseccomp.ERRNO(ERRORS["family"]), name, known)
        higher = pyseccomp.Arg(0, pyseccomp.GT, max(FAMILIES))
        made.add_rule(pyseccomp.ERRNO(ERRORS["family"]), name, higher)
    above = pyseccomp.Arg(2, pyseccomp.GT, PROTOCOL_MAX)
    made.add_rule(pyseccomp.ERRNO(ERRORS["protocol"]), "socket", above)
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return not_younger(NUMBERS[architecture]) + file.read()


def not_younger(architecture: int) -> bytes:
    """What goes before a filter, because libseccomp has no rule for it: calls that are younger than the rules, by the
    ABI of this architecture alone, do not exist. The other one of x86-64 begins at 2^30."""
    load, equal, above, at_least, end = 0x20, 0x15, 0x25, 0x35, 0x06
    steps = (
        (load, 0, 0, 4),
        (equal, 0, 4, architecture),
        (load, 0, 0, 0),
        (at_least, 2, 0, 1 << 30),
        (above, 0, 1, NEWEST),
        (end, 0, 0, 0x00050000 | ERRORS["absent"]),
    )
    return b"".join(struct.pack("<HBBI", *step) for step in steps)


if __name__ == "__main__":
    for each in sorted(set(ARCHITECTURES.values())):
        path = filter_path(each)
        path.write_bytes(make_filter(each))
        print(path.name, path.stat().st_size)
