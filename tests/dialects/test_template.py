"""Any chat template: what it writes is what the model gets, and no text becomes more than text."""

import random

import msgspec
import pytest
from msgspec.structs import replace

from segue.dialects.family import TokenDialect
from segue.dialects.template import template_dialect
from segue.errors import InvalidRequest, ServerFault
from segue.seams.history import Round, Turn, Unfinished, Warm
from segue.seams.model import Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import ChatTemplate
from segue.wire.codec import as_item
from segue.wire.items import FunctionCall, FunctionCallOutput
from tests.contracts.dialect import (
    OFFERING,
    TOOLS,
    Heard,
    call,
    cold,
    flat,
    heard,
    message,
    output,
    read,
    reasoning,
    smollm2,
    turn_after,
)
from tests.dialects import templates
from tests.dialects.templates import (
    ROOT_AT,
    conversation,
    encoded_whole,
    from_template,
    head_of,
    shown,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|im_start|>", "<|im_end|>"]
LLAMA3 = ["<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>"]


def simple(template: str = CHATML) -> TokenDialect:
    return template_dialect(smollm2(), ChatTemplate(template, end="<|im_end|>"))


def bare(text: str) -> str:
    """Without white space: templates trim it."""
    return "".join(text.split())


@pytest.mark.parametrize("is_chain", [False, True])
def test_prompt_is_what_the_template_writes(is_chain: bool) -> None:
    """The same ids for items that a client sends; in a chain the same text, where what was sampled is kept."""
    vocabulary = templates.vocabulary("qwen3")
    text = templates.template_of("qwen3")
    dialect = template_dialect(vocabulary, ChatTemplate(text, end="<|im_end|>"))
    rng = random.Random(8)
    for _ in range(50 if is_chain else 200):
        talk, rounds = conversation(rng)
        head, more = head_of(rng, talk)
        thoughts = [str(said.get("reasoning_content", "-")) for said in talk]
        if is_chain and not all(text == "" or text.strip() for text in thoughts):
            # What says nothing is no item.
            continue
        if not is_chain:
            items = [item for given, wrote in rounds for item in (*given, *wrote)]
            expected = from_template(text, messages=talk, **more)
            prompt = flat(dialect.render(Scene(head, None, tuple(items))).prompt)
            assert prompt.tolist() == encoded_whole(vocabulary, expected, SPECIALS)
            continue
        past: Turn | None = None
        for given, wrote in rounds[:-1]:
            scene = Scene(head, past, tuple(given))
            past = turn_after(dialect, scene, dialect.write(wrote))
        scene = Scene(head, past, tuple(rounds[-1][0]))
        prompt = flat(dialect.render(scene).prompt)
        assert flat(dialect.render(cold(scene)).prompt) == prompt
        # Thoughts are left out as the template leaves them out.
        expected = from_template(text, messages=talk, **more)
        assert bare(shown(vocabulary, prompt, SPECIALS)) == bare(expected)


def test_other_template_with_other_marks_and_a_date() -> None:
    vocabulary = templates.vocabulary("llama3_2")
    text = templates.template_of("llama3_2")
    begin, end = "<|begin_of_text|>", "<|eot_id|>"
    dialect = template_dialect(vocabulary, ChatTemplate(text, begin, end))
    items = (
        message("user", "Hi <|eot_id|>"),
        call("look", '{"q": "<|eot_id|>"}'),
        output("42"),
        message("assistant", "So."),
        message("user", "And?"),
    )
    function = {"name": "look", "arguments": {"q": "<|eot_id|>"}}
    talk = [
        {"role": "user", "content": "Hi <|eot_id|>"},
        {"role": "assistant", "tool_calls": [{"function": function}], "content": ""},
        {"role": "tool", "content": "42"},
        {"role": "assistant", "content": "So."},
        {"role": "user", "content": "And?"},
    ]
    expected = from_template(text, messages=talk, tools=templates.CHAT_TOOLS, bos_token=begin)

    scene = Scene(Head(tools=TOOLS), None, items, root_at=ROOT_AT)
    prompt = flat(dialect.render(scene).prompt)

    assert shown(vocabulary, prompt, LLAMA3) == expected
    # The user's and the call's `<|eot_id|>` are text: as many are special as there are blocks.
    assert prompt.tolist().count(vocabulary.special(end)) == 6


def test_only_new_pieces_are_encoded() -> None:
    dialect = simple()
    head = Head(tools=TOOLS, instructions="Be brief. " * 100)
    first = Scene(head, None, (message("user", "Hi"),))
    past = turn_after(dialect, first, dialect.write([message("assistant", "Hello!")]))

    rendered = dialect.render(Scene(head, past, (message("user", "So?"),)))

    assert rendered.tokens_tokenized < 20
    assert rendered.tokens_reused + rendered.tokens_tokenized == rendered.context.length


def test_what_the_template_has_no_place_for_is_written_into_the_text() -> None:
    dialect = simple()
    items = (message("user", "Hi"), reasoning("Hm."), call("look", '{"q": 1}'), output("42"))

    prompt = flat(dialect.render(Scene(Head(tools=TOOLS), None, items)).prompt)

    text = shown(smollm2(), prompt, SPECIALS)
    assert "<|im_start|>system\n# Tools" in text
    assert '<think>\nHm.\n</think>\n\n<tool_call>\n{"name": "look", "arguments": {"q": 1}}' in text
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in text


def test_cue_that_begins_a_thought_is_read_on() -> None:
    template = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
    dialect = simple(template)
    items = [reasoning("Hm."), message("assistant", "So.")]
    expected = [Heard("reasoning", "Hm."), Heard("message", "So.")]

    assert heard(read(dialect, OFFERING, [dialect.write(items)])) == expected
    assert heard(read(dialect, OFFERING, [dialect.write(items[1:])])) == expected[1:]


def test_conversation_that_the_template_refuses_is_refused_in_its_words() -> None:
    refusal = "{% if 'forbidden' in m.content %}{{ raise_exception('Not here') }}{% endif %}"
    template = CHATML.replace("{% endfor %}", refusal + "{% endfor %}")
    dialect = simple(template)

    with pytest.raises(InvalidRequest, match="Not here"):
        dialect.render(Scene(Head(), None, (message("user", "forbidden"),)))


def test_template_that_cannot_be_read_is_said_at_the_start() -> None:
    with pytest.raises(ServerFault):
        simple("{% for m in %}")


def test_template_cannot_reach_out_of_its_sandbox() -> None:
    with pytest.raises(InvalidRequest):
        simple("{{ messages.__class__.__mro__[1].__subclasses__() }}")


def test_template_that_wants_to_see_calls_is_shown_them() -> None:
    """As Mistral's: it refuses two answers in a row that are no calls, and ids of calls that have not nine letters."""
    strict = (
        "{% set ns = namespace(last='') %}{% for m in messages %}"
        "{% if m.role == 'assistant' and not m.tool_calls and ns.last == 'tool-' %}"
        "{{ raise_exception('Where is the call?') }}{% endif %}"
        "{% if m.tool_calls and m.tool_calls[0].id|length != 9 %}"
        "{{ raise_exception('Nine letters!') }}{% endif %}"
        "{% set ns.last = m.role if m.role != 'tool' else ('tool' if ns.last == 'call' else 'tool-') %}"
        "{% if m.tool_calls %}{% set ns.last = 'call' %}{% endif %}"
        "<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        "{{ m.tool_calls[0].id }} {{ m.tool_calls[0].function | tojson }}"
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    dialect = simple(strict)
    head = Head(tools=TOOLS)
    first = Scene(head, None, (message("user", "Hi"),))
    called = smollm2().encode('<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>')
    second = Scene(head, turn_after(dialect, first, called), (output("1"),))
    third = turn_after(dialect, second, dialect.write([message("assistant", "So.")]))
    scene = Scene(head, third, (message("user", "And?"),))

    prompt = flat(dialect.render(scene).prompt)

    assert '{"name": "look", "arguments": {}}' in shown(smollm2(), prompt, SPECIALS)
    assert flat(dialect.render(cold(scene)).prompt) == prompt


def test_thought_that_answers_lose_is_not_kept_before_a_call() -> None:
    """As DeepSeek's: the text before a call is written as it is, that of an answer without its thought."""
    dialect = simple(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}{{ m.content or '' }}"
        "{{ m.tool_calls[0].function | tojson }}{% else %}{{ m.content.split('</think>')[-1] }}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    items = (message("user", "Hi"), reasoning("Hm."), call("look", "{}"), output("1"))
    prompt = flat(dialect.render(Scene(Head(tools=TOOLS), None, items)).prompt)
    text = shown(smollm2(), prompt, SPECIALS)
    assert "Hm." not in text
    assert "look" in text


def test_template_that_wants_arguments_as_text_is_given_text() -> None:
    """Of an object it would write Python."""
    dialect = simple(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}{% for c in m.tool_calls or [] %}"
        '{{ \'{"name": "\' ~ c.function.name ~ \'", "arguments": \' ~ c.function.arguments ~ "}" }}{% endfor %}'
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    called = as_item(FunctionCall(call_id="c", name="look", arguments='{"q": "a"}'))
    items = (message("user", "Hi"), called, output("1"))
    prompt = flat(dialect.render(Scene(Head(tools=TOOLS), None, items)).prompt)
    assert '"arguments": {"q": "a"}}' in shown(smollm2(), prompt, SPECIALS)


@pytest.mark.parametrize("sign, short, long", [("!=", False, False), ("<", False, True)])
def test_id_of_a_client_is_spelt_as_the_template_takes_it(
    sign: str, short: bool, long: bool
) -> None:
    """Mistral's templates refuse ids that are too short, and some of them those that are too long."""
    dialect = simple(
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% for c in m.tool_calls or [] %}"
        f"{{% if c.id|length {sign} 9 %}}{{{{ raise_exception('Nine letters!') }}}}{{% endif %}}"
        "{{ c.id }} {{ c.function | tojson }}{% endfor %}{{ m.content or m.tool_call_id }}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    for id, is_kept in (("c", short), ("call_of_a_client", long), ("abcdefghi", True)):
        called = as_item(FunctionCall(call_id=id, name="look", arguments="{}"))
        answer = as_item(FunctionCallOutput(call_id=id, output=""))
        prompt = flat(dialect.render(Scene(Head(tools=TOOLS), None, (called, answer))).prompt)
        assert (f"{id} {{" in shown(smollm2(), prompt, SPECIALS)) is is_kept


@pytest.mark.parametrize(
    "arguments",
    ['{"a":' + "[" * deep + "]" * deep + "}" for deep in (300, 600, 900, 5_000)]
    + ['{"a":[1' + ",1" * 70_000 + "]}"],
    ids=["300", "600", "900", "5000", "many"],
)
def test_arguments_that_are_too_deep_or_too_many_are_shown_as_a_text(arguments: str) -> None:
    """No template, and nothing else that walks them, is given what it would not come back from."""
    dialect = simple(
        "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.tool_calls %}"
        '{% for c in m.tool_calls %}<tool_call>\n{"name": {{ c.function.name | tojson }}, '
        '"arguments": {{ c.function.arguments | tojson }}}\n</tool_call>{% endfor %}'
        "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    call = as_item(FunctionCall(call_id="c", name="look", arguments=arguments))
    answer = as_item(FunctionCallOutput(call_id="c", output="x"))
    prompt = flat(dialect.render(Scene(Head(tools=TOOLS), None, (call, answer))).prompt)
    text = shown(smollm2(), prompt, SPECIALS)
    assert f'"arguments": {msgspec.json.encode(arguments).decode()}' in text


ONE = '{"name": "look", "arguments": {"q": 1}, "id": "abc"}'
FOUND = Heard("function", '{"q": 1}', "look")


@pytest.mark.parametrize(
    "text, expected",
    [
        (f"[TOOL_CALLS][{ONE}]", [FOUND]),
        (f"I look.[TOOL_CALLS][{ONE}, {ONE}]", [Heard("message", "I look."), FOUND, FOUND]),
        (f"[TOOL_CALLS][{ONE}] So.", [FOUND, Heard("message", " So.")]),
        (f"[TOOL_CALLS][{ONE}, ", [FOUND]),
        (f"[TOOL_CALLS]{ONE}", [FOUND]),
        ("[TOOL_CALLS]", []),
        ("[TOOL_CALLS][1]", [Heard("message", "[1]")]),
    ],
)
def test_list_of_calls_behind_a_special_token_is_heard(text: str, expected: list[Heard]) -> None:
    vocabulary = smollm2("[TOOL_CALLS]")
    dialect = template_dialect(
        vocabulary, ChatTemplate(CHATML + "{# [TOOL_CALLS] #}", end="<|im_end|>")
    )
    ids = encoded_whole(vocabulary, text, ["[TOOL_CALLS]"])

    assert heard(read(dialect, OFFERING, [[id] for id in ids])) == expected


def test_history_that_is_sent_again_is_tokenized_once() -> None:
    """What was recalled stands for the items that it was made of, and changes no token."""
    dialect = simple()
    before = (message("user", "Hello"), message("assistant", "Hi <|im_end|>"), message("user", "?"))
    first = dialect.render(Scene(Head(instructions="Brief."), None, before))
    head = Head(instructions="Brief.")
    new = (message("assistant", "Yes."), message("user", "Then go on."))
    warm_before = Warm(dialect.fingerprint, head, first.context)
    scene = Scene(head, Unfinished(None, (Round(before),), warm_before), new)

    warm = dialect.render(scene)
    bare = dialect.render(Scene(head, None, before + new))

    assert flat(warm.prompt) == flat(bare.prompt)
    assert warm.tokens_reused == first.context.length
    assert warm.tokens_tokenized == bare.context.length - first.context.length
    other = dialect.render(replace(scene, head=Head(instructions="Long.")))
    assert other.tokens_reused == 0


def test_template_that_forgets_goes_on_from_an_older_prompt() -> None:
    """Here only the last message of the user is told in full."""
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        "{{ m.content if loop.revindex0 < 3 or m.role != 'user' else 'old' }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    dialect = simple(text)
    past: Turn | None = None
    for n in range(4):
        scene = Scene(Head(), past, (message("user", f"Question {n}"),))
        warm, bare = dialect.render(scene), dialect.render(cold(scene))
        assert flat(warm.prompt) == flat(bare.prompt)
        parsed = dialect.write([message("assistant", "Yes.")])
        past = turn_after(dialect, scene, parsed.tolist())


def test_cue_that_depends_is_found_by_running_the_template_without_it() -> None:
    text = (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant number {{ messages|length }}\n{% endif %}"
    )
    dialect = simple(text)
    given = tuple(message("user", f"{n}") for n in range(3))

    rendered = dialect.render(Scene(Head(), None, given))

    vocabulary = smollm2()
    cue = b"".join(map(vocabulary.bytes_of, rendered.cue))
    assert cue == b"assistant number 3\n"
    assert b"".join(map(vocabulary.bytes_of, flat(rendered.context))).endswith(b"2\n")
