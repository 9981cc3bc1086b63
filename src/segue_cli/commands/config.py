"""Which settings would hold, where was each set, and is anything wrong with them? `segue config`."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from segue.printable import say, without_password
from segue.server.aliases import alias_problems
from segue.server.served import served_models
from segue.settings.checks import problems_of, settings_of
from segue.settings.sources import SettingSources, read_sources
from segue.settings.validation import Misfit
from segue.settings.values import FIELDS, SECRETS, Settings
from segue_cli.commands.flags import add_settings
from segue_cli.commands.settings_help import FLAGS

HIDDEN = "(hidden)"
# Tables of which every value may be a secret.
SECRET_TABLES = ("headers", "environment")
INSIDE = ("embedded", "scripted")
PATHS = (
    "tls_cert",
    "tls_key",
    "search_index",
    "guard_classifier",
    "script",
    "tokenizer",
    "template",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue config`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "validate the settings and print every problem; exit status 1 if there are any"
    check = actions.add_parser("check", help=about, description=about)
    check.add_argument("file", nargs="?", metavar="FILE", help="settings file to check")
    about = "print the settings that would hold and where each was set; secrets are hidden"
    show = actions.add_parser("show", help=about, description=about)
    for action in (check, show):
        add_settings(action, is_listed=False)
        action.add_argument("--json", action="store_true", help="print JSON")
    about = "print only what is set: by a flag, in the environment or in the file"
    show.add_argument("--changed", action="store_true", help=about)


def run(options: argparse.Namespace) -> int:
    """Check or show the settings; returns the exit status."""
    flags = vars(options)
    if options.action == "check":
        return _check(
            read_sources(flags | {"config": options.file or options.config}), options.json
        )
    sources = read_sources(flags)
    return _show(sources, settings_of(sources), options.json, is_changed=options.changed)


# --- check -------------------------------------------------------------------------------------------


def _check(sources: SettingSources, is_json: bool) -> int:
    errors = problems_of(sources)
    if not errors:
        errors = [sources.problem(misfit) for misfit in _missing(settings_of(sources))]
    found = [*errors, *sources.warnings()]
    if is_json:
        say(msgspec.json.encode(found).decode())
    else:
        for problem in found:
            say("warning: " * (problem.level == "warning") + str(problem))
        checked = sources.file or "flags and environment (there is no settings file)"
        say(f"{checked}: {len(errors) or 'no'} problem{'s' * (len(errors) != 1)}.")
    return 1 if errors else 0


def _missing(settings: Settings) -> Iterator[Misfit]:
    """What a server would find missing at its start."""
    for problem in alias_problems(served_models(settings)):
        yield Misfit(("models",), problem)
    for one in served_models(settings):
        if one.engine not in INSIDE and not one.engine_url:
            yield Misfit(("engine_url",), f"engine '{one.engine}' of {one.name} needs a URL.")
    for name in PATHS:
        values = {getattr(one, name, "") for one in (settings, *served_models(settings))}
        for path in sorted(filter(None, values)):
            if not Path(path).exists():
                yield Misfit((name,), f"there is no file or folder {path}.")


# --- show --------------------------------------------------------------------------------------------


def _show(sources: SettingSources, settings: Settings, is_json: bool, *, is_changed: bool) -> int:
    tables = [name for name in FIELDS if name in sources.values and name not in (*FLAGS, "config")]
    names = [name for name in FLAGS if name in sources.values or not is_changed]
    shown = {
        name: {"value": hidden(name, getattr(settings, name)), "from": sources.origin(name)}
        for name in (*names, *tables)
    }
    if is_json:
        say(msgspec.json.encode(shown).decode())
        return 0
    width = max(map(len, shown), default=0) + 2
    say(f"settings file: {settings.config or 'none'}")
    for name, row in shown.items():
        is_unset = row["value"] in (None, "", [])
        value = "unset" if is_unset else msgspec.json.encode(row["value"]).decode()
        say(f"{name:{width}}{value:32}  {row['from']}")
    return 0


def hidden(name: str, value: object) -> object:
    """A setting without its secrets."""
    if name in SECRETS and value:
        return HIDDEN
    if isinstance(value, msgspec.Struct):
        value = msgspec.structs.asdict(value)
    if isinstance(value, Mapping):
        is_secret = name in SECRET_TABLES
        return {key: HIDDEN if is_secret else hidden(str(key), one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [hidden(name, one) for one in value]
    return without_password(value) if isinstance(value, str) else value
