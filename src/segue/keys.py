"""How does a person give out API keys and take them back? The verbs of `segue keys`."""

from __future__ import annotations

import argparse
import asyncio
import logging
import re
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec
from rich.console import Console
from rich.table import Table

from segue.errors import Misconfigured
from segue.limits import KeyLimits
from segue.settings import Settings
from segue.storage import create_key, list_keys, revoke_key
from segue.turn.values import Key

if TYPE_CHECKING:
    Verbs = argparse._SubParsersAction[argparse.ArgumentParser]

USUAL_SCOPES = "responses,models"
SCOPES_HELP = (
    f"what it is good for (default: {USUAL_SCOPES}); beside these: metrics, dashboard, and of tools "
    "that the server runs web_search, mcp, mcp_url"
)
WORD_CHARS_MAX = 100
LIMITS = {
    "requests_per_min": "requests a minute",
    "tokens_per_min": "tokens a minute, prompts and answers together",
    "connections_max": "open WebSocket connections",
    "lanes_max": "turns that run at once",
    "state_bytes_max": "bytes of history that are kept in memory for it",
}


SECRET = re.compile(r"sk-segue-[A-Za-z0-9_-]+")


class Discreet(logging.Formatter):
    """Writes log lines, tracebacks included, without any key of ours that might have got into one."""

    def format(self, record: logging.LogRecord) -> str:
        """The line."""
        return SECRET.sub("sk-segue-…", super().format(record))


def keys(options: argparse.Namespace, settings: Settings) -> int:
    """Run one of the verbs; the exit status says whether it worked."""
    match options.action:
        case "create":
            return _create(options, settings)
        case "list":
            return _list(options, settings)
        case _:
            return _revoke(options, settings)


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
    # The secret alone on standard output, so that a script can take it from there.
    print(secret)
    print(
        f"This is {key.id}, for {key.owner}. It is not shown again: keep it somewhere safe.",
        file=sys.stderr,
    )
    return 0


def _list(options: argparse.Namespace, settings: Settings) -> int:
    found = asyncio.run(list_keys(_existing(settings)))
    if options.json:
        print(msgspec.json.encode(found).decode())
    else:
        Console().print(_table(found))
    return 0


def _revoke(options: argparse.Namespace, settings: Settings) -> int:
    if not asyncio.run(revoke_key(_existing(settings), options.id)):
        raise Misconfigured(f"keys: there is no key {options.id} that could be revoked.")
    print(f"{options.id} is revoked. Servers that run know it within five seconds.")
    return 0


def _table(found: Sequence[Key]) -> Table:
    table = Table("id", "name", "owner", "scopes", "limits", "created", "revoked", title="Keys")
    for key in found:
        limits = msgspec.structs.asdict(key.limits)
        words = ", ".join(f"{name} {value:,}" for name, value in limits.items() if value)
        table.add_row(
            key.id,
            key.name,
            key.owner,
            ", ".join(key.scopes),
            words or "none",
            _day(key.created_at),
            "" if key.revoked_at is None else _day(key.revoked_at),
        )
    return table


def _day(seconds: int) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(seconds))


def _existing(settings: Settings) -> Settings:
    """A store that is there: opening would make it."""
    path = settings.store_path
    if path is not None and not path.exists():
        raise Misconfigured(f"store: there is no file {path}.")
    return settings


def _word(what: str, text: str) -> str:
    """A name that a terminal and every store can take."""
    if not text.isprintable() or not 0 < len(text) <= WORD_CHARS_MAX:
        raise Misconfigured(f"{what}: 1 to {WORD_CHARS_MAX} characters that can be printed.")
    return text


def _option(limit: str) -> str:
    return "limit_" + limit.removesuffix("_max")


def _amount(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError(text)
    return number


def add_keys_verb(verbs: Verbs) -> None:
    """Describe `segue keys` to the command line."""
    parser = verbs.add_parser("keys", help="give out API keys and take them back")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    create = actions.add_parser("create", help="make a key, and print it once")
    create.add_argument("--name", required=True, help="what it is for, in your own words")
    create.add_argument("--owner", help="whose responses it sees (default: its name)")
    create.add_argument("--scopes", default=USUAL_SCOPES, help=SCOPES_HELP)
    for name, text in LIMITS.items():
        flag = "--" + _option(name).replace("_", "-")
        create.add_argument(flag, type=_amount, metavar="N", help=f"{text} (default: no limit)")
    listing = actions.add_parser("list", help="print all keys, never their secrets")
    revoke = actions.add_parser("revoke", help="take a key back for good")
    revoke.add_argument("id", help="such as key_0f3a…, from the list")
    for action in (create, listing, revoke):
        action.add_argument("--config", metavar="FILE", help="a TOML file that names the store")
        action.add_argument("--store", metavar="STORE", help="where keys are kept")
        action.add_argument(
            "--seal-keys", metavar="FILE", help="the ring; default: beside the store's file"
        )
    for action in (create, listing):
        action.add_argument("--json", action="store_true", help="as JSON")
