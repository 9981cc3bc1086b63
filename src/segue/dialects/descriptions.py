"""How does this model write? By a file, or worked out from its chat template; for people who want to see it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from msgspec import Struct

from segue.derivation.family import DerivedFamily, from_toml, to_toml
from segue.dialects.choose import derived_dialect
from segue.errors import Misconfigured
from segue.vocabularies.chat_template import NO_VALUES
from segue.vocabularies.load import load_vocabulary


class ShownFamily(Struct, frozen=True):
    """A description of a dialect, and what of it is proven."""

    # The file that --dialect takes.
    text: str
    notes: list[str]
    are_calls_read: bool


def read_family(path: str) -> DerivedFamily:
    """How a model writes, by a file that `segue models derive` has written."""
    try:
        return from_toml(Path(path).read_text(), path)
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"dialect: {path} cannot be read: {error}.") from None


def show_family(
    path: Path,
    template: str = "",
    values: Mapping[str, object] = NO_VALUES,
    dialect: str = "",
) -> ShownFamily:
    """How the model with these files writes, by its template alone or by the file that `dialect` names."""
    try:
        text = Path(template).read_text() if template else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"template: {template} cannot be read: {error}.") from None
    written = read_family(dialect) if dialect.endswith(".toml") else None
    family = derived_dialect(path, load_vocabulary(path), text, values, written).derived
    assert family is not None
    calls = "proven" if family.calls else "not read"
    thoughts = "proven" if family.thoughts else "none"
    refused = [f"not used: {part}: {why}" for part, why in family.refused.items()]
    notes = [f"calls: {calls}, thoughts: {thoughts}", *refused]
    return ShownFamily(to_toml(family), notes, family.calls is not None)
