"""How do engines say how likely a token was?

Each has its own shape and its own order, and some put the sampled token among the likeliest whether it is one or not.
Out: `TokenLogprob`, the likeliest first, as many as were asked for.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from msgspec import Struct

from segue.turn.values import Ids, Job, Sampling, TokenLogprob


class Likely(Struct, frozen=True):
    """A token and how likely it was, as llama.cpp and vLLM's own endpoint write it."""

    id: int | None = None
    token_id: int | None = None
    token: str = ""
    logprob: float | None = None
    top_logprobs: list[Likely] = []

    @property
    def number(self) -> int:
        """The id, whatever it is called here."""
        known = self.id if self.token_id is None else self.token_id
        return id_in(self.token) if known is None else known


def id_in(token: str) -> int:
    """vLLM's way to write an id where a text is expected: `token_id:42`."""
    return int(token.rpartition(":")[2])


def odds_of(
    logprob: float | None, top: Iterable[tuple[int, float]], sampling: Sampling
) -> TokenLogprob | None:
    """What is told of one token; None if the engine does not know."""
    if logprob is None:
        return None
    count = sampling.top_logprobs
    likeliest = sorted(dict(top).items(), key=lambda one: -one[1])[:count] if count else ()
    return TokenLogprob(logprob, tuple(likeliest))


def odds_of_likely(one: Likely, sampling: Sampling) -> TokenLogprob | None:
    """The same from this shape."""
    top = ((t.number, t.logprob) for t in one.top_logprobs if t.logprob is not None)
    return odds_of(one.logprob, top, sampling)


def ids_with(ids: Sequence[int], logprobs: Sequence[TokenLogprob | None], job: Job) -> Ids:
    """The ids, with their odds where those were asked for; the last ids may have none."""
    if not job.sampling.wants_logprobs:
        return Ids(ids)
    return Ids(ids, [*logprobs[: len(ids)], *[None] * (len(ids) - len(logprobs))])
