"""How much memory may a model inside this process take, and how long is its context for that?

In: the head of its file and what is free. Out: a number of tokens, and words for the log. The context follows the
memory that is there, in powers of two, so that small changes of what is free change nothing: the saved state of a slot
fits one length only.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from segue.vocabularies.gguf import GgufValue, trained_tokens

log = logging.getLogger(__name__)

# Taken wherever it fits; a longer one only out of the part below.
CONTEXT_TOKENS = 8_192
# A conversation needs as much.
CONTEXT_TOKENS_MIN = 2_048
# How much of the memory that the weights leave a longer context may take: the machine has other work.
CONTEXT_PART = 1 / 4

MEMINFO = Path("/proc/meminfo")
OWN_GROUPS = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
# The limit of a cgroup, what it uses, and what of that is cached files: v2 and v1.
GROUP_FILES = {
    "": ("memory.max", "memory.current", "inactive_file"),
    "memory": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def context_for(
    head: Mapping[str, GgufValue], weights_bytes: int, parallel: int, free: int | None
) -> int:
    """The context of a model where the operator has not said: as long as its training and the memory allow."""
    trained = trained_tokens(head)
    if free is None:
        return min(trained, CONTEXT_TOKENS)
    left = free - weights_bytes
    for tokens in _lengths(trained):
        room = left if tokens <= CONTEXT_TOKENS else left * CONTEXT_PART
        if token_bytes(head) * tokens * parallel <= room:
            return tokens
    return min(trained, CONTEXT_TOKENS_MIN)


def _lengths(trained: int) -> Iterator[int]:
    """What the model was trained for, and the powers of two below."""
    yield trained
    tokens = 1 << (trained - 1).bit_length() - 1
    while tokens >= CONTEXT_TOKENS_MIN:
        yield tokens
        tokens //= 2


def tell_memory(
    name: str,
    weights_bytes: int,
    head: Mapping[str, GgufValue],
    context_tokens: int,
    parallel: int,
    free: int | None = None,
) -> None:
    """Log how much memory a model will take, before it is taken, and warn where there is less."""
    cache_bytes = token_bytes(head) * context_tokens * parallel
    needed = weights_bytes + cache_bytes
    trained = trained_tokens(head)
    log.info(
        "loading %s: at least %s of memory (weights %s, context %s for %s of %s)",
        name,
        _shown(needed),
        _shown(weights_bytes),
        _shown(cache_bytes),
        "one request" if parallel == 1 else f"{parallel} requests at once",
        f"{context_tokens:,} tokens each, all that the model has"
        if context_tokens >= trained
        else f"{context_tokens:,} of the model's {trained:,} tokens; --context-tokens sets it",
    )
    free = available_bytes() if free is None else free
    if free is not None and needed > free:
        log.warning(
            "%s needs more memory than is free (%s): expect swapping, or a smaller "
            "--context-tokens or --engine-parallel",
            name,
            _shown(free),
        )


def token_bytes(head: Mapping[str, GgufValue]) -> int:
    """What one token of context takes, by the metadata of a GGUF file: a key and a value for each layer and head."""

    def number(key: str, default: int) -> int:
        found = head.get(f"{head.get('general.architecture')}.{key}")
        if isinstance(found, list):
            # One number for each layer.
            found = max((layer for layer in found if isinstance(layer, int)), default=default)
        return found if isinstance(found, int) else default

    heads = number("attention.head_count", 1)
    width = number("embedding_length", 0) // max(heads, 1)
    widths = number("attention.key_length", width) + number("attention.value_length", width)
    return number("block_count", 0) * number("attention.head_count_kv", heads) * widths * 2


def available_bytes(
    info: Path = MEMINFO, own: Path = OWN_GROUPS, groups: Path = CGROUPS
) -> int | None:
    """The memory that this process can still take: of the machine, and of the cgroups that it is in; None where the
    system does not say."""
    lines = info.read_text().splitlines() if info.exists() else []
    found = [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
    return min([*found, *_left_in_groups(own, groups)], default=None)


def _left_in_groups(own: Path, groups: Path) -> Iterator[int]:
    """What the limits of the own cgroup and of those above leave. In a container only the last may be visible."""
    lines = own.read_text().splitlines() if own.exists() else []
    for _, kinds, path in (line.split(":", 2) for line in lines):
        for kind in GROUP_FILES.keys() & kinds.split(","):
            limit_file, used_file, cached_key = GROUP_FILES[kind]
            place = groups / kind / path.strip("/")
            for folder in (place, *place.parents):
                with suppress(OSError, ValueError):
                    limit = int((folder / limit_file).read_text())
                    used = int((folder / used_file).read_text())
                    yield max(0, limit - used + _cached(folder, cached_key))
                if folder == groups / kind:
                    break


def _cached(folder: Path, key: str) -> int:
    """The files that are in memory because there was room."""
    with suppress(OSError):
        for line in (folder / "memory.stat").read_text().splitlines():
            if line.startswith(f"{key} "):
                return int(line.split()[1])
    return 0


def _shown(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.0f} MB"
