"""Who produces tokens? Any endpoint that speaks OpenAI's chat completions: messages in, deltas out.

The endpoint renders, tokenizes and parses. What is kept here is the serialized form: the messages come as a chain of
bytes that is only joined, the tools are translated once for as long as they stay the same. Calls,
reasoning and usage come back in the fields that the known servers use for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.upstream import Stream, Upstream, read, told
from segue.errors import ApiError, InvalidRequest, ServerFault
from segue.turn.values import Delta, Deltas, Effects, Finish, Job, Messages, Piece, Sampling, Scene
from segue.wire.items import Logprob, TopLogprob
from segue.wire.requests import TextFormat, ToolChoiceName
from segue.wire.tools import (
    CustomTool,
    Offer,
    Tools,
    chosen_offers,
    forced_offers,
    plain_name,
)

PATH = "/v1/chat/completions"
DONE = b"[DONE]"
# What endpoints themselves say of a token that cannot be.
LOGPROB_MIN = -9999.0
# What a function without parameters takes.
NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')


class _Function(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, frozen=True):
    index: int | None = None
    function: _Function = _Function()


class _Words(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    # The same thing under two names: vLLM, SGLang, llama.cpp and DeepSeek; OpenRouter, Ollama and newer vLLM.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _Likely(Struct, frozen=True):
    token: str = ""
    logprob: float | None = None
    # Null where a token has none of its own; some endpoints leave it out.
    bytes: list[int] | None = None
    top_logprobs: list[_Likely] | None = None


class _Logprobs(Struct, frozen=True):
    content: list[_Likely] | None = None


class _Choice(Struct, frozen=True):
    delta: _Words | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None


class _InputDetails(Struct, frozen=True):
    cached_tokens: int | None = None


class _OutputDetails(Struct, frozen=True):
    reasoning_tokens: int | None = None


class _Usage(Struct, frozen=True):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    prompt_tokens_details: _InputDetails | None = None
    completion_tokens_details: _OutputDetails | None = None
    # DeepSeek's name.
    prompt_cache_hit_tokens: int | None = None


class _Event(Struct, frozen=True):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Raw | UnsetType = UNSET


_event = msgspec.json.Decoder(_Event)
_events = msgspec.json.Decoder(list[_Event])


class ChatEngine:
    """An `Engine` for messages. `model` is the endpoint's name for it, `context_tokens` what it is said to have."""

    def __init__(self, upstream: Upstream, model: str, context_tokens: int) -> None:
        self._upstream = upstream
        self._model = model
        self._context_tokens = context_tokens
        self._limit = "max_tokens"
        self._tools: tuple[Tools, Effects, bytes] | None = None

    @property
    def can_constrain(self) -> bool:
        """Yes, by `response_format`."""
        return True

    @property
    def grammars(self) -> frozenset[str]:
        """None: chat endpoints have no common word for it."""
        return frozenset()

    async def is_ready(self) -> bool:
        """Whether the endpoint lists its models, the one question that they all answer."""
        return await self._upstream.is_up("/v1/models")

    async def close(self) -> None:
        """Close the connections."""
        await self._upstream.close()

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The deltas as they come, then why it stopped and what the endpoint counted."""
        if job.prompt.length == 0 and job.output_tokens_max == 0:
            yield Finish("length")
            return
        reason: str | None = None
        usage = _Usage()
        must_call = job.output_tokens_max > 0 and _must_call(job.scene)
        async with await self._ask(job) as stream:
            async for batch in stream:
                deltas: list[Delta] = []
                if DONE in batch:
                    stream.is_over = True
                    batch = batch[: batch.index(DONE)]
                events, fault = _heard(batch)
                for event in events:
                    usage = event.usage or usage
                    for choice in event.choices[:1]:
                        reason = choice.finish_reason or reason
                        if choice.delta is not None and job.output_tokens_max:
                            deltas += _deltas(choice)
                must_call = must_call and all(one.call_index is None for one in deltas)
                if deltas:
                    yield Deltas(tuple(deltas))
                if fault is not None:
                    raise fault
                if stream.is_over:
                    break
            if reason == "stop" and must_call:
                raise ServerFault("The engine did not call a tool, though it had to.")
            yield _finish(stream, reason, usage)

    async def _ask(self, job: Job) -> Stream:
        try:
            return await self._upstream.listen(PATH, self._body(job))
        except InvalidRequest as refused:
            # OpenAI's newer models want another word for the same limit, and say so.
            if "max_completion_tokens" not in refused.message or self._limit != "max_tokens":
                raise
        self._limit = "max_completion_tokens"
        return await self._upstream.listen(PATH, self._body(job))

    def _body(self, job: Job) -> bytes:
        """The messages as they were kept, and everything else around them."""
        assert isinstance(job.prompt, Messages), "this engine takes messages"
        scene = job.scene
        head = scene.head
        settings: dict[str, object] = {
            "model": self._model,
            "stream": True,
            "stream_options": {"include_usage": True},
            **_sampling(job.sampling),
            **_format(scene.format),
        }
        # Who did not ask for a limit gets the endpoint's own, which knows how much room is left.
        if job.output_tokens_max < self._context_tokens:
            settings[self._limit] = max(job.output_tokens_max, 1)
        if scene.effort is not None:
            settings["reasoning_effort"] = scene.effort
        if head.text.verbosity is not None:
            settings["verbosity"] = head.text.verbosity
        offers = _allowed(scene)
        tools = b""
        if offers:
            tools = b',"tools":' + self._tools_of(scene, offers)
            settings["tool_choice"] = _choice(scene)
            if not head.parallel_tool_calls:
                settings["parallel_tool_calls"] = False
        messages = b",".join(job.prompt.chunks())
        rest = msgspec.json.encode(settings)[1:]
        return b"".join((b'{"messages":[', messages, b"]", tools, b",", rest))

    def _tools_of(self, scene: Scene, offers: tuple[Offer, ...]) -> bytes:
        """Agents resend the same tools each turn: they are translated once, if all of them are allowed."""
        tools, effects = scene.head.tools, scene.effects
        if len(offers) != len(tools.offers) + len(effects.offers):
            return msgspec.json.encode([_function(offer) for offer in offers])
        known = self._tools
        if known is None or known[0] is not tools or known[1] is not effects:
            told = msgspec.json.encode([_function(offer) for offer in offers])
            self._tools = known = (tools, effects, told)
        return known[2]


# --- what is asked --------------------------------------------------------------------------------


def _sampling(sampling: Sampling) -> dict[str, object]:
    settings: dict[str, object] = {"temperature": sampling.temperature, "top_p": sampling.top_p}
    if sampling.presence_penalty:
        settings["presence_penalty"] = sampling.presence_penalty
    if sampling.frequency_penalty:
        settings["frequency_penalty"] = sampling.frequency_penalty
    if sampling.stop_strings:
        settings["stop"] = sampling.stop_strings
    if sampling.seed is not None:
        settings["seed"] = sampling.seed
    if sampling.wants_logprobs:
        settings["logprobs"] = True
        if sampling.top_logprobs:
            settings["top_logprobs"] = sampling.top_logprobs
    return settings


def _format(wanted: TextFormat | None) -> dict[str, object]:
    match wanted:
        case TextFormat(type="json_object"):
            return {"response_format": {"type": "json_object"}}
        case TextFormat(type="json_schema"):
            fields = {
                "name": "answer" if wanted.name is UNSET else wanted.name,
                "description": wanted.description,
                "schema": wanted.schema,
                "strict": wanted.strict,
            }
            told = {key: value for key, value in fields.items() if value not in (UNSET, None)}
            return {"response_format": {"type": "json_schema", "json_schema": told}}
        case _:
            return {}


def _allowed(scene: Scene) -> tuple[Offer, ...]:
    """The tools that the endpoint is told of: a choice among some of them leaves the others out, and one that is
    deferred is told where the choice names it."""
    choice = scene.head.tool_choice
    if not isinstance(choice, ToolChoiceName):
        return scene.offers
    if choice.type == "allowed_tools":
        return chosen_offers(choice.tools or [], scene.offers)
    return scene.offers + chosen_offers([choice], scene.deferred)


def _choice(scene: Scene) -> object:
    choice = scene.head.tool_choice
    if not isinstance(choice, ToolChoiceName):
        return choice
    if choice.type == "allowed_tools":
        return choice.mode or "auto"
    forced = forced_offers(choice, _allowed(scene))
    if not forced:
        return "auto"
    return {"type": "function", "function": {"name": plain_name(forced[0].qualified_name)}}


def _must_call(scene: Scene) -> bool:
    """Whether an answer without a call would be no answer. Not every endpoint that takes the wish honours it."""
    choice = scene.head.tool_choice
    if isinstance(choice, ToolChoiceName):
        return _choice(scene) != "auto" and bool(_allowed(scene))
    return choice == "required" and bool(scene.offers)


def _function(offer: Offer) -> dict[str, object]:
    """A tool as a chat function; a custom tool is one that takes a single string."""
    tool = offer.tool
    function: dict[str, object] = {"name": plain_name(offer.qualified_name)}
    if isinstance(tool.description, str):
        function["description"] = tool.description
    if isinstance(tool, CustomTool):
        function["parameters"] = _input_of(tool)
    else:
        is_given = isinstance(tool.parameters, Raw) and bytes(tool.parameters) != b"null"
        function["parameters"] = tool.parameters if is_given else NO_PARAMETERS
        if isinstance(tool.strict, bool):
            function["strict"] = tool.strict
    return {"type": "function", "function": function}


def _input_of(tool: CustomTool) -> dict[str, object]:
    shape: dict[str, object] = {"type": "string"}
    if isinstance(tool.format, Raw):
        shape["description"] = f"Its format: {bytes(tool.format).decode()}"
    return {"type": "object", "properties": {"input": shape}, "required": ["input"]}


# --- what is heard --------------------------------------------------------------------------------


def _heard(batch: Sequence[bytes]) -> tuple[list[_Event], ApiError | None]:
    """The events that came together, up to a fault, if there is one: what was said before it counts."""
    try:
        events = _events.decode(b"[%b]" % b",".join(batch))
        if all(event.error is UNSET for event in events):
            return events, None
    except (msgspec.MsgspecError, UnicodeDecodeError):
        pass
    heard: list[_Event] = []
    for data in batch:
        try:
            event = read(_event, data)
        except ApiError as error:
            return heard, error
        if event.error is not UNSET:
            return heard, told(event.error)
        heard.append(event)
    return heard, None


def _deltas(choice: _Choice) -> list[Delta]:
    """What one event says, in the order in which a model says it."""
    words = choice.delta or _Words()
    found: list[Delta] = []
    if reasoning := words.reasoning_content or words.reasoning:
        found.append(Delta(reasoning=reasoning))
    if text := words.content or words.refusal:
        likely = (choice.logprobs and choice.logprobs.content) or ()
        found.append(Delta(text=text, logprobs=tuple(map(_logprob, likely))))
    for n, call in enumerate(words.tool_calls or ()):
        function = call.function
        found.append(
            Delta(
                # Some servers leave the index out where they send whole calls.
                call_index=n if call.index is None else call.index,
                call_name=function.name or "",
                call_arguments=function.arguments or "",
            )
        )
    return found


def _logprob(one: _Likely) -> Logprob:
    top = [_top(other) for other in one.top_logprobs or ()]
    return Logprob(one.token, _bytes(one), _known(one), top)


def _top(one: _Likely) -> TopLogprob:
    return TopLogprob(one.token, _bytes(one), _known(one))


def _bytes(one: _Likely) -> list[int]:
    return list(one.token.encode()) if one.bytes is None else one.bytes


def _known(one: _Likely) -> float:
    return LOGPROB_MIN if one.logprob is None else one.logprob


def _finish(stream: Stream, reason: str | None, usage: _Usage) -> Finish:
    if reason is None:
        raise stream.broke_off()
    if reason == "content_filter":
        raise ServerFault("The engine's own content filter ended the answer.")
    given, wrote = usage.prompt_tokens_details, usage.completion_tokens_details
    return Finish(
        "length" if reason == "length" else "stop",
        cached_tokens=(given and given.cached_tokens) or usage.prompt_cache_hit_tokens or 0,
        input_tokens=usage.prompt_tokens,
        output_tokens=usage.completion_tokens,
        reasoning_tokens=wrote.reasoning_tokens if wrote else None,
    )
