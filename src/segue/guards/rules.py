"""Is it allowed by the operator's rules? Patterns, size, and the domains of URLs.

In: texts. Out: a verdict that names the kind of rule, never what was found. Long texts are searched in windows, because
a search blocks the event loop. Each window begins with the last half of the one before it, so that a match of up to
that length is found wherever it stands; long runs of blanks are shortened first, so that they make no match too long.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from hashlib import blake2b

import msgspec
from msgspec import Struct

from segue.errors import Misconfigured
from segue.guards.slow import slow_text
from segue.seams.guard import PASSED, Verdict

# A fraction of a millisecond for an ordinary pattern; one that takes too long for so much is refused when it is loaded.
WINDOW_CHARS = 32 * 1024
# What a match may span and still be found in a text that is longer than a window.
SPAN_CHARS_MAX = WINDOW_CHARS // 2
# What is searched of a run of blanks in such a text: this much of its beginning, and as much of its end. The look back
# keeps the search for runs from beginning inside of one.
BLANKS_KEPT = 512
BLANKS = re.compile(rf"(?<!\s)\s{{{2 * BLANKS_KEPT + 1},}}")
# What a search costs for any text, however short it is: in characters, for the pauses.
TEXT_CHARS_MIN = 64

# The host of a URL: after its scheme, and after a user and password that may stand there.
HOST = re.compile(r"\b(?:https?|wss?|ftp)://(?:[^\s/?#@]*@)?([^\s/?#:\"'<>\\)\]}]+)", re.IGNORECASE)


# What no model needs to read or write: private keys, and tokens of well-known services.
CREDENTIALS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{36}\b",
    r"\bglpat-[A-Za-z0-9_-]{20}\b",
    r"\bsk-segue-[A-Za-z0-9_-]{16,}",
)


class Rules(Struct, frozen=True, kw_only=True):
    """What is blocked."""

    # Texts that match one of these regular expressions.
    patterns: tuple[str, ...] = CREDENTIALS
    # New input of more characters; 0: no limit.
    chars_max: int = 0
    # URLs of these domains and of their subdomains.
    domains_denied: tuple[str, ...] = ()
    # Unless empty, URLs of all other domains.
    domains_allowed: tuple[str, ...] = ()


class RulesGuard:
    """Blocks what a pattern matches, what is too long, and URLs of domains that are not allowed."""

    def __init__(self, rules: Rules) -> None:
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
        return await self._search(texts)

    async def watch(self, text: str) -> Verdict:
        # By patterns and domains: the length of an answer has a limit of its own.
        return await self._search([text])

    async def _search(self, texts: Iterable[str]) -> Verdict:
        searched = 0
        for text in texts:
            for window, is_last in _windows(text):
                for pattern in self._patterns:
                    if searched > WINDOW_CHARS:
                        searched = 0
                        await asyncio.sleep(0)
                    searched += max(len(window), TEXT_CHARS_MIN)
                    if pattern.search(window):
                        return Verdict("it matches a pattern")
                if (self._denied or self._allowed) and self._has_denied(window, is_last=is_last):
                    return Verdict("it has a URL that is not allowed")
        return PASSED

    def _has_denied(self, window: str, *, is_last: bool) -> bool:
        """Whether there is a URL that is not allowed; a host that the window's end cuts is whole in the next window."""
        urls = (url for url in HOST.finditer(window) if is_last or url.end() < len(window))
        return any(self._is_denied(url[1]) for url in urls)

    def _is_denied(self, host: str) -> bool:
        host = _folded(host)
        is_listed = not self._allowed or _is_within(host, self._allowed)
        return not is_listed or _is_within(host, self._denied)


def _windows(text: str) -> Iterator[tuple[str, bool]]:
    """The text as it is searched, and whether this is its end."""
    if len(text) <= WINDOW_CHARS:
        yield text, True
        return
    before = ""
    for start in range(0, len(text), SPAN_CHARS_MAX):
        end = start + SPAN_CHARS_MAX
        window = BLANKS.sub(_shortened, before + text[start:end])
        yield window, end >= len(text)
        before = window[-SPAN_CHARS_MAX:]


def _shortened(blanks: re.Match[str]) -> str:
    return blanks[0][:BLANKS_KEPT] + blanks[0][-BLANKS_KEPT:]


@cache
def _compiled(pattern: str) -> re.Pattern[str]:
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        message = f"guard_rules: '{pattern}' is not a regular expression: {error}."
        raise Misconfigured(message) from None
    # Our own are known not to be.
    piece = None if pattern in CREDENTIALS else slow_text(compiled, WINDOW_CHARS)
    if piece is not None:
        raise Misconfigured(
            f"guard_rules: '{pattern}' is too slow for a text that repeats {piece!r}: everybody would wait for it. "
            r"Say how much may be repeated, as in '\d{1,20}', or begin with what is not repeated, as '\b'."
        )
    return compiled


def _folded(domain: str) -> str:
    return domain.strip().strip(".").lower()


def _is_within(host: str, domains: Sequence[str]) -> bool:
    return any(host == domain or host.endswith("." + domain) for domain in domains)
