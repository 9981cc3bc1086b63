"""Which guards check what goes in and out?

In: the settings. Out: the guards of each model and of owners that have their own, each built once. Choosing an
implementation is one literal dictionary (`GUARDS`), or `package.module:name` in the settings.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol, cast, runtime_checkable

from msgspec import structs

from segue.errors import Misconfigured, need_package
from segue.seams.guard import Guard
from segue.server.plugins import imported
from segue.settings.values import FIELDS, Settings
from segue.turn.plan import Guards, Plan
from segue.turn.resources import Gate
from segue.turn.running import Running

GuardBuilder = Callable[[Settings], Guard]
# How a turn with guards opens its gate.
OpenGate = Callable[[Plan, Running], Gate]


@runtime_checkable
class ClosingGuard(Protocol):
    """A guard that holds connections or threads."""

    async def close(self) -> None: ...


class GuardSet:
    """The guards that the settings name, each built once."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self.closers: list[Callable[[], Awaitable[None]]] = []
        self._built: dict[str, Guard] = {}

    def is_fit(self, settings: Settings) -> bool:
        """Whether these guards are what other settings describe."""
        names = [name for name in FIELDS if name.startswith("guard_")]
        return all(getattr(settings, name) == getattr(self._settings, name) for name in names)

    def named(self, names: Sequence[str]) -> Guards:
        """The guards with these names, on the sides that the operator has chosen."""
        sides = self._settings.guard_sides
        inputs = names if sides != "output" else ()
        outputs = [name for name in names if name not in INPUT_ONLY and sides != "input"]
        return Guards(
            inputs=tuple(map(self._guard, inputs)),
            outputs=tuple(map(self._guard, outputs)),
            window_chars=self._settings.guard_window_chars,
        )

    def _guard(self, name: str) -> Guard:
        if name not in self._built:
            build = GUARDS.get(name) or _imported(name)
            self._built[name] = guard = build(self._settings)
            if name in GUARDS and isinstance(guard, ClosingGuard):
                self.closers.append(guard.close)
        return self._built[name]


def _rules(settings: Settings) -> Guard:
    # Imported here and below: most servers have no guards.
    from segue.guards.rules import CREDENTIALS, Rules, RulesGuard

    rules = structs.asdict(settings.guard_rules)
    if rules["patterns"] is None:
        rules["patterns"] = CREDENTIALS
    return RulesGuard(Rules(**rules))


def _moderation(settings: Settings) -> Guard:
    if not settings.guard_url:
        raise Misconfigured("guard_url: the guard 'moderation' needs the address of an endpoint.")
    need_package("guard", "aiohttp", "web")
    from segue.guards.moderation import ModerationGuard

    return ModerationGuard(
        settings.guard_url,
        settings.guard_key,
        settings.guard_model,
        s_max=settings.guard_s_max,
        unreachable=settings.guard_unreachable,
    )


def _classifier(settings: Settings) -> Guard:
    from segue.guards.classifier import ClassifierGuard

    if not settings.guard_classifier:
        raise Misconfigured("guard_classifier: the guard 'classifier' needs the folder of a model.")
    return ClassifierGuard(Path(settings.guard_classifier).expanduser(), settings.guard_threshold)


GUARDS: Mapping[str, GuardBuilder] = {
    "rules": _rules,
    "moderation": _moderation,
    "classifier": _classifier,
}
# Guards that do not check answers, so that no answer waits for them.
INPUT_ONLY = frozenset({"classifier"})


def _imported(name: str) -> GuardBuilder:
    """A guard of the operator's own, as `package.module:name`; called with the settings, it returns a `Guard`."""
    return cast(GuardBuilder, imported("guard", name, tuple(GUARDS)))


def gate_for(guards: Iterable[Guards]) -> OpenGate | None:
    """The gate of turns that may have one of these; None where there are no guards."""
    if not any(each.inputs or each.outputs for each in guards):
        return None
    # Imported here: most servers have no guards.
    from segue.guards.gate import GuardGate

    return GuardGate
