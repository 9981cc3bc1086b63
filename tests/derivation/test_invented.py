"""Templates that no model has: what is worked out of them reads every call as it was written, or is refused in words.

A template is put together of parts: what stands around all calls, around each, where the name is, how values are
written, what is between calls, how a thought is marked. The same calls, with odd values, are written by it and read.
"""

from __future__ import annotations

import json

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from segue.derivation.samples import SaidCall, Samples
from segue.vocabularies.chat_template import ChatTemplate, TemplateRunner
from tests.derivation.test_derived import dialect_of, items_of

SECTIONS = (
    ("", ""),
    ("<zz:calls>", "</zz:calls>"),
    (r"<zz:calls>\n", r"\n</zz:calls>"),
    ("[ZZ_USE]", ""),
)
BEGINS = ("<zz:run>", r"<zz:run>\n", "<zz:go>")
ENDS = ("</zz:run>", r"\n</zz:run>", "", "<zz:stop>")
# Between calls.
BETWEEN = ("", r"\n", ", ", ";")
THOUGHTS = ("", "<zz:think>{}</zz:think>", r"<zz:think>\n{}\n</zz:think>\n\n")
NAME, JSON = "{{ c.function.name }}", "{{ c.function.arguments | tojson }}"
TEXT = "{{ v if v is string else v | tojson }}"
EACH = "{%% for k, v in c.function.arguments.items() %%}%s{%% endfor %%}"
# How the name and the arguments are written; in those with tags a value is text.
OBJECTS = (
    f'{{"name": "{NAME}", "arguments": {JSON}}}',
    f'{{"id": "{{{{ c.id }}}}", "name": "{NAME}", "parameters": {JSON}}}',
    f"{NAME}<zz:args>{JSON}",
    f"{NAME}|{JSON}",
    f'{{"id": "{{{{ c.id }}}}", "function": {{"name": "{NAME}", "arguments": {JSON}}}}}',
    NAME + "(" + EACH % "{{ k }}={{ v | tojson }}{{ '' if loop.last else ', ' }}" + ")",
)
TAGS = (
    NAME + r"\n" + EACH % f"<zz:arg={{{{ k }}}}>{TEXT}</zz:arg>",
    f"<zz:fn={NAME}>" + r"\n" + EACH % (r"<zz:arg={{ k }}>\n" + TEXT + r"\n</zz:arg>\n"),
    f'<zz:fn name="{NAME}">' + EACH % f"<zz:key>{{{{ k }}}}</zz:key><zz:arg>{TEXT}</zz:arg>",
)
ODDS = (
    '{"name": "save", "arguments": {}}', "<zz:run>", "</zz:run", "zz:arg>", "[ZZ_USE]", "it's", "\n", '"', "\\", "{",
    "]", "é", "```", "<zz:go>", ", ", "; ",
)  # fmt: skip
TEMPLATE = (
    r"{% for m in messages %}<|im_start|>{{ m.role }}\nTHOUGHT{{ m.content or '' }}"
    r"{% for c in m.tool_calls or [] %}CALLS{% endfor %}<|im_end|>\n{% endfor %}"
    r"{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def written(text: str) -> str:
    """Newlines as Jinja writes them, whatever it trims."""
    return text.replace(r"\n", "{{ '\\n' }}")


@settings(max_examples=8, deadline=None, derandomize=True, phases=[Phase.explicit, Phase.generate])
@given(
    section=st.sampled_from(SECTIONS),
    around=st.tuples(st.sampled_from(BEGINS), st.sampled_from(ENDS), st.sampled_from(BETWEEN)),
    form=st.sampled_from([*OBJECTS, *TAGS]),
    thought=st.sampled_from(THOUGHTS),
    values=st.lists(st.lists(st.sampled_from(ODDS), max_size=5).map("".join), min_size=3, max_size=3),
)  # fmt: skip
def test_calls_of_an_invented_template_are_read_as_written_or_refused(
    section: tuple[str, str],
    around: tuple[str, str, str],
    form: str,
    thought: str,
    values: list[str],
) -> None:
    begin, end, between = around
    calls = f"{{% if loop.first %}}{section[0]}{{% endif %}}{begin}{form}{end}"
    calls += f"{{% if loop.last %}}{section[1]}{{% else %}}{between}{{% endif %}}"
    think = thought.format("{{ m.reasoning_content }}")
    shown = f"{{% if m.reasoning_content %}}{think}{{% endif %}}" if think else ""
    template = written(TEMPLATE.replace("THOUGHT", shown).replace("CALLS", calls))
    dialect = dialect_of("", template)
    family = dialect.derived
    assert family is not None
    if family.calls is None:
        assert family.refused["calls"]
        return
    if form in TAGS:
        values = [value.strip() for value in values]
    said_calls = [SaidCall("save", {"text": values[0], "count": -3})]
    if family.calls.is_parallel:
        said_calls.append(SaidCall("save", {"text": values[1], "list": [1, values[2]]}))
    samples = Samples(TemplateRunner(ChatTemplate(template)), template, ["<|im_end|>"])
    for words in ("", "I look."):
        said = samples.said(words, said_calls)
        assert said is not None

        found = items_of(dialect, said)

        read = [(name, json.loads(text)) for kind, name, text in found if kind == "function"]
        assert read == [(call.name, call.arguments) for call in said_calls], said
