"""How do ChatML models write and read? SmolLM2, Qwen2.5, Qwen3 and Hermes.

A prompt is a row of blocks, `<|im_start|>role`, newline, content, `<|im_end|>`, newline. Role and content are
encoded together, because a newline merges with what follows it, and never with the special ids around
them, so that blocks can be encoded one by one and a user's `<|im_end|>` is only text.

Inside an assistant's block stands `<think>`, then what it says, then each call as JSON between `<tool_call>` marks;
`text_reader.py` reads it. Some vocabularies have these marks as tokens, others spell them; either way only ours are
marks. The models differ in few things: the parameters of `_family`.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial

from segue.dialects.family import Family, is_from, message_text, system_of
from segue.dialects.parts import MODEL_TURN, Part, blocks_of, dumps, object_or_string, parts_of
from segue.dialects.warm import NameOf, Writing
from segue.readers.forced import CallForm
from segue.readers.formats import HERMES
from segue.readers.offers import definition_of
from segue.readers.text_reader import TextReader
from segue.rests import rested
from segue.seams.history import Round
from segue.seams.prompt import NO_IDS, Head, IdArray
from segue.vocabularies.vocabulary import Chunk, Mark, Own, Vocabulary, extend
from segue.wire.items import Item, Reasoning
from segue.wire.tools import Offer

START = "<|im_start|>"
END = "<|im_end|>"
END_OF_TEXT = "<|endoftext|>"
BLOCK = Mark(START)
CALL = "<tool_call>"
CALLED = "</tool_call>"
RESPONSE = "<tool_response>"
RESPONDED = "</tool_response>"
THINK = HERMES.think
THOUGHT = HERMES.thought
# After a block stands a newline of its own.
BLOCK_END = Mark(END, "\n")
# A change of this file that changes what kept ids mean needs a new number.
VERSION = "chatml1"

# The words of the models' own templates.
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QWEN2_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TOOLS_BEFORE = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"
)
TOOLS_AFTER = (
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments "
    "within <tool_call></tool_call> XML tags:\n<tool_call>\n"
)
CALL_SHOWN = '{"name": <function-name>, "arguments": <args-json-object>}'
NO_THOUGHT = f"{THINK}\n\n{THOUGHT}\n\n"

ROLES = {
    "think": "assistant", "talk": "assistant", "call": "assistant", "response": "user",
    "tools": "system",
}  # fmt: skip
JOINS = MODEL_TURN | {("response", "response")}


# --- writing --------------------------------------------------------------------------------------


def _write_head(
    default_system: str | None,
    call_shown: str,
    vocabulary: Vocabulary,
    head: Head,
    items: Sequence[Item],
    root_at: int,
    name_of: NameOf,
) -> IdArray[int]:
    """The first block is the system's."""
    system, items = system_of(head, items)
    if system is None:
        system = default_system
    chunks: list[Chunk] = [] if system is None else [system]
    if head.tools.offers:
        chunks += ["\n\n"] if chunks else []
        chunks += _tools_section(definitions_of(head.tools.offers), call_shown)
    ids = array("I")
    if chunks:
        ids = vocabulary.ids(BLOCK, "system\n", *chunks, BLOCK_END)
    extend(ids, _given(vocabulary, items, name_of))
    return ids


def _given(vocabulary: Vocabulary, items: Sequence[Item], name_of: NameOf) -> IdArray[int]:
    ids = array("I")
    for parts in blocks_of(items, JOINS, definitions_of):
        role = ROLES.get(parts[0].kind, parts[0].kind)
        extend(ids, vocabulary.ids(BLOCK, f"{role}\n", *content_of(parts), BLOCK_END))
    return ids


def _write(end: Mark, vocabulary: Vocabulary, items: Sequence[Item]) -> IdArray[int]:
    return vocabulary.ids(*content_of(parts_of(items)), end)


def content_of(parts: Sequence[Part]) -> list[Chunk]:
    """The content of one block that says all these parts."""
    content: list[Chunk] = []
    for n, part in enumerate(parts):
        if n and parts[n - 1].kind != "think":
            content.append("\n")
        match part.kind:
            case "think":
                content += [Own(f"{THINK}\n"), part.text, Own(f"\n{THOUGHT}\n\n")]
            case "call":
                named = f'"name": {dumps(part.name)}, "arguments": {object_or_string(part.text)}'
                content += [Own(f"{CALL}\n"), f"{{{named}}}", Own(f"\n{CALLED}")]
            case "response":
                content += [Own(f"{RESPONSE}\n"), part.text, Own(f"\n{RESPONDED}")]
            case "tools":
                content += _tools_section(part.text, CALL_SHOWN)
            case _:
                content.append(part.text)
    return content


