"""How long does a cold prompt take to become tokens? 82,000 tokens of source code, by either library.

    python -m bench cold                                  the vocabularies that `make models` has fetched
    python -m bench cold --tokenizer FILE [--rounds 5]    another tokenizer.json, GGUF or folder

*First*: the first long text of a process. *Next*: other texts after it, when most words have been seen. The two
libraries take turns on the same texts and must give the same ids.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from segue.seams.prompt import IdArray
from segue.vocabularies.fast_tokenizer import SAMPLES, fast_encode
from segue.vocabularies.load import load_vocabulary
from segue_bench.rounds import print_table
from tests.models.assets import CACHE

CHARS = 345_000


def source_texts(count: int) -> list[str]:
    """Source code of installed packages, so many different texts of it."""
    texts, text = [], ""
    for path in sorted(Path(argparse.__file__).parent.rglob("*.py")):
        text += path.read_text(errors="ignore")
        if len(text) >= CHARS:
            texts.append(text[:CHARS])
            text = ""
        if len(texts) == count:
            break
    return texts


def seconds(encode: Callable[[str], IdArray[int]], text: str) -> tuple[float, IdArray[int]]:
    """How long this text takes, and its ids."""
    begun = time.perf_counter()
    ids = encode(text)
    return time.perf_counter() - begun, ids


def compared(path: Path, texts: Sequence[str]) -> tuple[object, ...]:
    """One row of the table: milliseconds of the first text and of the others, by library."""
    vocabulary = load_vocabulary(path).without_pieces()
    vocabulary.encode("x")
    begun = time.perf_counter()
    encode = fast_encode(vocabulary._tokenizer, [*map(vocabulary._spelt, SAMPLES)])
    made_s = time.perf_counter() - begun
    if encode is None:
        raise SystemExit(f"bench: fastokens does not give the ids of {path.name}")
    slow, quick = [], []
    for text in texts:
        slow_s, wanted = seconds(vocabulary.encode, text)
        quick_s, ids = seconds(encode, vocabulary._spelt(text))
        if ids != wanted:
            raise SystemExit(f"bench: the ids of {path.name} differ")
        slow.append(slow_s * 1e3)
        quick.append(quick_s * 1e3)
    next_slow, next_quick = statistics.median(slow[1:]), statistics.median(quick[1:])
    return path.stem, len(ids), slow[0], next_slow, quick[0], next_quick, made_s


def main(arguments: Sequence[str]) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m bench cold", description=__doc__)
    parser.add_argument(
        "--tokenizer", type=Path, action="append", help="a tokenizer's file or folder"
    )
    parser.add_argument("--rounds", type=int, default=5, help="texts after the first")
    options = parser.parse_args(arguments)
    paths = options.tokenizer or sorted((CACHE / "tokenizers").iterdir())
    texts = source_texts(options.rounds + 1)
    print_table(
        "vocabulary {}|tokens {:,}|tokenizers ms, first {:.0f}|next {:.0f}|fastokens ms, first {:.0f}|next {:.1f}|"
        "made in s {:.1f}",
        [compared(path, texts) for path in paths],
    )
