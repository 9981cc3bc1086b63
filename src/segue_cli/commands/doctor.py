"""Would the server start? `segue doctor` takes the flags of `segue serve`, checks what they name, and serves nothing.

In: the settings. Out: one line for each check, and advice for each problem. It writes nothing that a server would not.
Where a Segue server already listens on the port, that server is asked instead, and nothing else is checked.
"""

from __future__ import annotations

import argparse
import asyncio
import errno
import logging
import os
import platform
import shutil
import socket
import ssl
from collections.abc import AsyncGenerator, Iterator
from contextlib import aclosing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from urllib.error import URLError
from urllib.request import Request

import msgspec

from segue import __version__
from segue.engines.facts import tokenized
from segue.engines.upstream import Upstream
from segue.errors import ApiError, Misconfigured, shown_names
from segue.observe.logs import set_up_logging
from segue.printable import printable, say, shown_address
from segue.seams.model import EngineFacts
from segue.server.aliases import alias_problems
from segue.server.apis import APIS, is_on
from segue.server.discovery import lookup_of
from segue.server.environment import allowed_domains, keeper_of
from segue.server.files import NO_PLACE, has_place
from segue.server.models import (
    NO_TOOLS,
    SCALE_OUT_ADVICE,
    UNREAD,
    UNREAD_ADVICE,
    build_models,
    lacks_tools,
    unread_call_mark,
)
from segue.server.names import NAMED, is_listed
from segue.server.serve import listen
from segue.server.served import served_models
from segue.server.storage import open_store
from segue.settings.checks import settings_of
from segue.settings.sources import read_sources
from segue.settings.values import ModelSettings, Settings
from segue.vocabularies.load import load_vocabulary
from segue_cli.client.asking import answer_to, decoded, shown
from segue_cli.client.talk import (
    SEGUE_KEY,
    RunningServer,
    ServedModel,
    add_server,
    client_variable,
    server_of,
)
from segue_cli.client.traffic import print_traffic
from segue_cli.commands.engine_name import with_engine_name
from segue_cli.commands.flags import add_settings
from segue_cli.commands.vllm_advice import vllm_advice
from segue_cli.terminal import styled

# Timeout of an engine's health check; clients would not wait longer either.
ENGINE_S_MAX = 10.0
ASK_S_MAX = 3.0
# Weights are hundreds of megabytes, and a store that cannot grow fails requests.
DISK_BYTES_MIN = 1024**3
# A text that vocabularies cut in different ways.
PROBE = "Zwei Enten: 12,345.67 €\n\n\tdef quack(self):  # 鴨 🦆"
# Engines whose prefix cache can be kept apart by owner.
SALTED = ("vllm", "sglang", "dynamo", "chat")


