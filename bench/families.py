"""What does a derived family cost beside its row of the table? `python -m bench families`.

The same answer (a thought, words and calls, as the family's template writes them) is read token by token, and a turn is
rendered on a chain of about 100,000 tokens, by the table and by derivation, in pairs. CPU time of one thread, the best
of several.
"""

from __future__ import annotations

import argparse
import json
from time import process_time

from segue.dialects.choose import derived_dialect, dialect_for
from segue.dialects.family import TokenDialect
from segue.seams.model import Ids
from segue.seams.prompt import id_array
from segue.vocabularies.load import vocabulary_from_file
from tests.models.cells import FIRST, LONG, Called, Model, Talk
from tests.models.families import BY_NAME, model_folder

FAMILIES = ("GLM-4.6", "Qwen3.5", "DeepSeek V3.1", "Kimi K2 Thinking", "MiniMax M2")
TRIES = 9
CONTEXT_CHARS = 400_000


def both(name: str) -> tuple[TokenDialect, TokenDialect]:
    folder = model_folder(name)
    values = dict(BY_NAME[name].values)
    by_table = dialect_for("template", folder, vocabulary_from_file(folder), "", values)
    return by_table, derived_dialect(folder, vocabulary_from_file(folder), "", values)


def answer(model: Model, talk: Talk) -> list[int]:
    """Some 2,000 tokens."""
    calls = [Called("search", {**LONG.arguments, "limit": n}) for n in range(8)]
    numbered = [
        {"id": f"abcdefg{n:02}", "name": call.name, "arguments": call.arguments}
        for n, call in enumerate(calls)
    ]
    said = model.judge.answer("Words of an answer. " * 20, "A thought. " * 60, numbered)
    return model.sampled(talk, said, talk._following(numbered))


def reading_s(dialect: TokenDialect, talk: Talk, ids: list[int]) -> float:
    pieces = [Ids(id_array([id])) for id in ids]
    reader = dialect.reader(talk.scene)
    begun = process_time()
    for piece in pieces:
        reader.feed(piece)
    reader.close(is_cut=False)
    return process_time() - begun


def turn_s(model: Model, dialect: TokenDialect) -> float:
    """A question after a long one: what is new is rendered on what is kept."""
    model.__dict__["dialect"] = dialect
    talk = Talk(model)
    talk.say("word " * (CONTEXT_CHARS // 5))
    talk.answer(calls=[LONG])
    talk.give("18 degrees")
    scene = talk.scene
    best = float("inf")
    for _ in range(3):
        begun = process_time()
        dialect.render(scene)
        best = min(best, process_time() - begun)
    return best


def measure(name: str) -> dict[str, object]:
    dialects = both(name)
    model = Model(BY_NAME[name])
    model.__dict__["dialect"] = dialects[0]
    talk = Talk(model)
    talk.say(FIRST)
    ids = answer(model, talk)
    best = [float("inf"), float("inf")]
    for _ in range(TRIES):
        for n, dialect in enumerate(dialects):
            best[n] = min(best[n], reading_s(dialect, talk, ids))
    turns = [turn_s(Model(BY_NAME[name]), dialect) for dialect in dialects]
    return {
        "family": name,
        "tokens": len(ids),
        "reading_ms": [round(seconds * 1000, 2) for seconds in best],
        "reading_ratio": round(best[1] / best[0], 3),
        "turn_ms": [round(seconds * 1000, 2) for seconds in turns],
        "turn_ratio": round(turns[1] / turns[0], 3),
    }


def main(arguments: list[str]) -> int:
    """Print both figures of each family, by the table first, and their ratio."""
    parser = argparse.ArgumentParser(prog="python -m bench families", description=__doc__)
    parser.add_argument("names", nargs="*", default=FAMILIES)
    for name in parser.parse_args(arguments).names:
        print(json.dumps(measure(name)), flush=True)
    return 0
