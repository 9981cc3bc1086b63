"""Which flags do several commands share? One for every setting, those of the store, and numbers."""

from __future__ import annotations

import argparse

import msgspec

from segue.errors import Misconfigured
from segue.settings import FIELDS, HELP, REPEATED, Settings, choices_of


def add_settings(parser: argparse.ArgumentParser) -> None:
    """A flag for every setting, in groups. Values stay text: the settings validate all sources alike."""
    parser.add_argument("--config", metavar="FILE", help="TOML file with any of these settings")
    for title, texts in HELP.items():
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            group.add_argument(
                "--" + name.replace("_", "-"),
                action="append" if name in REPEATED else "store",
                metavar=_metavar(FIELDS[name]),
                help=f"{text} (default: {_shown(FIELDS[name].default)})",
            )


def _shown(default: object) -> str:
    if default in ("", (), None):
        return "none"
    return str(default).lower() if isinstance(default, bool) else str(default)


def _metavar(field: msgspec.structs.FieldInfo) -> str:
    """What may stand after a flag: the choices, the unit, or the last word of its name."""
    if choices := choices_of(field):
        return "|".join(choices)
    if field.type in (bool, bool | None):
        return "true|false"
    word = field.name.removesuffix("_max").removesuffix("_per_s").split("_")[-1]
    return {"s": "SECONDS", "cert": "FILE", "keys": "FILE", "template": "FILE"}.get(
        word, word.upper()
    )


def add_store(parser: argparse.ArgumentParser, *, has_seal_keys: bool = False) -> None:
    """The flags that say which store."""
    parser.add_argument("--config", metavar="FILE", help="TOML file that names the store")
    parser.add_argument("--store", metavar="STORE", help="the store (default: sqlite:///segue.db)")
    if has_seal_keys:
        about = "file with the keys that encrypt and hash (default: next to the store's file)"
        parser.add_argument("--seal-keys", metavar="FILE", help=about)


def existing(settings: Settings) -> Settings:
    """Refuse a SQLite file that does not exist: opening it would create it."""
    path = settings.store_path
    if path is not None and not path.exists():
        raise Misconfigured(f"store: there is no file {path}.")
    return settings


def amount(text: str) -> int:
    """A positive number, for flags."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)
