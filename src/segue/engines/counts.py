"""Can it be true, what a server of an engine says that it has counted?

In: a job and its `JobStarted` or `Finish`, as the server reports it. Out: the same where its counts can be true: none
is negative, none is larger than the request can explain, and no more is cached than was read; else with counts that
can be. Counts are stored, added up and charged: one that cannot be true must not lose an answer or lock a key.
"""

from __future__ import annotations

from typing import TypeVar

from msgspec import structs

from segue.seams.model import Finish, Job, JobStarted
from segue.seams.prompt import Messages

C = TypeVar("C", bound=JobStarted | Finish)

# A server adds to what it is sent (its template, pictures, a prompt of its own), and writes more than it shows
# (thoughts). No model that we know does so with more tokens than this.
UNSEEN_TOKENS_MAX = 1_000_000


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
