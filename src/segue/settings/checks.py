"""Can a server run with what was set?

In: what was set, and where. Out: the settings, or every problem at once, each with the place where the operator mends
it. First each value is held against its type; where all fit, the rules follow: those that involve several settings, or
the form of a text. What needs a look at the machine (a file, a port, an engine) is found out where it is opened.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Iterator, Mapping
from urllib.parse import urlsplit

import msgspec

from segue.errors import Misconfigured
from segue.printable import shown_address
from segue.settings.sources import Problem, SettingSources, read_sources
from segue.settings.validation import Misfit, SettingPath, misfits, nearest
from segue.settings.values import API_NAMES, DIALECTS, ModelSettings, Settings

# ("models", 0) is a table; what is below is checked as a model.
TABLE_DEPTH = 2
MCP_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
SEARCH_HEADER = re.compile(r"[A-Za-z0-9-]+: *[\x21-\x7e][\x20-\x7e]*")
STATE_SETTING = "embedded_state_bytes_max"
NO_STATES = (
    "the embedded model's state is kept by one process with a SQLite store. Leave it at 0, or leave out --workers and "
    "use --store sqlite:///segue.db."
)


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings from flags, environment and file, validated."""
    return settings_of(read_sources(flags, environment))


def settings_of(sources: SettingSources) -> Settings:
    """The settings that were set; refused with everything that is wrong, a line for each problem."""
    if found := problems_of(sources):
        raise Misconfigured("\n".join(map(str, found)))
    return msgspec.convert(sources.values, Settings, strict=False)


def problems_of(sources: SettingSources) -> list[Problem]:
    """Everything that is wrong with the values, or with their combination."""
    if sources.broken:
        return [sources.broken]
    values = sources.values
    found = [
        misfit
        for misfit in misfits(values, Settings)
        if misfit.path[0] != "models" or len(misfit.path) <= TABLE_DEPTH
    ]
    tables = values.get("models")
    for index, table in enumerate(tables if isinstance(tables, list) else ()):
        if isinstance(table, Mapping):
            found += misfits(table, ModelSettings, ("models", index))
    if not found:
        found = list(_rules(msgspec.convert(values, Settings, strict=False)))
    return [sources.problem(misfit) for misfit in found]


def _rules(settings: Settings) -> Iterator[Misfit]:
    yield from _listener_rules(settings)
    yield from _search_rules(settings)
    try:
        yield from _store_rules(settings)
    except Misconfigured as error:
        yield Misfit(("store",), str(error).removeprefix("store: "))
    yield from _url_rules(("guard_url",), filter(None, [settings.guard_url]))
    yield from _url_rules(("otel_endpoint",), filter(None, [settings.otel_endpoint]))
    yield from _url_rules(("engine_url",), settings.engine_url)
    yield from _model_rules(settings)
    yield from _mcp_rules(settings)


