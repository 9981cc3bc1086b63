"""What is a model's chat template, and what does it write?

In: the model's own files, a GGUF or a tokenizer folder. Out: its `ChatTemplate`, if it has a template; and a
conversation as the template writes it. Templates (Jinja) are run in a sandbox.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib import import_module
from pathlib import Path
from types import MappingProxyType

import msgspec

from segue.errors import InvalidRequest, ServerFault
from segue.vocabularies.gguf import read_gguf
from segue.wire.requests import Effort, template_values

# A conversation as chat templates take it.
Chat = list[dict[str, object]]
NO_VALUES: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class ChatTemplate:
    """A chat template, and the two tokens that it may ask for by name."""

    text: str
    begin: str = ""
    end: str = ""
    # What it is told besides the conversation, whatever a request says.
    values: Mapping[str, object] = field(default_factory=dict)


class _Token(msgspec.Struct):
    content: str = ""


class _Config(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


def template_in(
    path: Path, text: str = "", values: Mapping[str, object] = NO_VALUES
) -> ChatTemplate | None:
    """The chat template of a model, or this text in its place; None if there is neither."""
    found = _template_in_gguf(path) if path.suffix == ".gguf" else _template_in_folder(path)
    found = replace(found, text=text or found.text, values=values)
    return found if found.text else None


def _template_in_gguf(path: Path) -> ChatTemplate:
    head = read_gguf(path)
    text = head.get("tokenizer.chat_template")
    tokens = head.get("tokenizer.ggml.tokens")

    def named(key: str) -> str:
        id = head.get(f"tokenizer.ggml.{key}_token_id")
        found = tokens[id] if isinstance(tokens, list) and isinstance(id, int) else ""
        return found if isinstance(found, str) else ""

    return ChatTemplate(text if isinstance(text, str) else "", named("bos"), named("eos"))


def _template_in_folder(path: Path) -> ChatTemplate:
    folder = path if path.is_dir() else path.parent
    file, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    try:
        config = _Config()
        if file.is_file():
            config = msgspec.json.decode(file.read_bytes(), type=_Config)
        text = own.read_text() if own.is_file() else config.chat_template
    except (OSError, ValueError) as wrong:
        raise ServerFault(f"{file.name} cannot be read: {wrong}") from wrong
    if isinstance(text, list):
        # Several templates by name; the template that knows tools can do more.
        named = {entry.get("name", ""): entry.get("template", "") for entry in text}
        text = named.get("tool_use") or named.get("default")
    return ChatTemplate(text or "", _text(config.bos_token), _text(config.eos_token))


def _text(token: str | _Token | None) -> str:
    return token.content if isinstance(token, _Token) else token or ""


# --- running it -----------------------------------------------------------------------------------


class TemplateRunner:
    """Runs a chat template as the usual libraries do. Needs the optional package `jinja2`."""

    def __init__(self, template: ChatTemplate) -> None:
        try:
            sandbox = import_module("jinja2.sandbox")
        except ImportError as missing:
            raise ServerFault(
                "To run this model's chat template, `pip install jinja2`."
            ) from missing
        environment = sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _refuse
        self._names = {"bos_token": template.begin, "eos_token": template.end}
        self._values = template.values
        try:
            self._run = environment.from_string(template.text).render
        except Exception as wrong:
            raise ServerFault(f"The model's chat template cannot be read: {wrong}") from wrong

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
        told = {
            **template_values(self._values, effort),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": is_cued,
            "strftime_now": datetime.fromtimestamp(root_at, UTC).strftime,
            **self._names,
        }
        try:
            found: str = self._run(told)
        except Exception as wrong:
            raise InvalidRequest(
                f"The model's chat template refuses this conversation: {wrong}", param="input"
            ) from wrong
        return found


def _tojson(value: object, indent: int | None = None, **_: object) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _refuse(why: str) -> str:
    raise ValueError(why)
