"""What is a model's chat template, and what does it write?

In: the model's own files, a GGUF or a tokenizer folder. Out: its `ChatTemplate`, if it has a template; and a
conversation as the template writes it. Templates (Jinja) are run in a sandbox.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

import msgspec

from segue.errors import InvalidRequest, ServerFault
from segue.seams.model import template_values
from segue.vocabularies.gguf import is_gguf, read_gguf
from segue.wire.requests import Effort

# A conversation as chat templates take it.
Chat = list[dict[str, object]]
T = TypeVar("T")
# Around what the model writes: some templates mark it for training.
GENERATION = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
NO_VALUES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, and the two tokens that it may ask for by name."""

    text: str
    begin: str = ""
    end: str = ""
    # Another template, for conversations without tools.
    plain: str = ""
    # The ids with which the model ends its turn, by its other files.
    ends: tuple[int, ...] = ()
    # The values it gets besides the conversation, the same for every request.
    values: Mapping[str, object] = field(default_factory=dict)
    # How the model declares its answers, in the form of transformers' `response_template`.
    answers: object = None


class _Token(msgspec.Struct):
    content: str = ""


class _Config(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None
    response_template: object = None


class _Generation(msgspec.Struct):
    """What is read of `generation_config.json`."""

    eos_token_id: int | list[int] | None = None


def template_in(
    path: Path, text: str = "", values: Mapping[str, object] = NO_VALUES
) -> ChatTemplate | None:
    """The chat template of a model, or this text in its place; None if there is neither."""
    template = _template_in_gguf(path) if is_gguf(path) else _template_in_folder(path)
    if text:
        template = replace(template, text=text, plain="")
    template = replace(template, values=values)
    return template if template.text else None


def _template_in_gguf(path: Path) -> ChatTemplate:
    head = read_gguf(path)
    plain, tools = (head.get(f"tokenizer.chat_template{name}") for name in ("", ".tool_use"))
    tokens = head.get("tokenizer.ggml.tokens")
    ids = [head.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot", "eom")]

    def named(id: object) -> str:
        token = tokens[id] if isinstance(tokens, list) and isinstance(id, int) else ""
        return token if isinstance(token, str) else ""

    usual = plain if isinstance(plain, str) else ""
    text = tools if isinstance(tools, str) else usual
    ends = tuple(id for id in ids[1:] if isinstance(id, int))
    return ChatTemplate(text, named(ids[0]), named(ids[1]), usual, ends)


def _template_in_folder(path: Path) -> ChatTemplate:
    folder = path if path.is_dir() else path.parent
    own = folder / "chat_template.jinja"
    config = decoded(folder / "tokenizer_config.json", _Config)
    ended = decoded(folder / "generation_config.json", _Generation).eos_token_id
    try:
        text = own.read_text() if own.is_file() else config.chat_template
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{own.name} cannot be read: {wrong}") from wrong
    plain = ""
    if isinstance(text, list):
        # Several templates by name: one for conversations with tools, one for all others.
        named = {entry.get("name", ""): entry.get("template", "") for entry in text}
        plain = named.get("default", "")
        text = named.get("tool_use") or plain
    begin = _text(config.bos_token)
    end = _text(config.eos_token)
    ends = ended if isinstance(ended, list) else [] if ended is None else [ended]
    answers = config.response_template
    return ChatTemplate(text or "", begin, end, plain, tuple(ends), answers=answers)


def decoded(file: Path, kind: type[T]) -> T:
    """What a file says; nothing if there is no such file."""
    try:
        return msgspec.json.decode(file.read_bytes() if file.is_file() else b"{}", type=kind)
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read: {wrong}") from wrong


def _text(token: str | _Token | None) -> str:
    return token.content if isinstance(token, _Token) else token or ""


# --- running it -----------------------------------------------------------------------------------


class TemplateRunner:
    """Runs a chat template as the usual libraries do. Needs the optional package `jinja2`."""

    def __init__(self, template: ChatTemplate, *, is_limited: bool = False) -> None:
        """`is_limited`: a run that takes too many steps or makes too long a text is refused."""
        try:
            sandbox = import_module("jinja2.sandbox")
        except ImportError as missing:
            raise ServerFault(
                "To run this model's chat template, `pip install jinja2`."
            ) from missing
        # Templates may build lists of their own; what they are given is made anew for every run.
        made = sandbox.SandboxedEnvironment
        if is_limited:
            made = import_module("segue.vocabularies.template_limits").LimitedEnvironment
        environment = made(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self._limits = environment if is_limited else None
        self._names = {"bos_token": template.begin, "eos_token": template.end}
        self._values = template.values
        self._told: dict[Effort | None, dict[str, object]] = {}
        try:
            self._run = environment.from_string(_without_generation(template.text)).render
            plain = _without_generation(template.plain)
            self._run_plain = environment.from_string(plain).render if plain else self._run
        except Exception as wrong:
            raise ServerFault(f"The model's chat template cannot be read: {wrong}") from wrong
        # Some count on a list.
        self._no_tools: list[object] | None = None
        if not self._is_taken({}):
            self._no_tools = []

    def run(
        self,
        messages: Chat,
        tools: object,
        root_at: int,
        *,
        is_cued: bool,
        effort: Effort | None = None,
    ) -> str:
        """The conversation as text. A template may refuse it, for example where roles do not alternate."""
        told = self._told.get(effort)
        if told is None:
            told = self._told[effort] = self._accepted(template_values(self._values, effort))
        told = {
            **told,
            "messages": messages,
            "tools": tools or self._no_tools,
            "add_generation_prompt": is_cued,
            "strftime_now": _clock_at(root_at),
        }
        is_plain = not tools and not any("tool_calls" in message for message in messages)
        return self._written(self._run_plain if is_plain else self._run, told)

    def _accepted(self, told: dict[str, object]) -> dict[str, object]:
        """These values; without the effort where the template refuses it: some know two or three."""
        if self._is_taken(told):
            return told
        return {name: value for name, value in told.items() if name != "reasoning_effort"}

    def _is_taken(self, told: dict[str, object]) -> bool:
        probe: Chat = [{"role": "user", "content": "Hi"}]
        told = {
            **told,
            "messages": probe,
            "tools": self._no_tools,
            "add_generation_prompt": True,
            "strftime_now": _clock_at(0),
        }
        try:
            self._written(self._run_plain, told)
        except InvalidRequest:
            return False
        return True

    def _written(self, run: Callable[[Mapping[str, object]], str], told: dict[str, object]) -> str:
        if self._limits is not None:
            self._limits.steps = 0
        try:
            return run({**told, **self._names})
        except Exception as wrong:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {wrong}", param="input"
            ) from wrong


def _clock_at(seconds: int) -> Callable[[str], str]:
    return datetime.fromtimestamp(seconds, UTC).strftime


def _without_generation(text: str) -> str:
    """The template with a block of the language itself where it marks what the model writes."""
    return GENERATION.sub(lambda tag: f"{tag[1]}{'endif' if tag[2] else 'if true'}{tag[3]}", text)


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
        default=list,
    )


def _refuse(why: str) -> str:
    raise ValueError(why)
