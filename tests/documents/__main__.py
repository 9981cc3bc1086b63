"""Plays pages and shows what they print: `python -m tests.documents docs/how-to/secure.md …`, all in one folder."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from tests.documents.pages import steps_of
from tests.documents.player import playing

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder, playing(Path(folder), is_verbose=True) as player:
        ran = sum(player.play(steps_of(Path(page))) for page in sys.argv[1:])
        print(f"{ran} steps")
