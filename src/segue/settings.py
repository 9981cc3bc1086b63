"""What did the operator ask for? One value, from flags, environment and file.

Every setting has one name: `--engine-url` on the command line, `SEGUE_ENGINE_URL` in the environment, `engine_url` in
`segue.toml`. A flag wins over the environment, the environment over the file, the file over the default. The
configuration is validated at startup; an error names the setting.
"""

from __future__ import annotations

import ipaddress
import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta, Struct

from segue.errors import Misconfigured

T = TypeVar("T")
Table = dict[str, str | bool | int | float | list[str]]

EngineName = Literal["embedded", "scripted", "llamacpp", "vllm", "sglang", "chat"]
DIALECTS = (
    "auto",
    "chatml",
    "smollm2",
    "qwen2",
    "qwen3",
    "llama3",
    "mistral",
    "harmony",
    "template",
)

MCP_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")

StoreKind = Literal["memory", "sqlite", "postgresql"]
# How the address of a store begins -> its kind; `memory` has no address. `storage.py` says how each kind is opened.
STORE_KINDS: dict[str, StoreKind] = {
    "sqlite:///": "sqlite",
    "postgresql://": "postgresql",
    "postgres://": "postgresql",
}

Positive = Annotated[float, Meta(gt=0)]
Duration = Annotated[float, Meta(ge=0)]
Limit = Annotated[int, Meta(ge=0)]
Amount = Annotated[int, Meta(gt=0)]
MIB = 1024 * 1024


def about(text: str) -> Meta:
    """A setting's one-line description, for `--help` and for the documentation."""
    return Meta(description=text)


# What no model needs to read or write: private keys, and tokens of well-known services.
CREDENTIALS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{36}\b",
    r"\bglpat-[A-Za-z0-9_-]{20}\b",
    r"\bsk-segue-[A-Za-z0-9_-]{16,}",
)


class RuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of the guard `rules`: the `[guard_rules]` table of `segue.toml`."""

    # Regular expressions; a text that matches one of them is blocked.
    patterns: tuple[str, ...] = CREDENTIALS
    # New input of more characters than this is blocked; 0: no limit.
    chars_max: Annotated[int, Meta(ge=0)] = 0
    # URLs of these domains and of their subdomains are blocked.
    domains_denied: tuple[str, ...] = ()
    # Unless empty, URLs of all other domains are blocked.
    domains_allowed: tuple[str, ...] = ()


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model. In `segue.toml` a `[[models]]` table may set any of these for itself."""

    name: str = ""
    aliases: tuple[str, ...] = ()
    # For the embedded engine, where the name is not that of known weights: a GGUF file.
    weights: str = ""
    engine: Annotated[
        EngineName,
        about("inference engine; all but embedded and scripted are servers at engine_url"),
    ] = "embedded"
    engine_url: Annotated[
        tuple[str, ...], about("base URL of an engine server; repeatable, for several replicas")
    ] = ()
    engine_key: Annotated[str, about("API key sent to the engine server")] = ""
    engine_parallel: Annotated[
        Amount, about("requests sent to each engine replica at once; the rest wait in a queue")
    ] = 4
    context_tokens: Annotated[
        Limit, about("context window in tokens; 0: of the GGUF file, or 131072 for a server")
    ] = 0
    dialect: Annotated[
        str, about("chat format: auto (from the model's files), or " + ", ".join(DIALECTS[1:]))
    ] = "auto"
    tokenizer: Annotated[
        str, about("tokenizer.json, its folder, or a GGUF file; none: the embedded model's own")
    ] = ""
    piece_cache: Annotated[bool, about("cache token ids of text fragments")] = True
    script: Annotated[str, about("JSON file that the scripted engine plays")] = ""
    tps: Annotated[Duration, about("tokens per second of the scripted engine; 0: no limit")] = 0
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        about("default sampling temperature; none: 1, for smollm2 0.2"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about("default nucleus sampling probability (top_p); none: 1, for smollm2 0.9"),
    ] = None
    output_tokens_max: Annotated[
        Amount | None, about("default output limit in tokens; none: what fits, for smollm2 1024")
    ] = None
    unseen: Annotated[
        Literal["tell", "refuse"],
        about("images and audio for a text-only model: tell (describe in words) or refuse"),
    ] = "tell"
    sees_images: Annotated[bool, about("pass images on to a chat engine")] = False
    reasoning: Annotated[
        Literal["text", "summary", "hidden"], about("how clients see the model's reasoning")
    ] = "text"
    guard: Annotated[
        tuple[str, ...],
        about("guard for input and output: rules, classifier, moderation, MODULE:NAME; repeatable"),
    ] = ()


class McpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One MCP server whose tools the model may call: an `[[mcp]]` table in `segue.toml`."""

    # The `server_label` that requests use.
    label: str
    # Exactly one of these three: streamable HTTP, HTTP with SSE, or a program that is spoken to over stdin and stdout.
    url: str = ""
    sse_url: str = ""
    command: tuple[str, ...] = ()
    # The program's whole environment: nothing of the server's own is passed on.
    environment: dict[str, str] = {}
    # Sent with every request to the server, API keys included.
    headers: dict[str, str] = {}
    # The tools that may be listed and called; empty: all.
    tools: tuple[str, ...] = ()


class Settings(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. The fields of a model are the defaults of all models."""

    host: Annotated[str, about("address to listen on; other than loopback requires API keys")] = (
        "127.0.0.1"
    )
    port: Annotated[
        int, Meta(ge=0, le=65535, description="port to listen on; 0: any free port")
    ] = 8080
    workers: Annotated[
        int, Meta(ge=1, le=256, description="number of processes that share port and store")
    ] = 1
    model: Annotated[tuple[str, ...], about("model to serve: a name or GGUF file; repeatable")] = ()
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("lowest level of log lines written")
    ] = "info"
    store: Annotated[
        str, about("where responses are stored: sqlite:///FILE, postgresql://… or memory")
    ] = "sqlite:///segue.db"
    durability: Annotated[
        Literal["full", "relaxed"],
        about("acknowledged responses survive a power failure (full) or a process crash (relaxed)"),
    ] = "full"
    retention_s: Annotated[
        Limit, about("seconds to keep a chain of responses after its newest one; 0: forever")
    ] = 30 * 86_400
    events_retention_s: Annotated[
        Limit, about("seconds to keep the events of a response for replay; 0: forever")
    ] = 86_400
    seal_keys: Annotated[
        str, about("file with the encryption keys; none: next to the SQLite file, or in PostgreSQL")
    ] = ""
    auth: Annotated[
        Literal["auto", "off", "keys"],
        about("require an API key: auto (once a key was created), off (never), keys (always)"),
    ] = "auto"
    allowed_hosts: Annotated[
        tuple[str, ...], about("accepted Host header besides loopback names; *: any; repeatable")
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...], about("web origin allowed to call this server (CORS); *: any; repeatable")
    ] = ()
    tls_cert: Annotated[
        str, about("certificate chain (PEM); loaded again when the file changes and on SIGHUP")
    ] = ""
    tls_key: Annotated[str, about("private key of the certificate (PEM)")] = ""
    websocket: Annotated[bool, about("accept WebSocket connections; false: refuse with 426")] = True
    connection_age_s: Annotated[Positive, about("maximum age of a WebSocket in seconds")] = 3600.0
    grace_s: Annotated[
        Duration, about("seconds that running responses may take to finish at shutdown")
    ] = 30.0
    heartbeat_s: Annotated[
        Positive, about("seconds of silence in a running stream until a heartbeat is sent")
    ] = 15.0
    body_bytes_max: Annotated[
        Amount, about("largest request body or WebSocket message in bytes")
    ] = 64 * MIB
    outbox_bytes_max: Annotated[
        Amount, about("unsent bytes for a slow client until its response is paused")
    ] = MIB
    write_s_max: Annotated[
        Positive, about("seconds until a client that reads nothing is disconnected")
    ] = 30.0
    handshake_s_max: Annotated[
        Positive, about("seconds that the headers of a request may take to arrive")
    ] = 10.0
    body_s_max: Annotated[
        Positive, about("seconds that a request body or WebSocket message may take to arrive")
    ] = 120.0
    connections_max: Annotated[
        Amount, about("open connections per process; further ones are refused with 503")
    ] = 10_000
    frames_per_s: Annotated[
        Duration, about("WebSocket frames per second on one connection; 0: no limit")
    ] = 1_000.0
    frames_burst_max: Annotated[
        Amount, about("WebSocket frames on one connection that may arrive at once")
    ] = 10_000
    append_s_max: Annotated[
        Positive, about("seconds that a response waits for tool outputs (response.append)")
    ] = 600.0
    reconnect_s: Annotated[
        Annotated[float, Meta(ge=0, le=120)],
        about("seconds to keep unstored responses of a lost connection; 0: not at all"),
    ] = 0.0
    connection_state_bytes_max: Annotated[
        Amount, about("memory for the history of one WebSocket connection in bytes")
    ] = 256 * MIB
    connections_state_bytes_max: Annotated[
        Amount, about("memory for the history of all WebSocket connections in bytes")
    ] = 2048 * MIB
    process_state_bytes_max: Annotated[
        Amount, about("memory cache of stored responses in bytes")
    ] = 512 * MIB
    render_cache_bytes_max: Annotated[
        Limit, about("memory cache of prompts in bytes, for clients that resend all; 0: off")
    ] = 256 * MIB
    check_rendering: Annotated[
        bool, about("debug: render every prompt without caches too and compare (slow)")
    ] = False
    guard_sides: Annotated[Literal["both", "input", "output"], about("what guards check")] = "both"
    guard_window_chars: Annotated[
        int, Meta(ge=64, description="characters of output held back and checked together")
    ] = 400
    guard_url: Annotated[str, about("base URL of a moderation API, without /v1/moderations")] = ""
    guard_key: Annotated[str, about("API key of the moderation API")] = ""
    guard_model: Annotated[str, about("model name sent to the moderation API")] = ""
    guard_s_max: Annotated[Positive, about("timeout of the moderation API in seconds")] = 5.0
    guard_unreachable: Annotated[
        Literal["block", "pass"], about("when the moderation API fails: block (503) or pass")
    ] = "block"
    guard_classifier: Annotated[
        str, about("folder of the classifier model, with model.onnx and tokenizer.json")
    ] = ""
    guard_threshold: Annotated[
        float, Meta(gt=0, le=1, description="score from which on the classifier blocks")
    ] = 0.9
    guard_rules: RuleSettings = RuleSettings()
    # Owner of keys -> the guards for it, instead of those of the model.
    guard_owners: dict[str, tuple[str, ...]] = {}
    tool_s_max: Annotated[Positive, about("timeout of a server-side tool call in seconds")] = 60.0
    tool_output_bytes_max: Annotated[
        Amount, about("bytes of a server-side tool's output for the model; the rest is cut")
    ] = 128 * 1024
    file_s_max: Annotated[Positive, about("timeout for reading a PDF in seconds")] = 15.0
    mcp_hosts: Annotated[
        tuple[str, ...],
        about("HOST or HOST:PORT allowed in server_url; without port 80 and 443; repeatable"),
    ] = ()
    mcp_list_s: Annotated[Duration, about("seconds to cache an MCP server's tool list")] = 300.0
    fetch: Annotated[
        Literal["off", "public"], about("whether the server fetches URLs; public addresses only")
    ] = "off"
    fetch_allow: Annotated[
        tuple[str, ...], about("domain to fetch from; none: all; repeatable")
    ] = ()
    fetch_deny: Annotated[tuple[str, ...], about("domain never to fetch from; repeatable")] = ()
    fetch_port: Annotated[
        tuple[Annotated[int, Meta(gt=0, le=65535)], ...], about("port to fetch from; repeatable")
    ] = (80, 443)
    fetch_bytes_max: Annotated[Amount, about("largest page or file to fetch in bytes")] = 8 * MIB
    fetch_s_max: Annotated[Positive, about("timeout of one fetch in seconds")] = 10.0
    search_index: Annotated[
        str, about("file with a local index for web search, made by `segue index`")
    ] = ""
    search_url: Annotated[
        str, about("URL of a SearXNG server, or of a JSON search API, with {query} in it")
    ] = ""
    search_results: Annotated[
        str, about("path of the result list in the search API's answer, such as web.results")
    ] = "results"
    search_fields: Annotated[
        str, about("names of a result's URL, title and text fields, separated by spaces")
    ] = "url title content"
    search_header: Annotated[str, about("header for the search API, as NAME: VALUE")] = ""
    otel_endpoint: Annotated[
        str, about("OTLP/HTTP collector for traces, such as http://127.0.0.1:4318; none: off")
    ] = ""
    otel_headers: Annotated[
        tuple[str, ...], about("header sent to the collector, as NAME=VALUE; repeatable")
    ] = ()
    audit_log: Annotated[
        str, about("JSON line for each response and refusal: a file, or `log`; none: off")
    ] = ""
    models: tuple[Table, ...] = ()
    mcp: tuple[McpSettings, ...] = ()

    @property
    def shown_store(self) -> str:
        """The store without its password, for terminals and logs."""
        hidden = re.sub(r"(//[^/@:?]*):[^/?]*@", r"\1:…@", self.store)
        return re.sub(r"(password=)[^&]*", r"\1…", hidden)

    @property
    def store_kind(self) -> StoreKind:
        """The kind of store that the address names; an unknown address is refused."""
        if self.store == "memory":
            return "memory"
        for start, kind in STORE_KINDS.items():
            if self.store.startswith(start):
                return kind
        raise Misconfigured(
            f"store: '{self.shown_store}' is not the address of a store. "
            "Use sqlite:///FILE, postgresql://USER@HOST/DATABASE or memory."
        )

    @property
    def store_path(self) -> Path | None:
        """The file of a SQLite store; None for other stores."""
        is_file = self.store_kind == "sqlite"
        return Path(self.store.removeprefix("sqlite:///")) if is_file else None

    def served(self) -> tuple[ModelSettings, ...]:
        """The models to serve: the tables of the file and the named ones, or one default model."""
        shared = {name: getattr(self, name) for name in ModelSettings.__struct_fields__}
        tables: list[Table] = list(self.models)
        tabled = {table.get("name") for table in tables}
        tables += [_named(name) for name in self.model if name not in tabled]
        default = _named("scripted" if self.engine == "scripted" else SMALL_MODEL)
        found = tuple(
            _with_usual(_convert(shared | table, ModelSettings, "models"))
            for table in tables or [default]
        )
        if not all(model.name for model in found):
            raise Misconfigured("models: every [[models]] table needs a name.")
        return found


