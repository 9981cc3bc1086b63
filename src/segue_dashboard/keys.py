"""How does an operator see, create, limit and revoke API keys in a browser?

Routes under `/dashboard/keys`, for keys with the scope `operator` and, where no keys are required, for every program of
this machine. Pages of other origins are refused, listed ones too. An operator sees no conversations of other owners, so
it cannot create a key for an owner that exists; `segue keys create` can. All changes are in the audit log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Protocol, TypeVar

import msgspec
from msgspec import Meta, Struct

from segue.accounts.account import LOCAL
from segue.accounts.owners import inherited, limit_key, limit_owner, of_owner
from segue.accounts.scopes import API_SCOPES, SCOPES
from segue.budgets.budget import BudgetLine, budget_lines, day_of
from segue.errors import NAME_CHARS_MAX, Forbidden, InvalidRequest, NotFound
from segue.limits import OTHER_REQUESTS_PER_MIN, Key, KeyLimits, odd_pattern
from segue.listener.api import Route
from segue.listener.exchange import Exchange
from segue.listener.services import Services
from segue.seams.access import Keys
from segue.seams.history import Owner
from segue.seams.store import Ledger, UsageTotal
from segue.wire.codec import encode

log = logging.getLogger(__name__)

BODY_BYTES_MAX = 64 * 1024
DAY_S = 86_400
# More than any limit can mean, and less than a store cannot hold.
LIMIT_MAX = 10**15
# The year 9999, the last one that every part can show.
EXPIRES_MAX = 253_402_300_800

T = TypeVar("T")
Word = Annotated[str, Meta(min_length=1, max_length=100)]


class NewLimits(KeyLimits, frozen=True, forbid_unknown_fields=True):
    """The limits that an operator asks for: a name that is misspelt must not mean no limit."""


class NewKey(Struct, frozen=True, forbid_unknown_fields=True):
    """What an operator asks for."""

    name: Word
    owner: Word | None = None
    scopes: Annotated[tuple[str, ...], Meta(min_length=1)] = API_SCOPES
    limits: NewLimits = NewLimits()
    expires_at: int | None = None


class CreatedKey(Struct, frozen=True):
    """A new key, and its secret, which is shown once."""

    key: Key
    secret: str


class KeyList(Struct, frozen=True):
    """All keys, what their owners have used today, what is used of their budgets, and what a new key may be."""

    keys: Sequence[Key]
    usage: Sequence[UsageTotal]
    # By the id of the key.
    budgets: Mapping[str, Sequence[BudgetLine]]
    are_required: bool
    # The caller's own.
    key_id: str
    owner: Owner
    scopes: Sequence[str] = SCOPES
    usual_scopes: Sequence[str] = API_SCOPES
    other_requests_per_min: int = OTHER_REQUESTS_PER_MIN


class IssueKey(Protocol):
    """A new key in the store, and its secret."""

    async def __call__(
        self,
        *,
        name: str,
        owner: Owner,
        scopes: Sequence[str],
        limits: KeyLimits,
        expires_at: int | None,
    ) -> tuple[Key, str]: ...


@dataclass(frozen=True, slots=True)
class KeySources:
    """Where keys and their usage are kept, and who learns of a change."""

    keys: Keys
    ledger: Ledger
    issue: IssueKey
    # Makes this process, and the others, confirm their keys now.
    confirm: Callable[[], Awaitable[None]]
    # Called with the event, the owner that has acted, the id of the key and that of the request.
    audit: Callable[[str, Owner, str, str], None]


class KeyRoutes:
    """The routes of the keys view."""

    def __init__(self, services: Services, sources: KeySources) -> None:
        self._services = services
        self._sources = sources

    @property
    def routes(self) -> Sequence[Route]:
        keys = "/dashboard/keys"
        key = "/dashboard/keys/{id}"
        return (
            Route("GET", keys, self._list, "operator"),
            Route("POST", keys, self._create, "operator"),
            Route("POST", key, self._limit, "operator"),
            Route("DELETE", key, self._revoke, "operator"),
        )

    async def _list(self, exchange: Exchange) -> None:
        self._check_origin(exchange)
        keys, now = await self._sources.keys.given_out(), time.time()
        spent = self._sources.ledger.spent
        budgets = {
            key.id: [*budget_lines(key.limits, await spent(key.owner, key.id, *day_of(now)), now)]
            for key in keys
            if key.limits.has_budget and key.state(now) == "valid"
        }
        listed = KeyList(
            keys,
            await self._sources.ledger.report(None, int(time.time()) // DAY_S * DAY_S),
            budgets,
            self._services.accounts.is_required,
            exchange.account.key_id,
            exchange.owner,
        )
        await exchange.answer(200, encode(listed))

    async def _create(self, exchange: Exchange) -> None:
        self._check_origin(exchange)
        wanted = await _read(exchange, NewKey)
        limits = _checked(wanted.limits)
        owner = wanted.owner or wanted.name
        for text in (wanted.name, owner):
            if not text.isprintable():
                raise InvalidRequest("Names must be printable characters.", param="name")
        if unknown := set(wanted.scopes) - set(SCOPES):
            message = (
                f"Unknown scopes: {', '.join(sorted(unknown))}. Choose from {', '.join(SCOPES)}."
            )
            raise InvalidRequest(message, param="scopes")
        earlier = await self._sources.keys.given_out()
        owners = {LOCAL, *(key.owner for key in earlier)}
        if owner in owners - {exchange.owner}:
            raise Forbidden(
                f"The owner '{owner}' exists already, and a new key could read its conversations. Choose another "
                f"owner, or run on the server: segue keys create --name NAME --owner '{owner}'"
            )
        if wanted.expires_at is not None and not time.time() < wanted.expires_at < EXPIRES_MAX:
            raise InvalidRequest("The expiry must be in the future.", param="expires_at")
        # A new key cannot leave out the budget of its owner; a budget that it brings is that of all of them.
        given = of_owner(msgspec.structs.asdict(limits))
        shared = inherited(earlier, owner) | {name: most for name, most in given.items() if most}
        await limit_owner(self._sources.keys, owner, shared)
        key, secret = await self._sources.issue(
            name=wanted.name,
            owner=owner,
            scopes=wanted.scopes,
            limits=msgspec.structs.replace(limits, **shared),
            expires_at=wanted.expires_at,
        )
        await self._note(exchange, "key.create", key.id)
        await exchange.answer(201, encode(CreatedKey(key, secret)))

    async def _limit(self, exchange: Exchange) -> None:
        self._check_origin(exchange)
        limits = _checked(await _read(exchange, NewLimits))
        key_id = exchange.arguments["id"]
        keys = await self._sources.keys.given_out()
        valid = [key for key in keys if key.id == key_id and key.revoked_at is None]
        if not valid:
            raise _no_key(key_id)
        await limit_key(self._sources.keys, valid[0], msgspec.structs.asdict(limits))
        await self._note(exchange, "key.limit", key_id)
        await exchange.answer(200, encode(limits))

    async def _revoke(self, exchange: Exchange) -> None:
        self._check_origin(exchange)
        key_id = exchange.arguments["id"]
        if not await self._sources.keys.revoke(key_id):
            raise _no_key(key_id)
        await self._note(exchange, "key.revoke", key_id)
        await exchange.answer(200, encode({"id": key_id, "revoked": True}))

    def _check_origin(self, exchange: Exchange) -> None:
        host = exchange.header(b"host")
        origin = exchange.header(b"origin")
        self._services.origin_policy.check_own(host, origin)

    async def _note(self, exchange: Exchange, event: str, key_id: str) -> None:
        """A key has changed: it is logged, and all processes look at their keys at once."""
        log.info("%s %s by owner '%s'", event, key_id, exchange.owner)
        self._sources.audit(event, exchange.owner, key_id, exchange.request_id)
        await self._sources.confirm()


async def _read(exchange: Exchange, kind: type[T]) -> T:
    try:
        return msgspec.json.decode(await exchange.text(BODY_BYTES_MAX), type=kind)
    except msgspec.DecodeError as error:
        raise InvalidRequest(f"The body is not valid: {error}.") from None


def _checked(limits: NewLimits) -> KeyLimits:
    values = msgspec.structs.asdict(limits)
    if (odd := odd_pattern(limits.models)) is not None:
        message = f"'{odd[:NAME_CHARS_MAX]}' is no name of a model, and no pattern with one *."
        raise InvalidRequest(message, param="limits.models")
    for name, value in values.items():
        if name != "models" and not 0 <= value <= LIMIT_MAX:
            message = f"{name} must be 0 (no limit) to {LIMIT_MAX:,}."
            raise InvalidRequest(message, param=f"limits.{name}")
    return KeyLimits(**values)


def _no_key(key_id: str) -> NotFound:
    return NotFound(f"There is no valid key '{key_id[:100]}'.")
