"""What prompt does the engine get? The scene, rendered, and shortened where the client allows that.

Long texts are rendered in a thread. With `--check-rendering` every prompt is rendered cold as well and compared.
"""

from __future__ import annotations

import asyncio
import logging
from functools import cache
from time import perf_counter

from msgspec import structs

from segue.errors import ServerFault, context_overflow
from segue.seams.history import Past, Unfinished, ancestors
from segue.seams.model import ComparedDialect, Rendered, Scene
from segue.seams.prompt import Head, IdArray, ImageAt, Prompt, Tokens
from segue.turn.compact import truncate
from segue.turn.plan import Composed, Plan, Span
from segue.turn.resources import PromptCache
from segue.wire.items import CompactionTrigger, Item

# Rendering more than this many bytes moves to a thread: the tokenizer lets others run meanwhile.
INLINE_RENDER_BYTES = 32 * 1024
# What `truncation: auto` leaves free for the answer, as a share of the context.
ANSWER_SHARE = 0.1
# Each pass drops what seems enough by its bytes; tokens differ from bytes, so it may take a few.
TRUNCATE_PASSES_MAX = 8

NO_HEAD = Head()

log = logging.getLogger(__name__)


def set_scene(plan: Plan, cache: PromptCache) -> Scene:
    """What the dialect will see; a history that was sent again begins with what is known of it."""
    resolved = plan.resolved
    past: Past | None = None if resolved.earlier else resolved.parent
    given = resolved.given
    if resolved.resent is not None:
        past, count = cache.resume(plan)
        given = given[count:]
    if plan.compacts:
        given = tuple(item for item in given if not isinstance(item.value, CompactionTrigger))
    return Scene(
        resolved.head,
        past,
        given,
        tuple(round for round in resolved.earlier if round.is_fresh),
        root_at=plan.root_at,
        can_constrain=plan.model.engine.can_constrain,
        sees_images=plan.model.sees_images,
        can_follow_tags="structural_tag" in plan.model.engine.grammars,
        effects=resolved.effects,
    )


async def compose(plan: Plan, scene: Scene, *, may_truncate: bool) -> Composed:
    """The prompt for this scene; `fitting` says whether it fits."""
    began = perf_counter()
    composed = await _render(plan, scene)
    if may_truncate and plan.model.context_tokens is not None:
        target = int(plan.model.context_tokens * (1 - ANSWER_SHARE))
        for _ in range(TRUNCATE_PASSES_MAX):
            if composed.length <= target:
                break
            shorter = truncate(composed.scene, 1 - target / composed.length)
            if shorter is composed.scene:
                break
            composed = structs.replace(await _render(plan, shorter), is_truncated=True)
    plan.tally.spans.append(Span("render", began, perf_counter()))
    return composed


def fitting(plan: Plan, composed: Composed) -> Composed:
    """The same prompt, or the error that it is too long; of messages the endpoint says that."""
    tokens_max = plan.model.context_tokens if isinstance(composed.prompt, Tokens) else None
    if tokens_max is not None and composed.length >= tokens_max:
        raise context_overflow(composed.length, tokens_max)
    return composed


def measure(plan: Plan, item: Item) -> int:
    """How much of a prompt this item is: in tokens, or in bytes where only the endpoint knows those. Slow work."""
    render = plan.model.dialect.render
    empty = Scene(NO_HEAD, None, (), sees_images=plan.model.sees_images)
    alone = structs.replace(empty, given=(item,))
    return render(alone).context.length - render(empty).context.length


async def count(plan: Plan, cache: PromptCache) -> int:
    """How many tokens the engine would be given; about how many, where only the endpoint knows and does not say."""
    may_truncate = plan.resolved.create.truncation == "auto"
    composed = await compose(plan, set_scene(plan, cache), may_truncate=may_truncate)
    counted = plan.model.count_tokens and await plan.model.count_tokens(composed.scene)
    return counted or composed.length


async def _render(plan: Plan, scene: Scene) -> Composed:
    """Render, in a thread if it is long."""
    dialect = plan.model.dialect
    is_long = _unrendered_bytes(scene, dialect.fingerprint) >= INLINE_RENDER_BYTES
    rendered = await asyncio.to_thread(dialect.render, scene) if is_long else dialect.render(scene)
    if plan.model.checks_rendering:
        _check_rendering(plan, scene, rendered)
    prompt = rendered.prompt
    if not isinstance(prompt, Tokens):  # The dialect counts bytes.
        return Composed(rendered, scene, prompt, prompt.tokens)
    plan.tally.tokens_tokenized += rendered.tokens_tokenized
    plan.tally.tokens_reused += rendered.tokens_reused
    return Composed(rendered, scene, prompt, prompt.length)


def _check_rendering(plan: Plan, scene: Scene, rendered: Rendered) -> None:
    """With nothing warm, and nothing recalled, the prompt must be the same, token for token; and it should say what the
    model's own template says."""
    past: Past | None = None
    for link in ancestors(scene.past) if scene.past else ():
        past = Unfinished(past, link.rounds)
    cold = plan.model.dialect.render(structs.replace(scene, past=past))
    if _flat(rendered.prompt) != _flat(cold.prompt):
        raise ServerFault("A warm prompt differs from a cold one. Please report this.")
    dialect = plan.model.dialect
    if isinstance(dialect, ComparedDialect) and dialect.differs(scene, rendered):
        plan.tally.prompts_differing += 1
        _tell_once(plan.model.name)


@cache
def _tell_once(model: str) -> None:
    log.warning("model %s: a prompt differs from what its chat template writes", model)


def _flat(prompt: Prompt) -> tuple[IdArray[int], list[ImageAt]] | bytes:
    if isinstance(prompt, Tokens):
        return prompt.flat(), prompt.all_images()
    return b",".join(prompt.chunks())


def _unrendered_bytes(scene: Scene, fingerprint: str) -> int:
    """About how much text rendering will have to look at."""
    fresh = sum(len(item.raw) for item in scene.given)
    tools = len(scene.head.tools.raw)
    warm = scene.past.warm if scene.past is not None else None
    if warm is not None and warm.head is scene.head and warm.fingerprint == fingerprint:
        # What an answer must look like is written anew each time.
        is_free = scene.head.tool_choice in ("auto", "none") and scene.format is None
        return fresh if is_free else fresh + tools
    older = sum(len(item.raw) for round in scene.history() for item in (*round.given, *round.wrote))
    return fresh + older + tools + len(scene.head.instructions or "")
