"""How does a person start the server? `segue serve`."""

from __future__ import annotations

import argparse
import asyncio
import logging
from functools import partial

from msgspec import structs

from segue.errors import Misconfigured
from segue.observe.logs import set_up_logging
from segue.server.operator import ReadSettings
from segue.server.serve import serve
from segue.server.served import has_engines_inside
from segue.settings.checks import settings_of
from segue.settings.sources import read_sources
from segue.settings.values import Settings
from segue_cli.commands.engine_child import wants_child, with_engine
from segue_cli.commands.engine_name import with_engine_name
from segue_cli.commands.flags import add_settings

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue serve`: one for every setting."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit status."""
    sources = read_sources(vars(options))
    asked = settings_of(sources)
    set_up_logging(asked.log_level, asked.log_format, workers=asked.workers)
    for warning in sources.warnings():
        log.warning("%s", warning)
    try:
        with with_engine(asked) as ready:
            settings = _with_model(ready)
            return _serve(settings, partial(_read_again, options, asked, settings))
    except Misconfigured as error:
        raise Misconfigured(sources.located(str(error))) from None


def _with_model(settings: Settings) -> Settings:
    """The settings with a model where none is named: the engine's own, or one that this machine can hold."""
    if not has_engines_inside(settings):
        return asyncio.run(with_engine_name(settings)) if settings.is_unnamed else settings
    # Imported here: most servers have no model inside.
    from segue_cli.commands.first_model import person, with_first_model

    return with_first_model(settings, person())


def _read_again(options: argparse.Namespace, asked: Settings, chosen: Settings) -> Settings:
    """The settings as they are now; where they still name no model, the one that was chosen at the start, or that the
    engine has by now."""
    again = settings_of(read_sources(vars(options)))
    if wants_child(again) and wants_child(asked):
        again = structs.replace(again, engine_url=chosen.engine_url, tokenizer=chosen.tokenizer)
        asked = structs.replace(asked, engine_url=chosen.engine_url)
    names = ("model", "models", "engine", "engine_url")
    if chosen.is_unnamed or any(getattr(again, one) != getattr(asked, one) for one in names):
        return asyncio.run(with_engine_name(again))
    return structs.replace(again, model=chosen.model)


def _serve(settings: Settings, read_settings: ReadSettings) -> int:
    if settings.workers == 1:
        return serve(settings, read_settings)
    # Imported here: one process needs no supervisor.
    from segue.workers.supervisor import serve_workers

    return serve_workers(settings, read_settings)
