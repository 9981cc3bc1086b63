"""How does vLLM's scheduler give a finished request's KV blocks to the request that goes on from it?

`--scheduler-cls segue_vllm.scheduler.KeepAsyncScheduler`, or `KeepScheduler` with `--no-async-scheduling`. A request
says in `extra_args["segue"]` under which key it is to be kept, and from which key it goes on; all others are scheduled
as ever. Held blocks are let go, the oldest first, as soon as an allocation finds no room: before anything is preempted,
and whoever waits holds none, so that nobody can starve.

None of this is public in vLLM: what is used exists in the versions of `versions.TRIED`, and with any other one, or a
configuration that was not tried, nothing is kept and every request that goes on is refused, which its client hears.
"""

from __future__ import annotations

import os
from typing import Any

import vllm
from vllm.logger import init_logger
from vllm.v1.core.kv_cache_utils import make_block_hash_with_group_id
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, MLAAttentionSpec
from vllm.v1.request import RequestStatus

from segue_vllm.kept import REQUEST_IDS, KeptTurns, Refusal
from segue_vllm.versions import is_tried

# A name of its own would not be shown by vLLM's configuration of logs.
logger = init_logger("vllm.segue")

TOKENS_MAX = int(os.environ.get("SEGUE_VLLM_CORE_TOKENS", 4_000_000))
# Of all blocks: the rest is for those that nobody goes on from soon.
HELD_PART_MAX = 0.5
CHECKS = os.environ.get("SEGUE_VLLM_CHECK") == "1"
# Drafts that need no KV of their own.
SPECULATION = ("ngram", "ngram_gpu", "suffix")


def why_not(scheduler: Any) -> str:
    """What this scheduler was not tried with; empty where blocks can be handed on."""
    config, groups = scheduler.vllm_config, scheduler.kv_cache_config.kv_cache_groups
    parallel, speculative = config.parallel_config, config.speculative_config
    if not is_tried(vllm.__version__):
        return f"vLLM {vllm.__version__}"
    if not scheduler.cache_config.enable_prefix_caching:
        return "no prefix cache"
    kinds = [type(group.kv_cache_spec) for group in groups]
    if kinds not in ([FullAttentionSpec], [MLAAttentionSpec]):
        return "a model with other than one kind of full attention"
    spec = groups[0].kv_cache_spec
    if getattr(spec, "sliding_window", None) or getattr(spec, "attention_chunk_size", None):
        return "a model with windows"
    if spec.block_size != scheduler.hash_block_size:
        return "hashes of other sizes than blocks"
    if scheduler.connector is not None or scheduler.ec_connector is not None:
        return "a KV connector"
    if parallel.pipeline_parallel_size > 1 or parallel.data_parallel_size > 1:
        return "pipeline or data parallelism"
    if scheduler.dcp_world_size > 1 or getattr(scheduler, "pcp_world_size", 1) > 1:
        return "context parallelism"
    if scheduler.is_encoder_decoder or config.model_config.runner_type != "generate":
        return "a model that does not go on from its prompt"
    if not getattr(config.model_config, "disable_cascade_attn", True):
        # A block that as many hold as there are requests is taken for one of all of them; but what is kept holds some.
        return "cascade attention"
    if speculative is not None and speculative.method not in SPECULATION:
        return f"speculation by {speculative.method}"
    return ""