def is_ring_stored(settings: Settings) -> bool:
    """Whether the encryption keys are in the database, where all machines find them."""
    return not settings.seal_keys and settings.store_kind == "postgresql"


def seal_path(settings: Settings) -> Path | None:
    """The file with the encryption keys; None for the memory store, which needs none."""
    if settings.seal_keys:
        return Path(settings.seal_keys)
    if settings.store_kind == "memory":
        return None
    return Path(f"{settings.store_path or 'segue'}.seals")


def _named(name: str) -> Table:
    """A model by its name; a GGUF file is named after itself, without folder and suffix."""
    if name.endswith(".gguf"):
        return {"name": Path(name).stem, "weights": name}
    return {"name": name}


# For the model that newcomers start with: the sampling that its authors recommend, and a limit for its long outputs.
SMALL_MODEL = "smollm2"
SMALL_MODEL_USUAL = {"temperature": 0.2, "top_p": 0.9, "output_tokens_max": 1_024}


def _with_usual(model: ModelSettings) -> ModelSettings:
    """The small model's own defaults, where the operator has set nothing."""
    if model.engine != "embedded" or model.name != SMALL_MODEL:
        return model
    unset = {k: v for k, v in SMALL_MODEL_USUAL.items() if getattr(model, k) is None}
    return msgspec.structs.replace(model, **unset)


