"""Who produces tokens? Any endpoint that speaks OpenAI's chat completions: messages in, deltas out.

The endpoint renders, tokenizes and parses. Here the serialized form is cached: the messages come as a chain of bytes
that is only joined, the tools are translated once for as long as they stay the same. Calls, reasoning and usage are
read from the fields that the known servers use for them.

No two endpoints take the same requests. What one refuses by name and an answer does not need (`OPTIONAL`), or what it
says of roles and thoughts in its messages, is sent otherwise at once, and the client does not see the refusal. If that
helps, it is remembered for this endpoint and this model; a refusal for another reason teaches nothing.
"""

from __future__ import annotations

import logging
import re
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from typing import Generic, Literal, Protocol, TypeVar

import msgspec
from msgspec import UNSET, Raw, Struct, UnsetType, structs

from segue.border.believed import CALLS_MAX
from segue.border.numbers import LOGPROB_MIN, LOGPROBS_MAX, events_max, finite
from segue.border.refusals import (
    UNREADABLE,
    ContextRefused,
    RequestRefused,
    error_in_stream,
    unreadable,
)
from segue.engines.client import HttpResponse
from segue.engines.facts import MODELS, facts_in, learned, more_facts
from segue.engines.token_engine import DONE, SamplingFields
from segue.engines.upstream import ANSWERED, EventStream, Upstream
from segue.errors import ApiError, CallerError, ServerFault
from segue.limits import UNSEEN_TOKENS_MAX
from segue.seams.model import (
    Delta,
    Deltas,
    EngineFacts,
    Finish,
    Job,
    Piece,
    Rendered,
    Sampling,
    Scene,
    template_values,
)
from segue.seams.prompt import Messages
from segue.wire.effects import Effects
from segue.wire.items import Logprob, TopLogprob
from segue.wire.requests import TextFormat, ToolChoiceName
from segue.wire.tools import CustomTool, Offer, Tools, chosen_offers, forced_offers

log = logging.getLogger(__name__)

PATH = "/v1/chat/completions"
SAMPLING = SamplingFields()
# Blanks before thoughts, and newlines after them, are held back no longer than this.
HELD_CHARS_MAX = 1_024
# More of the likeliest tokens no request may ask for.
TOP_LOGPROBS_MAX = 20
# Reasons for which an answer is not whole; all others are taken for the model's own end.
CUT_BY: Mapping[str, Literal["length", "content_filter"]] = {
    "length": "length",
    "content_filter": "content_filter",
}
# Of a function without parameters.
NO_PARAMETERS = Raw(b'{"type":"object","properties":{}}')


# Fields that an answer does not need, and what endpoints call them when they refuse them. `max_tokens` has another name
# then.
OPTIONAL: Mapping[str, str] = {
    "max_tokens": r"max_completion_tokens",
    "stream_options": r"stream_options",
    "chat_template_kwargs": r"chat_template_kwargs",
    "parallel_tool_calls": r"parallel_tool_calls",
    "verbosity": r"verbosity",
    "reasoning_effort": r"reasoning[_. ]?effort|reasoning value|think value|support thinking",
    "top_logprobs": r"top_logprobs",
    "logprobs": r"logprobs",
    "seed": r"seed",
    # Read here as well.
    "stop": r"stop",
}
# Servers for a machine of one's own, by the name that they give themselves: they keep the prompts that they have read,
# and take values for the chat template.
OWN = re.compile(rb'"owned_by": ?"(vllm|sglang|llamacpp)"')
# Where servers say more of their models: llama-server, Ollama (what is loaded, what a model can do), LM Studio.
PAGES: tuple[tuple[Literal["GET", "POST"], str], ...] = (
    ("GET", "/props"), ("GET", "/api/ps"), ("POST", "/api/show"), ("GET", "/api/v0/models"),
)  # fmt: skip
# A conversation with a system message in the middle, which a chat template may lose, and the words for that.
MARK = "xyzzy"
PROBE = [
    {"role": role, "content": text}
    for role, text in (("system", "a"), ("user", "b"), ("system", MARK), ("user", "c"))
]
LOST = "System message not at the beginning."
# Names of models that see pictures, where the endpoint does not say.
SEEING = re.compile(
    r"(\b|\d)vl\b|vision|llava|pixtral|omni|gpt-(4o|4\.1|5)|gemini|claude|gemma-?[34]|llama-?4"
    r"|qwen-?3\.[5-9]|kimi-k2\.[5-9]|mistral-(small|medium|large)-?3|glm-\d\.\dv",
    re.IGNORECASE,
)
# What begins and ends objects and strings; an escaped character does neither.
IN_JSON = re.compile(r'\\.|["{}]', re.DOTALL)
# How many stop strings every endpoint takes.
STOPS_MAX = 4
# The nearest effort that more endpoints know.
NEAREST_EFFORT = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}


