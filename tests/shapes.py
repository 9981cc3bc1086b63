"""Are all answers and events of Messages and Chat what the official clients have types for?

`tests.support` notes here what it receives on these APIs. When the tests of a file have ended, everything that they
were sent is held, strictly, against the pydantic models of the Python clients, and as literals against the types of the
JavaScript clients (`tsc --strict`). A field outside the types is an error unless it is in `BEYOND`, which is what the
pages of these APIs list.
"""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = ROOT / ".venv-clients" / "bin" / "python"
NODE = PYTHON.with_name("node")
NODE_MODULES = ROOT / ".cache" / "npm" / "node_modules"
CHECKER = ROOT / "tests" / "clients" / "python_shapes.py"
RUN_S_MAX = 60
PING = {"type": "ping"}
BEYOND = {
    # Chat: thoughts, and the input of custom calls in deltas. Messages: why a thread was refused.
    "reasoning_content",
    "custom",
    "details",
}
TS_TYPES = {
    "chat answer": "OpenAI.Chat.ChatCompletion",
    "chat event": "OpenAI.Chat.ChatCompletionChunk",
    "chat error": "OpenAI.ErrorObject",
    "messages answer": "Anthropic.Messages.Message",
    "messages event": "Anthropic.Messages.RawMessageStreamEvent",
    "messages count": "Anthropic.Messages.MessageTokensCount",
    "messages model": "Anthropic.Models.ModelInfo",
    "messages models": "{data: Anthropic.Models.ModelInfo[], has_more: boolean, first_id: string | null,"
    " last_id: string | null}",
    "messages error": "Anthropic.ErrorResponse",
    "messages beta answer": "Anthropic.Beta.Messages.BetaMessage",
    "messages beta event": "Anthropic.Beta.Messages.BetaRawMessageStreamEvent",
    "messages beta count": "Anthropic.Beta.Messages.BetaMessageTokensCount",
    "messages beta error": "Anthropic.ErrorResponse",
}
TS_HEAD = "import type Anthropic from '@anthropic-ai/sdk';\nimport type OpenAI from 'openai';\n"
TSC_FLAGS = ["--noEmit", "--strict", "--skipLibCheck", "--module", "nodenext", "--target", "es2022"]

# Kind and JSON of what came, each once.
noted: dict[tuple[str, bytes], None] = {}


def note(
    path: str, asked: Mapping[str, str], status: int, headers: Mapping[str, str], body: bytes
) -> None:
    """Remember an answer on one of these APIs."""
    names = {name.lower() for name in asked}
    path, _, query = path.partition("?")
    beta = "beta " if "beta" in query or "anthropic-beta" in names else ""
    if path == "/v1/chat/completions":
        _note("chat ", "chat error", status, headers, body)
    elif path == "/v1/messages/count_tokens" and status == 200:
        noted[f"messages {beta}count", body] = None
    elif path.startswith("/v1/messages"):
        _note(f"messages {beta}", f"messages {beta}error", status, headers, body)
    elif path.startswith("/v1/models") and "anthropic-version" in names and body:
        kind = "models" if path == "/v1/models" else "model"
        noted[f"messages {kind if status == 200 else 'error'}", body] = None


def _note(api: str, error: str, status: int, headers: Mapping[str, str], body: bytes) -> None:
    if status != 200:
        noted[error, body] = None
    elif not headers.get("content-type", "").startswith("text/event-stream"):
        noted[f"{api}answer", body] = None
    else:
        for line in body.splitlines():
            data = line.removeprefix(b"data: ")
            if data != line and data != b"[DONE]" and json.loads(data) != PING:
                is_error = data.startswith((b'{"error"', b'{"type":"error"'))
                noted[error if is_error else f"{api}event", data] = None


def values() -> list[tuple[str, Any]]:
    """What was noted, decoded. What has a type of Chat's errors is below `error`."""
    found = [(kind, json.loads(body)) for kind, body in noted]
    for kind, value in found:
        for choice in value["choices"] if kind == "chat event" else ():
            # Deltas have no types for what a message has: annotations, and a custom call (docs/apis/chat.md).
            choice["delta"].pop("annotations", None)
            for call in choice["delta"].get("tool_calls", ()):
                if call.get("type") == "custom" and "custom" in call:
                    del call["type"]
    return [(kind, value["error"] if kind == "chat error" else value) for kind, value in found]


def misfits(shapes: list[tuple[str, Any]], folder: Path) -> list[str]:
    """What does not fit the types of the Python clients, or those of the JavaScript clients."""
    assert PYTHON.exists(), "the clients are not installed: run `make test`"
    listed = folder / "shapes.json"
    listed.write_text(json.dumps(shapes))
    found = json.loads(_run([str(PYTHON), str(CHECKER), str(listed)]))
    assert found["seen"] == len(shapes)
    extra = [one for one in found["extra"] if one.rpartition(".")[2] not in BEYOND]
    return found["wrong"] + [f"{one} is in no type" for one in extra] + _untyped(shapes, folder)


def _untyped(shapes: list[tuple[str, Any]], folder: Path) -> list[str]:
    """What `tsc` says about the same values as literals."""
    lines = [
        f"export const shape{number}: {TS_TYPES[kind]} = {json.dumps(_within(value, kind))};"
        for number, (kind, value) in enumerate(shapes)
    ]
    source = folder / "shapes.ts"
    source.write_text(TS_HEAD + "\n".join(lines) + "\n")
    (folder / "node_modules").symlink_to(NODE_MODULES)
    tsc = [str(NODE), str(NODE_MODULES / "typescript" / "bin" / "tsc"), *TSC_FLAGS, str(source)]
    said = _run(tsc, accepted=(0, 1, 2))
    return [line for line in said.splitlines() if line.strip()]


def _within(value: Any, kind: str) -> Any:
    """Without the fields that are documented to be outside the types; a whole custom call is inside."""
    if isinstance(value, dict):
        left_out = BEYOND if kind.endswith("event") else BEYOND - {"custom"}
        return {key: _within(one, kind) for key, one in value.items() if key not in left_out}
    return [_within(one, kind) for one in value] if isinstance(value, list) else value


def _run(command: list[str], accepted: tuple[int, ...] = (0,)) -> str:
    done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S_MAX, check=False)
    assert done.returncode in accepted, done.stderr[-4000:] + done.stdout[-1000:]
    return done.stdout


@pytest.fixture(scope="module", autouse=True)
def hold_answers_to_the_types(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Everything that the tests of this file were sent fits; only files that use these APIs pay for it."""
    noted.clear()
    yield
    if noted:
        wrong = misfits(values(), tmp_path_factory.mktemp("shapes"))
        noted.clear()
        assert not wrong, "\n".join(map(str, wrong))[:3000]
