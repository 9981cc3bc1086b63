"""Who produces tokens without a model? An engine that plays a script: real token ids, at a given speed.

It ships, and says in its answers what it is. Tests and benchmarks use it, because everything around an engine
(rendering, tokenizing, reading, streaming, saving) is then as real as with a model. It never stands in for a claim
about a model.
"""

from __future__ import annotations

import asyncio
import time
from asyncio import Future
from collections import deque
from collections.abc import AsyncGenerator
from math import log
from pathlib import Path

import msgspec
from msgspec import UNSET, Raw, Struct

from segue.errors import InvalidRequest
from segue.schemas.example import example
from segue.seams.model import Dialect, EngineFacts, Finish, Ids, Job, Piece, Scene, TokenLogprob
from segue.seams.prompt import Head
from segue.wire import items
from segue.wire.codec import as_item, encode
from segue.wire.items import Item, ItemValue
from segue.wire.requests import TextFormat, ToolChoiceName
from segue.wire.tools import CustomTool, Offer, chosen_offers, offer_named

# How many tokens leave together when there is no speed limit: enough to amortise, few enough to stay fair.
BURST = 32
# How many answers have their burst in one round of the loop: all of hundreds would keep others waiting for 40 ms.
BURSTS_A_ROUND = 4
# The probability of its tokens: from this to nearly 1, in so many steps.
SURE, CHANCES = 0.6, 97
# The loop's timers count whole milliseconds: a shorter sleep would return at once, and we would spin.
TICK_S = 0.001
# One token in every vocabulary that we know.
FILLER = " the"
# Entries of a script that are cached as ids, for each set of tools; a script has tens of turns.
WRITTEN_MAX = 1_000
# How much of the input the engine repeats.
ECHO_CHARS = 200
# Arguments of these names are the words of the user, so that a search in a demo finds something.
QUERY_NAMES = ("query", "queries", "q", "search_term")
NOTICE = "I play a script, I am not a model."


class ScriptedCall(Struct, frozen=True):
    name: str
    arguments: Raw = Raw(b"{}")
    input: str | None = None


class ScriptedTurn(Struct, frozen=True):
    reasoning: str = ""
    text: str = ""
    calls: tuple[ScriptedCall, ...] = ()
    pad_tokens: int = 0


class Script(Struct, frozen=True):
    """The k-th entry answers the k-th model turn of a chain; the last one repeats."""

    turns: tuple[ScriptedTurn, ...]


def load_script(path: Path) -> Script:
    """Read a script from a file; `InvalidRequest` names what is wrong with it."""
    try:
        script = msgspec.json.decode(path.read_bytes(), type=Script)
    except OSError as error:
        raise InvalidRequest(f"The script {path} cannot be read: {error.strerror}.") from None
    except msgspec.MsgspecError as error:
        raise InvalidRequest(f"The script {path} is not a script: {error}.") from None
    if not script.turns:
        raise InvalidRequest(f"The script {path} has no turns.")
    return script


class ScriptedEngine:
    """Plays a script, or a small dialogue of its own, in the dialect of the served model."""

    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts()

    def __init__(
        self, dialect: Dialect, script: Script | None = None, tokens_per_s: float = 0
    ) -> None:
        self._dialect = dialect
        self._script = script
        self._tokens_per_s = tokens_per_s
        self._written: dict[tuple[int, bytes, tuple[str, ...]], tuple[int, ...]] = {}
        # Answers that wait for their next burst.
        self._waiting: deque[Future[None]] = deque()

    async def is_ready(self) -> bool:
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        ids = self._answer(job)
        allowed = ids[: job.output_tokens_max]
        wants_logprobs, count = job.sampling.wants_logprobs, job.sampling.top_logprobs
        sent = 0
        began = time.perf_counter()
        while sent < len(allowed):
            if self._tokens_per_s:
                # By the clock, not by adding up sleeps, so that the speed is right however coarse a sleep is.
                passed = time.perf_counter() - began
                due = int(passed * self._tokens_per_s)
                if due <= sent:
                    await asyncio.sleep(max(TICK_S, (sent + 1) / self._tokens_per_s - passed))
                    continue
            else:
                due = sent + BURST
                await self._round()
            burst = allowed[sent:due]
            logprobs = [_logprobs(id, count) for id in burst] if wants_logprobs else ()
            yield Ids(burst, logprobs)
            sent = min(due, len(allowed))
        yield Finish("stop" if len(allowed) == len(ids) else "length")

    async def _round(self) -> None:
        """Wait for a later round of the loop, in which few others write."""
        loop = asyncio.get_running_loop()
        if self._waiting and self._waiting[0].get_loop() is not loop:
            # Of a loop that was stopped.
            self._waiting.clear()
        if not self._waiting:
            loop.call_soon(self._let_some_write)
        self._waiting.append(next_round := loop.create_future())
        await next_round

    def _let_some_write(self) -> None:
        for _ in range(min(BURSTS_A_ROUND, len(self._waiting))):
            next_round = self._waiting.popleft()
            # Or its answer was cancelled.
            if not next_round.done():
                next_round.set_result(None)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._let_some_write)

    def _answer(self, job: Job) -> tuple[int, ...]:
        """All ids of this model turn; those of a script's entry are cached."""
        if self._script is None:
            return tuple(self._dialect.write([as_item(one) for one in improvise(job)]))
        entry = min(job.model_turns, len(self._script.turns) - 1)
        scene = job.scene
        hosted = tuple(offer.qualified_name for offer in scene.head.tools.hosted)
        key = (entry, scene.head.tools.echo, hosted)
        is_cached = not scene.effects.offers and not scene.deferred
        if is_cached and key in self._written:
            return self._written[key]
        offers = scene.offers + scene.deferred
        ids = tuple(self._dialect.write(_scripted_items(self._script.turns[entry], offers)))
        if is_cached:
            if len(self._written) >= WRITTEN_MAX:
                self._written.clear()
            self._written[key] = ids
        return ids