class _Function(Struct, frozen=True):
    name: str | None = None
    # As an object from servers that do not follow OpenAI here.
    arguments: Raw | UnsetType = UNSET


class _Call(Struct, frozen=True):
    index: int | None = None
    id: str | None = None
    function: _Function = _Function()

    @property
    def arguments(self) -> str:
        text = b"null" if (given := self.function.arguments) is UNSET else bytes(given)
        try:
            return text.decode() if text.startswith(b"{") else _string(text) or ""
        except UNREADABLE as error:
            raise unreadable(error) from None


class _Part(Struct, frozen=True):
    """A part of a content, of a thought, or of the details of reasoning."""

    text: str | None = None
    thinking: str | list[_Part] | None = None
    summary: str | None = None


class _Delta(Struct, frozen=True):
    # As parts from Mistral's reasoning models.
    content: str | list[_Part] | None = None
    refusal: str | None = None
    # The same under two names: vLLM, SGLang, llama.cpp and DeepSeek; OpenRouter, Ollama, Groq, Cerebras and newer vLLM.
    reasoning_content: str | None = None
    reasoning: str | None = None
    # The same again in parts: OpenRouter and MiniMax.
    reasoning_details: list[_Part] | None = None
    tool_calls: list[_Call] | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.content or self.refusal or self.tool_calls or _thought(self)[1])


class _TokenLogprob(Struct, frozen=True):
    token: str = ""
    logprob: float | None = None
    # Null where a token has none of its own; some endpoints leave it out.
    bytes: list[int] | None = None
    top_logprobs: list[_TokenLogprob] | None = None


class _Logprobs(Struct, frozen=True):
    content: list[_TokenLogprob] | None = None


class _Choice(Struct, frozen=True):
    index: int | None = None
    delta: _Delta | None = None
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    # The stop string, by vLLM and by SGLang; also ids, and null.
    stop_reason: Raw | UnsetType = UNSET
    matched_stop: Raw | UnsetType = UNSET


NO_CHOICE = _Choice()


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
    choices: list[_Choice] | None = None
    # Read at the end: what an endpoint counts must not cost its answer.
    usage: Raw | UnsetType = UNSET
    error: Raw | UnsetType = UNSET


class _Tokenized(Struct, frozen=True):
    """vLLM's count, and what llama-server says in two steps."""

    count: int | None = None
    prompt: str = ""
    tokens: list[int] = []
    token_strs: list[str] | None = None


_event = msgspec.json.Decoder(_Event)
_usage = msgspec.json.Decoder(_Usage | None)
_tokenized = msgspec.json.Decoder(_Tokenized)
_string = msgspec.json.Decoder(str | None).decode


F = TypeVar("F")


class MessageWriter(Protocol[F]):
    """Who writes the messages, in a form that the endpoint takes."""

    form: F

    def form_for(self, scene: Scene) -> F:
        """The form in which this scene is written by now."""

    def render_as(self, scene: Scene, form: F) -> Rendered: ...

    def otherwise(self, form: F, refusal: str) -> F | None:
        """The form to write in instead, if the refusal is about the messages."""

    def adopt(self, form: F, scene: Scene) -> None:
        """Write in the form that was found for this scene."""

    def hear(self, name: str) -> None:
        """Thoughts come under this name."""

    def names(self, scene: Scene) -> Callable[[str], str]:
        """What the tools of this scene are called, by their qualified names."""


