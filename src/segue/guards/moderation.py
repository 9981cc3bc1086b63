"""Is it allowed by an endpoint for moderation? Any that speaks OpenAI's `POST /v1/moderations`.

In: texts. Out: a verdict that names the categories which the endpoint flagged. The endpoint is asked within a time
limit; what happens when it does not answer is the operator's choice: nothing passes (503), or everything does, and the
log says so. Nothing foreign crosses this border.
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

from segue.errors import Unavailable
from segue.turn.values import PASSED, Verdict

log = logging.getLogger(__name__)

# What is sent in one request at most; longer texts go in several, which overlap.
TEXT_CHARS_MAX = 16 * 1024
TEXT_OVERLAP = 512
TEXTS_MAX = 32
# How many requests at once for all turns together.
PARALLEL_MAX = 16
ANSWER_BYTES_MAX = 1024 * 1024
# How many categories a client is told.
CATEGORIES_MAX = 3


class Result(Struct):
    flagged: bool
    categories: dict[str, bool | None] = {}


class Answer(Struct):
    results: list[Result]


_decoder = msgspec.json.Decoder(Answer)


class ModerationGuard:
    """Asks an endpoint."""

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
        self._headers = {"authorization": f"Bearer {key}"} if key else {}
        self._model = model
        self._timeout = aiohttp.ClientTimeout(total=s_max)
        self._passes_unreached = unreachable == "pass"
        self._places = asyncio.Semaphore(PARALLEL_MAX)
        self._session: aiohttp.ClientSession | None = None
        digest = blake2b(f"{self._url} {model}".encode(), digest_size=6).hexdigest()
        self._name = f"moderation-{digest}"

    @property
    def name(self) -> str:
        """With a digest of the address and the model."""
        return self._name

    async def check(self, texts: Sequence[str]) -> Verdict:
        """All texts, as many in a request as it may hold."""
        parts = [part for text in texts for part in _parts(text)]
        for start in range(0, len(parts), TEXTS_MAX):
            verdict = await self._ask(parts[start : start + TEXTS_MAX])
            if verdict.reason is not None:
                return verdict
        return PASSED

    async def watch(self, text: str) -> Verdict:
        """One window."""
        return await self.check([text])

    async def close(self) -> None:
        """Let go of the connections."""
        if self._session is not None:
            await self._session.close()

    async def _ask(self, parts: Sequence[str]) -> Verdict:
        body: dict[str, str | Sequence[str]] = {"input": parts}
        if self._model:
            body["model"] = self._model
        try:
            async with self._places:
                answer = await self._post(msgspec.json.encode(body))
        except (aiohttp.ClientError, TimeoutError, OSError, msgspec.MsgspecError) as error:
            return self._unreached(error)
        if len(answer.results) < 1:
            return self._unreached(ValueError("no results"))
        return _verdict(answer)

    async def _post(self, body: bytes) -> Answer:
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=self._timeout)
        headers = {"content-type": "application/json", **self._headers}
        async with self._session.post(self._url, data=body, headers=headers) as response:
            response.raise_for_status()
            return _decoder.decode(await response.content.read(ANSWER_BYTES_MAX))

    def _unreached(self, error: Exception) -> Verdict:
        # The kind of the error only: its words may hold an address with a key in it.
        log.warning("the moderation endpoint did not answer: %s", type(error).__name__)
        if self._passes_unreached:
            return PASSED
        raise Unavailable("The guard of this server does not answer. Please retry later.")


def _parts(text: str) -> list[str]:
    if len(text) <= TEXT_CHARS_MAX:
        return [text]
    step = TEXT_CHARS_MAX - TEXT_OVERLAP
    return [text[start : start + TEXT_CHARS_MAX] for start in range(0, len(text), step)]


def _verdict(answer: Answer) -> Verdict:
    flagged = [one for one in answer.results if one.flagged]
    if not flagged:
        return PASSED
    named = {name[:64] for one in flagged for name, is_so in one.categories.items() if is_so}
    return Verdict(", ".join(sorted(named)[:CATEGORIES_MAX]) or "it was flagged")
