"""Is what is worked out from a template what the template writes, and is nothing used that is not proven?"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from segue.derivation.atoms import Lexer
from segue.derivation.family import DerivedFamily, from_toml, readable, to_toml
from segue.dialects.choose import derived_dialect
from segue.dialects.family import TokenDialect
from segue.errors import InvalidRequest, Misconfigured
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import Chat, ChatTemplate, TemplateRunner
from segue.vocabularies.load import vocabulary_from_file
from segue.vocabularies.vocabulary import Own
from segue.wire.tools import FunctionTool
from tests.contracts.dialect import read, tools_of
from tests.models.cells import heard
from tests.models.families import model_folder

# JSON in marks, tags on lines, tags with keys, special tokens around JSON, tags with the name inside.
FAMILIES = ("Qwen3.5", "GLM-4.6", "DeepSeek V3.1", "Kimi K2 Thinking", "MiniMax M2", "Llama 3.3")
BEGINS = {
    "Qwen3.5": "<tool_call>\n<function=%name%>\n",
    "GLM-4.6": "<tool_call>%name%\n",
    "DeepSeek V3.1": "<｜tool▁call▁begin｜>%name%<｜tool▁sep｜>",
    "Kimi K2 Thinking": "<|tool_call_begin|>functions.%name%:%index%<|tool_call_argument_begin|>",
    "MiniMax M2": '<invoke name="%name%">\n',
    "Llama 3.3": '{"name": "%name%", "parameters": ',
}
SCHEMA = {
    "type": "object",
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "list": {"type": "array"},
    },
}
TOOLS = tools_of(FunctionTool(name="save", parameters=msgspec.Raw(json.dumps(SCHEMA).encode())))
OFFERED = Scene(Head(tools=TOOLS), None, ())


@cache
def dialect(name: str) -> TokenDialect:
    folder = model_folder(name)
    return derived_dialect(folder, vocabulary_from_file(folder))


def family(name: str) -> DerivedFamily:
    found = dialect(name).derived
    assert found is not None
    return found


def calls_of(parsed: Any) -> list[tuple[str, Any]]:
    return [(opened.name, text) for opened, text in heard(parsed) if opened.kind == "function"]


@pytest.mark.parametrize("name", FAMILIES)
def test_calls_are_worked_out_as_the_template_writes_them(name: str) -> None:
    found = family(name)
    assert found.calls is not None
    assert found.calls.header == BEGINS[name]
    assert not {"calls", "thoughts", "words"} & found.refused.keys()


@pytest.mark.parametrize("name", FAMILIES)
def test_file_says_the_same(name: str) -> None:
    found = family(name)
    assert from_toml(to_toml(found), "a.toml") == found


def test_thought_that_the_cue_begins_is_found() -> None:
    thoughts = family("Qwen3.5").thoughts
    assert thoughts is not None
    assert (thoughts.begin, thoughts.end, thoughts.kept) == (
        "<think>\n", "\n</think>\n\n", "until the user speaks",
    )  # fmt: skip


@settings(max_examples=25, deadline=None)
@given(
    name=st.sampled_from(FAMILIES),
    words=st.text(st.characters(codec="utf-8", exclude_categories=["Cc", "Cs"]), max_size=12),
    cut=st.lists(st.integers(1, 7), min_size=1, max_size=8),
)
def test_call_is_read_alike_however_it_is_cut(name: str, words: str, cut: list[int]) -> None:
    """The call is spelt by the derived data alone: begin, header, arguments, end."""
    found = dialect(name)
    assert found.derived is not None
    made = readable(found.derived, Lexer(found._bound.vocabulary.specials))
    assert made.spelling is not None
    spelling = made.spelling
    # Not an end of the format itself, nor white space at the edge, which templates trim.
    words = words.replace("<", "").replace("`", "").strip()
    if spelling.argument is None:
        inside = json.dumps({"text": words, "count": 3})
    else:
        opening, closing = spelling.argument
        inside = spelling.separator.join(
            f"{opening.replace('%key%', key)}{value}{closing}"
            for key, value in (("text", words), ("count", "3"))
        )
    said = (spelling.begin + spelling.header).replace("%name%", "save") + inside + spelling.end
    vocabulary = found._bound.vocabulary
    ids = [*vocabulary.ids(Own(said)), min(found.stops)]
    pieces: list[list[int]] = []
    at = 0
    while at < len(ids):
        size = cut[len(pieces) % len(cut)]
        pieces.append(ids[at : at + size])
        at += size
    thought = found.derived.thoughts
    opened = f"{thought.end}" if thought and found._family.is_thinking(OFFERED) else ""
    before = [*vocabulary.ids(Own(opened))] if opened else []
    readings = [
        calls_of(read(found, OFFERED, [before, *cuts] if before else [*cuts]))
        for cuts in (pieces, [ids], [[id] for id in ids])
    ]
    assert readings[0] == readings[1] == readings[2]
    [(called, arguments)] = readings[0]
    assert (called, json.loads(arguments)) == ("save", {"text": words, "count": 3})


# --- what is refused ----------------------------------------------------------------------------------

CHATML = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') }}
{%- for c in m.tool_calls or [] %}CALLS{% endfor %}{{ '<|im_end|>\\n' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
WORDS_ONLY = "{{ '\\nAction: ' + c.function.name + '\\nInput: ' + c.function.arguments | tojson }}"
NAME_TWICE = "{{ '<call>' + c.function.name + '</call><args>' + c.function.name + c.function.arguments | tojson }}"
PYTHON_WORDS = "{{ '<call>' + c.function.name + '</call>' }}" + (
    "{% for k, v in c.function.arguments.items() %}{{ k + ' is ' + v | string }}{% endfor %}"
)
NEW = "{{ '<zz:run>' + c.function.name + '|' + c.function.arguments | tojson + '</zz:run>' }}"


def of_template(calls: str) -> DerivedFamily:
    folder = model_folder("Qwen3.5")
    text = CHATML.replace("CALLS", calls)
    found = derived_dialect(folder, vocabulary_from_file(folder), text).derived
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("calls", "why"),
    [
        (WORDS_ONLY, "begin without a mark"),
        (NAME_TWICE, "written more than once"),
        (PYTHON_WORDS, "a parameter is written"),
    ],
)
def test_what_cannot_be_proven_is_refused_in_words(calls: str, why: str) -> None:
    found = of_template(calls)
    assert found.calls is None
    assert why in found.refused["calls"]


def test_marks_that_no_table_has_are_read() -> None:
    found = of_template(NEW)
    assert found.refused.keys() <= {"forced"}
    assert found.calls is not None
    assert (found.calls.header, found.calls.end) == ("<zz:run>%name%|", "</zz:run>")


def test_json_on_several_lines_is_read() -> None:
    call = "{'name': c.function.name, 'arguments': c.function.arguments} | tojson(indent=2)"
    calls = of_template(f"{{{{ '<zz:run>' + ({call}) + '</zz:run>' }}}}").calls
    assert calls is not None
    assert calls.arguments.form == "json"


def test_file_with_other_marks_than_the_template_is_not_used(tmp_path: Path) -> None:
    """A file is proven like what was worked out."""
    folder = model_folder("GLM-4.6")
    changed = to_toml(family("GLM-4.6")).replace("<arg_value>", "<value>")
    written = from_toml(changed, "glm.toml")
    found = derived_dialect(folder, vocabulary_from_file(folder), written=written).derived
    assert found is not None
    assert found.calls is None
    assert "calls are not read, because" in found.refused["calls"]


@pytest.mark.parametrize("text", ["version = 2", "version = 1\nwords = 3", "version = "])
def test_file_that_says_nothing_of_a_dialect_is_refused(text: str) -> None:
    with pytest.raises(Misconfigured, match=r"a\.toml"):
        from_toml(text, "a.toml")


# --- limits ---------------------------------------------------------------------------------------------

ENDLESS = "{% for a in range(90000) %}{% for b in range(90000) %}{% endfor %}{% endfor %}"
DOUBLING = "{% set ns = namespace(t='xy') %}{% for a in range(60) %}{% set ns.t = ns.t ~ ns.t %}{% endfor %}"
LONG = "{{ 'x' * 2000000000 }}"


@pytest.mark.parametrize("hostile", [ENDLESS, DOUBLING, LONG])
def test_template_that_would_never_end_is_stopped(hostile: str) -> None:
    runner = TemplateRunner(
        ChatTemplate(f"{{% if tools %}}{hostile}{{% endif %}}Hi"), is_limited=True
    )
    assert runner.run([{"role": "user", "content": "Hi"}], None, 0, is_cued=True) == "Hi"
    with pytest.raises(InvalidRequest, match=r"too long|more than"):
        runner.run([{"role": "user", "content": "Hi"}], [{}], 0, is_cued=True)


def test_limits_change_no_text() -> None:
    """Loops, macros and joins are counted, and write the same."""
    macro = "{% macro m(a) %}<{{ a ~ '!' ~ 1 }}>{% endmacro %}"
    text = macro + "{% for x in messages %}{{ m(x.role) + 'z' * 2 }}{% endfor %}"
    chat: Chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes."}]
    written = [
        TemplateRunner(ChatTemplate(text), is_limited=is_limited).run(chat, None, 0, is_cued=True)
        for is_limited in (False, True)
    ]
    assert written == ["<user!1>zz<assistant!1>zz"] * 2
