"""What prompt does the engine get? The scene, rendered, and shortened where the client allows that.

Long texts are rendered in a thread. The operator may doubt what is warm: then every prompt is made cold as well.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, replace
from time import perf_counter

from msgspec import structs

from segue.errors import InvalidRequest, ServerFault, context_overflow
from segue.process.render_cache import Asked, RenderCache
from segue.turn.plan import Plan
from segue.turn.truncate import truncate
from segue.turn.values import Head, IdArray, Prompt, Rendered, Round, Scene, Tokens
from segue.wire.items import CompactionTrigger, Item

# Rendering more than this many bytes moves to a thread: the tokenizer lets others run meanwhile.
INLINE_RENDER_BYTES = 32 * 1024
# What `truncation: auto` leaves free for the answer, as a share of the context.
ANSWER_SHARE = 0.1
# Each pass drops what seems enough by its bytes; tokens differ from bytes, so it may take a few.
TRUNCATE_PASSES_MAX = 8

NO_HEAD = Head()


@dataclass(frozen=True, slots=True)
class Composed:
    """A prompt, and the scene that it shows: without its oldest items if it was truncated."""

    rendered: Rendered
    scene: Scene
    is_truncated: bool = False

    @property
    def length(self) -> int:
        """How many tokens the prompt has, where we can know."""
        prompt = self.rendered.prompt
        return prompt.length if isinstance(prompt, Tokens) else 0


def _asked(plan: Plan) -> Asked:
    resolved = plan.resolved
    fingerprint = plan.model.dialect.fingerprint
    return Asked(plan.owner, fingerprint, resolved.head, resolved.given, plan.root_at)


def _may_recall(plan: Plan) -> bool:
    return plan.resolved.parent is None and not plan.resolved.earlier


def set_scene(plan: Plan, render_cache: RenderCache) -> Scene:
    """What the dialect will see; the beginning of a history that was sent again is looked up."""
    resolved = plan.resolved
    given, recalled = resolved.given, None
    rounds = tuple(one for one in resolved.earlier if one.is_fresh)
    if _may_recall(plan):
        recalled, count = render_cache.find(_asked(plan))
        if recalled is not None:
            rounds, given = (Round(given[:count]),), given[count:]
    if plan.compacts:
        given = tuple(item for item in given if not isinstance(item.value, CompactionTrigger))
    return Scene(
        resolved.head,
        None if resolved.earlier else resolved.parent,
        given,
        rounds,
        root_at=plan.root_at,
        recalled=recalled,
        can_constrain=plan.model.engine.can_constrain,
        effects=resolved.effects,
    )


def remember(plan: Plan, first: Composed, render_cache: RenderCache) -> None:
    """Keep the prompt of a history that came as a whole, for when it comes again."""
    if _may_recall(plan) and not first.is_truncated:
        is_recalled = first.scene.recalled is not None
        recalled_items = len(first.scene.rounds[0].given) if is_recalled else 0
        render_cache.keep(_asked(plan), first.rendered.context, recalled_items)


async def compose(plan: Plan, scene: Scene, *, may_truncate: bool) -> Composed:
    """The prompt for this scene; `fitting` says whether it fits."""
    began = perf_counter()
    composed = Composed(await _render(plan, scene), scene)
    if may_truncate:
        target = int(plan.model.context_tokens * (1 - ANSWER_SHARE))
        for _ in range(TRUNCATE_PASSES_MAX):
            if composed.length <= target:
                break
            shorter = truncate(composed.scene, 1 - target / composed.length)
            if shorter is composed.scene:
                break
            composed = Composed(await _render(plan, shorter), shorter, is_truncated=True)
    stages = plan.tally.stage_s
    stages["render"] = stages.get("render", 0.0) + perf_counter() - began
    plan.tally.mark("rendered")
    return composed


def fitting(plan: Plan, composed: Composed) -> Composed:
    """The same prompt, or the error that it is too long."""
    if composed.length >= plan.model.context_tokens:
        raise context_overflow(composed.length, plan.model.context_tokens)
    return composed


def measure(plan: Plan, item: Item) -> int:
    """How much of a prompt this item is: in tokens, or in bytes where only the endpoint knows those. Slow work."""
    render = plan.model.dialect.render
    lengths = [render(Scene(NO_HEAD, None, given)).context.length for given in ((), (item,))]
    return lengths[1] - lengths[0]


async def count(plan: Plan, render_cache: RenderCache) -> int:
    """How many tokens the engine would be given."""
    may_truncate = plan.resolved.create.truncation == "auto"
    composed = await compose(plan, set_scene(plan, render_cache), may_truncate=may_truncate)
    if not isinstance(composed.rendered.context, Tokens):
        raise InvalidRequest(
            "Only the endpoint behind this model knows how many tokens this would be.",
            code="unsupported_value",
            param="model",
        )
    return composed.length


async def _render(plan: Plan, scene: Scene) -> Rendered:
    """Render, in a thread if it is long."""
    dialect = plan.model.dialect
    is_long = _unrendered_bytes(scene, dialect.fingerprint) >= INLINE_RENDER_BYTES
    rendered = await asyncio.to_thread(dialect.render, scene) if is_long else dialect.render(scene)
    if plan.model.checks_rendering:
        _check_rendering(plan, scene, rendered)
    if isinstance(rendered.context, Tokens):  # Messages count in bytes.
        plan.tally.tokens_tokenized += rendered.tokens_tokenized
        plan.tally.tokens_reused += rendered.tokens_reused
    return rendered


def _check_rendering(plan: Plan, scene: Scene, rendered: Rendered) -> None:
    """The operator's doubt: with nothing warm, and nothing recalled, the prompt must be the same, token for token."""
    past = None
    for turn in scene.past.lineage() if scene.past else ():
        past = replace(turn, parent=past, warm=None)
    cold = plan.model.dialect.render(structs.replace(scene.as_one(), past=past))
    if _flat(rendered.prompt) != _flat(cold.prompt):
        raise ServerFault("A warm prompt differs from a cold one. Please report this.")


def _flat(prompt: Prompt) -> IdArray[int] | bytes:
    return prompt.flat() if isinstance(prompt, Tokens) else b",".join(prompt.chunks())


def _unrendered_bytes(scene: Scene, fingerprint: str) -> int:
    """About how much text rendering will have to look at."""
    fresh = sum(len(item.raw) for item in scene.given)
    past = scene.past
    if scene.recalled is not None:
        return fresh
    warm = past.warm if past is not None else None
    if warm is not None and warm.head is scene.head and warm.fingerprint == fingerprint:
        return fresh
    older = sum(len(item.raw) for one in scene.history() for item in (*one.given, *one.wrote))
    return fresh + older + len(scene.head.tools.raw) + len(scene.head.instructions or "")
