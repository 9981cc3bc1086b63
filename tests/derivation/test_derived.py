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

# JSON in marks, tags on lines, tags with keys, special tokens around JSON, tags with the name inside; and families of
# which no table knows.
FAMILIES = (
    "Qwen3.5", "GLM-4.6", "DeepSeek V3.1", "Kimi K2 Thinking", "MiniMax M2", "Llama 3.3", "Hunyuan (Hy3)", "MiniCPM5",
    "Nemotron Nano v2",
)  # fmt: skip
BEGINS = {
    "Qwen3.5": "<tool_call>\n<function=%name%>\n",
    "GLM-4.6": "<tool_call>%name%\n",
    "DeepSeek V3.1": "<｜tool▁call▁begin｜>%name%<｜tool▁sep｜>",
    "Kimi K2 Thinking": "<|tool_call_begin|>functions.%name%:%index%<|tool_call_argument_begin|>",
    "MiniMax M2": '<invoke name="%name%">\n',
    "Llama 3.3": '{"name": "%name%", "parameters": ',
    "Hunyuan (Hy3)": "<tool_call:opensource>%name%<tool_sep:opensource>\n",
    "MiniCPM5": '<function name="%name%">',
    "Nemotron Nano v2": '{"name": "%name%", "arguments": ',
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


# Bare JSON: a list, with commas between, with words before it; and with what stands around odd values.
OBJECT = "{{ '{\"name\": \"' + c.function.name + '\", \"arguments\": ' + c.function.arguments | tojson + '}' }}"
COMMAS = OBJECT + "{% if not loop.last %}{{ ', ' }}{% endif %}"
LIST = "{% if loop.first %}{{ '[' }}{% endif %}" + COMMAS + "{% if loop.last %}{{ ']' }}{% endif %}"
WRAPPED = """{{ '<zz:run name="' + c.function.name + '">' }}{% for k, v in c.function.arguments.items() %}
{{- '<zz:arg name="' + k + '">' }}{% if v is string and '<' in v %}{{ '<![RAW[' + v + ']]>' }}{% else %}
{{- v if v is string else v | tojson }}{% endif %}{{ '</zz:arg>' }}{% endfor %}{{ '</zz:run>' }}"""
COMMA_TAGS = """{{ '<zz:run>' + c.function.name + '{' }}{% for k, v in c.function.arguments.items() %}
{{- k + ':<zz:t>' ~ v ~ '<zz:t>' }}{% if not loop.last %}{{ ',' }}{% endif %}{% endfor %}{{ '}</zz:run>' }}"""
# Objects between marks of their own, in a section, with commas between.
SECTION = (
    "{% if loop.first %}{{ '<zz:calls>' }}{% endif %}{{ '<zz:run>' }}"
    + OBJECT
    + ("{{ '</zz:run>' }}{% if loop.last %}{{ '</zz:calls>' }}{% else %}{{ ', ' }}{% endif %}")
)
# A value ends on a line of its own and begins on none.
LATE = """{{ '<zz:run>' + c.function.name + '>\\n' }}{% for k, v in c.function.arguments.items() %}
{{- '<zz:arg=' + k + '>' + (v if v is string else v | tojson) + '\\n</zz:arg>\\n' }}{% endfor %}{{ '</zz:run>' }}"""
# Strings between quotes as they are, objects as JSON.
RAW_QUOTES = """{{ '<zz:run>' + c.function.name + '(' }}{% for k, v in c.function.arguments.items() %}
{{- k + '=' }}{% if v is string %}{{ "'" + v + "'" }}{% else %}{{ v | tojson }}{% endif %}
{%- if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')</zz:run>' }}"""
# Calls of Python on lines of their own, in a section.
LINES = """{% if loop.first %}{{ '<zz:calls>\n' }}{% endif %}{{ c.function.name + '(' }}
{%- for k, v in c.function.arguments.items() %}{{ k + '=' }}{% if v is string %}{{ "'" + v + "'" }}{% else %}
{{- v | tojson }}{% endif %}{% if not loop.last %}{{ ', ' }}{% endif %}{% endfor %}{{ ')' }}
{%- if loop.last %}{{ '\n</zz:calls>' }}{% else %}{{ '\n' }}{% endif %}"""
# The end of all calls stands only after several.
LATE_END = """{% if loop.first %}{{ '<zz:calls>' }}{% endif %}{{ '<zz:run>' + c.function.name + '|' }}
{{- c.function.arguments | tojson + '</zz:run>' }}{% if not loop.first %}{{ '</zz:calls>' }}{% endif %}"""
# What ends the words of an answer also begins a call.
SHARED = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + (m.content or '') + '<zz:end>' }}
{%- for c in m.tool_calls or [] %}{{ '\\nrun<zz:to>' + c.function.name + '|' + c.function.arguments | tojson }}
{{- '<zz:end>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""
# Words before a call stand between marks, which are there without words, too.
AROUND = """{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}
{%- if m.tool_calls %}{{ '<zz:say>' + (m.content or '') + '</zz:say>' }}{% else %}{{ m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}CALLS{% endfor %}{{ '<|im_end|>' }}{% endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""
# What the model is told stands in the message of the user while that is the last.
MOVING = """{%- for m in messages %}
{%- if m.role == 'user' %}{{ '<|im_start|>user\n' + ('Call tools. ' if tools and loop.last else '') + m.content }}
{{- '<|im_end|>' }}{% else %}{{ m.content or '' }}{% for c in m.tool_calls or [] %}CALLS{% endfor %}{{ '<|im_end|>' }}
{%- endif %}{% endfor %}"""
# The next part of an answer has a header of its own.
PARTS = """{%- for m in messages %}{{ '<|im_start|>' + m.role }}
{%- if m.reasoning_content %}{{ '<zz:think>' + m.reasoning_content + '</zz:think><zz:part>' + m.role }}{% endif %}
{%- if m.content %}{{ '<zz:say>' + m.content }}{% endif %}
{%- for c in m.tool_calls or [] %}{{ '<zz:run>' + c.function.name + '|' + c.function.arguments | tojson + '</zz:run>' }}
{%- endfor %}{{ '<|im_end|>' }}{% endfor %}{%- if add_generation_prompt %}{{ '<|im_start|>assistant' }}{% endif %}"""


def dialect_of(calls: str, template: str = CHATML) -> TokenDialect:
    folder = model_folder("Qwen3.5")
    return derived_dialect(folder, vocabulary_from_file(folder), template.replace("CALLS", calls))


def of_template(calls: str) -> DerivedFamily:
    found = dialect_of(calls).derived
    assert found is not None
    return found


def items_of(dialect: TokenDialect, said: str) -> list[tuple[str, str, str]]:
    """What is read, the same however it is cut."""
    vocabulary = dialect._bound.vocabulary
    ids = [*vocabulary.ids(Own(said)), min(dialect.stops)]
    read_items = [
        [(opened.kind, opened.name, text) for opened, text in heard(read(dialect, OFFERED, cuts))]
        for cuts in ([ids], [[id] for id in ids])
    ]
    assert read_items[0] == read_items[1]
    return read_items[0]


SAVED = '{"text": "a, b]"}'
SAVE = f'{{"name": "save", "arguments": {SAVED}}}'
CALLED = ("function", "save", SAVED)


@pytest.mark.parametrize(
    ("calls", "said", "found"),
    [
        (LIST, f"[{SAVE}]", [CALLED]),
        (LIST, f"[{SAVE}, {SAVE}]", [CALLED, CALLED]),
        (COMMAS, f"{SAVE}, {SAVE}", [CALLED, CALLED]),
        (COMMAS, SAVE, [CALLED]),
        # Not a call: another tool, a list of something else, words before it, none of it.
        (LIST, '[{"name": "rm", "arguments": {}}]', None),
        (LIST, '[{"name": "Anna"}, 2]', None),
        (LIST, '["a", "b"]', None),
        (LIST, "[1] is a note.", None),
        (LIST, "[", None),
        (LIST, f"So: [{SAVE}]", None),
        (COMMAS, f"So: {SAVE}", None),
        # What follows a call is what is said.
        (LIST, f"[{SAVE}] and more", [CALLED, ("message", "", " and more")]),
    ],
)
def test_calls_without_a_mark_are_read_where_they_are_the_whole_answer(
    calls: str, said: str, found: list[tuple[str, str, str]] | None
) -> None:
    dialect = dialect_of(calls)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    assert items_of(dialect, said) == (found or [("message", "", said)])


def test_call_without_a_mark_after_words_is_said_to_be_text() -> None:
    assert "where words stand before it" in of_template(COMMAS).refused["words"]


def test_what_stands_around_odd_values_is_no_part_of_them() -> None:
    dialect = dialect_of(WRAPPED)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None
    assert dialect.derived.calls.arguments.raw == ("<![RAW[", "]]>")
    assert "texts" not in dialect.derived.refused
    said = '<zz:run name="save"><zz:arg name="text"><![RAW[1 < 2</zz:arg>]]></zz:arg></zz:run>'
    assert items_of(dialect, said) == [("function", "save", '{"text": "1 < 2</zz:arg>"}')]
    assert from_toml(to_toml(dialect.derived), "a.toml") == dialect.derived


def test_values_in_tags_with_commas_between_are_read() -> None:
    dialect = dialect_of(COMMA_TAGS)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    said = "<zz:run>save{text:<zz:t>a, b<zz:t>,count:<zz:t>3<zz:t>}</zz:run>"
    assert items_of(dialect, said) == [("function", "save", '{"text": "a, b", "count": 3}')]


def test_objects_with_marks_of_their_own_in_a_section_are_read() -> None:
    dialect = dialect_of(SECTION)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    one = f"<zz:run>{SAVE}</zz:run>"
    said = f"Yes.<zz:calls>{one}, {one}</zz:calls>"
    assert items_of(dialect, said) == [("message", "", "Yes."), CALLED, CALLED]
    assert items_of(dialect, f"<zz:calls>{one}</zz:calls>So.") == [CALLED, ("message", "", "So.")]


def test_newline_before_the_end_of_a_value_is_no_part_of_it() -> None:
    dialect = dialect_of(LATE)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    said = "<zz:run>save>\n<zz:arg=text>\na\n\n</zz:arg>\n<zz:arg=count>3\n</zz:arg>\n</zz:run>"
    assert items_of(dialect, said) == [("function", "save", '{"text": "\\na\\n", "count": 3}')]


def test_strings_are_raw_and_objects_are_json() -> None:
    dialect = dialect_of(RAW_QUOTES)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    said = """<zz:run>save(text='it's C:\\new', list=["a\\\\b\\n", 'x\\'s'], count=3)</zz:run>"""
    [(kind, name, text)] = items_of(dialect, said)
    found = {"text": "it's C:\\new", "list": ["a\\b\n", "x's"], "count": 3}
    assert (kind, name, json.loads(text)) == ("function", "save", found)


def test_calls_on_lines_of_their_own_are_read() -> None:
    dialect = dialect_of(LINES)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    one, other = "save(text='a, b]')", 'save(text="it\'s)\nsave(", count=3)'
    called = ("function", "save", '{"text": "it\'s)\\nsave(", "count": 3}')
    said = f"Yes.\n<zz:calls>\n{one}\n{other}\n</zz:calls>So."
    assert items_of(dialect, said) == [
        ("message", "", "Yes."), CALLED, called, ("message", "", "So."),
    ]  # fmt: skip
    # Outside of the section such a line is text, and in it what is no call.
    assert items_of(dialect, one) == [("message", "", one)]
    assert items_of(dialect, f"<zz:calls>\n{one}\nand so on.") == [
        CALLED, ("message", "", "\nand so on."),
    ]  # fmt: skip


def test_end_that_stands_only_after_several_calls_ends_them() -> None:
    dialect = dialect_of(LATE_END)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    call = f"<zz:run>save|{SAVED}</zz:run>"
    assert items_of(dialect, f"<zz:calls>{call}") == [CALLED]
    assert items_of(dialect, f"<zz:calls>{call}</zz:calls>") == [CALLED]
    assert items_of(dialect, f"<zz:calls>{call}{call}</zz:calls>") == [CALLED, CALLED]


def test_words_between_marks_before_a_call_are_said() -> None:
    dialect = dialect_of("", AROUND.replace("CALLS", OBJECT))
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    assert items_of(dialect, f"<zz:say>Yes.</zz:say>{SAVE}") == [("message", "", "Yes."), CALLED]
    assert items_of(dialect, f"<zz:say></zz:say>{SAVE}{SAVE}") == [CALLED, CALLED]
    assert items_of(dialect, "Yes.") == [("message", "", "Yes.")]


def test_message_of_the_user_may_be_written_otherwise_once_it_is_answered() -> None:
    dialect = dialect_of("", MOVING.replace("CALLS", NEW))
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    assert items_of(dialect, f"<zz:run>save|{SAVED}</zz:run>") == [CALLED]


def test_mark_with_which_a_longer_one_begins_is_not_taken_for_it() -> None:
    dialect = dialect_of("", SHARED)
    assert dialect.derived is not None
    assert dialect.derived.calls is not None, dialect.derived.refused
    call = '<zz:end>\nrun<zz:to>save|{"text": "a"}<zz:end>'
    called = ("function", "save", '{"text": "a"}')
    assert items_of(dialect, call) == [called]
    assert items_of(dialect, f"Yes.{call}") == [("message", "", "Yes."), called]
    assert items_of(dialect, "Yes.<zz:end>") == [("message", "", "Yes.")]
    assert items_of(dialect, "Yes.<zz:end>\nrun") == [("message", "", "Yes.\nrun")]


def test_header_of_the_next_part_of_an_answer_is_not_said() -> None:
    dialect = dialect_of("", PARTS)
    said = '<zz:think>Hm.</zz:think><zz:part>assistant<zz:run>save|{"text": "a"}</zz:run>'
    assert items_of(dialect, said) == [
        ("reasoning", "", "Hm."),
        ("function", "save", '{"text": "a"}'),
    ]
    said = "<zz:think>Hm.</zz:think><zz:part>assistant<zz:say>Yes."
    assert items_of(dialect, said) == [("reasoning", "", "Hm."), ("message", "", "Yes.")]


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


# Numbers, columns and texts that need no loop.
WIDE = (
    "{{ 'x'|center(1000000000) }}",
    "{{ 'x'.ljust(1000000000) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '%1000000000s'|format(1) }}",
    "{{ ('x\n' * 1000)|indent(10000000) }}",
    "{{ [[1]]|tojson(indent=1000000000) }}",
    "{% set a = 'x' * 100000 %}{{ a.replace('x', a) }}",
    "{% set a = 'x' * 100000 %}{{ range(100000)|map('string')|join(a) }}",
    "{{ ((((9 ** 64) ** 64) ** 64) ** 64) is number }}",
)
# Loops that are short, and do much in each step.
BUSY = "{% for i in range(40000) %}{% if ITS %}{% endif %}{% endfor %}"
BUSY_TEXT = "{% set a = 'x' * 1000000 %}" + BUSY.replace("ITS", "a.count('y')")
BUSY_LIST = "{% set a = range(90000)|list %}" + BUSY.replace("ITS", "a|sort")


@pytest.mark.parametrize("hostile", [ENDLESS, DOUBLING, LONG, *WIDE, BUSY_TEXT, BUSY_LIST])
def test_template_that_would_never_end_is_stopped(hostile: str) -> None:
    runner = TemplateRunner(
        ChatTemplate(f"{{% if tools %}}{hostile}{{% endif %}}Hi"), is_limited=True
    )
    assert runner.run([{"role": "user", "content": "Hi"}], None, 0, is_cued=True) == "Hi"
    with pytest.raises(InvalidRequest, match=r"too l(ong|arge)|more than"):
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
