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
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from segue.errors import Misconfigured
from segue.validation import Misfit, SettingPath, is_web_url, line_of, misfits, nearest

Table = dict[str, str | bool | int | float | list[str] | dict[str, object]]

EngineName = Literal["embedded", "scripted", "llamacpp", "vllm", "sglang", "dynamo", "chat"]
CHAT_FORMATS = (
    "chatml", "smollm2", "qwen2", "qwen3", "llama3", "mistral", "harmony", "deepseek-v3.2", "deepseek-v4", "template",
)  # fmt: skip
DIALECTS = ("auto", *CHAT_FORMATS)

# Read from the working folder where no other file is named.
FILE_NAME = "segue.toml"
# Variables that are no settings: of clients, examples and tests, and what Kubernetes sets for a service called segue.
OTHER_VARIABLES = re.compile(
    r"SEGUE_(CONFIG|(API_)?KEY|(BASE_)?URL|(TEST|SERVICE|PORT_\d+)_.*|SERVICE|PORT_\d+)\Z"
)
# ("models", 0) is a table; what is below is checked as a model.
TABLE_DEPTH = 2
NO_URL = "'{}' is not a URL such as http://127.0.0.1:8000."
MCP_LABEL = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
SEARCH_HEADER = re.compile(r"[A-Za-z0-9-]+: *[\x21-\x7e][\x20-\x7e]*")

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


# Settings that are never shown.
SECRETS = frozenset({"engine_key", "guard_key", "search_header", "otel_headers", "search_url"})


def without_password(url: str) -> str:
    """An address without its password, for terminals and logs."""
    hidden = re.sub(r"(//[^/@:?]*):[^/?]*@", r"\1:…@", url)
    return re.sub(r"(password=)[^&]*", r"\1…", hidden)


def shown_address(url: str) -> str:
    """The address without user and password, for terminals, logs and metrics."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


class ModelSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One served model. In `segue.toml` a `[[models]]` table may set any of these for itself."""

    name: str = ""
    aliases: tuple[str, ...] = ()
    # For the embedded engine, where the name is not that of known weights: a GGUF file.
    weights: str = ""
    engine: EngineName = "embedded"
    engine_url: tuple[str, ...] = ()
    engine_key: str = ""
    engine_parallel: Limit = 0
    engine_drained: tuple[str, ...] = ()
    engine_discovery: Literal["off", "dns", "kubernetes"] = "off"
    engine_discovery_s: Positive = 10.0
    kubernetes_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    context_tokens: Limit = 0
    dialect: str = "auto"
    tokenizer: str = ""
    # A file with a chat template (Jinja) that replaces the model's own.
    template: str = ""
    # What chat templates are told besides the conversation, for example `enable_thinking`.
    template_values: dict[str, object] = {}
    piece_cache: bool = True
    fast_tokenizer: bool = True
    embedded_state_bytes_max: Limit = 0
    script: str = ""
    tps: Duration = 0
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    output_tokens_max: Amount | None = None
    unseen: Literal["tell", "refuse"] = "tell"
    sees_images: bool | None = None
    reasoning: Literal["text", "summary", "hidden"] = "text"
    guard: tuple[str, ...] = ()


