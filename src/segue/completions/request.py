"""What does a client of Chat Completions ask for? The body of its request in, the request of a turn out. Pure.

Known fields are checked, unknown ones are ignored (docs/apis/chat.md has all of them). A field that would change the
answer and cannot be honoured is refused: an answer that ignores it would be wrong in silence.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec
from msgspec import UNSET, Meta, Raw, Struct, UnsetType

from segue.completions.tools import ChatChoice, FunctionChoice, translate_choice
from segue.errors import InvalidRequest
from segue.wire.codec import decode_body
from segue.wire.requests import (
    Create,
    Effort,
    Number,
    RawField,
    ReasoningConfig,
    StopString,
    TextConfig,
    TextFormat,
    Whole,
)

STOPS_MAX = 4
LOGPROBS = "message.output_text.logprobs"
# Where thinking is switched on and no effort is named.
USUAL_EFFORT: Effort = "medium"


def given(raw: RawField) -> Raw | None:
    """What a field holds; nothing where it is left out or null."""
    return raw if isinstance(raw, Raw) and bytes(raw) != b"null" else None


class ChatStreamOptions(Struct, frozen=True):
    include_usage: bool | None = None


class SchemaFormat(Struct, frozen=True):
    """The schema of a structured answer."""

    name: str | UnsetType = UNSET
    schema: RawField = UNSET
    strict: bool | UnsetType | None = UNSET
    description: str | UnsetType | None = UNSET


class ResponseFormat(Struct, frozen=True):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: SchemaFormat | None = None
    # llama.cpp's own: the schema of a JSON object.
    schema: RawField = UNSET


class TemplateValues(Struct, frozen=True):
    """Of what clients of vLLM and SGLang give to a chat template, the switches of a model's thinking."""

    enable_thinking: bool | None = None
    thinking: bool | None = None
    reasoning_effort: Effort | None = None


class ThinkingSwitch(Struct, frozen=True):
    """DeepSeek's and GLM's own."""

    type: str | None = None


class RouterReasoning(Struct, frozen=True):
    """OpenRouter's own."""

    effort: Effort | None = None
    enabled: bool | None = None


class StructuredOutputs(Struct, frozen=True):
    """vLLM's own."""

    json: RawField = UNSET
    json_object: bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    structural_tag: str | None = None


class ChatRequest(Struct, frozen=True, kw_only=True):
    """The body of `POST /v1/chat/completions`: what is read of it."""

    model: str | None = None
    messages: list[Raw]
    stream: bool | None = None
    stream_options: ChatStreamOptions | None = None
    max_completion_tokens: Whole | None = None
    max_tokens: Whole | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: Number | None = None
    frequency_penalty: Number | None = None
    seed: Whole | None = None
    n: Whole | None = None
    stop: StopString | list[StopString] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=20)] | None = None
    logit_bias: RawField = UNSET
    tools: RawField = UNSET
    tool_choice: Literal["none", "auto", "required"] | ChatChoice | None = None
    parallel_tool_calls: bool | None = None
    functions: RawField = UNSET
    function_call: Literal["none", "auto"] | FunctionChoice | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: Effort | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    modalities: list[str] | None = None
    audio: RawField = UNSET
    web_search_options: RawField = UNSET
    service_tier: str | None = None
    user: str | None = None
    safety_identifier: Annotated[str, Meta(max_length=128)] | None = None
    prompt_cache_key: str | None = None
    # Outside of the contract, and in daily use.
    chat_template_kwargs: TemplateValues | None = None
    enable_thinking: bool | None = None
    thinking: ThinkingSwitch | None = None
    reasoning: RouterReasoning | None = None
    guided_json: RawField = UNSET
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None
    continue_final_message: bool | None = None

    @property
    def is_old(self) -> bool:
        """Whether it offers `functions`, and so expects a `function_call` instead of tool calls."""
        return given(self.functions) is not None and given(self.tools) is None

    @property
    def form(self) -> AnswerForm:
        options = self.stream_options
        return AnswerForm(
            wants_usage=options is not None and options.include_usage is True,
            wants_logprobs=bool(self.logprobs),
            wants_search=given(self.web_search_options) is not None,
            is_old=self.is_old,
        )


class AnswerForm(Struct, frozen=True, kw_only=True):
    """What of a request is needed to the end of its turn: the request itself holds the whole body."""

    # Whether the stream ends with the usage.
    wants_usage: bool = False
    wants_logprobs: bool = False
    # Whether the model may search the web.
    wants_search: bool = False
    # Whether the request had `functions`.
    is_old: bool = False


_request = msgspec.json.Decoder(ChatRequest)
_text = msgspec.json.Decoder(str)


def decode_chat(body: bytes | bytearray) -> ChatRequest:
    """The request in a body, its messages and tools still raw."""
    request = decode_body(_request, body)
    for problem, param in _unsupported(request):
        raise InvalidRequest(problem, code="unsupported_value", param=param)
    return request


