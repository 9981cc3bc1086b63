"""How likely tokens were goes with the text that they made, in every family and however the stream is cut."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from segue.dialects.messages import MessagesDialect
from segue.seams.model import (
    Delta,
    Deltas,
    Ids,
    ItemClosed,
    ItemOpened,
    ItemText,
    Parsed,
    TokenLogprob,
)
from segue.wire.items import Logprob, TopLogprob
from tests.contracts import dialect as contract
from tests.contracts.dialect import BARE, OFFERING, DialectCase
from tests.contracts.test_dialects import MAKERS

few = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module", params=MAKERS)
def family(request: pytest.FixtureRequest) -> DialectCase:
    return MAKERS[request.param]()


def logprobs(id: int) -> TokenLogprob:
    return TokenLogprob(-id / 1000, ((id, -id / 1000), (7, -9.0)))


def read(
    family: DialectCase, pieces: Sequence[Sequence[int]], *, is_cut: bool = False
) -> list[Parsed]:
    reader = family.dialect.reader(OFFERING)
    parsed: list[Parsed] = []
    for ids in pieces:
        parsed += reader.feed(Ids(ids, [logprobs(id) for id in ids]))
    return parsed + reader.close(is_cut=is_cut)


def messages(parsed: Sequence[Parsed]) -> list[tuple[str, list[Logprob]]]:
    """The texts, with what was told of their tokens; nothing else has any."""
    found: list[tuple[str, list[Logprob]]] = []
    is_message = False
    for value in parsed:
        match value:
            case ItemOpened():
                is_message = value.kind == "message"
                found += [("", [])] if is_message else []
            case ItemText() if is_message:
                found[-1] = (found[-1][0] + value.text, found[-1][1] + list(value.logprobs))
            case ItemText():
                assert not value.logprobs
            case ItemClosed():
                is_message = False
            case _:
                pass
    return found


@few
@given(data=st.data())
def test_tokens_of_a_text_are_told_with_it(family: DialectCase, data: st.DataObject) -> None:
    ids = data.draw(contract.sampled_ids(family))
    parsed = read(family, [ids])

    bare = [ItemText(one.text) if isinstance(one, ItemText) else one for one in parsed]
    assert bare == contract.read(family.dialect, OFFERING, [ids])
    for text, logprobs in messages(parsed):
        spelt = b"".join(bytes(one.bytes) for one in logprobs).decode(errors="replace")
        # A token may have begun before the text, or go on behind it, as a mark.
        is_stray = family.vocabulary.has_special("<|channel|>") and not logprobs
        assert text.strip("\ufffd") in spelt or is_stray or "\ufffd" in spelt
        for one in logprobs:
            assert one.token == bytes(one.bytes).decode(errors="backslashreplace")
            assert len(one.top_logprobs) == 2


@few
@given(data=st.data(), is_cut=st.booleans())
def test_where_pieces_are_cut_changes_no_odds(
    family: DialectCase, data: st.DataObject, is_cut: bool
) -> None:
    ids = data.draw(contract.sampled_ids(family))
    whole = read(family, [ids], is_cut=is_cut)
    at = data.draw(st.integers(0, len(ids)))

    assert read(family, [[id] for id in ids], is_cut=is_cut) == whole
    assert read(family, [ids[:at], ids[at:]], is_cut=is_cut) == whole


def test_each_token_of_a_plain_text_is_told_once(family: DialectCase) -> None:
    text = "Hello 🦜, <b>you</b> and\n\nme"
    ids = family.dialect.write([contract.message("assistant", text)])
    found = messages(read(family, [ids.tolist()]))

    assert [one[0] for one in found] == [text]
    assert b"".join(bytes(one.bytes) for one in found[0][1]) == text.encode()
    assert any(one.token.startswith("\\x") for one in found[0][1])


def test_beginning_that_was_ours_has_no_odds(family: DialectCase) -> None:
    reader = family.dialect.reader(BARE)
    ids = family.dialect.write([contract.message("assistant", "Hello you there")]).tolist()
    parsed = reader.feed(Ids(ids[:-3])) + reader.feed(
        Ids(ids[-3:], [logprobs(id) for id in ids[-3:]])
    )
    found = messages(parsed + reader.close(is_cut=False))

    assert [one[0] for one in found] == ["Hello you there"]
    assert len(found[0][1]) == 2


def test_endpoints_odds_go_with_its_text() -> None:
    reader = MessagesDialect().reader(BARE)
    one, two = (Logprob(t, [10], -0.5, [TopLogprob("x", [120], -1.0)]) for t in ("\n", "Hi"))
    parsed = reader.feed(Deltas((Delta(text="\n", logprobs=(one,)),)))
    parsed += reader.feed(Deltas((Delta(text="Hi", logprobs=(two,)),)))

    assert messages(parsed) == [("\nHi", [one, two])]