UNSET_MODEL = ModelSettings()


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

    # The file that was read.
    config: str = ""
    host: str = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535)] = 8080
    workers: Annotated[int, Meta(ge=1, le=256)] = 1
    model: tuple[str, ...] = ()
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    store: str = "sqlite:///segue.db"
    # Two of them are for LISTEN and for the lease.
    store_connections: Annotated[int, Meta(ge=4, le=1_000)] = 10
    store_direct: str = ""
    durability: Literal["full", "relaxed"] = "full"
    retention_s: Limit = 30 * 86_400
    events_retention_s: Limit = 86_400
    seal_keys: str = ""
    auth: Literal["auto", "off", "keys"] = "auto"
    allowed_hosts: tuple[str, ...] = ()
    cors_origins: tuple[str, ...] = ()
    tls_cert: str = ""
    tls_key: str = ""
    websocket: bool = True
    # OpenAI's own: clients rotate shortly before it.
    connection_age_s: Positive = 3600.0
    grace_s: Duration = 30.0
    heartbeat_s: Positive = 15.0
    hang_s: Duration = 10.0
    # Whole histories with images arrive in one frame (docs/protocol.md 6.11); a gateway's 16 MiB broke clients
    # (docs/hazards.md F11).
    body_bytes_max: Amount = 64 * MIB
    outbox_bytes_max: Amount = MIB
    write_s_max: Positive = 30.0
    handshake_s_max: Positive = 10.0
    body_s_max: Positive = 120.0
    connections_max: Amount = 10_000
    frames_per_s: Duration = 1_000.0
    frames_burst_max: Amount = 10_000
    append_s_max: Positive = 600.0
    # A store keeps the name of a deleted turn for a day, so that no late save brings it back.
    background_s_max: Annotated[float, Meta(gt=0, le=80_000)] = 21_600.0
    reconnect_s: Annotated[float, Meta(ge=0, le=120)] = 0.0
    # For all workers together; 0: half of the memory that there is.
    memory_bytes_max: Limit = 0
    connection_state_bytes_max: Amount = 256 * MIB
    connections_state_bytes_max: Amount = 2048 * MIB
    process_state_bytes_max: Amount = 512 * MIB
    render_cache_bytes_max: Limit = 256 * MIB
    reuse_bytes_max: Limit = 32 * MIB
    check_rendering: bool = False
    guard_sides: Literal["both", "input", "output"] = "both"
    cache_salt: Literal["auto", "on", "off"] = "auto"
    guard_window_chars: Annotated[int, Meta(ge=64)] = 400
    guard_url: str = ""
    guard_key: str = ""
    guard_model: str = ""
    guard_s_max: Positive = 5.0
    guard_unreachable: Literal["block", "pass"] = "block"
    guard_classifier: str = ""
    guard_threshold: Annotated[float, Meta(gt=0, le=1)] = 0.9
    guard_rules: RuleSettings = RuleSettings()
    # Owner of keys -> the guards for it, instead of those of the model.
    guard_owners: dict[str, tuple[str, ...]] = {}
    tool_s_max: Positive = 60.0
    tool_output_bytes_max: Amount = 128 * 1024
    file_s_max: Positive = 15.0
    mcp_hosts: tuple[str, ...] = ()
    mcp_list_s: Duration = 300.0
    fetch: Literal["off", "public"] = "off"
    fetch_allow: tuple[str, ...] = ()
    fetch_deny: tuple[str, ...] = ()
    fetch_port: tuple[Annotated[int, Meta(gt=0, le=65535)], ...] = (80, 443)
    fetch_bytes_max: Amount = 8 * MIB
    fetch_s_max: Positive = 10.0
    search_index: str = ""
    search_url: str = ""
    search_results: str = "results"
    search_fields: str = "url title content"
    search_header: str = ""
    otel_endpoint: str = ""
    otel_headers: tuple[str, ...] = ()
    log_format: Literal["text", "json"] = "text"
    access_log: str = ""
    audit_log: str = ""
    models: tuple[Table, ...] = ()
    mcp: tuple[McpSettings, ...] = ()

    @property
    def shown_store(self) -> str:
        """The store without its password, for terminals and logs."""
        return without_password(self.store)

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
    def direct_store(self) -> str:
        """The address of a PostgreSQL store where sessions last: beside a pooler, if there is one."""
        return self.store_direct or self.store

    @property
    def store_path(self) -> Path | None:
        """The file of a SQLite store; None for other stores."""
        is_file = self.store_kind == "sqlite"
        return Path(self.store.removeprefix("sqlite:///")) if is_file else None

    @property
    def is_unnamed(self) -> bool:
        """Whether an engine over HTTP is to serve a model that the operator has not named."""
        is_named = self.model or self.models or self.engine in ("embedded", "scripted")
        return bool(self.engine_url) and not is_named

    def served(self) -> tuple[ModelSettings, ...]:
        """The models to serve: the tables of the file and the named ones, or one default model."""
        shared = {name: getattr(self, name) for name in ModelSettings.__struct_fields__}
        tables: list[Table] = list(self.models)
        tabled = {table.get("name") for table in tables}
        tables += [_named(name) for name in self.model if name not in tabled]
        inside: dict[str, str] = {"embedded": SMALL_MODEL, "scripted": "scripted"}
        default = _named(inside.get(self.engine, UNNAMED))
        converted = (
            msgspec.convert(shared | table, ModelSettings, strict=False)
            for table in tables or [default]
        )
        return tuple(map(_with_usual, converted))


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
    return {"name": Path(name).stem, "weights": name} if name.endswith(".gguf") else {"name": name}


