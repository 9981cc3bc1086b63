"""With which versions of vLLM was what is not public there tried? With any other one only public ways are used."""

from __future__ import annotations

# Tokens of a step in one frame (`outputs`), and the scheduler (`scheduler`).
TRIED = frozenset({"0.26.0", "0.32.0"})


def is_tried(version: str) -> bool:
    """Whether this is one of them; `0.32.0+cpu` is 0.32.0."""
    return version.partition("+")[0] in TRIED
