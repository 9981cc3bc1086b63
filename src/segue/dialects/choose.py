"""Which dialect does this model speak?

In: a name from the settings, the model's own files (a GGUF or a tokenizer folder) and its vocabulary. Out: a dialect.
For "auto" the special tokens say which families a model can belong to. Each of these writes a few small conversations,
and the family that writes them as the model's own template does is chosen. If there is none, the template itself is
run. A model without a template is known by its `config.json` (DeepSeek) or else by its special tokens alone; if no
family has them, it is refused.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import msgspec

from segue.derivation.family import DerivedFamily
from segue.dialects.chatml import PLAIN, QWEN2, QWEN2_CODER, QWEN3, SMOLLM2
from segue.dialects.deepseek import ROLES, TEMPLATES, deepseek_dialect, name_of
from segue.dialects.family import Family, TokenDialect
from segue.dialects.harmony import HARMONY
from segue.dialects.llama3 import LLAMA3
from segue.dialects.mistral import MISTRAL
from segue.dialects.template import template_dialect
from segue.errors import InvalidRequest, Misconfigured, ServerFault
from segue.readers.offers import definition_of
from segue.seams.model import Scene
from segue.seams.prompt import Head, Tokens
from segue.vocabularies.chat_template import (
    NO_VALUES,
    Chat,
    ChatTemplate,
    TemplateRunner,
    template_in,
)
from segue.vocabularies.images import placeholder_of
from segue.vocabularies.vocabulary import Vocabulary
from segue.wire.items import Item, ItemValue
from segue.wire.tools import FunctionTool, Tools, offers_of

# Every family. Where a name has variants, only the model's template can tell them apart, so that the name alone means
# the first. Of several families with the same special tokens, the first is taken where a model has no template.
FAMILIES = (PLAIN, SMOLLM2, QWEN2, QWEN2_CODER, QWEN3, LLAMA3, MISTRAL, HARMONY)


def dialect_for(
    name: str,
    path: Path,
    vocabulary: Vocabulary,
    text: str = "",
    values: Mapping[str, object] = NO_VALUES,
) -> TokenDialect:
    """The dialect with this name, for the model in this GGUF or tokenizer folder; `text` is a template instead of the
    model's own, `values` what templates get besides the messages."""
    match name:
        case "auto":
            return choose(path, vocabulary, text, values)
        case "template":
            template = template_in(path, text, values)
            if template is None:
                raise Misconfigured(
                    f"dialect: there is no chat template in {path}. Name a file with --template, "
                    "or another --dialect."
                )
            return _noting_tools(template_dialect(vocabulary, template), template)
        case "derived":
            return derived_dialect(path, vocabulary, text, values)
        case _ if text:
            raise Misconfigured(f"template: dialect '{name}' runs no template. Leave one out.")
        case _ if name in TEMPLATES:
            return deepseek_dialect(name, path, vocabulary, values)
        case _:
            family = next(family for family in FAMILIES if family.name == name)
            return TokenDialect(family, vocabulary)


def derived_dialect(
    path: Path,
    vocabulary: Vocabulary,
    text: str = "",
    values: Mapping[str, object] = NO_VALUES,
    written: DerivedFamily | None = None,
) -> TokenDialect:
    """The dialect of a model by its template alone, without the tables of families and formats: as it is `written` in a
    file, or worked out."""
    template = template_in(path, text, values)
    if template is None:
        raise Misconfigured(
            f"dialect: there is no chat template in {path} to work it out from. Name a file with --template."
        )
    vocabulary = vocabulary.protecting(template.text)
    dialect = template_dialect(vocabulary, template, "derived", written=written, is_derived=True)
    return _noting_tools(dialect, template)


def choose(
    path: Path,
    vocabulary: Vocabulary,
    text: str = "",
    values: Mapping[str, object] = NO_VALUES,
) -> TokenDialect:
    """The dialect of the model in this GGUF or tokenizer folder; `ServerFault` if there is none."""
    template = template_in(path, text, values)
    vocabulary = vocabulary.protecting(template.text if template else "")
    has_all = vocabulary.specials.issuperset
    candidates = [family for family in FAMILIES if has_all(family.specials)]
    by_tokens = [family for family in candidates if family.is_known_by_tokens]
    if by_tokens and not text:
        return TokenDialect(by_tokens[0], vocabulary)
    if template is not None:
        return _noting_tools(_by_template(template, candidates, vocabulary), template)
    if (name := name_of(path)) is not None:
        return deepseek_dialect(name, path, vocabulary, values)
    if candidates and candidates[0].is_format_known(path):
        return TokenDialect(candidates[0], vocabulary)
    if vocabulary.specials.issuperset(ROLES):
        raise ServerFault(
            f"dialect: {path.name} has no chat template. deepseek-v3.2 and deepseek-v4 are known by the config.json "
            "beside the tokenizer, and otherwise only by name: --dialect. For another model name --template FILE.jinja."
        )
    raise ServerFault(
        f"chat template: {path.name} has no chat template, and its special tokens are those of no known model family. "
        "It looks like a base model, which only continues text: the instruct version of a model has a template. "
        "Use that, or name a template of the same family (--template FILE.jinja) or its chat format (--dialect)."
    )


