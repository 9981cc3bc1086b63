"""What every `Dialect` promises, whichever family it writes for."""

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.dialects.chatml import QWEN3, SMOLLM2
from segue.dialects.choose import FAMILIES
from segue.dialects.family import Family, TokenDialect
from segue.dialects.harmony import HARMONY
from segue.dialects.llama3 import LLAMA3
from segue.dialects.mistral import MISTRAL
from segue.dialects.template import template_dialect
from segue.seams.model import Delta, Deltas, Scene
from segue.seams.prompt import Head
from segue.vocabularies.chat_template import ChatTemplate
from segue.vocabularies.gguf import read_gguf
from segue.wire.items import Item, ItemValue, Message
from segue_embedded.weights import find_weights
from tests.contracts import dialect as contract
from tests.contracts.dialect import DialectCase, smollm2
from tests.contracts.turns import SAMPLES


def chatml() -> DialectCase:
    vocabulary = smollm2()
    marks = (
        "<|im_start|>", "<|im_end|>", "<|endoftext|>", "<think>", "</think>", "<tool_call>",
        "</tool_call>", "<tool_response>", "</tool_response>", '<tool_call>\n{"name": "',
        '{"name": "look", "arguments": ', '{"arguments": {}, "name": "patch"}', "<filename>",
    )  # fmt: skip
    return DialectCase(TokenDialect(SMOLLM2, vocabulary), vocabulary, marks)


def qwen3() -> DialectCase:
    vocabulary = smollm2(texts=("<think>", "</think>", "<tool_call>", "</tool_call>"))
    marks = ("<|im_start|>", "<|im_end|>", "<think>", "</think>", "\n\n", "<tool_call>")
    return DialectCase(
        TokenDialect(QWEN3, vocabulary),
        vocabulary,
        marks,
        forgets=lambda _, following: any(is_from(item, "user") for item in following.given),
    )


def llama3() -> DialectCase:
    specials = (
        "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
        "<|eot_id|>", "<|eom_id|>", "<|python_tag|>",
    )  # fmt: skip
    vocabulary = smollm2(*specials)
    marks = (*specials, "<think>", "</think>", "```", "```json\n{", '{"name": "look", ', "; ", "}}")
    return DialectCase(TokenDialect(LLAMA3, vocabulary), vocabulary, marks)


def mistral() -> DialectCase:
    specials = (
        "<s>", "</s>", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[INST]",
        "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[THINK]", "[/THINK]", "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]",
    )  # fmt: skip
    vocabulary = smollm2(*specials)
    marks = (*specials, "<think>", "```json\n{", '[{"name": "look", ', "look", "patch", "}]")
    return DialectCase(TokenDialect(MISTRAL, vocabulary), vocabulary, marks)


def harmony() -> DialectCase:
    specials = (
        "<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>",
        "<|return|>",
    )  # fmt: skip
    vocabulary = smollm2(*specials)
    marks = (*specials, "analysis", "commentary to=functions.look ", "final", " to=fs.read")
    return DialectCase(
        TokenDialect(HARMONY, vocabulary),
        vocabulary,
        marks,
        forgets=lambda _, following: any(
            is_from(item, "assistant")
            for item in (
                *(following.past.rounds[-1].wrote if following.past else ()),
                *following.given,
            )
        ),
        ends=frozenset([vocabulary.special("<|end|>")]),
    )


def template() -> DialectCase:
    """SmolLM2's own template, which knows of no tools."""
    pytest.importorskip("jinja2")
    path = find_weights("smollm2")
    text = read_gguf(path)["tokenizer.chat_template"]
    assert isinstance(text, str)
    vocabulary = smollm2("[TOOL_CALLS]")
    marks = (
        "<|im_start|>",
        "<|im_end|>",
        "<think>",
        "</think>",
        "<tool_call>",
        "```",
        "\ufdd0",
        "[{",
    )
    return DialectCase(
        template_dialect(vocabulary, ChatTemplate(text, end="<|im_end|>")),
        vocabulary,
        marks,
        # A template writes its default system text before the first message, and nothing before that.
        forgets=lambda scene, _: (
            not scene.given
            and not scene.head.tools.offers
            and not any(round.given or round.did_sample for round in scene.history())
        ),
        is_joined=True,
    )


def is_from(item: Item, role: str) -> bool:
    return isinstance(item.value, Message) and item.value.role == role


MAKERS = {
    "chatml": chatml,
    "qwen3": qwen3,
    "llama3": llama3,
    "mistral": mistral,
    "harmony": harmony,
    "template": template,
}


@pytest.fixture(scope="module", params=MAKERS)
def family(request: pytest.FixtureRequest) -> DialectCase:
    return MAKERS[request.param]()


def test_every_family_in_the_table_keeps_the_contract() -> None:
    """Names with the same version share what they write, and differ in words only."""
    tested = {version_of(family) for family in FAMILIES if family.name in MAKERS}

    assert {version_of(family) for family in FAMILIES} == tested