@dataclass(frozen=True, slots=True)
class Check:
    """The result of one check; advice only if it failed."""

    name: str
    is_ok: bool
    found: str
    advice: str = ""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue doctor`: those of `segue serve`."""
    traffic = "ask a running server what its last hour cost and what to do (docs/cache.md)"
    parser.add_argument("--traffic", action="store_true", help=traffic)
    family = "print how the model writes, as it is worked out from its chat template and proven"
    parser.add_argument("--family", action="store_true", help=family)
    add_server(parser, has_config=False)
    add_settings(parser, is_listed=False)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(options: argparse.Namespace) -> int:
    """Check everything and print it; returns the exit status."""
    if options.traffic:
        return print_traffic(options)
    sources = read_sources(vars(options))
    settings = settings_of(sources)
    if options.family:
        # Needs weights of the embedded engine only where a model is one of them.
        from segue_cli.commands.family import print_families

        return print_families(settings)
    set_up_logging(settings.log_level, settings.log_format, workers=settings.workers)
    # The checks report what engines would log.
    logging.disable(logging.WARNING)
    is_elsewhere = options.url is not None
    options.url = options.url or _url(settings)
    server = server_of(options)
    examining = _asked(server) if is_elsewhere else examine(settings, server)
    odd = [
        # A setting that is ignored keeps no server from starting.
        Check("settings", True, str(warning))
        if warning.setting
        else Check("environment", False, str(warning), UNSET)
        for warning in sources.warnings()
    ]
    checks = asyncio.run(_run(examining, odd, is_json=options.json))
    return 0 if all(check.is_ok for check in checks) else 1


async def _asked(server: RunningServer) -> AsyncGenerator[Check, None]:
    for check in check_server(server):
        yield check


async def _run(
    examining: AsyncGenerator[Check, None], odd: list[Check], *, is_json: bool
) -> list[Check]:
    """Do all checks; each is printed when it is done, or all of them as JSON."""
    checks = []
    async with aclosing(examining) as examined:
        async for check in examined:
            checks.append(check)
            if not is_json:
                _print(check)
    checks += odd
    if is_json:
        say(msgspec.json.encode(checks).decode())
        return checks
    for check in odd:
        _print(check)
    failed = sum(not check.is_ok for check in checks)
    is_running = any(check.name == SERVER for check in checks)
    well = "the server runs." if is_running else "`segue serve` would start."
    say(f"{failed} check{'s' * (failed > 1)} failed." if failed else f"No problems: {well}")
    return checks


def _print(check: Check) -> None:
    verdict = styled("ok", "green") + "      " if check.is_ok else styled("failed", "red") + "  "
    # Its colours are orders to the terminal, and ours.
    print(f"{verdict}{styled(printable(check.name), 'bold')}  {printable(check.found)}", flush=True)
    if not check.is_ok:
        say(f"        advice: {check.advice}")


async def examine(
    settings: Settings, server: RunningServer | None = None
) -> AsyncGenerator[Check, None]:
    """Every check, in the order of a start; of a server that runs already, what it says of itself."""
    file = settings.config or "no settings file"
    yield Check("segue", True, f"{__version__}, Python {platform.python_version()}, {file}")
    server = server or RunningServer(f"{_url(settings)}/v1", client_variable(SEGUE_KEY))
    port = await asyncio.to_thread(check_port, settings, server)
    yield port
    if port.found.endswith(RUNS):
        for check in await asyncio.to_thread(lambda: list(check_server(server))):
            yield check
        return
    on = [name for name, api in APIS.items() if is_on(api, settings)]
    yield Check("APIs", True, ", ".join(on))
    yield await check_store(settings)
    yield check_files(settings)
    if settings.environment != "off":
        yield await asyncio.to_thread(check_sandbox, settings)
    try:
        settings = await with_engine_name(settings)
    except Misconfigured as error:
        yield Check("model", False, str(error), "name the model to serve: --model NAME")
        return
    for problem in alias_problems(served_models(settings)):
        yield Check(
            "aliases", False, problem, "change `aliases` of one of them in the settings file"
        )
    for model in served_models(settings):
        async with aclosing(check_model(settings, model)) as checks:
            async for check in checks:
                yield check


# --- the port ----------------------------------------------------------------------------------------

SERVER = "server"
RUNS = "in use by a Segue server; to check other settings give a free port, such as --port 0"
UNSET = "correct the name, or unset the variable"


def check_port(settings: Settings, server: RunningServer) -> Check:
    """Whether the port is free, or what uses it."""
    name = f"{settings.host}:{settings.port}"
    try:
        with listen(settings):
            return Check("port", True, f"{name} is free")
    except Misconfigured as error:
        if not _is_taken(settings):
            return Check("port", False, str(error), "use another --host or --port")
    if not _is_segue(server):
        advice = "stop that program, or use another --port"
        return Check("port", False, f"{name} is in use by another program", advice)
    return Check("port", True, f"{name}: {RUNS}")


def _is_taken(settings: Settings) -> bool:
    family = socket.AF_INET6 if ":" in settings.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(ASK_S_MAX)
        return probe.connect_ex((settings.host, settings.port)) != errno.ECONNREFUSED


# --- a server that runs ------------------------------------------------------------------------------


class _Ready(msgspec.Struct):
    status: Literal["ready", "not ready"]
    checks: dict[str, bool] = {}


def _url(settings: Settings) -> str:
    host = f"[{settings.host}]" if ":" in settings.host else settings.host
    return f"{'https' if settings.tls_cert else 'http'}://{host}:{settings.port}"


class _Listed(msgspec.Struct):
    data: list[ServedModel]


class _Document(msgspec.Struct):
    paths: dict[str, object]


def _ask(server: RunningServer, path: str) -> tuple[int, bytes] | None:
    """Status and body of an answer; None if there is none."""
    address = server.url + path
    try:
        try:
            return answer_to(Request(address, headers=server.headers), ASK_S_MAX, {})
        except URLError as error:
            if not isinstance(error.reason, ssl.SSLCertVerificationError):
                raise
            # A certificate of one's own is good enough to ask, but not to send a key.
            context = ssl._create_unverified_context()
            return answer_to(Request(address), ASK_S_MAX, {}, context)
    except (OSError, ValueError):
        return None


def _ready_of(server: RunningServer) -> _Ready | None:
    """What `/ready` says; None if this is not a Segue server."""
    answer = _ask(server, "/ready")
    try:
        return decoded(answer[1], _Ready, "what is ready") if answer else None
    except Misconfigured:
        return None


def _is_segue(server: RunningServer) -> bool:
    """Whether a Segue server answers, with TLS perhaps although no setting says so."""
    if _ready_of(server) is not None:
        return True
    secure = RunningServer(server.base_url.replace("http:", "https:", 1), server.key)
    if _ready_of(secure) is None:
        return False
    server.base_url = secure.base_url
    return True


def check_server(server: RunningServer) -> Iterator[Check]:
    """What a running server says: whether its store and engines answer, and what it serves."""
    ready = _ready_of(server)
    if ready is None:
        advice = "start it with `segue serve`, or correct --url"
        yield Check(SERVER, False, f"no Segue server answers at {server.url}", advice)
        return
    yield Check(SERVER, True, f"a Segue server runs at {server.url}; this is what it says")
    for name, is_ok in ready.checks.items():
        found = "yes" if name == "accepting" else "answers"
        advice = f"see the log of the server, and `curl {server.url}/ready`"
        yield Check(name.replace(":", " "), is_ok, found if is_ok else "no answer", advice)
    if not ready.checks:
        advice = f"to see which check fails, set {SEGUE_KEY} to a key with the scope metrics"
        yield Check("ready", ready.status == "ready", ready.status, advice)
    status, body = _ask(server, "/v1/models") or (0, b"")
    if status in (401, 403):
        yield Check("models", True, f"not asked: the server needs an API key (set {SEGUE_KEY})")
    elif status == 200:
        yield _models_in(body)
    else:
        found = f"/v1/models answered with status {status}" if status else "/v1/models: no answer"
        yield Check("models", False, found, "see the log of the server")
    status, body = _ask(server, "/openapi.json") or (0, b"")
    if status == 200:
        with suppress(Misconfigured):
            paths = decoded(body, _Document, "a description").paths
            on = [name for name, api in APIS.items() if any(map(api.owns, paths))]
            yield Check("APIs", True, ", ".join(on))


def _models_in(body: bytes) -> Check:
    try:
        listed = decoded(body, _Listed, "a list of models").data
    except Misconfigured:
        return Check(
            "models", False, "/v1/models is no list of models", "see the log of the server"
        )
    return Check("models", True, shown(", ".join(map(_shown, listed))) or "none")


def _shown(model: ServedModel) -> str:
    window = model.context_window
    return model.id + (f" (context {window:,} tokens)" if window else "")


# --- the store ---------------------------------------------------------------------------------------


def check_sandbox(settings: Settings) -> Check:
    """Whether a sandbox can be made, and how strong it is: one is made and tried."""
    try:
        return Check("sandbox", True, try_environment(settings))
    except Misconfigured as error:
        advice = "see docs/how-to/sandbox.md, or leave --environment off"
        return Check("sandbox", False, str(error), advice)


def check_files(settings: Settings) -> Check:
    """Where uploaded files are kept; without a place the server works, but not for them."""
    if not has_place(settings):
        return Check("files", True, f"none: /v1/files answers 501. {NO_PLACE}")
    return Check(
        "files", True, settings.files_url or str(settings.files_path or "a temporary folder")
    )


async def check_store(settings: Settings) -> Check:
    """Whether the store opens."""
    if settings.store == "memory":
        return Check("store", True, "memory: responses are lost when the server stops")
    if settings.store_path is not None and (verdict := _look_at(settings.store_path)):
        return verdict
    try:
        async with open_store(settings) as store:
            is_ready = await store.is_ready()
    except (Misconfigured, ApiError, OSError) as error:
        return Check("store", False, str(error), "use another --store, or repair this one")
    found = f"{settings.shown_store} {'opens' if is_ready else 'does not answer'}"
    advice = "check that no other program locks it, and that it is writable"
    return Check("store", is_ready, found, advice)


def _look_at(path: Path) -> Check | None:
    """The verdict without opening the database file; None if the file exists and its folder is fine."""
    folder = path.resolve().parent
    if not folder.is_dir():
        return Check("store", False, f"{folder} does not exist", f"create it: mkdir -p {folder}")
    if not os.access(folder, os.W_OK):
        return Check("store", False, f"{folder} is not writable", "use another --store")
    free = shutil.disk_usage(folder).free
    if free < DISK_BYTES_MIN:
        found = f"only {free // 1024**2} MiB free in {folder}"
        return Check("store", False, found, "free some space, or use another --store")
    return None if path.exists() else Check("store", True, f"{path} will be created")


# --- models ------------------------------------------------------------------------------------------


async def check_model(settings: Settings, model: ModelSettings) -> AsyncGenerator[Check, None]:
    """Whether a model's files exist, its tokenizer and dialect fit, and its engine answers."""
    name = f"model {model.name}"
    try:
        served = await asyncio.to_thread(build_models, _alone(settings, model))
    except (Misconfigured, ApiError) as error:
        yield Check(name, False, str(error), advice_for(model, str(error)))
        return
    async with aclosing(served):
        built = served.models[model.name]
        yield Check(name, True, f"dialect {built.dialect.name}")
        if (mark := unread_call_mark(built.dialect)) is not None:
            yield Check(name, False, UNREAD.format(mark), UNREAD_ADVICE)
        if lacks_tools(built.dialect) and model.engine != "scripted":
            yield Check("tools", True, NO_TOOLS)
        try:
            async with asyncio.timeout(ENGINE_S_MAX):
                is_up = await built.engine.is_ready()
        except (TimeoutError, ApiError) as error:
            yield Check(f"engine {model.engine}", False, f"no answer: {error}", _advice(model))
            return
        if model.engine_discovery != "off":
            yield await check_discovery(model)
        for url in model.engine_url:
            if await asyncio.to_thread(refuses_key, url, model.engine_key):
                asked = "this API key" if model.engine_key else "requests without an API key"
                found = f"{shown_address(url)} refuses {asked}"
                yield Check(f"engine {model.engine}", False, found, KEY_ADVICE)
                return
        where = ", ".join(map(shown_address, model.engine_url)) or "in this process"
        found = f"{where}: {'answers' if is_up else 'does not answer'}"
        yield Check(f"engine {model.engine}", is_up, found, _advice(model))
        if model.engine != "scripted":
            yield Check("prefix cache", True, _sharing(settings, model))
        if is_up and model.engine_url:
            for check in compare(model, built.engine.facts):
                yield check
            yield await check_vocabulary(model)
        if is_up and model.engine == "vllm":
            for url in model.engine_url:
                yield Check("sessions", True, await _sessions(model, url))
                for advice in await asyncio.to_thread(vllm_advice, url):
                    yield Check("advice", True, advice)


async def _sessions(model: ModelSettings, url: str) -> str:
    """Whether a vLLM keeps conversations, and how."""
    # Imported here: for one engine of many.
    from segue.engine_sessions.engine import session_offer

    name = shown_address(url)
    if model.engine_sessions == "off":
        return f"{name}: whole prompts, because engine_sessions is off"
    upstream = Upstream(url, model.engine_key or None)
    try:
        offer = await session_offer(upstream)
    except ApiError:
        offer = None
    finally:
        await upstream.close()
    if offer is None:
        return f"{name}: whole prompts; with the plugin segue-vllm only what is new (docs/engines/vllm.md)"
    why = f"; not step 2: {offer.reason}" if offer.reason else ""
    return f"{name}: only what is new: segue-vllm {offer.version}, step {offer.step}{why}"


async def check_discovery(model: ModelSettings) -> Check:
    """Whether the replicas behind the name of an engine can be looked up."""
    # Imported here: most servers look nothing up.
    from segue.replicas.kubernetes import LookupFailed
    from segue.replicas.lookup import look_up

    name = f"discovery {model.engine_discovery}"
    try:
        found = await asyncio.to_thread(look_up, lookup_of(model))
    except (LookupFailed, Misconfigured) as error:
        return Check(name, False, str(error), "see docs/deploy.md, Replicas of an engine")
    return Check(name, True, f"{len(found)} found: {', '.join(map(shown_address, found))}")


def _sharing(settings: Settings, model: ModelSettings) -> str:
    """Whether one owner can learn from the engine what another has sent."""
    if settings.cache_salt == "off":
        return "shared by all owners, because cache_salt is off"
    if model.engine not in SALTED:
        return f"shared by all owners: {model.engine} has no cache_salt (docs/security.md)"
    when = "" if settings.cache_salt == "on" else " once there are keys of several"
    whose = ", if it is a vLLM or an SGLang" if model.engine == "chat" else ""
    return f"kept apart by owner{when}{whose}"


def compare(model: ModelSettings, facts: EngineFacts) -> Iterator[Check]:
    """Whether the settings fit what the engine says of itself."""
    chosen, said = model.context_tokens, facts.context_tokens
    if said is not None and chosen > said:
        found = f"--context-tokens {chosen}, but the engine takes {said}"
        yield Check("context", False, found, f"leave --context-tokens away, or at most {said}")
    elif tokens := chosen or said:
        yield Check(
            "context", True, f"{tokens:,} tokens" + f" of {said:,}" * (said not in (None, tokens))
        )
    else:
        yield Check("context", True, "not said by the engine; set it with --context-tokens N")
    names = facts.models
    if model.engine in NAMED and names and not is_listed(model.name, names):
        advice = f"serve it under the engine's name: --model {names[0]}"
        found = f"the engine does not list {model.name}, it lists {shown_names(names)}"
        yield Check("name", False, found, advice)
    if facts.slots is not None and model.engine_parallel > facts.slots:
        found = f"--engine-parallel {model.engine_parallel}, but the engine has {facts.slots} slots"
        yield Check("parallel", False, found, "leave --engine-parallel away, or give it more slots")
    if facts.ids_alone is False:
        yield Check("advice", True, SCALE_OUT_ADVICE)


async def check_vocabulary(model: ModelSettings) -> Check:
    """Whether ids mean the same to the engine."""
    try:
        is_same = await _has_same_vocabulary(model)
    except ApiError:
        is_same = None
    if is_same is None:
        return Check("vocabulary", True, "not compared: the engine does not report its own")
    found = "the engine makes the same ids" if is_same else "the engine makes other ids of a text"
    advice = "--tokenizer must be the files of the very model that the engine serves"
    return Check("vocabulary", is_same, found, advice)


async def _has_same_vocabulary(model: ModelSettings) -> bool | None:
    """Whether the engine makes the same ids of a text as we do; None where it cannot be asked."""
    if not model.tokenizer or not model.engine_url:
        return None
    vocabulary = load_vocabulary(Path(model.tokenizer))
    upstream = Upstream(model.engine_url[0], model.engine_key or None)
    try:
        ids = await tokenized(upstream, model.name, PROBE)
    finally:
        await upstream.close()
    return None if ids is None else ids == vocabulary.ids(PROBE).tolist()


def _alone(settings: Settings, model: ModelSettings) -> Settings:
    """The settings with only this model."""
    values = msgspec.structs.asdict(model).items()
    table = {key: value for key, value in values if value is not None}
    return msgspec.structs.replace(settings, model=(), models=(table,))


def refuses_key(url: str, key: str) -> bool:
    """Whether an engine wants another API key."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    base = url.rstrip("/").removesuffix("/v1")
    try:
        status, _ = answer_to(Request(f"{base}/v1/models", headers=headers), ASK_S_MAX, {})
    except (OSError, ValueError):
        return False
    return status in (401, 403)


KEY_ADVICE = "give the key that the engine was started with: --engine-key KEY"
# What helps against an error that begins with the name of a setting.
REMEDIES = {
    "tokenizer": (
        "download the model's tokenizer and give its folder: `hf download NAME tokenizer.json "
        "tokenizer_config.json --local-dir DIR`, then --tokenizer DIR"
    ),
    "chat template": "use the instruct version of the model, or name its chat template: --template FILE.jinja",
    "template": "name a readable Jinja file with --template, or leave it out",
    "dialect": "leave --dialect out, or name the chat format of this model (docs/dialects.md)",
    "engine_url": "give the URL of the engine server: --engine-url http://127.0.0.1:8000",
    "script": "name a readable JSON file with --script, or leave it out",
    "guard_url": "give the URL of the moderation API: --guard-url",
    "guard_classifier": "give the folder of the classifier: --guard-classifier (docs/guards.md)",
    "guard": "see docs/guards.md",
}


