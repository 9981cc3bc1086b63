"""How do local documents become searchable? `segue index`."""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path

import msgspec

from segue.printable import say
from segue.server.tools import index_folder
from segue_cli.terminal import progress_bar


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue index`."""
    parser.add_argument("folder", metavar="DIR", help="folder with the documents")
    into = "index file (default: segue.index)"
    parser.add_argument("--into", metavar="FILE", default="segue.index", help=into)
    prefix = "URL of the folder, for citations"
    parser.add_argument("--url", metavar="PREFIX", default="", help=prefix)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Index a folder; returns the exit status."""
    folder, into = Path(options.folder), Path(options.into)
    with progress_bar() as show:
        report = index_folder(folder, into, options.url, partial(show, f"Reading {folder}"))
    if options.json:
        say(msgspec.json.encode(report).decode())
        return 0
    say(
        f"{into}: {report.added} added, {report.changed} changed, {report.same} unchanged, "
        f"{report.removed} removed, {report.unread} without text."
    )
    return 0
