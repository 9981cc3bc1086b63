"""Who asks? A presented secret in, an `Account` out, or a refusal.

Where no keys are asked for, everybody is the one local owner. Where they are, a secret is looked up by its digests;
what was found is remembered, and all that is remembered is confirmed every two seconds, so that a key that was taken
back anywhere is gone here within five; and at once where somebody says that it is time to look. What could not be
confirmed for that long is not trusted: "come back later".

    mode    who needs a key
    off     nobody; only on a loopback address
    auto    everybody, as soon as the store has or ever had a key; until then nobody, and only on a loopback address
    keys    everybody
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Literal

from segue.accounts.quota import KeyQuota, Metering, unlimited
from segue.accounts.scopes import OPERATOR, SCOPES
from segue.errors import ApiError, Forbidden, Unauthenticated, Unavailable
from segue.turn.seams import Keys
from segue.turn.values import Key, Owner

log = logging.getLogger(__name__)

Mode = Literal["auto", "off", "keys"]
TellOthers = Callable[[], Awaitable[None]]

# Who everybody is where no keys are asked for.
LOCAL: Owner = "local"

# What an operator's key may see as well, and of all owners.
OVERSEEN = frozenset(("metrics", "dashboard"))

# Keys that are in use are confirmed this often, and are not trusted for longer than that without it.
CONFIRM_S = 2.0
TRUST_S = 5.0
# A key that nobody has used for this long is looked up again.
IDLE_S = 600.0
# Unknown secrets that are looked up at once; a flood of wrong ones leaves the store's readers free for others.
LOOKUPS_MAX = 4

SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]{43}")
BEARER = re.compile(r"(?i:bearer) +(\S+) *")
# A browser cannot set headers on a socket. It offers our name and its key; only the name is ever answered.
PROTOCOL = "segue.v1"
KEY_PROTOCOL = "segue-key."


class Account:
    """Somebody who may come in: whose turns it sees, what it may do, what it uses now."""

    def __init__(self, key: Key | None, digest: str = "", metering: Metering | None = None) -> None:
        self.key_id = "" if key is None else key.id
        self.owner: Owner = LOCAL if key is None else key.owner
        scopes = frozenset(SCOPES if key is None else key.scopes)
        self.is_operator = OPERATOR in scopes
        self.scopes = scopes | OVERSEEN if self.is_operator else scopes
        self.quota = unlimited() if key is None else KeyQuota(key.limits, key.id, metering)
        self.is_revoked = False
        self.digest = digest
        self.confirmed_at = self.used_at = time.monotonic()

    def check_scope(self, scope: str) -> None:
        """Refuse what the key is not good for."""
        if scope not in self.scopes:
            raise Forbidden(f"This key is not good for '{scope}'.")


class Accounts:
    """The accounts that this process knows."""

    def __init__(
        self,
        keys: Keys,
        digests: Callable[[str], Sequence[str]],
        mode: Mode,
        metering: Metering | None = None,
    ) -> None:
        self._keys = keys
        self._metering = metering
        self._digests = digests
        self._mode = mode
        self.is_required = mode == "keys"
        self._local = Account(None)
        self._accounts: dict[str, Account] = {}
        # Those whose limits bound what their owner has in memory.
        self._bounded: dict[Owner, set[Account]] = {}
        self._lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self._is_told = asyncio.Event()

    @asynccontextmanager
    async def kept(
        self, on_revoked: Callable[[Account], None], tell_others: TellOthers | None = None
    ) -> AsyncIterator[None]:
        """A book that is kept up to date for as long as this lasts; `on_revoked` hears who may not stay, and others are
        told that there is something to see."""
        await self._notice_keys()
        task = asyncio.create_task(self._keep(on_revoked, tell_others))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    def look(self) -> None:
        """Keys were given out or taken back elsewhere: confirm now, not in a moment."""
        self._is_told.set()

    def may_stay(self, account: Account) -> bool:
        """Whether this account, which was let in earlier, would be let in now."""
        is_stranger = account is self._local and self.is_required
        return not (account.is_revoked or is_stranger)

    def bounded(self, owner: Owner) -> Collection[Account]:
        """The accounts of this owner whose state has a limit."""
        return self._bounded.get(owner, ())

    def known(self, secret: str | None) -> Account | None:
        """Whose secret this is, if that can be said at once."""
        if not self.is_required:
            return self._local
        if secret is None or not SECRET.fullmatch(secret):
            raise _refused(secret)
        for digest in self._digests(secret):
            account = self._accounts.get(digest)
            if account is not None and _is_trusted(account):
                account.used_at = time.monotonic()
                return account
        return None

    async def find(self, secret: str | None) -> Account:
        """Whose secret this is; a refusal if it is nobody's."""
        account = self.known(secret)
        if account is not None:
            return account
        assert secret is not None, "nothing is refused at once"
        digests = self._digests(secret)
        async with self._lookups:
            found = await self._keys.find(digests)
        for digest, key in found.items():
            return self._enter(digest, key)
        raise _refused(secret)

    async def check(self, account: Account) -> None:
        """Refuse whoever was let in earlier and may not be here any more."""
        if not self.may_stay(account):
            raise _refused("" if account.key_id else None)
        if account.key_id and not _is_trusted(account):
            raise Unavailable("Keys cannot be checked at the moment. Please retry.")
        account.used_at = time.monotonic()

    def _enter(self, digest: str, key: Key) -> Account:
        account = self._accounts.get(digest)
        if account is None or account.is_revoked:
            account = self._accounts[digest] = Account(key, digest, self._metering)
            if key.limits.state_bytes_max:
                self._bounded.setdefault(key.owner, set()).add(account)
        account.confirmed_at = account.used_at = time.monotonic()
        return account

    async def _keep(
        self, on_revoked: Callable[[Account], None], tell_others: TellOthers | None
    ) -> None:
        while True:
            is_told = await self._wait()
            try:
                was_required = self.is_required
                gone = await self.confirm()
                for account in gone:
                    on_revoked(account)
            except ApiError:
                log.exception("keys could not be confirmed")
                continue
            if tell_others and not is_told and (gone or self.is_required != was_required):
                # Whoever cannot be told looks by himself.
                with suppress(ApiError):
                    await tell_others()

    async def _wait(self) -> bool:
        """Until it is time to look again; whether somebody has said so."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_told.wait(), CONFIRM_S)
        is_told = self._is_told.is_set()
        self._is_told.clear()
        return is_told

    async def confirm(self) -> Sequence[Account]:
        """Ask the store about all accounts; those that may not stay."""
        await self._notice_keys()
        gone = [self._local] if self.is_required and self._local.quota.connections else []
        if not self._accounts:
            return gone
        asked_at = time.monotonic()
        accounts = tuple(self._accounts.values())
        found = await self._keys.find([account.digest for account in accounts])
        for account in accounts:
            if account.digest in found:
                account.confirmed_at = asked_at
                is_left = asked_at - account.used_at > IDLE_S and account.quota.is_idle
            else:
                account.is_revoked = is_left = True
                gone.append(account)
            if is_left:
                self._forget(account)
        return gone

    def _forget(self, account: Account) -> None:
        self._accounts.pop(account.digest, None)
        bounded = self._bounded.get(account.owner, set())
        bounded.discard(account)
        if not bounded:
            self._bounded.pop(account.owner, None)

    async def _notice_keys(self) -> None:
        """In mode auto, the first key shuts the door, for good."""
        if self._mode == "auto" and not self.is_required and await self._keys.given_out():
            self.is_required = True


def _is_trusted(account: Account) -> bool:
    return not account.is_revoked and time.monotonic() - account.confirmed_at < TRUST_S


def _refused(secret: str | None) -> Unauthenticated:
    """Wrong, revoked and made up are one answer; only nothing at all is another."""
    if secret is None:
        return Unauthenticated(
            "You did not provide an API key. Provide it in an Authorization header: "
            "'Authorization: Bearer YOUR_KEY'."
        )
    return Unauthenticated("Incorrect API key provided.", is_wrong=True)


def bearer(header: str) -> str | None:
    """The secret in an Authorization header; None if there is no such header, nothing ("") if it holds no secret."""
    if not header:
        return None
    found = BEARER.fullmatch(header)
    return found[1] if found else ""


def offered(protocols: Sequence[str]) -> str | None:
    """The secret among the subprotocols that a browser offers."""
    names = [name.strip() for line in protocols for name in line.split(",")]
    found = [name for name in names if name.startswith(KEY_PROTOCOL)]
    return found[0].removeprefix(KEY_PROTOCOL) if found else None
