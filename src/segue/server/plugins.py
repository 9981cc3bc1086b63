"""What does the operator mean by `package.module:NAME`? Code of the operator's own, in place of a row of ours."""

from __future__ import annotations

import importlib

from segue.errors import Misconfigured


def imported(setting: str, place: str, rows: tuple[str, ...] = ()) -> object:
    """What stands at this place; `rows` are the names that would have been known."""
    module, _, name = place.partition(":")
    if not name:
        choices = f"is not one of: {', '.join(rows)}, MODULE:NAME" if rows else "is not MODULE:NAME"
        raise Misconfigured(f"{setting}: '{place}' {choices}.")
    try:
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise Misconfigured(f"{setting}: '{place}' cannot be imported: {error}.") from None
