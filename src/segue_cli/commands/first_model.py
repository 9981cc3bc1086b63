"""Which model does a newcomer get? The one that starts anywhere, unless a better one is wanted and fits.

`--model auto` takes the better model where there is memory to spare, and fetches it. On a terminal, where no model was
named, it is offered once; the answer is remembered. Weights that are missing are fetched there if the person agrees.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from msgspec.structs import replace

from segue.printable import say
from segue.server.served import served_models
from segue.settings.values import Settings
from segue_embedded.hub import PREFIX, find_fetched
from segue_embedded.memory import available_bytes
from segue_embedded.weights import (
    SMALL_MODEL,
    ListedWeights,
    add_with_bar,
    data_folder,
    list_weights,
)

AUTO = "auto"


def with_first_model(settings: Settings, ask: Callable[[str], str] | None = None) -> Settings:
    """The settings with a model in place of "auto" or of none; `ask` asks a person, if one is there."""
    is_auto = settings.model == (AUTO,)
    settings = _with_chosen(settings, ask)
    for name in missing_in_hub(settings):
        add_with_bar(name)
    for one in missing_models(settings):
        if is_auto or (ask and _is_fetched(one.name, one.bytes, ask)):
            add_with_bar(one.name)
    return settings


def _with_chosen(settings: Settings, ask: Callable[[str], str] | None) -> Settings:
    is_named = settings.models or (settings.model and settings.model != (AUTO,))
    if is_named or settings.engine != "embedded":
        # With another engine, "auto" is the engine's own name for a model.
        return settings
    chosen = better_model()
    if chosen is None or not (settings.model or (ask and _is_wanted(*chosen, ask))):
        return replace(settings, model=())
    name, _ = chosen
    add_with_bar(name)
    return replace(settings, model=(name,))


def better_model() -> tuple[str, int] | None:
    """The best model that can be fetched by name and leaves this machine memory to spare, with its size in bytes; None:
    there is none but the small model."""
    free = available_bytes() or 0
    fitting = [one for one in list_weights() if 2 * one.memory_bytes <= free]
    best = max(fitting, key=lambda one: one.bytes, default=None)
    return None if best is None or best.name == SMALL_MODEL else (best.name, best.bytes)


def missing_models(settings: Settings) -> list[ListedWeights]:
    """The models to be served inside this process whose weights can be fetched and are not here."""
    models = served_models(settings)
    asked = {model.weights or model.name for model in models if model.engine == "embedded"}
    # Listed only where it matters: a file that is seen for the first time is read in full.
    listed = list_weights() if asked else []
    return [one for one in listed if one.name in asked and one.path is None]


def missing_in_hub(settings: Settings) -> list[str]:
    """The models to be served inside this process that a hub has, and this machine has not yet."""
    names = {model.weights for model in served_models(settings) if model.engine == "embedded"}
    return [name for name in sorted(names) if name.startswith(PREFIX) and not find_fetched(name)]


def offered_note() -> Path:
    """The file that notes that a better model was offered."""
    return data_folder() / ".offered"


def _is_fetched(name: str, size: int, ask: Callable[[str], str]) -> bool:
    answer = ask(
        f"The weights of {name} are not on this machine. Download {size / 1e6:,.0f} MB? [Y/n] "
    )
    return answer.strip().lower() in ("", "y", "yes")


def person() -> Callable[[str], str] | None:
    """Asks on the terminal; None if there is none."""
    return input if sys.stdin.isatty() and sys.stdout.isatty() else None


def _is_wanted(name: str, size: int, ask: Callable[[str], str]) -> bool:
    """What the person says, who is asked only once."""
    note = offered_note()
    if note.exists():
        return False
    say(
        f"{SMALL_MODEL} has 135 million parameters: it shows the server, and is often wrong. "
        f"{name} answers better and fits into the memory of this machine. "
        "With aider it edits files; neither calls tools well enough for Codex."
    )
    answer = ask(f"Fetch it ({size / 1e9:.1f} GB) and use it? [y/N] ").strip().lower()
    note.parent.mkdir(parents=True, exist_ok=True)
    note.touch()
    if answer not in ("y", "yes"):
        say(f"Serving {SMALL_MODEL}. Another time: `segue serve --model {AUTO}`.")
    return answer in ("y", "yes")