# Settings that exist only in the file, as tables or in a model's own table.
TABLE_ONLY = frozenset(
    {"name", "aliases", "weights", "models", "guard_rules", "guard_owners", "mcp"}
)
# Settings that may be given several times; in the environment their values are separated by commas.
REPEATED = frozenset(
    {
        "model",
        "engine_url",
        "allowed_hosts",
        "cors_origins",
        "fetch_allow",
        "fetch_deny",
        "fetch_port",
        "guard",
        "otel_headers",
        "mcp_hosts",
    }
)
FLAGS = tuple(name for name in Settings.__struct_fields__ if name not in TABLE_ONLY)
# Groups in `--help`: the first flag of each, in the order of the fields.
GROUPS = {
    "engine": "model and engine",
    "host": "server",
    "store": "store",
    "auth": "access",
    "websocket": "connections",
    "connection_state_bytes_max": "memory",
    "guard_sides": "guards",
    "tool_s_max": "server-side tools",
    "otel_endpoint": "observability",
}


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings from flags, environment and file, validated."""
    environment = os.environ if environment is None else environment
    config = flags.get("config") or environment.get("SEGUE_CONFIG")
    values = _read_file(Path(str(config))) if config else {}
    for name in FLAGS:
        text = environment.get(f"SEGUE_{name.upper()}")
        if text is not None:
            values[name] = text.split(",") if name in REPEATED else text
    values |= {name: value for name, value in flags.items() if name in FLAGS and value is not None}
    settings = _convert(values, Settings, "")
    _check(settings)
    return settings


def codex_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of Codex's configuration, for `segue connect codex`."""
    environment = os.environ if environment is None else environment
    return Path(environment.get("CODEX_HOME") or Path.home() / ".codex")