class ChatEngine(Generic[F]):
    """An `Engine` for messages; `model` is the endpoint's name for it."""

    can_constrain = True
    # Chat endpoints have no common field for a grammar.
    grammars: frozenset[str] = frozenset()

    def __init__(
        self,
        upstream: Upstream,
        model: str,
        writer: MessageWriter[F],
        values: Mapping[str, object] | None = None,
    ) -> None:
        """`values` is what the operator tells chat templates."""
        self._upstream = upstream
        self._model = model
        self._writer = writer
        self._values = values or {}
        self.facts = EngineFacts()
        # Whether it is one of `OWN`, and which of `PAGES` it has.
        self._is_own = False
        self._pages = PAGES
        self._is_probed = False
        # What this endpoint refuses: names of fields, or `name=value`.
        self._left_out: frozenset[str] = frozenset()
        self._tools: tuple[Tools, Effects, bytes] | None = None

    async def is_ready(self) -> bool:
        """Whether the endpoint lists its models, the one request that all of them answer."""
        try:
            status, body = await self._upstream.call("GET", MODELS)
            if status == 200:
                self._is_own = OWN.search(body) is not None
                self.facts = await self._facts(body)
                await self._probe()
        except ApiError:
            return False
        return status in ANSWERED

    async def forward(self, path: str, body_for: Callable[[str], bytes]) -> HttpResponse:
        return await self._upstream.forward(path, body_for(self._model))

    async def _facts(self, listed: bytes) -> EngineFacts:
        """What the list of models says; where it says too little, other pages are asked, and then the model's name."""
        facts = facts_in(listed, self._model)
        for page in self._pages if facts.context_tokens is None else ():
            method, path = page
            asked = msgspec.json.encode({"model": self._model}) if method == "POST" else b""
            body = await self._page(method, path, asked)
            if body:
                facts = more_facts(facts, body, self._model)
            else:
                self._pages = tuple(one for one in self._pages if one != page)
        sees = facts.sees_images
        return structs.replace(
            facts,
            # Or as it was learned from a refusal.
            context_tokens=facts.context_tokens or self.facts.context_tokens,
            sees_images=True if sees is None and SEEING.search(self._model) else sees,
        )

    async def _probe(self) -> None:
        """Some chat templates lose a system message in the middle without a word: own servers show what they write."""
        if not self._is_own or self._is_probed:
            return
        asked = msgspec.json.encode({"messages": PROBE, "return_token_strs": True})
        for path in ("/apply-template", "/tokenize"):
            written = await self._tokenize(path, asked)
            text = written.prompt or "".join(written.token_strs or ())
            if text:
                self._is_probed = True
                lost = self._writer.otherwise(self._writer.form, LOST)
                if MARK not in text and lost is not None:
                    self._writer.form = lost

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        is_warm_up = job.output_tokens_max == 0
        if is_warm_up and (job.prompt.length == 0 or not self._is_own):
            # Reading a prompt costs money elsewhere, and nobody says that it would be kept.
            yield Finish("length", input_tokens=0, output_tokens=0)
            return
        answer = _Answer(job)
        try:
            stream = await self._send(job)
        except CallerError:
            if not is_warm_up:
                raise
            # Many templates write nothing before a user has spoken.
            yield Finish("length", input_tokens=0, output_tokens=0)
            return
        stream.events_left = events_max(job)
        with closing(stream):
            read = partial(answer.read, stream)
            while not answer.is_over and await stream.read(read):
                stream.is_over = answer.is_over
                if answer.deltas:
                    yield answer.take()
                if answer.error is not None:
                    raise answer.error
            if rest := answer.rest():
                yield Deltas(tuple(rest))
            if answer.thoughts_in:
                self._writer.hear(answer.thoughts_in)
            yield answer.finish(stream)

    async def _send(self, job: Job) -> EventStream:
        """The answer to this job, if need be without what the endpoint refuses. What has helped is remembered."""
        assert isinstance(job.prompt, Messages), "this engine takes messages"
        left_out, prompt = self._left_out, job.prompt
        told: EngineFacts | None = None
        form = known = self._writer.form_for(job.scene)
        while True:
            settings = self._settings(job, left_out)
            body = self._body(job.scene, prompt, settings)
            try:
                stream = await self._upstream.stream(PATH, body)
                break
            except ContextRefused as refused:
                told = learned(told or self.facts, refused) or told
                if not job.output_tokens_max:
                    raise
                # Without a limit the endpoint takes what is left.
                job = structs.replace(job, output_tokens_max=None)
            except RequestRefused as refused:
                if name := _named(refused.words, settings):
                    left_out |= {name}
                    continue
                changed = self._writer.otherwise(form, refused.words)
                if changed is None and (prompt is not job.prompt or prompt.form == form):
                    raise
                form = form if changed is None else changed
                prompt = self._rendered(job.scene, form)
        # A refusal may quote its request: what it says of the engine counts only if the answer came that way.
        self.facts = told or self.facts
        engine = self._upstream.name
        for name in sorted(left_out - self._left_out):
            log.warning("engine %s refuses the field %s: it is not sent any more", engine, name)
        self._left_out |= left_out
        if form != known:
            self._writer.adopt(form, job.scene)
            form = self._writer.form
            log.warning("engine %s: messages are now written as %s", engine, form)
        return stream

    async def count_tokens(self, scene: Scene) -> int | None:
        """How many tokens the messages are; None where the endpoint has no tokenizer for them."""
        if not self._is_own:
            return None
        prompt = self._rendered(scene, self._writer.form_for(scene))
        body = self._body(scene, prompt, {"model": self._model, "add_generation_prompt": True})
        counted = await self._tokenize("/tokenize", body)
        if counted.count is None:
            # llama-server writes the text first.
            text = (await self._tokenize("/apply-template", body)).prompt
            plain = {"content": text, "add_special": True, "parse_special": True}
            counted = await self._tokenize("/tokenize", msgspec.json.encode(plain))
            return len(counted.tokens) or None
        # Other counts are not believed; no token is shorter than a byte.
        return counted.count if 0 < counted.count <= len(body) + UNSEEN_TOKENS_MAX else None

    async def _tokenize(self, path: str, body: bytes) -> _Tokenized:
        try:
            return _tokenized.decode(await self._page("POST", path, body))
        except UNREADABLE:
            return _Tokenized()

    async def _page(self, method: Literal["GET", "POST"], path: str, body: bytes) -> bytes:
        """What the endpoint has there; nothing, if it has nothing or cannot be asked."""
        try:
            status, answer = await self._upstream.call(method, path, body)
        except ApiError:
            return b""
        return answer if status == 200 else b""

    def _rendered(self, scene: Scene, form: F) -> Messages:
        prompt = self._writer.render_as(scene, form).prompt
        assert isinstance(prompt, Messages)
        return prompt

    def _settings(self, job: Job, left_out: frozenset[str]) -> dict[str, object]:
        """Everything but messages and tools; nothing that this endpoint is known to refuse."""
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
        if job.output_tokens_max is not None:
            limit_field = "max_completion_tokens" if "max_tokens" in left_out else "max_tokens"
            settings[limit_field] = max(job.output_tokens_max, 1)
        if effort := _effort(scene.effort, left_out):
            settings["reasoning_effort"] = effort
        told = template_values(self._values, scene.effort)
        if told and (self._is_own or self._values):
            settings["chat_template_kwargs"] = told
        if job.cache_salt is not None and self._is_own:
            settings["cache_salt"] = job.cache_salt
        if head.text.verbosity is not None:
            settings["verbosity"] = head.text.verbosity
        if _allowed(scene):
            settings["tool_choice"] = _choice(scene, self._writer.names(scene))
            if not head.parallel_tool_calls:
                settings["parallel_tool_calls"] = False
        return {name: value for name, value in settings.items() if name not in left_out}

    def _body(self, scene: Scene, prompt: Messages, settings: dict[str, object]) -> bytes:
        """The messages as they were serialized before, and everything else around them."""
        offers = _allowed(scene)
        tools = b',"tools":' + self._tools_of(scene, offers) if offers else b""
        messages = b",".join(prompt.chunks())
        rest = msgspec.json.encode(settings)[1:]
        return b"".join((b'{"messages":[', messages, b"]", tools, b",", rest))

    def _tools_of(self, scene: Scene, offers: tuple[Offer, ...]) -> bytes:
        """Agents send the same tools each turn: they are translated once, if all of them are allowed."""
        tools, effects, names = scene.head.tools, scene.effects, self._writer.names(scene)
        if len(offers) != len(tools.offers) + len(effects.offers):
            return _functions(offers, names)
        known = self._tools
        if known is None or known[0] is not tools or known[1] is not effects:
            self._tools = known = (tools, effects, _functions(offers, names))
        return known[2]


