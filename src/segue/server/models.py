"""Which models do we serve, and what is each made of: weights, vocabulary, dialect, engine?

In: the settings. Out: `ServedModels`: the models by name, and what must be closed at the end. Choosing an
implementation is one literal dictionary here (`BUILDERS`); nothing registers itself.
"""

from __future__ import annotations

import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec import structs

from segue.dialects.choose import derived_dialect, dialect_for
from segue.dialects.descriptions import read_family
from segue.dialects.family import TokenDialect
from segue.dialects.messages import MessageForm, MessagesDialect
from segue.engines.chat import ChatEngine
from segue.engines.dynamo import DYNAMO
from segue.engines.hidden_tokens import HiddenTokens
from segue.engines.llamacpp import LLAMACPP
from segue.engines.queued import QueuedEngine, servers_of
from segue.engines.scripted import ScriptedEngine, load_script
from segue.engines.sglang import SGLANG
from segue.engines.token_engine import E, S, TokenCodec, TokenEngine, TokenJson
from segue.engines.upstream import Upstream
from segue.engines.vllm import VLLM
from segue.errors import Misconfigured
from segue.printable import shown_address
from segue.seals.cipher import RingSeals
from segue.seams.history import Owner, Turn
from segue.seams.model import Dialect, Engine, Sampling, Scene
from segue.seams.store import Turns
from segue.server.aliases import NamedModels, alias_problems
from segue.server.guards import GuardSet, OpenGate, gate_for
from segue.server.served import served_models
from segue.settings.values import EngineName, ModelSettings, Settings
from segue.turn.plan import Guards, Model
from segue.vocabularies.fast_tokenizer import hasten
from segue.vocabularies.gguf import read_gguf
from segue.vocabularies.load import load_vocabulary
from segue.vocabularies.vocabulary import Vocabulary

if TYPE_CHECKING:
    from segue.replicas.router import RoutedEngine

log = logging.getLogger(__name__)

# Of an engine that has none of its own. The vocabulary is SmolLM2's: the head of its GGUF file, without weights.
SCRIPTED_CONTEXT_TOKENS = 1_048_576
SCRIPTED_VOCABULARY = str(files("segue.vocabularies") / "smollm2.gguf")

# What of a model can change while its engine stays; where that is reached over HTTP, these too.
TUNED = frozenset(
    {
        "aliases",
        "temperature",
        "top_p",
        "output_tokens_max",
        "unseen",
        "sees_images",
        "reasoning",
        "guard",
    }
)
DISCOVERED = frozenset({"engine_discovery", "engine_discovery_s", "kubernetes_account"})
ROUTED = TUNED | DISCOVERED
ROUTED |= {"engine_url", "engine_key", "engine_parallel", "engine_drained", "context_tokens"}

Closer = Callable[[], Awaitable[None]]
# The folder of the states, how they are encrypted, the newest turns of stored chains, and where turns are found; while
# inside, states are saved, and a deleted turn is forgotten.
KeepStates = Callable[
    [Path, RingSeals, Callable[[], Iterable[Turn]], Turns],
    AbstractAsyncContextManager[Callable[[Owner, str], Awaitable[None]]],
]
# Makes a change take effect, which cannot fail; returns what closes what was removed.
Change = Callable[[], Sequence[Closer]]
# The URL of each replica that was looked up, and the host that it is a replica of.
Found = Mapping[str, str]


@dataclass(slots=True, eq=False)
class Built:
    """One model: its settings, how it is made from others with the same engine, and what closes it."""

    settings: ModelSettings
    make: Callable[[ModelSettings], Model] = field(init=False)
    closers: list[Closer] = field(default_factory=list)
    token_json: list[TokenJson] = field(default_factory=list)
    # Saves what the engine has read and restores it after a restart; None where that is not possible or not wanted.
    keep_states: KeepStates | None = None
    # Prepares the servers that other settings name, or that were looked up; None where it is not reached over HTTP.
    servers: Callable[[ModelSettings, Found | None], Change] | None = None
    # Those that were looked up last.
    found: Found = field(default_factory=dict)
    # The files that it was made from, as they were.
    files: list[tuple[int, int] | None] = field(init=False)

    def __post_init__(self) -> None:
        self.files = _file_stamps(self.settings)

    def is_fit(self, settings: ModelSettings) -> bool:
        """Whether the same engine serves a model with these settings."""
        free = TUNED if self.servers is None else ROUTED
        names = [name for name in ModelSettings.__struct_fields__ if name not in free]
        is_same = all(getattr(settings, name) == getattr(self.settings, name) for name in names)
        return is_same and self.files == _file_stamps(settings)


