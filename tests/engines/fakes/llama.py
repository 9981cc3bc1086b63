"""A FAKE llama.cpp server whose model sees. The shapes are those of its source (`tools/server`, llama.cpp of November
2026): a prompt is ids, or a text with a marker for each image and the images in base64. No model is behind it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import cast

from aiohttp import web

from segue.vocabularies.vocabulary import Mark, Vocabulary
from tests.engines.fakes.server import Body, Fake, event, spoken

MARKER = "<__media_Xk3__>"


@dataclass
class FakeLlama(Fake):
    """`vocabulary`: with which it makes ids of a text, special tokens included."""

    vocabulary: Vocabulary | None = None
    sees: bool = True
    # What it puts before every text.
    first_id: int | None = None
    # What stands for an image in a text, as it says.
    named_marker: str = MARKER

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/props", self._props),
            web.post("/tokenize", self._tokenize),
            web.post("/completion", self._completion),
        ]

    async def _props(self, request: web.Request) -> web.Response:
        props = {
            "modalities": {"vision": self.sees, "audio": False},
            "media_marker": self.named_marker,
        }
        slot = {"n_ctx": self.context_tokens, "params": {}}
        return web.json_response({"total_slots": 1, "default_generation_settings": slot, **props})

    async def _tokenize(self, request: web.Request) -> web.Response:
        return web.json_response({"tokens": self._added()})

    def _added(self) -> list[int]:
        return [] if self.first_id is None else [self.first_id]

    async def _completion(self, request: web.Request) -> web.StreamResponse:
        body = await self.body_of(request)
        prompt = self.ids(body["prompt"])
        if prompt is None:
            return self.refusal(500, "Failed to tokenize prompt")
        response = await self.begin(request)
        ids, _ = spoken(self.answer(prompt), (), cast(int, body["n_predict"]))
        for n, id in enumerate(ids):
            await response.write(event({"content": "", "tokens": [id], "tokens_predicted": n + 1}))
        last = {"stop": True, "stop_type": "eos", "tokens": [], "tokens_evaluated": len(prompt)}
        await response.write(event({**last, "timings": {"cache_n": self.cached(prompt)}}))
        self.remember([*prompt, *ids])
        return response

    def ids(self, prompt: object) -> list[int] | None:
        """The ids of a prompt; an image is 66 of an id that no token has. None: it cannot be read."""
        if isinstance(prompt, list):
            return cast("list[int]", prompt)
        assert self.vocabulary is not None
        given = cast(Body, prompt)
        texts = cast(str, given["prompt_string"]).split(MARKER)
        images = cast("list[str]", given["multimodal_data"])
        if len(texts) != len(images) + 1:
            return None
        ids = self._added()
        for text, image in zip(texts, [*images, ""], strict=True):
            ids += encoded(self.vocabulary, text)
            ids += [10**6 + sum(image.encode())] * (66 if image else 0)
        return ids


def encoded(vocabulary: Vocabulary, text: str) -> list[int]:
    """The ids of a text in which special tokens are read."""
    either = "|".join(map(re.escape, sorted(vocabulary.specials, key=len, reverse=True)))
    parts = [part for part in re.split(f"({either})", text) if part]
    chunks = [Mark(part) if vocabulary.has_special(part) else part for part in parts]
    return list(vocabulary.ids(*chunks))
