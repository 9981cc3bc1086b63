"""Which models are served, and with which settings?

Those that the operator names; where none is named, the small embedded model, the scripted engine's, or the only one of
an engine over HTTP. What a known embedded model needs is filled in where the operator has set nothing.
"""

from __future__ import annotations

from importlib.util import find_spec

from msgspec import structs

from segue.errors import Misconfigured, MissingPackage
from segue.settings.values import ModelSettings, Settings

# The model of an engine over HTTP that has not said yet what its model is called.
UNNAMED = "unnamed"
UNSET = ModelSettings()


def served_models(settings: Settings) -> tuple[ModelSettings, ...]:
    """The models to serve."""
    models = settings.named_models()
    engines = {model.engine for model in models} or {settings.engine}
    if "embedded" in engines and find_spec("segue_embedded") is None:
        advice = (
            "Or name an engine server, such as --engine vllm --engine-url http://127.0.0.1:8000."
        )
        raise Misconfigured(f"{MissingPackage('engine', 'segue_embedded', 'segue')}\n{advice}")
    if not models:
        models = structs.replace(settings, model=(_default_name(settings),)).named_models()
    return tuple(map(_with_usual, models))


def _default_name(settings: Settings) -> str:
    match settings.engine:
        case "embedded":
            # Imported here and below: most servers have no model inside.
            from segue_embedded.weights import SMALL_MODEL

            return SMALL_MODEL
        case "scripted":
            return "scripted"
        case _:
            return UNNAMED


def _with_usual(model: ModelSettings) -> ModelSettings:
    """What fits a model inside this process, where the operator has set nothing."""
    if model.engine != "embedded":
        return model
    from segue_embedded.weights import usual_settings

    usual = usual_settings(model.name)
    unset = {k: v for k, v in usual.items() if getattr(model, k) == getattr(UNSET, k)}
    return structs.replace(model, **unset)


def has_engines_inside(settings: Settings) -> bool:
    """Whether a model runs in our own process."""
    return any(model.engine == "embedded" for model in served_models(settings))
