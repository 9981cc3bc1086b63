"""How is a client configured for this server? `segue connect CLIENT` prints what to write, or edits Codex's file.

In: the name of a client, the server's URL, a model, an API. Out: a program that runs as it is, or the client's own
settings, on standard output; what to do with it on standard error.
"""

from __future__ import annotations

import argparse
import sys

from segue.errors import Misconfigured
from segue.printable import say
from segue_cli.client.clients import CLIENTS, api_of, settings_of
from segue_cli.client.talk import (
    SEGUE_KEY,
    ModelEndpoint,
    add_api,
    add_model,
    add_server,
    find_endpoint,
    server_of,
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue connect`."""
    names = ", ".join(("codex", *CLIENTS))
    parser.add_argument("client", metavar="CLIENT", help=f"the client to connect: {names}")
    add_server(parser)
    add_model(parser)
    add_api(parser)
    parser.add_argument("--print", action="store_true", help="only print, write nothing")
    parser.add_argument("--yes", action="store_true", help="write without asking")


def run(options: argparse.Namespace) -> int:
    """Print what a client needs, or edit Codex's configuration; returns the exit status."""
    name = options.client.lower()
    if name not in ("codex", *CLIENTS):
        names = ", ".join(("codex", *CLIENTS))
        raise Misconfigured(
            f"connect: there is no client '{name}'; choose from {names}. "
            "`segue connect other` says what any other client needs."
        )
    api = api_of(name, options.api)
    server = server_of(options)
    endpoint = find_endpoint(
        server, options.model, otherwise=" To print it without a server: --model NAME."
    )
    if name == "codex":
        status = _connect_codex(endpoint, options)
        if status:
            return status
    else:
        say(settings_of(name, endpoint, api))
        say(CLIENTS[name].use, end="\n" if CLIENTS[name].use else "", file=sys.stderr)
    if server.key and not server.key_env:
        say(f"Put the API key into the environment variable {SEGUE_KEY}.", file=sys.stderr)
    return 0


def _connect_codex(endpoint: ModelEndpoint, options: argparse.Namespace) -> int:
    # Imported here: only Codex's file needs tomlkit.
    from segue_cli.client.codex import codex_block, codex_home, write_codex

    if options.print:
        say(codex_block(endpoint))
        return 0
    return write_codex(endpoint, codex_home() / "config.toml", is_agreed=options.yes)
