"""What did the operator ask for? One value, from flags, environment and file.

Every setting has one name: `--engine-url` on the command line, `SEGUE_ENGINE_URL` in the environment, `engine_url` in
`segue.toml`. A flag wins over the environment, the environment over the file, the file over the default. What is
wrong is said before anything starts, with the name of the setting.
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


def about(text: str) -> Meta:
    """A setting's one-line description, for `--help` and for the documentation."""
    return Meta(description=text)


# What no model needs to see or to say: private keys, and tokens of well-known services.
CREDENTIALS = (
    r"-----BEGIN [A-Z ]*PRIVATE KEY-----",
    r"\bAKIA[0-9A-Z]{16}\b",
    r"\bgh[pousr]_[A-Za-z0-9]{36}\b",
    r"\bglpat-[A-Za-z0-9_-]{20}\b",
    r"\bsk-segue-[A-Za-z0-9_-]{16,}",
)


class RuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of the guard of that name: the `[guard_rules]` table of `segue.toml`."""

    # Regular expressions; what one of them matches is blocked.
    patterns: tuple[str, ...] = CREDENTIALS
    # New input of more characters than this is blocked; 0: no limit.
    chars_max: Annotated[int, Meta(ge=0)] = 0
    # Addresses of these domains are blocked, and of their subdomains.
    domains_denied: tuple[str, ...] = ()
    # Where any are named, addresses of all other domains are blocked.
    domains_allowed: tuple[str, ...] = ()


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model. In `segue.toml` a `[[models]]` table may set any of these for itself."""

    name: str = ""
    aliases: tuple[str, ...] = ()
    # For the embedded engine, where the name is not that of known weights: a GGUF file.
    weights: str = ""
    engine: Annotated[
        EngineName,
        about("who produces tokens: embedded, scripted, llamacpp, vllm, sglang, chat"),
    ] = "embedded"
    engine_url: Annotated[
        tuple[str, ...], about("the address of an engine; repeat it for replicas")
    ] = ()
    engine_key: Annotated[str, about("the key that the engine asks for")] = ""
    engine_parallel: Annotated[
        int, Meta(gt=0, description="how many requests each replica is sent at once")
    ] = 4
    context_tokens: Annotated[
        int,
        Meta(ge=0, description="tokens of prompt and answer together; 0: what the model says"),
    ] = 0
    dialect: Annotated[
        str, about("how the model writes and reads: auto, or one of " + ", ".join(DIALECTS[1:]))
    ] = "auto"
    tokenizer: Annotated[
        str, about("a tokenizer.json, its folder, or a GGUF file; default: SmolLM2's")
    ] = ""
    piece_cache: Annotated[
        bool, about("whether the ids of words are remembered; off only to measure what that gives")
    ] = True
    script: Annotated[str, about("a JSON file for the scripted engine to play")] = ""
    tps: Annotated[
        float, Meta(ge=0, description="tokens a second of the scripted engine; 0: no limit")
    ] = 0
    temperature: Annotated[
        Annotated[float, Meta(ge=0, le=2)] | None,
        about("where a request does not say: how bold the model is; none: 1, for smollm2 0.2"),
    ] = None
    top_p: Annotated[
        Annotated[float, Meta(ge=0, le=1)] | None,
        about("where a request does not say: how much is considered; none: 1, for smollm2 0.9"),
    ] = None
    output_tokens_max: Annotated[
        Annotated[int, Meta(gt=0)] | None,
        about("the longest answer where a request does not say; none: what fits, for smollm2 1024"),
    ] = None
    unseen: Annotated[
        Literal["tell", "refuse"],
        about(
            "pictures and sound for a model without eyes and ears: tell them in words, or refuse"
        ),
    ] = "tell"
    sees_images: Annotated[
        bool, about("whether a chat endpoint's model sees pictures; else they are told in words")
    ] = False
    reasoning: Annotated[
        Literal["text", "summary", "hidden"], about("how reasoning is shown: text, summary, hidden")
    ] = "text"
    guard: Annotated[
        tuple[str, ...],
        about(
            "who checks what goes in and out: rules, classifier, moderation or MODULE:NAME; may be repeated"
        ),
    ] = ()


class McpSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One MCP server whose tools the model may call: an `[[mcp]]` table in `segue.toml`."""

    # By what requests name it.
    label: str
    # One of these three: streamable HTTP, the older SSE, or a program that speaks over its pipes.
    url: str = ""
    sse_url: str = ""
    command: tuple[str, ...] = ()
    # For the program; it gets nothing else of ours.
    environment: dict[str, str] = {}
    # For every request to the server, keys included.
    headers: dict[str, str] = {}
    # The tools that may be listed and called; none named: all.
    tools: tuple[str, ...] = ()


class Settings(ModelSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Everything that can be set. The fields of a model are the defaults of all models."""

    host: Annotated[
        str, about("the address to listen on; other than loopback only where keys are asked for")
    ] = "127.0.0.1"
    port: Annotated[
        int, Meta(ge=0, le=65535, description="the port to listen on; 0: any free one")
    ] = 8080
    workers: Annotated[
        int, Meta(ge=1, le=256, description="processes that share the port and the store")
    ] = 1
    model: Annotated[tuple[str, ...], about("the name of a served model; may be repeated")] = ()
    store: Annotated[
        str, about("where turns are kept: sqlite:///FILE, postgresql://… or memory")
    ] = "sqlite:///segue.db"
    durability: Annotated[
        Literal["full", "relaxed"],
        about("full: acknowledged turns survive a power cut; relaxed: a crash of the process"),
    ] = "full"
    retention_s: Annotated[
        int,
        Meta(
            ge=0, description="how long a stored chain is kept after its newest turn; 0: for ever"
        ),
    ] = 30 * 86_400
    events_retention_s: Annotated[
        int, Meta(ge=0, description="how long the events of a turn can be replayed; 0: for ever")
    ] = 86_400
    auth: Annotated[
        Literal["auto", "off", "keys"],
        about("who needs a key: auto (all, once the store has had one), off (nobody), keys (all)"),
    ] = "auto"
    allowed_hosts: Annotated[
        tuple[str, ...],
        about("names that this server answers to beside loopback ones; *: any; may be repeated"),
    ] = ()
    cors_origins: Annotated[
        tuple[str, ...],
        about("origins whose pages may use this server; *: any; may be repeated"),
    ] = ()
    tls_cert: Annotated[str, about("a certificate chain in PEM; loaded again when it changes")] = ""
    tls_key: Annotated[str, about("the private key of the certificate, in PEM")] = ""
    websocket: Annotated[bool, about("whether WebSocket mode is offered; off answers 426")] = True
    connection_age_s: Annotated[Positive, about("how long a socket may live, in seconds")] = 3600.0
    grace_s: Annotated[
        float, Meta(ge=0, description="how long running turns may go on at a stop")
    ] = 30.0
    heartbeat_s: Annotated[Positive, about("the longest silence while a turn runs, in seconds")] = (
        15.0
    )
    body_bytes_max: Annotated[
        int, Meta(gt=0, description="the largest request body or WebSocket message")
    ] = 64 * 1024 * 1024
    outbox_bytes_max: Annotated[
        int, Meta(gt=0, description="what may wait for a slow reader before the model is slowed")
    ] = 1024 * 1024
    write_s_max: Annotated[Positive, about("a reader that takes nothing this long is cut")] = 30.0
    handshake_s_max: Annotated[
        Positive, about("how long the head of a request may take to arrive, in seconds")
    ] = 10.0
    body_s_max: Annotated[
        Positive,
        about("how long a request body or WebSocket message may take to arrive, in seconds"),
    ] = 120.0
    connections_max: Annotated[
        int, Meta(gt=0, description="open connections of the process; one more is answered 503")
    ] = 10_000
    frames_per_s: Annotated[
        float,
        Meta(ge=0, description="WebSocket frames a second on one connection; 0: no limit"),
    ] = 1_000.0
    frames_burst_max: Annotated[
        int, Meta(gt=0, description="WebSocket frames that may come at once")
    ] = 10_000
    connection_state_bytes_max: Annotated[
        int, Meta(gt=0, description="history kept in memory for each connection")
    ] = 256 * 1024 * 1024
    connections_state_bytes_max: Annotated[
        int, Meta(gt=0, description="history kept in memory for all connections together")
    ] = 2 * 1024 * 1024 * 1024
    process_state_bytes_max: Annotated[
        int, Meta(gt=0, description="stored turns kept in memory for all HTTP clients together")
    ] = 512 * 1024 * 1024
    render_cache_bytes_max: Annotated[
        int,
        Meta(ge=0, description="prompts kept for HTTP clients that resend everything; 0: off"),
    ] = 256 * 1024 * 1024
    append_s_max: Annotated[
        Positive, about("how long a rollout waits for the outputs of its calls, in seconds")
    ] = 600.0
    reconnect_s: Annotated[
        float,
        Meta(
            ge=0,
            le=120,
            description="how long unstored turns of a lost connection can still be continued; 0: not at all",
        ),
    ] = 0.0
    guard_sides: Annotated[
        Literal["both", "input", "output"], about("what guards look at: both, input, output")
    ] = "both"
    guard_window_chars: Annotated[
        int, Meta(ge=64, description="how much of an answer is held back and checked together")
    ] = 400
    guard_url: Annotated[str, about("an endpoint for moderation, up to /v1/moderations")] = ""
    guard_key: Annotated[str, about("the key that this endpoint asks for")] = ""
    guard_model: Annotated[str, about("the model that this endpoint is to use")] = ""
    guard_s_max: Annotated[Positive, about("how long this endpoint may take, in seconds")] = 5.0
    guard_unreachable: Annotated[
        Literal["block", "pass"],
        about("what becomes of a turn if this endpoint does not answer: block (503) or pass"),
    ] = "block"
    guard_classifier: Annotated[
        str, about("the classifier's folder, with model.onnx and tokenizer.json")
    ] = ""
    guard_threshold: Annotated[
        float, Meta(gt=0, le=1, description="how sure the classifier must be to block")
    ] = 0.9
    guard_rules: RuleSettings = RuleSettings()
    # Owners with guards of their own instead of those of the model.
    guard_owners: dict[str, tuple[str, ...]] = {}
    otel_endpoint: Annotated[
        str, about("where traces go: an OTLP/HTTP collector, such as http://127.0.0.1:4318")
    ] = ""
    otel_headers: Annotated[
        tuple[str, ...], about("a header for that collector, as NAME=VALUE; may be repeated")
    ] = ()
    audit_log: Annotated[
        str,
        about("who asked for what, when, with what outcome: a file, or log for the server's own"),
    ] = ""
    seal_keys: Annotated[
        str,
        about(
            "the file with the keys of compactions and reasoning; "
            "default: beside the store's file, or in its database"
        ),
    ] = ""
    tool_s_max: Annotated[
        Positive, about("how long one call of a hosted tool may take, in seconds")
    ] = 60.0
    tool_output_bytes_max: Annotated[
        int, Meta(gt=0, description="how much of a hosted tool's output the model is told")
    ] = 128 * 1024
    file_s_max: Annotated[
        Positive, about("how long reading one PDF of a request may take, in seconds")
    ] = 15.0
    mcp_hosts: Annotated[
        tuple[str, ...],
        about(
            "hosts that a request's `server_url` may name; without a port: 80 and 443; none: no host"
        ),
    ] = ()
    mcp_list_s: Annotated[
        float, Meta(ge=0, description="how long what an MCP server has listed is believed")
    ] = 300.0
    fetch: Annotated[
        Literal["off", "public"],
        about("whether addresses from outside are followed: off, or public ones only"),
    ] = "off"
    fetch_allow: Annotated[
        tuple[str, ...], about("the only domains to fetch from; may be repeated; none: all")
    ] = ()
    fetch_deny: Annotated[
        tuple[str, ...], about("domains never to fetch from; may be repeated")
    ] = ()
    fetch_port: Annotated[
        tuple[Annotated[int, Meta(gt=0, le=65535)], ...],
        about("the ports to fetch from; may be repeated"),
    ] = (80, 443)
    fetch_bytes_max: Annotated[
        int, Meta(gt=0, description="the largest page or file that is fetched")
    ] = 8 * 1024 * 1024
    fetch_s_max: Annotated[Positive, about("how long a fetch may take, in seconds")] = 10.0
    search_index: Annotated[
        str, about("an index of documents for the web search, made by segue index")
    ] = ""
    search_url: Annotated[
        str, about("the address of a SearXNG, or of any JSON search with {query} in it")
    ] = ""
    search_results: Annotated[
        str, about("where the hits stand in that search's answer, such as web.results")
    ] = "results"
    search_fields: Annotated[
        str, about("the names of address, title and words of a hit, separated by spaces")
    ] = "url title content"
    search_header: Annotated[
        str, about("a header for that search, such as X-Key: …; told to nobody else")
    ] = ""
    check_rendering: Annotated[
        bool, about("render every prompt cold as well and compare: slow, for the doubtful")
    ] = False
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], about("debug, info, warning, error")
    ] = "info"
    models: tuple[Table, ...] = ()
    mcp: tuple[McpSettings, ...] = ()

    @property
    def shown_store(self) -> str:
        """The store without its password, for everything that a person or a log may see."""
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
        """The models to serve: those of the file, else those named, else one."""
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
            raise Misconfigured("models: every model needs a name.")
        return found