def version_of(family: Family) -> str:
    return family.version.partition("-")[0]


def examples(count: int) -> settings:
    """So many where the profile has a hundred."""
    # The family is made once and never changes, so that examples may share it.
    return settings(
        max_examples=count * settings.default.max_examples // 100,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@examples(300)
@given(data=st.data())
def test_reader_keeps_every_id(family: DialectCase, data: st.DataObject) -> None:
    contract.keeps_every_id(family, data.draw(contract.sampled_ids(family)))


@examples(50)
@given(data=st.data(), is_cut=st.booleans())
def test_reader_does_not_care_where_pieces_are_cut(
    family: DialectCase, data: st.DataObject, is_cut: bool
) -> None:
    contract.does_not_care_where_pieces_are_cut(
        family, data.draw(contract.sampled_ids(family)), is_cut
    )


@examples(150)
@given(data=st.data())
def test_warmth_changes_no_token(family: DialectCase, data: st.DataObject) -> None:
    contract.warmth_changes_no_token(family, data.draw(contract.steps(family)))


@examples(100)
@given(data=st.data())
def test_warmth_under_another_head_changes_no_token(
    family: DialectCase, data: st.DataObject
) -> None:
    contract.warmth_changes_no_token(family, data.draw(contract.steps(family, is_one_head=False)))


@examples(60)
@given(data=st.data(), head=st.sampled_from(contract.HEADS))
def test_recalling_changes_no_token(family: DialectCase, data: st.DataObject, head: Head) -> None:
    contract.recall_changes_no_token(family, data.draw(contract.odd_items(family)), head)


@examples(80)
@given(data=st.data(), head=st.sampled_from(contract.HEADS))
def test_warmth_survives_what_items_bring_and_compactions(
    family: DialectCase, data: st.DataObject, head: Head
) -> None:
    contract.warmth_survives_oddities(family, data.draw(contract.odd_steps(family)), head)


def test_call_before_a_compaction_is_known_to_no_output_behind_it(family: DialectCase) -> None:
    call = contract.item(
        "mcp_call", id="m", server_label="s", name="n", arguments="{}", output="there"
    )
    answer = contract.item("segue:tool_output", call_id="m", output="it")
    given = [(call, False), (contract.message("user", "Go on."), True), (answer, False)]
    steps = [contract.OddStep((one,), None, is_fresh) for one, is_fresh in given]
    contract.warmth_survives_oddities(family, steps, Head())


@examples(60)
@given(data=st.data())
def test_prompt_goes_on_where_the_engine_stopped(family: DialectCase, data: st.DataObject) -> None:
    contract.prompt_goes_on_where_the_engine_stopped(family, data.draw(contract.steps(family)))


@examples(60)
@given(data=st.data())
def test_rounds_of_one_turn_are_history_too(family: DialectCase, data: st.DataObject) -> None:
    contract.rounds_of_one_turn_are_history_too(family, data.draw(contract.steps(family)))


@examples(60)
@given(data=st.data())
def test_ids_of_another_vocabulary_are_not_used(family: DialectCase, data: st.DataObject) -> None:
    contract.foreign_ids_are_not_used(family, data.draw(contract.sampled_ids(family)))


@examples(100)
@given(data=st.data())
def test_text_never_becomes_special(family: DialectCase, data: st.DataObject) -> None:
    text = data.draw(contract.texts(*family.marks))
    contract.text_never_becomes_special(family, items_with(text), items_with("word"))


def items_with(text: str) -> list[Item]:
    return [
        contract.message("user", text),
        contract.output(text),
        contract.custom_call("patch", text),
        contract.message("system", text),
    ]


# What lists tools brings them, and an approval lets a call run: what comes of both is told, they are not.
UNTOLD = ("mcp_list_tools", "mcp_approval_response")


@pytest.mark.parametrize("kind", [one for one in SAMPLES if " " not in one and one not in UNTOLD])
def test_item_of_each_type_reaches_the_model(family: DialectCase, kind: str) -> None:
    """No type is dropped: with it the prompt is longer."""
    raw = SAMPLES[kind].encode()
    item = Item(raw, msgspec.json.decode(raw, type=ItemValue))
    before = contract.message("user", "Hello")

    without = family.dialect.render(Scene(Head(), None, (before,)))
    rendered = family.dialect.render(Scene(Head(), None, (before, item)))

    assert rendered.prompt.length > without.prompt.length


def test_empty_answer_is_sealed(family: DialectCase) -> None:
    parsed = contract.read(family.dialect, contract.BARE, [])

    assert contract.heard(parsed) == []
    assert contract.all_ids(parsed)[0] in family.dialect.stops | family.ends


def test_reader_of_tokens_refuses_deltas(family: DialectCase) -> None:
    with pytest.raises(AssertionError):
        family.dialect.reader(contract.BARE).feed(Deltas((Delta(text="Hello"),)))
