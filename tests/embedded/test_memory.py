"""How long may the context of a model inside be? As long as the memory of this process allows, and not longer."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from segue.vocabularies.gguf import GgufValue
from segue_embedded.memory import CGROUPS, available_bytes, context_for, tell_memory, token_bytes

GIB = 1024**3
SMALL: dict[str, GgufValue] = {
    "general.architecture": "llama",
    "llama.block_count": 30,
    "llama.context_length": 8_192,
    "llama.embedding_length": 576,
    "llama.attention.head_count": 9,
    "llama.attention.head_count_kv": 3,
}
# 128 KiB a token, as a model of 8 billion parameters has.
LARGE: dict[str, GgufValue] = {
    "general.architecture": "llama",
    "llama.block_count": 32,
    "llama.context_length": 131_072,
    "llama.embedding_length": 4_096,
    "llama.attention.head_count": 32,
    "llama.attention.head_count_kv": 8,
}


@pytest.mark.parametrize(
    "free, tokens",
    [
        # A quarter of what the weights leave, in powers of two.
        (200 * GIB, 131_072),
        (37 * GIB, 65_536),
        (36 * GIB, 32_768),
        (15 * GIB, 16_384),
        # 8,192 wherever they fit at all; less only where they do not.
        (6 * GIB, 8_192),
        (int(5.9 * GIB), 4_096),
        (5 * GIB, 2_048),
        # The system does not say.
        (None, 8_192),
    ],
)
def test_context_follows_the_memory_that_is_free(free: int | None, tokens: int) -> None:
    assert context_for(LARGE, 5 * GIB, 1, free) == tokens


def test_no_context_is_longer_than_the_model_was_trained_for() -> None:
    assert context_for(SMALL, 98_000_000, 4, 200 * GIB) == 8_192
    # Every request at once has a context of its own.
    assert context_for(SMALL, 98_000_000, 4, 600_000_000) == 4_096
    odd = LARGE | {"llama.context_length": 40_960}
    assert context_for(odd, 5 * GIB, 1, 200 * GIB) == 40_960
    assert context_for(odd, 5 * GIB, 1, 20 * GIB) == 16_384
    assert context_for(LARGE | {"llama.context_length": 1_024}, 5 * GIB, 1, GIB) == 1_024


def machine(tmp_path: Path, groups: str, files: dict[str, str]) -> int | None:
    (tmp_path / "meminfo").write_text("MemTotal: 32000000 kB\nMemAvailable:   16000000 kB\n")
    (tmp_path / "cgroup").write_text(groups)
    for name, text in files.items():
        place = tmp_path / "groups" / name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text)
    return available_bytes(tmp_path / "meminfo", tmp_path / "cgroup", tmp_path / "groups")


@pytest.mark.parametrize(
    "groups, files, free",
    [
        ("0::/\n", {}, 16_384_000_000),
        ("0::/a\n", {"a/memory.max": "max\n", "a/memory.current": "5\n"}, 16_384_000_000),
        # What is cached of files is given back when a program needs it.
        (
            "0::/a/b\n",
            {
                "a/memory.max": "4000000000\n",
                "a/memory.current": "3000000000\n",
                "a/memory.stat": "anon 5\ninactive_file 700000000\n",
            },
            1_700_000_000,
        ),
        # A container that sees its own group as the root, though the path says otherwise.
        (
            "0::/docker/x\n",
            {"memory.max": "2000000000\n", "memory.current": "500000000\n"},
            1_500_000_000,
        ),
        (
            "4:memory:/x\n2:cpu:/x\n0::/\n",
            {
                "memory/x/memory.limit_in_bytes": "3000000000\n",
                "memory/x/memory.usage_in_bytes": "1000000000\n",
                "memory/x/memory.stat": "total_inactive_file 250000000\ninactive_file 5\n",
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "9000000000\n",
            },
            2_250_000_000,
        ),
        # More is used than is allowed.
        ("0::/\n", {"memory.max": "1000\n", "memory.current": "2000\n"}, 0),
        ("0::/\n", {"memory.max": "odd\n"}, 16_384_000_000),
    ],
)
def test_limits_of_a_container_count(
    tmp_path: Path, groups: str, files: dict[str, str], free: int
) -> None:
    assert machine(tmp_path, groups, files) == free


def test_machine_that_does_not_say(tmp_path: Path) -> None:
    assert available_bytes(tmp_path / "absent", tmp_path / "absent", CGROUPS) is None


def test_memory_is_said_before_it_is_taken(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    assert token_bytes(SMALL) == 23_040
    # A head size of its own, and layers with a different number of heads.
    wide = SMALL | {"llama.attention.key_length": 128, "llama.attention.head_count_kv": [1, 2]}
    assert token_bytes(wide) == 30 * 2 * (128 + 64) * 2
    tell_memory("small", 98_000_000, SMALL, 8_192, 4)
    assert "loading small: at least 853 MB of memory" in caplog.text
    assert "8,192 tokens each, all that the model has" in caplog.text
    assert "more memory than is free" not in caplog.text
    tell_memory("huge", 10**15, LARGE, 8_192, 1)
    assert "8,192 of the model's 131,072 tokens; --context-tokens sets it" in caplog.text
    assert "huge needs more memory than is free" in caplog.text
