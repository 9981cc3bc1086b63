"""Who is asking? An API key's secret in, an `Account` out, or a refusal.

Without keys every request belongs to the one local owner. With keys, a secret is looked up by its digests. The accounts
that were found are cached, and the whole cache is confirmed against the store every two seconds, so that a key that was
revoked anywhere, or has expired, stops working here within five seconds; or at once, when `confirm_soon` is called. An
account that could not be confirmed for that long is not trusted: the request is answered 503.

    mode    which requests need a key
    off     none; only on a loopback address
    auto    all, once the store has or ever had a key; until then none, and only on a loopback address
    keys    all
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import Literal

from msgspec import structs

from segue.accounts.quota import KeyQuota, Meter
from segue.accounts.scopes import OPERATOR, SCOPES
from segue.aio import GiveUp, in_background
from segue.errors import ApiError, Forbidden, Unauthenticated, Unavailable
from segue.limits import OTHER_REQUESTS_PER_MIN, Key, KeyLimits
from segue.seams.access import Keys, Quota
from segue.seams.history import Owner

log = logging.getLogger(__name__)

AuthMode = Literal["auto", "off", "keys"]
TellOthers = Callable[[], Awaitable[None]]
# Every digest that a secret may be stored under.
Digests = Callable[[str], Sequence[str]]

# The owner of every request where no keys are required.
LOCAL: Owner = "local"

# What an operator's key may see besides its scopes, of all owners.
OPERATOR_SCOPES = frozenset(("metrics", "dashboard"))

# Cached keys are confirmed this often, and not trusted for longer than TRUST_S without it.
CONFIRM_S = 2.0
TRUST_S = 5.0
# A key that was not used for this long leaves the cache.
IDLE_S = 600.0
# The last use of a key is written at most this often.
NOTE_S = 60.0
# Unknown secrets that are looked up at once: a flood of wrong secrets leaves most of the store's readers free.
LOOKUPS_MAX = 4

SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]{43}")


class Account:
    """An authenticated caller: whose turns it sees, its scopes, and what it uses now."""

    def __init__(self, key: Key | None, digest: str = "", meter: Meter | None = None) -> None:
        self.key_id = "" if key is None else key.id
        self.key_name = "" if key is None else key.name
        self.owner: Owner = LOCAL if key is None else key.owner
        scopes = frozenset(SCOPES if key is None else key.scopes)
        self.is_operator = OPERATOR in scopes
        self.scopes = scopes | OPERATOR_SCOPES if self.is_operator else scopes
        self.expires_at = None if key is None else key.expires_at
        self.quota = KeyQuota(KeyLimits(), self.key_id, meter, owner=self.owner)
        # Whether its turns are counted, and where.
        self.limits, self.is_limited = KeyLimits(), False
        self.turn_quota: Quota | None = None
        if key is not None:
            self.limit(key.limits)
        # Whether it may lose its place: it has a key, or came without one and keys are required now.
        self.is_checked = key is not None
        self.is_revoked = False
        self.digest = digest
        self.confirmed_at = self.used_at = time.monotonic()
        self.noted_at = float("-inf")

    def limit(self, limits: KeyLimits) -> None:
        """From now on its key has these limits."""
        self.limits = limits
        uncounted = structs.replace(limits, other_requests_per_min=0, models=())
        self.is_limited = uncounted != KeyLimits()
        self.turn_quota = self.quota if self.is_limited else None
        others = limits.other_requests_per_min or OTHER_REQUESTS_PER_MIN
        self.quota.limit(structs.replace(limits, other_requests_per_min=others))

    def check_scope(self, scope: str) -> None:
        """Refuse a request for which the key lacks the scope; of several, with `|` between them, any will do."""
        if self.scopes.isdisjoint(scope.split("|")):
            names = scope.replace("|", "' or '")
            raise Forbidden(f"This key lacks the scope '{names}'.")


class Accounts:
    """The accounts that this process has cached."""

    def __init__(
        self, keys: Keys, digests: Digests, mode: AuthMode, meter: Meter | None = None
    ) -> None:
        self._keys = keys
        self._meter = meter
        self._digests = digests
        self._mode = mode
        self.is_required = mode == "keys"
        self._local = Account(None)
        self._accounts: dict[str, Account] = {}
        # Accounts whose limits bound what their owner has in memory; and what is called when the first of them comes.
        self.bounded: dict[Owner, set[Account]] = {}
        self.on_bounded: Callable[[], None] | None = None
        # Whether an account holds something that goes with its key.
        self.holds_state: Callable[[Account], bool] = lambda account: False
        # Whether the store has, or ever had, keys of several owners; and who has come here while it had not.
        self.has_several_owners = False
        self._owners: set[Owner] = set()
        self._lookups = asyncio.Semaphore(LOOKUPS_MAX)
        self._is_asked = asyncio.Event()

    @asynccontextmanager
    async def kept(
        self,
        on_revoked: Callable[[Account], None],
        tell_others: TellOthers | None = None,
        give_up: GiveUp | None = None,
    ) -> AsyncIterator[None]:
        """Confirm the accounts regularly while inside. `on_revoked` is called with each account that lost its key,
        `tell_others` when this process is the first to notice a change, and `give_up` if revoked keys could stay
        valid."""
        await self._notice_keys()
        confirm = partial(self._confirm_forever, on_revoked, tell_others)
        async with in_background("key_revocation", confirm, give_up):
            yield

    def confirm_soon(self) -> None:
        """Keys were created or revoked elsewhere: confirm now."""
        self._is_asked.set()

    def may_stay(self, account: Account) -> bool:
        """Whether this account, which was admitted earlier, would be admitted now."""
        is_keyless = account is self._local and self.is_required
        return not (account.is_revoked or is_keyless)

    def known(self, secret: str | None) -> Account | None:
        """The account of this secret, if it is cached."""
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
        """The account of this secret; a refusal if there is none."""
        account = self.known(secret)
        if account is not None:
            return account
        assert secret is not None, "`known` has refused a missing secret"
        async with self._lookups:
            digests = self._digests(secret)
            keys = await self._keys.find(digests)
            expired_at = None if keys else await self._keys.expired(digests)
        for digest, key in keys.items():
            await self._count_owners(key.owner)
            return self._enter(digest, key)
        raise _refused(secret, expired_at)

    async def find_digest(self, digest: str) -> Account:
        """The account of a key by its digest; a refusal if the key is gone. Nothing: the account without a key."""
        if not digest:
            return self._local
        account = self._accounts.get(digest)
        if account is not None and _is_trusted(account):
            return account
        for key in (await self._keys.find([digest])).values():
            return self._enter(digest, key)
        raise _refused("")

    def check(self, account: Account) -> None:
        """Refuse an account that was admitted earlier and has lost its key since."""
        if not self.may_stay(account):
            raise self.refusal(account)
        if account.key_id and not _is_trusted(account):
            raise Unavailable("Keys cannot be checked at the moment. Please retry.")
        account.used_at = time.monotonic()

    def refusal(self, account: Account) -> Unauthenticated:
        """What an account that has lost its key is answered."""
        end = account.expires_at
        return _refused("" if account.key_id else None, end if end and end <= time.time() else None)

    async def _count_owners(self, owner: Owner) -> None:
        """Whether there are several owners is known before the first request of each; an owner who was alone then may
        learn of others later."""
        if not self.has_several_owners and owner not in self._owners:
            owners = {key.owner for key in await self._keys.given_out()}
            self.has_several_owners = len(owners) > 1
            self._owners.add(owner)

    def _enter(self, digest: str, key: Key) -> Account:
        account = self._accounts.get(digest)
        if account is None or account.is_revoked:
            account = self._accounts[digest] = Account(key, digest, self._meter)
            self._bound(account)
        account.confirmed_at = account.used_at = time.monotonic()
        return account

    def _bound(self, account: Account) -> None:
        """Whether this account bounds what its owner has in memory, by its limits as they are now."""
        self.bounded.get(account.owner, set()).discard(account)
        if account.limits.state_bytes_max:
            self.bounded.setdefault(account.owner, set()).add(account)
            if self.on_bounded is not None:
                self.on_bounded()
                self.on_bounded = None

    async def _confirm_forever(
        self, on_revoked: Callable[[Account], None], tell_others: TellOthers | None
    ) -> None:
        while True:
            was_asked = await self._wait()
            try:
                was_required = self.is_required
                gone = await self.confirm()
                await self._note_use()
                for account in gone:
                    on_revoked(account)
            except ApiError:
                log.exception("API keys could not be confirmed against the store")
                continue
            if tell_others and not was_asked and (gone or self.is_required != was_required):
                # A worker that this does not reach confirms by itself.
                with suppress(ApiError):
                    await tell_others()

    async def _wait(self) -> bool:
        """Wait until the next confirmation is due; True if `confirm_soon` asked for it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(self._is_asked.wait(), CONFIRM_S)
        was_asked = self._is_asked.is_set()
        self._is_asked.clear()
        return was_asked

    async def confirm(self) -> Sequence[Account]:
        """Look all accounts up in the store; returns those that have lost their key."""
        await self._notice_keys()
        gone = [self._local] if self.is_required and self._local.quota.connections else []
        if not self._accounts:
            return gone
        asked_at = time.monotonic()
        accounts = tuple(self._accounts.values())
        keys = await self._keys.find([account.digest for account in accounts])
        for account in accounts:
            if (key := keys.get(account.digest)) is not None:
                account.confirmed_at = asked_at
                if key.limits != account.limits:
                    account.limit(key.limits)
                    self._bound(account)
                is_unused = asked_at - account.used_at > IDLE_S and account.quota.is_idle
                is_left = is_unused and not self.holds_state(account)
            else:
                account.is_revoked = is_left = True
                gone.append(account)
            if is_left:
                self._remove(account)
        return gone

    async def _note_use(self) -> None:
        """Write the time of last use of keys that were used since."""
        now = time.monotonic()
        due = (account for account in self._accounts.values() if now - account.noted_at > NOTE_S)
        used = [account for account in due if account.used_at > account.noted_at]
        if used:
            await self._keys.note_use([account.key_id for account in used])
        for account in used:
            account.noted_at = now

    def _remove(self, account: Account) -> None:
        self._accounts.pop(account.digest, None)
        self.bounded.get(account.owner, set()).discard(account)

    async def _notice_keys(self) -> None:
        """In mode auto, the first key makes keys required for good."""
        if self._mode == "auto" and not self.is_required and await self._keys.given_out():
            self.is_required = self._local.is_checked = True


def _is_trusted(account: Account) -> bool:
    return not account.is_revoked and time.monotonic() - account.confirmed_at < TRUST_S


def _refused(secret: str | None, expired_at: int | None = None) -> Unauthenticated:
    """A wrong, a revoked and a made-up secret get the same answer; a missing secret gets another, and so does one whose
    key has expired."""
    if expired_at is not None:
        at = time.strftime("%Y-%m-%d %H:%M", time.gmtime(expired_at))
        message = f"This API key expired on {at} UTC. Ask this server's operator for a new one."
        return Unauthenticated(message, code="api_key_expired", is_wrong=True)
    if secret is None:
        return Unauthenticated(
            "You did not provide an API key. Provide it in an Authorization header: "
            "'Authorization: Bearer YOUR_KEY'."
        )
    return Unauthenticated("Incorrect API key provided.", is_wrong=True)
