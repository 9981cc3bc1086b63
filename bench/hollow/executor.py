"""What does vLLM compute with, where there is no GPU and no model? Nothing: sampled ids are drawn at random.

vLLM loads this in its engine core (`--distributed-executor-backend executor.HollowExecutor`, this folder on PYTHONPATH,
nothing of Segue imported). Everything else is vLLM's own: HTTP, checks, scheduler, blocks and prefix cache, grammars,
streaming, metrics. The same prompt with the same seed gets the same answer: a few tokens (HOLLOW_ANSWER_TOKENS, 3,9
means 3 to 9) and a stop of the request, or, to a prompt that ends with token 0, as many as it may be. Where a grammar
is set, an id that it allows is drawn. A step takes HOLLOW_STEP_MS. HOLLOW_ASYNC=1: scheduling is asynchronous.
"""

from __future__ import annotations

import json
import os
import random
import time
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, LogprobsLists, ModelRunnerOutput

ANSWER_TOKENS = tuple(map(int, os.environ.get("HOLLOW_ANSWER_TOKENS", "3,9").split(",")))
ENDLESS = 0
STEP_S = float(os.environ.get("HOLLOW_STEP_MS", "0")) / 1e3
# Room for 4 million tokens of the one layer that there is.
CACHE_BYTES = 1 << 30
HEAD_SIZE = 64
# Space, line feed, tabulator and carriage return, as byte-level vocabularies write them.
BLANKS = "\u0120\u010a\u0109\u010d"
# How likely the token that was drawn is; those after it are half as likely each.
LOGPROB = -0.5
LOGPROB_STEP = 0.7


@dataclass
class Running:
    """A request that is being computed."""

    source: random.Random
    settings: Any
    # Tokens that are still to come before a stop.
    left: int
    # Tokens that must be computed before one can be sampled: the prompt, and what was sampled.
    length: int


