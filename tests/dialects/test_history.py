"""History as the models' own templates write it: thoughts, calls, outputs, and who may speak when."""

from __future__ import annotations

import re
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.dialects.family import TokenDialect
from segue.dialects.template import template_dialect
from segue.seams.history import Turn
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import Chat, ChatTemplate, TemplateRunner
from segue.vocabularies.vocabulary import Own, Vocabulary
from segue.wire.items import Item
from segue.wire.requests import Effort, ReasoningConfig
from tests.contracts import dialect as contract
from tests.contracts.dialect import (
    TOOLS,
    DialectCase,
    call,
    cold,
    flat,
    item,
    message,
    output,
    reasoning,
    smollm2,
    turn_after,
)
from tests.dialects.templates import CHAT_TOOLS, shown
from tests.models import assets

# What stands in templates and is one token; a few that only look like it do no harm.
MARKISH = re.compile(
    r"<\|?/?[\w:.\-▁]+\|?>|</?｜[^｜\s]+｜\w*>?|\[/?[A-Z_]{3,}\]|\]~!?b\[?\]?|\[e~\[|<\|\"\|>"
)
FAMILIES = [
    "Qwen3.5-4B",
    "Qwen3-Coder",
    "GLM-4.6",
    "GLM-4.7-Flash",
    "MiniMax-M2",
    "deepseek-ai-DeepSeek-V3.1",
    "deepseek-ai-DeepSeek-V4",
    "NVIDIA-Nemotron-3-Nano-30B-A3B-BF16",
    "meta-llama-Llama-3.1-8B-Instruct",
    "google-gemma-4-31B-it",
    "poolside-Laguna-XS.2",
    "StepFun3.5-Flash",
]
# Qwen3-Coder, DeepSeek V3.1 and Llama 3.1 have no thoughts.
THOUGHTLESS = {"Qwen3-Coder", "deepseek-ai-DeepSeek-V3.1", "meta-llama-Llama-3.1-8B-Instruct"}
VALUES = {"enable_thinking": True, "thinking": True}


@cache
def vocabulary() -> Vocabulary:
    """SmolLM2's, with the marks of all these templates."""
    marks = {
        mark for name in assets.template_names() for mark in MARKISH.findall(assets.template(name))
    }
    return smollm2(*sorted(marks - smollm2().specials))


@cache
def template(name: str) -> ChatTemplate:
    text = assets.template(name)
    ends = ("<|im_end|>", "<|eot_id|>", "<｜end▁of▁sentence｜>", "[e~[", "<turn|>", "</s>")
    end = next((end for end in ends if end in text), "<|endoftext|>")
    return ChatTemplate(text, "<|endoftext|>", end, values=VALUES)


@cache
def dialect(name: str) -> TokenDialect:
    return template_dialect(vocabulary(), template(name))


def bare(text: str) -> str:
    return "".join(text.split())


def text_of(ids: list[int]) -> str:
    return shown(vocabulary(), ids, sorted(vocabulary().specials))


def in_chat(thought: str, text: str, city: str | None) -> dict[str, object]:
    found: dict[str, object] = {"role": "assistant", "content": text}
    if thought:
        found |= dict.fromkeys(("reasoning_content", "reasoning", "thinking"), thought)
    if city is not None:
        function = {"name": "look", "arguments": {"q": city}}
        found["tool_calls"] = [{"type": "function", "id": "c", "function": function}]
    return found


SAID = [
    ("user", "Weather in Paris?", "I must look.", "", "Paris"),
    ("tool", "18 C", "I have it.", "It is 18 C.", None),
    ("user", "And in Rome?", "Again.", "", "Rome"),
    ("tool", "20 C", "Done.", "20 C there.", None),
    ("user", "Thanks.", "", "", None),
]


