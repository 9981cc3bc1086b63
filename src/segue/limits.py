"""What may one key use, and what is left of it? Pure: a draw on a key's limits in, a grant and the new level out.

A bucket holds a minute's worth and fills up steadily, so that a burst is fine and a flood is not. The limits hold for
all processes together: the store keeps the level and who holds what, each process draws on it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, Literal, Protocol, TypeVar

from msgspec import Struct

MINUTE_S = 60.0
# More than clocks of several machines differ by.
CLOCKS_DIFFER_S = 30.0
# So that a bucket that should hold a whole request does.
CRUMB = 1e-6
# A hundred a second: a hundred background turns, each polled every second. More would be felt by the other keys.
OTHER_REQUESTS_PER_MIN = 6_000

# A server of an engine adds to what it is sent (its template, pictures, a prompt of its own), and writes more than it
# shows (thoughts). No model that we know does so with more tokens than this.
UNSEEN_TOKENS_MAX = 1_000_000


class KeyLimits(Struct, frozen=True):
    """What one key may use of all processes together; 0: no limit of its own."""

    requests_per_min: int = 0
    tokens_per_min: int = 0
    connections_max: int = 0
    lanes_max: int = 0
    state_bytes_max: int = 0
    # Requests that start no turn: GET, DELETE, lists, cancel, conversations. Here 0 is `OTHER_REQUESTS_PER_MIN`.
    other_requests_per_min: int = 0
    # Budgets: tokens of a day and of a month (of UTC), input and output together; of the key, and of all keys of its
    # owner.
    budget_tokens_day: int = 0
    budget_tokens_month: int = 0
    owner_budget_tokens_day: int = 0
    owner_budget_tokens_month: int = 0
    # The models that it may use, by names and patterns such as `gpt-*`; none: all.
    models: tuple[str, ...] = ()

    @property
    def has_budget(self) -> bool:
        """Whether the tokens of a day or a month are bounded."""
        return bool(
            self.budget_tokens_day
            or self.budget_tokens_month
            or self.owner_budget_tokens_day
            or self.owner_budget_tokens_month
        )


class Rate(Struct, frozen=True):
    """What is left of a minute's requests or tokens, and how long until all of it is there again."""

    of: Literal["requests", "tokens"]
    limit: int
    remaining: int
    reset_s: float


def rate_of(of: Literal["requests", "tokens"], limit: int, left: float) -> Rate:
    """A limit of which so much is left; in debt if negative."""
    reset_s = max(0.0, limit - left) * MINUTE_S / max(1, limit)
    return Rate(of, limit, max(0, int(left + CRUMB)), reset_s)


class Spent(Struct, frozen=True):
    """Tokens that are written in the ledger: of a key and of its owner, of this day and this month (of UTC)."""

    day: int = 0
    month: int = 0
    owner_day: int = 0
    owner_month: int = 0


class Key(Struct, frozen=True):
    """An API key: what it may be used for, and its limits. The secret is not kept."""

    id: str
    name: str
    owner: str
    scopes: tuple[str, ...]
    limits: KeyLimits
    # Which key of the seal ring its digest was made with.
    ring: str
    created_at: int
    revoked_at: int | None = None
    # How its secret starts, for people; "" for keys of older versions.
    secret_start: str = ""
    expires_at: int | None = None
    # When it was last used, about to the minute.
    used_at: int | None = None

    def state(self, now: float) -> Literal["valid", "expired", "revoked"]:
        """Whether it is good at this time."""
        if self.revoked_at is not None:
            return "revoked"
        return "expired" if self.expires_at is not None and self.expires_at <= now else "valid"


class HeldPlaces(Struct, frozen=True):
    """Places of a key that are taken, in use or kept for the next one."""

    connections: int = 0
    lanes: int = 0


class Draw(Struct, frozen=True):
    """What a process asks of a key's limits."""

    key_id: str
    limits: KeyLimits
    # Requests wanted, or given back if negative; tokens used since the last draw.
    requests: int = 0
    tokens: int = 0
    # What it would hold from now on, in all.
    held: HeldPlaces = HeldPlaces()