def to_create(
    request: ChatRequest, items: list[Raw], tools: RawField, session: str | None
) -> Create:
    """The turn that a request asks for. `session`: what the client calls its conversation, a hint for the routing.

    The turn is never stored, whatever `store` says, and `metadata` is for what is stored.
    """
    stop = [request.stop] if isinstance(request.stop, str) else request.stop
    wants_logprobs = bool(request.logprobs)
    return Create(
        model=request.model,
        input=items,
        store=False,
        stream=request.stream,
        tools=tools,
        tool_choice=translate_choice(
            request.function_call if request.is_old else request.tool_choice
        ),
        parallel_tool_calls=False if request.is_old else request.parallel_tool_calls,
        max_output_tokens=_tokens_max(request),
        temperature=request.temperature,
        top_p=request.top_p,
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        seed=request.seed,
        stop=stop or None,
        include=[LOGPROBS] if wants_logprobs else None,
        top_logprobs=request.top_logprobs if wants_logprobs else None,
        text=TextConfig(_format(request), request.verbosity),
        reasoning=ReasoningConfig(effort=_effort(request)),
        service_tier=request.service_tier,
        user=request.user,
        safety_identifier=request.safety_identifier,
        prompt_cache_key=request.prompt_cache_key or session,
    )


def _unsupported(request: ChatRequest) -> Iterator[tuple[str, str]]:
    """What would change the answer, and cannot be honoured."""
    if request.n not in (None, 1):
        yield "'n' must be 1: this server gives one choice for a request.", "n"
    if isinstance(request.stop, list) and len(request.stop) > STOPS_MAX:
        yield f"'stop' may have at most {STOPS_MAX} strings.", "stop"
    for name in ("max_completion_tokens", "max_tokens"):
        count = getattr(request, name)
        if count is not None and count < 1 and count != -1:
            yield f"'{name}' must be at least 1.", name
    if (bias := given(request.logit_bias)) and bytes(bias).split() not in ([b"{}"], [b"{", b"}"]):
        yield "'logit_bias' is not supported by this server.", "logit_bias"
    if given(request.audio) or "audio" in (request.modalities or ()):
        yield (
            "Audio output is not supported by this server: 'modalities' may only have 'text'.",
            "modalities",
        )
    if request.continue_final_message:
        yield (
            "'continue_final_message' is not supported: an answer is always a new message.",
            "continue_final_message",
        )
    guided = request.structured_outputs or StructuredOutputs()
    for name, value in (
        ("guided_regex", request.guided_regex or guided.regex),
        ("guided_choice", request.guided_choice or guided.choice),
        ("guided_grammar", request.guided_grammar or guided.grammar or guided.structural_tag),
    ):
        if value:
            yield (
                f"'{name}' is not supported: send a JSON schema as 'response_format', or a custom tool.",
                name,
            )


def _tokens_max(request: ChatRequest) -> int | None:
    """The newer field wins; -1 is what clients of llama.cpp send for no limit."""
    given = (request.max_completion_tokens, request.max_tokens)
    count = next((count for count in given if count is not None), None)
    return None if count == -1 else count


def _format(request: ChatRequest) -> TextFormat | None:
    """What the answer must look like, under any of its names. A schema outlives the body, and is copied."""
    match request.response_format:
        case ResponseFormat(type="json_schema", json_schema=SchemaFormat() as asked):
            schema = given(asked.schema)
            own = schema.copy() if schema else UNSET
            return TextFormat("json_schema", asked.name, own, asked.strict, asked.description)
        case ResponseFormat(type="json_object", schema=raw) if schema := given(raw):
            return TextFormat("json_schema", "answer", schema.copy())
        case ResponseFormat(type=kind):
            return TextFormat(kind)
        case None:
            return _guided_format(request)


def _guided_format(request: ChatRequest) -> TextFormat | None:
    """The same as clients of vLLM ask for it."""
    guided = request.structured_outputs or StructuredOutputs()
    if schema := given(request.guided_json) or given(guided.json):
        # The schema, or a text that contains it.
        is_text = bytes(schema).startswith(b'"')
        raw = Raw(decode_body(_text, schema, "guided_json").encode()) if is_text else schema.copy()
        return TextFormat("json_schema", "answer", raw)
    return TextFormat("json_object") if guided.json_object else None


def _effort(request: ChatRequest) -> Effort | None:
    """How much the model is to think, under any of its names; the first that is set wins."""
    values = request.chat_template_kwargs or TemplateValues()
    router = request.reasoning or RouterReasoning()
    for effort in (request.reasoning_effort, values.reasoning_effort, router.effort):
        if effort is not None:
            return effort
    thinking = request.thinking and {"enabled": True, "disabled": False}.get(
        request.thinking.type or ""
    )
    switches = (
        values.enable_thinking,
        values.thinking,
        request.enable_thinking,
        thinking,
        router.enabled,
    )
    is_on = next((switch for switch in switches if switch is not None), None)
    return None if is_on is None else USUAL_EFFORT if is_on else "none"
