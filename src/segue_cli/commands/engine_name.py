"""Which model of an engine is served where the operator names none?

The only one that it lists; several are an error that lists them. An engine that does not answer yet is asked again when
it does.
"""

from __future__ import annotations

import asyncio

import msgspec
from msgspec import Struct, structs

from segue.engines.facts import MODELS
from segue.engines.upstream import Timeouts, Upstream
from segue.errors import ApiError, Misconfigured, shown_names
from segue.printable import shown_address
from segue.server.names import NAMED
from segue.settings.values import Settings

# An engine that is still loading, or that refuses the key or so many questions, has not said what it has.
AWAY = frozenset({401, 403, 408, 425, 429})
# A start waits so long for a list of models.
TIMEOUTS = Timeouts(connect_s=2.0, probe_s=2.0)


class _Card(Struct, frozen=True):
    id: str = ""
    # The model that this one is an adapter of.
    parent: str | None = None


class _Cards(Struct, frozen=True):
    data: list[_Card] = []


_cards = msgspec.json.Decoder(_Cards)


async def with_engine_name(settings: Settings) -> Settings:
    """The settings with the name of the engine's only model, where none is named; unchanged while no engine answers."""
    if not settings.is_unnamed:
        return settings
    asked = (_listed(url, settings.engine_key) for url in settings.engine_url)
    answers = [names for names in await asyncio.gather(*asked) if names is not None]
    if not answers:
        return settings
    where = " and ".join(map(shown_address, settings.engine_url))
    common = [name for name in answers[0] if all(name in names for names in answers)]
    if len(common) == 1:
        return structs.replace(settings, model=(common[0],))
    every = list(dict.fromkeys(name for names in answers for name in names))
    if not every and settings.engine not in NAMED:
        return settings
    if not every:
        raise Misconfigured(
            f"model: the engine at {where} does not list its models. Name the one to serve: --model NAME."
        )
    raise Misconfigured(
        f"model: there are several models at {where}. Name the one to serve: --model {every[0]}. "
        f"There are: {shown_names(every)}."
    )


async def _listed(url: str, key: str) -> list[str] | None:
    """The models of a server, without adapters and without those for embeddings; None if it does not say."""
    upstream = Upstream(url, key or None, TIMEOUTS)
    try:
        status, body = await upstream.call("GET", MODELS)
        if status in AWAY or status >= 500:
            return None
        cards = _cards.decode(body).data if status == 200 else []
    except ApiError:
        return None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return []
    finally:
        await upstream.close()
    names = [one.id for one in cards if one.id and not one.parent]
    return [name for name in names if "embed" not in name.lower()] or names
