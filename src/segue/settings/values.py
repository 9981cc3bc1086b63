"""Which settings are there, of which type, and what holds where the operator has set nothing?

One struct, with the fields of a model as defaults of all models. What each setting means is said where flags are made
(`segue_cli/commands/settings_help.py`). A type checks what it can: `checks.py` has the rules beyond that.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from segue.errors import Misconfigured
from segue.printable import without_password

Table = dict[str, str | bool | int | float | list[str] | dict[str, object]]

ApiName = Literal["responses", "messages", "chat"]
API_NAMES: tuple[ApiName, ...] = get_args(ApiName)
EngineName = Literal["embedded", "scripted", "llamacpp", "vllm", "sglang", "dynamo", "chat"]
CHAT_FORMATS = (
    "chatml", "smollm2", "qwen2", "qwen3", "llama3", "mistral", "harmony", "deepseek-v3.2", "deepseek-v4", "template",
    "derived",
)  # fmt: skip
DIALECTS = ("auto", *CHAT_FORMATS)

StoreKind = Literal["memory", "sqlite", "postgresql"]
# How the address of a store begins -> its kind; `memory` has none. `server/storage.py` says how each kind is opened.
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


class RuleSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The rules of the guard `rules`: the `[guard_rules]` table of `segue.toml`."""

    # Regular expressions; a text that matches one of them is blocked. None: those of well-known credentials.
    patterns: tuple[str, ...] | None = None
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
    engine: EngineName = "embedded"
    engine_url: tuple[str, ...] = ()
    engine_key: str = ""
    engine_parallel: Limit = 0
    engine_drained: tuple[str, ...] = ()
    engine_discovery: Literal["off", "dns", "kubernetes"] = "off"
    engine_discovery_s: Positive = 10.0
    engine_sessions: Literal["auto", "off"] = "auto"
    kubernetes_account: str = "/var/run/secrets/kubernetes.io/serviceaccount"
    context_tokens: Limit = 0
    dialect: str = "auto"
    tokenizer: str = ""
    # A file with a chat template (Jinja) that replaces the model's own.
    template: str = ""
    # What chat templates get besides the conversation, for example `enable_thinking`.
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
    # Flags of the vLLM that is started where no URL says that one runs.
    engine_arg: tuple[str, ...] = ()
    apis: tuple[ApiName, ...] = API_NAMES
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    store: str = "sqlite:///segue.db"
    # Two of them are for LISTEN and for the lease.
    store_connections: Annotated[int, Meta(ge=4, le=1_000)] = 10
    store_direct: str = ""
    durability: Literal["full", "relaxed"] = "full"
    retention_s: Limit = 30 * 86_400
    events_retention_s: Limit = 86_400
    seal_keys: str = ""
    # A folder, or a bucket; with neither, a folder beside the SQLite file.
    files_dir: str = ""
    files_url: str = ""
    file_bytes_max: Amount = 512 * MIB
    owner_files_bytes_max: Amount = 10 * 1024 * MIB
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
    # (docs/inside/hazards.md F11).
    # To scan a larger one would hold up all other requests for more than 50 ms (docs/decisions/0005).
    body_bytes_max: Amount = 32 * MIB
    outbox_bytes_max: Amount = MIB // 2
    write_s_max: Positive = 30.0
    handshake_s_max: Positive = 10.0
    body_s_max: Positive = 120.0
    connections_max: Amount = 10_000
    frames_per_s: Duration = 1_000.0
    frames_burst_max: Amount = 10_000
    append_s_max: Positive = 600.0
    # A store keeps the name of a deleted turn for a day, so that no late save brings it back.
    background_s_max: Annotated[float, Meta(gt=0, le=80_000)] = 21_600.0
    threads: bool = True
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
    environment: Literal["off", "auto", "bwrap", "gvisor"] = "off"
    environment_domains: tuple[str, ...] = ()
    environment_root: str = ""
    environment_runsc: str = ""
    environment_s_max: Positive = 120.0
    environments_max: Amount = 64
    hosted_tools: tuple[str, ...] = ()
    unknown_tools: Literal["warn", "refuse"] = "warn"
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
    def is_ring_stored(self) -> bool:
        """Whether the encryption keys are in the database, where all machines find them."""
        return not self.seal_keys and self.store_kind == "postgresql"

    @property
    def seal_path(self) -> Path | None:
        """The file with the encryption keys; None for the memory store, which needs none."""
        if self.seal_keys:
            return Path(self.seal_keys)
        if self.store_kind == "memory":
            return None
        return Path(f"{self.store_path or 'segue'}.seals")

    @property
    def files_path(self) -> Path | None:
        """The folder of uploaded files; None where they are in a bucket, in memory, or have no place."""
        if self.files_url or not (self.files_dir or self.store_path):
            return None
        return Path(self.files_dir or f"{self.store_path}.files")

    @property
    def is_unnamed(self) -> bool:
        """Whether an engine over HTTP is to serve a model that the operator has not named."""
        is_named = self.model or self.models or self.engine in ("embedded", "scripted")
        return bool(self.engine_url) and not is_named

    def named_models(self) -> tuple[ModelSettings, ...]:
        """The models of the file's tables, and those that are only named; each has what is set for all models."""
        shared = {name: getattr(self, name) for name in ModelSettings.__struct_fields__}
        tabled = {table.get("name") for table in self.models}
        tables = [
            *self.models,
            *(self._table_of(name) for name in self.model if name not in tabled),
        ]
        return tuple(
            msgspec.convert(shared | table, ModelSettings, strict=False) for table in tables
        )

    def _table_of(self, name: str) -> Table:
        """A model by its name; a GGUF file is named after itself, without folder and suffix, and a model of a hub or of
        another program as it is called there."""
        place, _, there = name.partition(":")
        if self.engine == "embedded" and place == "ollama":
            return {"name": there, "weights": name}
        is_elsewhere = self.engine == "embedded" and place in ("hf", "lmstudio")
        if is_elsewhere or name.endswith(".gguf"):
            return {"name": Path(name).name.removesuffix(".gguf"), "weights": name}
        return {"name": name}


