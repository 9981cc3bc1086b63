"""How does a person start the server? `segue serve`."""

from __future__ import annotations

import argparse
import logging

from segue.commands.first_model import person, with_first_model
from segue.commands.flags import add_settings
from segue.errors import Misconfigured
from segue.observe.logs import set_up_logging
from segue.server import serve
from segue.settings import Settings, read_sources, settings_of

log = logging.getLogger(__name__)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue serve`: one for every setting."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit status."""
    sources = read_sources(vars(options))
    settings = settings_of(sources)
    set_up_logging(settings)
    for warning in sources.warnings():
        log.warning("%s", warning)
    try:
        return _serve(with_first_model(settings, person()))
    except Misconfigured as error:
        raise Misconfigured(sources.located(str(error))) from None


def _serve(settings: Settings) -> int:
    if settings.workers == 1:
        return serve(settings)
    # Imported here: one process needs no supervisor.
    from segue.workers import serve_workers

    return serve_workers(settings)
