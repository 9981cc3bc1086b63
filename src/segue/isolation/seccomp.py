"""Which system calls may a program in a sandbox not make?

The rules are here; the filters made of them are files beside this one, one for each architecture, so that no server
needs libseccomp. `python -m tests.sandbox.make_filters` makes them again, and a test compares. A call that is not named
is allowed: the kernel's own checks hold for it. A call by another ABI (i386, x32) kills the process.
"""

from __future__ import annotations

import platform
from errno import EAFNOSUPPORT, EINVAL, ENOSYS, EOPNOTSUPP, EPERM, EPROTONOSUPPORT
from pathlib import Path

from segue.errors import Misconfigured

# New namespaces and mounts; other processes; the kernel's large and young surfaces; the clock and the machine.
DENIED = (
    *("unshare", "setns", "mount", "umount", "umount2", "pivot_root", "chroot", "move_mount"),
    *("open_tree", "fsopen", "fsconfig", "fsmount", "fspick", "mount_setattr"),
    *("open_by_handle_at", "name_to_handle_at"),
    *("ptrace", "process_vm_readv", "process_vm_writev", "pidfd_getfd", "process_madvise", "kcmp"),
    *("bpf", "perf_event_open", "userfaultfd", "add_key", "request_key", "keyctl"),
    *("io_uring_setup", "io_uring_enter", "io_uring_register", "memfd_secret", "lookup_dcookie"),
    *("kexec_load", "kexec_file_load", "init_module", "finit_module", "delete_module"),
    *("create_module", "reboot", "swapon", "swapoff", "acct", "quotactl", "quotactl_fd", "syslog"),
    *("settimeofday", "clock_settime", "clock_adjtime", "adjtimex", "sethostname", "setdomainname"),
    *("iopl", "ioperm", "modify_ldt", "vhangup", "nfsservctl", "uselib", "personality", "ustat"),
    *("sysfs", "_sysctl", "fanotify_init", "move_pages", "migrate_pages", "mbind", "set_mempolicy"),
    *("memfd_create", "vmsplice"),
    # Stores of System V, in which the kernel keeps what no process has: messages, and semaphores without number.
    *("msgget", "semget"),
)
# As if the kernel did not have them: the C library then uses `clone`, whose flags a filter can see; and of the older
# asynchronous input and output the whole machine has few.
ABSENT = ("clone3", "io_setup")
# Calls above this number are younger than these rules (Linux 6.10): they do not exist either.
NEWEST = 462
# As if the file system did not have it: a disk would be full before anybody counts. The C library writes zeros then.
UNSUPPORTED = ("fallocate",)
CLONE_NEWUSER = 0x10000000
# Unix, IPv4 and IPv6; all others, netlink and packets among them, do not exist.
FAMILIES = (1, 2, 10)
# UDP; what comes after it would load modules of the kernel.
PROTOCOL_MAX = 17
# Typing into the terminal of somebody else.
TIOCSTI, TIOCLINUX = 0x5412, 0x541C
# Done without being done: what is kept in a socket has the usual size (`SO_SNDBUF`, `SO_RCVBUF`).
SOCKET_LEVEL, SOCKET_SIZES = 1, (7, 8)
# Older names of `fallocate`; and a size by which each file grows.
RESERVES = (0x40305828, 0x4030582A, 0x40305839, 0x401C5820)

# Shared memory of System V, in bytes: with 4,096 pieces of it, as many as the kernel gives, it is little.
SHARED_BYTES_MAX = 65_536

ERRORS = {
    "denied": EPERM,
    "absent": ENOSYS,
    "unsupported": EOPNOTSUPP,
    "family": EAFNOSUPPORT,
    "protocol": EPROTONOSUPPORT,
    "large": EINVAL,
    "done": 0,
}
ARCHITECTURES = {"x86_64": "x86_64", "aarch64": "aarch64", "arm64": "aarch64"}


def filter_path(architecture: str) -> Path:
    """The filter of an architecture."""
    return Path(__file__).with_name(f"seccomp_{architecture}.bpf")


def load_filter() -> bytes:
    """The filter for this machine, as bubblewrap takes it."""
    machine = platform.machine()
    if machine not in ARCHITECTURES:
        known = ", ".join(sorted(set(ARCHITECTURES.values())))
        message = f"environment: there is no seccomp filter for '{machine}', only for {known}."
        raise Misconfigured(message)
    return filter_path(ARCHITECTURES[machine]).read_bytes()
