"""Can a text make a mark of any family? `make test-injection` tries a thousand texts for each and writes the sum.

Every family twice, by the table and by derivation alone, with texts made of its own marks (`injection.py`), as many at
each place where a user or a tool writes. `make test` has a sample. A text that changes a mark of a prompt is printed,
and ends the run with status 1 after the other families.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial

from tests.models.derived import PAGE, DerivedModel
from tests.models.families import BY_NAME
from tests.models.injection import PLACES, break_out
from tests.models.talk import Model

TEXTS = 1_000
BETWEEN = re.compile(r"(<!-- thousand -->\n).*?(<!-- end of thousand -->)", re.DOTALL)


@dataclass(frozen=True)
class Tried:
    """A family by one of the two ways: how many prompts were compared, and what was wrong."""

    name: str
    is_derived: bool
    compared: int = 0
    wrong: str = ""


def tried(texts: int, kind: tuple[str, bool]) -> Tried:
    name, is_derived = kind
    model = (DerivedModel if is_derived else Model)(BY_NAME[name])
    try:
        compared = break_out(model.dialect, texts // len(PLACES))
    except Exception as wrong:
        return Tried(name, is_derived, wrong=f"{type(wrong).__name__}: {wrong}")
    return Tried(name, is_derived, compared)


def sentence(tries: Iterable[Tried], texts: int) -> str:
    """What the page says."""
    lines = []
    for way, is_derived in (("table", False), ("derivation", True)):
        those = [one for one in tries if one.is_derived is is_derived]
        bad = [one.name for one in those if one.wrong]
        compared = f"{sum(one.compared for one in those):,}"
        end = f"wrong: {', '.join(bad)}" if bad else "no mark was forged"
        lines.append(f"| by {way} | {len(those)} | {compared} | {end} |")
    head = [f"| {texts:,} texts a family | families | prompts compared | |", "|---|---|---|---|"]
    return "\n".join([*head, *lines, ""])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help="only these families, and nothing is written")
    parser.add_argument("--texts", type=int, default=TEXTS, help="texts for each family")
    options = parser.parse_args()
    kinds = [(name, derived) for name in options.names or BY_NAME for derived in (False, True)]
    tries = []
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for one in pool.map(partial(tried, options.texts), kinds):
            way = "derivation" if one.is_derived else "table"
            print(f"{one.name:22} {way:10} {one.compared:6} {one.wrong[:600]}", flush=True)
            tries.append(one)
    text = sentence(tries, options.texts)
    print(text)
    if not options.names:
        PAGE.write_text(BETWEEN.sub(lambda found: found[1] + text + found[2], PAGE.read_text()))
    return 1 if any(one.wrong for one in tries) else 0


if __name__ == "__main__":
    sys.exit(main())