def _file_stamps(settings: ModelSettings) -> list[tuple[int, int] | None]:
    """When the files that a model is made from were last changed, and their size."""
    names = (settings.script, settings.template, settings.tokenizer, settings.weights)
    found = [Path(name).stat() if name and Path(name).exists() else None for name in names]
    return [None if stat is None else (stat.st_mtime_ns, stat.st_size) for stat in found]


@dataclass(slots=True)
class ServedModels:
    """The models by name and alias, and what closes them."""

    models: NamedModels = field(default_factory=NamedModels)
    # Without aliases; and the settings that are in force.
    built: dict[str, Built] = field(default_factory=dict)
    settings: dict[str, ModelSettings] = field(default_factory=dict)
    # Owners with guards of their own.
    owners: dict[Owner, Guards] = field(default_factory=dict)
    guards: GuardSet | None = None
    # What else is to change in engines that stay.
    changes: list[Change] = field(default_factory=list)
    # What the operator has ordered since the start: replicas by name, and whether each is drained.
    orders: Mapping[str, bool] = field(default_factory=dict)
    # Called when there are other engines, or other servers of an engine.
    on_change: Callable[[], None] = lambda: None

    @property
    def engines(self) -> dict[str, Engine]:
        """Those that are served now, by the name of their model, without aliases."""
        return {model.name: model.engine for model in self.models.values()}

    @property
    def open_gate(self) -> OpenGate | None:
        """How a turn with guards opens its gate; None where there are no guards."""
        return gate_for([*self.owners.values(), *(model.guards for model in self.models.values())])

    @property
    def bytes(self) -> int:
        """The size of the engines' caches."""
        return sum(cache.bytes for built in self.built.values() for cache in built.token_json)

    def closers_beside(self, other: ServedModels) -> list[Closer]:
        """What closes everything of these that the others do not have."""
        kept = other.built.values()
        removed = [built for built in self.built.values() if built not in kept]
        closers = [close for built in removed for close in built.closers]
        if self.guards is not None and self.guards is not other.guards:
            closers += self.guards.closers
        return closers

    def become(self, new: ServedModels) -> list[Closer]:
        """Serve these from now on; what closes what is no longer served."""
        closers = self.closers_beside(new)
        for change in new.changes:
            closers += change()
        self.models, self.built, self.owners, self.guards, self.settings = (
            new.models, new.built, new.owners, new.guards, new.settings,
        )  # fmt: skip
        self._changed()
        return closers

    def set_found(self, settings: ModelSettings, found: Found) -> list[Closer]:
        """These replicas of a model were looked up; what closes those that are gone."""
        prepare = self.built[settings.name].servers
        assert prepare is not None, "an engine with URLs"
        closers = list(prepare(settings, found)())
        self._changed()
        return closers

    def _changed(self) -> None:
        """Servers that are new know what was ordered before."""
        self.drain(self.orders)
        self.on_change()

    @property
    def declared(self) -> frozenset[str]:
        """The replicas that are drained by the settings."""
        return frozenset(url for model in self.settings.values() for url in model.engine_drained)

    def drain(self, orders: Mapping[str, bool]) -> None:
        """The replicas that take no new jobs are those of the orders, and of the settings where there is no order;
        those that are added later know it too."""
        self.orders = orders
        names = {name for name in {*orders, *self.declared} if orders.get(name, True)}
        for engine in self.engines.values():
            for server in servers_of(engine):
                server.set_drained(server.name in names)

    async def aclose(self) -> None:
        """Close engines and connections."""
        for close in self.closers_beside(ServedModels()):
            await close()


