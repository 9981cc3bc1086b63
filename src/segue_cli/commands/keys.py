"""How does a person create, list, edit and revoke API keys? The actions of `segue keys`."""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

import msgspec

from segue.accounts.hashes import KeyHashes, issue_key
from segue.accounts.owners import inherited, limit_key, limit_owner
from segue.accounts.scopes import API_SCOPES, OPERATOR, SCOPES, TOOL_SCOPES
from segue.errors import ApiError, Misconfigured
from segue.limits import OTHER_REQUESTS_PER_MIN, Key, KeyLimits, odd_pattern
from segue.printable import say
from segue.seams.history import Owner
from segue.server.storage import KEYS_TOPIC, check_ring, load_ring
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.durable import open_durable
from segue_cli.commands.flags import add_store, amount, amount_or_none, existing
from segue_cli.terminal import as_columns

USUAL_SCOPES = ",".join(API_SCOPES)
# What a newcomer opens: with the first key of a store the dashboard is theirs.
FIRST_SCOPES = (*API_SCOPES, "metrics", "dashboard", OPERATOR)
SCOPES_HELP = (
    f"what the key may be used for, separated by commas (default: {USUAL_SCOPES}; of the first key in a store also "
    "metrics, dashboard and operator). All scopes: responses and models "
    "(the API), metrics (/metrics), dashboard (figures of the key's owner), operator (figures of all owners, and the "
    f"actions of an operator), {', '.join(TOOL_SCOPES)} (tools that the server runs), and priority (requests with "
    "service_tier priority go before others)"
)
LIFETIME = re.compile(r"([1-9][0-9]{0,5})([mhdw])")
UNIT_S = {"m": 60, "h": 3_600, "d": 86_400, "w": 604_800}
COLUMNS = ("ID", "NAME", "OWNER", "SECRET", "STATE", "CREATED", "LAST USED", "EXPIRES", "SCOPES")
WORD_CHARS_MAX = 100
LIMITS = {
    "requests_per_min": "requests per minute",
    "tokens_per_min": "tokens per minute, input and output together",
    "connections_max": "open WebSocket connections",
    "lanes_max": "responses that run at once",
    "state_bytes_max": "bytes of history kept in memory for this key",
    "other_requests_per_min": "requests per minute that start no response: GET, DELETE, lists, conversations",
}
BUDGETS = {
    "budget_tokens_day": "tokens a day (UTC), input and output together",
    "budget_tokens_month": "tokens a month (UTC)",
    "owner_budget_tokens_day": "tokens a day of all keys of the owner together, set for all of them",
    "owner_budget_tokens_month": "tokens a month of all keys of the owner together, set for all of them",
}
MODELS_HELP = (
    "models that the key may use, by names or patterns such as 'gpt-*', separated by commas"
)
DEFAULTS = {"other_requests_per_min": f"{OTHER_REQUESTS_PER_MIN}, which JSON shows as 0"}


def run(options: argparse.Namespace) -> int:
    """Run one of the actions; returns the exit status."""
    actions = {"create": _create, "list": _list, "edit": _edit, "revoke": _revoke}
    action = actions[options.action]
    return action(options, load_settings(vars(options)))


def _create(options: argparse.Namespace, settings: Settings) -> int:
    given = _given(options)
    scopes = None if options.scopes is None else _words(options.scopes)
    name = _word("name", options.name)
    owner = _word("owner", options.owner or options.name)
    expires_at = None if options.expires is None else int(time.time()) + options.expires
    is_new = settings.store_path is not None and not settings.store_path.exists()
    creating = create_key(settings, name, owner, scopes, given, expires_at=expires_at)
    key, secret = asyncio.run(creating)
    if options.json:
        say(msgspec.json.encode({"secret": secret, **msgspec.structs.asdict(key)}).decode())
    else:
        # Only the secret goes to standard output, so that a script can read it from there.
        say(secret)
    until = f", valid until {_minute(expires_at)} UTC" if expires_at else ""
    say(f"This is {key.id}, owner {key.owner}{until}.", file=sys.stderr)
    say("It is not shown again: store it somewhere safe.", file=sys.stderr)
    if scopes is None and OPERATOR in key.scopes:
        say(
            "It is the first key of this store, so it opens the dashboard and is an operator's: "
            f"{','.join(key.scopes)}. Give programs keys of their own, which have {USUAL_SCOPES}.",
            file=sys.stderr,
        )
    where = f"It is in {_where(settings)}"
    if is_new:
        where += ", which was created now: start the server with this store"
    say(f"{where}.", file=sys.stderr)
    alike = [one.id for one in _valid(_all(settings)) if one.name == name and one.id != key.id]
    if alike:
        say(f"Also named '{name}', and still valid: {', '.join(alike)}.", file=sys.stderr)
    return 0


