"""Are the filters that ship those that the rules make? libseccomp makes them again; a small machine runs both."""

from __future__ import annotations

import struct
from errno import EAFNOSUPPORT, EINVAL, ENOSYS, EOPNOTSUPP, EPERM, EPROTONOSUPPORT

import pyseccomp
import pytest

from segue.isolation.seccomp import (
    DENIED,
    FAMILIES,
    NEWEST,
    RESERVES,
    SHARED_BYTES_MAX,
    TIOCSTI,
    filter_path,
)
from tests.sandbox.make_filters import NUMBERS, make_filter

ALLOW, KILL, ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
I386, X32 = 0x40000003, 0x40000000


def verdict(program: bytes, architecture: int, number: int, *args: int) -> int:
    """What the filter says of a call: classic BPF, as far as libseccomp uses it."""
    data = struct.pack("<iIQ6Q", number, architecture, 0, *(*args, 0, 0, 0, 0, 0, 0)[:6])
    steps = list(struct.iter_unpack("<HBBI", program))
    at = value = 0
    while True:
        code, yes, no, k = steps[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, k)
            case 0x05:
                at += k
            case 0x06:
                return int(k)
            case 0x54:
                value &= k
            case 0x15:
                at += yes if value == k else no
            case 0x25:
                at += yes if value > k else no
            case 0x35:
                at += yes if value >= k else no
            case 0x45:
                at += yes if value & k else no
            case _:
                raise AssertionError(f"an instruction {code:#x} that is not known")


CALLS = [
    (),
    *((family,) for family in (0, 1, 2, 3, 9, 10, 11, 16, 40, 1 << 32, (1 << 32) + 1)),
    (0x10000000,),
    (0x10000011,),
    (0, TIOCSTI),
    (0, (1 << 32) + TIOCSTI),
    (0, 0x5401),
    *((0, size) for size in (65_536, 65_537, 1 << 32)),
    *((0, request) for request in RESERVES),
    *((3, level, option) for level in (1, 6) for option in (2, 7, 8)),
    *((2, 1, protocol) for protocol in (6, 17, 18, 132, (1 << 32) + 6)),
]


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_filter_that_ships_is_the_one_that_the_rules_make(name: str) -> None:
    kept, made = filter_path(name).read_bytes(), make_filter(name)
    architecture = int(NUMBERS[name])
    for number in (*range(600), *(X32 + each for each in range(600))):
        for args in CALLS:
            assert verdict(kept, architecture, number, *args) == verdict(
                made, architecture, number, *args
            ), (number, args)


@pytest.mark.parametrize("name", sorted(NUMBERS))
def test_filter_denies_what_it_names(name: str) -> None:
    kept, architecture = filter_path(name).read_bytes(), int(NUMBERS[name])

    def of(call: str, *args: int) -> int:
        return verdict(kept, architecture, pyseccomp.resolve_syscall(NUMBERS[name], call), *args)

    for call in DENIED:
        if pyseccomp.resolve_syscall(NUMBERS[name], call) >= 0:
            assert of(call) == ERRNO | EPERM, call
    assert of("clone3") == of("io_setup") == ERRNO | ENOSYS
    assert verdict(kept, architecture, NEWEST) == ALLOW
    assert {verdict(kept, architecture, NEWEST + more) for more in (1, 5, 1000)} == {ERRNO | ENOSYS}
    assert of("fallocate") == ERRNO | EOPNOTSUPP
    assert {of("ioctl", 0, request) for request in RESERVES} == {ERRNO | EPERM}
    assert {of("setsockopt", 3, 1, option) for option in (7, 8, (1 << 32) + 7)} == {ERRNO}
    assert of("setsockopt", 3, 1, 2) == of("setsockopt", 3, 6, 7) == ALLOW
    assert of("socket", 2, 1, 262) == of("socket", 2, 5, 132) == ERRNO | EPROTONOSUPPORT
    assert of("socket", 2, 1, 6) == of("socket", 10, 2, 17) == ALLOW
    assert of("clone", 0x10000000) == ERRNO | EPERM
    assert of("clone", 0x1200011) == ALLOW
    assert of("ioctl", 0, TIOCSTI) == ERRNO | EPERM
    assert {family for family in range(64) if of("socket", family) == ALLOW} == set(FAMILIES)
    assert of("shmget", 0, SHARED_BYTES_MAX) == ALLOW
    assert of("shmget", 0, SHARED_BYTES_MAX + 1) == of("shmget", 0, 1 << 32) == ERRNO | EINVAL
    assert of("socketpair", 16) == ERRNO | EAFNOSUPPORT
    assert of("read") == of("execve") == of("futex") == ALLOW
    assert verdict(kept, I386, 1) == KILL


def test_call_of_the_x32_abi_kills() -> None:
    kept = filter_path("x86_64").read_bytes()
    assert verdict(kept, int(NUMBERS["x86_64"]), X32 + 1) == KILL