def is_ring_stored(settings: Settings) -> bool:
    """Whether the ring of keys is in the database, where all machines find it."""
    return not settings.seal_keys and settings.store_kind == "postgresql"


def seal_path(settings: Settings) -> Path | None:
    """Where the ring of keys is kept; None for a server that keeps nothing."""
    if settings.seal_keys:
        return Path(settings.seal_keys)
    if settings.store_kind == "memory":
        return None
    return Path(f"{settings.store_path or 'segue'}.seals")


def _named(name: str) -> Table:
    """A model by its name; a GGUF file is called by its own name, without folder and ending."""
    if name.endswith(".gguf"):
        return {"name": Path(name).stem, "weights": name}
    return {"name": name}


# What suits a model that everybody starts with: its makers' sampling, and an end to its rambling.
SMALL_MODEL = "smollm2"
SMALL_MODEL_USUAL = {"temperature": 0.2, "top_p": 0.9, "output_tokens_max": 1_024}


def _with_usual(model: ModelSettings) -> ModelSettings:
    """The small model's own defaults, where the operator has said nothing."""
    if model.engine != "embedded" or model.name != SMALL_MODEL:
        return model
    unsaid = {k: v for k, v in SMALL_MODEL_USUAL.items() if getattr(model, k) is None}
    return msgspec.structs.replace(model, **unsaid)