def _listener_rules(settings: Settings) -> Iterator[Misfit]:
    if not settings.apis:
        yield Misfit(("apis",), f"name at least one of: {', '.join(API_NAMES)}.")
    if not is_loopback(settings.host) and settings.auth == "off":
        yield Misfit(
            ("host",),
            f"{settings.host} is not a loopback address, which is refused with --auth off. "
            "Leave --auth out, or leave --host out and put a proxy in front.",
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        given, other = ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
        yield Misfit((given,), f"{other} is missing: set both tls_cert and tls_key, or neither.")


def _search_rules(settings: Settings) -> Iterator[Misfit]:
    if len(settings.search_fields.split()) != 3:
        yield Misfit(("search_fields",), "name three fields: URL, title and text.")
    if settings.search_header and not SEARCH_HEADER.fullmatch(settings.search_header):
        yield Misfit(("search_header",), "write it as NAME: VALUE.")


def _store_rules(settings: Settings) -> Iterator[Misfit]:
    """Raises `Misconfigured` where the address is that of no store."""
    kind = settings.store_kind
    if kind == "memory" and settings.workers > 1:
        yield Misfit(
            ("workers",),
            f"{settings.workers} processes cannot share the store 'memory'. "
            "Use --store sqlite:///segue.db, or leave --workers out.",
        )
    is_direct = settings.store_direct.startswith(("postgresql://", "postgres://"))
    if settings.store_direct and not (kind == "postgresql" and is_direct):
        yield Misfit(("store_direct",), "store and store_direct must both be postgresql://… URLs.")
    if settings.workers > 1 or kind != "sqlite":
        for index, table in enumerate(settings.models):
            if table.get(STATE_SETTING):
                yield Misfit(("models", index, STATE_SETTING), NO_STATES)
        if settings.embedded_state_bytes_max:
            yield Misfit((STATE_SETTING,), NO_STATES)


def _url_rules(path: SettingPath, urls: Iterable[str]) -> Iterator[Misfit]:
    for url in urls:
        if not is_web_url(url):
            yield Misfit(path, f"'{url}' is not a URL such as http://127.0.0.1:8000.")


def _model_rules(settings: Settings) -> Iterator[Misfit]:
    # Without a model of its own name, the settings are those of the only one.
    models: tuple[ModelSettings, ...] = settings.named_models() or (settings,)
    yield from _dialect_rules((), settings.dialect)
    for model in models:
        yield from _discovery_rules(model)
    yield from _drained_rules(models)
    for index, table in enumerate(settings.models):
        path = ("models", index)
        model = msgspec.convert(table, ModelSettings, strict=False)
        if not model.name:
            yield Misfit(path, "name is missing.")
        yield from _dialect_rules(path, model.dialect)
        yield from _url_rules((*path, "engine_url"), model.engine_url)


def _dialect_rules(path: SettingPath, name: str) -> Iterator[Misfit]:
    # A file says how a model writes.
    if name not in DIALECTS and not name.endswith(".toml"):
        sentence = (
            f"'{name}' is not one of: {', '.join(DIALECTS)}, and no .toml file."
            f"{nearest(name, DIALECTS)}"
        )
        yield Misfit((*path, "dialect"), sentence)


def _discovery_rules(model: ModelSettings) -> Iterator[Misfit]:
    """Whether the replicas of a model can be looked up."""
    path: SettingPath = ("engine_discovery",)
    if model.engine_discovery == "off":
        return
    if model.engine in ("embedded", "scripted"):
        sentence = f"engine '{model.engine}' has no URL whose replicas could be looked up."
        yield Misfit(path, sentence)
        return
    hosts = [urlsplit(url).hostname or "" for url in model.engine_url]
    for host in list(filter(_address_of, hosts))[:1]:
        sentence = f"{host} is an address: '{model.engine_discovery}' needs a name in engine_url."
        yield Misfit(path, sentence)


def _drained_rules(models: tuple[ModelSettings, ...]) -> Iterator[Misfit]:
    """Where the replicas are looked up, any of them may be found later."""
    known = sorted({shown_address(url) for model in models for url in model.engine_url})
    if not known or any(model.engine_discovery != "off" for model in models):
        return
    for url in sorted({url for model in models for url in model.engine_drained} - set(known)):
        yield Misfit(("engine_drained",), f"'{url}' is not one of engine_url: {', '.join(known)}.")


def _mcp_rules(settings: Settings) -> Iterator[Misfit]:
    labels = [server.label for server in settings.mcp]
    for index, server in enumerate(settings.mcp):
        path = ("mcp", index)
        if not MCP_LABEL.match(server.label):
            yield Misfit((*path, "label"), f"'{server.label}' is not 1 to 64 of A-Z a-z 0-9 _ -.")
        if server.label in labels[:index]:
            yield Misfit((*path, "label"), f"two servers have the label '{server.label}'.")
        given = [name for name in ("url", "sse_url", "command") if getattr(server, name)]
        if len(given) != 1:
            have = f"has {' and '.join(given)}" if given else "has none"
            yield Misfit(
                path, f"'{server.label}' {have}: set exactly one of url, sse_url, command."
            )
        yield from _url_rules((*path, "url"), filter(None, [server.url]))
        yield from _url_rules((*path, "sse_url"), filter(None, [server.sse_url]))


def is_web_url(text: str) -> bool:
    """Whether this is an http or https URL with a host."""
    try:
        parts = urlsplit(text)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    address = _address_of(host)
    return host == "localhost" or (address is not None and address.is_loopback)


def _address_of(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address that is written there; None for a name."""
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
