"""How does a person create, list and revoke API keys? The actions of `segue keys`."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table

from segue.commands.flags import add_store, amount, existing
from segue.errors import Misconfigured
from segue.limits import OTHER_REQUESTS_PER_MIN, KeyLimits
from segue.settings import Settings, load_settings
from segue.storage import create_key, list_keys, revoke_key
from segue.turn.values import Key

USUAL_SCOPES = "responses,models"
SCOPES_HELP = (
    f"what the key may be used for, separated by commas (default: {USUAL_SCOPES}); others: metrics, "
    "dashboard, and for server-side tools web_search, mcp, mcp_url"
)
WORD_CHARS_MAX = 100
LIMITS = {
    "requests_per_min": "requests per minute",
    "tokens_per_min": "tokens per minute, input and output together",
    "connections_max": "open WebSocket connections",
    "lanes_max": "responses that run at once",
    "state_bytes_max": "bytes of history kept in memory for this key",
    "other_requests_per_min": "requests per minute that start no response: GET, DELETE, lists, conversations",
}
DEFAULTS = {"other_requests_per_min": str(OTHER_REQUESTS_PER_MIN)}


def run(options: argparse.Namespace) -> int:
    """Run one of the actions; returns the exit status."""
    action = {"create": _create, "list": _list, "revoke": _revoke}[options.action]
    return action(options, load_settings(vars(options)))


def _create(options: argparse.Namespace, settings: Settings) -> int:
    given = {name: getattr(options, _option(name)) for name in LIMITS}
    limits = KeyLimits(**{name: value for name, value in given.items() if value is not None})
    scopes = [word.strip() for word in options.scopes.split(",") if word.strip()]
    name = _word("name", options.name)
    owner = _word("owner", options.owner or options.name)
    key, secret = asyncio.run(create_key(settings, name, owner, scopes, limits))
    if options.json:
        print(msgspec.json.encode({"secret": secret, **msgspec.structs.asdict(key)}).decode())
        return 0
    # Only the secret goes to standard output, so that a script can read it from there.
    print(secret)
    hint = f"This is {key.id}, owner {key.owner}. It is not shown again: store it somewhere safe."
    print(hint, file=sys.stderr)
    return 0


def _list(options: argparse.Namespace, settings: Settings) -> int:
    found = asyncio.run(list_keys(existing(settings)))
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(_table(found))
    return 0


def _revoke(options: argparse.Namespace, settings: Settings) -> int:
    if not asyncio.run(revoke_key(existing(settings), options.id)):
        raise Misconfigured(f"keys: there is no valid key {options.id}. See `segue keys list`.")
    print(f"{options.id} is revoked. Running servers refuse it within five seconds.")
    return 0


def _table(found: Sequence[Key]) -> Table:
    table = Table("id", "name", "owner", "scopes", "limits", "created", "revoked", title="Keys")
    for key in found:
        limits = msgspec.structs.asdict(key.limits)
        words = ", ".join(f"{name} {value:,}" for name, value in limits.items() if value)
        days = (_day(at) if at is not None else "" for at in (key.created_at, key.revoked_at))
        scopes = ", ".join(key.scopes)
        table.add_row(key.id, key.name, key.owner, scopes, words or "none", *days)
    return table


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _word(what: str, text: str) -> str:
    """Check a name: a terminal and every store must be able to show it."""
    if not text.isprintable() or not 0 < len(text) <= WORD_CHARS_MAX:
        raise Misconfigured(f"{what}: must be 1 to {WORD_CHARS_MAX} printable characters.")
    return text


def _option(limit: str) -> str:
    return "limit_" + limit.removesuffix("_max")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue keys`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="create a key and print its secret once")
    create.add_argument("--name", required=True, help="a name for the key, in your own words")
    owner = "keys of one owner see each other's responses (default: the name)"
    create.add_argument("--owner", help=owner)
    create.add_argument("--scopes", default=USUAL_SCOPES, help=SCOPES_HELP)
    for name, text in LIMITS.items():
        flag = "--" + _option(name).replace("_", "-")
        about = f"{text} (default: {DEFAULTS.get(name, 'no limit')})"
        create.add_argument(flag, type=amount, metavar="N", help=about)
    listing = actions.add_parser("list", help="print all keys, without their secrets")
    revoke = actions.add_parser("revoke", help="revoke a key permanently")
    revoke.add_argument("id", help="the id of the key, from `segue keys list`")
    for action in (create, listing, revoke):
        add_store(action, has_seal_keys=True)
    for action in (create, listing):
        action.add_argument("--json", action="store_true", help="print JSON")