@pytest.mark.parametrize("name", FAMILIES)
def test_every_turn_is_the_template_run_cold(name: str) -> None:
    """Inside a loop of calls the prompt goes on from what was sampled; where the template drops thoughts, they go."""
    head = Head(instructions="Be brief.", tools=TOOLS)
    runner = TemplateRunner(template(name))
    chat: Chat = [{"role": "system", "content": "Be brief."}]
    past: Turn | None = None
    before: list[int] = []
    for role, text, thought, words, city in SAID:
        thought = "" if name in THOUGHTLESS else thought
        given = message("user", text) if role == "user" else output(text)
        more = {"tool_call_id": "c", "name": "look"} if role == "tool" else {}
        chat.append({"role": role, "content": text, **more})
        scene = Scene(head, past, (given,))
        rendered = dialect(name).render(scene)
        prompt = flat(rendered.prompt).tolist()

        expected = runner.run(chat, CHAT_TOOLS, 0, is_cued=True)
        found = text_of(prompt)
        if name == "deepseek-ai-DeepSeek-V3.1":
            # It has no words for tools, so that we have.
            found, expected = (one[one.index("Weather") :] for one in (found, expected))
        assert bare(found) == bare(expected)
        assert flat(dialect(name).render(cold(scene)).prompt).tolist() == prompt
        if role == "tool":
            assert prompt[: len(before)] == before
        if before:
            assert rendered.tokens_tokenized < 130

        wrote = [
            *([reasoning(thought)] if thought else []),
            *([message("assistant", words)] if words else []),
            *([call("look", f'{{"q": "{city}"}}')] if city else []),
        ]
        chat.append(in_chat(thought, words, city))
        sampled = dialect(name).write(wrote).tolist()
        past = turn_after(dialect(name), scene, sampled)
        before = prompt + sampled[:-1]


def prompt_of(name: str, *items: Item, effort: Effort | None = None, **head: object) -> str:
    found = Head(reasoning=ReasoningConfig(effort=effort), **head)  # type: ignore[arg-type]
    return text_of(flat(dialect(name).render(Scene(found, None, items)).prompt).tolist())


CODEX = [
    "Qwen3.5-4B", "MiniMax-M2", "MiniMax-M3", "Mistral-Small-3.2-24B-Instruct-2506",
    "mistralai-Mistral-Nemo-Instruct-2407", "mistralai-Ministral-3-14B-Reasoning-2512",
    "HuggingFaceTB-SmolLM3-3B", "deepseek-ai-DeepSeek-R1-Distill-Llama-8B", "google-gemma-2-2b-it",
    "meta-llama-Llama-3.1-8B-Instruct", "GLM-4.6",
]  # fmt: skip


@pytest.mark.parametrize("name", CODEX)
def test_messages_of_codex_are_neither_refused_nor_lost(name: str) -> None:
    """Its warm-up is a developer message alone; later it speaks as developer again, in the middle and after a tool."""
    developer, sandbox = (
        message("developer", "You are first."),
        message("developer", "You are 2nd."),
    )
    prompt_of(name, developer, instructions="Be zeroth.", tools=TOOLS)
    asked = (developer, sandbox, message("user", "Context 3."), message("user", "Question 4."))
    goes_on = (*asked, call("look", "{}"), output("Output 5."), message("developer", "Mind 6."),
               message("user", "Question 7."))  # fmt: skip

    text = prompt_of(name, *goes_on, instructions="Be zeroth.", tools=TOOLS)

    places = [text.find(mark) for mark in (
        "Be zeroth.", "You are first.", "You are 2nd.", "Context 3.", "Question 4.", "Output 5.", "Question 7.",
    )]  # fmt: skip
    assert -1 not in places
    assert places == sorted(places)
    assert "Mind 6." in text


def test_warm_up_that_a_template_cannot_write_is_the_beginning_of_what_follows() -> None:
    """Qwen3.5 refuses a conversation without a question."""
    developer = message("developer", "You are Codex.")
    warm_up = dialect("Qwen3.5-4B").render(Scene(Head(tools=TOOLS), None, (developer,)))
    following = Scene(Head(tools=TOOLS), None, (developer, message("user", "Hi")))

    begun = flat(warm_up.context)

    assert "You are Codex." in text_of(begun.tolist())
    assert flat(dialect("Qwen3.5-4B").render(following).context)[: len(begun)] == begun


