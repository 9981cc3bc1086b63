"""How ids look: a prefix that says what it is, and 128 random bits that nobody guesses."""

from __future__ import annotations

from secrets import token_hex


def new_id(prefix: str) -> str:
    """A fresh id such as `resp_0f3a…`, with 128 random bits."""
    return f"{prefix}_{token_hex(16)}"