def _logprobs(id: int, count: int) -> TokenLogprob:
    """The id itself is the likeliest; its neighbours share the rest, each half as much as the one before."""
    chance = SURE + (1 - SURE) * (id % CHANCES) / CHANCES
    top = [(id, log(chance))]
    rest = 1 - chance
    others = range(id - 1, id - count, -1) if id >= count else range(id + 1, id + count)
    for other in others:
        rest /= 2
        top.append((other, log(rest)))
    return TokenLogprob(log(chance), tuple(top[:count]))


def _scripted_items(turn: ScriptedTurn, offers: tuple[Offer, ...]) -> list[Item]:
    values: list[ItemValue] = []
    if turn.reasoning:
        values.append(items.Reasoning(content=[items.ReasoningText(text=turn.reasoning)]))
    if text := turn.text + FILLER * turn.pad_tokens:
        values.append(_message(text))
    for call in turn.calls:
        offer = offer_named(offers, call.name)
        given = bytes(call.arguments).decode() if call.input is None else call.input
        is_custom = call.input is not None or (offer and isinstance(offer.tool, CustomTool))
        values.append(_call(call.name, offer, given, is_custom=bool(is_custom)))
    return [as_item(value) for value in values]


def _message(text: str) -> ItemValue:
    return items.Message(role="assistant", content=[items.OutputText(text=text)])


def _call(name: str, offer: Offer | None, given: str, *, is_custom: bool) -> ItemValue:
    name = offer.tool.name if offer else name
    namespace = (offer and offer.namespace) or UNSET
    if is_custom:
        return items.CustomToolCall(call_id="", name=name, input=given, namespace=namespace)
    return items.FunctionCall(call_id="", name=name, arguments=given, namespace=namespace)


def improvise(job: Job) -> list[ItemValue]:
    """Without a script: call a tool once if one is offered and the user has just spoken, else answer."""
    scene, last = job.scene, _last(job.scene)
    offer = _chosen(scene)
    is_users_turn = isinstance(last, items.Message) and last.role == "user"
    if offer is not None and (is_users_turn or _is_forced(scene.head)):
        return [_example_call(offer, _said(last))]
    return [_message(_reply(last, scene.format))]


def _last(scene: Scene) -> ItemValue | None:
    """The last item of the conversation, which may be part of the history: after a warm-up nothing is given."""
    if scene.given:
        return scene.given[-1].value
    for one in reversed(list(scene.history())):
        if last := one.wrote or one.given:
            return last[-1].value
    return None


def _is_forced(head: Head) -> bool:
    choice = head.tool_choice
    if isinstance(choice, ToolChoiceName):
        return choice.type != "allowed_tools" or choice.mode == "required"
    return choice == "required"


def _chosen(scene: Scene) -> Offer | None:
    """The offer to call: the forced one, else the first function, else the first tool that is allowed."""
    choice, offers = scene.head.tool_choice, scene.offers
    if choice == "none":
        return None
    if isinstance(choice, ToolChoiceName):
        named = choice.tools or [] if choice.type == "allowed_tools" else [choice]
        offers = chosen_offers(named, offers + scene.deferred)
    functions = [offer for offer in offers if offer.kind == "function"]
    return next(iter(functions or offers), None)


def _said(last: ItemValue | None) -> str:
    """What the user has just said."""
    return _text(last.content) if isinstance(last, items.Message) and last.role == "user" else ""


def _example_call(offer: Offer, said: str) -> ItemValue:
    tool = offer.tool
    if isinstance(tool, CustomTool):
        return _call("", offer, "example", is_custom=True)
    words = dict.fromkeys(QUERY_NAMES, said) if said else {}
    schema = {} if tool.parameters is UNSET else msgspec.json.decode(tool.parameters)
    arguments = example(schema, words) if schema else {}
    text = encode(arguments if isinstance(arguments, dict) else {}).decode()
    return _call("", offer, text, is_custom=False)


def _reply(last: ItemValue | None, wanted: TextFormat | None) -> str:
    if wanted is not None and wanted.type == "json_schema" and wanted.schema is not UNSET:
        return encode(example(msgspec.json.decode(wanted.schema))).decode()
    if wanted is not None and wanted.type == "json_object":
        return "{}"
    match last:
        case items.Message(role="user"):
            return f"{NOTICE} You said: {_text(last.content)}"
        case items.FunctionCallOutput() | items.CustomToolCallOutput():
            return f"{NOTICE} The tool said: {_text(last.output)}"
        case items.LocalShellCallOutput() | items.HostedOutput():
            return f"{NOTICE} The tool said: {_text(last.output)}"
        case items.ShellCallOutput():
            printed = " ".join(one.stdout for one in last.output)[:ECHO_CHARS]
            return f"{NOTICE} The shell said: {printed}"
        case _:
            return NOTICE


def _text(content: object) -> str:
    if isinstance(content, str):
        return content[:ECHO_CHARS]
    assert isinstance(content, list)
    parts = (part.text for part in content if isinstance(part, items.InputText | items.OutputText))
    return " ".join(parts)[:ECHO_CHARS]
