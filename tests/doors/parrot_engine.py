"""A made-up engine: it says again what the user has said. One file, and one row in the dictionary of engines."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import replace

from segue.seams.model import Dialect, EngineFacts, Finish, Ids, Job, JobStarted, Piece
from segue.server.models import BUILDERS, Built, Maker
from segue.settings.values import EngineName, ModelSettings
from segue.turn.plan import Model
from segue.wire.codec import as_item
from segue.wire.items import InputText, Message, OutputText


class ParrotEngine:
    """Writes the last message of the user in the model's own dialect, a token at a time."""

    can_constrain = False
    grammars: frozenset[str] = frozenset()
    facts = EngineFacts(context_tokens=2_048, models=("parrot",))

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    async def is_ready(self) -> bool:
        """It always is."""
        return True

    async def sample(self, job: Job) -> AsyncGenerator[Piece, None]:
        """The words of the user, in the ids that the model would have sampled for them."""
        yield JobStarted(cached_tokens=0)
        said = OutputText(text=_last_words(job))
        for id in self._dialect.write([as_item(Message(role="assistant", content=[said]))]):
            yield Ids([id])
        yield Finish("stop")


def _last_words(job: Job) -> str:
    messages = [item.value for item in job.scene.given if isinstance(item.value, Message)]
    content = messages[-1].content
    if isinstance(content, str):
        return content
    return "".join(part.text for part in content if isinstance(part, InputText))


# The row that a made-up engine takes: tests cannot add a name to the settings (`EngineName`).
ROW: EngineName = "scripted"
_scripted = BUILDERS[ROW]


def parrot(settings: ModelSettings, shared: str, built: Built) -> Maker:
    """The row: a model with the vocabulary and dialect of the scripted one, and this engine."""
    make = _scripted(settings, shared, built)

    def make_parrot(settings: ModelSettings) -> Model:
        model = make(settings)
        return replace(model, engine=ParrotEngine(model.dialect), context_tokens_set=None)

    return make_parrot