def _list(options: argparse.Namespace, settings: Settings) -> int:
    found = _all(existing(settings))
    if options.json:
        say(msgspec.json.encode(found).decode())
        return 0
    say(f"Keys in {_where(settings)}, times in UTC:", file=sys.stderr)
    say(as_columns([COLUMNS, *map(_row, found)]))
    limited = [(key, words) for key in found if (words := _limits(key))]
    for key, words in limited:
        say(f"limits of {key.id} ({key.name}): {words}")
    return 0


def _edit(options: argparse.Namespace, settings: Settings) -> int:
    given = _given(options)
    if not given:
        raise Misconfigured(
            "keys: nothing to change. Give a limit, a budget or --models; 0 removes a limit, --models '*' allows all."
        )
    key = chosen(_all(existing(settings)), options.key)
    if key.revoked_at is not None:
        raise Misconfigured(f"keys: {key.id} ({key.name}) is revoked.")
    changed = asyncio.run(edit_key(settings, key, given))
    for each in changed:
        say(f"{each.id} ({each.name}), owner {each.owner}: {_limits(each) or 'no limits'}")
    say("Running servers follow within five seconds.", file=sys.stderr)
    return 0


def _given(options: argparse.Namespace) -> dict[str, int | tuple[str, ...]]:
    """The limits that were given, by the names of the fields."""
    amounts = {name: getattr(options, _option(name)) for name in (*LIMITS, *BUDGETS)}
    given: dict[str, int | tuple[str, ...]] = {
        name: value for name, value in amounts.items() if value is not None
    }
    if options.models is not None:
        models = _words(",".join(options.models))
        if (odd := odd_pattern(models)) is not None:
            raise Misconfigured(f"models: '{odd}' is no name, and no pattern with one *.")
        given["models"] = () if "*" in models else tuple(models)
    return given


