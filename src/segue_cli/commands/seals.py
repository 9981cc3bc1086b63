"""How does a person rotate the keys that encrypt? `segue seals`."""

from __future__ import annotations

import argparse
import json

from segue.server.storage import rotate_seals
from segue.settings.checks import load_settings
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
    print(json.dumps({"keys": number}) if options.json else text)
    return 0
