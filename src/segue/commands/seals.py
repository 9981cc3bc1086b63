"""How does a person rotate the keys that encrypt? `segue seals`."""

from __future__ import annotations

import argparse

from segue.commands.flags import add_store
from segue.settings import load_settings
from segue.storage import rotate_seals


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue seals`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "add a new encryption key; old ones stay valid for decryption"
    add_store(actions.add_parser("rotate", help=about, description=about), has_seal_keys=True)


def run(options: argparse.Namespace) -> int:
    """Add a key; returns the exit status."""
    print(
        f"There are {rotate_seals(load_settings(vars(options)))} keys now. After a restart servers encrypt with the "
        "new one; all of them stay valid for decryption."
    )
    return 0
