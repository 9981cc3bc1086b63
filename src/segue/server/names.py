"""Does an engine list the models that are served from it?

A name that it does not list is a warning and no error: some take names that they do not list (a router with aliases, a
model that is fetched at need).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase

from segue.engines.queued import servers_of
from segue.errors import shown_names
from segue.seams.model import Engine, EngineFacts
from segue.server.served import UNNAMED
from segue.settings.values import ModelSettings

# Engines that are asked for a model by its name. The others have one model, whatever it is called.
NAMED = frozenset({"vllm", "dynamo", "chat"})


def is_listed(model: str, names: Sequence[str]) -> bool:
    """Whether an engine with this list takes the name: Ollama needs no tag, Gemini no folder, LiteLLM has patterns."""
    spellings = {model, f"{model}:latest", model.removesuffix(":latest"), f"models/{model}"}
    return any(name in spellings or fnmatchcase(model, name) for name in names)


def misnamed(settings: Mapping[str, ModelSettings], engines: Mapping[str, Engine]) -> Iterator[str]:
    """A sentence for each model that a replica of its engine does not list."""
    for name, model in settings.items():
        engine, is_named = engines.get(name), model.engine in NAMED and name != UNNAMED
        if not is_named or engine is None:
            continue
        for server in servers_of(engine):
            facts: EngineFacts = server.facts
            if facts.models and not is_listed(name, facts.models):
                listed = shown_names(facts.models)
                yield (
                    f"the engine at {server.name} does not list the model '{name}'. It lists: {listed}. "
                    "Correct the name (--model, or name in [[models]]); other names for clients are aliases."
                )
