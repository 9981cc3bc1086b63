"""Why was a turn not free? `segue explain`: the cache report of a response, with the two prompts side by side.

In: the id of a response. Out: the reason, the tokens, the place where the prompts part, and both texts around it.
"""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterator
from itertools import zip_longest
from urllib.parse import quote

from segue.errors import Misconfigured
from segue.printable import printable, say
from segue.wire.cache import CacheReport, Side
from segue_cli.client.asking import decoded
from segue_cli.client.talk import ServerRefused, add_server, server_of

# Lines of a text that are shown before the place and from it on.
LINES_BEFORE, LINES_AFTER = 2, 6
COLUMNS_MIN = 40
# Where the texts part.
MARK = "»"

VERDICTS = {
    "first": "There was no earlier prompt to go on from.",
    "hit": "Nothing was lost: the prompt begins with the earlier one.",
}
COMPARED = {"parent": "its parent", "nearest": "the nearest earlier prompt"}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "response", metavar="RESPONSE_ID", help="id of the response (resp_…, msg_… or chatcmpl-…)"
    )
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    add_server(parser)


def run(options: argparse.Namespace) -> int:
    """Print the report."""
    server = server_of(options)
    try:
        body = server.ask(f"/v1/responses/{quote(options.response, safe='')}/cache")
    except ServerRefused as error:
        if error.status != 404 or "--apis" in str(error):
            raise
        raise Misconfigured(
            f"response: the server at {server.url} knows nothing of the prompt of '{options.response}'. "
            "Reports are kept in memory (reuse_bytes_max), for the owner of the response, until a restart."
        ) from None
    if options.json:
        say(body.decode(errors="replace"))
        return 0
    width = max(COLUMNS_MIN, shutil.get_terminal_size().columns)
    say("\n".join(explained(decoded(body, CacheReport, "a cache report"), width)))
    return 0


def explained(report: CacheReport, width: int) -> Iterator[str]:
    """The report as lines of text."""
    yield f"{report.response_id} ({report.model})"
    yield _sentence(report.summary) or VERDICTS[report.verdict]
    if report.compared_with is not None and report.comparison is not None:
        yield f"compared with  {report.compared_with} ({COMPARED[report.comparison]})"
    cached = "not reported" if report.cached_tokens is None else f"{report.cached_tokens:,}"
    yield f"prompt         {report.input_tokens:,} tokens"
    yield f"reusable       {report.reusable_tokens:,} tokens, cached by the engine: {cached}"
    took = "" if report.lost_ms is None else f", about {report.lost_ms:,.0f} ms"
    yield f"lost           {report.lost_tokens:,} tokens{took}"
    if report.before is not None and report.now is not None:
        yield ""
        yield from _beside(report.before, report.now, (width - 3) // 2)


def _sentence(words: str) -> str:
    return words and words[0].upper() + words[1:] + "."


def _beside(before: Side, now: Side, width: int) -> Iterator[str]:
    yield f"{'before':{width}} | now"
    yield f"{'-' * width}-+-{'-' * width}"
    rows = zip_longest(_column(before, width), _column(now, width), fillvalue="")
    yield from (f"{left:{width}} | {right}".rstrip() for left, right in rows)


def _column(side: Side, width: int) -> list[str]:
    """The lines around the place, which is marked."""
    marked = side.text[: side.at] + MARK + side.text[side.at :]
    # Before it is cut into rows: an escape is longer than its character.
    lines = printable(marked).split("\n")
    at = side.text.count("\n", 0, side.at)
    shown = lines[max(0, at - LINES_BEFORE) : at + LINES_AFTER]
    wrapped = [textwrap.wrap(line, width, drop_whitespace=False) or [""] for line in shown]
    rows = [row for lines in wrapped for row in lines]
    place = next((n for n, row in enumerate(rows) if MARK in row), 0)
    return rows[max(0, place - LINES_BEFORE) : place + LINES_AFTER]
