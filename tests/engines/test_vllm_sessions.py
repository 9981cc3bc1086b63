"""Does a vLLM with the plugin keep conversations to the id, under every pressure? `make test-hollow-vllm` runs this.

All but the model is real: vLLM's API server, scheduler, blocks and prefix cache, with the plugin and its schedulers,
which compare every hash in every step. There is room for 6,400 tokens and four requests at once.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager

import msgspec
import pytest

from bench.hollow.server import HollowVllm, hollow_vllm
from segue.border.refusals import ContextRefused, EngineLost
from segue.engine_sessions.engine import ABOUT, SessionEngine, session_offer
from segue.engine_sessions.frames import SessionAsk, SessionFailed, SessionForget, id_bytes, new_key
from segue.engine_sessions.link import SessionAnswered, SessionLink
from segue.engines.token_engine import TokenEngine
from segue.engines.upstream import Upstream
from segue.engines.vllm import VLLM, VllmEvent, VllmOffer
from segue.errors import ApiError, EngineFailed
from segue.seams.model import Ids, Job, Sampling
from segue.seams.prompt import Tokens, id_array
from tests.engines.asking import finish_of, heard, ids_of, job, tokens
from tests.support import until

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(900)]

MODEL = "smollm2"
KEY = "sk-hollow"
# A prompt that ends with this token is answered without an end.
ENDLESS = 0
SCHEDULERS = {
    "synchronous": ("--no-async-scheduling", "segue_vllm.scheduler.KeepScheduler"),
    "asynchronous": ("--async-scheduling", "segue_vllm.scheduler.KeepAsyncScheduler"),
}


@pytest.fixture(scope="module", params=[*SCHEDULERS, "step one"])
def vllm(request: pytest.FixtureRequest) -> Iterator[HollowVllm]:
    how, name = SCHEDULERS.get(request.param, ("--no-async-scheduling", ""))
    flags = [how, "--block-size", "16", "--max-model-len", "6000", "--max-num-seqs", "4"]
    flags += ["--num-gpu-blocks-override", "401", "--api-key", KEY]
    flags += ["--scheduler-cls", name] if name else []
    is_async = "1" if request.param == "asynchronous" else "0"
    variables = {
        "HOLLOW_ASYNC": is_async,
        "VLLM_PLUGINS": "segue",
        "SEGUE_VLLM_CHECK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
    }
    with hollow_vllm(*flags, variables=variables) as found:
        yield found


@pytest.fixture
async def address(vllm: HollowVllm) -> AsyncIterator[Upstream]:
    found = Upstream(vllm.url, KEY)
    yield found
    await found.close()


@pytest.fixture
def engine(address: Upstream) -> SessionEngine:
    return SessionEngine(address, MODEL)


@pytest.fixture
def plain(address: Upstream) -> TokenEngine[VllmOffer, VllmEvent]:
    return TokenEngine(VLLM, address, MODEL)


def drawn(source: random.Random, count: int) -> list[int]:
    return [source.randrange(1_000, 40_000) for _ in range(count)]


def after(prompt: Tokens, answer: list[int], new: list[int]) -> Tokens:
    return prompt.plus(id_array(answer)).plus(id_array(new))


async def turns(address: Upstream) -> int:
    """How many the plugin was asked for."""
    _, page = await address.call("GET", ABOUT)
    return int(json.loads(page)["turns"])


@asynccontextmanager
async def at_once(address: Upstream, count: int) -> AsyncIterator[None]:
    """So many turns begin here, and nothing is scheduled before all of them have come."""
    before = await turns(address)

    async def have_come() -> bool:
        return await turns(address) == before + count

    assert (await address.call("POST", "/pause?mode=keep&clear_cache=false"))[0] == 200
    yield
    await until(have_come)
    assert (await address.call("POST", "/resume"))[0] == 200


async def preemptions(address: Upstream) -> float:
    """How often the engine had no room for what ran."""
    _, page = await address.call("GET", "/metrics")
    found = re.search(rb"vllm:num_preemptions_total\{[^}]*\} ([\d.]+)", page)
    assert found
    return float(found[1])


async def answered(engine: SessionEngine, prompt: Tokens, most: int = 8) -> list[int]:
    async with asyncio.timeout(60):
        return ids_of(await heard(engine, job(prompt, most, sampling=Sampling(seed=1))))


async def test_what_it_is_says_the_address(address: Upstream, vllm: HollowVllm) -> None:
    offer = await session_offer(address)
    assert offer is not None
    assert offer.package == "segue-vllm"
    assert (offer.step == 2) == (offer.reason == "")


async def test_random_chains_have_the_whole_prompt(
    engine: SessionEngine, plain: TokenEngine[VllmOffer, VllmEvent]
) -> None:
    """What is drawn depends on the last ids, the length and the seed; that the rest is right the hashes say, in every
    step. 300 chains, six at once, in room for two or three of them."""
    source = random.Random(11)

    async def chain(own: random.Random) -> None:
        prompt = tokens(drawn(own, own.randint(20, 900)))
        ends: list[tuple[Tokens, list[int]]] = []
        for _ in range(6):
            if own.random() < 0.3:
                prompt = prompt.plus(id_array([ENDLESS]))
            asked = job(prompt, own.randint(1, 24), sampling=Sampling(seed=own.randrange(99)))
            leaves, got = own.random() < 0.15, list[int]()
            async with aclosing(engine.sample(asked)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Ids):
                        got += piece.ids
                    if leaves and got:
                        break
            wanted = ids_of(await heard(plain, asked))
            assert got == wanted[: len(got)]
            assert leaves or got == wanted
            ends.append((prompt, got))
            at, got = ends[-1] if own.random() < 0.7 else own.choice(ends)
            if own.random() < 0.2:
                got = got[: own.randint(0, len(got))]
            prompt = after(at, got, drawn(own, own.randint(1, 60)))

    for _ in range(50):
        await asyncio.gather(*(chain(random.Random(source.random())) for _ in range(6)))
    assert engine.session_counts[0]["kept"] > 1_000


async def test_answers_that_are_preempted_are_those_of_whole_prompts(
    engine: SessionEngine, plain: TokenEngine[VllmOffer, VllmEvent], address: Upstream
) -> None:
    """Four at once have 7,600 tokens in the end, and there is room for 6,400."""
    source = random.Random(5)
    before = await preemptions(address)
    prompts = [tokens(drawn(source, 1_500)) for _ in range(4)]
    for _ in range(2):
        asked = [
            job(prompt.plus(id_array([ENDLESS])), 200, sampling=Sampling(seed=n))
            for n, prompt in enumerate(prompts)
        ]
        async with at_once(address, 4):
            answers = [asyncio.create_task(heard(engine, one)) for one in asked]
        got = [ids_of(await answer) for answer in answers]
        assert got == [ids_of(await heard(plain, one)) for one in asked]
        prompts = [
            after(one.prompt, ids, drawn(source, 9))  # type: ignore[arg-type]
            for one, ids in zip(asked, got, strict=True)
        ]
    assert await preemptions(address) > before


async def test_idle_chains_cost_no_other_client_its_turn(
    engine: SessionEngine, plain: TokenEngine[VllmOffer, VllmEvent]
) -> None:
    """As many idle chains as there are places, and as much as there is room."""
    source = random.Random(1)
    chains = []
    for _ in range(4):
        prompt = tokens(drawn(source, 1_500))
        chains.append((prompt, await answered(engine, prompt)))
    async with asyncio.timeout(20):
        assert ids_of(await heard(plain, job(tokens(drawn(source, 3_000)), 8)))
    for prompt, answer in chains:
        assert await answered(engine, after(prompt, answer, drawn(source, 10)))


async def test_chains_that_all_grow_do_not_block_each_other(engine: SessionEngine) -> None:
    source = random.Random(2)
    chains = []
    for _ in range(3):
        prompt = tokens(drawn(source, 2_050))
        chains.append((prompt, await answered(engine, prompt)))
    grown = [after(prompt, answer, drawn(source, 300)) for prompt, answer in chains]
    assert all(await asyncio.gather(*(answered(engine, prompt) for prompt in grown)))


async def test_who_goes_on_waits_behind_those_that_came_before(
    engine: SessionEngine, address: Upstream
) -> None:
    """Nothing is scheduled while another client comes, and then seven chains go on; four are served at once."""
    source = random.Random(6)
    chains = []
    for _ in range(7):
        prompt = tokens(drawn(source, 40))
        chains.append((prompt, await answered(engine, prompt)))
    prompts = [after(prompt, answer, [*drawn(source, 9), ENDLESS]) for prompt, answer in chains]
    prompts.insert(0, tokens([*drawn(source, 40), ENDLESS]))
    served: list[int] = []

    async def asked(place: int) -> None:
        assert len(await answered(engine, prompts[place])) == 8
        served.append(place)

    async with asyncio.TaskGroup() as group, at_once(address, 8):
        for place in range(8):
            group.create_task(asked(place))
    assert 0 in served[:4]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/inference/v1/generate"])
async def test_what_other_clients_write_for_the_scheduler_is_not_read(
    engine: SessionEngine, address: Upstream, path: str
) -> None:
    """The field of ours is open to all clients of vLLM. One that names a chain of another's gets nothing of it, and
    one that writes nonsense gets its answer."""
    prompt = tokens(range(300, 340))
    await answered(engine, prompt)
    _, page = await address.call("GET", ABOUT)
    about = json.loads(page)
    of_another = {"from": f"{about['instance']}:1", "length": 4, "tail": [*range(300, 304)]}

    async def asked(extra: object) -> bytes:
        if path == "/v1/completions":
            body = {"prompt": [7, 8, 9], "max_tokens": 8, "vllm_xargs": extra}
        elif path == "/v1/responses":
            # A client chooses the whole id here.
            body = {"input": "Hi", "request_id": "segue-mine", "store": False, "vllm_xargs": extra}
        else:
            sampling = {"max_tokens": 8, "seed": 1, "extra_args": extra}
            body = {"token_ids": [7, 8, 9], "sampling_params": sampling}
        body |= {"model": MODEL, "seed": 1, "return_token_ids": True}
        status, page = await address.call("POST", path, json.dumps(body).encode())
        assert status == 200, page
        choices = msgspec.json.decode(page).get("choices")
        return msgspec.json.encode(choices)

    wanted = await asked({"mine": 1})
    for segue in ("x", ["from"], of_another, {"keep": ["x"]}, {"keep": 1, "from": [2]}):
        if path == "/inference/v1/generate" or not isinstance(segue, dict):
            assert await asked({"segue": segue}) == wanted
    assert await answered(engine, prompt)


class Ear:
    """Who hears one answer."""

    def __init__(self) -> None:
        self.said: list[SessionAnswered] = []
        self.is_lost = False

    def hear(self, said: Sequence[SessionAnswered]) -> None:
        self.said += said

    def lost(self) -> None:
        self.is_lost = True


async def test_sampling_that_the_core_cannot_read_ends_its_own_request_and_no_other(
    engine: SessionEngine, address: Upstream
) -> None:
    offer = await session_offer(address)
    assert offer is not None
    key = new_key()
    link = await address.upgrade(offer.path, key, lambda: SessionLink(key))
    await link.hello
    ears = {b'{"seed":"x"}': Ear(), b'{"logit_bias":{"5":1}}': Ear(), b'{"top_p":5}': Ear()}
    for sampling, ear in ears.items():
        ids = id_bytes(id_array([5, 6, 7]))
        link.send(SessionAsk(link.begin(ear), 0, 0, b"", ids, "o", MODEL, None, 0, sampling))
        await until(lambda ear=ear: len(ear.said) == 2 or ear.is_lost)  # type: ignore[misc]
        failed = ear.said[1]
        assert isinstance(failed, SessionFailed)
        assert failed.status == 400
    link.send(SessionForget("o"))
    assert await answered(engine, tokens(range(300, 340)))
    link.close()


async def test_three_children_of_one_turn_all_answer(engine: SessionEngine) -> None:
    source = random.Random(3)
    prompt = tokens(drawn(source, 900))
    answer = await answered(engine, prompt)
    children = [after(prompt, answer, drawn(source, 20)) for _ in range(3)]
    assert all(await asyncio.gather(*(answered(engine, child) for child in children)))


async def test_reset_of_the_prefix_cache_finds_every_block_free(
    engine: SessionEngine, address: Upstream
) -> None:
    source = random.Random(4)
    prompt = tokens(drawn(source, 900))
    answer = await answered(engine, prompt)
    status, _ = await address.call("POST", "/reset_prefix_cache")
    assert status == 200
    again = after(prompt, answer, drawn(source, 20))
    pieces = await heard(engine, job(again, 4))
    assert finish_of(pieces).cached_tokens == 0


async def test_constrained_answers_follow_their_schema(
    engine: SessionEngine, plain: TokenEngine[VllmOffer, VllmEvent]
) -> None:
    schema = b'{"type":"object","properties":{"n":{"enum":["a","b"]}},"required":["n"]}'
    prompt = tokens(range(100, 300))
    answer = await answered(engine, prompt)
    asked = job(after(prompt, answer, [7, 8]), 60, schema=schema, sampling=Sampling(seed=1))
    got = ids_of(await heard(engine, asked))
    assert got == ids_of(await heard(plain, asked))
    assert await answered(engine, after(asked.prompt, got, [9]))  # type: ignore[arg-type]


async def test_too_long_a_chain_is_refused_as_over_http(engine: SessionEngine) -> None:
    prompt = tokens(range(100, 300))
    answer = await answered(engine, prompt)
    with pytest.raises((ContextRefused, ApiError)) as raised:
        await heard(engine, job(after(prompt, answer, [9] * 6_000), 8))
    assert "context" in str(raised.value.message)


async def test_a_wrong_key_opens_no_connection(vllm: HollowVllm) -> None:
    stranger = Upstream(vllm.url, "sk-wrong")
    engine = SessionEngine(stranger, MODEL)
    with pytest.raises(EngineFailed):
        await heard(engine, job(tokens([5, 6, 7]), 4))
    assert not engine.session_counts[0]["whole"]
    await stranger.close()


async def test_a_silent_connection_answers_when_it_is_asked(engine: SessionEngine) -> None:
    assert await answered(engine, tokens(range(300, 400)))
    link = engine._link
    assert link is not None
    link._check()
    for _ in range(3):
        link._check()
        assert link._pings == 1
        await until(lambda: link._has_come)
        link._check()


async def test_an_erased_owner_has_no_handles(engine: SessionEngine, address: Upstream) -> None:
    prompt = tokens(range(300, 400))
    answer = await answered(engine, prompt)
    engine.forget_owner(job(prompt, 1).owner)

    async def is_forgotten() -> bool:
        _, page = await address.call("GET", ABOUT)
        return b'"handles":0,' in page

    await until(is_forgotten)
    assert await answered(engine, after(prompt, answer, [7, 8]))
    assert engine.session_counts == ({"whole": 2}, {})


async def test_leaving_frees_the_place(engine: SessionEngine, address: Upstream) -> None:
    endless: Job = job(tokens([*range(100, 200), ENDLESS]), 5_000)
    for _ in range(6):
        async with aclosing(engine.sample(endless)) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ids):
                    break
    # Four places: six that stayed would leave none.
    assert await answered(engine, tokens(range(300, 400)))


async def test_a_lost_connection_ends_an_answer_once_and_the_next_turn_goes_on(
    engine: SessionEngine,
) -> None:
    prompt = tokens([*range(100, 200), ENDLESS])
    with pytest.raises(EngineFailed):
        async with aclosing(engine.sample(job(prompt, 5_000))) as pieces:
            async for piece in pieces:
                if isinstance(piece, Ids):
                    assert engine._link is not None
                    engine._link.close()
    assert await answered(engine, prompt)


async def test_a_core_that_is_killed_ends_an_answer_once_in_words(
    engine: SessionEngine, vllm: HollowVllm
) -> None:
    """The last one: there is no vLLM after it."""
    endless, got = job(tokens([*range(100, 200), ENDLESS]), 5_000), 0
    async with asyncio.timeout(30):
        with pytest.raises(EngineLost, match="in the middle of its answer"):
            async with aclosing(engine.sample(endless)) as pieces:
                async for piece in pieces:
                    if isinstance(piece, Ids) and not got:
                        os.kill(vllm.core().pid, signal.SIGKILL)
                    got += isinstance(piece, Ids)
        assert got
        with pytest.raises(ApiError):
            await heard(engine, job(tokens(range(300, 400)), 4))
