"""What a model hears of the skills in its container."""

from __future__ import annotations

from msgspec import Raw

from segue.sandbox.messages import SkillEntry
from segue.sandbox.skills import HEAD, note
from segue.seams.tools import TurnAhead
from segue.wire.codec import user_message
from segue.wire.items import Item
from segue.wire.tools import NO_TOOLS

SUMS, MAPS = (
    SkillEntry(name, name, "Does it.", f"/mnt/skills/{name}/SKILL.md") for name in ("sums", "maps")
)


def ahead(*given: Item) -> TurnAhead:
    return TurnAhead(
        owner="ada",
        tools=NO_TOOLS,
        shown=Raw(b"[]"),
        shown_before=None,
        given=given,
        earlier=lambda: iter(()),
        is_stored=False,
        include=(),
        may=frozenset(),
        parent=None,
    )


def test_model_is_told_of_each_skill_once() -> None:
    (first,) = note([SUMS], ahead(user_message("Go")))
    assert note([SUMS], ahead(first, user_message("Go"))) == ()
    (second,) = note([SUMS, MAPS], ahead(first))
    assert MAPS.path.encode() in second.raw
    assert SUMS.path.encode() not in second.raw
    assert note([SUMS, MAPS], ahead(first, second)) == ()
    assert note([], ahead(first)) == ()


def test_client_that_quotes_a_note_keeps_no_skill_from_the_model() -> None:
    quoted = user_message(f"It says: {HEAD}\n- sums (read {SUMS.path} first)")
    assert len(note([SUMS], ahead(quoted))) == 1
