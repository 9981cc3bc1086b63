from __future__ import annotations

import asyncio
import ssl
from contextlib import suppress
from pathlib import Path
from typing import get_args

import pytest

from segue.errors import Misconfigured
from segue.server.storage import OPENERS, open_store
from segue.settings.values import STORE_KINDS, Settings, StoreKind
from segue.stores.memory import CLAIM_BYTES
from tests.listener.test_tls import write_pair
from tests.scenarios.test_background import LONG, follow, post, scripted
from tests.support import Served, fetch, metric

STATE = "segue_state_bytes"


def test_every_kind_of_store_has_an_address_and_can_be_opened() -> None:
    kinds = set(get_args(StoreKind))
    assert {"memory", *STORE_KINDS.values()} == kinds == set(OPENERS)


@pytest.mark.parametrize(
    "address", ["", "redis://here", "sqlite:here.db", "sqlite", "memory2", "mysql://a:secret@b/c"]
)
async def test_unknown_address_is_refused_with_the_choices(address: str) -> None:
    with pytest.raises(Misconfigured) as refused:
        async with open_store(Settings(store=address)):
            pass
    for word in ("store:", "sqlite:///", "postgresql://", "memory"):
        assert word in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize("password", ["pass/word", "pass?word", "pass#word", "pa:ss/wo@rd"])
async def test_password_that_is_no_part_of_an_address_is_explained_and_not_shown(
    password: str,
) -> None:
    with pytest.raises(Misconfigured) as refused:
        async with open_store(Settings(store=f"postgresql://me:{password}@127.0.0.1:1/segue")):
            pass
    said = str(refused.value)
    assert "In a password write %2F %3F %23 %40 for / ? # @, or set PGPASSWORD" in said
    assert "postgresql://me:…@" in said
    for part in ("pass", "word", "rd@", "ss/"):
        assert part not in said.replace("password", "").replace("PGPASSWORD", "")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ("", 'root certificate file ".*/.postgresql/root.crt" does not exist'),
        ("&sslrootcert=/no/root.crt", r"is not there: the certificate \(sslrootcert\)"),
    ],
)
async def test_root_certificate_that_is_missing_is_named(
    more: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    where = f"postgresql://me:secret@127.0.0.1:1/segue?sslmode=verify-full{more}"
    with pytest.raises(Misconfigured, match=said):
        async with open_store(Settings(store=where)):
            pass


async def test_certificate_of_another_name_is_said(tmp_path: Path) -> None:
    """Of a server that has TLS, and goes no further."""
    cert, key = write_pair(tmp_path, "database", host="db.internal")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)

    async def offer_tls(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readexactly(8)
        writer.write(b"S")
        with suppress(ssl.SSLError, ConnectionError):
            await writer.start_tls(context)
        writer.close()

    async with await asyncio.start_server(offer_tls, "localhost", 0) as server:
        port = server.sockets[0].getsockname()[1]
        where = f"postgresql://me:secret@localhost:{port}/segue?sslmode=verify-full"
        with pytest.raises(Misconfigured, match="certificate is not valid for 'localhost'"):
            async with open_store(Settings(store=f"{where}&sslrootcert={cert}")):
                pass


@pytest.mark.parametrize("password", ["12/34", "12?34", "pa@x/34"])
def test_password_that_is_no_part_of_an_address_is_not_shown(password: str) -> None:
    shown = Settings(store=f"postgresql://me:{password}@db/segue").shown_store
    assert shown == "postgresql://me:…@db/segue"


@pytest.mark.parametrize(
    "address",
    [
        "postgresql://me:…@db:5432,other:5433/segue?application_name=a@b",
        "postgresql://me@/segue?host=/run/postgresql",
        "postgresql://me:…@[::1]:5432/segue",
    ],
)
def test_address_is_shown_without_its_password_alone(address: str) -> None:
    assert Settings(store=address.replace("…", "p%2Fw")).shown_store == address


async def test_folder_that_is_missing_is_named_and_not_the_file(tmp_path: Path) -> None:
    with pytest.raises(Misconfigured, match=r"there is no folder .*/no\. Create it: `mkdir -p "):
        async with open_store(Settings(store=f"sqlite:///{tmp_path}/no/turns.db")):
            pass


async def held(served: Served) -> float:
    return await metric(served, STATE)


async def in_background(served: Served) -> str:
    """A background response that has ended, with all its events."""
    turn_id: str = (await post(served, input="x", background=True, stream=False)).json["id"]
    assert (await follow(served, turn_id, -1))[-1]["type"] == "response.completed"
    return turn_id


async def test_events_and_conversations_in_memory_count_until_they_are_deleted(
    tmp_path: Path,
) -> None:
    async with scripted(tmp_path, LONG, store="memory", render_cache_bytes_max=0) as served:
        before = await held(served)
        turn_id = await in_background(served)
        # An answer's events carry it several times over.
        assert await held(served) - before > 3 * len(LONG)
        await fetch(served, "DELETE", f"/v1/responses/{turn_id}")
        assert await held(served) == before
        made = await fetch(served, "POST", "/v1/conversations", {"items": []})
        assert await held(served) > before
        await fetch(served, "DELETE", f"/v1/conversations/{made.json['id']}")
        assert await held(served) == before


async def test_events_in_memory_have_a_limit(tmp_path: Path) -> None:
    most = 1_000_000
    async with scripted(
        tmp_path, LONG, store="memory", process_state_bytes_max=most, render_cache_bytes_max=0
    ) as served:
        before = await held(served)
        for _ in range(20):
            await in_background(served)
            # Turns have all of it, events a quarter as much again.
            assert await held(served) - before <= most + most // 4


@pytest.mark.parametrize("kind", ["memory", "sqlite"])
async def test_keys_of_repeats_in_memory_count(tmp_path: Path, kind: str) -> None:
    store = "memory" if kind == "memory" else f"sqlite:///{tmp_path}/s.db"
    async with scripted(
        tmp_path, "Yes.", store=store, render_cache_bytes_max=0, reuse_bytes_max=0
    ) as served:
        before = await held(served)
        for number in range(5):
            body = {"model": "scripted", "input": "x", "store": False}
            named = {"Idempotency-Key": f"key-{number}"}
            assert (await fetch(served, "POST", "/v1/responses", body, named)).status == 200
        # Beside the answers, which a repeat would hear again.
        assert (
            await held(served) - served.app.runner.registry.ended_bytes - before == 5 * CLAIM_BYTES
        )
