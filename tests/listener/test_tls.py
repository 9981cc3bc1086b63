"""A port with a certificate, and with another one later, while sockets stay open."""

from __future__ import annotations

import asyncio
import datetime
import os
import signal
import ssl
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from websockets.asyncio.client import connect

from segue.errors import Misconfigured
from segue.listener.tls import Certificate
from tests.support import WAIT_S, Wire, served_process, until

NOW = datetime.datetime(2026, 1, 1, tzinfo=datetime.UTC)


def write_pair(folder: Path, name: str, host: str = "localhost") -> tuple[Path, Path]:
    """A certificate signed by itself, and its key; replaced as a renewing program would."""
    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    made = (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(subject)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(NOW)
        .not_valid_after(NOW + datetime.timedelta(days=3650))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName(host)]), critical=False)
        .sign(key, hashes.SHA256())
    )
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    for path, data in (
        (key_path, secret),
        (cert_path, made.public_bytes(serialization.Encoding.PEM)),
    ):
        beside = path.with_suffix(".new")
        beside.write_bytes(data)
        os.replace(beside, path)
    return cert_path, key_path


def trusting() -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    return context


async def shown_name(port: int) -> str:
    """Whose certificate a new connection is shown."""
    async with asyncio.timeout(WAIT_S):
        _, writer = await asyncio.open_connection("127.0.0.1", port, ssl=trusting())
    data = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return str(x509.load_der_x509_certificate(data).subject.rfc4514_string())


async def until_shown(port: int, name: str) -> None:
    async def is_shown() -> bool:
        return await shown_name(port) == name

    await until(is_shown)


async def check_plain_http_is_refused(port: int) -> None:
    """HTTP without TLS is answered with what to do, also if its body comes in many parts."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with asyncio.timeout(WAIT_S):
        writer.write(
            b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Length: 999999\r\n\r\n"
        )
        head = await reader.readuntil(b"\r\n\r\n")
        for _ in range(3):
            writer.write(b"x" * 100_000)
            await writer.drain()
        body = await reader.readuntil(b"}}")
        writer.write_eof()
        await reader.read()
    writer.close()
    assert head.startswith(b"HTTP/1.1 400 ")
    assert b'"code":"tls_required"' in body
    assert b"https://" in body


async def test_certificate_is_renewed_without_dropping_sockets(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "first")
    flags = ("--tls-cert", str(cert), "--tls-key", str(key), "--store", "memory")
    with served_process(*flags, cwd=tmp_path) as served:
        assert served.url.startswith("https://")
        assert await shown_name(served.port) == "CN=first"
        await check_plain_http_is_refused(served.port)
        async with connect(served.ws_url, ssl=trusting()) as socket:
            wire = Wire(socket)
            first = await wire.turn(input="hello", store=False)
            write_pair(tmp_path, "second")
            served.process.send_signal(signal.SIGHUP)
            await until_shown(served.port, "CN=second")
            again = await wire.turn(
                input="go on", store=False, previous_response_id=first["response"]["id"]
            )
            assert again["type"] == "response.completed"
        assert served.stop() == 0


async def test_changed_files_are_noticed_and_broken_ones_left_alone(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "first")
    certificate = Certificate(cert, key)
    server = await asyncio.start_server(
        lambda reader, writer: writer.close(), "127.0.0.1", 0, ssl=certificate.context
    )
    port = server.sockets[0].getsockname()[1]
    async with server, certificate.watched(every_s=0.01):
        write_pair(tmp_path, "second")
        await until_shown(port, "CN=second")
        key.write_text("half a key")
        assert not certificate.reload()
        assert await shown_name(port) == "CN=second"


def test_unusable_files_are_said_before_anything_starts(tmp_path: Path) -> None:
    cert, key = write_pair(tmp_path, "first")
    with pytest.raises(Misconfigured, match="No such file"):
        Certificate(tmp_path / "none.pem", key)
    key.write_text("no key")
    with pytest.raises(Misconfigured, match="tls_cert"):
        Certificate(cert, key)
