"""Which dialect does this model speak?

In: the model's own files, a GGUF or a tokenizer folder, and its vocabulary. Out: a dialect. The special tokens say
which families it can be; then each of them writes a few small conversations, and the one that writes them as the
model's own template does is it. A model whose template nobody writes gets the dialect that runs the template itself.
A model without a template is believed by its special tokens alone, and where these say nothing, it is refused in words.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path

import msgspec

from segue.dialects.chatml import FAMILIES as CHATML_FAMILIES
from segue.dialects.chatml import ChatmlDialect, Family
from segue.dialects.gguf import read_gguf
from segue.dialects.harmony import HarmonyDialect
from segue.dialects.llama3 import Llama3Dialect
from segue.dialects.mistral import FORMAT, MistralDialect
from segue.dialects.offers import definition_of
from segue.dialects.template import Chat, Template, TemplateDialect, TemplateRunner
from segue.dialects.vocabulary import TEKKEN, Vocabulary
from segue.errors import InvalidRequest, ServerFault
from segue.turn.seams import Dialect
from segue.turn.values import Head, Scene, Tokens
from segue.wire.items import Item, ItemValue
from segue.wire.tools import FunctionTool, Tools, offers_of

Maker = Callable[[Vocabulary], Dialect]


def _chatml(family: Family) -> Maker:
    return lambda vocabulary: ChatmlDialect(vocabulary, family)


CHATML = ("<|im_start|>", "<|im_end|>")
LLAMA3 = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
MISTRAL = ("[SYSTEM_PROMPT]", "[INST]", "[TOOL_RESULTS]", "[TOOL_CALLS]", "[ARGS]", "[THINK]")
HARMONY = ("<|start|>", "<|channel|>", "<|message|>", "<|call|>", "<|return|>")
# (the special tokens of a family, and who may be it; the first one is believed where there is no template)
FAMILIES: tuple[tuple[tuple[str, ...], tuple[Maker, ...]], ...] = (
    (CHATML, tuple(map(_chatml, CHATML_FAMILIES.values()))),
    (LLAMA3, (Llama3Dialect,)),
    (MISTRAL, (MistralDialect,)),
)


class _TekkenConfig(msgspec.Struct):
    version: str = ""


class _Tekken(msgspec.Struct):
    config: _TekkenConfig


class _Token(msgspec.Struct):
    content: str = ""


class _Config(msgspec.Struct):
    chat_template: str | list[dict[str, str]] | None = None
    bos_token: str | _Token | None = None
    eos_token: str | _Token | None = None


def choose(path: Path, vocabulary: Vocabulary) -> Dialect:
    """The dialect of the model in this GGUF or tokenizer folder, or a refusal in words."""
    template = template_in(path)
    if all(vocabulary.has_special(mark) for mark in HARMONY):
        # Its template calls functions of its own, and differs from what the model was trained on in small things.
        return HarmonyDialect(vocabulary)
    candidates = [
        make
        for marks, makers in FAMILIES
        if all(vocabulary.has_special(mark) for mark in marks)
        for make in makers
    ]
    if template is None:
        if candidates and (candidates[0] is not MistralDialect or _is_format_known(path)):
            return candidates[0](vocabulary)
        raise ServerFault(
            f"{path.name} has no chat template, and its special tokens are those of no family that is known here. "
            "Name a dialect with --dialect, or give a tokenizer folder with a template."
        )
    if find_spec("jinja2") is None:
        raise ServerFault(
            "To find out how this model writes, `pip install jinja2`, or name a dialect with --dialect."
        )
    runner = TemplateRunner(template)
    if MistralDialect in candidates:
        candidates.append(_mistral(runner))
    for make in candidates:
        dialect = make(vocabulary)
        probes = _probes(template.text)
        if all(_is_alike(dialect, vocabulary, runner, *probe) for probe in probes):
            return dialect
    return TemplateDialect(vocabulary, template)


def _is_format_known(path: Path) -> bool:
    """Whether Mistral's own file, where there is one, is of the format that is written here."""
    file = (path if path.is_dir() else path.parent) / TEKKEN
    if not file.is_file():
        return True
    return msgspec.json.decode(file.read_bytes(), type=_Tekken).config.version == FORMAT


