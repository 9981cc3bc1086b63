"""How do DeepSeek V3.2 and V4 write? Their repositories have no chat template, so this is ours.

It says what the makers' own programs for these models do (`encoding_dsv32.py`, `encoding_dsv4.py`): the same words and
marks, as Jinja, for the conversations that `template_messages.py` makes. `template.py` runs it as any other template.

V3.2 forgets its thoughts when the user speaks again. V4 does so only where there are no tools; to it an output of a
tool is something that the user says. The answer of a model that is not to think begins with the end of a thought.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from segue.dialects.family import TokenDialect
from segue.dialects.template import template_dialect
from segue.vocabularies.chat_template import decoded, template_in
from segue.vocabularies.vocabulary import Vocabulary

# What a vocabulary must have.
ROLES = ("<｜User｜>", "<｜Assistant｜>")

HEAD = """\
{%- set is_thinking = thinking | default(enable_thinking | default(false)) -%}
{%- set seen = namespace(asked=-1, outputs=false) -%}
{%- for message in messages -%}
{%- if message.role == "user" -%}{%- set seen.asked = loop.index0 -%}{%- endif -%}
{%- if message.role == "tool" -%}{%- set seen.outputs = true -%}{%- endif -%}
{%- if message.role == "system" and not loop.first -%}{{- raise_exception("system comes first") -}}{%- endif -%}
{%- endfor -%}
{{- "<｜begin▁of▁sentence｜>" -}}
EFFORT
{%- if messages and messages[0].role == "system" -%}{{- messages[0].content -}}{%- endif -%}
{%- if tools -%}{{- '\n\nTOOLS' -}}
{%- for tool in tools -%}{{- tool.function | tojson ~ "\n" -}}{%- endfor -%}
{{- "END_OF_TOOLS\n" -}}
{%- endif -%}
"""
ANSWER = """\
{{- "<think>" ~ message.reasoning_content if is_thinking and IS_KEPT -}}
{{- "</think>" ~ message.content -}}
{%- if message.tool_calls -%}
{{- "\n\n<｜DSML｜BLOCK>\n" -}}
{%- for call in message.tool_calls -%}
{{- '<｜DSML｜invoke name="' ~ call.function.name ~ '">\n' -}}
{%- for key, value in call.function.arguments.items() -%}
{{- '<｜DSML｜parameter name="' ~ key ~ '" string="' ~ ("true" if value is string else "false") ~ '">' -}}
{{- (value if value is string else value | tojson) ~ "</｜DSML｜parameter>\n" -}}
{%- else -%}{{- "\n" -}}
{%- endfor -%}
{{- "</｜DSML｜invoke>\n" -}}
{%- endfor -%}
{{- "</｜DSML｜BLOCK>" -}}
{%- endif -%}
{{- "<｜end▁of▁sentence｜>" -}}
"""
EXAMPLE = """\
<｜DSML｜BLOCK>
<｜DSML｜invoke name="$KIND_NAME">
<｜DSML｜parameter name="$PARAMETER_NAME" string="true|false">$PARAMETER_VALUE</｜DSML｜parameter>
...
</｜DSML｜invoke>
<｜DSML｜invoke name="$KIND_NAME2">
...
</｜DSML｜invoke>
</｜DSML｜BLOCK>
"""

V32_TOOLS = f"""\
## Tools

You have access to a set of tools you can use to answer the user\\'s question.
You can invoke functions by writing a "<｜DSML｜BLOCK>" block like the following as part of your reply to the user:
{EXAMPLE.replace("KIND", "FUNCTION")}
String and scalar parameters should be specified as is without any escaping or quotes, while lists and objects should \
use JSON format. The "string" attribute should be set to "true" for string type parameters and "false" for other types \
(numbers, booleans, arrays, objects).

If the thinking_mode is enabled, then after function results you should strongly consider outputting a thinking block. \
Here is an example:

<｜DSML｜BLOCK>
...
</｜DSML｜BLOCK>

<function_results>
...
</function_results>

<think>...thinking about results</think>

