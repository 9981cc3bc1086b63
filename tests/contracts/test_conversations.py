"""What every `Conversations` promises: items keep their places, and two who write at once notice."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from msgspec import structs

from segue.errors import ApiError
from segue.seams.store import Conversation, ConversationItem, Conversations
from segue.wire.codec import ITEM_ID_CHARS_MAX
from tests.contracts.stores import KINDS, SHARED, Stores, open_stores
from tests.contracts.turns import OWNER, make_turn, said


@pytest.fixture(params=[kind for kind in KINDS if kind != "layered"])
async def kept(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Conversations]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield (await open_one()).conversations


def new(name: str = "conv_1", owner: str = OWNER) -> Conversation:
    return Conversation(name, owner, 1_700_000_000, {"a": "b"})


def shelf(*names: str) -> list[ConversationItem]:
    return [ConversationItem(name, said(f"This is {name}.")) for name in names]


async def found(kept: Conversations, name: str = "conv_1", owner: str = OWNER) -> Conversation:
    conversation = await kept.find(owner, name)
    assert conversation is not None
    return conversation


async def test_conversation_is_found_as_it_was_saved(kept: Conversations) -> None:
    assert await kept.save(new(), shelf("a", "b"))
    conversation = await found(kept)
    assert conversation == structs.replace(new(), count=2, version=1)
    assert list(await kept.read(OWNER, "conv_1")) == shelf("a", "b")


async def test_items_are_read_from_a_place_on(kept: Conversations) -> None:
    await kept.save(new(), shelf("a", "b"))
    assert await kept.save(await found(kept), shelf("c"))
    assert list(await kept.read(OWNER, "conv_1", 2)) == shelf("c")
    assert list(await kept.read(OWNER, "conv_1", 3)) == []
    assert list(await kept.read(OWNER, "conv_1", 1, 2)) == shelf("b")


async def test_erased_item_leaves_its_place_empty_and_the_tip_unknown(kept: Conversations) -> None:
    await kept.save(new(), shelf("a", "b", "c"))
    tipped = structs.replace(await found(kept), tip_id="resp_1", tip_items=3)
    assert await kept.save(tipped)
    assert await kept.delete(OWNER, "conv_1", "b")
    assert not await kept.delete(OWNER, "conv_1", "b")
    conversation = await found(kept)
    assert (conversation.tip_id, conversation.tip_items) == (None, 0)
    assert list(await kept.read(OWNER, "conv_1")) == shelf("a", "c")
    await kept.save(conversation, shelf("d"))
    assert list(await kept.read(OWNER, "conv_1", 3)) == shelf("d")
    rows = [tuple(row[:2]) for row in await kept.names(OWNER, "conv_1")]
    assert rows == [(0, "a"), (2, "c"), (3, "d")]
    assert not await kept.names(OWNER, "conv_none")


async def test_size_of_an_item_is_known_before_it_is_read(kept: Conversations) -> None:
    entry = ConversationItem("long", said("ab \u00e9 " * 20_000))
    await kept.save(new(), [*shelf("a"), entry])
    short, long = [size for _, _, size in await kept.names(OWNER, "conv_1")]
    assert 0 < short < 1_000
    assert len(entry.item.raw) <= long <= len(entry.item.raw) + 100


@pytest.mark.parametrize("odd", ["\ud800", "\0", "conv_1\0", "' OR 1=1 --", "x" * 100_000, "%"])
async def test_odd_names_are_absent_and_harmless(kept: Conversations, odd: str) -> None:
    await kept.save(new(), shelf("a"))
    for owner, name in ((OWNER, odd), (odd, "conv_1")):
        assert await kept.find(owner, name) is None
        assert list(await kept.read(owner, name)) == []
        assert list(await kept.names(owner, name)) == []
        assert await kept.delete(owner, name) is False
        assert await kept.delete(owner, name, "a") is False
    assert await kept.delete(OWNER, "conv_1", odd) is False
    assert list(await kept.read(OWNER, "conv_1")) == shelf("a")


async def test_item_with_the_longest_id_that_a_client_may_give_is_kept(kept: Conversations) -> None:
    """Of characters that no index makes shorter."""
    longest = "".join(map(chr, range(0x20000, 0x20000 + ITEM_ID_CHARS_MAX)))
    await kept.save(new(), shelf(longest))
    assert [name for _, name, _ in await kept.names(OWNER, "conv_1")] == [longest]
    assert await kept.delete(OWNER, "conv_1", longest)


async def test_of_two_who_write_at_once_one_is_told(kept: Conversations) -> None:
    await kept.save(new())
    same = await found(kept)
    written = await asyncio.gather(kept.save(same, shelf("a")), kept.save(same, shelf("b")))
    assert sorted(written) == [False, True]
    assert len(await kept.read(OWNER, "conv_1")) == 1


async def test_erased_conversation_is_gone_with_its_items(kept: Conversations) -> None:
    await kept.save(new(), shelf("a"))
    same = await found(kept)
    assert await kept.delete(OWNER, "conv_1")
    assert not await kept.delete(OWNER, "conv_1")
    assert await kept.find(OWNER, "conv_1") is None
    assert list(await kept.read(OWNER, "conv_1")) == []
    assert not await kept.save(same, shelf("b"))


async def test_owners_never_meet(kept: Conversations) -> None:
    await kept.save(new(), shelf("a"))
    await kept.save(new(owner="bob"), shelf("b"))
    assert not await kept.delete("eve", "conv_1")
    assert not await kept.delete("eve", "conv_1", "a")
    assert await kept.find("eve", "conv_1") is None
    assert list(await kept.read("bob", "conv_1")) == shelf("b")
    assert await kept.delete("bob", "conv_1")
    assert list(await kept.read(OWNER, "conv_1")) == shelf("a")


@pytest.fixture(params=SHARED)
async def shared(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Stores]:
    async with open_stores(request.param, request, tmp_path) as open_one:
        yield await open_one()


async def test_turn_and_conversation_are_written_together_or_not_at_all(shared: Stores) -> None:
    kept, turns = shared.conversations, shared.turns
    await kept.save(new())
    same = await found(kept)
    first, late = make_turn("resp_1"), make_turn("resp_2")
    tipped = structs.replace(same, tip_id=first.id, tip_items=1)
    assert await kept.save(tipped, shelf("a"), first)
    read = await turns.read(OWNER, first.id)
    assert read is not None
    assert read.response == first.response
    assert (await found(kept)).tip_id == first.id
    assert not await kept.save(same, shelf("b"), late), "somebody else has written it"
    assert await turns.read(OWNER, late.id) is None
    assert [entry.turn_id for entry in await shared.entries()] == [first.id]


async def test_conversation_without_its_turn_is_not_written(shared: Stores) -> None:
    kept, turn = shared.conversations, make_turn("resp_1")
    await kept.save(new())
    unwritable = ConversationItem("\ud800", said("half of a pair is no name"))
    with pytest.raises(ApiError):
        await kept.save(await found(kept), [unwritable], turn)
    assert await shared.turns.read(OWNER, turn.id) is None
    assert await kept.read(OWNER, "conv_1") == []


async def test_of_two_who_would_speak_at_once_one_does(kept: Conversations) -> None:
    await kept.save(new())
    same = await found(kept)
    taken = await asyncio.gather(
        *(kept.save(structs.replace(same, speaker=name)) for name in ("resp_1", "resp_2"))
    )
    assert sorted(taken) == [False, True]
    speaker = (await found(kept)).speaker
    assert speaker in ("resp_1", "resp_2")
    assert await kept.save(structs.replace(await found(kept), speaker=None), shelf("a"))
    assert (await found(kept)).speaker is None


@pytest.mark.parametrize("kind", SHARED)
async def test_dead_process_speaks_no_more_and_a_living_one_is_left_alone(
    kind: str, request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    async with open_stores(kind, request, tmp_path) as open_one:
        dying, living = await open_one(), await open_one()
        for stores, name in ((dying, "conv_1"), (living, "conv_2")):
            await stores.conversations.save(new(name))
            fresh = await found(stores.conversations, name)
            assert await stores.conversations.save(structs.replace(fresh, speaker=f"resp_{name}"))
        # Whoever adds something beside a turn does not take it over.
        beside = await found(living.conversations)
        assert await living.conversations.save(beside, shelf("a"))
        await living.maintenance.recover()
        assert (await found(living.conversations)).speaker == "resp_conv_1"
        await dying.crash()
        await living.maintenance.recover()
        released = await found(living.conversations)
        assert released.speaker is None
        assert released.version > beside.version + 1, "a late commit of the dead one is noticed"
        assert (await found(living.conversations, "conv_2")).speaker == "resp_conv_2"