# --- the request --------------------------------------------------------------------------------


def _named(refusal: str, sent: Mapping[str, object]) -> str | None:
    """Which of the optional fields that were sent the refusal names; of an effort, only the value, if others may do."""
    for name, pattern in OPTIONAL.items():
        if name not in sent or not re.search(rf"\b({pattern})\b", refusal, re.IGNORECASE):
            continue
        value = sent[name]
        has_other = name == "reasoning_effort" and value in NEAREST_EFFORT
        return f"{name}={value}" if has_other and "support thinking" not in refusal else name
    return None


def _effort(wanted: str | None, left_out: frozenset[str]) -> str | None:
    """The effort, or the nearest one that the endpoint takes."""
    if wanted is None or f"reasoning_effort={wanted}" not in left_out:
        return wanted
    return NEAREST_EFFORT[wanted]


def _sampling(sampling: Sampling) -> dict[str, object]:
    settings = SAMPLING.of(sampling)
    if sampling.stop_strings:
        # More than the contract allows are looked for here, as these are.
        settings["stop"] = sampling.stop_strings[:STOPS_MAX]
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
            names = ("name", "description", "schema", "strict")
            pairs = ((name, getattr(wanted, name)) for name in names)
            given = {"name": "answer"} | {one: it for one, it in pairs if it not in (UNSET, None)}
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