def tools_content(tools: Iterable[Offer]) -> list[Chunk]:
    """What the system says about the tools."""
    return content_of([Part("tools", definitions_of(tools))])


def definitions_of(tools: Iterable[Offer]) -> str:
    """The tools themselves, each in a line."""
    return "\n".join(dumps(definition_of(tool)) for tool in rested(tools))


def _tools_section(definitions: str, call_shown: str) -> tuple[Chunk, ...]:
    return Own(TOOLS_BEFORE), definitions, Own(f"{TOOLS_AFTER}{call_shown}\n{CALLED}")


# --- forgetting thoughts --------------------------------------------------------------------------


def _last_question(items: Sequence[Item]) -> int:
    """Up to the last message of the user that is not a tool's output in disguise."""
    for count in range(len(items), 0, -1):
        if is_from(items[count - 1 : count], "user"):
            text = message_text(items[count - 1])
            if not (text.startswith(RESPONSE) and text.endswith(RESPONDED)):
                return count
    return 0


def _has_empty_thought(vocabulary: Vocabulary, round: Round) -> bool:
    # A warm-up has sampled nothing.
    first = next((ids[0] for ids in (*round.ids, round.tail) if ids), None)
    return first is not None and vocabulary.bytes_of(first) == THINK.encode()


def _kept(vocabulary: Vocabulary, round: Round, forgotten: int) -> IdArray[int]:
    """What was sampled; where thoughts are forgotten, also without the marks and newlines that they leave."""
    joined = array("I")
    is_gap = forgotten > 0
    for n, (item, ids) in enumerate(zip(round.wrote, round.ids, strict=True)):
        if n < forgotten and isinstance(item.value, Reasoning):
            is_gap = True
            continue
        joined.extend(_without_gap(vocabulary, ids) if is_gap else ids)
        is_gap = False
    return joined + (_without_gap(vocabulary, round.tail) if is_gap else round.tail)


def _without_gap(vocabulary: Vocabulary, ids: IdArray[int]) -> IdArray[int]:
    """Without an empty thought, its marks included, and without newlines after a thought."""
    is_inside = False
    for at, id in enumerate(ids):
        text = vocabulary.bytes_of(id)
        if text in (THINK.encode(), THOUGHT.encode()):
            is_inside = text == THINK.encode()
        elif not text or text.strip(None if is_inside else b"\n"):
            return ids[at:]
    return NO_IDS


# --- the families ---------------------------------------------------------------------------------


def _family(
    name: str,
    default_system: str | None = None,
    call_shown: str = CALL_SHOWN,
    *,
    variant: str = "",
    thinks: bool = False,
    forgets_marks: bool = False,
) -> Family:
    """`default_system`: the system text where a request has none; None: then there is no system block. `call_shown`: a
    call as it is shown to the model. `thinks`: the model thinks before it answers, unless its answer begins with
    an empty thought, and forgets what it thought before the user's last message. `forgets_marks`: the model often
    writes the JSON of a call without marks. `variant`: what kept ids are named after, where that is not the name."""
    format = replace(HERMES, is_mended=True, is_guessed=forgets_marks)
    return Family(
        name=name,
        version=f"{VERSION}-{variant or name}",
        specials=(START, END),
        stops=(END, END_OF_TEXT),
        marks=(CALL, CALLED, RESPONSE, RESPONDED, THINK, THOUGHT, "<tools>", "</tools>"),
        seal=(BLOCK_END,),
        cue=(Mark(START, "assistant\n"),),
        render=Writing(
            begin=partial(_write_head, default_system, call_shown),
            given=_given,
            wrote=partial(_write, BLOCK_END),
            turning=_last_question if thinks else None,
            kept=_kept,
            has_empty_thought=_has_empty_thought,
        ).render,
        write=partial(_write, Mark(END)),
        reader=partial(TextReader, format=format),
        call=CallForm(
            named=lambda name: (Own(f"{CALL}\n"), f'{{"name": {dumps(name)}, "arguments":'),
            end=f"}}\n{CALLED}",
            before_object=(Own(f"{CALL}\n"),),
        ),
        without_thought=(Own(NO_THOUGHT),) if thinks else (),
        is_thought_optional=thinks,
    )


SMOLLM2 = _family("smollm2", SMOLLM2_SYSTEM, forgets_marks=True)
QWEN2 = _family("qwen2", QWEN2_SYSTEM, forgets_marks=True)
# A slip in the coder models' template, which they were trained on.
QWEN2_CODER = _family(
    "qwen2", QWEN2_SYSTEM, f"{{{CALL_SHOWN}}}", variant="qwen2-coder", forgets_marks=True
)
QWEN3 = _family("qwen3", thinks=True)
# Hermes, and every other model that writes ChatML: no system text of its own.
PLAIN = _family("chatml", variant="plain")
