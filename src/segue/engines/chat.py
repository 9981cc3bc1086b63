"""Who produces tokens? Any endpoint that speaks OpenAI's chat completions: messages in, deltas out.

The endpoint renders, tokenizes and parses. Here the serialized form is cached: the messages come as a chain of bytes
that is only joined, the tools are translated once for as long as they stay the same. Calls, reasoning and usage are
read from the fields that the known servers use for them.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import closing

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType

from segue.engines.token_engine import DONE, SamplingFields
from segue.engines.upstream import UNREADABLE, EventStream, Upstream, error_in_stream, unreadable
from segue.errors import ApiError, InvalidRequest, ServerFault
from segue.turn.values import Delta, Deltas, Effects, Finish, Job, Messages, Piece, Sampling, Scene
from segue.wire.items import Logprob, TopLogprob
from segue.wire.requests import TextFormat, ToolChoiceName
from segue.wire.tools import CustomTool, Offer, Tools, chosen_offers, forced_offers, plain_name

PATH = "/v1/chat/completions"
# Some endpoints know no penalties.
SAMPLING = SamplingFields(omits_zero_penalties=True)
# What endpoints themselves send for a token that is impossible.
LOGPROB_MIN = -9999.0
# Of a function without parameters.
NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')


class _Function(Struct, frozen=True):
    name: str | None = None
    arguments: str | None = None


class _Call(Struct, frozen=True):
    index: int | None = None
    function: _Function = _Function()


class _Delta(Struct, frozen=True):
    content: str | None = None
    refusal: str | None = None
    # The same under two names: vLLM, SGLang, llama.cpp and DeepSeek; OpenRouter, Ollama and newer vLLM.
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None


class _TokenLogprob(Struct, frozen=True):
    token: str = ""
    logprob: float | None = None
    # Null where a token has none of its own; some endpoints leave it out.
    bytes: list[int] | None = None
    top_logprobs: list[_TokenLogprob] | None = None


class _Logprobs(Struct, frozen=True):
    content: list[_TokenLogprob] | None = None


class _Choice(Struct, frozen=True):
    delta: _Delta | None = None
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


class ChatEngine:
    """An `Engine` for messages. `model` is the endpoint's name for it, `context_tokens` its configured context."""

    can_constrain = True
    # Chat endpoints have no common field for a grammar.
    grammars: frozenset[str] = frozenset()

    def __init__(self, upstream: Upstream, model: str, context_tokens: int) -> None:
        self._upstream = upstream
        self._model = model
        self._context_tokens = context_tokens
        self._limit_field = "max_tokens"
        self._tools: tuple[Tools, Effects, bytes] | None = None

    async def is_ready(self) -> bool:
        """Whether the endpoint lists its models, the one request that all of them answer."""
        return await self._upstream.is_up("/v1/models")

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        if job.prompt.length == 0 and job.output_tokens_max == 0:
            yield Finish("length")
            return
        answer = _Answer(job)
        with closing(await self._send(job)) as stream:
            while not stream.is_over and (events := await stream.read()):
                deltas, error = answer.read(events)
                stream.is_over = answer.is_over
                if deltas:
                    yield Deltas(tuple(deltas))
                if error is not None:
                    raise error
            yield answer.finish(stream)

    async def _send(self, job: Job) -> EventStream:
        try:
            return await self._upstream.stream(PATH, self._body(job))
        except InvalidRequest as error:
            # OpenAI's newer models want another name for the same limit, and name it in their refusal.
            if "max_completion_tokens" not in error.message or self._limit_field != "max_tokens":
                raise
        self._limit_field = "max_completion_tokens"
        return await self._upstream.stream(PATH, self._body(job))

    def _body(self, job: Job) -> bytes:
        """The messages as they were serialized before, and everything else around them."""
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
        # Where the client set no limit, the endpoint's own is used: it knows how much of the context is left.
        if job.output_tokens_max < self._context_tokens:
            settings[self._limit_field] = max(job.output_tokens_max, 1)
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
        """Agents send the same tools each turn: they are translated once, if all of them are allowed."""
        tools, effects = scene.head.tools, scene.effects
        if len(offers) != len(tools.offers) + len(effects.offers):
            return msgspec.json.encode([_function(offer) for offer in offers])
        known = self._tools
        if known is None or known[0] is not tools or known[1] is not effects:
            translated = msgspec.json.encode([_function(offer) for offer in offers])
            self._tools = known = (tools, effects, translated)
        return known[2]


