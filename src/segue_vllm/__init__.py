"""How does a vLLM keep a conversation for Segue, so that each turn sends only what is new?

A plugin of vLLM's own API server, installed where vLLM runs; it imports nothing of Segue. One line starts it:

    VLLM_PLUGINS=segue vllm serve MODEL --block-size 128 --scheduler-cls segue_vllm.scheduler.KeepAsyncScheduler

Without `--scheduler-cls` only the API server keeps the ids (step one). With it the engine core keeps ids, block hashes
and KV blocks as well (step two): `KeepAsyncScheduler` with asynchronous scheduling, which is vLLM's default, and
`KeepScheduler` with `--no-async-scheduling`. `GET /segue/session` says which step runs, and why.

    SEGUE_VLLM_TOKENS        how many ids the API server keeps (32,000,000: 128 MB)
    SEGUE_VLLM_CORE_TOKENS   how many ids the engine core keeps (4,000,000: some 200 MB)
    SEGUE_VLLM_CHECK=1       the scheduler compares every hash in every step (slow, for tests)
"""

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("segue-vllm")
except PackageNotFoundError:
    __version__ = "unknown"
