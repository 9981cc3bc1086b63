"""Who used how many tokens, and what did their containers use? `segue usage`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Sequence

import msgspec

from segue.printable import cell, say
from segue.seams.history import Owner
from segue.seams.store import UsageTotal
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.durable import open_durable
from segue_cli.commands.flags import add_store, amount, existing

COUNTS = ("turns", "input_tokens", "cached_tokens", "output_tokens", "tool_calls")
# Shown where a container was used; by column, what one of it is, and its field.
CONTAINER_COUNTS = {
    "container min": (60.0, "container_s"),
    "CPU s": (1.0, "cpu_s"),
    "egress MB": (1e6, "egress_bytes"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue usage`."""
    add_store(parser)
    parser.add_argument("--owner", metavar="OWNER", help="only this owner")
    days = "number of days, today included (default: 30)"
    parser.add_argument("--days", type=amount, default=30, metavar="N", help=days)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Print a row for each day, owner and model, and for containers; returns the exit status."""
    settings = existing(load_settings(vars(options)))
    rows = asyncio.run(read_usage(settings, options.owner, options.days))
    if options.json:
        say(msgspec.json.encode(rows).decode())
        return 0
    # Imported here: where rich is missing, JSON is still printed.
    from rich.console import Console
    from rich.table import Table

    table = Table("day", "owner", "model", title="Usage (days in UTC)", show_footer=True)
    for name in COUNTS:
        total = sum(getattr(row, name) for row in rows)
        shown = name.removesuffix("_tokens").replace("_", " ")
        table.add_column(shown, f"{total:,}", justify="right")
    has_containers = any(row.container_s for row in rows)
    for name, (unit, field) in CONTAINER_COUNTS.items() if has_containers else ():
        total = sum(getattr(row, field) for row in rows)
        table.add_column(name, f"{total / unit:,.1f}", justify="right")
    for row in rows:
        counts = [f"{getattr(row, name):,}" for name in COUNTS]
        if has_containers:
            used = CONTAINER_COUNTS.values()
            counts += [f"{getattr(row, field) / unit:,.1f}" for unit, field in used]
        model = cell(row.model) if row.model else "(containers)"
        table.add_row(row.day, cell(row.owner), model, *counts)
    Console().print(table)
    return 0


async def read_usage(settings: Settings, owner: Owner | None, days: int) -> Sequence[UsageTotal]:
    """What was used on the last days, today included, by day, owner and model."""
    today = int(time.time()) // 86_400
    async with open_durable(settings, "usage") as store:
        return await store.ledger.report(owner, (today - days + 1) * 86_400)