def build_models(
    settings: Settings, shared: str = "", running: ServedModels | None = None
) -> ServedModels:
    """Every served model under its name and its aliases.

    `shared` is the folder by way of which another process shares its embedded engines; without it they are loaded here.
    Engines and guards of `running` are used again where they fit: nothing changes there before `become`.
    """
    served, before = ServedModels(), running or ServedModels()
    guards = before.guards
    if guards is None or not guards.is_fit(settings):
        guards = GuardSet(settings)
    served.guards = guards
    wanted_models = served_models(settings)
    for problem in alias_problems(wanted_models):
        raise Misconfigured(f"models: {problem}")
    for wanted in wanted_models:
        built = before.built.get(wanted.name)
        if built is None or not built.is_fit(wanted):
            if running is not None and shared and wanted.engine == "embedded":
                raise Misconfigured(
                    f"models: the engine of '{wanted.name}' runs inside the server and cannot be added or changed "
                    "while several workers share it. Restart the server."
                )
            built = _build(wanted, shared)
        elif built.servers is not None:
            served.changes.append(built.servers(wanted, None))
        served.built[wanted.name] = built
        served.settings[wanted.name] = wanted
        model = replace(
            built.make(wanted),
            checks_rendering=settings.check_rendering,
            guards=guards.named(wanted.guard),
        )
        for name in (wanted.name, *wanted.aliases):
            served.models.add(name, model)
    served.owners = {owner: guards.named(names) for owner, names in settings.guard_owners.items()}
    if running is None:
        served.drain({})
    return served


def _build(settings: ModelSettings, shared: str) -> Built:
    builder = BUILDERS.get(settings.engine)
    if builder is None:
        raise Misconfigured(f"engine: '{settings.engine}' is not one of: {', '.join(BUILDERS)}.")
    built = Built(settings)
    built.make = builder(settings, shared, built)
    return built


# --- engines ------------------------------------------------------------------------------------------


def _scripted(settings: ModelSettings, shared: str, built: Built) -> Maker:
    path = Path(settings.tokenizer or SCRIPTED_VOCABULARY)
    dialect = _dialect(settings, path, _vocabulary(settings, path))
    script = load_script(Path(settings.script)) if settings.script else None
    engine = ScriptedEngine(dialect, script, settings.tps)
    context_tokens = settings.context_tokens or SCRIPTED_CONTEXT_TOKENS
    return lambda wanted: _model(wanted, engine, dialect, context_tokens)


def _embedded(settings: ModelSettings, shared: str, built: Built) -> Maker:
    # Imported here and below: most servers have no model inside.
    from segue_embedded.embedded import EmbeddedEngine
    from segue_embedded.memory import available_bytes, context_for, tell_memory
    from segue_embedded.shared import SharedEngine, noted_context, share_path
    from segue_embedded.states import keep_states, memory_folder
    from segue_embedded.weights import find_weights, weights_bytes

    path = find_weights(settings.weights or settings.name)
    vocabulary = _vocabulary(settings, Path(settings.tokenizer) if settings.tokenizer else path)
    dialect = _dialect(settings, path, vocabulary)
    if shared:
        share = share_path(shared, settings.name)
        remote, noted = SharedEngine(share), noted_context(share)
        return lambda wanted: _model(_with_sampling(wanted), remote, dialect, noted)
    head, size, parallel = read_gguf(path), weights_bytes(path), settings.engine_parallel
    free = available_bytes()
    context_tokens = settings.context_tokens or context_for(head, size, parallel, free)
    tell_memory(settings.name, size, head, context_tokens, parallel, free)
    memory = memory_folder() if settings.embedded_state_bytes_max else None
    engine = EmbeddedEngine(
        path, vocabulary, context_tokens=context_tokens, parallel=parallel, memory=memory
    )
    if memory is not None:
        built.keep_states = partial(keep_states, engine, memory, settings.embedded_state_bytes_max)
    built.closers.append(engine.close)
    return lambda wanted: _model(_with_sampling(wanted), engine, dialect, context_tokens)


def _with_sampling(settings: ModelSettings) -> ModelSettings:
    """No engine of its own says how a model inside this process is sampled."""
    return structs.replace(
        settings,
        temperature=1.0 if settings.temperature is None else settings.temperature,
        top_p=1.0 if settings.top_p is None else settings.top_p,
    )


@asynccontextmanager
async def shared_engines(settings: Settings, folder: str) -> AsyncIterator[None]:
    """Load the embedded engines here, and share them with other processes by way of this folder."""
    from segue_embedded.shared import note_context, noted_context, share_path, sharing

    async with AsyncExitStack() as stack:
        for wanted in served_models(settings):
            if wanted.engine == "embedded":
                path = share_path(folder, wanted.name)
                # After a restart of this process the workers still know the context of before.
                tokens = noted_context(path) or wanted.context_tokens
                built = _build(structs.replace(wanted, context_tokens=tokens), "")
                for close in built.closers:
                    stack.push_async_callback(close)
                model = built.make(wanted)
                note_context(path, model.context_tokens)
                await stack.enter_async_context(sharing(model.engine, path))
        yield


