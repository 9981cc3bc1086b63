"""How is a long text tokenized in milliseconds?

`fastokens` gives the same ids as `tokenizers` in a twentieth of the time. It is made from the very tokenizer that it
stands in for, which takes a second or two and, for 150,000 tokens, 180 MB; so it is made beside the start of a server,
and encodes nothing before it has given the same ids for `SAMPLES`. Where it cannot be made, or differs, `tokenizers`
goes on. docs/decisions/0003-vocabulary.md has the figures.
"""

from __future__ import annotations

import logging
import threading
from array import array
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Protocol

import msgspec

from segue.seams.prompt import IdArray
from segue.vocabularies.vocabulary import Encode

if TYPE_CHECKING:
    from tokenizers import Tokenizer

log = logging.getLogger(__name__)

# Scripts, cases, runs, numbers, marks, joined and broken characters: what vocabularies cut in different ways.
SAMPLES = (
    "I'm sure they'LL say we've 12345 apples.",
    " 's 'S 't're\r\n\r\n\n  x\t\t y   ",
    "A" * 70 + "=" * 40,
    "def f(x):\n        return {'a': [1, 2.5e-3]}  # ok\n\n\n",
    "https://x.yz/?q=1&r=%20#top <|im_end|></s><think>[INST]",
    "Straße, naïve façade, İstanbul, ﬁn, ½², ǅ",
    "e\u0301\u0323 \u1112\u1161\u11ab 한국어 조선말",
    "Съешь же ещё этих мягких булок",
    "我能吞下玻璃而不伤身体。１２３ いろはにほへと",
    "नमस्ते दुनिया ภาษาไทย עברית العربية ١٢٣",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 😀😀",
    "\u00a0\u2028\u3000\u200b▁▁<0x0A>\x00\x01\x7f\x1b[0m",
    "\U00010348\ue000\U0010ffff",
)
# It keeps words of what it has encoded for each thread that uses it, up to about 150 MB; so long texts, which come from
# any thread, are encoded in one.
LONG_CHARS = 4_096
_long_texts = ThreadPoolExecutor(1, thread_name_prefix="tokenize")


class _Fast(Protocol):
    """What is used of a tokenizer of fastokens."""

    def encode_batch_flat(
        self, inputs: list[str], *, split_special_tokens: bool
    ) -> tuple[bytes, bytes]:
        """The ids of all texts as 32-bit numbers, and where each text begins."""


def hasten(
    tokenizer: Tokenizer, spelt: Callable[[str], str], take_over: Callable[[Encode], None]
) -> None:
    """Make a quicker way in a thread, and hand it over if it gives the ids that this tokenizer gives."""

    def work() -> None:
        encode = fast_encode(tokenizer, [*map(spelt, SAMPLES)])
        if encode is not None:
            take_over(encode)

    # A process that ends meanwhile waits for it: one that is inside the library then would end the process by a signal.
    threading.Thread(target=work, name="fast tokenizer").start()


def fast_encode(tokenizer: Tokenizer, samples: Sequence[str]) -> Encode | None:
    """A quicker way to the same ids, if there is one that gives them for these texts."""
    # A process without a tokenizer.json does not need it.
    from fastokens import Tokenizer as FastTokenizer  # type: ignore[import-untyped]

    try:
        fast: _Fast = FastTokenizer.from_json_str(_without_gaps(tokenizer.to_str()))
        found = [_encode(fast, sample).tolist() for sample in samples]
    except (ValueError, RuntimeError) as error:
        log.info("texts are tokenized by tokenizers: fastokens refuses this vocabulary (%s)", error)
        return None
    for sample, ids in zip(samples, found, strict=True):
        if ids != tokenizer.encode(sample, add_special_tokens=False).ids:
            log.warning("texts are tokenized by tokenizers: fastokens differs for %r", sample)
            return None

    def encode(text: str) -> IdArray[int]:
        if len(text) < LONG_CHARS:
            return _encode(fast, text)
        return _long_texts.submit(_encode, fast, text).result()

    return encode


def _encode(fast: _Fast, text: str) -> IdArray[int]:
    """The ids of this text, none of them special. Other threads run meanwhile."""
    ids, _ = fast.encode_batch_flat([text], split_special_tokens=True)
    return array("I", ids)


def _without_gaps(file: str) -> str:
    """The same tokenizer.json with a word that no text contains for each id that has none: fastokens wants them all."""
    fields = msgspec.json.decode(file, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(fields["model"], type=dict[str, msgspec.Raw])
    vocabulary = msgspec.json.decode(model["vocab"], type=dict[str, int])
    gaps = set(range(max(vocabulary.values()))) - set(vocabulary.values())
    if not gaps:
        return file
    filled = vocabulary | {f"\x01{id}": id for id in gaps}
    model["vocab"] = msgspec.Raw(msgspec.json.encode(filled))
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields).decode()
