"""Which model does a name mean? Its own name, an alias, or a pattern such as `claude-*` among the aliases.

An exact name wins over a pattern, a longer pattern over a shorter one. Two patterns of one length that fit the same
name are refused at the start, as a name that two models have is. Patterns are no names: a list of models has none.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from segue.limits import STAR, fits
from segue.settings.values import ModelSettings
from segue.turn.plan import Model


class NamedModels(Mapping[str, Model]):
    """The models by all their names; iterating gives the exact ones."""

    def __init__(self) -> None:
        self._exact: dict[str, Model] = {}
        self._patterns: dict[str, Model] = {}

    def add(self, name: str, model: Model) -> None:
        """One more name, or pattern, of a model."""
        if STAR not in name:
            self._exact[name] = model
            return
        patterns = sorted({**self._patterns, name: model}.items(), key=lambda row: -len(row[0]))
        self._patterns = dict(patterns)

    def __getitem__(self, name: str) -> Model:
        if name in self._exact:
            return self._exact[name]
        for pattern, model in self._patterns.items():
            if fits(pattern, name):
                return model
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)


def alias_problems(models: Sequence[ModelSettings]) -> Iterator[str]:
    """Names and patterns of which it is not clear which model they mean."""
    names = [(name, model.name) for model in models for name in (model.name, *model.aliases)]
    for name in dict(names):
        if name.count(STAR) > 1:
            yield f"the alias '{name}' has more than one {STAR}."
    for (name, model), (other, second) in combinations(names, 2):
        if name == other:
            yield f"two models are called '{name}'."
        elif STAR in name and len(name) == len(other) and model != second and _meet(name, other):
            yield (
                f"the aliases '{name}' of {model} and '{other}' of {second} fit the same names, and neither is longer."
            )


def _meet(pattern: str, other: str) -> bool:
    """Whether a name fits both."""
    (start, star, end), (begin, second, finish) = pattern.partition(STAR), other.partition(STAR)
    are_alike = start.startswith(begin) or begin.startswith(start)
    return bool(star and second) and are_alike and (end.endswith(finish) or finish.endswith(end))
