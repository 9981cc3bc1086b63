"""What does speculation without a model gain with real weights, on this machine's processor? Greedy answers, compared.

    python -m bench drafts [--weights FILE] [--answers 6] [--tokens 96] [--kinds copy explain]

The model inside (SmolLM2-135M, or a GGUF that is named) answers the same prompts without guesses and with each of
llama.cpp's ways to guess from the context, in turn. *copy*: a part of a source file is to be written again, as agents
do when they edit; *explain*: words about it. *A step*: tokens for each run of the model, which is what a machine with
computing power to spare gains at best; *CPU*: processor time a token against that without guesses, which is what a
processor gains, where a guess costs as much as a token. *Same*: answers that are those without guesses, token by
token; a batch sums its floats in another order, so that a model may go another way where two words are as likely.
"""

from __future__ import annotations

import argparse
import secrets
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec

from segue_bench.rounds import interleaved, print_table
from segue_embedded.loading import LlamaServer, load_server
from segue_embedded.weights import find_weights

CHARS = 900
TASKS = {
    "copy": "Write this part of a file again, word by word:",
    "explain": "Explain in a few sentences what this part of a file does:",
}
# By llama.cpp's names; how many tokens a guess has, and how many of the last ones must stand earlier. Its own figures
# (48 after 12) are more than the model inside takes in one batch.
WAYS: dict[str, tuple[str, int, int]] = {
    "none": ("NONE", 0, 0),
    "ngram-simple 8 after 4": ("NGRAM_SIMPLE", 8, 4),
    "ngram-simple 24 after 12": ("NGRAM_SIMPLE", 24, 12),
    "ngram-map-k 8 after 4": ("NGRAM_MAP_K", 8, 4),
}


class Answer(NamedTuple):
    """One answer."""

    text: str
    tokens: int
    guessed: int
    right: int
    cpu_s: float


@contextmanager
def guessing(way: tuple[str, int, int]) -> Iterator[None]:
    """Servers that are made meanwhile guess like this."""
    import xllamacpp  # type: ignore[import-untyped]

    name, size, after = way
    plain = xllamacpp.CommonParams

    def params() -> Any:
        made = plain()
        speculative = made.speculative
        kinds = xllamacpp.common_speculative_type
        speculative.types = [getattr(kinds, f"COMMON_SPECULATIVE_TYPE_{name}")]
        for one in (speculative.ngram_simple, speculative.ngram_map_k):
            if size:
                one.size_n, one.size_m = after, size
        made.speculative = speculative
        return made

    xllamacpp.CommonParams = params
    try:
        yield
    finally:
        xllamacpp.CommonParams = plain


def ask(server: LlamaServer, prompt: str, tokens: int) -> Answer:
    """Greedy, once the prompt is read."""
    chunks: list[bytes] = []

    def take(chunk: bytes) -> bool:
        chunks.append(chunk)
        return False

    began = 0.0
    for count in (1, tokens):
        chunks.clear()
        began = time.process_time()
        body = {"prompt": prompt, "max_tokens": count, "temperature": 0}
        server.handle_completions(msgspec.json.encode(body), take)
    spent = time.process_time() - began
    answer = msgspec.json.decode(b"".join(chunks))
    times = answer["timings"]
    guessed, right = times.get("draft_n", 0), times.get("draft_n_accepted", 0)
    return Answer(answer["choices"][0]["text"], times["predicted_n"], guessed, right, spent)


def prompts(kind: str, count: int) -> list[str]:
    """Parts of our own source."""
    folder = Path(__file__).parents[1] / "src" / "segue" / "turn"
    parts = [path.read_text()[1_500 : 1_500 + CHARS] for path in sorted(folder.glob("*.py"))]
    parts = [part for part in parts if len(part) == CHARS][:count]
    begin, end = "<|im_start|>user\n", "<|im_end|>\n<|im_start|>assistant\n"
    return [f"{begin}{TASKS[kind]}\n\n{part}{end}" for part in parts]


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        "python -m bench drafts", None, __doc__, formatter_class=formatter
    )
    parser.add_argument("--weights", type=Path, help="a GGUF with ChatML's marks")
    parser.add_argument("--answers", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=96)
    parser.add_argument("--kinds", nargs="+", choices=TASKS, default=[*TASKS])
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args(arguments)
    path = options.weights or find_weights("smollm2")
    servers: dict[str, LlamaServer] = {}
    for name, way in WAYS.items():
        with guessing(way):
            key = secrets.token_hex(8)
            servers[name] = load_server(
                path, context_tokens=2_048, parallel=1, threads=options.threads, key=key
            )
    rows: list[tuple[Any, ...]] = []
    for kind in options.kinds:
        asked = prompts(kind, options.answers)

        def all_of(server: LlamaServer, asked: list[str] = asked) -> list[Answer]:
            return [ask(server, prompt, options.tokens) for prompt in asked]

        calls: dict[str, Callable[[], list[Answer]]] = {
            name: lambda server=server: all_of(server)  # type: ignore[misc]
            for name, server in servers.items()
        }
        found = {name: runs[0] for name, runs in interleaved(calls, 1, 0).items()}
        plain = cast(list[Answer], found["none"])
        for name, answers in found.items():
            tokens, right = (
                sum(getattr(one, field) for one in answers) for field in ("tokens", "right")
            )
            guessed = sum(one.guessed for one in answers)
            costs = [
                (one.cpu_s / one.tokens) / (base.cpu_s / base.tokens)
                for one, base in zip(answers, plain, strict=True)
            ]
            same = sum(one.text == base.text for one, base in zip(answers, plain, strict=True))
            rows.append(
                (
                    f"{kind}, {name}",
                    tokens / max(1, tokens - right),
                    f"{right / guessed:.0%}" if guessed else "-",
                    statistics.median(costs),
                    f"{same} of {len(answers)}",
                )
            )
    print_table(
        "answers {}|tokens a step {:.2f}|right of guessed {}|CPU a token {:.2f} x|same {}", rows
    )
