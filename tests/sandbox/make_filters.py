"""Makes the seccomp filters of the sandbox again, by libseccomp: `python -m tests.sandbox.make_filters`."""

from __future__ import annotations

import tempfile

import pyseccomp

from segue.isolation.seccomp import (
    ABSENT,
    ARCHITECTURES,
    CLONE_NEWUSER,
    DENIED,
    ERRORS,
    FAMILIES,
    SHARED_BYTES_MAX,
    TIOCLINUX,
    TIOCSTI,
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
    for name in ABSENT:
        made.add_rule(pyseccomp.ERRNO(ERRORS["absent"]), name)
    flags = pyseccomp.Arg(0, pyseccomp.MASKED_EQ, CLONE_NEWUSER, CLONE_NEWUSER)
    made.add_rule(pyseccomp.ERRNO(ERRORS["denied"]), "clone", flags)
    for request in (TIOCSTI, TIOCLINUX):
        # The kernel reads the lower half alone.
        typing = pyseccomp.Arg(1, pyseccomp.MASKED_EQ, 0xFFFFFFFF, request)
        made.add_rule(pyseccomp.ERRNO(ERRORS["denied"]), "ioctl", typing)
    larger = pyseccomp.Arg(1, pyseccomp.GT, SHARED_BYTES_MAX)
    made.add_rule(pyseccomp.ERRNO(ERRORS["large"]), "shmget", larger)
    others = [family for family in range(max(FAMILIES)) if family not in FAMILIES]
    for name in ("socket", "socketpair"):
        for family in others:
            known = pyseccomp.Arg(0, pyseccomp.EQ, family)
            made.add_rule(pyseccomp.ERRNO(ERRORS["family"]), name, known)
        higher = pyseccomp.Arg(0, pyseccomp.GT, max(FAMILIES))
        made.add_rule(pyseccomp.ERRNO(ERRORS["family"]), name, higher)
    with tempfile.TemporaryFile() as file:
        made.export_bpf(file)
        file.seek(0)
        return file.read()


if __name__ == "__main__":
    for each in sorted(set(ARCHITECTURES.values())):
        path = filter_path(each)
        path.write_bytes(make_filter(each))
        print(path.name, path.stat().st_size)