# The model that newcomers start with.
SMALL_MODEL = "smollm2"
# The model of an engine over HTTP that has not said yet what its model is called.
UNNAMED = "unnamed"
# For a model inside this process, where the operator has set nothing.
INSIDE_USUAL: Table = {"engine_parallel": 1}
# For models that can be fetched by name: the sampling that their authors recommend. With the system text of its
# template SmolLM2 answers simple questions in circles; without any it answers them.
KNOWN_USUAL: dict[str, Table] = {
    SMALL_MODEL: {
        "engine_parallel": 4,
        "temperature": 0.2,
        "top_p": 0.9,
        "output_tokens_max": 1_024,
        "dialect": "chatml",
    },
    "qwen2.5-coder-1.5b": {"temperature": 0.7, "top_p": 0.8},
}


def _with_usual(model: ModelSettings) -> ModelSettings:
    """What fits a model inside this process, where the operator has set nothing."""
    if model.engine != "embedded":
        return model
    usual = INSIDE_USUAL | KNOWN_USUAL.get(model.name, {})
    unset = {k: v for k, v in usual.items() if getattr(model, k) == getattr(UNSET_MODEL, k)}
    return msgspec.structs.replace(model, **unset)


# What `--help` and docs/settings.md say of each setting, in the groups of `--help`. A setting that is not named here
# exists only in the file, as a table or in a model's own table.
HELP = {
    "server": {
        "host": "address to listen on; other than loopback requires API keys",
        "port": "port to listen on; 0: any free port",
        "workers": "number of processes that share port and store",
        "model": (
            "model to serve: a name, a GGUF file, or auto (the best that fits into memory); none: the engine's only "
            "one, or smollm2 inside; repeatable"
        ),
        "log_level": "lowest level of log lines written",
    },
    "model and engine": {
        "engine": "inference engine; all but embedded and scripted are servers at engine_url",
        "engine_url": "base URL of an engine server; repeatable, for several replicas",
        "engine_key": "API key sent to the engine server",
        "engine_parallel": "parallel requests per replica, more wait; 0: what the engine says (embedded: 1, else 256)",
        "engine_drained": "URL of a replica that gets no requests; repeatable. See also `segue engines drain`",
        "engine_discovery": "find replicas by the name in engine_url: off, dns (addresses), kubernetes (ready pods)",
        "engine_discovery_s": "seconds between two lookups of the replicas",
        "kubernetes_account": "folder with token, ca.crt and namespace of the service account, for kubernetes",
        "context_tokens": "context window in tokens; 0: what the engine says (embedded: at most 8192)",
        "dialect": "chat format: auto (from the model's files), or " + ", ".join(CHAT_FORMATS),
        "tokenizer": "tokenizer.json, its folder, or a GGUF file; none: the embedded model's own",
        "template": "chat template (Jinja file) instead of the model's own",
        "piece_cache": "cache token ids of text fragments",
        "fast_tokenizer": "tokenize with fastokens where it gives the same ids; about 180 MB of memory a process",
        "embedded_state_bytes_max": "bytes of disk for the encrypted state of an embedded model, so that stored "
        "responses continue quickly after a restart; 0: off",
        "script": "JSON file that the scripted engine plays",
        "tps": "tokens per second of the scripted engine; 0: no limit",
        "temperature": "default sampling temperature; none: the engine's own, for smollm2 0.2",
        "top_p": "default nucleus sampling probability; none: the engine's own, for smollm2 0.9",
        "output_tokens_max": "default output limit in tokens; none: what fits, for smollm2 1024",
        "unseen": "images and audio for a text-only model: tell (describe in words) or refuse",
        "sees_images": "whether the model takes images (vision); none: what the engine says",
        "reasoning": "how clients see the model's reasoning",
        "guard": "guard for input and output: rules, classifier, moderation, MODULE:NAME; repeatable",
    },
    "store": {
        "store": "where responses are stored: sqlite:///FILE, postgresql://… or memory",
        "store_connections": "most connections of a worker to PostgreSQL, two of them for LISTEN and its lease",
        "store_direct": "PostgreSQL URL without the pooler, where the store's goes through one that pools transactions",
        "durability": "acknowledged responses survive a power failure (full) or a process crash (relaxed)",
        "retention_s": "seconds to keep a chain of responses after its newest one; 0: forever",
        "events_retention_s": "seconds to keep the events of a response for replay; 0: forever",
        "seal_keys": "file with the encryption keys; none: next to the SQLite file, or in PostgreSQL",
    },
    "access": {
        "auth": "require an API key: auto (once a key was created), off (never), keys (always)",
        "allowed_hosts": "accepted Host header besides loopback names; *: any; repeatable",
        "cors_origins": "web origin allowed to call this server (CORS); *: any; repeatable",
        "tls_cert": "certificate chain (PEM); loaded again when the file changes and on SIGHUP",
        "tls_key": "private key of the certificate (PEM)",
    },
    "connections": {
        "websocket": "accept WebSocket connections; false: refuse with 426",
        "connection_age_s": "maximum age of a WebSocket in seconds",
        "grace_s": "seconds that running responses may take to finish at shutdown",
        "heartbeat_s": "seconds of silence in a running stream until a heartbeat is sent",
        "hang_s": "seconds until a worker process that hangs (blocked event loop) is replaced; 0: never",
        "body_bytes_max": "largest request body or WebSocket message in bytes",
        "outbox_bytes_max": "unsent bytes for a slow client until its response is paused",
        "write_s_max": "seconds until a client that reads nothing is disconnected",
        "handshake_s_max": "seconds that the headers of a request may take to arrive",
        "body_s_max": "seconds that a request body or WebSocket message may take to arrive",
        "connections_max": "open connections per process; more are refused with 503",
        "frames_per_s": "WebSocket frames per second on one connection; 0: no limit",
        "frames_burst_max": "WebSocket frames on one connection that may arrive at once",
        "append_s_max": "seconds that a response waits for tool outputs (response.append)",
        "background_s_max": "seconds that a background response may run, its time in the queue not counted",
        "reconnect_s": "seconds to keep unstored responses of a lost connection; 0: not at all",
    },
    "memory": {
        "memory_bytes_max": "bytes of memory for histories, caches and requests; 0: half of the machine or container",
        "connection_state_bytes_max": "memory for the history of one WebSocket connection in bytes",
        "connections_state_bytes_max": "memory for the history of all WebSocket connections in bytes",
        "process_state_bytes_max": "memory cache of stored responses in bytes",
        "render_cache_bytes_max": "memory cache of prompts in bytes, for clients that resend all; 0: off",
        "reuse_bytes_max": "memory for cache reports and the prompts that they compare, in bytes; 0: off",
        "check_rendering": "debug: render every prompt without caches too and compare (slow)",
    },
    "guards": {
        "guard_sides": "what guards check",
        "cache_salt": "keep owners apart in an engine's prefix cache; auto: where there are keys of several owners",
        "guard_window_chars": "characters of output held back and checked together",
        "guard_url": "base URL of a moderation API, without /v1/moderations",
        "guard_key": "API key of the moderation API",
        "guard_model": "model name sent to the moderation API",
        "guard_s_max": "timeout of the moderation API in seconds",
        "guard_unreachable": "when the moderation API fails: block (503) or pass",
        "guard_classifier": "folder of the classifier model, with model.onnx and tokenizer.json",
        "guard_threshold": "score at which the classifier blocks",
    },
    "server-side tools": {
        "tool_s_max": "timeout of a server-side tool call in seconds",
        "tool_output_bytes_max": "bytes of a server-side tool's output for the model; the rest is cut",
        "file_s_max": "timeout for reading a PDF in seconds",
        "mcp_hosts": "HOST or HOST:PORT allowed in server_url; without a port: 80 and 443; repeatable",
        "mcp_list_s": "seconds to cache an MCP server's tool list",
        "fetch": "whether the server fetches URLs; public addresses only",
        "fetch_allow": "domain to fetch from; none: all; repeatable",
        "fetch_deny": "domain never to fetch from; repeatable",
        "fetch_port": "port to fetch from; repeatable",
        "fetch_bytes_max": "largest page or file to fetch in bytes",
        "fetch_s_max": "timeout of one fetch in seconds",
        "search_index": "file with a local index for web search, made by `segue index`",
        "search_url": "URL of a SearXNG server, or of a JSON search API, with {query} in it",
        "search_results": "path of the result list in the search API's answer, such as web.results",
        "search_fields": "names of a result's URL, title and text fields, separated by spaces",
        "search_header": "header for the search API, as NAME: VALUE",
    },
    "observability": {
        "otel_endpoint": "OTLP/HTTP collector for traces, such as http://127.0.0.1:4318; none: off",
        "otel_headers": "header sent to the collector, as NAME=VALUE; repeatable",
        "log_format": "format of log lines, and of the access log: text, or json (one object a line)",
        "access_log": "line for each request, WebSocket connection and turn: a file, or `log`; none or `off`: off",
        "audit_log": "JSON line for each response and refusal: a file, or `log`; none or `off`: off",
    },
}
FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
FLAGS = tuple(name for group in HELP.values() for name in group)
# Settings that may be given several times; in the environment their values are separated by commas.
REPEATED = frozenset(name for name in FLAGS if get_origin(FIELDS[name].type) is tuple)
# Tables of a settings file that had a meaning in the last version: still accepted, not an error before the next one.
REMOVED = {
    "repairs": "no longer supported and ignored: prompts are sent as the client wrote them. Remove it: the next "
    "version refuses it.",
}


