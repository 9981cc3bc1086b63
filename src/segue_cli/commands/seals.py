"""How does a person rotate the keys that encrypt? `segue seals`."""

from __future__ import annotations

import argparse
import asyncio
import json

from segue.errors import Misconfigured
from segue.printable import say
from segue.seals.ring import rotate_ring
from segue.server.storage import open_store
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.flags import add_store


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue seals`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "add a new encryption key; old ones stay valid for decryption"
    rotate = actions.add_parser("rotate", help=about, description=about)
    add_store(rotate, has_seal_keys=True)
    rotate.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Add a key; returns the exit status."""
    number = rotate_seals(load_settings(vars(options)))
    text = (
        f"There are {number} keys now. After a restart servers encrypt with the new one; "
        "all of them stay valid for decryption."
    )
    say(json.dumps({"keys": number}) if options.json else text)
    return 0


def rotate_seals(settings: Settings) -> int:
    """Add a new seal key, which is used from now on; returns how many there are."""
    if settings.is_ring_stored:
        return asyncio.run(_rotate_stored(settings))
    path = settings.seal_path
    if path is None:
        raise Misconfigured(
            "seal_keys: the memory store has no file of seal keys. Name one with --seal-keys, or another store."
        )
    return rotate_ring(path)


async def _rotate_stored(settings: Settings) -> int:
    async with open_store(settings) as store:
        assert store.ring is not None
        return await store.ring.rotate()