Here are the functions available in JSONSchema format:
<functions>
"""
V32_TURNS = """\
{%- for message in messages -%}
{%- if message.role == "user" -%}{{- "<｜User｜>" ~ message.content -}}
{%- elif message.role == "tool" -%}
{%- if loop.first or loop.previtem.role != "tool" -%}{{- "\n\n<function_results>" -}}{%- endif -%}
{{- "\n<result>" ~ message.content ~ "</result>" -}}
{%- if loop.last or loop.nextitem.role != "tool" -%}{{- "\n</function_results>" -}}{%- endif -%}
{%- elif message.role == "assistant" -%}
{{- "<｜Assistant｜>" if loop.first or loop.previtem.role != "tool" else "\n\n" -}}
ANSWER
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<｜Assistant｜>" if not messages or messages[-1].role != "tool" else "\n\n" -}}
{{- "<think>" if is_thinking else "</think>" -}}
{%- endif -%}
"""

V4_TOOLS = f"""\
## Tools

You have access to a set of tools to help answer the user\\'s question. You can invoke tools by writing a \
"<｜DSML｜BLOCK>" block like the following:

{EXAMPLE.replace("KIND", "TOOL")}
String parameters should be specified as is and set `string="true"`. For all other types (numbers, booleans, arrays, \
objects), pass the value in JSON format and set `string="false"`.

If thinking_mode is enabled (triggered by <think>), you MUST output your complete reasoning inside <think>...</think> \
BEFORE any tool calls or final response.

Otherwise, output directly after </think> with tool calls or final response.

### Available Tool Schemas

"""
V4_END_OF_TOOLS = "\nYou MUST strictly follow the above defined tool name and parameter schemas to invoke tool calls."
V4_EFFORT = """\
{%- if messages and is_thinking and reasoning_effort == "max" -%}
{{- "Reasoning Effort: Absolute maximum with no shortcuts permitted.
You MUST be very thorough in your thinking and comprehensively decompose the problem to resolve the root cause, \
rigorously stress-testing your logic against all potential paths, edge cases, and adversarial scenarios.
Explicitly write out your entire deliberation process, documenting every intermediate step, considered alternative, \
and rejected hypothesis to ensure absolutely no assumption is left unchecked.\n\n" -}}
{%- endif -%}
"""
V4_TURNS = """\
{%- for message in messages -%}
{%- if message.role in ("user", "tool") -%}
{{- "<｜User｜>" if loop.first or loop.previtem.role not in ("user", "tool") else "\n\n" -}}
{{- "<tool_result>" ~ message.content ~ "</tool_result>" if message.role == "tool" else message.content -}}
{%- elif message.role == "assistant" -%}
{{- "<｜Assistant｜>" -}}
ANSWER
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- "<｜Assistant｜>" ~ ("<think>" if is_thinking else "</think>") -}}
{%- endif -%}
"""


def _filled(text: str, **parts: str) -> str:
    for name, part in parts.items():
        text = text.replace(name, part)
    return text


IS_LAST = "loop.index0 > seen.asked"
# By the names that the settings have for them.
TEMPLATES = {
    "deepseek-v3.2": _filled(
        HEAD + V32_TURNS,
        EFFORT="",
        END_OF_TOOLS="</functions>",
        TOOLS=V32_TOOLS,
        ANSWER=ANSWER,
        IS_KEPT=IS_LAST,
        BLOCK="function_calls",
    ),
    "deepseek-v4": _filled(
        HEAD + V4_TURNS,
        EFFORT=V4_EFFORT,
        END_OF_TOOLS=V4_END_OF_TOOLS,
        TOOLS=V4_TOOLS,
        ANSWER=ANSWER,
        IS_KEPT=f"(tools or seen.outputs or {IS_LAST})",
        BLOCK="tool_calls",
    ),
}
MODEL_TYPES = {"deepseek_v32": "deepseek-v3.2", "deepseek_v4": "deepseek-v4"}


class _Config(msgspec.Struct):
    model_type: str = ""


def name_of(path: Path) -> str | None:
    """Which of them the model with this tokenizer is, by the `config.json` beside it."""
    folder = path if path.is_dir() else path.parent
    return MODEL_TYPES.get(decoded(folder / "config.json", _Config).model_type)


def deepseek_dialect(
    name: str, path: Path, vocabulary: Vocabulary, values: Mapping[str, object]
) -> TokenDialect:
    """The dialect with this name; refused if the vocabulary is of another family."""
    template = template_in(path, TEMPLATES[name], values)
    assert template is not None
    protected = vocabulary.protecting(template.text)
    for role in ROLES:
        protected.special(role)
    return template_dialect(vocabulary, template)
