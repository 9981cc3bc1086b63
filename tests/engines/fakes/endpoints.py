"""FAKE chat endpoints with the habits of real ones: what each refuses, in its own words, and how it answers.

A `Profile` is one endpoint, written from its documentation and from reports of its users (issues of public projects are
named where a habit is not documented). No model is behind them: a question about the weather is answered by calls, an
output by a sentence, everything else by a greeting.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

from aiohttp import web

from tests.engines.fakes.chat import choice, delta, usage
from tests.engines.fakes.server import DONE, Body, Fake, event

THOUGHT = "The user wants something."
CALLS = [("Paris", "call_1"), ("Rome", "call_2")]
MESSAGE_FIELDS = frozenset({"role", "content", "tool_calls", "tool_call_id", "name"})
BODY_FIELDS = frozenset(
    {"model", "messages", "stream", "temperature", "top_p", "max_tokens", "stop", "response_format"}
    | {"tools", "tool_choice", "parallel_tool_calls"}
)
Refusal = tuple[int, object]
# What refuses a field: of the body, or of the n-th message.
Words = Callable[[str, int | None], Refusal]


def openai_error(message: str, status: int = 400, **fields: object) -> Refusal:
    error = {"message": message, "type": "invalid_request_error", "param": None, "code": None}
    return status, {"error": {**error, **fields}}


def groq(name: str, n: int | None) -> Refusal:
    """SimonSchubert/Kai#265."""
    if n is None:
        return openai_error(f"property '{name}' is unsupported")
    return openai_error(
        f"'messages.{n}' : for 'role:assistant' the following must be satisfied"
        f"[('messages.{n}' : property '{name}' is unsupported)]"
    )


def cerebras(name: str, n: int | None) -> Refusal:
    """Kilo-Org/kilocode#10375, anomalyco/opencode#6648."""
    place = f"body.{name}" if n is None else f"messages.{n}.assistant.{name}"
    return 400, {
        "message": f"{place}: property '{place}' is unsupported",
        "type": "invalid_request_error",
        "param": "validation_error",
        "code": "wrong_api_format",
    }


def mistral(name: str, n: int | None) -> Refusal:
    """partITech/php-mistral#76."""
    place = ["body", name] if n is None else ["body", "messages", n, "assistant", name]
    problem = {"type": "extra_forbidden", "loc": place, "msg": "Extra inputs are not permitted"}
    return 422, {
        "object": "error",
        "message": {"detail": [{**problem, "input": "..."}]},
        "type": "invalid_request_error",
        "code": None,
    }


def gemini(name: str, n: int | None) -> Refusal:
    """The endpoint answers with a list."""
    where = "" if n is None else f" at 'messages[{n}]'"
    message = f'Invalid JSON payload received. Unknown name "{name}"{where}: Cannot find field.'
    return 400, [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]


def anything(name: str, n: int | None) -> Refusal:
    raise AssertionError("this endpoint ignores what it does not know")


@dataclass(frozen=True)
class Profile:
    """The habits of one endpoint. What is None is not looked at."""

    name: str
    words: Words = anything
    body_fields: frozenset[str] | None = None
    message_fields: frozenset[str] | None = None
    efforts: Sequence[str] | None = None
    # What is said of messages in an order that is not taken.
    order: Callable[[list[Body]], Refusal | None] = lambda messages: None
    # How it sends thoughts.
    thoughts: Literal["reasoning_content", "reasoning", "details", "parts", "marks", "none"] = (
        "none"
    )
    # What it numbers its calls by; with "none" it leaves the index out.
    index: Literal["each", "zero", "none"] = "each"
    # Whether it sends a call in one event, or in pieces.
    is_whole: bool = False
    comments: bytes = b""
    extra: Body = field(default_factory=dict)
    # Whether every call must come back signed.
    signs: bool = False
    counts_unasked: bool = False
    # Whether its template writes system messages only at the beginning, and loses others.
    loses_later_system: bool = False
    # The entry of its list of models, and what else it answers, by path.
    about: Body = field(default_factory=dict)
    pages: dict[str, Body] = field(default_factory=dict)


def beginning_only(messages: list[Body]) -> Refusal | None:
    """Qwen's templates since 3.5, as vLLM reports them."""
    roles = [one["role"] for one in messages]
    if "system" in roles[1:]:
        return openai_error("System message must be at the beginning.", code=400)
    if "user" not in roles:
        return openai_error("No user query found in messages.", code=400)
    return None


def strictly_ordered(messages: list[Body]) -> Refusal | None:
    """Mistral's API: NousResearch/hermes-agent#20154, charmbracelet/crush#279."""
    roles = [str(one["role"]) for one in messages]
    for before, role in pairwise(roles):
        if (role == "system" and before != "system") or (before, role) == ("tool", "user"):
            message = f"Unexpected role '{role}' after role '{before}'"
            return 400, {"object": "error", "message": message, "code": "3230"}
    return None


