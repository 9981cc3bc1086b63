"""How does the model speak for one round? Until it stops, is stopped, or breaks off.

In: what was composed, and a reader. Out: events, through the running turn and its gate, and what it used, whichever way
it ended.
"""

from __future__ import annotations

import time
from contextlib import aclosing

from msgspec import structs

from segue.turn.compose import Composed
from segue.turn.filters import StopReader
from segue.turn.play import NOT_BEGUN, Play
from segue.turn.seams import Reader
from segue.turn.values import (
    Finish,
    Ids,
    Job,
    JobStarted,
    Prompt,
    Rendered,
    Tokens,
)
from segue.wire.response import InputDetails, OutputDetails, Usage

# How many more pieces a text may take to come to the end of a sentence once a steer waits.
STEER_PIECES_MAX = 64
# How many more pieces are awaited when the model may say no more: mostly it stops by itself, and then the engine tells
# what it counted.
OVER_PIECES_MAX = 8

now = time.perf_counter


async def sample(
    play: Play, composed: Composed, reader: Reader | None, tokens_max: int | None = None
) -> Finish | None:
    """Let the model speak until it stops, is stopped, or breaks off."""
    tally, running, assembler = play.plan.tally, play.running, play.running.assembler
    gate = play.gate
    play.sampled, play.begun = 0, NOT_BEGUN
    if running.inbox:
        return None
    if reader is not None and composed.rendered.lead:
        parsed = reader.feed(Ids(composed.rendered.lead))
        running.publish(assembler.feed(parsed if gate is None else await gate.sift(parsed)))
    began = first_at = now()
    pieces_after_steer = pieces_when_over = 0
    job = _job(play, composed, tokens_max)
    finish: Finish | None = None
    is_free = False
    try:
        async with (
            running.interruptible(),
            aclosing(play.plan.model.engine.sample(job)) as pieces,
        ):
            async for piece in pieces:
                if isinstance(piece, JobStarted):
                    play.begun = piece
                    continue
                if isinstance(piece, Finish):
                    finish = piece
                    return structs.replace(piece, reason="stop") if pieces_when_over else piece
                if first_at == began:
                    first_at = now()
                    tally.stage_s.setdefault("first_token", first_at - began)
                    tally.mark("first_token")
                # A delta of a chat endpoint is a token as a rule; what it counts itself it says in its last word.
                play.sampled += len(piece.ids if isinstance(piece, Ids) else piece.deltas)
                if reader is not None:
                    parsed = reader.feed(piece)
                    if gate is not None:
                        parsed = await gate.sift(parsed)
                    running.publish(assembler.feed(parsed))
                    await running.wait_for_room()
                    if isinstance(reader, StopReader) and reader.has_stopped:
                        return Finish("stop")
                    pieces_when_over += reader.is_over
                    if pieces_when_over > OVER_PIECES_MAX:
                        return Finish("stop")
                if running.is_steered:
                    pieces_after_steer += 1
                    is_long = pieces_after_steer > STEER_PIECES_MAX and assembler.is_in_text
                    if assembler.is_at_boundary or is_long:
                        return None
    except TimeoutError:
        if not running.inbox:
            raise
    except Exception:
        # What breaks behind the first token has cost as much as what is heard out.
        is_free = not play.sampled
        raise
    finally:
        if not is_free:
            used = _usage(play, composed, finish)
            play.usage = _plus(play.usage, used)
            # A summary has a limit of its own.
            play.answered += used.output_tokens if tokens_max is None else 0
        tally.tokens_sampled += play.sampled
        tally.stage_s["sample"] = tally.stage_s.get("sample", 0.0) + now() - first_at
        tally.marks["last_token"] = now()
    return None


def _job(play: Play, composed: Composed, tokens_max: int | None) -> Job:
    """What the engine is asked. A warm-up asks for no output: the engine reads the prompt and no more."""
    plan, rendered, past = play.plan, composed.rendered, play.scene.past
    room = plan.model.context_tokens - composed.length
    limits = [tokens_max, tokens_left(play), plan.model.output_tokens_max]
    asked = next((one for one in limits if one is not None), room)
    wanted = min(asked, room)
    is_answer = plan.generates or tokens_max is not None
    return Job(
        prompt=rendered.prompt if is_answer else rendered.context,
        scene=composed.scene,
        sampling=plan.sampling,
        stops=plan.model.dialect.stops,
        output_tokens_max=wanted if is_answer else 0,
        schema=rendered.schema,
        owner=plan.owner,
        lane=plan.lane,
        route=past.warm.route if past is not None and past.warm is not None else None,
        model_turns=plan.resolved.model_turns + sum(one.did_sample for one in play.rounds),
    )


def tokens_left(play: Play) -> int | None:
    """What the client's limit leaves for this round: it holds for the whole response."""
    asked = play.plan.resolved.create.max_output_tokens
    return None if asked is None else max(0, asked - play.answered)


def _usage(play: Play, composed: Composed, finish: Finish | None) -> Usage:
    """What one call of the model used: as the engine counted, or as we did, because the ids are ours."""
    finish = finish or Finish("stop", play.begun.cached_tokens)
    prompt = given_to_engine(play, composed.rendered)
    given = prompt.length if isinstance(prompt, Tokens) else 0
    given = given if finish.input_tokens is None else finish.input_tokens
    wrote = play.sampled if finish.output_tokens is None else finish.output_tokens
    return Usage(
        input_tokens=given,
        input_tokens_details=InputDetails(cached_tokens=finish.cached_tokens),
        output_tokens=wrote,
        output_tokens_details=OutputDetails(reasoning_tokens=finish.reasoning_tokens or 0),
        total_tokens=given + wrote,
    )


def given_to_engine(play: Play, rendered: Rendered) -> Prompt:
    is_answer = play.plan.generates or play.plan.compacts is not None
    return rendered.prompt if is_answer else rendered.context


def _plus(one: Usage, other: Usage) -> Usage:
    """The usage of both calls."""
    cached = one.input_tokens_details.cached_tokens + other.input_tokens_details.cached_tokens
    thought = (
        one.output_tokens_details.reasoning_tokens + other.output_tokens_details.reasoning_tokens
    )
    return Usage(
        one.input_tokens + other.input_tokens,
        InputDetails(cached_tokens=cached),
        one.output_tokens + other.output_tokens,
        OutputDetails(reasoning_tokens=thought),
        one.total_tokens + other.total_tokens,
    )
