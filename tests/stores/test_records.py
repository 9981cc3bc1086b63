"""A turn becomes bytes and a turn again."""

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from segue.seams.history import Round, Turn
from segue.seams.prompt import id_array
from segue.stores.records import FIELD_BYTES_MIN, pack, unpack
from tests.contracts.turns import OWNER, make_turn, meaning, rich_turn, said


def again(turn: Turn) -> Turn:
    return unpack(turn.owner, pack(turn), None, is_whole=True)


# Text that JSON can carry: everything but halves of surrogate pairs.
texts = st.text(st.characters(exclude_categories=["Cs"]))
ids = st.lists(st.integers(0, 2**32 - 1)).map(id_array)


rounds = st.builds(
    Round,
    st.tuples(texts.map(said)),
    st.tuples(texts.map(lambda text: said(text, "assistant"))),
    st.tuples(ids),
    ids,
    st.none() | texts,
    st.booleans(),
)


@settings(deadline=None)
@given(st.lists(rounds))
def test_any_rounds_survive(some: list[Round]) -> None:
    turn = replace(make_turn("t"), rounds=tuple(some))
    assert meaning(again(turn)) == meaning(turn)


def test_warmth_and_tools_are_not_kept() -> None:
    turn = again(rich_turn())
    assert turn.warm is None
    assert turn.tools is None


def test_output_that_was_written_is_kept_once() -> None:
    text = "once upon a time" * 50
    record = pack(make_turn("t", wrote=[said(text, "assistant")]))
    assert (record.history + record.response).count(text.encode()) == 1


def test_long_echoes_are_split_off_and_short_ones_are_not() -> None:
    long = b'"' + b"x" * FIELD_BYTES_MIN + b'"'
    record = pack(make_turn("t", tools=b"[]", instructions=long))
    assert record.tools is None
    assert record.instructions is not None
    assert record.instructions.body == long
    assert long not in record.response


def test_equal_echoes_have_one_digest() -> None:
    one, two = (pack(make_turn(name, tools=b"[" + b" " * 99 + b"]")) for name in "ab")
    assert one.tools == two.tools


def test_reloaded_child_does_not_weigh_what_it_shares_with_its_parent() -> None:
    tools = b"[" + b" " * 19_000 + b"]"
    root = again(make_turn("a", tools=tools))
    child = make_turn("b", root, tools=tools)
    reloaded = unpack(OWNER, pack(child), root, is_whole=True)
    assert root.bytes > 19_000 > reloaded.bytes > len(child.given[0].raw)


def test_record_from_before_guards_has_passed_none() -> None:
    turn = rich_turn()
    record = pack(turn)
    *older, passed, _, _, _, _ = msgspec.msgpack.decode(record.history)
    assert passed == list(turn.passed)
    record = record._replace(history=msgspec.msgpack.encode(older))

    assert unpack(turn.owner, record, None, is_whole=True).passed == ()
