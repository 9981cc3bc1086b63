"""How is the grammar of a custom tool put to an engine?

llama.cpp has it from llguidance, where it was built with it: a grammar that begins with `%llguidance` is Lark, in the
dialect that OpenAI's own documentation describes. A regular expression is one terminal of it. A grammar that cannot be
read is dropped there without a word, so that an engine must be probed before it is believed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

from segue.errors import InvalidRequest
from segue.turn.values import Grammar, Job, Tokens

GUIDANCE = "%llguidance"
# What may not stand in a terminal as it is. A backslash keeps what follows it.
IN_REGEX = re.compile(r"(\\.)|([/\n\r])", re.DOTALL)
ESCAPES = {"/": r"\/", "\n": r"\n", "\r": r"\r"}
LLGUIDANCE = frozenset({"lark", "regex"})


def guidance(grammar: Grammar) -> str:
    """The grammar for llama.cpp."""
    definition = grammar.definition
    if grammar.syntax == "regex":
        escaped = IN_REGEX.sub(lambda found: found[1] or ESCAPES[found[2]], definition)
        return f"{GUIDANCE} {{}}\nstart: /{escaped}/\n"
    return definition if definition.startswith(GUIDANCE) else f"{GUIDANCE} {{}}\n{definition}\n"


def forbidden_id(job: Job, bytes_of: Callable[[int], bytes]) -> int | None:
    """A token that no grammar allows: a special one that ends nothing. The prompt has one, as a rule."""
    assert isinstance(job.prompt, Tokens)
    for chunk in job.prompt.chunks():
        for id in chunk:
            if id not in job.stops and not bytes_of(id):
                return id
    return None


def unreadable(grammar: Grammar) -> InvalidRequest:
    """The refusal of a grammar that the engine cannot read."""
    return InvalidRequest(
        f"The engine cannot read the {grammar.syntax} grammar of this tool, or supports it only in part.",
        code="unsupported_grammar",
        param="tools",
    )