def taking_turns(messages: list[Body]) -> Refusal | None:
    """Mistral's templates in llama.cpp, which answers with status 500 where a template raises."""
    spoken = [one["role"] for one in messages if one["role"] != "tool" and "tool_calls" not in one]
    spoken = spoken[1:] if spoken[:1] == ["system"] else spoken
    for n, role in enumerate(spoken):
        if role != ("user", "assistant")[n % 2]:
            message = "Jinja Exception: conversation roles must alternate user/assistant"
            return openai_error(message, 500, code=500, type="server_error")
    return None


def with_thoughts(messages: list[Body]) -> Refusal | None:
    """DeepSeek's API, and Kimi's."""
    for one in messages:
        if one.get("tool_calls") and not one.get("reasoning_content"):
            return openai_error(
                "The `reasoning_content` in the thinking mode must be passed back to the API."
            )
    return None


DEEPSEEK = Profile(
    "deepseek",
    thoughts="reasoning_content",
    order=with_thoughts,
    about={"id": "m", "object": "model", "owned_by": "deepseek"},
)
OLLAMA = Profile(
    "ollama",
    thoughts="reasoning",
    index="zero",  # ollama/ollama#15457
    is_whole=True,
    efforts=("high", "medium", "low", "max", "none"),  # ollama/ollama#17141
    counts_unasked=False,
    about={"id": "m", "object": "model", "owned_by": "library"},
    pages={
        "/api/ps": {"models": [{"name": "m:latest", "model": "m:latest", "context_length": 8_192}]},
        "/api/show": {
            "capabilities": ["completion", "tools", "thinking", "vision"],
            "model_info": {"general.architecture": "q", "q.context_length": 262_144},
        },
    },
)
LM_STUDIO = Profile(
    "lm_studio",
    thoughts="marks",
    about={"id": "m", "object": "model", "owned_by": "organization_owner"},
    pages={
        "/api/v0/models": {
            "data": [
                {
                    "id": "m",
                    "type": "vlm",
                    "max_context_length": 131_072,
                    "loaded_context_length": 8_192,
                }
            ]
        }
    },
)
LLAMA_SERVER = Profile(
    "llama_server",
    thoughts="reasoning_content",
    order=taking_turns,
    about={"id": "m", "object": "model", "owned_by": "llamacpp", "meta": {"n_ctx_train": 40_960}},
    pages={
        "/props": {
            "default_generation_settings": {"n_ctx": 16_384},
            "modalities": {"vision": False, "audio": False},
        },
        "/apply-template": {"prompt": "..."},
        "/tokenize": {"tokens": [7] * 4321},
    },
)
VLLM = Profile(
    "vllm",
    thoughts="reasoning",
    order=beginning_only,
    about={"id": "m", "object": "model", "owned_by": "vllm", "max_model_len": 32_768},
    pages={"/tokenize": {"count": 4321, "max_model_len": 32_768, "tokens": [], "token_strs": None}},
)
GROQ = Profile(
    "groq",
    groq,
    BODY_FIELDS | {"stream_options", "reasoning_effort", "seed"},
    MESSAGE_FIELDS,
    efforts=("low", "medium", "high"),
    thoughts="reasoning",  # and refused on the way back: karthink/gptel#774
    about={"id": "m", "object": "model", "owned_by": "OpenAI", "context_window": 131_072},
)
CEREBRAS = Profile(
    "cerebras",
    cerebras,
    BODY_FIELDS | {"stream_options", "reasoning_effort", "seed"},
    MESSAGE_FIELDS | {"reasoning"},  # QwenLM/qwen-code#11045
    efforts=("low", "medium", "high"),
    thoughts="reasoning",
    about={"id": "m", "object": "model", "owned_by": "Cerebras"},
)
MISTRAL = Profile(
    "mistral",
    mistral,
    BODY_FIELDS | {"random_seed"},
    MESSAGE_FIELDS,
    order=strictly_ordered,
    thoughts="parts",
    is_whole=True,
    counts_unasked=True,
    about={
        "id": "m",
        "object": "model",
        "owned_by": "mistralai",
        "max_context_length": 131_072,
        "capabilities": {"vision": True},
    },
)
OPENROUTER = Profile(
    "openrouter",
    thoughts="details",
    comments=b": OPENROUTER PROCESSING\n\n",
    extra={"error": None, "provider": "Somebody"},
    about={
        "id": "m",
        "context_length": 200_000,
        "architecture": {"input_modalities": ["text", "image"]},
    },
)
GEMINI = Profile(
    "gemini",
    gemini,
    BODY_FIELDS | {"stream_options", "reasoning_effort"},
    index="none",  # noho/dayu-agent#45
    is_whole=True,
    signs=True,
    about={"id": "models/m", "object": "model", "owned_by": "google"},
)
PROFILES = (
    OLLAMA, LM_STUDIO, LLAMA_SERVER, VLLM, GROQ, CEREBRAS, MISTRAL, OPENROUTER, GEMINI, DEEPSEEK,
)  # fmt: skip


