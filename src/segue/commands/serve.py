"""How does a person start the server? `segue serve`."""

from __future__ import annotations

import argparse

from segue.commands.first_model import person, with_first_model
from segue.commands.flags import add_settings
from segue.observe.logs import set_up_logging
from segue.server import serve
from segue.settings import load_settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue serve`: one for every setting."""
    add_settings(parser)


def run(options: argparse.Namespace) -> int:
    """Serve until a signal comes; returns the exit status."""
    settings = load_settings(vars(options))
    set_up_logging(settings)
    settings = with_first_model(settings, person())
    if settings.workers == 1:
        return serve(settings)
    # Imported here: one process needs no supervisor.
    from segue.workers import serve_workers

    return serve_workers(settings)
