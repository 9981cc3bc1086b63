"""Which models can the embedded engine run? `segue models`."""

from __future__ import annotations

import argparse

from segue.models import add_model, list_models


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The actions of `segue models`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    about = "list the models that can be downloaded by name"
    actions.add_parser("list", help=about, description=about)
    about = "download a model and verify it"
    add = actions.add_parser("add", help=about, description=about)
    add.add_argument("name", help="such as smollm2 or qwen2.5-coder-1.5b")


def run(options: argparse.Namespace) -> int:
    """Run one of the actions; returns the exit status."""
    if options.action == "list":
        print("\n".join(list_models()))
    else:
        print(f"{options.name} is ready: {add_model(options.name)}")
    return 0