class HollowExecutor(Executor):
    """Computes nothing, samples at random."""

    def _init_executor(self) -> None:
        if os.environ.get("HOLLOW_ASYNC") == "1":
            # vLLM turns it off on every CPU; its scheduler is made after this.
            self.vllm_config.scheduler_config.async_scheduling = True
        self._running: dict[str, Running] = {}
        self._sampled: dict[str, Running | None] = {}
        self._vocabulary = self.model_config.get_vocab_size()
        vocabulary = json.loads((Path(self.model_config.tokenizer) / "tokenizer.json").read_text())
        tokens = vocabulary["model"]["vocab"].items()
        self._blank = np.zeros(self._vocabulary, dtype=np.uint8)
        self._blank[[id for token, id in tokens if not token.strip(BLANKS)]] = 1

    # --- what the core asks when it starts ---

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        """A step is over before the next one is scheduled, but what it sampled is read after that."""
        return True

    @property
    def supported_tasks(self) -> tuple[str, ...]:
        return ("generate",)

    def get_kv_cache_specs(self) -> list[dict[str, Any]]:
        size = self.cache_config.block_size
        spec = FullAttentionSpec(
            block_size=size, num_kv_heads=1, head_size=HEAD_SIZE, dtype=torch.bfloat16
        )
        return [{"layer": spec}]

    def get_supported_kv_cache_layouts(self) -> list[list[str]]:
        return [["LBNHC"]]

    def determine_available_memory(self) -> list[int]:
        return [CACHE_BYTES]

    def collective_rpc(self, method: Any, *_: Any, **__: Any) -> Any:
        """Nothing is there that could be called."""
        return [None]

    def initialize_from_config(self, kv_cache_configs: list[Any]) -> None:
        """No worker has a cache; before 0.27 each says how long it has compiled."""

    def compile_or_warm_up_model(self) -> None:
        pass

    def check_health(self) -> None:
        pass

    def reset_mm_cache(self) -> None:
        pass

    # --- a step ---

    def execute_model(self, scheduler_output: Any, non_block: bool = False) -> Any:
        """Note who gets a token in this step."""
        for id in scheduler_output.finished_req_ids:
            self._running.pop(id, None)
        computed: dict[str, int] = {}
        for new in scheduler_output.scheduled_new_reqs:
            prompt, settings = new.prompt_token_ids, new.sampling_params
            source = random.Random(f"{settings.seed} {len(prompt)} {prompt[-64:]}")
            left = -1 if prompt[-1] == ENDLESS else source.randint(*ANSWER_TOKENS)
            self._running[new.req_id] = Running(source, settings, left, len(prompt))
            computed[new.req_id] = new.num_computed_tokens
        cached = scheduler_output.scheduled_cached_reqs
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        self._sampled = {}
        for id, count in scheduler_output.num_scheduled_tokens.items():
            running = self._running[id]
            self._sampled[id] = running if computed[id] + count >= running.length else None
        # As workers do where there is nothing to compute.
        return _done(None if self._sampled else EMPTY_MODEL_RUNNER_OUTPUT, non_block)

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        """A token for each of them."""
        if STEP_S:
            time.sleep(STEP_S)
        masks = _masks(grammar_output)
        ids = list(self._sampled)
        drawn: list[list[int]] = []
        for id, running in self._sampled.items():
            drawn.append([] if running is None else [self._draw(running, masks.get(id))])
        output = ModelRunnerOutput(
            req_ids=ids,
            req_id_to_index={id: place for place, id in enumerate(ids)},
            sampled_token_ids=drawn,
            logprobs=self._logprobs(drawn),
        )
        return _done(output, non_block)

    def _draw(self, running: Running, mask: np.ndarray[Any, Any] | None) -> int:
        running.length += 1
        running.left -= 1
        stops = sorted(running.settings.all_stop_token_ids)
        if mask is not None:
            return self._draw_allowed(running, mask, stops)
        if stops and not running.left:
            return stops[0]
        while (id := running.source.randrange(self._vocabulary)) in stops:
            pass
        return id

    def _draw_allowed(self, running: Running, mask: np.ndarray[Any, Any], stops: list[int]) -> int:
        """As soon as it may, it ends; white space only where nothing else is allowed."""
        if allowed := [id for id in stops if mask[id]]:
            return allowed[0]
        spoken = mask[: len(self._blank)] & (1 - self._blank)
        return int(running.source.choice(np.flatnonzero(spoken if spoken.any() else mask)))

    def _logprobs(self, drawn: list[list[int]]) -> LogprobsLists | None:
        """For the whole batch, as many as the request that wants most."""
        wanted = [running.settings.logprobs for running in self._sampled.values() if running]
        if all(count is None for count in wanted):
            return None
        width = 1 + max(count or 0 for count in wanted)
        rows = [ids[0] if ids else 0 for ids in drawn]
        # The drawn token, and the likeliest: itself and those after it in the vocabulary.
        ids = np.array([[id, *range(id, id + width - 1)] for id in rows], dtype=np.int32)
        values = [LOGPROB, *(LOGPROB - LOGPROB_STEP * place for place in range(width - 1))]
        logprobs = np.array([values] * len(rows), dtype=np.float32)
        return LogprobsLists(ids % self._vocabulary, logprobs, np.ones(len(rows), dtype=np.int32))


def _masks(grammar_output: Any) -> dict[str, np.ndarray[Any, Any]]:
    """Which ids a grammar allows, by request."""
    if grammar_output is None:
        return {}
    bits = np.ascontiguousarray(grammar_output.grammar_bitmask).view(np.uint8)
    rows = np.unpackbits(bits, axis=-1, bitorder="little")
    return dict(zip(grammar_output.structured_output_request_ids, rows, strict=False))


def _done(result: Any, non_block: bool) -> Any:
    if not non_block:
        return result
    future: Future[Any] = Future()
    future.set_result(result)
    return future