@dataclass(frozen=True, slots=True)
class SettingSources:
    """What was set, and where. Nothing of it is checked yet."""

    values: dict[str, object]
    # Setting -> the flag or variable that set it; the other values are from the file.
    origins: dict[str, str]
    file: Path | None = None
    text: str = ""
    # Why the file could not be read.
    broken: Problem | None = None
    # Variables that look like settings and are none.
    unknown: tuple[str, ...] = ()
    # Tables of the file that are in `REMOVED`.
    removed: tuple[str, ...] = ()

    def origin(self, name: str) -> str:
        """Where a setting was set: a flag, a variable, a line of the file, or nowhere: "default"."""
        if name not in self.values:
            return "default"
        return self.origins.get(name) or self._line((name,))

    def _line(self, path: SettingPath) -> str:
        line = line_of(self.text, path)
        return f"{self.file}, line {line}" if line else str(self.file)

    def problem(self, misfit: Misfit) -> Problem:
        """A misfit with the place where the operator finds it."""
        name = str(misfit.path[0])
        if name in self.origins:
            return Problem(misfit.setting, misfit.sentence, self.origins[name])
        if name not in self.values:
            return Problem(misfit.setting, misfit.sentence)
        line = line_of(self.text, misfit.path)
        place = self._line(misfit.path)
        return Problem(misfit.setting, misfit.sentence, place, str(self.file), line)

    def located(self, message: str) -> str:
        """The message "SETTING: …" of a later error, with the place where the setting was set."""
        name, _, rest = message.partition(": ")
        tables = self.values.get("models")
        is_table = isinstance(tables, list) and any(name in table for table in tables)
        if name not in self.values or is_table:
            return message
        return str(self.problem(Misfit((name,), rest)))

    def warnings(self) -> list[Problem]:
        """What is odd, but no reason to refuse a start."""
        names = [f"SEGUE_{name.upper()}" for name in FLAGS]
        ignored = "the environment variable is not a setting and is ignored."
        odd = [
            Problem("", ignored + nearest(variable, names), variable, level="warning")
            for variable in self.unknown
        ]
        for name in self.removed:
            path: SettingPath = (name,)
            place, line = self._line(path), line_of(self.text, path)
            odd.append(Problem(name, REMOVED[name], place, str(self.file), line, "warning"))
        return odd


