"""What the model inside has read outlives a restart, for stored responses only.

The whole with a real model in one test; who may be saved, and how much, with an engine that writes what llama.cpp
would.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from segue.errors import Misconfigured
from segue.seals.cipher import RingSeals, new_key
from segue.seams.history import Turn, Warm
from segue.seams.prompt import Head, Tokens, id_array
from segue.settings.checks import load_settings
from segue.stores.memory_turns import MemoryTurns
from segue_embedded import states
from segue_embedded.states import SlotStates
from tests.contracts.turns import make_turn
from tests.support import Served, fetch, serving

MIB = 1024 * 1024


# --- a real model ---------------------------------------------------------------------------------


async def respond(served: Served, text: str, **fields: Any) -> dict[str, Any]:
    body = {"model": "smollm2", "input": text, "max_output_tokens": 8, "temperature": 0, **fields}
    answer = await fetch(served, "POST", "/v1/responses", body)
    assert answer.status == 200, answer.body
    found: dict[str, Any] = answer.json
    return found


@pytest.mark.xdist_group("embedded")
async def test_stored_chain_goes_on_after_a_restart_without_being_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(states, "TOKENS_MIN", 16)
    flags = {
        "engine": "embedded",
        "store": f"sqlite:///{tmp_path / 'segue.db'}",
        "context_tokens": 512,
        "engine_parallel": 2,
        "embedded_state_bytes_max": 64 * MIB,
    }
    secret = "The word of the day is zibeline, and nobody else may know of it."
    async with serving(**flags) as served:
        await respond(served, secret, store=False)
        kept = await respond(served, "Name the seven seas of the old maps, one a line.")
    folder = tmp_path / "segue.db.states"
    (file,) = folder.iterdir()
    assert file.stem == kept["id"]
    assert b"seven" not in file.read_bytes()
    assert file.stat().st_mode & 0o077 == 0

    async with serving(**flags) as served:
        again = await respond(served, "And then?", previous_response_id=kept["id"])
        known = kept["usage"]["input_tokens"] + kept["usage"]["output_tokens"]
        # The last sampled token was not read by the model yet.
        assert again["usage"]["input_tokens_details"]["cached_tokens"] >= known - 1
        await fetch(served, "DELETE", f"/v1/responses/{kept['id']}")
        assert [*folder.iterdir()] == []
    assert [*folder.iterdir()] == []
    assert not [*states.MEMORY.glob(f"{states.MEMORY_PREFIX}*")]


# --- who, and how much ----------------------------------------------------------------------------


class FakeSlots:
    """Slots that hold what a test says; a state is its tokens and as many bytes again as it says."""

    fingerprint = "f"
    load = (0, 0)
    version = 1

    def __init__(self, memory: Path, *slots: Sequence[int]) -> None:
        self._memory = memory
        self.held = list(slots)
        self.slots = len(slots)
        self.jobs_ended = 1

    def save_slot(self, slot: int, name: str) -> None:
        tokens = self.held[slot]
        listed = id_array([0xFFFFFFFF, self.version, len(tokens), *tokens, 0])
        head = struct.pack("<III", 1, 2, len(listed))
        (self._memory / name).write_bytes(head + listed.tobytes() + bytes(1000))

    def restore_slot(self, slot: int, name: str) -> None:
        self.held[slot] = states._tokens_in(self._memory / name).tolist()


def warm(turn_id: str, ids: Sequence[int], parent: Turn | None = None, **fields: Any) -> Turn:
    prompt = Tokens(None, id_array(ids), len(ids))
    return replace(make_turn(turn_id, parent, **fields), warm=Warm("f", Head(), prompt))


@pytest.fixture
def folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    monkeypatch.setattr(states, "TOKENS_MIN", 3)
    (tmp_path / "memory").mkdir()
    return tmp_path / "files", tmp_path / "memory"


async def saved(
    folders: tuple[Path, Path], engine: FakeSlots, *tips: Turn, bytes_max: int = MIB
) -> SlotStates:
    own = SlotStates(engine, *folders, CIPHERS, bytes_max, lambda: tips)
    await own.restore(MemoryTurns(0))
    await own.save()
    return own


CIPHERS = RingSeals([new_key()])


def names(folders: tuple[Path, Path]) -> set[str]:
    assert [*folders[1].iterdir()] == []
    return {path.stem for path in folders[0].iterdir()}


async def test_only_chains_that_are_stored_as_a_whole_are_saved(
    folders: tuple[Path, Path],
) -> None:
    unstored = warm("resp_a", [1, 2, 3], is_stored=False)
    above = warm("resp_b", [1, 2, 3, 4], unstored)
    good = warm("resp_c", [5, 6, 7, 8, 9])
    # Of the third, a prefix is in the slot; the fourth holds more than the turn; the fifth is too short.
    engine = FakeSlots(folders[1], [1, 2, 3], [1, 2, 3, 4], [5, 6, 7], [5, 6, 7, 8, 9, 1], [5, 6])
    await saved(folders, engine, unstored, above, good)

    assert names(folders) == {"resp_c"}


async def test_a_state_that_is_written_in_another_way_is_not_saved(
    folders: tuple[Path, Path],
) -> None:
    engine = FakeSlots(folders[1], [1, 2, 3])
    engine.version = 2
    await saved(folders, engine, warm("resp_a", [1, 2, 3]))

    assert names(folders) == set()


async def test_a_longer_chain_replaces_what_it_continues_and_the_oldest_makes_room(
    folders: tuple[Path, Path],
) -> None:
    first = warm("resp_a", [1, 2, 3])
    engine = FakeSlots(folders[1], [1, 2, 3])
    own = await saved(folders, engine, first)
    engine.held, engine.jobs_ended = [[1, 2, 3, 4]], 2
    own._tips = lambda: [warm("resp_b", [1, 2, 3, 4], first)]
    await own.save()
    assert names(folders) == {"resp_b"}

    engine.held, engine.jobs_ended = [[7, 8, 9]], 3
    own._tips, own._bytes_max = lambda: [warm("resp_c", [7, 8, 9])], 1_500
    await own.save()
    assert names(folders) == {"resp_c"}


async def test_a_state_goes_with_any_response_of_its_chain(folders: tuple[Path, Path]) -> None:
    first = warm("resp_a", [1, 2, 3])
    second = warm("resp_b", [1, 2, 3, 4], first)
    own = await saved(folders, FakeSlots(folders[1], [1, 2, 3, 4]), second)
    await own.forget("another", "resp_a")
    assert names(folders) == {"resp_b"}
    await own.forget(first.owner, "resp_a")
    assert names(folders) == set()


async def test_a_response_that_is_deleted_while_its_state_is_written_leaves_nothing(
    folders: tuple[Path, Path],
) -> None:
    turn = warm("resp_a", [1, 2, 3])
    engine = FakeSlots(folders[1], [1, 2, 3])
    own = SlotStates(engine, *folders, CIPHERS, MIB, lambda: [turn])
    await own.restore(MemoryTurns(0))
    save_slot = engine.save_slot

    def deleted_meanwhile(slot: int, name: str) -> None:
        save_slot(slot, name)
        own._erased.add((turn.owner, turn.id))

    engine.save_slot = deleted_meanwhile  # type: ignore[method-assign]
    await own.save()

    assert names(folders) == set()


async def test_states_are_restored_only_for_chains_that_the_store_still_has(
    folders: tuple[Path, Path],
) -> None:
    stored = MemoryTurns(MIB)
    here, gone = warm("resp_a", [1, 2, 3]), warm("resp_b", [4, 5, 6])
    await stored.save(here)
    await saved(folders, FakeSlots(folders[1], [1, 2, 3], [4, 5, 6]), here, gone)
    assert names(folders) == {"resp_a", "resp_b"}
    (folders[0] / "resp_x.state").write_bytes(b"\1")

    engine = FakeSlots(folders[1], [], [])
    again = SlotStates(engine, *folders, CIPHERS, MIB, list)
    assert await again.restore(stored) == 1
    assert engine.held == [[1, 2, 3], []]
    assert names(folders) == {"resp_a"}


async def test_a_state_of_other_weights_stays_and_one_of_a_lost_key_goes(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    stored = MemoryTurns(MIB)
    turn = warm("resp_a", [1, 2, 3])
    await stored.save(turn)
    await saved(folders, FakeSlots(folders[1], [1, 2, 3]), turn)

    other = FakeSlots(folders[1], [])
    other.fingerprint = "g"
    assert await SlotStates(other, *folders, CIPHERS, MIB, list).restore(stored) == 0
    assert names(folders) == {"resp_a"}
    stranger = RingSeals([new_key()])
    again = SlotStates(FakeSlots(folders[1], []), *folders, stranger, MIB, list)
    assert await again.restore(stored) == 0
    assert names(folders) == set()
    assert "encrypted with a key that is gone" in caplog.text


@pytest.mark.parametrize("place", ["", '[[models]]\nname = "m"\n'])
@pytest.mark.parametrize("wrong", ["workers = 2", 'store = "memory"'])
def test_settings_that_cannot_keep_states_are_refused(
    place: str, wrong: str, tmp_path: Path
) -> None:
    file = tmp_path / "segue.toml"
    file.write_text(f"{wrong}\n{place}embedded_state_bytes_max = 1\n")
    with pytest.raises(Misconfigured, match=r"embedded_state_bytes_max: .* one process with a SQL"):
        load_settings({"config": str(file)}, environment={})