def _noting_tools(dialect: TokenDialect, template: ChatTemplate) -> TokenDialect:
    dialect.lacks_tools = "tools" not in template.text
    return dialect


def _by_template(
    template: ChatTemplate, candidates: Sequence[Family], vocabulary: Vocabulary
) -> TokenDialect:
    """The first candidate that writes what the template writes, else the template itself; no family writes images."""
    if find_spec("jinja2") is None:
        raise ServerFault(
            "To find out how this model writes, `pip install jinja2`, or name a dialect with --dialect."
        )
    runner = TemplateRunner(template)
    probes = _probes(template.text)
    for family in () if placeholder_of(runner) else _variants(candidates, runner):
        dialect = TokenDialect(family, vocabulary)
        if all(_is_alike(dialect, vocabulary, runner, probe) for probe in probes):
            return dialect
    return template_dialect(vocabulary, template)


def _variants(candidates: Sequence[Family], runner: TemplateRunner) -> Iterator[Family]:
    """The candidates, then those that can take over the template's default system text."""
    yield from candidates
    for family in candidates:
        if family.with_prompt is not None:
            shortest = _prompt(runner, [{"role": "user", "content": "Hi"}])
            yield family.with_prompt(shortest or "")


def _prompt(runner: TemplateRunner, chat: Chat, tools: object = None) -> str | None:
    try:
        return runner.run(chat, tools, PROBED_AT, is_cued=True)
    except InvalidRequest:
        return None


# --- small conversations --------------------------------------------------------------------------


def _item(**fields: object) -> Item:
    raw = msgspec.json.encode(fields)
    return Item(raw, msgspec.json.decode(raw, type=ItemValue))


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
CALL_IN_CHAT = {"function": {"name": "look", "arguments": {"q": "x"}}}
CALLED_IN_CHAT: Chat = [
    {"role": "assistant", "content": "", "tool_calls": [CALL_IN_CHAT]},
    {"role": "tool", "content": "1"},
]
THOUGHT = {"type": "reasoning_text", "text": "Hm."}


class _Probe(NamedTuple):
    """A small conversation, as items and as chat messages."""

    head: Head
    items: Sequence[Item]
    chat: Chat


def _probes(template: str) -> list[_Probe]:
    """Small conversations with what this template has a place for."""
    spoken: Chat = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "Hello."},
        {"role": "user", "content": "So?"},
    ]
    items = [_item(type="message", **said) for said in spoken]
    probes = [
        _Probe(Head(), items, spoken),
        _Probe(Head(instructions="Be."), items, [{"role": "system", "content": "Be."}, *spoken]),
    ]
    if "tools" in template:
        tools = Tools(b"probe", (TOOL,), b"", offers_of((TOOL,)))
        probes.append(_Probe(Head(tools=tools), [*items, *CALLED], [*spoken, *CALLED_IN_CHAT]))
    if "reasoning_content" in template:
        thought = _item(type="reasoning", summary=[], content=[THOUGHT])
        answer = {**spoken[1], "reasoning_content": THOUGHT["text"]}
        probes.append(
            _Probe(Head(), [items[0], thought, *items[1:]], [spoken[0], answer, spoken[2]])
        )
    return probes


def _is_alike(
    dialect: TokenDialect, vocabulary: Vocabulary, runner: TemplateRunner, probe: _Probe
) -> bool:
    tools = [definition_of(offer) for offer in probe.head.tools.offers] or None
    expected = _prompt(runner, probe.chat, tools)
    scene = Scene(probe.head, None, tuple(probe.items), root_at=PROBED_AT)
    prompt = dialect.render(scene).prompt
    assert isinstance(prompt, Tokens)
    names = {vocabulary.special(text): text.encode() for text in vocabulary.specials}
    written = b"".join(names.get(id) or vocabulary.bytes_of(id) for id in prompt.flat())
    return expected is not None and written == expected.encode()
