"""How each format writes calls: the other direction of the readers, for tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from segue.readers.formats import FORMATS, CallFormat

MM = "]<]minimax[>["
Arguments = Mapping[str, object]
Call = tuple[str, Arguments]


def text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def dumps(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Written:
    """A format, one call of it, and what stands around and between calls."""

    call: Callable[[str, Arguments], str]
    begin: str = ""
    between: str = ""
    end: str = ""
    # Special tokens of models that write so.
    specials: tuple[str, ...] = ()

    def calls(self, *calls: Call) -> str:
        each = (self.call(name, arguments) for name, arguments in calls)
        return self.begin + self.between.join(each) + self.end


def function(outer: str) -> Callable[[str, Arguments], str]:
    def call(name: str, arguments: Arguments) -> str:
        each = "".join(f"<parameter={k}>\n{text(v)}\n</parameter>\n" for k, v in arguments.items())
        return f"<{outer}>\n<function={name}>\n{each}</function>\n</{outer}>"

    return call


def invoke(before: str, *, is_typed: bool = False) -> Callable[[str, Arguments], str]:
    def call(name: str, arguments: Arguments) -> str:
        each = "".join(
            f'<{before}parameter name="{k}"{said(v)}>{text(v)}</{before}parameter>\n'
            for k, v in arguments.items()
        )
        return f'<{before}invoke name="{name}">\n{each}</{before}invoke>\n'

    def said(value: object) -> str:
        return f' string="{dumps(isinstance(value, str))}"' if is_typed else ""

    return call


def keyed(name: str, arguments: Arguments) -> str:
    each = "".join(
        f"<arg_key>{k}</arg_key>\n<arg_value>{text(v)}</arg_value>\n" for k, v in arguments.items()
    )
    return f"<tool_call>{name}\n{each}</tool_call>"


def params(name: str, arguments: Arguments) -> str:
    """Text that has letters of tags stands in CDATA."""
    values = {key: text(value) for key, value in arguments.items()}
    raw = {k: f"<![CDATA[{v}]]>" if set(v) & set("<&\n") else v for k, v in values.items()}
    each = "".join(f'<param name="{key}">{value}</param>' for key, value in raw.items())
    return f'<function name="{name}">{each}</function>'


def kimi(name: str, arguments: Arguments) -> str:
    each = "".join(
        f'<|open|>argument key="{k}" type="{"string" if isinstance(v, str) else "number"}"<|sep|>'
        f"{text(v)}<|close|>argument<|sep|>"
        for k, v in arguments.items()
    )
    return f'<|open|>call tool="{name}" index="1"<|sep|>{each}<|close|>call<|sep|>'


def minimax(name: str, arguments: Arguments) -> str:
    each = "".join(f"{MM}<{k}>{text(v)}{MM}</{k}>" for k, v in arguments.items())
    return f'{MM}<invoke name="{name}">{each}{MM}</invoke>\n'


def gemma(value: object) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return "{" + ",".join(f"{k}:{gemma(v)}" for k, v in value.items()) + "}"
        case list():
            return "[" + ",".join(map(gemma, value)) + "]"
        case _:
            return dumps(value)


def python(name: str, arguments: Arguments) -> str:
    return f"{name}(" + ", ".join(f"{k}={v!r}" for k, v in arguments.items()) + ")"


def named(name: str, arguments: Arguments, keys: str = "name arguments") -> str:
    first, second = keys.split()
    return dumps({first: name, second: arguments})


WRITTEN: dict[str, Written] = {
    "seed": Written(function("seed:tool_call"), between="\n"),
    "xml": Written(function("tool_call"), between="\n"),
    "minimax-m2": Written(
        invoke(""), "<minimax:tool_call>\n", end="</minimax:tool_call>",
        specials=("<minimax:tool_call>", "</minimax:tool_call>"),
    ),
    "minimax-m3": Written(
        minimax, "]<]minimax[>[<tool_call>\n", end="]<]minimax[>[</tool_call>", specials=("]<]minimax[>[",)
    ),
    "minicpm5": Written(params, between="\n"),
    "dsml": Written(
        invoke("｜DSML｜", is_typed=True), "<｜DSML｜function_calls>\n", end="</｜DSML｜function_calls>",
        specials=("｜DSML｜",),
    ),
    "glm": Written(keyed, between="\n", specials=("<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>")),
    "kimi-k3": Written(
        kimi, "<|open|>tools<|sep|>", end="<|close|>tools<|sep|>", specials=("<|open|>", "<|close|>", "<|sep|>")
    ),
    "kimi-k2": Written(
        lambda name, arguments: (
            f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{dumps(arguments)}<|tool_call_end|>"
        ),
        "<|tool_calls_section_begin|>",
        end="<|tool_calls_section_end|>",
        specials=(
            "<|tool_calls_section_begin|>", "<|tool_call_begin|>", "<|tool_call_argument_begin|>",
            "<|tool_call_end|>", "<|tool_calls_section_end|>",
        ),
    ),
    "deepseek-v3": Written(
        lambda name, arguments: (
            f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{dumps(arguments)}<｜tool▁call▁end｜>"
        ),
        "<｜tool▁calls▁begin｜>",
        end="<｜tool▁calls▁end｜>",
        specials=(
            "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>", "<｜tool▁call▁end｜>",
            "<｜tool▁calls▁end｜>",
        ),
    ),
    "gemma4": Written(
        lambda name, arguments: f"<|tool_call>call:{name}{gemma(arguments)}<tool_call|>",
        specials=("<|tool_call>", "<tool_call|>", '<|"|>', "<|channel>", "<channel|>"),
    ),
    "lfm2": Written(
        python, "<|tool_call_start|>[", ", ", "]<|tool_call_end|>",
        specials=("<|tool_call_start|>", "<|tool_call_end|>"),
    ),
    "pythonic": Written(
        python, "<|python_start|>[", ", ", "]<|python_end|>",
        specials=("<|python_start|>", "<|python_end|>"),
    ),
    "mistral": Written(
        lambda name, arguments: f"[TOOL_CALLS]{name}[ARGS]{dumps(arguments)}",
        specials=("[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]"),
    ),
    "command-r": Written(
        lambda name, arguments: dumps({"tool_call_id": "0", "tool_name": name, "parameters": arguments}),
        "<|START_ACTION|>[\n    ", ",\n    ", "\n]<|END_ACTION|>",
        specials=("<|START_ACTION|>", "<|END_ACTION|>"),
    ),
    "apriel": Written(named, "<tool_calls>[", ", ", "]</tool_calls>"),
    "granite3": Written(named, "<|tool_call|>[", ", ", "]", specials=("<|tool_call|>",)),
    "gigachat3.1": Written(named, "<|function_call|>", "<|function_call|>", specials=("<|function_call|>",)),
    "gigachat3": Written(
        named, "function call<|role_sep|>\n", "<|message_sep|>function call<|role_sep|>\n",
        specials=("<|role_sep|>",),
    ),
    "solar": Written(
        lambda name, arguments: (
            f"<|tool_call:begin|>abc<|tool_call:name|>{name}<|tool_call:args|>{dumps(arguments)}<|tool_call:end|>"
        ),
        "<|tool_calls|>",
        end="<|calls|>",
        specials=(
            "<|tool_calls|>", "<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>",
            "<|tool_call:end|>", "<|calls|>",
        ),
    ),
    "llama3": Written(
        lambda name, arguments: named(name, arguments, "name parameters"), between="; ",
        specials=("<|python_tag|>",),
    ),
    "hermes": Written(
        lambda name, arguments: f"<tool_call>\n{named(name, arguments)}\n</tool_call>", between="\n"
    ),
}  # fmt: skip
BY_NAME: dict[str, CallFormat] = {row.name: row for row in FORMATS}
