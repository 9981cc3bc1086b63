"""How do Llama 3.1, 3.2 and 3.3 write and read?

A prompt is a row of blocks, `<|start_header_id|>role<|end_header_id|>`, two newlines, content, `<|eot_id|>`. The first
is always the system's and says what day it is: the day on which the chain began, so that midnight changes no prompt;
for Llama 3.1 and 3.3 a day that their template has built in.
The tools stand in the first message of the user, as the models were trained; where the chain does not begin with such
a message, in the system's block, which is the template's other way.

A call is the whole answer, an object with `name` and `parameters`. Where text went before it, `<|python_tag|>` stands
between them. Outputs come back in the role `ipython`, as JSON strings. The template knows one call at a time; several
calls are separated by `;`.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial

from segue.dialects.family import Family, is_from, message_text, system_of
from segue.dialects.parts import MODEL_TURN, Part, blocks_of, dumps, object_or_string, parts_of
from segue.dialects.warm import NameOf, Writing
from segue.readers import formats
from segue.readers.forced import CallForm
from segue.readers.offers import definition_of
from segue.readers.text_reader import TextReader
from segue.rests import rested
from segue.seams.prompt import Head, IdArray
from segue.vocabularies.vocabulary import Chunk, Mark, Own, Vocabulary, extend
from segue.wire.items import Item
from segue.wire.tools import Offer

BEGIN = "<|begin_of_text|>"
HEADER = "<|start_header_id|>"
HEADED = "<|end_header_id|>"
END = "<|eot_id|>"
TAG = "<|python_tag|>"
OTHER_ENDS = ("<|eom_id|>", "<|end_of_text|>")
CALLS = replace(formats.LLAMA3, is_mended=True)
THINK = CALLS.think
THOUGHT = CALLS.thought
AFTER_ROLE = Mark(HEADED)
BLOCK_END = Mark(END)
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "llama1"

# The words of the models' own template.
ENVIRONMENT = "Environment: ipython\n"
DATES = "Cutting Knowledge Date: December 2023\nToday Date: {}\n\n"
FORMAT = (
    'Respond in the format {"name": function name, "parameters": '
    "dictionary of argument name and its value}.Do not use variables.\n\n"
)
TOOLS_IN_USER = (
    "Given the following functions, please respond with a JSON for a function call "
    "with its proper arguments that best answers the given prompt.\n\n" + FORMAT
)
TOOLS_IN_SYSTEM = (
    "You have access to the following functions. To call a function, please respond with JSON "
    "for a function call." + FORMAT
)
DAY = re.compile(r"\nToday Date: (.+)\n")
MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")
ROLES = {
    "think": "assistant", "talk": "assistant", "call": "assistant", "response": "ipython",
    "tools": "system",
}  # fmt: skip


def _write_head(
    fixed_day: str,
    vocabulary: Vocabulary,
    head: Head,
    items: Sequence[Item],
    root_at: int,
    name_of: NameOf,
) -> IdArray[int]:
    """The system's block, and the first message of the user if the tools are to stand in it."""
    instructions, items = system_of(head, items)
    system = (instructions or "").strip()
    offers = head.tools.offers
    before = (ENVIRONMENT if offers else "") + DATES.format(fixed_day or _day(root_at))
    ids = vocabulary.ids(Mark(BEGIN))
    if offers and is_from(items, "user"):
        first = TOOLS_IN_USER + _tools(offers) + message_text(items[0]).strip()
        ids += _block(vocabulary, "system", before + system) + _block(vocabulary, "user", first)
        extend(ids, _given(vocabulary, items[1:], name_of))
        return ids
    tools = TOOLS_IN_SYSTEM + _tools(offers) if offers else ""
    ids += _block(vocabulary, "system", before + tools + system)
    extend(ids, _given(vocabulary, items, name_of))
    return ids


def _given(vocabulary: Vocabulary, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
    ids = array("I")
    for parts in blocks_of(items, MODEL_TURN, lambda offers: TOOLS_IN_SYSTEM + _tools(offers)):
        role = ROLES.get(parts[0].kind, parts[0].kind)
        content = _content(vocabulary, "\n\n", parts)
        extend(ids, vocabulary.ids(*_opening(role), *content, BLOCK_END))
    return ids


def _block(vocabulary: Vocabulary, role: str, content: str) -> IdArray[int]:
    return vocabulary.ids(*_opening(role), f"\n\n{content}", BLOCK_END)


def _opening(role: str) -> tuple[Mark, Mark]:
    return Mark(HEADER, role), AFTER_ROLE


def _write(vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
    return vocabulary.ids(*_content(vocabulary, "", parts_of(items)), BLOCK_END)


def _content(vocabulary: Vocabulary, before: str, parts: Sequence[Part]) -> list[Chunk]:
    """The content of one block; only the tag before a call is more than text. Llama 3.0 has no such tag."""
    chunks: list[Chunk] = []
    text = before
    for n, part in enumerate(parts):
        last = parts[n - 1].kind if n else None
        if part.kind == "call" and last == "talk":
            has_tag = vocabulary.has_special(TAG)
            chunks += [text, Mark(TAG)] if has_tag else [text]
            text = "" if has_tag else "\n"
        if part.kind == "think":
            chunks += [text, Own(f"{THINK}\n"), part.text, Own(f"\n{THOUGHT}\n\n")]
            text = ""
            continue
        text += ("; " if part.kind == last == "call" else "") + _written(part)
    return [*chunks, text]


def _written(part: Part) -> str:
    match part.kind:
        case "call":
            named = f'"name": {dumps(part.name)}, "parameters": {object_or_string(part.text)}'
            return f"{{{named}}}"
        case "response":
            return dumps(part.text)
        case _:
            return part.text.strip()


def _tools(tools: Sequence[Offer]) -> str:
    return "".join(dumps(definition_of(tool), indent=4) + "\n\n" for tool in rested(tools))


def _day(at: int) -> str:
    """As `26 Jul 2024`, whatever the locale."""
    day = datetime.fromtimestamp(at, UTC)
    return f"{day.day:02} {MONTHS[day.month - 1]} {day.year}"


def _with_prompt(prompt: str) -> Family:
    day = DAY.search(prompt)
    return _family(day[1] if day else "")


def _family(fixed_day: str = "") -> Family:
    """`fixed_day`: what day it is, where the model's template always says the same."""
    return Family(
        name="llama3",
        version=VERSION,
        specials=(BEGIN, HEADER, HEADED, END),
        stops=(END, *OTHER_ENDS),
        marks=(THINK, THOUGHT),
        seal=(BLOCK_END,),
        cue=(Mark(HEADER, "assistant"), Mark(HEADED, "\n\n")),
        render=Writing(begin=partial(_write_head, fixed_day), given=_given, wrote=_write).render,
        write=_write,
        reader=partial(TextReader, format=CALLS),
        call=CallForm(
            named=lambda name: (f'{{"name": {dumps(name)}, "parameters":',),
            end="}",
            arguments_key="parameters",
        ),
        with_prompt=_with_prompt,
    )


LLAMA3 = _family()
