"""Is this a prompt injection? A small classifier inside the process.

In: texts. Out: a verdict from the worst score of any part of them. The model is a folder with `model.onnx` and
`tokenizer.json`: any sequence classifier that was exported to ONNX with two classes, of which the last is the bad one
(docs/guards.md says where to get one). It runs in a thread of its own, one text at a time, because the event loop must
not wait for it. It checks what the model is given, not answers.
"""

from __future__ import annotations

import asyncio
import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import blake2b
from pathlib import Path
from typing import Protocol, cast

from tokenizers import Tokenizer

from segue.errors import Misconfigured, MissingPackage
from segue.seams.guard import PASSED, Verdict

# A sentence is lost in a long part: in 512 tokens the prompt guard scores an injection among harmless words 0.2, in 128
# tokens 1.0 (docs/guards.md). Neighbouring parts share some, so that a sentence is whole in one of them.
PART_TOKENS = 128
PART_OVERLAP = 32
# A text is tokenized in parts of this many characters, so that a huge one needs no huge memory.
TEXT_CHARS_MAX = 64 * 1024
TEXT_OVERLAP = 1_024
# One inference already uses the processor's vector units; more at once would starve the loop.
THREADS = 1
# onnxruntime warns at length about kernels that it does not need.
ERRORS_ONLY = 3


_Batch = Sequence[Sequence[int]]


class ModelInput(Protocol):
    name: str


class OnnxSession(Protocol):
    """What is used of onnxruntime, which has no types."""

    def run(
        self, outputs: None, inputs: Mapping[str, _Batch]
    ) -> list[Sequence[Sequence[float]]]: ...

    def get_inputs(self) -> Sequence[ModelInput]: ...


class ClassifierGuard:
    """Blocks what a classifier is sure enough about."""

    def __init__(self, folder: Path, threshold: float = 0.9) -> None:
        model = folder / "model.onnx"
        vocabulary = folder / "tokenizer.json"
        for path in (model, vocabulary):
            if not path.is_file():
                message = f"guard_classifier: '{folder}' has no {path.name}: see docs/guards.md."
                raise Misconfigured(message)
        self._session = _session(model)
        self._inputs = {value.name for value in self._session.get_inputs()}
        self._tokenizer = Tokenizer.from_file(str(vocabulary))
        self._tokenizer.no_truncation()
        self._threshold = threshold
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix="classifier")
        stat = model.stat()
        identity = f"{stat.st_size} {stat.st_mtime_ns} {threshold}"
        # With a digest of the model's file and the threshold.
        self.name = f"classifier-{blake2b(identity.encode(), digest_size=6).hexdigest()}"

    async def check(self, texts: Sequence[str]) -> Verdict:
        loop = asyncio.get_running_loop()
        for text in texts:
            for start in range(0, len(text), TEXT_CHARS_MAX):
                part = text[max(0, start - TEXT_OVERLAP) : start + TEXT_CHARS_MAX]
                if await loop.run_in_executor(self._threads, self._is_bad, part):
                    return Verdict("it looks like an injection")
        return PASSED

    async def watch(self, text: str) -> Verdict:
        # An answer injects nothing.
        return PASSED

    async def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _is_bad(self, text: str) -> bool:
        ids = self._tokenizer.encode(text).ids
        return any(self._score(part) >= self._threshold for part in _parts(ids))

    def _score(self, ids: Sequence[int]) -> float:
        inputs: dict[str, _Batch] = {"input_ids": [ids], "attention_mask": [[1] * len(ids)]}
        if "token_type_ids" in self._inputs:
            inputs["token_type_ids"] = [[0] * len(ids)]
        logits = [float(logit) for logit in self._session.run(None, inputs)[0][0]]
        highest = max(logits)
        weights = [math.exp(logit - highest) for logit in logits]
        return weights[-1] / sum(weights)


def _parts(ids: Sequence[int]) -> Iterator[Sequence[int]]:
    step = PART_TOKENS - PART_OVERLAP
    for start in range(0, max(len(ids) - PART_OVERLAP, 1), step):
        yield ids[start : start + PART_TOKENS]


def _session(path: Path) -> OnnxSession:
    try:
        onnx = importlib.import_module("onnxruntime")
    except ImportError:
        raise MissingPackage("guard", "onnxruntime", "segue-server[classifier]") from None
    options = onnx.SessionOptions()
    options.log_severity_level = ERRORS_ONLY
    options.intra_op_num_threads = 1
    providers = ["CPUExecutionProvider"]
    session = onnx.InferenceSession(str(path), sess_options=options, providers=providers)
    return cast(OnnxSession, session)
