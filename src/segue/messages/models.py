"""Which models does a client of this API see? Models in, a page of them out."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime

from segue.errors import InvalidRequest
from segue.turn.plan import Model, Models
from segue.wire.codec import encode

LIMIT, LIMIT_MAX = 20, 1000


def encode_page(models: Models, query: Mapping[str, str]) -> bytes:
    """A page of the models, in the order in which they are served."""
    names = [*models]
    limit = _limit(query.get("limit"))
    first, last = 0, len(names)
    if (after := query.get("after_id")) in names:
        first = names.index(str(after)) + 1
    if (before := query.get("before_id")) in names:
        last = names.index(str(before))
        first = max(first, last - limit)
    shown = names[first:last][:limit]
    has_more = first > 0 if before is not None else first + len(shown) < len(names)
    page = {
        "data": [_card(name, models[name]) for name in shown],
        "has_more": has_more,
        "first_id": shown[0] if shown else None,
        "last_id": shown[-1] if shown else None,
    }
    return encode(page)


def encode_model(name: str, model: Model) -> bytes:
    return encode(_card(name, model))


def _limit(text: str | None) -> int:
    if text is None:
        return LIMIT
    if not (text.isascii() and text.isdigit() and len(text) < 9 and 1 <= int(text) <= LIMIT_MAX):
        raise InvalidRequest(f"limit: a number from 1 to {LIMIT_MAX}", param="limit")
    return int(text)


def _card(name: str, model: Model) -> dict[str, object]:
    created_at = datetime.fromtimestamp(model.created_at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": name,
        "display_name": name,
        "created_at": created_at,
        "lifecycle": "active",
        "line": None,
        "capabilities": None,
        "deprecated_at": None,
        "retires_at": None,
        "max_input_tokens": model.context_tokens,
        "max_tokens": model.output_tokens_max or model.context_tokens,
    }