def _tokens_over_http(codec: TokenCodec[S, E]) -> Builder:
    """A builder for a kind of server that takes token ids and returns token ids."""

    def build(settings: ModelSettings, shared: str, built: Built) -> Maker:
        _check_addresses(settings)
        if not settings.tokenizer:
            raise Misconfigured(
                f"tokenizer: engine '{settings.engine}' takes token ids, so name the model's "
                "tokenizer.json, its folder, or its GGUF file. Without one: --engine chat."
            )
        path = Path(settings.tokenizer)
        vocabulary = _vocabulary(settings, path)
        token_json = TokenJson()
        built.token_json.append(token_json)
        hidden = HiddenTokens(vocabulary) if codec.hides_tokens else None

        def server(upstream: Upstream) -> Engine:
            if settings.engine == "vllm" and settings.engine_sessions == "auto":
                # Imported here: for one engine of many.
                from segue.engine_sessions.engine import SessionEngine

                return SessionEngine(upstream, settings.name, token_json)
            return TokenEngine(codec, upstream, settings.name, token_json, hidden)

        if settings.fast_tokenizer:
            vocabulary = vocabulary.hastened(hasten)
        dialect = _dialect(settings, path, vocabulary)
        servers = _Servers(settings, built, server)
        return lambda new: _model(new, servers.engine(new), dialect, new.context_tokens or None)

    return build


def _chat(settings: ModelSettings, shared: str, built: Built) -> Maker:
    _check_addresses(settings)
    dialect = MessagesDialect()

    def server(upstream: Upstream) -> ChatEngine[MessageForm]:
        return ChatEngine(upstream, settings.name, dialect, settings.template_values)

    servers = _Servers(settings, built, server)

    async def count_tokens(scene: Scene) -> int | None:
        engine = servers.first
        assert isinstance(engine, ChatEngine), "as made above"
        return await engine.count_tokens(scene)

    def make(wanted: ModelSettings) -> Model:
        model = _model(wanted, servers.engine(wanted), dialect, wanted.context_tokens or None)
        return replace(model, count_tokens=count_tokens)

    return make


def _check_addresses(settings: ModelSettings) -> None:
    if not settings.engine_url:
        raise Misconfigured(
            f"engine_url: engine '{settings.engine}' needs one or more URLs: --engine-url http://127.0.0.1:8000."
        )


# By address, key and host: the connections to a server, and the queue in front of it.
_OpenServers = dict[tuple[str, str, str], tuple[Upstream, QueuedEngine]]


class _Servers:
    """The servers of a model, one for each address and key, and the router where there may be several."""

    def __init__(
        self, settings: ModelSettings, built: Built, make: Callable[[Upstream], Engine]
    ) -> None:
        self._make = make
        self._built = built
        self._model = settings.name
        # What was looked up last: how, and where.
        self._asked: tuple[str, tuple[str, ...]] = ("off", ())
        # Those that are used, and those that were prepared last.
        self._open: _OpenServers = {}
        self._wanted: _OpenServers = {}
        self._router: RoutedEngine | None = None
        self.prepare(settings)()
        built.closers.append(self.close)
        built.servers = self.prepare

    @property
    def first(self) -> Engine:
        """One of the engines."""
        return next(iter(self._open.values()))[1].engine

    def engine(self, settings: ModelSettings) -> Engine:
        """What serves a model with these settings, for which servers were prepared: a server and its queue, or a
        router in front of several."""
        servers = [server for _, server in self._wanted.values()]
        if len(settings.engine_url) <= 1 and settings.engine_discovery == "off":
            return servers[0]
        if self._router is None:
            # Imported here: most models have one server.
            from segue.replicas.router import RoutedEngine

            self._router = RoutedEngine(servers)
        return self._router

    def prepare(self, settings: ModelSettings, found: Found | None = None) -> Change:
        """The servers that were found, or else those that these settings name; those that are there already stay."""
        _check_addresses(settings)
        asked = (settings.engine_discovery, settings.engine_url)
        if found is None:
            found = self._built.found if asked == self._asked else {}
        urls = found or dict.fromkeys(settings.engine_url, "")
        names = [(url, settings.engine_key, host) for url, host in urls.items()]
        wanted = {name: self._open.get(name) or self._opened(*name) for name in names}
        self._wanted = wanted

        def change() -> Sequence[Closer]:
            removed = [server for name, server in self._open.items() if name not in wanted]
            self._open = self._wanted = wanted
            self._asked, self._built.found = asked, found
            engine, servers = self.engine(settings), [server for _, server in wanted.values()]
            if self._router is not None:
                self._router.set_servers(servers)
            for server in servers:
                server.set_slots(settings.engine_parallel)
            for _, server in removed:
                server.remove(engine)
            return [upstream.close for upstream, _ in removed]

        return change

    def _opened(self, url: str, key: str, host: str) -> tuple[Upstream, QueuedEngine]:
        upstream = Upstream(url, key or None, host=host)
        engine = self._make(upstream)
        return upstream, QueuedEngine(shown_address(url), engine, model=self._model)

    async def close(self) -> None:
        for upstream, _ in self._open.values():
            await upstream.close()