def _choice(scene: Scene, names: Callable[[str], str]) -> object:
    choice = scene.head.tool_choice
    if not isinstance(choice, ToolChoiceName):
        return choice
    if choice.type == "allowed_tools":
        return choice.mode or "auto"
    forced = forced_offers(choice, _allowed(scene))
    if not forced:
        return "auto"
    return {"type": "function", "function": {"name": names(forced[0].qualified_name)}}


def _must_call(scene: Scene) -> bool:
    """Whether the answer must contain a call. Some endpoints accept this `tool_choice` and ignore it."""
    return bool(forced_offers(scene.head.tool_choice, _allowed(scene)))


def _functions(offers: Iterable[Offer], names: Callable[[str], str]) -> bytes:
    """The tools; of two that request and items bring under one name the first, which is the one that is called."""
    by_name: dict[str, Offer] = {}
    for offer in offers:
        by_name.setdefault(names(offer.qualified_name), offer)
    return msgspec.json.encode([_function(offer, name) for name, offer in by_name.items()])


def _function(offer: Offer, name: str) -> dict[str, object]:
    """A tool as a chat function; a custom tool is a function that takes a single string."""
    tool = offer.tool
    function: dict[str, object] = {"name": name}
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
        self._take = job.take
        self._is_warm_up = job.output_tokens_max == 0
        self._must_call = not self._is_warm_up and _must_call(job.scene)
        self._reason: str | None = None
        # Whether nothing more belongs to it, and whether nothing of it can be missing.
        self._is_closed = self._is_whole = False
        self._usage: bytes = b"null"
        self._calls = _Calls()
        self._marks = _ThinkMarks()
        # Under which name thoughts have come, if any have.
        self.thoughts_in = ""
        # Not yet taken.
        self.deltas: list[Delta] = []
        self._stop: Raw | UnsetType = UNSET
        # What went wrong; what was sent before it counts.
        self.error: ApiError | None = None
        # Whether the endpoint has ended it.
        self.is_over = False

    def read(self, stream: EventStream, events: list[bytes]) -> bool:
        """Add what came together; whether there is something to yield, because the turn did not take it."""
        for data in events:
            if data == DONE:
                self.is_over = True
                return True
            try:
                event = _event.decode(data)
            except UNREADABLE as error:
                return self._fail(unreadable(error))
            if event.error is not UNSET and bytes(event.error) != b"null":
                return self._fail(error_in_stream(event.error))
            if event.usage is not UNSET and bytes(event.usage) != b"null":
                self._usage = bytes(event.usage)
            if event.choices and not self._is_closed:
                self._choose(event.choices)
        if self._is_whole:
            stream.note_whole()
        if not self.deltas:
            return False
        if self._take is None or not self._take(Deltas(tuple(self.deltas))):
            return True
        self.deltas.clear()
        return False

    def _fail(self, error: ApiError) -> bool:
        """Something is wrong: with the answer, unless that is whole."""
        if self._is_whole:
            self.is_over = True
        else:
            self.error = error
        return True

    def take(self) -> Deltas:
        """What was not yet taken."""
        piece = Deltas(tuple(self.deltas))
        self.deltas.clear()
        return piece

    def _choose(self, choices: list[_Choice]) -> None:
        """Add what an event says of the one answer; others are not ours."""
        choice = choices[0]
        if choice.index:
            choice = next((one for one in choices if not one.index), NO_CHOICE)
        delta = choice.delta
        if choice.finish_reason:
            # Alone it is the end; some endpoints name a reason in every event, with what the event brings. Where the
            # events before had none, it is the end as well.
            is_new, self._reason = self._reason is None, choice.finish_reason
            self._stop = choice.stop_reason or choice.matched_stop
            self._is_closed = delta is None or delta.is_empty
            self._is_whole = self._is_closed or (is_new and self._marks.is_over)
        if delta is None or self._is_warm_up:
            return
        content, calls = delta.content, delta.tool_calls
        thought = delta.reasoning_content or delta.reasoning or delta.reasoning_details
        is_text = content and not (thought or calls or choice.logprobs) and self._marks.is_over
        if is_text and isinstance(content, str):
            # The way of nearly every token.
            self.deltas.append(Delta(content))
        elif calls and not (content or thought or delta.refusal):
            self._add_calls(calls)
        else:
            self._add(delta, choice.logprobs)

    def rest(self) -> list[Delta]:
        """What was held back."""
        return self._marks.close()

    def _add(self, delta: _Delta, logprobs: _Logprobs | None) -> None:
        """What one event adds, in the order in which a model writes it."""
        deltas = self.deltas
        name, thought = _thought(delta)
        if thought:
            self.thoughts_in = name
            deltas += [*self.rest(), Delta(reasoning=thought)]
        if text := _text(delta.content) or delta.refusal:
            tokens = ((logprobs and logprobs.content) or [])[:LOGPROBS_MAX]
            split = self._marks.split(text, tuple(map(_logprob, tokens)))
            if any(one.reasoning.strip() for one in split):
                self.thoughts_in = "content"
            deltas += split
        self._add_calls(delta.tool_calls or ())

    def _add_calls(self, calls: Sequence[_Call]) -> None:
        deltas = self.deltas
        for position, call in enumerate(calls[: CALLS_MAX + 1]):
            if not self._marks.is_over:
                deltas += self.rest()
            self._must_call = False
            name, arguments = call.function.name or "", call.arguments
            number = self._calls.number(position, call, arguments)
            deltas.append(Delta(call_index=number, call_name=name, call_arguments=arguments))

    def finish(self, stream: EventStream) -> Finish:
        """Why it ended, and what the endpoint counted."""
        if self._reason is None:
            raise stream.broke_off()
        if self._reason == "stop" and self._must_call:
            raise ServerFault("The engine did not call a tool, though it had to.")
        usage = _read_usage(self._usage)
        inputs, outputs = usage.prompt_tokens_details, usage.completion_tokens_details
        cached = inputs.cached_tokens if inputs else None
        cached = usage.prompt_cache_hit_tokens if cached is None else cached
        wrote, thought = usage.completion_tokens, outputs.reasoning_tokens if outputs else None
        if wrote and thought and thought > wrote:
            # xAI counts thoughts beside the answer, others within it.
            wrote += thought
        return Finish(
            CUT_BY.get(self._reason, "stop"),
            cached_tokens=cached,
            input_tokens=usage.prompt_tokens,
            output_tokens=wrote,
            reasoning_tokens=thought,
            stop_string=_read_stop(self._stop),
        )


