"""Is it allowed by a moderation endpoint? Any endpoint with OpenAI's `POST /v1/moderations`.

In: texts. Out: a verdict that names the categories which the endpoint flagged. The endpoint has a time limit; what
happens when it does not answer is the operator's choice: nothing passes (503), or everything does, and the log says so.
No exception of the HTTP library leaves this file.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from hashlib import blake2b
from typing import Literal

import aiohttp
import msgspec
from msgspec import Struct

from segue.border.one_answer import OneAnswerConnector
from segue.errors import Unavailable
from segue.seams.guard import PASSED, Verdict

log = logging.getLogger(__name__)

# What is sent in one request at most; longer texts go in several, which overlap.
TEXT_CHARS_MAX = 16 * 1024
TEXT_OVERLAP = 512
TEXTS_MAX = 32
# How many requests at once for all turns together.
PARALLEL_MAX = 16
ANSWER_BYTES_MAX = 1024 * 1024
# How many categories the error names.
CATEGORIES_MAX = 3


class _Result(Struct):
    flagged: bool
    categories: dict[str, bool | None] = {}


class _Moderation(Struct):
    results: list[_Result]


_decoder = msgspec.json.Decoder(_Moderation)


class ModerationGuard:
    """Blocks what an endpoint flags."""

    def __init__(
        self,
        url: str,
        key: str = "",
        model: str = "",
        *,
        s_max: float = 5.0,
        unreachable: Literal["block", "pass"] = "block",
    ) -> None:
        self._url = url.rstrip("/").removesuffix("/v1") + "/v1/moderations"
        self._headers = {"content-type": "application/json"}
        if key:
            self._headers["authorization"] = f"Bearer {key}"
        self._settings = {"model": model} if model else {}
        self._timeout = aiohttp.ClientTimeout(total=s_max)
        self._passes_unreached = unreachable == "pass"
        self._slots = asyncio.Semaphore(PARALLEL_MAX)
        self._session: aiohttp.ClientSession | None = None
        digest = blake2b(f"{self._url} {model}".encode(), digest_size=6).hexdigest()
        # With a digest of the URL and the model.
        self.name = f"moderation-{digest}"

    async def check(self, texts: Sequence[str]) -> Verdict:
        parts = [part for text in texts for part in _parts(text)]
        for start in range(0, len(parts), TEXTS_MAX):
            verdict = await self._moderate(parts[start : start + TEXTS_MAX])
            if verdict.reason is not None:
                return verdict
        return PASSED

    async def watch(self, text: str) -> Verdict:
        return await self.check([text])

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()

    async def _moderate(self, parts: Sequence[str]) -> Verdict:
        try:
            async with self._slots:
                results = await self._post(msgspec.json.encode({"input": parts, **self._settings}))
            # One for each text: what was not judged has not passed.
            if len(results) >= len(parts) or any(each.flagged for each in results):
                return _verdict(results)
            problem = f"{len(results)} results for {len(parts)} texts"
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            # The kind of the error only: its message may contain a URL with a key in it.
            problem = type(error).__name__
        log.warning("the moderation endpoint did not answer: %s", problem)
        if self._passes_unreached:
            return PASSED
        raise Unavailable("The guard of this server does not answer. Please retry later.")

    async def _post(self, body: bytes) -> list[_Result]:
        if self._session is None:
            connector = OneAnswerConnector()
            self._session = aiohttp.ClientSession(connector=connector, timeout=self._timeout)
        # The texts of a user are for this endpoint, and not for where it leads.
        async with self._session.post(
            self._url, data=body, headers=self._headers, allow_redirects=False
        ) as response:
            response.raise_for_status()
            answer = bytearray()
            async for part in response.content.iter_any():
                answer += part
                if len(answer) > ANSWER_BYTES_MAX:
                    raise aiohttp.ClientPayloadError("an answer that is too long")
            return _decoder.decode(answer).results


def _parts(text: str) -> list[str]:
    if len(text) <= TEXT_CHARS_MAX:
        return [text]
    step = TEXT_CHARS_MAX - TEXT_OVERLAP
    return [text[start : start + TEXT_CHARS_MAX] for start in range(0, len(text), step)]


def _verdict(results: Sequence[_Result]) -> Verdict:
    flagged = [result.categories for result in results if result.flagged]
    if not flagged:
        return PASSED
    names = {name[:64] for categories in flagged for name in categories if categories[name]}
    return Verdict(", ".join(sorted(names)[:CATEGORIES_MAX]) or "it was flagged")