@dataclass
class FakeEndpoint(Fake):
    """A server with the habits of this profile."""

    profile: Profile = VLLM

    def routes(self) -> list[web.RouteDef]:
        pages = [web.route("*", path, self._page) for path in self.profile.pages]
        return [
            web.post("/v1/chat/completions", self._completions),
            web.get("/v1/models", self._models),
            *pages,
        ]

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [self.profile.about]})

    async def _page(self, request: web.Request) -> web.Response:
        page = self.profile.pages[request.path]
        if "prompt" in page or "token_strs" in page:
            messages: Any = (await request.json())["messages"]
            shown = [one["content"] for n, one in enumerate(messages) if self._shows(n, one)]
            is_text = "prompt" in page
            page = {**page, **({"prompt": " ".join(shown)} if is_text else {"token_strs": shown})}
        return web.json_response(page)

    def _shows(self, n: int, message: Body) -> bool:
        return n == 0 or message["role"] != "system" or not self.profile.loses_later_system

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body: Any = await self.body_of(request)
        refusal = self._refusal(body)
        if refusal is not None:
            return web.json_response(refusal[1], status=refusal[0])
        response = await self.begin(request)
        if self.profile.comments:
            await response.write(self.profile.comments)
        for one in self._answer(body):
            await response.write(event({**one, **self.profile.extra}))
        await response.write(DONE)
        return response

    def _refusal(self, body: Any) -> Refusal | None:
        profile = self.profile
        unknown = body.keys() - profile.body_fields if profile.body_fields else ()
        for name in sorted(unknown):
            return profile.words(name, None)
        for n, message in enumerate(body["messages"]):
            known = profile.message_fields
            if known is not None and (others := message.keys() - known):
                return profile.words(min(others), n)
            if profile.signs and _is_unsigned(message):
                return gemini_unsigned()
        effort = body.get("reasoning_effort", "low")
        if profile.efforts is not None and effort not in profile.efforts:
            if profile.name == "ollama":
                allowed = ", ".join(f'"{one}"' for one in profile.efforts)
                return openai_error(f"invalid reasoning value: '{effort}' (must be {allowed})")
            return openai_error(f"`reasoning_effort` must be one of {profile.efforts}")
        return profile.order(body["messages"])

    def _answer(self, body: Any) -> list[Body]:
        last = body["messages"][-1]
        asked = str(last["content"])
        if last["role"] == "tool":
            said = [delta(content="It is"), delta(content=" 18 C.")]
        elif "weather" in asked and body.get("tools"):
            calls = CALLS if "Rome" in asked else CALLS[:1]
            said = self._thoughts("") + self._calls(calls)
        else:
            said = self._thoughts("Hello.")
        ended: Body = {"choices": [choice({}, "stop")]}
        options = body.get("stream_options", {})
        counts = options.get("include_usage") or self.profile.counts_unasked
        counted = usage(len(json.dumps(body["messages"])) // 4, 7)
        return [*said, ended, *([counted] if counts else [])]

    def _thoughts(self, text: str) -> list[Body]:
        said = [delta(content=text)] if text else []
        half, rest = THOUGHT[:9], THOUGHT[9:]
        match self.profile.thoughts:
            case "reasoning" | "reasoning_content" as name:
                return [delta(**{name: half}), delta(**{name: rest}), *said]
            case "details":
                parts = [
                    {"type": "reasoning.text", "text": one, "index": 0} for one in (half, rest)
                ]
                return [*(delta(reasoning_details=[one]) for one in parts), *said]
            case "parts":
                thinking = [
                    {"type": "thinking", "thinking": [{"type": "text", "text": one}]}
                    for one in (half, rest)
                ]
                said = [delta(content=[{"type": "text", "text": text}])] if text else []
                return [*(delta(content=[one]) for one in thinking), *said]
            case "marks":
                pieces = ["<th", "ink>\n", half, rest + "\n</thi", "nk>\n\n"]
                return [*(delta(content=one) for one in pieces), *said]
            case "none":
                return said

    def _calls(self, calls: Sequence[tuple[str, str]]) -> list[Body]:
        events: list[Body] = []
        for n, (city, id) in enumerate(calls):
            arguments = json.dumps({"city": city})
            head: Body = {"each": {"index": n}, "zero": {"index": 0}, "none": {}}[
                self.profile.index
            ]
            call = {**head, "id": id, "type": "function"}
            if self.profile.signs:
                call["extra_content"] = {"google": {"thought_signature": "abc"}}
            cut = len(arguments) if self.profile.is_whole else 5
            first = {**call, "function": {"name": "weather", "arguments": arguments[:cut]}}
            events.append(delta(tool_calls=[first]))
            if rest := arguments[cut:]:
                events.append(delta(tool_calls=[{**head, "function": {"arguments": rest}}]))
        return events


def _is_unsigned(message: Body) -> bool:
    calls: Any = message.get("tool_calls") or []
    return bool(calls) and "extra_content" not in calls[0]


def gemini_unsigned() -> Refusal:
    message = "Function call is missing a thought_signature in functionCall parts."
    return 400, [{"error": {"code": 400, "message": message, "status": "INVALID_ARGUMENT"}}]