def _read_stop(raw: Raw | UnsetType) -> str | None:
    """The stop string that was met; ids and anything else are none."""
    try:
        return None if raw is UNSET else msgspec.json.decode(raw, type=str)
    except UNREADABLE:
        return None


def _read_usage(data: bytes) -> _Usage:
    """What it counted; a count that cannot be read is one that cannot be."""
    try:
        return _usage.decode(data) or _Usage()
    except UNREADABLE:
        return _Usage(prompt_tokens=-1, completion_tokens=-1)


def _thought(delta: _Delta) -> tuple[str, str]:
    """What the model thinks, and under which name that came."""
    if delta.reasoning_content:
        return "reasoning_content", delta.reasoning_content
    if delta.reasoning:
        return "reasoning", delta.reasoning
    if isinstance(delta.content, list):
        return "thinking", "".join(_text(part.thinking) for part in delta.content)
    if delta.reasoning_details:
        parts = [part.text or part.summary or "" for part in delta.reasoning_details]
        return "reasoning_details", "".join(parts)
    return "", ""


def _text(content: str | list[_Part] | None) -> str:
    if isinstance(content, list):
        return "".join(part.text or "" for part in content)
    return content or ""


@dataclass(slots=True)
class _OpenCall:
    number: int
    id: str | None
    # Not looked at yet.
    arguments: list[str] = field(default_factory=list)
    # How many objects are open at the end of what was looked at, and whether a string is.
    depth: int = 0
    is_string: bool = False
    is_whole: bool = False

    def is_other(self, id: str | None) -> bool:
        """Whether a name under this id begins another call: by the id, or because the arguments are whole."""
        if id and self.id:
            return id != self.id
        self._look()
        return self.is_whole

    def _look(self) -> None:
        """Each character once: some endpoints repeat the name with each piece of the arguments."""
        for found in IN_JSON.finditer("".join(self.arguments)):
            mark = found[0]
            if mark == '"':
                self.is_string = not self.is_string
            elif not self.is_string and mark in "{}":
                self.depth += 1 if mark == "{" else -1
                self.is_whole = self.depth == 0
        self.arguments.clear()


