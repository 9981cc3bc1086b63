"""What does `prompt_cache_diagnostics` say of a response and the one that it was compared with? Pure.

The types and reasons are OpenAI's; the first reason that applies is reported. A key or a tier that changed is a miss by
contract, though here it does not change the prompt: how many tokens were missed then is what the engine says.
"""

from __future__ import annotations

from segue.reports.compare import CONTRACT, Parting, part
from segue.reports.prompts import KnownPrompt
from segue.reports.report import is_lost
from segue.wire.cache import CacheDiagnostics, CacheMissReason

HIT = CacheDiagnostics("cache_hit")
NOT_FOUND = CacheDiagnostics("comparison_response_not_found")
UNAVAILABLE = CacheDiagnostics("unavailable")


def diagnose(
    old: KnownPrompt, new: KnownPrompt, cached: int | None
) -> tuple[CacheDiagnostics, Parting | None]:
    """How the new prompt compares with the old one, of which the engine had so many tokens cached; and where they
    part."""
    parting = part(old, new)
    return _diagnosed(old, new, cached, parting), parting


def _diagnosed(
    old: KnownPrompt, new: KnownPrompt, cached: int | None, parting: Parting | None
) -> CacheDiagnostics:
    missed = 0 if cached is None else max(0, old.tokens - cached)
    if parting is not None:
        missed = parting.missed
    reason: CacheMissReason | None = None
    if parting is not None and parting.reason == "model_changed":
        reason = "model_changed"
    elif old.response.prompt_cache_key != new.response.prompt_cache_key:
        reason = "prompt_cache_key_changed"
    elif parting is not None:
        reason = CONTRACT[parting.reason]
    elif old.tier != new.tier:
        reason = "service_tier_changed"
    if reason is not None:
        return CacheDiagnostics("cache_miss", reason, old.tokens, missed)
    # Nothing in the request explains what the engine has lost.
    return UNAVAILABLE if is_lost(old.tokens, cached) else HIT
