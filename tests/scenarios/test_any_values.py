"""Whatever stands in a request, the answer is not that it was the server's fault."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import closing
from functools import partial

import pytest

from segue.accounts.account import LOCAL
from tests.any_values import BODIES, Asked, Asker, faults, places, replaced, thrown
from tests.growth.measure import Bench, bench

SEED, PART = 26, 0.004


@pytest.fixture(scope="module")
def server() -> Iterator[Bench]:
    # Nobody is there: no model asks it.
    with bench(search_url="http://127.0.0.1:9") as one:
        yield one


@pytest.mark.parametrize("name", BODIES)
def test_some_odd_values_in_a_request_are_no_fault_of_the_server(server: Bench, name: str) -> None:
    tried = thrown(name, server.served.app, random.Random(SEED), PART)
    assert not faults(server.served.port, tried)


@pytest.mark.parametrize("name", ["Responses: seals", "Messages"])
def test_what_was_sealed_as_something_else_is_refused(server: Bench, name: str) -> None:
    path, body = BODIES[name]
    place = next(one for one in places(body) if one[-1] == "encrypted_content")
    sealed = server.served.app.runner.resources.seals.seal(LOCAL, b"\xff")
    with closing(Asker(server.served.port)) as asker:
        status, answer = asker.ask(
            Asked(path, partial(json.dumps, replaced(body, place, sealed)), "")
        )
    assert status == 400
    assert "encrypted content could not be verified" in json.loads(answer)["error"]["message"]


@pytest.mark.reliability
@pytest.mark.parametrize("name", BODIES)
def test_no_odd_value_at_any_place_of_a_request_is_a_fault_of_the_server(
    server: Bench, name: str
) -> None:
    assert not faults(server.served.port, thrown(name, server.served.app))
