"""What does a process remember of where jobs went?"""

from __future__ import annotations

import asyncio

from msgspec import structs
from msgspec.structs import replace

from segue.replicas.book import RouteBook, held_tokens
from segue.replicas.placement import Choice
from segue.seams.history import Turn, Unfinished, Warm
from segue.seams.lineage import Lineage
from segue.seams.model import Scene
from segue.seams.prompt import Head, Tokens, id_array
from tests.contracts.turns import response_of
from tests.engines.asking import job, tokens

CHAIN = Lineage("resp_1", beginning="chain_abc")
RESENT = job(tokens([1]), lineage=CHAIN, model_turns=2)


def turn(ended_at: int) -> Turn:
    response = structs.replace(response_of("resp_1"), completed_at=ended_at)
    return Turn("resp_1", "ada", None, None, (), response, True, {}, 1, route="a")


async def test_resent_history_goes_where_it_went_and_others_are_asked_for_what_is_not_known() -> (
    None
):
    book, asked = RouteBook(), list[str]()

    async def find(chain: str) -> str | None:
        asked.append(chain)
        return "c"

    assert await book.route(RESENT) is None
    book.find_hint = find
    assert await book.route(RESENT) == "c"
    for name in ("a", "b"):
        given = book.asked(RESENT, None, 0.0, is_there=False)
        book.chose(RESENT, Choice(name, "load"), given, 0.0)
    assert await book.route(RESENT) == "b"
    # A first turn is placed, and one with a parent has its route.
    assert await book.route(structs.replace(RESENT, model_turns=0)) is None
    assert await book.route(structs.replace(RESENT, route="a")) == "a"
    # Where its client sends no ids, another process knows it by its beginning.
    elsewhere = structs.replace(RESENT, lineage=Lineage("chain_abc", beginning="chain_abc"))
    assert await book.route(elsewhere) == "b"
    assert asked == ["resp_1"]
    await asyncio.sleep(0)


async def test_replica_that_came_back_empty_has_no_histories_from_before() -> None:
    book = RouteBook()
    book.note_hint("resp_1", "a")
    book.note_forgot("a", 1_000.0)
    assert await book.route(RESENT) is None
    old, new = (job(tokens([1]), scene=Scene(Head(), turn(at), ())) for at in (999, 1_001))
    assert book.has_forgotten("a", old)
    assert not book.has_forgotten("a", new)
    assert not book.has_forgotten("b", old)


def test_what_is_held_is_the_warm_prompt_all_of_a_cold_one_and_nothing_after_a_compaction() -> None:
    cold = replace(turn(1), warm=None)
    warm = Unfinished(None, (), Warm("", Head(), Tokens(None, id_array(), 700), "a"))
    prompt = Tokens(None, id_array(), 1_000)
    held = [
        held_tokens(job(prompt, route="a", scene=Scene(Head(), past, ())))
        for past in (warm, cold, None)
    ]
    assert held == [700, 1_000, 0]


def test_found_little_needs_a_history_that_should_be_there() -> None:
    book = RouteBook()
    for held, cached, expected in ((1_000, 0, True), (1_000, 900, False), (100, 0, False)):
        scene = Scene(
            Head(), Unfinished(None, (), Warm("", Head(), Tokens(None, id_array(), held))), ()
        )
        one = job(Tokens(None, id_array(), 1_000), route="a", scene=scene)
        asked = book.asked(one, "a", 0.0, is_there=True)
        visit = book.chose(one, Choice("a", "parent"), asked, 0.0)
        assert not visit.found_little
        visit.note_cached(cached)
        assert visit.found_little is expected
