"""Who used how many tokens, and what did their containers use? `segue usage`."""

from __future__ import annotations

import argparse
import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import msgspec

from segue.printable import cell, say
from segue.seams.history import Owner
from segue.seams.store import UsageTotal
from segue.settings.checks import load_settings
from segue.settings.values import Settings
from segue_cli.commands.durable import open_durable
from segue_cli.commands.flags import add_store, amount, existing

if TYPE_CHECKING:
    from rich.table import Table

COUNTS = ("turns", "input_tokens", "cached_tokens", "output_tokens", "tool_calls")
# By column: the field, its unit, and how it is written.
CONTAINER_COUNTS = {
    "minutes": ("container_s", 60, ",.1f"),
    "CPU s": ("cpu_s", 1, ",.1f"),
    "egress MB": ("egress_bytes", 1e6, ",.1f"),
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

    console = Console()
    counts = {name.removesuffix("_tokens").replace("_", " "): (name, 1, ",.0f") for name in COUNTS}
    turns = [row for row in rows if row.model]
    containers = [row for row in rows if not row.model]
    console.print(table_of("Usage (days in UTC)", turns, ("day", "owner", "model"), counts))
    if containers:
        shown = table_of("Containers", containers, ("day", "owner"), CONTAINER_COUNTS)
        console.print(shown)
    return 0


def table_of(
    title: str,
    rows: Sequence[UsageTotal],
    names: Sequence[str],
    counts: Mapping[str, tuple[str, float, str]],
) -> Table:
    """Rows with their sums: what these names are of each, and these columns: field, unit and format."""
    from rich.table import Table

    table = Table(*names, title=title, show_footer=True)
    for name, (field, unit, form) in counts.items():
        total = sum(getattr(row, field) for row in rows) / unit
        table.add_column(name, format(total, form), justify="right")
    for row in rows:
        used = (format(getattr(row, field) / unit, form) for field, unit, form in counts.values())
        table.add_row(*(cell(getattr(row, name)) for name in names), *used)
    return table


async def read_usage(settings: Settings, owner: Owner | None, days: int) -> Sequence[UsageTotal]:
    """What was used on the last days, today included, by day, owner and model."""
    today = int(time.time()) // 86_400
    async with open_durable(settings, "usage") as store:
        return await store.ledger.report(owner, (today - days + 1) * 86_400)