# These exist only in the file: the tables, what only a table of a model has, and the name of the file itself.
IN_FILES_ONLY = frozenset(
    ("config", "models", "mcp", "guard_rules", "guard_owners", "template_values", "name", "aliases", "weights")
)  # fmt: skip
FIELDS = {field.name: field for field in msgspec.structs.fields(Settings)}
# What may be a flag, an environment variable or a key of the file.
NAMES = tuple(name for name in FIELDS if name not in IN_FILES_ONLY)
# Settings that may be given several times; in the environment their values are separated by commas.
REPEATED = frozenset(name for name in NAMES if get_origin(FIELDS[name].type) is tuple)
# Settings that a rule has replaced. They hold in this version, with a warning; the next one refuses them.
RETIRED = {
    "piece_cache": "token ids of text fragments are always cached",
    "kubernetes_account": "Kubernetes puts the service account into the same folder of every pod",
    "outbox_bytes_max": "a response is paused at 512 KiB that its client has not read",
    "write_s_max": "a client that reads nothing for 30 s is disconnected",
    "handshake_s_max": "the headers of a request may take 10 s to arrive",
    "frames_burst_max": "10,000 WebSocket frames may arrive at once; frames_per_s limits the rest",
    "connection_state_bytes_max": "memory_bytes_max limits all histories; one connection may keep 256 MiB",
    "connections_state_bytes_max": "memory_bytes_max limits all histories; connections may keep 2 GiB",
    "process_state_bytes_max": "memory_bytes_max limits all histories; stored responses may keep 512 MiB",
    "guard_window_chars": "output is checked in windows of 400 characters",
}
# Settings that are never shown.
SECRETS = frozenset({"engine_key", "guard_key", "search_header", "otel_headers", "search_url"})
