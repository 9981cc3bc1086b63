"""What does an engine say of itself: its context, its models, what it sees?

In: the list of models that nearly every server has, or a refusal in the server's own words. Out: `EngineFacts`. Nothing
is guessed: what a server does not say stays unknown, and then it decides by itself how much it writes.
"""

from __future__ import annotations

import msgspec
from msgspec import Struct, structs

from segue.border.numbers import context_size
from segue.border.refusals import UNREADABLE, ContextRefused
from segue.engines.upstream import Upstream
from segue.seams.model import EngineFacts, Job
from segue.seams.prompt import Tokens

MODELS = "/v1/models"
# What a screenshot takes, in place of its placeholder: no server says it before it has read the image. Half of what is
# left for the answer is kept free for images at most.
IMAGE_TOKENS = 2_048


class _Architecture(Struct, frozen=True):
    input_modalities: list[str] | None = None


class _Card(Struct, frozen=True):
    """A model in the list; the length of its context has a name of its own in every product."""

    id: str = ""
    owned_by: str | None = None
    # The model that this one is an adapter of.
    parent: str | None = None
    max_model_len: int | None = None
    context_length: int | None = None
    context_window: int | None = None
    max_context_length: int | None = None
    # LM Studio's: as it is loaded, and whether it sees.
    loaded_context_length: int | None = None
    type: str = ""
    input_modalities: list[str] | None = None
    architecture: _Architecture | None = None

    @property
    def context_tokens(self) -> int | None:
        lengths = (self.loaded_context_length, self.max_model_len, self.context_length)
        others = (self.context_window, self.max_context_length)
        return next(filter(None, map(context_size, (*lengths, *others))), None)

    @property
    def sees_images(self) -> bool | None:
        inputs = self.input_modalities or (self.architecture and self.architecture.input_modalities)
        if inputs:
            return "image" in inputs
        return self.type == "vlm" if self.type in ("vlm", "llm") else None


class _Cards(Struct, frozen=True):
    data: list[_Card] = []


class _Generation(Struct, frozen=True):
    n_ctx: int | None = None


class _Loaded(Struct, frozen=True):
    model: str = ""
    context_length: int | None = None


class _About(Struct, frozen=True):
    """What a server says beside its list of models."""

    # llama-server.
    default_generation_settings: _Generation = _Generation()
    modalities: dict[str, bool] | None = None
    # Ollama: what is loaded, and what the model can do.
    models: list[_Loaded] = []
    capabilities: list[str] | None = None


_cards = msgspec.json.Decoder(_Cards)
_about = msgspec.json.Decoder(_About)


async def listed_facts(upstream: Upstream, model: str) -> EngineFacts:
    """What the list of models says."""
    status, body = await upstream.call("GET", MODELS)
    return facts_in(body, model) if status == 200 else EngineFacts()


def facts_in(body: bytes, model: str) -> EngineFacts:
    """What this list of models says of one of them; of the only one, where it has another name."""
    try:
        cards = {card.id: card for card in _cards.decode(body).data}
    except UNREADABLE:
        return EngineFacts()
    only = next(iter(cards.values())) if len(cards) == 1 else _Card()
    card = cards.get(model, only)
    base = cards.get(card.parent or "", card)
    return EngineFacts(
        context_tokens=card.context_tokens or base.context_tokens,
        # llama-server takes any name.
        models=tuple(name for name, card in cards.items() if card.owned_by != "llamacpp"),
        sees_images=card.sees_images,
    )


def more_facts(facts: EngineFacts, body: bytes, model: str) -> EngineFacts:
    """The facts with what this page adds to them: another list of models, or a page about one."""
    try:
        about = _about.decode(body)
    except UNREADABLE:
        return facts
    more = facts_in(body, model)
    loaded = {model.model.removesuffix(":latest"): model.context_length for model in about.models}
    here = about.default_generation_settings.n_ctx or loaded.get(model.removesuffix(":latest"))
    here = context_size(here)
    sees = more.sees_images
    if about.modalities is not None:
        sees = about.modalities.get("vision", False)
    elif about.capabilities is not None:
        sees = "vision" in about.capabilities
    return structs.replace(
        facts,
        context_tokens=facts.context_tokens or here or more.context_tokens,
        sees_images=sees if facts.sees_images is None else facts.sees_images,
    )


class _Tokenized(Struct, frozen=True):
    tokens: list[int] | None = None


async def tokenized(upstream: Upstream, model: str, text: str) -> list[int] | None:
    """The ids that a server makes of this text; None if it does not tell. One request has the names of all servers."""
    fields = {"model": model, "prompt": text, "content": text}
    plain = {"add_special_tokens": False, "add_special": False, "parse_special": False}
    status, body = await upstream.call("POST", "/tokenize", msgspec.json.encode(fields | plain))
    try:
        return msgspec.json.decode(body, type=_Tokenized).tokens if status == 200 else None
    except UNREADABLE:
        return None


def learned(facts: EngineFacts, refusal: ContextRefused) -> EngineFacts | None:
    """The facts with the context that a refusal names; None where that is no news, so that asking again is no use."""
    tokens, known = refusal.context_tokens, facts.context_tokens
    if tokens is None or (known is not None and tokens >= known):
        return None
    return structs.replace(facts, context_tokens=tokens)


def fitted(job: Job, facts: EngineFacts) -> Job:
    """The job with a limit that fits the context after its prompt, because engines refuse more."""
    if facts.context_tokens is None or job.output_tokens_max == 0:
        return job
    room = max(1, facts.context_tokens - facts.reserved_tokens - job.prompt.length)
    images = len(job.prompt.all_images()) if isinstance(job.prompt, Tokens) else 0
    room -= min(images * IMAGE_TOKENS, room // 2)
    if job.output_tokens_max is not None and job.output_tokens_max <= room:
        return job
    return structs.replace(job, output_tokens_max=room)
