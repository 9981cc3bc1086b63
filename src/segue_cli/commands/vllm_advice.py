"""Which flags of a running vLLM would make agents faster? What was measured, by its page of metrics."""

from __future__ import annotations

import re
from collections.abc import Iterator
from urllib.request import Request

from segue_cli.client.asking import answer_to

BLOCK_SIZE = re.compile(r'^vllm:cache_config_info\{[^}\n]*\bblock_size="(\d+)"', re.MULTILINE)
SPECULATION = re.compile(r"^vllm:spec_decode_num_drafts", re.MULTILINE)
BLOCKS_MIN = 128
ASK_S_MAX = 5.0
BLOCKS_ADVICE = (
    "vLLM keeps its cache in blocks of {} tokens: with --block-size 128 (64 for FlashInfer before Blackwell) its core "
    "takes less than half the time for a history that is cached already"
)
SPECULATION_ADVICE = (
    "vLLM guesses no tokens: for a few conversations at a time try --speculative-config "
    '\'{"method": "ngram", "num_speculative_tokens": 8, "prompt_lookup_min": 2, "prompt_lookup_max": 4}\': '
    "of what coding agents write nearly half stands in their context already"
)


def advice_of(metrics: str) -> Iterator[str]:
    """What to change, by this page of metrics; nothing if it is no vLLM's."""
    found = BLOCK_SIZE.search(metrics)
    if found is None:
        return
    if int(found[1]) < BLOCKS_MIN:
        yield BLOCKS_ADVICE.format(found[1])
    if SPECULATION.search(metrics) is None:
        yield SPECULATION_ADVICE


def vllm_advice(url: str) -> list[str]:
    """The same for the vLLM at this URL; nothing if it shows no metrics."""
    base = url.rstrip("/").removesuffix("/v1")
    try:
        _, page = answer_to(Request(f"{base}/metrics"), ASK_S_MAX)
        return list(advice_of(page.decode(errors="replace")))
    except (OSError, ValueError):
        return []