class _Calls:
    """Which call is this? Some endpoints send no index, and some the same one for every call."""

    def __init__(self) -> None:
        self._count = 0
        # By the index, or by the place in an event.
        self._open: dict[int, _OpenCall] = {}

    def number(self, position: int, call: _Call, arguments: str) -> int:
        key = position if call.index is None else call.index
        known = self._open.get(key)
        if known is None or (call.function.name and known.is_other(call.id)):
            known = self._open[key] = _OpenCall(self._count, call.id)
            self._count += 1
        known.arguments.append(arguments)
        return known.number


class _ThinkMarks:
    """Thoughts between marks at the beginning of the text, from endpoints that do not take them apart."""

    OPEN, CLOSE = "<think>", "</think>"

    def __init__(self) -> None:
        self._held = ""
        self._logprobs: tuple[Logprob, ...] = ()
        self._is_inside = self.is_over = False

    def split(self, text: str, logprobs: tuple[Logprob, ...]) -> list[Delta]:
        """What has become certain with this text."""
        if self.is_over:
            return [Delta(text=text, logprobs=logprobs)]
        self._held += text
        self._logprobs += logprobs
        if not self._is_inside:
            bare = self._held.lstrip()
            if self.OPEN.startswith(bare) and len(self._held) <= HELD_CHARS_MAX:
                # Too short to say, or just the mark.
                self._is_inside = bare == self.OPEN
                self._held = "" if self._is_inside else self._held
                return []
            if not bare.startswith(self.OPEN):
                return self.close()
            self._held, self._is_inside = bare.removeprefix(self.OPEN), True
        thought, mark, rest = self._held.partition(self.CLOSE)
        if mark:
            self._held, self._logprobs = thought.rstrip("\n"), ()
            return self.close() + ([Delta(text=rest)] if rest else [])
        # Newlines before the mark are not the thought's.
        held = max(n for n in range(len(self.CLOSE)) if thought.endswith(self.CLOSE[:n]))
        certain = thought[: len(thought) - held]
        if len(certain) <= HELD_CHARS_MAX or certain[-1] != "\n":
            certain = certain.rstrip("\n")
        self._held = thought[len(certain) :]
        return [Delta(reasoning=certain)] if certain else []

    def close(self) -> list[Delta]:
        """What was held back, as what it is by now; marks that follow are text."""
        self.is_over = True
        held, self._held = self._held, ""
        if not held:
            return []
        if self._is_inside:
            return [Delta(reasoning=held)]
        return [Delta(text=held, logprobs=self._logprobs)]


def _logprob(token: _TokenLogprob) -> Logprob:
    likeliest = (token.top_logprobs or ())[:TOP_LOGPROBS_MAX]
    top = [TopLogprob(one.token, _bytes(one), _value(one)) for one in likeliest]
    return Logprob(token.token, _bytes(token), _value(token), top)


def _bytes(token: _TokenLogprob) -> list[int]:
    told = token.bytes
    is_given = told is not None and (not told or 0 <= min(told) <= max(told) <= 255)
    return told if told is not None and is_given else list(token.token.encode())


def _value(token: _TokenLogprob) -> float:
    return LOGPROB_MIN if token.logprob is None else finite(token.logprob)
