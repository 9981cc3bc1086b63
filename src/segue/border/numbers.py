"""Which numbers of a server of an engine can be true? Pure.

In: a job, and counts, ids, logprobs and sizes as the server reports them. Out: the same where they can be, else such as
can be, or none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from email.utils import parsedate_to_datetime
from typing import TypeVar

from msgspec import structs

from segue.limits import UNSEEN_TOKENS_MAX
from segue.seams.model import Finish, Job, JobStarted
from segue.seams.prompt import Messages
from segue.wire.inner_json import has_more_marks
from segue.wire.long_texts import long_strings
from segue.wire.slow_numbers import SLOW_NUMBERS_MAX

C = TypeVar("C", bound=JobStarted | Finish)

# No vocabulary has as many: the largest have some 260,000 words, and engines add a few rows.
ID_MAX = 2**24 - 1
# How many tokens there are in a text only its endpoint knows; but the longest tokens are runs of 128 blanks, and even
# an endpoint that sends letter by letter has fewer deltas and events for each token than this.
TOKEN_CHARS_MAX, CHARS_MIN = 128, 64 * 1024
TOKEN_EVENTS_MAX, EVENTS_MIN = 16, 1_024
# What endpoints themselves send for a token that is impossible.
LOGPROB_MIN = -9999.0
# Brackets in an event, or in a short answer, as far as they are looked at; and commas for each of them: the ids of a
# long answer, which an engine may repeat in every event. So many are decoded within some 10 ms.
LOOKED_AT_BYTES = 64 * 1024
BRACKETS_MAX, COMMAS_FOR_BRACKET = 65_536, 4
# Of the ids of a whole prompt, with which vLLM begins: they are not decoded.
ECHOED = re.compile(rb'"prompt_token_ids": ?\[')
# Numbers that take the JSON library 250 times as long as others. The exact count of `wire/slow_numbers` is too slow for
# each event: here they are estimated, by their exponents, or by digits among the bytes at these steps.
MANY_NUMBERS_BYTES, QUOTES_MAX = 8 * 1024, 8_192
SLOW = [re.compile(mark + rb"(?:\+?0*[1-3]|-0*3)[0-9]{2}") for mark in (b"e", b"E")]
DIGITS_STEP, MANY_DIGITS = 64, re.compile(b"[0-9]{4}")
LONG_NUMBER_DIGITS = 256
LONG_NUMBER = re.compile(b"[0-9]{%d}" % LONG_NUMBER_DIGITS)
# Tokens that come together with their logprobs.
LOGPROBS_MAX = 8_192
# Nobody is asked to wait longer, whatever a server says.
WAIT_S_MAX = 24 * 3600.0
# More jobs at once no server takes.
SLOTS_MAX = 65_536


def events_max(job: Job) -> int:
    """How many events the answer to a job may take, those included that report how far the prompt is read."""
    limit = job.output_tokens_max
    most = UNSEEN_TOKENS_MAX if limit is None else limit
    return most * TOKEN_EVENTS_MAX + EVENTS_MIN + job.prompt.length


def has_too_much(data: bytes, brackets_max: int = BRACKETS_MAX) -> bool:
    """Whether this has more values than can be decoded without holding up others."""
    if len(data) <= MANY_NUMBERS_BYTES:
        return False
    if echoed := ECHOED.search(data):
        data = data[: echoed.end()] + data[data.find(b"]", echoed.end()) :]
    return _has_slow_numbers(data) or (
        len(data) > LOOKED_AT_BYTES
        and (
            has_more_marks(data, b"{[", brackets_max)
            or has_more_marks(data, b",", brackets_max * COMMAS_FOR_BRACKET)
        )
    )


def _has_slow_numbers(data: bytes) -> bool:
    if _slow_numbers(data) <= SLOW_NUMBERS_MAX:
        return False
    # Dumps of bytes look like it; of these there are few in an event.
    if data.count(b'"') > QUOTES_MAX:
        return True
    in_texts = sum(_slow_numbers(data[begin:end]) for begin, end in long_strings(data))
    return _slow_numbers(data) - in_texts > SLOW_NUMBERS_MAX


def _slow_numbers(data: bytes) -> int:
    count = sum(len(pattern.findall(data)) for pattern in SLOW)
    if len(data) <= LONG_NUMBER_DIGITS * SLOW_NUMBERS_MAX:
        return count
    # In lists of ids there are as many digits, and commas between them.
    seem_long = len(MANY_DIGITS.findall(data[::DIGITS_STEP])) > SLOW_NUMBERS_MAX
    return count + len(LONG_NUMBER.findall(data)) if seem_long else count


def few(data: bytes) -> bytes:
    """The same, or nothing where it has too much."""
    return b"" if has_too_much(data) else data


def are_ids(ids: Collection[int]) -> bool:
    """Whether a vocabulary may have these."""
    if len(ids) == 1:
        # The way of nearly every token.
        (id,) = ids
        return 0 <= id <= ID_MAX
    return not ids or 0 <= min(ids) <= max(ids) <= ID_MAX


def count_in(value: object) -> int | None:
    """A count as a server has written it; what is no count is one that cannot be."""
    if value is None:
        return None
    return value if type(value) is int else -1


def finite(logprob: float) -> float:
    """A logprob that can be written as JSON."""
    return max(LOGPROB_MIN, min(logprob, 0.0))


def context_size(tokens: int | None) -> int | None:
    """A context of a server, where it names one that can be."""
    return tokens if tokens is not None and 0 < tokens < 2**31 else None


def slots_of(told: int | None) -> int | None:
    """How many jobs a server takes at once, where it names a number that can be."""
    return told if told is not None and 0 < told <= SLOTS_MAX else None


def plausible(job: Job, said: C) -> C:
    """The same value if its counts can be true, else one whose counts can be."""
    prompt = job.prompt
    read_max = prompt.length + UNSEEN_TOKENS_MAX
    if isinstance(said, JobStarted):
        cached = _within(said.cached_tokens, read_max)
        return said if cached == said.cached_tokens else structs.replace(said, cached_tokens=cached)
    read, wrote = said.input_tokens, said.output_tokens
    cached, thought = said.cached_tokens or 0, said.reasoning_tokens or 0
    most = prompt.length if read is None else read
    if 0 <= cached <= most <= read_max and 0 <= thought <= (wrote or 0) <= UNSEEN_TOKENS_MAX:
        return said
    if read != _within(read, read_max):
        read = prompt.tokens if isinstance(prompt, Messages) else None
    if wrote != _within(wrote, UNSEEN_TOKENS_MAX):
        wrote = None
    found = structs.replace(
        said,
        input_tokens=read,
        output_tokens=wrote,
        cached_tokens=_within(said.cached_tokens, prompt.length if read is None else read),
        reasoning_tokens=None if wrote is None else _within(said.reasoning_tokens, wrote),
    )
    return said if found == said else found


def _within(count: int | None, most: int) -> int | None:
    return None if count is None else min(max(0, count), most)


def wait_of(retry_after: str) -> float | None:
    """What the header `Retry-After` says: seconds, or a date."""
    try:
        if re.fullmatch(r"[0-9]{1,9}", retry_after):
            wait_s = float(retry_after)
        else:
            wait_s = parsedate_to_datetime(retry_after).timestamp() - time.time()
    except (ValueError, OverflowError, OSError):
        return None
    return min(max(0.0, wait_s), WAIT_S_MAX)
