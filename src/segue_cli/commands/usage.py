"""Who used how many tokens, and what did their containers use? `segue usage`."""

from __future__ import annotations

import argparse
import asyncio
import calendar
import csv
import io
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
# What rows may be told apart by, and the field of a total.
GROUPS = {"key": "key_id", "owner": "owner", "model": "model"}
# By column: the field, its unit, and how it is written.
CONTAINER_COUNTS = {
    "minutes": ("container_s", 60, ",.1f"),
    "CPU s": ("cpu_s", 1, ",.1f"),
    "egress MB": ("egress_bytes", 1e6, ",.1f"),
}

# A table is as wide as its widest rows; a terminal that is narrower breaks the lines.
COLUMNS_MAX = 10_000

COUNTED = (*COUNTS, *(field for field, _, _ in CONTAINER_COUNTS.values()))


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue usage`."""
    add_store(parser)
    parser.add_argument("--owner", metavar="OWNER", help="only this owner")
    days = "number of days, today included (default: 30)"
    parser.add_argument("--days", type=amount, default=30, metavar="N", help=days)
    months = "rows of months instead of days: the number of months, this one included"
    parser.add_argument("--months", type=amount, metavar="N", help=months)
    by = (
        "what rows are told apart by besides the day: key, owner, model, separated by commas; none: the day alone "
        "(default: owner,model)"
    )
    parser.add_argument("--by", default="owner,model", metavar="NAMES", type=_groups, help=by)
    forms = parser.add_mutually_exclusive_group()
    forms.add_argument("--json", action="store_true", help="print JSON")
    forms.add_argument(
        "--csv", action="store_true", help="print CSV, a row for each line of the table"
    )


def _groups(text: str) -> list[str]:
    names = [name.strip() for name in text.split(",") if name.strip() not in ("", "none")]
    if odd := [name for name in names if name not in GROUPS]:
        raise argparse.ArgumentTypeError(f"'{odd[0]}' is not one of: {', '.join(GROUPS)}")
    return names


def run(options: argparse.Namespace) -> int:
    """Print a row for each day, owner and model, and for containers; returns the exit status."""
    settings = existing(load_settings(vars(options)))
    span = (options.days, options.months)
    found, key_names = asyncio.run(read_usage(settings, options.owner, *span))
    is_monthly = options.months is not None
    rows = grouped(found, options.by, is_monthly=is_monthly)
    if options.json:
        say(msgspec.json.encode(rows).decode())
        return 0
    if options.csv:
        say(as_csv(rows, options.by, key_names).rstrip("\r\n"))
        return 0
    counts = {name.removesuffix("_tokens").replace("_", " "): (name, 1, ",.0f") for name in COUNTS}
    period = "month" if is_monthly else "day"
    turns = grouped([row for row in found if row.model], options.by, is_monthly=is_monthly)
    names = (period, *options.by)
    print_whole(table_of(f"Usage ({period}s in UTC)", turns, names, counts, key_names))
    if used := [row for row in found if not row.model]:
        by = [name for name in options.by if name == "owner"]
        containers = grouped(used, by, is_monthly=is_monthly)
        shown = table_of("Containers", containers, (period, *by), CONTAINER_COUNTS, key_names)
        print_whole(shown)
    return 0


def print_whole(table: Table) -> None:
    """Print a table in which no day, name or number is cut, however narrow the terminal is."""
    # Imported here: where rich is missing, JSON and CSV are still printed.
    from rich.console import Console

    console = Console()
    needed = Console(width=COLUMNS_MAX).measure(table).maximum
    console.width = max(console.width, needed)
    console.print(table)


def table_of(
    title: str,
    rows: Sequence[UsageTotal],
    names: Sequence[str],
    counts: Mapping[str, tuple[str, float, str]],
    key_names: Mapping[str, str],
) -> Table:
    """Rows with their sums: what these names are of each, and these columns: field, unit and format."""
    from rich.box import SIMPLE
    from rich.table import Table

    table = Table(*names, title=title, show_footer=True, box=SIMPLE)
    for name, (field, unit, form) in counts.items():
        total = sum(getattr(row, field) for row in rows) / unit
        table.add_column(name, format(total, form), justify="right")
    for row in rows:
        used = (format(getattr(row, field) / unit, form) for field, unit, form in counts.values())
        words = (_shown(row, name, key_names) for name in names)
        table.add_row(*map(cell, words), *used)
    return table


def grouped(
    rows: Sequence[UsageTotal], by: Sequence[str], *, is_monthly: bool = False
) -> list[UsageTotal]:
    """These rows added up by what they are told apart by. Containers keep a row of their own beside models."""
    totals: dict[tuple[str, ...], UsageTotal] = {}
    for row in rows:
        kept = {GROUPS[name]: getattr(row, GROUPS[name]) for name in by}
        blank = dict.fromkeys(GROUPS.values(), "") | kept
        blank["day"] = row.day[:7] if is_monthly else row.day
        key = tuple(blank[name] for name in ("day", "owner", "model", "key_id"))
        one = msgspec.structs.replace(row, **blank)
        if (sum_so_far := totals.get(key)) is not None:
            counts = {name: getattr(one, name) + getattr(sum_so_far, name) for name in COUNTED}
            one = msgspec.structs.replace(one, **counts)
        totals[key] = one
    return [totals[key] for key in sorted(totals)]


def as_csv(rows: Sequence[UsageTotal], by: Sequence[str], names: Mapping[str, str]) -> str:
    """A line of names, then a line for each row. A key has its id and its name."""
    out = io.StringIO()
    writer = csv.writer(out)
    heads = [word for name in by for word in (("key", "key_name") if name == "key" else (name,))]
    writer.writerow(["period", *heads, *COUNTED])
    for row in rows:
        words = []
        for name in by:
            words.append(getattr(row, GROUPS[name]))
            if name == "key":
                words.append(names.get(row.key_id, ""))
        writer.writerow([row.day, *map(_plain, words), *(getattr(row, name) for name in COUNTED)])
    return out.getvalue()


def _plain(word: str) -> str:
    """A word that no spreadsheet takes for a formula."""
    return f"'{word}" if word[:1] in ("=", "+", "-", "@", "\t", "\r") else word


def _shown(row: UsageTotal, name: str, key_names: Mapping[str, str]) -> str:
    if name in ("day", "month"):
        return row.day
    if name == "key":
        return key_names.get(row.key_id, row.key_id) or "-"
    return str(getattr(row, GROUPS[name]))


async def read_usage(
    settings: Settings, owner: Owner | None, days: int, months: int | None = None
) -> tuple[Sequence[UsageTotal], Mapping[str, str]]:
    """What was used on the last days, today included, or in the last months; and the names of the keys."""
    now = time.time()
    # Nothing is older than 1970.
    since = max(0, (int(now) // 86_400 - days + 1) * 86_400)
    if months is not None:
        first = 12 * time.gmtime(now).tm_year + time.gmtime(now).tm_mon - months
        year, month = divmod(max(12 * 1970, first), 12)
        since = calendar.timegm((year, month + 1, 1, 0, 0, 0))
    async with open_durable(settings, "usage") as store:
        keys = await store.keys.given_out()
        return await store.ledger.report(owner, since), {key.id: key.name for key in keys}