Maker = Callable[[ModelSettings], Model]
Builder = Callable[[ModelSettings, str, Built], Maker]
# A row for each `EngineName` of the settings: tests/server/test_models.py compares the two.
BUILDERS: Mapping[EngineName, Builder] = {
    "embedded": _embedded,
    "scripted": _scripted,
    "llamacpp": _tokens_over_http(LLAMACPP),
    "vllm": _tokens_over_http(VLLM),
    "sglang": _tokens_over_http(SGLANG),
    "dynamo": _tokens_over_http(DYNAMO),
    "chat": _chat,
}


# --- weights and vocabularies ---------------------------------------------------------------------------


def _vocabulary(settings: ModelSettings, path: Path) -> Vocabulary:
    vocabulary = load_vocabulary(path)
    return vocabulary if settings.piece_cache else vocabulary.without_pieces()


def _dialect(settings: ModelSettings, path: Path, vocabulary: Vocabulary) -> Dialect:
    try:
        template = Path(settings.template).read_text() if settings.template else ""
    except (OSError, UnicodeDecodeError) as error:
        raise Misconfigured(f"template: {settings.template} cannot be read: {error}.") from None
    values = settings.template_values
    if settings.dialect.endswith(".toml"):
        written = read_family(settings.dialect)
        dialect: TokenDialect = derived_dialect(path, vocabulary, template, values, written)
    else:
        dialect = dialect_for(settings.dialect, path, vocabulary, template, values)
    for note in derived_notes(dialect):
        log.warning("model %s: %s", settings.name, note)
    if (mark := unread_call_mark(dialect)) is not None:
        log.warning("model %s: %s; %s", settings.name, UNREAD.format(mark), UNREAD_ADVICE)
    if lacks_tools(dialect) and settings.engine != "scripted":
        log.warning("model %s: %s", settings.name, NO_TOOLS)
    return dialect


UNREAD = "calls are marked with {}, which Segue does not read: they come back as text"
UNREAD_ADVICE = "use --engine chat, or name another --dialect or --template"
NO_TOOLS = (
    "its chat template has no place for tools: they are described to the model in words of Segue's own, and a model "
    "that was not trained for tools seldom calls one"
)
# To a vLLM that does not take ids alone. The figures: docs/inside/performance.md.
SCALE_OUT_ADVICE = (
    "start vLLM (0.32 or newer) with --enable-scale-out: it then takes and gives token ids without text, for a"
    " fifth of the CPU of its API server at 100k tokens"
)


def derived_notes(dialect: Dialect) -> list[str]:
    """Which parts could not be worked out from the template, and so are not read, and why."""
    derived = dialect.derived if isinstance(dialect, TokenDialect) else None
    return [f"{part}: {why}" for part, why in derived.refused.items()] if derived else []


def unread_call_mark(dialect: Dialect) -> str | None:
    """The mark of calls in the model's template that Segue cannot read, if there is one."""
    return dialect.unread if isinstance(dialect, TokenDialect) else None


def lacks_tools(dialect: Dialect) -> bool:
    """Whether the model's own chat template has no place for tools."""
    return isinstance(dialect, TokenDialect) and dialect.lacks_tools


def _model(
    settings: ModelSettings, engine: Engine, dialect: Dialect, context_tokens: int | None
) -> Model:
    if settings.sees_images and not dialect.takes_images:
        raise Misconfigured(
            f"sees_images: the chat template of '{settings.name}' has no place for images. Name another "
            "--template or --tokenizer, or leave this setting out."
        )
    return Model(
        name=settings.name,
        engine=engine,
        dialect=dialect,
        context_tokens_set=context_tokens,
        sampling=Sampling(temperature=settings.temperature, top_p=settings.top_p),
        output_tokens_max=settings.output_tokens_max,
        reasoning=settings.reasoning,
        unseen=settings.unseen,
        sees=settings.sees_images,
        created_at=int(time.time()),
    )