def _words(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _revoke(options: argparse.Namespace, settings: Settings) -> int:
    key = chosen(_all(existing(settings)), options.key)
    if not asyncio.run(revoke_key(settings, key.id)):
        raise Misconfigured(f"keys: {key.id} ({key.name}) is revoked already.")
    say(f"{key.id} ({key.name}) is revoked. Running servers refuse it within five seconds.")
    return 0


async def create_key(
    settings: Settings,
    name: str,
    owner: Owner,
    scopes: Sequence[str] | None,
    given: Mapping[str, object],
    *,
    expires_at: int | None = None,
) -> tuple[Key, str]:
    """A new API key in the store that the settings name, and its secret. Without scopes it has the usual ones, and the
    first key of a store an operator's. The budgets of its owner hold for it too."""
    unknown = set(scopes or ()) - set(SCOPES)
    if unknown or scopes == []:
        raise Misconfigured(
            f"scopes: {', '.join(sorted(unknown)) or 'none given'}; choose from {', '.join(SCOPES)}."
        )
    async with open_durable(settings, "API keys") as store:
        hashes = KeyHashes(await load_ring(settings, store))
        await check_ring(store.keys, hashes, settings)
        earlier = await store.keys.given_out()
        limits = msgspec.convert(inherited(earlier, owner) | {**given}, KeyLimits)
        await limit_owner(store.keys, owner, given)
        scopes = scopes or (API_SCOPES if earlier else FIRST_SCOPES)
        created = await issue_key(
            store.keys, hashes, name, owner, scopes, limits, expires_at=expires_at
        )
    await notify_servers(settings)
    return created


async def edit_key(settings: Settings, key: Key, given: Mapping[str, object]) -> Sequence[Key]:
    """Change limits of a key; those of its owner for all keys of that owner. Returns what was changed."""
    async with open_durable(settings, "API keys") as store:
        changed = await limit_key(store.keys, key, given)
    await notify_servers(settings)
    return changed


async def list_keys(settings: Settings) -> Sequence[Key]:
    """Every API key of the store, revoked ones included."""
    async with open_durable(settings, "API keys") as store:
        return await store.keys.given_out()


async def revoke_key(settings: Settings, key_id: str) -> bool:
    """Revoke an API key; False if there is no such key or it was revoked before."""
    async with open_durable(settings, "API keys") as store:
        is_revoked = await store.keys.revoke(key_id)
    if is_revoked:
        await notify_servers(settings)
    return is_revoked


async def notify_servers(settings: Settings) -> None:
    """Tell running servers at once that API keys have changed, where the database can; other servers poll."""
    if settings.store_kind != "postgresql":
        return
    # Imported here, as the store is.
    from segue.cluster.notify import open_notify_bus

    with suppress(ApiError):
        async with open_notify_bus(settings.direct_store) as bus:
            await bus.publish(KEYS_TOPIC, b"")


def chosen(keys: Sequence[Key], word: str) -> Key:
    """The key that a person means: by its id, by the start of its id if it is the only one, or by its name."""
    start = word.rstrip("….")
    for found in (
        [key for key in keys if key.id == word],
        [key for key in _valid(keys) if key.name == word],
        [key for key in keys if start and key.id.startswith((start, f"key_{start}"))],
        [key for key in keys if key.name == word],
    ):
        if len(found) == 1:
            return found[0]
        if found:
            names = "; ".join(f"{key.id} ({key.name}, {key.secret_start}…)" for key in found)
            raise Misconfigured(f"keys: '{word}' fits {len(found)} keys: {names}. Give the id.")
    raise Misconfigured(f"keys: there is no key '{word}'. See `segue keys list`.")


def _all(settings: Settings) -> Sequence[Key]:
    return asyncio.run(list_keys(settings))


def _valid(keys: Sequence[Key]) -> list[Key]:
    now = time.time()
    return [key for key in keys if key.state(now) == "valid"]


def _where(settings: Settings) -> str:
    """The store, with the whole path of its file."""
    path = settings.store_path
    return settings.shown_store if path is None else f"sqlite:///{path.resolve()}"


def _row(key: Key) -> tuple[str, ...]:
    start = f"{key.secret_start}…" if key.secret_start else "-"
    days = (key.created_at, key.used_at, key.expires_at)
    when = ("never" if at is None else _minute(at) for at in days)
    state = key.state(time.time())
    return key.id, key.name, key.owner or "-", start, state, *when, ",".join(key.scopes)


def _limits(key: Key) -> str:
    limits = msgspec.structs.asdict(key.limits)
    words = [f"models: {', '.join(key.limits.models)}"] if key.limits.models else []
    every = LIMITS | BUDGETS
    words += [f"{every[name]}: {limits[name]:,}" for name in every if limits[name]]
    return "; ".join(words)


def _minute(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.gmtime(seconds))


def lifetime(text: str) -> int:
    """Seconds from a text such as 30d."""
    if (match := LIFETIME.fullmatch(text)) is None:
        raise argparse.ArgumentTypeError(f"'{text}' is not a time such as 45m, 12h, 30d or 8w")
    return int(match[1]) * UNIT_S[match[2]]


def _word(what: str, text: str) -> str:
    """Check a name: a terminal and every store must be able to show it."""
    if not text.isprintable() or not 0 < len(text) <= WORD_CHARS_MAX:
        raise Misconfigured(f"{what}: must be 1 to {WORD_CHARS_MAX} printable characters.")
    return text


def _option(limit: str) -> str:
    return limit if limit in BUDGETS else "limit_" + limit.removesuffix("_max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue keys`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "create a key and print its secret once"
    create = actions.add_parser("create", help=about, description=about)
    create.add_argument("--name", required=True, help="a name for the key, in your own words")
    owner = "keys of one owner see each other's responses (default: the name)"
    create.add_argument("--owner", help=owner)
    create.add_argument("--scopes", help=SCOPES_HELP)
    expires = (
        "how long the key is valid, such as 45m, 12h, 30d or 8w (default: until it is revoked)"
    )
    create.add_argument("--expires", metavar="TIME", type=lifetime, help=expires)
    _add_limits(create, amount)
    about = "change what a key may use; running servers follow"
    edit = actions.add_parser("edit", help=about, description=about)
    _add_limits(edit, amount_or_none)
    about = "print all keys, without their secrets"
    listing = actions.add_parser("list", help=about, description=about)
    about = "revoke a key permanently"
    revoke = actions.add_parser("revoke", help=about, description=about)
    words = "the key: its id, the start of its id, or its name, from `segue keys list`"
    for action in (edit, revoke):
        action.add_argument("key", metavar="KEY", help=words)
    for action in (create, edit, listing, revoke):
        add_store(action, has_seal_keys=True)
    for action in (create, listing):
        action.add_argument("--json", action="store_true", help="print JSON")


def _add_limits(parser: argparse.ArgumentParser, number: Callable[[str], int]) -> None:
    """What a key may use: models, limits, budgets."""
    is_edit = number is amount_or_none
    every = "; '*': all" if is_edit else " (default: all)"
    parser.add_argument("--models", action="append", metavar="NAMES", help=MODELS_HELP + every)
    for name, text in (LIMITS | BUDGETS).items():
        flag = "--" + _option(name).replace("_", "-")
        about = f"{text} (default: {DEFAULTS.get(name, 'no limit')})"
        if is_edit:
            about = f"{text}; 0: {DEFAULTS.get(name, 'no limit')}"
        parser.add_argument(flag, type=number, metavar="N", help=about)
