"""What is advised for a vLLM, by its page of metrics."""

from __future__ import annotations

import asyncio

import pytest

from segue_cli.commands.vllm_advice import advice_of, vllm_advice
from tests.engines.fakes.vllm import FakeVllm

# As vLLM 0.32 writes it, shortened.
PAGE = (
    'vllm:cache_config_info{{_block_size_resolved="True",block_size="{}",cache_dtype="auto"}} 1.0\n'
)
DRAFTS = 'vllm:spec_decode_num_drafts_total{engine="0"} 3.0\n'


@pytest.mark.parametrize(
    "page, words",
    [
        (PAGE.format(16), ["--block-size 128", "--speculative-config"]),
        (PAGE.format(16) + DRAFTS, ["--block-size 128"]),
        (PAGE.format(128), ["--speculative-config"]),
        (PAGE.format(256) + DRAFTS, []),
        ("something else\n", []),
    ],
)
def test_advice_is_what_the_flags_lack(page: str, words: list[str]) -> None:
    told = list(advice_of(page))
    assert [word in line for word, line in zip(words, told, strict=True)] == [True] * len(words)


async def test_vllm_is_asked_where_it_is() -> None:
    async with FakeVllm(metrics=PAGE.format(16)) as fake:
        assert len(await asyncio.to_thread(vllm_advice, f"{fake.url}/v1")) == 2
    assert await asyncio.to_thread(vllm_advice, fake.url) == []
