"""The name in the first message of a TLS client: found at every cut, and nothing else is taken for one."""

from __future__ import annotations

import ssl
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from segue.egress.hello import NoName, server_name


def hello(name: str | None) -> bytes:
    """As a real client writes it."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    inward, outward = ssl.MemoryBIO(), ssl.MemoryBIO()
    client = context.wrap_bio(inward, outward, server_hostname=name)
    with pytest.raises(ssl.SSLWantReadError):
        client.do_handshake()
    return outward.read()


def records(data: bytes, size: int) -> bytes:
    """The same message in records of this size."""
    body = data[5:]
    cut = [body[start : start + size] for start in range(0, len(body), size)]
    return b"".join(data[:3] + len(part).to_bytes(2, "big") + part for part in cut)


def test_name_is_found_whatever_the_cut() -> None:
    whole = hello("Github.com")
    assert all(server_name(whole[:end]) is None for end in range(len(whole)))
    assert server_name(whole) == "github.com"
    assert server_name(whole + b"\x17\x03\x03") == "github.com"
    assert server_name(records(whole, 100)) == "github.com"
    with pytest.raises(NoName, match="too many records"):
        server_name(records(whole, 1))


def test_client_that_names_no_server_is_refused() -> None:
    with pytest.raises(NoName, match="no server"):
        server_name(hello(None))


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\n",
        b"SSH-2.0-x\r\n",
        b"\x16\x02\x00\x00\x05hello",
        b"\x16\x03\x01\x00\x00",
        b"\x16\x03\x01\xff\xff",
        b"\x16\x03\x01\x00\x04\x02\x00\x00\x00",
        b"\x16\x03\x01\x00\x04\x01\xff\xff\xff",
        b"\x16\x03\x01\x00\x06\x01\x00\x00\x02\x03\x03",
    ],
)
def test_what_is_no_first_message_is_refused(data: bytes) -> None:
    with pytest.raises(NoName):
        server_name(data)


def test_second_name_is_refused() -> None:
    """Two readers might take different ones."""
    name = b"\x00\x00\x05a.org"
    assert server_name(made(extension(name))) == "a.org"
    for twice in (extension(name) * 2, extension(name * 2)):
        with pytest.raises(NoName, match="several"):
            server_name(made(twice))


def extension(names: bytes) -> bytes:
    return b"\x00\x00" + (2 + len(names)).to_bytes(2, "big") + len(names).to_bytes(2, "big") + names


def made(extensions: bytes) -> bytes:
    """A first message with these extensions, in one record."""
    body = bytes(34) + b"\x00" + b"\x00\x02\x13\x01" + b"\x01\x00"
    body += len(extensions).to_bytes(2, "big") + extensions
    message = b"\x01" + len(body).to_bytes(3, "big") + body
    return b"\x16\x03\x01" + len(message).to_bytes(2, "big") + message


@given(st.binary(max_size=300))
def test_any_bytes_are_refused_or_wait(data: bytes) -> None:
    for start in (b"", b"\x16\x03\x01"):
        with suppress(NoName):
            server_name(start + data)
