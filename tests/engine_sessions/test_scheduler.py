"""With which vLLM are blocks handed on, and what becomes of a request that goes on where they are not? Without vLLM.

What the scheduler does with a vLLM is in `tests/engines/test_vllm_sessions.py`.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest


class StandIn:
    """A class of vLLM, by name alone."""

    def __init__(self, **changed: Any) -> None:
        self.block_size = 16
        self.__dict__.update(changed)


class BaseScheduler:
    """As much of vLLM's as the one in question calls where nothing is kept."""

    def __init__(self, place: SimpleNamespace) -> None:
        self.__dict__.update(place.__dict__)
        self.grammar_compile_error_reqs: set[str] = set()
        self.added: list[Any] = []

    def add_request(self, request: Any) -> None:
        self.added.append(request)


STATUSES = SimpleNamespace(WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR="waits")
NAMES: dict[str, dict[str, Any]] = {
    "vllm": {"__version__": "0.32.0"},
    "vllm.logger": {"init_logger": lambda name: SimpleNamespace(warning=print, exception=print)},
    "vllm.v1": {},
    "vllm.v1.core": {},
    "vllm.v1.core.kv_cache_utils": {"make_block_hash_with_group_id": None},
    "vllm.v1.core.sched": {},
    "vllm.v1.core.sched.async_scheduler": {"AsyncScheduler": type("A", (BaseScheduler,), {})},
    "vllm.v1.core.sched.scheduler": {"Scheduler": BaseScheduler},
    "vllm.v1.kv_cache_interface": {
        "FullAttentionSpec": type("FullAttentionSpec", (StandIn,), {}),
        "MLAAttentionSpec": type("MLAAttentionSpec", (StandIn,), {}),
    },
    "vllm.v1.request": {"RequestStatus": STATUSES},
}
Full = NAMES["vllm.v1.kv_cache_interface"]["FullAttentionSpec"]


@pytest.fixture
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, over what stands in for vLLM."""
    for name, things in NAMES.items():
        module = ModuleType(name)
        module.__dict__.update(things)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "segue_vllm.scheduler", raising=False)
    yield importlib.import_module("segue_vllm.scheduler")
    sys.modules.pop("segue_vllm.scheduler", None)


def place(**changed: Any) -> SimpleNamespace:
    """A scheduler that was tried; `a__b` is `b` of `a`."""
    made = SimpleNamespace(
        vllm_config=SimpleNamespace(
            parallel_config=SimpleNamespace(pipeline_parallel_size=1, data_parallel_size=1),
            speculative_config=None,
            model_config=SimpleNamespace(runner_type="generate", disable_cascade_attn=True),
        ),
        kv_cache_config=SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=Full())]),
        cache_config=SimpleNamespace(enable_prefix_caching=True),
        hash_block_size=16,
        connector=None,
        ec_connector=None,
        dcp_world_size=1,
        is_encoder_decoder=False,
    )
    for path, value in changed.items():
        *folders, name = path.split("__")
        at = made
        for folder in folders:
            at = getattr(at, folder)
        setattr(at, name, value)
    return made


def groups(*specs: Any) -> list[SimpleNamespace]:
    return [SimpleNamespace(kv_cache_spec=spec) for spec in specs]


@pytest.mark.parametrize(
    "changed, words",
    [
        ({}, ""),
        ({"vllm_config__speculative_config": SimpleNamespace(method="ngram")}, ""),
        ({"vllm_config__speculative_config": SimpleNamespace(method="eagle")}, "by eagle"),
        ({"cache_config__enable_prefix_caching": False}, "no prefix cache"),
        ({"kv_cache_config__kv_cache_groups": groups(StandIn())}, "one kind of full attention"),
        ({"kv_cache_config__kv_cache_groups": groups(Full(), Full())}, "one kind"),
        ({"kv_cache_config__kv_cache_groups": groups(Full(sliding_window=9))}, "windows"),
        ({"hash_block_size": 8}, "hashes of other sizes"),
        ({"connector": object()}, "a KV connector"),
        ({"ec_connector": object()}, "a KV connector"),
        ({"vllm_config__parallel_config__data_parallel_size": 2}, "data parallelism"),
        ({"dcp_world_size": 2}, "context parallelism"),
        ({"is_encoder_decoder": True}, "does not go on from its prompt"),
        ({"vllm_config__model_config__disable_cascade_attn": False}, "cascade attention"),
    ],
)
def test_blocks_are_handed_on_where_that_was_tried(
    scheduler: Any, changed: dict[str, Any], words: str
) -> None:
    assert words in scheduler.why_not(place(**changed))
    assert bool(words) == bool(scheduler.why_not(place(**changed)))


def test_version_that_was_not_tried_keeps_nothing_and_refuses_who_goes_on(
    scheduler: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules["vllm"], "__version__", "0.33.0", raising=False)
    assert scheduler.why_not(place()) == "vLLM 0.33.0"
    made = scheduler.KeepScheduler(place())
    asked = {"from": "a", "length": 1, "tail": [1]}
    requests = [
        SimpleNamespace(request_id=name, sampling_params=SimpleNamespace(extra_args=extra))
        for name, extra in (
            ("segue-goes on", {"segue": asked}),
            ("segue-another", None),
            # The field is open to all clients of vLLM.
            ("cmpl-1", {"segue": "nonsense"}),
            ("generate-tokens-segue-1", {"segue": asked}),
            ("segue-of a client", {"segue": ["nonsense"]}),
        )
    ]
    for request in requests:
        made.add_request(request)
    assert made.added == requests
    assert made.grammar_compile_error_reqs == {"segue-goes on"}