def slots_draw(server: str, wanted: int, limit: int) -> Draw:
    """A draw on the slots of an engine server: so many of this limit for this process. They are kept in the rows of
    keys, as lanes, under a name that no key has; the grant's `held.lanes` is what the process may hold."""
    return Draw(f"engine {server}", KeyLimits(lanes_max=limit), held=HeldPlaces(lanes=wanted))


class Level(Struct, frozen=True):
    """What is left of a key's minute, and when that was counted."""

    requests: float
    tokens: float
    at: float


class Grant(Struct, frozen=True):
    """What a process is given, and what is left."""

    requests: int = 0
    # How long until there is a request again, if none was given.
    wait_s: float = 0.0
    # Of all; in debt if negative.
    tokens: float = 0.0
    held: HeldPlaces = HeldPlaces()
    # What the other processes hold.
    others: HeldPlaces = HeldPlaces()
    # Requests that nobody has drawn.
    requests_left: float = 0.0


def share_out(
    draw: Draw, level: Level | None, others: HeldPlaces, now: float
) -> tuple[Level, Grant]:
    """What this draw is given, and what is left then."""
    limits = draw.limits
    left = _filled(limits, level, now)
    given = min(draw.requests, int(left.requests + CRUMB)) if limits.requests_per_min else 0
    requests = min(float(limits.requests_per_min), left.requests - given)
    tokens = left.tokens - draw.tokens if limits.tokens_per_min else 0.0
    is_short = draw.requests > 0 and not given
    missing = (1 - requests) * MINUTE_S / max(1, limits.requests_per_min)
    wait_s = max(0.0, missing) if is_short else 0.0
    connections = _places(draw.held.connections, others.connections, limits.connections_max)
    lanes = _places(draw.held.lanes, others.lanes, limits.lanes_max)
    grant = Grant(given, wait_s, tokens, HeldPlaces(connections, lanes), others, requests)
    return Level(requests, tokens, left.at), grant


def _filled(limits: KeyLimits, level: Level | None, now: float) -> Level:
    if level is None:
        return Level(float(limits.requests_per_min), float(limits.tokens_per_min), now)
    # A clock that was put back does not empty anything, and one that ran ahead does not keep it empty. Clocks of
    # several machines differ a little: then the latest counts, so that nothing is filled twice.
    minutes = max(0.0, now - level.at) / MINUTE_S
    is_put_back = level.at - now > CLOCKS_DIFFER_S
    return Level(
        min(float(limits.requests_per_min), level.requests + minutes * limits.requests_per_min),
        min(float(limits.tokens_per_min), level.tokens + minutes * limits.tokens_per_min),
        now if is_put_back else max(now, level.at),
    )


def _places(wanted: int, taken: int, most: int) -> int:
    return min(wanted, max(0, most - taken)) if most else wanted


# --- names of models ---------------------------------------------------------------------------------

STAR = "*"


def fits(pattern: str, name: str) -> bool:
    """Whether a name is meant: by itself, or by a pattern with one star."""
    start, star, end = pattern.partition(STAR)
    if not star:
        return pattern == name
    return len(name) >= len(pattern) - 1 and name.startswith(start) and name.endswith(end)


def odd_pattern(patterns: Sequence[str]) -> str | None:
    """The first of these that cannot be the name of a model, or a pattern with one star."""
    odd = (
        name
        for name in patterns
        if not name.isprintable() or name != name.strip() or not name or name.count(STAR) > 1
    )
    return next(odd, None)


class NamedModel(Protocol):
    """A model with the name that it is served under, whatever aliases it has."""

    @property
    def name(self) -> str: ...


ModelT = TypeVar("ModelT", bound=NamedModel)


@dataclass(frozen=True, slots=True)
class PermittedModels(Mapping[str, ModelT], Generic[ModelT]):
    """Those of the models that a key may use: the name that is asked for, or the model's own, is on its list."""

    models: Mapping[str, ModelT]
    allowed: Sequence[str]

    def __getitem__(self, name: str) -> ModelT:
        model = self.models[name]
        if not any(fits(pattern, name) or fits(pattern, model.name) for pattern in self.allowed):
            raise KeyError(name)
        return model

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.models if name in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)


def permitted(models: Mapping[str, ModelT], allowed: Sequence[str]) -> Mapping[str, ModelT]:
    """The models that a key with this list may use; without one, all."""
    return PermittedModels(models, allowed) if allowed else models
