"""Who is let in, for how long, and what happens while keys cannot be checked."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from functools import partial

import pytest

from segue.accounts.account import LOCAL, SECRET, TRUST_S, Account, Accounts
from segue.accounts.hashes import KeyHashes, issue_key, new_secret
from segue.errors import Unauthenticated, Unavailable
from segue.limits import OTHER_REQUESTS_PER_MIN, Key, KeyLimits
from segue.seals.cipher import new_key
from segue.stores.memory import MemoryKeys
from tests.support import until


class FailingKeys(MemoryKeys):
    """A store that can be switched off, and that counts its questions."""

    def __init__(self) -> None:
        super().__init__()
        self.is_down = False
        self.asked = 0

    async def find(self, digests: Sequence[str]) -> Mapping[str, Key]:
        self.asked += 1
        if self.is_down:
            raise Unavailable("down")
        return await super().find(digests)


@pytest.fixture
def keys() -> FailingKeys:
    return FailingKeys()


HASHES = KeyHashes([new_key()])


def accounts(keys: FailingKeys, hashes: KeyHashes = HASHES) -> Accounts:
    return Accounts(keys, hashes.digests, "keys")


async def test_known_key_is_not_looked_up_again(keys: FailingKeys) -> None:
    _, secret = await issue_key(keys, HASHES, "test", "ada")
    some = accounts(keys)
    account = await some.find(secret)
    assert await some.find(secret) is account is some.known(secret)
    assert keys.asked == 1
    assert account.owner == "ada"


async def test_key_without_limits_may_send_so_many_requests_without_a_turn(
    keys: FailingKeys,
) -> None:
    _, secret = await issue_key(keys, HASHES, "test", "ada")
    account = await accounts(keys).find(secret)
    assert account.quota.limits.other_requests_per_min == OTHER_REQUESTS_PER_MIN
    assert account.turn_quota is None
    assert Account(None).quota.limits == KeyLimits()


async def test_expired_key_is_gone_after_the_next_confirmation(keys: FailingKeys) -> None:
    now = 1_000.0
    keys._clock = lambda: now
    _, secret = await issue_key(keys, HASHES, "test", "ada", expires_at=1_001)
    some = accounts(keys)
    account = await some.find(secret)
    assert await some.confirm() == []
    now = 1_001.0
    assert await some.confirm() == [account]
    with pytest.raises(Unauthenticated):
        some.check(account)
    with pytest.raises(Unauthenticated):
        await some.find(secret)


async def test_use_of_a_key_is_noted(keys: FailingKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    """Soon after its first use, and not for a key that was not used since."""
    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.001)
    monkeypatch.setattr("segue.accounts.account.NOTE_S", 0)
    times = iter(range(1, 1_000_000))
    keys._clock = lambda: next(times)
    _, secret = await issue_key(keys, HASHES, "test", "ada")
    some = accounts(keys)
    account = await some.find(secret)

    async def noted() -> int | None:
        return (await keys.given_out())[0].used_at

    async with some.kept(lambda account: None):
        await until(lambda: account.noted_at > account.used_at)
        first = await noted()
        asked = keys.asked
        await until(lambda: keys.asked > asked + 1)
        assert first is not None
        assert await noted() == first
        some.check(account)
        await until(lambda: account.noted_at > account.used_at)
        assert await noted() != first


async def test_revoked_key_is_gone_after_the_next_confirmation(keys: FailingKeys) -> None:
    key, secret = await issue_key(keys, HASHES, "test", "ada")
    some = accounts(keys)
    account = await some.find(secret)
    assert await some.confirm() == []
    await keys.revoke(key.id)
    assert await some.confirm() == [account]
    assert await some.confirm() == []
    with pytest.raises(Unauthenticated):
        some.check(account)
    with pytest.raises(Unauthenticated):
        await some.find(secret)


async def test_key_that_cannot_be_confirmed_is_trusted_only_for_a_while(
    keys: FailingKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = await issue_key(keys, HASHES, "test", "ada")
    some = accounts(keys)
    account = await some.find(secret)
    keys.is_down = True
    with pytest.raises(Unavailable):
        await some.confirm()
    some.check(account)
    later = time.monotonic() + TRUST_S
    monkeypatch.setattr(time, "monotonic", lambda: later)
    with pytest.raises(Unavailable):
        some.check(account)
    with pytest.raises(Unavailable):
        await some.find(secret)
    keys.is_down = False
    assert await some.find(secret) is account
    some.check(account)


async def test_whoever_notices_first_tells_the_others(
    keys: FailingKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    key, secret = await issue_key(keys, HASHES, "test", "ada")
    late, early = accounts(keys), accounts(keys)
    found = [await one.find(secret) for one in (late, early)]
    gone: list[Account] = []
    told: list[str] = []

    async def tell(who: str, other: Accounts) -> None:
        told.append(who)
        other.confirm_soon()

    monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 3_600)
    async with late.kept(gone.append, partial(tell, "late", early)):
        await asyncio.sleep(0)
        monkeypatch.setattr("segue.accounts.account.CONFIRM_S", 0.01)
        async with early.kept(gone.append, partial(tell, "early", late)):
            await keys.revoke(key.id)
            await until(lambda: len(gone) == 2)
    assert gone == found[::-1]
    assert told == ["early"], "what one was told is not told on"


async def test_idle_account_is_forgotten_and_found_again(
    keys: FailingKeys, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, secret = await issue_key(keys, HASHES, "test", "ada")
    some = accounts(keys)
    account = await some.find(secret)
    later = time.monotonic() + 3_600
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert await some.confirm() == []
    assert await some.find(secret) is not account


async def test_made_up_secrets_never_reach_the_store(keys: FailingKeys) -> None:
    some = accounts(keys)
    for secret in ("", "x", "sk-segue-short", "sk-segue-" + "ä" * 43, "sk-segue-" + "a" * 44, None):
        with pytest.raises(Unauthenticated):
            await some.find(secret)
    assert keys.asked == 0


async def test_rotated_ring_takes_no_key_back(keys: FailingKeys) -> None:
    old = new_key()
    _, secret = await issue_key(keys, KeyHashes([old]), "test", "ada")
    assert (await accounts(keys, KeyHashes([new_key(), old])).find(secret)).owner == "ada"
    with pytest.raises(Unauthenticated):
        await accounts(keys, KeyHashes([new_key()])).find(secret)


async def test_without_keys_everybody_is_local_whatever_is_presented(keys: FailingKeys) -> None:
    some = Accounts(keys, HASHES.digests, "auto")
    for secret in (None, "", "sk-anything"):
        assert (await some.find(secret)).owner == LOCAL


def test_new_secrets_have_the_form_that_is_expected() -> None:
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(SECRET.fullmatch(secret) for secret in secrets)