def advice_for(model: ModelSettings, error: str) -> str:
    """What helps against an error of the settings or of a model's files; no engine was asked yet."""
    usual = REMEDIES["tokenizer"] if model.engine_url else _advice(model)
    return REMEDIES.get(error.partition(":")[0], usual)


def _advice(model: ModelSettings) -> str:
    if model.engine == "embedded" and model.weights.startswith("hf:"):
        return f"download it with `segue models add {model.weights}`"
    if model.engine == "embedded" and model.weights.startswith(("ollama:", "lmstudio:")):
        return "name one of `segue models list`"
    if model.engine == "embedded" and model.weights:
        return "download the file again, or name another GGUF file: --model FILE.gguf"
    if model.engine == "embedded":
        return f"download it with `segue models add {model.name}`, or name a GGUF file: --model FILE.gguf"
    if model.engine == "scripted":
        return "check --script and --tokenizer"
    urls = " ".join(map(shown_address, model.engine_url))
    return f"start the engine, or correct its URL: --engine-url {urls}"


def try_environment(settings: Settings) -> str:
    """What a sandbox on this machine is, in words; refused with the reason where none can be made."""
    domains = allowed_domains(settings)
    process = keeper_of(settings, domains)
    try:
        process.start()
        network = f"network to {', '.join(domains)}" if domains else "no network"
        ready = process.ready
        words = f"isolation {ready.isolation}, limits by {ready.held_by}, {network}"
        return ". ".join(filter(None, (f"{process.adapter}: {words}", ready.warning)))
    finally:
        process.close()