# Settings that only a model's own table can give.
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


def load_settings(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> Settings:
    """The settings, from all three places."""
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
    """The folder of Codex's configuration, for the verb that writes there."""
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
    """What no type can say."""
    if not is_loopback(settings.host) and settings.auth == "off":
        raise Misconfigured(
            f"host: {settings.host} is not a loopback address, and Segue listens on no other where "
            "nobody needs a key. Leave --auth out, or leave --host out and put a proxy in front."
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        raise Misconfigured("tls_cert, tls_key: one is of no use without the other.")
    for model in settings.served():
        if model.dialect not in DIALECTS:
            raise Misconfigured(f"dialect: '{model.dialect}' is not one of: {', '.join(DIALECTS)}.")
    _check_mcp(settings.mcp)
    if len(settings.search_fields.split()) != 3:
        raise Misconfigured("search_fields: name three fields: address, title and words.")
    if settings.search_header and not re.fullmatch(
        r"[A-Za-z0-9-]+: *[\x21-\x7e][\x20-\x7e]*", settings.search_header
    ):
        raise Misconfigured("search_header: write it as NAME: VALUE.")
    if settings.store_kind == "memory" and settings.workers > 1:
        raise Misconfigured(
            f"workers: {settings.workers} processes cannot share a store in memory. "
            "Name a file, --store sqlite:///segue.db, or leave --workers out."
        )


def _check_mcp(servers: tuple[McpSettings, ...]) -> None:
    labels = [one.label for one in servers]
    for server in servers:
        if not MCP_LABEL.match(server.label) or labels.count(server.label) > 1:
            raise Misconfigured(
                f"mcp: '{server.label}' is no label, or not the only one: letters, digits, _ and -."
            )
        if sum(map(bool, (server.url, server.sse_url, server.command))) != 1:
            raise Misconfigured(
                f"mcp: the server '{server.label}' needs one of: url, sse_url, command."
            )


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