def _read_file(path: Path) -> dict[str, object]:
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise Misconfigured(f"config: {path} cannot be read: {error.strerror}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise Misconfigured(f"config: {path} is not TOML: {error}.") from None


def _convert(values: Mapping[str, object], kind: type[T], path: str) -> T:
    try:
        return msgspec.convert(values, kind, strict=False)
    except msgspec.ValidationError as error:
        raise Misconfigured(f"{path + ': ' if path else ''}{error}") from None


def _check(settings: Settings) -> None:
    """Rules that involve several settings."""
    if not is_loopback(settings.host) and settings.auth == "off":
        raise Misconfigured(
            f"host: {settings.host} is not a loopback address, which is refused with --auth off. "
            "Leave --auth out, or leave --host out and put a proxy in front."
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise Misconfigured("tls_cert, tls_key: set both, or neither.")
    for model in settings.served():
        if model.dialect not in DIALECTS:
            raise Misconfigured(f"dialect: '{model.dialect}' is not one of: {', '.join(DIALECTS)}.")
    _check_mcp(settings.mcp)
    if len(settings.search_fields.split()) != 3:
        raise Misconfigured("search_fields: name three fields: URL, title and text.")
    if settings.search_header and not re.fullmatch(
        r"[A-Za-z0-9-]+: *[\x21-\x7e][\x20-\x7e]*", settings.search_header
    ):
        raise Misconfigured("search_header: write it as NAME: VALUE.")
    if settings.store_kind == "memory" and settings.workers > 1:
        raise Misconfigured(
            f"workers: {settings.workers} processes cannot share the store 'memory'. "
            "Use --store sqlite:///segue.db, or leave --workers out."
        )


def _check_mcp(servers: tuple[McpSettings, ...]) -> None:
    labels = [server.label for server in servers]
    for server in servers:
        if not MCP_LABEL.match(server.label):
            raise Misconfigured(
                f"mcp: the label '{server.label}' must be 1 to 64 letters, digits, _ and -."
            )
        if labels.count(server.label) > 1:
            raise Misconfigured(f"mcp: two servers have the label '{server.label}'.")
        if sum(map(bool, (server.url, server.sse_url, server.command))) != 1:
            raise Misconfigured(
                f"mcp: the server '{server.label}' needs exactly one of: url, sse_url, command."
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
