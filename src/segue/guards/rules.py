"""Is it allowed by the operator's rules? Patterns, size, and the domains of URLs.

In: texts. Out: a verdict that names the kind of rule, never what was found. Long texts are searched in slices, because
a search blocks the event loop. Slices overlap, so that what lies across their border is found.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Sequence
from hashlib import blake2b

import msgspec

from segue.errors import Misconfigured
from segue.settings import RuleSettings
from segue.turn.values import PASSED, Verdict

# A fraction of a millisecond for an ordinary pattern.
SLICE_CHARS = 32 * 1024
# What a pattern may span and still be found across the border of two slices.
SLICE_OVERLAP = 1_024

# The host of a URL: after its scheme, and after a user and password that may stand there.
HOST = re.compile(r"\b(?:https?|wss?|ftp)://(?:[^\s/?#@]*@)?([^\s/?#:\"'<>\\)\]}]+)", re.IGNORECASE)


class RulesGuard:
    """Blocks what a pattern matches, what is too long, and URLs of domains that are not allowed."""

    def __init__(self, rules: RuleSettings) -> None:
        self._patterns = [_compiled(pattern) for pattern in rules.patterns]
        self._chars_max = rules.chars_max
        self._denied = tuple(map(_folded, rules.domains_denied))
        self._allowed = tuple(map(_folded, rules.domains_allowed))
        digest = blake2b(msgspec.json.encode(rules), digest_size=6).hexdigest()
        # With a digest of the rules: other rules are another guard.
        self.name = f"rules-{digest}"

    async def check(self, texts: Sequence[str]) -> Verdict:
        if self._chars_max and sum(map(len, texts)) > self._chars_max:
            return Verdict("it is too long")
        for text in texts:
            verdict = await self._search(text)
            if verdict.reason is not None:
                return verdict
        return PASSED

    async def watch(self, text: str) -> Verdict:
        # By patterns and domains: the length of an answer has a limit of its own.
        return await self._search(text)

    async def _search(self, text: str) -> Verdict:
        for number, part in enumerate(_slices(text)):
            if number:
                await asyncio.sleep(0)
            if any(pattern.search(part) for pattern in self._patterns):
                return Verdict("it matches a pattern")
            if (self._denied or self._allowed) and any(map(self._is_denied, HOST.findall(part))):
                return Verdict("it has a URL that is not allowed")
        return PASSED

    def _is_denied(self, host: str) -> bool:
        host = _folded(host)
        is_listed = not self._allowed or _is_within(host, self._allowed)
        return not is_listed or _is_within(host, self._denied)


def _slices(text: str) -> Iterator[str]:
    for start in range(0, max(len(text), 1), SLICE_CHARS):
        yield text[max(0, start - SLICE_OVERLAP) : start + SLICE_CHARS]


def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except re.error as error:
        message = f"guard_rules: '{pattern}' is not a regular expression: {error}."
        raise Misconfigured(message) from None


def _folded(domain: str) -> str:
    return domain.strip().strip(".").lower()


def _is_within(host: str, domains: Sequence[str]) -> bool:
    return any(host == domain or host.endswith("." + domain) for domain in domains)
