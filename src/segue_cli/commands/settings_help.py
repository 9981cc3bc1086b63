"""What does each setting mean, in the words of `--help` and docs/settings.md?

Flag, environment variable and key of the file have the same name, so that one sentence is enough for all three.
"""

from __future__ import annotations

from segue.settings.values import CHAT_FORMATS

# In the groups of `--help`.
HELP = {
    "server": {
        "host": "address to listen on; other than loopback requires API keys",
        "port": "port to listen on; 0: any free port",
        "workers": "number of processes that share port and store",
        "model": (
            "model to serve: a name, a GGUF file, hf:OWNER/NAME, ollama:NAME, lmstudio:NAME, or auto (the best that "
            "fits into memory); none: the engine's only one, or smollm2 inside; repeatable"
        ),
        "apis": "APIs to serve: responses, messages, chat, with commas; requests for the others are answered with 404",
        "log_level": "lowest level of log lines written",
    },
    "model and engine": {
        "engine": "inference engine; all but embedded and scripted are servers at engine_url. "
        "ollama, lmstudio, litellm and openai mean chat",
        "engine_url": "base URL of an engine server; repeatable, for several replicas",
        "engine_key": "API key sent to the engine server",
        "engine_parallel": "parallel requests per replica, more wait; 0: what the engine says (embedded: 1, else 256)",
        "engine_drained": "URL of a replica that gets no requests; repeatable. See also `segue engines drain`",
        "engine_discovery": "find replicas by the name in engine_url: off, dns (addresses), kubernetes (ready pods)",
        "engine_discovery_s": "seconds between two lookups of the replicas",
        "engine_arg": "flag for the vLLM that Segue starts (without engine_url), such as --port=8001; repeatable",
        "engine_sessions": "send a vLLM with the plugin segue-vllm only what is new: auto (where it says so), or off",
        "context_tokens": "context window in tokens; 0: what the engine says (embedded: what the free memory allows)",
        "dialect": "chat format: auto (from the model's files), "
        + ", ".join(CHAT_FORMATS)
        + ", or a .toml file "
        "that `segue models derive` has written",
        "tokenizer": "tokenizer.json, its folder, or a GGUF file; none: the embedded model's own",
        "template": "chat template (Jinja file) instead of the model's own",
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
        "files_dir": "folder for uploaded files, shared by all machines; none: next to the SQLite file",
        "files_url": "bucket for the files of clients instead of a folder: s3://BUCKET/PREFIX",
        "file_bytes_max": "largest file that a client may upload",
        "owner_files_bytes_max": "bytes of all files of one owner together",
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
        "body_s_max": "seconds that a request body or WebSocket message may take to arrive",
        "connections_max": "open connections per process; more are refused with 503",
        "frames_per_s": "WebSocket frames per second on one connection; 0: no limit",
        "append_s_max": "seconds that a response waits for tool outputs (response.append)",
        "background_s_max": "seconds that a background response may run, its time in the queue not counted",
        "threads": "keep turns of Messages threads in memory for an hour; false: refuse `thread`",
        "reconnect_s": "seconds to keep unstored responses of a lost connection; 0: not at all",
    },
    "memory": {
        "memory_bytes_max": "bytes of memory for histories, caches and requests; 0: half of the machine or container",
        "render_cache_bytes_max": "memory cache of prompts in bytes, for clients that resend all; 0: off",
        "reuse_bytes_max": "memory for cache reports and the prompts that they compare, in bytes; 0: off",
        "check_rendering": "debug: render every prompt without caches too and compare (slow)",
    },
    "guards": {
        "guard_sides": "what guards check",
        "cache_salt": "keep owners apart in an engine's prefix cache; auto: where there are keys of several owners",
        "guard_url": "base URL of a moderation API, without /v1/moderations",
        "guard_key": "API key of the moderation API",
        "guard_model": "model name sent to the moderation API",
        "guard_s_max": "timeout of the moderation API in seconds",
        "guard_unreachable": "when the moderation API fails: block (503) or pass",
        "guard_classifier": "folder of the classifier model, with model.onnx and tokenizer.json",
        "guard_threshold": "score at which the classifier blocks",
    },
    "server-side tools": {
        "environment": "sandboxes for the commands of a model: off, bwrap, gvisor, auto (bwrap if it works)",
        "environment_domains": "host that containers may reach, or *.NAME for all below; none: no network; repeatable",
        "environment_root": "folder with an unpacked image that sandboxes have as root; none: the host's /usr",
        "environment_runsc": "where runsc, the program of gVisor, is; none: where programs of the system are",
        "environment_s_max": "most seconds that the commands of one call may take",
        "environments_max": "most containers on this machine; an owner may have a quarter of them",
        "hosted_tools": "server-side tool of your own, MODULE:NAME; repeatable",
        "unknown_tools": "tools for the server to run that are not set up: warn (x-segue-warnings) or refuse (400)",
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
FLAGS = tuple(name for group in HELP.values() for name in group)
# What most servers need: `segue serve --help` shows these, and docs/settings.md begins with them.
COMMON = frozenset(
    {
        *("host", "port", "workers", "model", "apis", "log_level"),
        *("engine", "engine_url", "engine_key", "engine_parallel", "context_tokens", "dialect"),
        *("tokenizer", "script", "tps", "temperature", "output_tokens_max", "reasoning", "guard"),
        *("store", "retention_s", "files_dir", "files_url"),
        *("auth", "allowed_hosts", "cors_origins", "tls_cert", "tls_key"),
        *("grace_s", "memory_bytes_max"),
        *("environment", "environment_domains", "fetch", "search_url"),
        *("log_format", "access_log", "otel_endpoint"),
    }
)
