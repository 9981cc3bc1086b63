"""How does a replica look that has no model, but counts like one? A vLLM by its paths, for tests and demonstrations.

    python -m segue_fleet.replica --port 0 --kv-tokens 100000 --slots 8

It finds the beginnings of prompts in blocks, within a KV room, has slots and a queue, and takes as long as its rates
say on a clock that runs `--time-factor` times as fast as the real one. Its answers are words drawn by seed and prompt,
as long as `max_tokens` says, with the stop token last; so every replica with the same seed gives the same answer. It
reports cached tokens with each answer, vLLM's metrics at `/metrics`, its sums at `/counters`, and what it was sent at
`/arrivals`, as numbers. A client that leaves frees nothing early. It is not an engine: nothing here computes a token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path

import httptools
import msgspec
from msgspec import Struct

from segue.printable import say
from segue_fleet.blocks import CountedReplica, ReplicaShape, Served, block_digests

HOST = "127.0.0.1"
GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
CONTEXT_TOKENS = 1_048_576
# A request without a limit, or with all that the context leaves, gets an answer of so many tokens, by seed.
ANSWER_TOKENS = (20, 200)
LIMIT_TOKENS_MAX = 65_536
# Tokens that are due together are sent together, so often at most.
STEP_S = 0.02
BODY_BYTES_MAX = 64 * 1024 * 1024


class Words(Struct, frozen=True):
    """The ids that answers are drawn from, those that an answer begins with, and the id that ends it.

    Without an id for the end it is the last stop id of a request."""

    ids: Sequence[int] = range(1_000, 20_000)
    first: Sequence[int] = ()
    stop: int | None = None


class _Sampling(Struct, frozen=True):
    max_tokens: int | None = None
    stop_token_ids: list[int] = []


class _Asked(Struct, frozen=True):
    """A request by either path; unknown fields do not matter here."""

    token_ids: list[int] = []
    prompt: list[int] = []
    sampling_params: _Sampling = _Sampling()
    max_tokens: int | None = None
    stop_token_ids: list[int] = []
    cache_salt: str = ""
    stream: bool = True


class Arrival(Struct, frozen=True, array_like=True):
    """A job as it came, so that other placements can be tried with it."""

    at_s: float
    prompt_tokens: int
    answer_tokens: int
    found_tokens: int
    wait_s: float
    first_s: float
    digests: list[int]


class ReplicaCounters(Struct, frozen=True):
    """What a replica has done so far; times are simulated."""

    requests: int
    running: int
    waiting: int
    prompt_tokens: int
    found_tokens: int
    computed_tokens: int
    answer_tokens: int
    kv_tokens: int
    kv_tokens_max: int
    wait_s_p50: float
    wait_s_p95: float
    first_s_p50: float
    first_s_p95: float


_asked = msgspec.json.Decoder(_Asked)


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that this part of all is not above; 0 of none."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(part * len(ordered)))] if ordered else 0.0


class Replica:
    """One server: its numbers, its clock, and the answers that it makes up."""

    def __init__(
        self,
        shape: ReplicaShape,
        *,
        model: str = "counted",
        seed: int = 1,
        time_factor: float = 1.0,
        words: Words | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.shape = shape
        self.model = model
        self._seed = seed
        self._factor = time_factor
        self._words = words or Words()
        self._clock = clock
        self._counted = CountedReplica(shape)
        self.arrivals: list[Arrival] = []
        self._served: list[Served] = []

    def now_s(self) -> float:
        """By the simulated clock, which is the same in all processes of this machine."""
        return self._clock() * self._factor

    def real_s(self, at_s: float) -> float:
        """How long it is until then in real time."""
        return max(0.0, (at_s - self.now_s()) / self._factor)

    def serve(self, asked: _Asked) -> tuple[Served, list[int]]:
        """Count a job; its times, and its answer."""
        prompt = asked.token_ids or asked.prompt
        answer = self._random_answer(prompt, asked)
        digests = block_digests([*prompt, *answer], asked.cache_salt, self.shape.block_tokens)
        served = self._counted.serve(self.now_s(), len(prompt), len(answer), digests)
        self._served.append(served)
        self.arrivals.append(
            Arrival(
                served.at_s,
                served.prompt_tokens,
                served.answer_tokens,
                served.found_tokens,
                served.wait_s,
                served.first_at_s - served.at_s,
                digests,
            )
        )
        return served, answer

    def _random_answer(self, prompt: Sequence[int], asked: _Asked) -> list[int]:
        tail = msgspec.json.encode([self._seed, len(prompt), list(prompt[-64:])])
        draw = random.Random(blake2b(tail, digest_size=8).digest())
        limit = asked.sampling_params.max_tokens or asked.max_tokens
        count = limit or LIMIT_TOKENS_MAX
        if count >= LIMIT_TOKENS_MAX:
            count = draw.randint(*ANSWER_TOKENS)
        stops = asked.sampling_params.stop_token_ids or asked.stop_token_ids
        stop = self._words.stop if self._words.stop in stops else next(reversed(stops), None)
        words = draw.choices(self._words.ids, k=count if stop is None else count - 1)
        if self._words.first and words:
            words[0] = draw.choice(self._words.first)
        return words if stop is None else [*words, stop]

    def counters(self) -> ReplicaCounters:
        now = self.now_s()
        served = self._served
        firsts = [answer.first_at_s - answer.at_s for answer in served]
        waits = [answer.wait_s for answer in served]
        found = sum(answer.found_tokens for answer in served)
        prompts = sum(answer.prompt_tokens for answer in served)
        size = self.shape.block_tokens
        return ReplicaCounters(
            requests=len(served),
            running=sum(answer.read_at_s <= now < answer.end_at_s for answer in served),
            waiting=sum(now < answer.read_at_s for answer in served),
            prompt_tokens=prompts,
            found_tokens=found,
            computed_tokens=prompts - found,
            answer_tokens=sum(answer.answer_tokens for answer in served),
            kv_tokens=len(self._counted.cache) * size,
            kv_tokens_max=self.shape.kv_tokens // size * size,
            wait_s_p50=percentile(waits, 0.5),
            wait_s_p95=percentile(waits, 0.95),
            first_s_p50=percentile(firsts, 0.5),
            first_s_p95=percentile(firsts, 0.95),
        )

    def metrics(self) -> str:
        """In Prometheus' format, by vLLM's names."""
        sums = self.counters()
        name = f'{{model_name="{self.model}"}}'
        values = {
            "num_requests_running": ("gauge", sums.running),
            "num_requests_waiting": ("gauge", sums.waiting),
            "kv_cache_usage_perc": ("gauge", sums.kv_tokens / max(1, sums.kv_tokens_max)),
            "prefix_cache_queries_total": ("counter", sums.prompt_tokens),
            "prefix_cache_hits_total": ("counter", sums.found_tokens),
            "prompt_tokens_total": ("counter", sums.prompt_tokens),
            "generation_tokens_total": ("counter", sums.answer_tokens),
        }
        lines = (
            f"# TYPE vllm:{key} {kind}\nvllm:{key}{name} {value}"
            for key, (kind, value) in values.items()
        )
        return "\n".join(lines) + "\n"


class ReplicaConnection(asyncio.Protocol):
    """One connection, kept open between requests."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._path = ""
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        if self._task is not None:
            self._task.cancel()

    def data_received(self, data: bytes) -> None:
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._close()

    def on_message_begin(self) -> None:
        self._path = ""
        self._body = []

    def on_url(self, url: bytes) -> None:
        self._path += url.decode("latin-1")

    def on_body(self, body: bytes) -> None:
        self._body.append(body)
        if sum(map(len, self._body)) > BODY_BYTES_MAX:
            self._close()

    def on_message_complete(self) -> None:
        body = b"".join(self._body)
        self._body = []
        path = self._path.partition("?")[0]
        if path in (GENERATE, COMPLETIONS):
            self._generate(path, body)
        else:
            self._reply(*self._page(path))

    def _page(self, path: str) -> tuple[int, bytes]:
        replica = self._replica
        match path:
            case "/health":
                return 200, b"{}"
            case "/version":
                return 200, b'{"version":"0.32.0"}'
            case "/v1/models":
                card = {"id": replica.model, "object": "model", "max_model_len": CONTEXT_TOKENS}
                return 200, msgspec.json.encode({"object": "list", "data": [card]})
            case "/counters":
                return 200, msgspec.json.encode(replica.counters())
            case "/arrivals":
                return 200, msgspec.json.encode(replica.arrivals)
            case "/metrics":
                return 200, replica.metrics().encode()
            case _:
                return 404, b'{"error":{"message":"Not Found","code":404}}'

    def _generate(self, path: str, body: bytes) -> None:
        try:
            asked = _asked.decode(body)
        except msgspec.MsgspecError as error:
            self._reply(422, msgspec.json.encode({"detail": str(error)}))
            return
        if not asked.token_ids and not asked.prompt:
            self._reply(400, b'{"error":{"message":"The prompt is empty.","code":400}}')
            return
        self._task = asyncio.get_running_loop().create_task(self._stream(path, asked))

    async def _stream(self, path: str, asked: _Asked) -> None:
        """Wait, read the prompt, and write the answer, all by the simulated clock."""
        replica = self._replica
        served, answer = replica.serve(asked)
        await asyncio.sleep(replica.real_s(served.first_at_s))
        self._write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
        )
        sent = 0
        while sent < len(answer):
            share = (replica.now_s() - served.first_at_s) * replica.shape.decode_tps
            due = min(len(answer), max(sent + 1, int(share)))
            ids = answer[sent:due]
            sent = due
            is_stop = sent == len(answer) and ids[-1] in (
                asked.sampling_params.stop_token_ids or asked.stop_token_ids
            )
            reason = None if sent < len(answer) else "stop" if is_stop else "length"
            choice = {"index": 0, "token_ids": ids, "finish_reason": reason}
            if path == COMPLETIONS:
                choice |= {"text": "", "stop_reason": ids[-1] if is_stop else None}
            self._event({"choices": [choice]})
            if sent < len(answer):
                next_at = served.first_at_s + (sent + 1) / replica.shape.decode_tps
                await asyncio.sleep(max(STEP_S, replica.real_s(next_at)))
        usage = {
            "prompt_tokens": served.prompt_tokens,
            "completion_tokens": len(answer),
            "total_tokens": served.prompt_tokens + len(answer),
            "prompt_tokens_details": {"cached_tokens": served.found_tokens},
        }
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")

    def _event(self, value: object) -> None:
        self._chunk(b"data: %b\n\n" % msgspec.json.encode(value))

    def _chunk(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def _reply(self, status: int, body: bytes) -> None:
        words = {200: b"OK", 400: b"Bad Request", 404: b"Not Found"}.get(status, b"Refused")
        head = b"HTTP/1.1 %d %b\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
        self._write(head % (status, words, len(body)) + body)

    def _write(self, data: bytes) -> None:
        if self._transport is not None:
            self._transport.write(data)

    def _close(self) -> None:
        if self._transport is not None:
            self._transport.close()


async def serve(replica: Replica, port: int) -> asyncio.Server:
    """Listen on loopback; port 0 takes a free one."""
    loop = asyncio.get_running_loop()
    return await loop.create_server(lambda: ReplicaConnection(replica), HOST, port)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    shape = ReplicaShape()
    parser.add_argument("--port", type=int, default=0, help="port; 0: a free one (default: 0)")
    parser.add_argument("--model", default="counted", help="name of the model (default: counted)")
    parser.add_argument("--kv-tokens", type=int, default=shape.kv_tokens, help="KV room in tokens")
    parser.add_argument("--block", type=int, default=shape.block_tokens, help="tokens of a block")
    parser.add_argument("--slots", type=int, default=shape.slots, help="jobs at a time")
    parser.add_argument("--prefill-tps", type=float, default=shape.prefill_tps)
    parser.add_argument("--decode-tps", type=float, default=shape.decode_tps, help="of each answer")
    parser.add_argument("--time-factor", type=float, default=1.0, help="simulated seconds a second")
    parser.add_argument("--seed", type=int, default=1, help="of the answers")
    parser.add_argument("--words", default="", help="JSON file: ids of words, and the stop id")


async def _run(replica: Replica, port: int) -> None:
    server = await serve(replica, port)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    port = server.sockets[0].getsockname()[1]
    say(f"replica of {replica.model} at http://{HOST}:{port}")
    await stop.wait()
    server.close()


def replica_of(options: argparse.Namespace) -> Replica:
    """As the command line says."""
    shape = ReplicaShape(
        options.kv_tokens, options.slots, options.prefill_tps, options.decode_tps, options.block
    )
    words = Words()
    if options.words:
        words = msgspec.json.decode(Path(options.words).read_bytes(), type=Words)
    return Replica(
        shape,
        model=options.model,
        seed=options.seed,
        time_factor=options.time_factor,
        words=words,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one replica until it is stopped."""
    parser = argparse.ArgumentParser(prog="python -m segue_fleet.replica", description=__doc__)
    add_arguments(parser)
    options = parser.parse_args(arguments)
    asyncio.run(_run(replica_of(options), options.port))
    return 0


if __name__ == "__main__":
    sys.exit(main())
