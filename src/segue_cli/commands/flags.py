"""Which flags do several commands share? One for every setting, those of the store, and numbers."""

from __future__ import annotations

import argparse
import re
from typing import get_args

import msgspec

from segue.errors import Misconfigured
from segue.settings.sources import FILE_NAME, flag_of
from segue.settings.validation import choices_of
from segue.settings.values import FIELDS, REPEATED, RETIRED, Settings
from segue_cli.commands.settings_help import COMMON, FLAGS, HELP
from segue_cli.terminal import WideHelp

# What may stand after a flag, by the setting or by the last word of its name; other texts: that word, other numbers: N.
PLACEHOLDERS = {
    "tls_key": "FILE",
    "s": "SECONDS",
    "bytes": "BYTES",
    "tokens": "TOKENS",
    "chars": "CHARACTERS",
    "port": "PORT",
    "host": "ADDRESS",
    "hosts": "HOST",
    "origins": "ORIGIN",
    "allow": "DOMAIN",
    "deny": "DOMAIN",
    "model": "NAME",
    "dialect": "NAME",
    "guard": "NAME",
    "apis": "NAMES",
    "tokenizer": "PATH",
    "results": "PATH",
    "fields": "NAMES",
    "header": "NAME: VALUE",
    "headers": "NAME=VALUE",
    "endpoint": "URL",
    "store": "URL",
    "direct": "URL",
    "classifier": "DIR",
    "threshold": "0..1",
    "top_p": "0..1",
    "temperature": "0..2",
} | dict.fromkeys(("cert", "keys", "template", "script", "log", "index"), "FILE")
# "timeout; none: off": what happens without the setting.
WITHOUT = re.compile(r"; none: ([^;]+)")
MIB = 1024 * 1024


def add_settings(parser: argparse.ArgumentParser, *, is_listed: bool = True) -> None:
    """A flag for every setting, in groups. Values stay text: the settings validate all sources alike."""
    about = (
        f"TOML file with any of these settings (default: {FILE_NAME} in the working folder, if there is one); "
        "none: read no file"
    )
    parser.add_argument("--config", metavar="FILE", help=about)
    if is_listed:
        parser.formatter_class = CommonHelp
        every = f"show all {len(FLAGS)} settings; {len(COMMON)} are shown here"
        parser.add_argument("--help-all", action=HelpAll, nargs=0, help=every)
    else:
        parser.epilog = "All flags of `segue serve` may be given too: see `segue serve --help-all`."
    for title, texts in HELP.items():
        group = parser.add_argument_group(title)
        for name, text in texts.items():
            field = FIELDS[name]
            about = _about(text, field) if is_listed else argparse.SUPPRESS
            if field.type in (bool, bool | None):
                _add_switch(group, name, about)
            else:
                is_names = any(map(choices_of, get_args(field.type)))
                action = "append" if name in REPEATED else "store"
                group.add_argument(
                    flag_of(name),
                    action="extend" if is_names else action,
                    type=_names if is_names else str,
                    metavar=placeholder(field),
                    help=about,
                )

    for name in RETIRED:
        parser.add_argument(flag_of(name), help=argparse.SUPPRESS, nargs="?", const="true")


class CommonHelp(WideHelp):
    """Without the settings that few servers need."""

    def add_argument(self, action: argparse.Action) -> None:
        """Leave those out."""
        if action.dest not in FLAGS or action.dest in COMMON:
            super().add_argument(action)


class HelpAll(argparse.Action):
    """`--help-all`: the help with every setting."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        """Print it, and end."""
        parser.formatter_class = WideHelp
        parser.print_help()
        parser.exit()


def _names(text: str) -> list[str]:
    """Names of a fixed list, which may be written with commas."""
    return [name.strip() for name in text.split(",")]


def _add_switch(group: argparse._ArgumentGroup, name: str, about: str) -> None:
    """A flag that needs no value, and its opposite."""
    group.add_argument(flag_of(name), nargs="?", const="true", metavar="true|false", help=about)
    opposite = flag_of(f"no_{name}")
    group.add_argument(
        opposite, dest=name, action="store_const", const="false", help=argparse.SUPPRESS
    )


def _about(text: str, field: msgspec.structs.FieldInfo) -> str:
    """The help of a flag, with what happens without it."""
    found = WITHOUT.search(text)
    default = found[1] if found else _shown(field)
    return WITHOUT.sub("", text).replace("%", "%%") + (f" (default: {default})" if default else "")


def _shown(field: msgspec.structs.FieldInfo) -> str:
    match field.default:
        case bool() as value:
            return f"on; off: {flag_of('no_' + field.name)}" if value else "off"
        case tuple() as values:
            return ", ".join(map(str, values))
        case int() as value if value and value % MIB == 0:
            return f"{value}, which is {value // MIB} MiB"
        case int() | float() as value:
            return f"{value:g}" if isinstance(value, float) else str(value)
        case value:
            return str(value or "")


def placeholder(field: msgspec.structs.FieldInfo) -> str:
    """What may stand after a flag: the choices, or a word for its kind."""
    if choices := choices_of(field.type):
        return "|".join(choices)
    word = field.name.removesuffix("_max").split("_")[-1]
    for name in (field.name, word):
        if name in PLACEHOLDERS and not field.name.endswith("_per_s"):
            return PLACEHOLDERS[name]
    return "N" if isinstance(field.default, int | float) else word.upper()


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
        raise Misconfigured(
            f"store: there is no file {path}. Run this in the folder of the server, or name its store with --store or "
            "--config."
        )
    return settings


def amount(text: str) -> int:
    """A positive number, for flags."""
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"'{text}' is not a whole number of at least 1")
    return int(text)


def amount_or_none(text: str) -> int:
    """A number, for flags; 0 stands for none."""
    return 0 if text == "0" else amount(text)