class Problem(Struct, frozen=True):
    """What the operator must change, and where it is written."""

    setting: str
    message: str
    # The flag, the variable, or the file and its line.
    place: str = ""
    file: str | None = None
    line: int | None = None
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        # A flag or a variable already names its setting.
        name = self.setting if self.file or not self.place else ""
        return ": ".join(filter(None, (self.place, name, self.message)))


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


def read_sources(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> SettingSources:
    """What flags, environment and file set. `segue.toml` is looked for only in the process's own environment."""
    is_own = environment is None
    environment = os.environ if environment is None else environment
    file = _file_of(flags, environment, is_own=is_own)
    text, values, broken = _read_file(file) if file else ("", {}, None)
    removed = tuple(name for name in REMOVED if values.pop(name, None) is not None)
    if file:
        values["config"] = str(file)
    origins: dict[str, str] = {}
    for name in FLAGS:
        variable = f"SEGUE_{name.upper()}"
        written = environment.get(variable)
        # Kubernetes sets SEGUE_PORT=tcp://… where a service is called segue.
        if written is not None and not (name == "port" and written.startswith("tcp://")):
            values[name] = _listed(written) if name in REPEATED else written
            origins[name] = variable
        if (given := flags.get(name)) is not None:
            values[name], origins[name] = given, flag_of(name)
    values |= {name: "" for name in ("access_log", "audit_log") if values.get(name) == "off"}
    known = {f"SEGUE_{name.upper()}" for name in FLAGS}
    unknown = sorted(
        name
        for name in environment
        if name.startswith("SEGUE_") and name not in known and not OTHER_VARIABLES.match(name)
    )
    return SettingSources(values, origins, file, text, broken, tuple(unknown), removed)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


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


def codex_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder of Codex's configuration, for `segue connect codex`."""
    environment = os.environ if environment is None else environment
    return Path(environment.get("CODEX_HOME") or Path.home() / ".codex")


def state_home(environment: Mapping[str, str] | None = None) -> Path:
    """The folder for what commands keep between two runs."""
    environment = os.environ if environment is None else environment
    return Path(environment.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "segue"


def client_variable(name: str) -> str | None:
    """What a command that talks to a server reads from the environment; None if it is unset or empty."""
    return os.environ.get(name) or None


def _file_of(
    flags: Mapping[str, object], environment: Mapping[str, str], *, is_own: bool
) -> Path | None:
    """The settings file: the named one, or segue.toml in the working folder; "none" is none."""
    named = flags.get("config") or environment.get("SEGUE_CONFIG")
    if named:
        return None if named == "none" else Path(str(named))
    return Path(FILE_NAME) if is_own and Path(FILE_NAME).is_file() else None


def _read_file(path: Path) -> tuple[str, dict[str, object], Problem | None]:
    """The text of a file, what it sets, and what is wrong with it."""
    file = str(path)
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        return "", {}, Problem("config", f"{file} cannot be read: {error.strerror}.")
    except UnicodeDecodeError:
        return "", {}, Problem("", "this is not TOML: it is not text in UTF-8.", file, file)
    except tomllib.TOMLDecodeError as error:
        why, _, at = str(error).rstrip(")").partition(" (at ")
        line = int(found[1]) if (found := re.match(r"line (\d+)", at)) else text.count("\n") + 1
        sentence = f"this is not TOML: {why}."
        return "", {}, Problem("", sentence, f"{file}, line {line}", file, line)
    if "config" in values:
        sentence = "a settings file cannot name another one."
        return text, values, Problem("config", sentence, file, file)
    return text, values, None


STATE_SETTING = "embedded_state_bytes_max"
NO_STATES = (
    "the embedded model's state is kept by one process with a SQLite store. Leave it at 0, or leave out --workers and "
    "use --store sqlite:///segue.db."
)


def _rules(settings: Settings) -> Iterator[Misfit]:
    """What involves several settings, or the form of a text."""
    if not is_loopback(settings.host) and settings.auth == "off":
        yield Misfit(
            ("host",),
            f"{settings.host} is not a loopback address, which is refused with --auth off. "
            "Leave --auth out, or leave --host out and put a proxy in front.",
        )
    if bool(settings.tls_cert) != bool(settings.tls_key):
        given, other = ("tls_cert", "tls_key") if settings.tls_cert else ("tls_key", "tls_cert")
        yield Misfit((given,), f"{other} is missing: set both tls_cert and tls_key, or neither.")
    if len(settings.search_fields.split()) != 3:
        yield Misfit(("search_fields",), "name three fields: URL, title and text.")
    if settings.search_header and not SEARCH_HEADER.fullmatch(settings.search_header):
        yield Misfit(("search_header",), "write it as NAME: VALUE.")
    try:
        if settings.store_kind == "memory" and settings.workers > 1:
            yield Misfit(
                ("workers",),
                f"{settings.workers} processes cannot share the store 'memory'. "
                "Use --store sqlite:///segue.db, or leave --workers out.",
            )
        is_postgresql = settings.store_kind == "postgresql"
        is_direct = settings.store_direct.startswith(("postgresql://", "postgres://"))
        if settings.store_direct and not (is_postgresql and is_direct):
            yield Misfit(
                ("store_direct",), "store and store_direct must both be postgresql://… URLs."
            )
        if settings.workers > 1 or settings.store_kind != "sqlite":
            tables = enumerate(settings.models)
            sized = [("models", n) for n, table in tables if table.get(STATE_SETTING)]
            for place in [*sized, *([()] if settings.embedded_state_bytes_max else [])]:
                yield Misfit((*place, STATE_SETTING), NO_STATES)
    except Misconfigured as error:
        yield Misfit(("store",), str(error).removeprefix("store: "))
    yield from _url_rules(settings)
    yield from _model_rules(settings)
    yield from _mcp_rules(settings)


def _url_rules(settings: Settings) -> Iterator[Misfit]:
    for name in ("guard_url", "otel_endpoint"):
        url = getattr(settings, name)
        if url and not is_web_url(url):
            yield Misfit((name,), NO_URL.format(url))
    for url in settings.engine_url:
        if not is_web_url(url):
            yield Misfit(("engine_url",), NO_URL.format(url))


def _discovery_problem(model: ModelSettings) -> str:
    """Why the replicas of a model cannot be looked up; empty: they can, or need not be."""
    if model.engine_discovery == "off":
        return ""
    if model.engine in ("embedded", "scripted"):
        return f"engine '{model.engine}' has no URL whose replicas could be looked up."
    for url in model.engine_url:
        host = urlsplit(url).hostname or ""
        with suppress(ValueError):
            ipaddress.ip_address(host)
            return f"{host} is an address: '{model.engine_discovery}' needs a name in engine_url."
    return ""


def _model_rules(settings: Settings) -> Iterator[Misfit]:
    if settings.dialect not in DIALECTS:
        yield Misfit(("dialect",), _unknown_dialect(settings.dialect))
    for model in settings.served():
        if problem := _discovery_problem(model):
            yield Misfit(("engine_discovery",), problem)
    yield from _drained_rules(settings.served())
    for index, table in enumerate(settings.models):
        model = msgspec.convert(table, ModelSettings, strict=False)
        if not model.name:
            yield Misfit(("models", index), "name is missing.")
        if model.dialect not in DIALECTS:
            yield Misfit(("models", index, "dialect"), _unknown_dialect(model.dialect))
        for url in model.engine_url:
            if not is_web_url(url):
                yield Misfit(("models", index, "engine_url"), NO_URL.format(url))


def _drained_rules(models: tuple[ModelSettings, ...]) -> Iterator[Misfit]:
    """Where the replicas are looked up, any of them may be found later."""
    known = sorted({shown_address(url) for one in models for url in one.engine_url})
    if not known or any(one.engine_discovery != "off" for one in models):
        return
    for url in sorted({url for one in models for url in one.engine_drained} - set(known)):
        problem = f"'{url}' is not one of engine_url: {', '.join(known)}."
        yield Misfit(("engine_drained",), problem)


def _unknown_dialect(name: str) -> str:
    return f"'{name}' is not one of: {', '.join(DIALECTS)}.{nearest(name, DIALECTS)}"


def _mcp_rules(settings: Settings) -> Iterator[Misfit]:
    labels = [server.label for server in settings.mcp]
    for index, server in enumerate(settings.mcp):
        path = ("mcp", index)
        if not MCP_LABEL.match(server.label):
            yield Misfit((*path, "label"), f"'{server.label}' is not 1 to 64 of A-Z a-z 0-9 _ -.")
        if server.label in labels[:index]:
            yield Misfit((*path, "label"), f"two servers have the label '{server.label}'.")
        ways = {"url": server.url, "sse_url": server.sse_url, "command": server.command}
        given = [name for name, value in ways.items() if value]
        if len(given) != 1:
            have = f"has {' and '.join(given)}" if given else "has none"
            yield Misfit(
                path, f"'{server.label}' {have}: set exactly one of url, sse_url, command."
            )
        for name in ("url", "sse_url"):
            if (url := ways[name]) and not is_web_url(str(url)):
                yield Misfit((*path, name), NO_URL.format(url))


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach the address."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