class _Keeping(Scheduler):
    """What both schedulers have in common."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._keeps = False
        try:
            reason = why_not(self)
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
        if reason:
            logger.warning("segue: the scheduler keeps nothing: not tried with %s", reason)
            return
        manager = self.kv_cache_manager
        (self._blocks_of,) = manager.coordinator.single_type_managers
        pool = manager.block_pool
        self._kept = KeptTurns(
            TOKENS_MAX, self.hash_block_size, lambda blocks: pool.free_blocks(reversed(blocks))
        )
        self._held_max = int(HELD_PART_MAX * self.kv_cache_config.num_blocks)
        self._allocate = manager.allocate_slots
        manager.allocate_slots = self._allocate_slots
        # vLLM's own walks all blocks, for as much.
        manager.estimate_cached_tokens = self._cached_tokens
        self._keeps = True
        how = "asynchronous" if isinstance(self, AsyncScheduler) else "synchronous"
        logger.info("segue: blocks are handed on, %d ids are kept (%s)", TOKENS_MAX, how)

    # --- requests come -----------------------------------------------------------------------------

    def add_request(self, request: Any) -> None:
        asked = _asked(request)
        if asked is not None and asked.get("from") is not None:
            try:
                if not self._keeps:
                    raise Refusal("this engine keeps nothing")
                self._kept.go_on(request, asked)
                if asked.get("check"):
                    self._check_request(request)
            except Exception as error:
                # It is in the queues and never runs: the next step ends it with an error, which its client hears.
                if not isinstance(error, Refusal):
                    logger.exception("segue: a request could not be made whole")
                if self._keeps:
                    self._kept.counts["refused"] += 1
                    self._kept.drop(request.request_id)
                request.structured_output_request = None
                request.num_computed_tokens = 0
                request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
                self.grammar_compile_error_reqs.add(request.request_id)
        super().add_request(request)

    # --- requests are scheduled ----------------------------------------------------------------------

    def _holds_kv_blocks(self, request: Any) -> bool:
        """vLLM serves who holds blocks before all others. A claim is none of these: it waits in its turn."""
        is_claim = self._keeps and request.request_id in self._kept.claims
        return not is_claim and bool(super()._holds_kv_blocks(request))

    def _allocate_slots(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """Room for a request, at the cost of what is held."""
        id, kept = request.request_id, self._kept
        claim = kept.claims.get(id)
        if claim is not None:
            self._blocks_of.req_to_blocks[id] = claim.blocks
            self._blocks_of.num_cached_block[id] = claim.cached_blocks
        count = len(claim.blocks or ()) if claim is not None else 0
        while (found := self._allocate(request, *args, **kwargs)) is None:
            if not kept.let_go_oldest(but=id):
                break
        if claim is None:
            return found
        if found is None:
            # It waits without them, so that others may have them.
            claim.cached_blocks = self._blocks_of.num_cached_block.pop(id)
            del self._blocks_of.req_to_blocks[id]
            return None
        frontier = claim.frontier
        kept.taken(claim, count)
        if request.prefill_stats is not None:
            request.prefill_stats.set(
                num_prompt_tokens=request.num_prompt_tokens,
                num_local_cached_tokens=frontier,
                num_external_cached_tokens=0,
            )
        return found

    def _cached_tokens(self, request: Any) -> int:
        """How much of it is in the prefix cache; a group of full attention has no holes."""
        blocks = self._blocks_of.num_cached_block.get(request.request_id, 0)
        return int(blocks * self._blocks_of.block_size)

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        output = super().schedule(*args, **kwargs)
        if CHECKS and self._keeps:
            self._check()
        return output

    # --- requests end ----------------------------------------------------------------------------------

    def _free_blocks(self, request: Any) -> None:
        if not self._keeps:
            super()._free_blocks(request)
            return
        asked, id = _asked(request), request.request_id
        is_whole = request.status in (
            RequestStatus.FINISHED_STOPPED,
            RequestStatus.FINISHED_LENGTH_CAPPED,
        )
        if (
            asked is None
            or asked.get("keep") is None
            or not is_whole
            or request.mm_features
            or request.prompt_embeds is not None
            or not request.prompt_token_ids
        ):
            super()._free_blocks(request)
            self._kept.drop(id)
            return
        ids = request._all_token_ids
        computed = request.num_computed_tokens - request.num_output_placeholders
        frontier = min(computed, len(ids) - 1)
        blocks = cached = None
        manager = self._blocks_of
        if id in manager.num_cached_block and frontier >= request.num_prompt_tokens:
            cached = manager.num_cached_block.pop(id)
            blocks = manager.req_to_blocks.pop(id)
            manager._partial_hit_reqs.pop(id, None)
            del self.requests[id]
        else:
            super()._free_blocks(request)
        self._kept.keep(asked["keep"], request, blocks, cached or 0, frontier)
        while self._kept.held_blocks > self._held_max and self._kept.let_go_oldest():
            pass

    def reset_prefix_cache(self, *args: Any, **kwargs: Any) -> bool:
        """Sleep and new weights need every block."""
        if self._keeps:
            self._kept.let_go_all()
        return bool(super().reset_prefix_cache(*args, **kwargs))

    # --- checks ------------------------------------------------------------------------------------------

    def _check_request(self, request: Any) -> None:
        """Its hashes, and those of its blocks, are the ones that the whole prompt has; raises `Refusal`."""
        id, manager = request.request_id, self._blocks_of
        fresh = request._block_hasher(_Unhashed(request))
        claim = self._kept.claims.get(id)
        if claim is None:
            blocks, count = manager.req_to_blocks.get(id, ()), manager.num_cached_block.get(id, 0)
        else:
            blocks, count = claim.blocks, claim.cached_blocks
        wanted = [make_block_hash_with_group_id(hash, 0) for hash in fresh[:count]]
        prompt = request.prompt_token_ids
        if (
            fresh != list(request.block_hashes)
            or [block.block_hash for block in blocks[:count]] != wanted
            or prompt != request._all_token_ids[: request.num_prompt_tokens]
            or len(prompt) != request.num_prompt_tokens
        ):
            raise Refusal(f"what is kept differs from the whole prompt of {id}")

    def _check(self) -> None:
        """All of that in every step; fails the engine otherwise."""
        for request in self.requests.values():
            if request.request_id not in self.grammar_compile_error_reqs:
                self._check_request(request)
        blocks = [block for one in self._kept.held.values() for block in one.blocks or ()]
        assert all(block.ref_cnt > 0 for block in blocks), "a held block has no owner"
        free = self.kv_cache_manager.block_pool.free_block_queue.get_all_free_blocks()
        assert not {*map(id, blocks)} & {*map(id, free)}, "a held block is free"


class KeepScheduler(_Keeping):
    """With `--no-async-scheduling`."""


class KeepAsyncScheduler(_Keeping, AsyncScheduler):
    """With asynchronous scheduling, as vLLM runs by default; where vLLM turns that off (speculation by n-grams), the
    other one."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        config = kwargs["vllm_config"] if "vllm_config" in kwargs else args[0]
        if not config.scheduler_config.async_scheduling:
            return KeepScheduler(*args, **kwargs)
        return super().__new__(cls)


class _Unhashed:
    """A request as its hasher sees one that was never hashed."""

    def __init__(self, request: Any) -> None:
        self.__dict__.update(request.__dict__)
        self.block_hashes: list[Any] = []
        self.num_tokens = request.num_tokens


def _asked(request: Any) -> dict[str, Any] | None:
    """What the plugin asks. The field is open to all clients of vLLM, whose requests have ids of another form."""
    params = request.sampling_params
    extra = params.extra_args if params is not None else None
    asked = extra.get("segue") if extra else None
    is_ours = isinstance(asked, dict) and request.request_id.startswith(REQUEST_IDS)
    return asked if is_ours else None
