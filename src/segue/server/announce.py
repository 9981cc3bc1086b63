"""What does an operator read when the server has started, and when it stops?

In: the settings, and what the app knows once it runs. Out: lines for the terminal, one subject each.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from segue import __version__
from segue.printable import say, shown_address
from segue.server.apis import APIS, is_on
from segue.server.app import App
from segue.server.models import SCALE_OUT_ADVICE
from segue.server.pages import has_dashboard
from segue.server.served import served_models
from segue.settings.values import ModelSettings, Settings

WIDTH = 10


def start_lines(app: App, settings: Settings) -> list[str]:
    """What only a running app knows: its engines, and whether keys are needed."""
    models = served_models(settings)
    lines = [_line("model", f"{model.name}: {_engine(app, model)}") for model in models]
    lines.append(_line("API keys", _keys(app, settings)))
    engines = (app.runner.models[model.name].engine for model in models)
    if any(engine.facts.ids_alone is False for engine in engines):
        lines.append(_line("advice", SCALE_OUT_ADVICE))
    return [*lines, *_warnings(app, settings)]


def announce(settings: Settings, url: str, lines: list[str]) -> None:
    """Print what a person needs to see first."""
    names = ", ".join(model.name for model in served_models(settings))
    workers = f" with {settings.workers} workers" if settings.workers > 1 else ""
    said = [
        f"Segue {__version__} serves {names} at {url}/v1{workers}",
        *([_line("dashboard", f"{url}/")] if has_dashboard() else []),
        _line("APIs", ", ".join(name for name, api in APIS.items() if is_on(api, settings))),
        _line("store", _store(settings)),
        _line("settings", settings.config or "no file"),
        *([_line("sandboxes", _sandboxes(settings))] if settings.environment != "off" else []),
        *lines,
        "Stop with Ctrl-C.",
    ]
    say("\n".join(said))


def count(number: int, noun: str) -> str:
    """A number and its noun: 1 turn, 2 turns, no turns."""
    return f"{number or 'no'} {noun}{'' if number == 1 else 's'}"


def _store(settings: Settings) -> str:
    """Where the store is; a file without a folder is in the working folder."""
    path = settings.store_path
    where = f" in {Path.cwd()}" if path is not None and not path.is_absolute() else ""
    return settings.shown_store + where


def _sandboxes(settings: Settings) -> str:
    """Where the commands of models run, and how far apart from this machine; its probe has held."""
    kind, level = "bwrap", "kernel-shared"
    if settings.environment == "gvisor":
        kind, level = "gvisor", "user-kernel"
    domains = ", ".join(settings.environment_domains)
    return f"{kind}: isolation {level}, {f'network to {domains}' if domains else 'no network'}"


def _line(name: str, text: str) -> str:
    return f"  {name:{WIDTH}} {text}"


def _engine(app: App, model: ModelSettings) -> str:
    if model.engine == "scripted":
        return "scripted engine: it plays a script and is not a model"
    built = app.runner.models[model.name]
    where = f" at {_addresses(model)}" if model.engine_url else ""
    parts = [
        f"{model.engine} engine{where}" + ("" if app.health.met.get(model.name) else ", no answer")
    ]
    if tokens := built.context_tokens:
        parts.append(f"context {tokens:,} tokens")
    if slots := model.engine_parallel or built.engine.facts.slots:
        parts.append(count(slots, "slot") + (" each" if len(model.engine_url) > 1 else ""))
    return ", ".join(parts)


def _addresses(model: ModelSettings) -> str:
    return " and ".join(map(shown_address, model.engine_url))


def _keys(app: App, settings: Settings) -> str:
    if app.state.accounts.is_required:
        return "needed"
    if settings.auth == "off":
        return "not needed (--auth off)"
    if settings.store == "memory":
        return "not needed until the first one is created (in the dashboard)"
    return "not needed until the first one is created (`segue keys create`)"


def _warnings(app: App, settings: Settings) -> Iterator[str]:
    away = [
        model
        for model in served_models(settings)
        if model.engine_url and not app.health.met.get(model.name)
    ]
    if away:
        urls = ", ".join(dict.fromkeys(map(_addresses, away)))
        yield (
            f"WARNING: no engine answers at {urls}. Requests fail with 503 until it does: start it, or correct "
            "--engine-url. `segue doctor` says more."
        )
        if settings.is_unnamed:
            yield (
                "WARNING: no model is named, and the engine cannot be asked for its own. It is served under its own "
                "name once the engine answers; or name it: --model NAME."
            )
    for problem in app.health.misnamed:
        yield f"WARNING: {problem} `segue doctor` says more."
