"""Does any regular expression of the product grow faster than its input?

Every compiled pattern at the top level of a module, or in a table there, is found by itself. It is tried on strings of
its own literal characters: one or two short pieces, many times, with an end that does not fit. How a pattern is used is
read from the table; the most is asked of the others: `finditer` over the whole string.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import re
import time
from collections.abc import Callable, Iterator
from itertools import islice, product
from typing import Any

import segue
import segue_cli
import segue_dashboard
import segue_embedded

PACKAGES = (segue, segue_cli, segue_dashboard, segue_embedded)
# These are only ever used by `match` or `fullmatch`.
ANCHORED = {
    "segue.ids._OF_TURN",
    "segue.readers.call_json.OPENINGS.code",
    "segue.readers.call_json.OPENINGS.input",
    "segue.vocabularies.images.ENDING_IMAGE",
    "segue.wire.codec.STREAM_ID",
}
# These read what the operator has written, or the files of a model.
TRUSTED = {
    "segue.settings.checks.SEARCH_HEADER",
    "segue.settings.sources.HEADER",
    "segue.settings.sources.KEY",
    "segue.vocabularies.vocabulary.MARK_FORM",
}
SIZES = (1_500, 3_000)
RATIO_MAX = 3.0
# A quadratic pattern needs more than this for the larger size.
FLOOR_S = 0.003
PIECES_MAX = 6


def patterns() -> Iterator[tuple[str, re.Pattern[Any]]]:
    """Every pattern at the top level of the module that defines it, by name."""
    for package in PACKAGES:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                module = importlib.import_module(info.name)
            except ImportError:
                continue  # An optional library is not here.
            for name, value in vars(module).items():
                rows = (
                    {f".{key}": one for key, one in value.items()}
                    if isinstance(value, dict)
                    else {"": value}
                )
                for key, pattern in rows.items():
                    if isinstance(pattern, re.Pattern) and f"\n{name} = " in inspect.getsource(
                        module
                    ):
                        yield f"{info.name}.{name}{key}", pattern


def pieces(pattern: re.Pattern[Any]) -> list[str]:
    """Short strings that mean something to this pattern."""
    source = (
        pattern.pattern if isinstance(pattern.pattern, str) else pattern.pattern.decode("latin-1")
    )
    literal = re.sub(r"\\[AbBdDsSwWzZ]|\(\?P<\w+>|\(\?[:=!<]+|\\", "", source)
    found = [one for one in dict.fromkeys(literal) if one not in "|*+?(){}[]^$."]
    usual = ['"', '\\"', "\\", " ", "a", "1", "<", "[", "{", "(", "\n", "`", "'", "/", "-"]
    words = re.findall(r"[A-Za-z_]{2,}|[^\w\s]{2,3}", literal)
    return list(dict.fromkeys([*found[:PIECES_MAX], *words[:4], *usual]))


def strings(pattern: re.Pattern[Any], size: int) -> Iterator[Any]:
    """Strings of about this size that may be hard for it."""
    own = pieces(pattern)
    for first, second in product(["", own[0], '"'], own):
        text = first + second * (size // len(second)) + "\x00"
        yield text if isinstance(pattern.pattern, str) else text.encode("utf-8", "ignore")


def worst(pattern: re.Pattern[Any], *, is_anchored: bool = False) -> tuple[float, float, str]:
    """The worst ratio of two sizes above the floor, its time, and the beginning of its string."""
    found = (0.0, 0.0, "")

    def use(text: Any) -> Iterator[object]:
        return iter((pattern.match(text),)) if is_anchored else pattern.finditer(text)

    small, large = (list(strings(pattern, size)) for size in SIZES)
    for short, long in zip(small, large, strict=True):
        took = timed(use, long)
        if took < FLOOR_S:
            continue
        took = min(took, *(timed(use, long) for _ in range(2)))
        before = min(timed(use, short) for _ in range(3))
        ratio = took / max(before, 1e-6)
        if took > FLOOR_S and ratio > found[0]:
            found = (ratio, took, str(long[:40]))
    return found


def timed(call: Callable[[Any], Iterator[object]], text: object) -> float:
    began = time.thread_time()
    for _ in islice(call(text), 100_000):
        pass
    return time.thread_time() - began