def _mistral(runner: TemplateRunner) -> Maker:
    """The dialect with what this template says where nobody else instructs the model."""
    try:
        told = runner.run([{"role": "user", "content": "Hi"}], None, PROBED_AT, is_cued=True)
    except InvalidRequest:
        told = ""
    found = re.search(r"\[SYSTEM_PROMPT\](.*)\[/SYSTEM_PROMPT\]", told, re.DOTALL)
    return lambda vocabulary: MistralDialect(vocabulary, found[1] if found else "")


# --- the model's own files ------------------------------------------------------------------------


def template_in(path: Path) -> Template | None:
    """The chat template of a model; None if it has none."""
    return _template_in_gguf(path) if path.suffix == ".gguf" else _template_in_folder(path)


def _template_in_gguf(path: Path) -> Template | None:
    head = read_gguf(path)
    text = head.get("tokenizer.chat_template")
    if not isinstance(text, str):
        return None
    tokens = head.get("tokenizer.ggml.tokens")

    def named(key: str) -> str:
        id = head.get(f"tokenizer.ggml.{key}_token_id")
        found = tokens[id] if isinstance(tokens, list) and isinstance(id, int) else ""
        return found if isinstance(found, str) else ""

    return Template(text, named("bos"), named("eos"))


def _template_in_folder(path: Path) -> Template | None:
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
        # Several templates by name; the one that knows tools can do more.
        named = {one.get("name", ""): one.get("template", "") for one in text}
        text = named.get("tool_use") or named.get("default")
    return Template(text, _text(config.bos_token), _text(config.eos_token)) if text else None


def _text(token: str | _Token | None) -> str:
    return token.content if isinstance(token, _Token) else token or ""


# --- small conversations --------------------------------------------------------------------------


def _item(**fields: object) -> Item:
    raw = msgspec.json.encode(fields)
    return Item(raw, msgspec.json.decode(raw, type=ItemValue))


def _parsed(role: str, text: str) -> Item:
    return _item(type="message", role=role, content=text)


# A day with a name that no template has built in.
PROBED_AT = 1_000_000_000
TOOL = FunctionTool(
    name="look",
    description="Looks.",
    parameters=msgspec.Raw(b'{"type": "object", "properties": {"q": {"type": "string"}}}'),
)
CALLED = (
    _item(type="function_call", call_id="c", name="look", arguments='{"q": "x"}'),
    _item(type="function_call_output", call_id="c", output="1"),
)
TOLD_CALL: Chat = [
    {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "look", "arguments": {"q": "x"}}}],
    },
    {"role": "tool", "content": "1"},
]
THOUGHT = {"type": "reasoning_text", "text": "Hm."}


def _probes(template: str) -> list[tuple[Head, list[Item], Chat]]:
    """Small conversations, as items and as chat messages, with what this template has a place for."""
    spoken: Chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "So?"},
    ]
    items = [_parsed(str(one["role"]), str(one["content"])) for one in spoken]
    probes: list[tuple[Head, list[Item], Chat]] = [
        (Head(), items, spoken),
        (Head(instructions="Be."), items, [{"role": "system", "content": "Be."}, *spoken]),
    ]
    if "tools" in template:
        tools = Tools(b"probe", (TOOL,), b"", offers_of((TOOL,)))
        probes.append((Head(tools=tools), [*items, *CALLED], [*spoken, *TOLD_CALL]))
    if "reasoning_content" in template:
        thought = _item(type="reasoning", summary=[], content=[THOUGHT])
        told = {**spoken[1], "reasoning_content": THOUGHT["text"]}
        probes.append((Head(), [items[0], thought, *items[1:]], [spoken[0], told, spoken[2]]))
    return probes


def _is_alike(
    dialect: Dialect,
    vocabulary: Vocabulary,
    runner: TemplateRunner,
    head: Head,
    items: Sequence[Item],
    chat: Chat,
) -> bool:
    tools = [definition_of(offer) for offer in head.tools.offers] or None
    try:
        expected = runner.run(chat, tools, PROBED_AT, is_cued=True)
    except InvalidRequest:
        return False
    prompt = dialect.render(Scene(head, None, tuple(items), root_at=PROBED_AT)).prompt
    assert isinstance(prompt, Tokens)
    names = {vocabulary.special(text): text.encode() for text in vocabulary.specials}
    return b"".join(names.get(id) or vocabulary.bytes_of(id) for id in prompt.flat()) == (
        expected.encode()
    )