# --- the request --------------------------------------------------------------------------------


def _sampling(sampling: Sampling) -> dict[str, object]:
    settings = SAMPLING.of(sampling)
    if sampling.stop_strings:
        settings["stop"] = sampling.stop_strings
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
            given = {key: value for key, value in fields.items() if value not in (UNSET, None)}
            return {"response_format": {"type": "json_schema", "json_schema": given}}
        case _:
            return {}


def _allowed(scene: Scene) -> tuple[Offer, ...]:
    """The tools that the endpoint gets: `allowed_tools` leaves the others out, and a deferred tool is sent only where
    the choice names it."""
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
    """Whether the answer must contain a call. Some endpoints accept this `tool_choice` and ignore it."""
    choice = scene.head.tool_choice
    if isinstance(choice, ToolChoiceName):
        return _choice(scene) != "auto" and bool(_allowed(scene))
    return choice == "required" and bool(scene.offers)


def _function(offer: Offer) -> dict[str, object]:
    """A tool as a chat function; a custom tool is a function that takes a single string."""
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


# --- the answer --------------------------------------------------------------------------------


class _Answer:
    """What was read of one answer."""

    def __init__(self, job: Job) -> None:
        self._is_warm_up = job.output_tokens_max == 0
        self._must_call = not self._is_warm_up and _must_call(job.scene)
        self._reason: str | None = None
        self._usage = _Usage()
        self.is_over = False

    def read(self, events: list[bytes]) -> tuple[list[Delta], ApiError | None]:
        """The deltas of events that came together, up to an error, if there is one: what was sent before it counts."""
        deltas: list[Delta] = []
        for data in events:
            if data == DONE:
                self.is_over = True
                break
            try:
                event = _event.decode(data)
            except UNREADABLE as error:
                return deltas, unreadable(error)
            if event.error is not UNSET:
                return deltas, error_in_stream(event.error)
            self._usage = event.usage or self._usage
            for choice in event.choices[:1]:
                self._reason = choice.finish_reason or self._reason
                if choice.delta is not None and not self._is_warm_up:
                    deltas += _deltas(choice.delta, choice.logprobs)
        self._must_call = self._must_call and all(delta.call_index is None for delta in deltas)
        return deltas, None

    def finish(self, stream: EventStream) -> Finish:
        """Why it ended, and what the endpoint counted."""
        if self._reason is None:
            raise stream.broke_off()
        if self._reason == "stop" and self._must_call:
            raise ServerFault("The engine did not call a tool, though it had to.")
        if self._reason == "content_filter":
            raise ServerFault("The engine's own content filter ended the answer.")
        usage = self._usage
        inputs, outputs = usage.prompt_tokens_details, usage.completion_tokens_details
        return Finish(
            "length" if self._reason == "length" else "stop",
            cached_tokens=(inputs and inputs.cached_tokens) or usage.prompt_cache_hit_tokens or 0,
            input_tokens=usage.prompt_tokens,
            output_tokens=usage.completion_tokens,
            reasoning_tokens=outputs.reasoning_tokens if outputs else None,
        )


def _deltas(delta: _Delta, logprobs: _Logprobs | None) -> list[Delta]:
    """What one event adds, in the order in which a model writes it."""
    deltas: list[Delta] = []
    if reasoning := delta.reasoning_content or delta.reasoning:
        deltas.append(Delta(reasoning=reasoning))
    if text := delta.content or delta.refusal:
        tokens = (logprobs and logprobs.content) or ()
        deltas.append(Delta(text=text, logprobs=tuple(map(_logprob, tokens))))
    for n, call in enumerate(delta.tool_calls or ()):
        function = call.function
        deltas.append(
            Delta(
                # Some servers leave the index out where they send whole calls.
                call_index=n if call.index is None else call.index,
                call_name=function.name or "",
                call_arguments=function.arguments or "",
            )
        )
    return deltas


def _logprob(token: _TokenLogprob) -> Logprob:
    top = [TopLogprob(one.token, _bytes(one), _value(one)) for one in token.top_logprobs or ()]
    return Logprob(token.token, _bytes(token), _value(token), top)


def _bytes(token: _TokenLogprob) -> list[int]:
    return list(token.token.encode()) if token.bytes is None else token.bytes


def _value(token: _TokenLogprob) -> float:
    return LOGPROB_MIN if token.logprob is None else token.logprob