@pytest.mark.parametrize(
    "name, cue", [("Qwen3.5-4B", "<think>\n\n</think>\n\n"), ("GLM-4.6", "<think></think>")]
)
def test_effort_none_ends_the_thought_and_history_stays_exact(name: str, cue: str) -> None:
    quiet, loud = (Head(reasoning=ReasoningConfig(effort=effort)) for effort in ("none", "high"))
    first = Scene(quiet, None, (message("user", "Hi"),))
    rendered = dialect(name).render(first)
    said = vocabulary().encode("Hello there.")
    past = turn_after(dialect(name), first, said)

    assert text_of(rendered.cue.tolist()).endswith(cue)
    assert [
        one.value.type if hasattr(one.value, "type") else "message" for one in past.rounds[0].wrote
    ] == ["message"]
    following = text_of(
        flat(dialect(name).render(Scene(loud, past, (message("user", "So?"),))).prompt).tolist()
    )
    assert following.count("Hello there.") == 1
    assert "<think>Hello" not in bare(following)


def test_glm_has_its_ends_once() -> None:
    scene = Scene(Head(), None, (message("user", "Hi"),))
    end = vocabulary().special("<|user|>")
    sampled = [*vocabulary().protecting(assets.template("GLM-4.6")).encode("\nHello!"), end]
    past = turn_after(dialect("GLM-4.6"), scene, sampled)

    following = flat(
        dialect("GLM-4.6").render(Scene(Head(), past, (message("user", "So?"),))).prompt
    )

    assert end in dialect("GLM-4.6").stops
    assert following.tolist().count(end) == 2


def test_call_that_was_cut_off_is_left_out() -> None:
    broken = item(
        "function_call", call_id="x", name="look", arguments='{"q": "Par', status="incomplete"
    )

    text = prompt_of(
        "GLM-4.6", message("user", "Hi"), broken, message("user", "Again"), tools=TOOLS
    )

    assert "Par" not in text.partition("Hi")[2]


def test_prompt_is_held_against_the_template() -> None:
    """What was sampled in other words than the template has is seen; other white space is not."""
    found = dialect("Qwen3.5-4B")
    scene = Scene(Head(tools=TOOLS), None, (message("user", "Hi"),))
    same, other = (
        "Hm.\n</think>\n\n\n{}",
        "Hm.\n</think>\n\n<tool_call>\n<function=look>\n</tool_call>",
    )
    for text, is_other in ((same, False), (other, True)):
        protected = vocabulary().protecting(assets.template("Qwen3.5-4B"))
        past = turn_after(found, scene, protected.ids(Own(text)))
        given = output("1") if is_other else message("user", "So?")
        following = Scene(scene.head, past, (given,))
        assert found.differs(following, found.render(following)) is is_other


def test_outputs_have_the_id_that_stands_in_their_call() -> None:
    """Mistral's models invent an id of nine letters; Kimi's count their calls."""
    name = "mistralai-Mistral-Nemo-Instruct-2407"
    scene = Scene(Head(tools=TOOLS), None, (message("user", "Hi"),))
    called = '[TOOL_CALLS][{"name": "look", "arguments": {}, "id": "abcdefghi"}]'
    past = turn_after(dialect(name), scene, vocabulary().ids(Own(called)))
    following = Scene(scene.head, past, (output("1"),))
    text = text_of(flat(dialect(name).render(following).prompt).tolist())
    (told,) = re.findall(r'"id": "(\w+)"', text)

    assert f'"call_id": "{told}"' in text
    items = (message("user", "Hi"), call("look", "{}"), output("1"))
    assert "Return of functions.look:0" in prompt_of("moonshotai-Kimi-K2", *items, tools=TOOLS)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(data=st.data())
def test_warmth_changes_no_token_where_thoughts_are_dropped(data: st.DataObject) -> None:
    name = "Qwen3.5-4B"
    protected = vocabulary().protecting(assets.template(name))
    marks = ("<|im_end|>", "<think>", "</think>", "<tool_call>")
    case = DialectCase(dialect(name), protected, marks, forgets=lambda scene, following: True)

    contract.warmth_changes_no_token(case, data.draw(contract.steps(case, is_one_head=False)))


@pytest.mark.parametrize("name", ["Mistral-Small-3.2-24B-Instruct-2506", "MiniMax-M2", "Kimi-K3"])
def test_beginnings_that_a_truncation_leaves_are_not_refused(name: str) -> None:
    """The output of a call that is gone, and an answer before any question."""
    asked = message("user", "Well?")

    assert "Output 1." in prompt_of(name, output("Output 1."), asked, tools=TOOLS)
    assert "Answer 1." in prompt_of(name, message("assistant", "Answer 1."), asked, tools=TOOLS)
