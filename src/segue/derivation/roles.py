"""Where may a system message stand, and who may speak after whom? What templates and endpoints differ in. Pure.

In: messages as chat templates and chat endpoints take them, with `system` for instructions. Out: the same texts in an
order that this model accepts. Nothing is lost: what cannot be said as system is said as user, with words around it that
name the speaker.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from msgspec import Struct

JsonObject = dict[str, object]

# Around instructions that a model takes only from a user.
OPENING = "[Instructions of the developer, not of the user:]"
CLOSING = "[End of the instructions.]"
# Between a tool's output and a user's message, where only the model may speak.
NOTED = "Noted."


class RoleRule(Struct, frozen=True):
    """Which order of messages is accepted."""

    # Where system messages may stand.
    system: Literal["anywhere", "first", "never"] = "anywhere"
    # Whether user and model must take turns.
    alternates: bool = False
    # Whether messages without a single one of a user are refused.
    needs_user: bool = False
    # Whether what a user says after a tool's output is a new question, which changes what stands before it: thoughts
    # are forgotten, or the tools move. Then instructions that stand there are said at the end of that output.
    is_forgetful: bool = False

    @property
    def is_local(self) -> bool:
        """Whether a message never depends on those before and after it, once the conversation has begun."""
        return not (self.alternates or self.needs_user or self.is_forgetful)


def place(
    messages: Sequence[JsonObject], rule: RoleRule, *, is_beginning: bool = True
) -> list[JsonObject]:
    """The messages in an order that is accepted; `is_beginning`: none were sent before them."""
    leading = _leading(messages) if is_beginning else 0
    lead = list(messages[:leading])
    rest = messages[leading:]
    if rule.needs_user and lead and not any(message["role"] == "user" for message in rest):
        rest = [_as_user(lead.pop()), *rest]
    placed: list[JsonObject] = []
    if lead:
        text = "\n\n".join(str(message["content"]) for message in lead)
        joined: JsonObject = {"role": "system", "content": text}
        placed.append(_as_user(joined) if rule.system == "never" else joined)
    for message in rest:
        if message["role"] != "system" or rule.system == "anywhere":
            placed.append(message)
        elif rule.is_forgetful and placed and placed[-1]["role"] == "tool":
            placed[-1] = _with_instructions(placed[-1], message)
        else:
            placed.append(_as_user(message))
    return list(_alternating(placed)) if rule.alternates else placed


def _leading(messages: Sequence[JsonObject]) -> int:
    """How many system messages there are before anything else."""
    others = (n for n, message in enumerate(messages) if message["role"] != "system")
    return next(others, len(messages))


def _as_user(message: JsonObject) -> JsonObject:
    return {"role": "user", "content": _marked(message)}


def _with_instructions(output: JsonObject, message: JsonObject) -> JsonObject:
    return {**output, "content": f"{output['content']}\n\n{_marked(message)}"}


def _marked(message: JsonObject) -> str:
    return f"{OPENING}\n{message['content']}\n{CLOSING}"


def _alternating(messages: Sequence[JsonObject]) -> Iterator[JsonObject]:
    """Neighbours with one role become one message; after a tool's output the model speaks before the user does."""
    last: JsonObject | None = None
    for message in messages:
        if last is not None and last["role"] == message["role"] and _can_join(last, message):
            last = {**last, "content": _joined(last["content"], message["content"])}
            continue
        if last is not None:
            yield last
            if last["role"] == "tool" and message["role"] == "user":
                yield {"role": "assistant", "content": NOTED}
        last = message
    if last is not None:
        yield last


def _can_join(first: JsonObject, second: JsonObject) -> bool:
    return first.keys() == second.keys() == {"role", "content"}


def _joined(first: object, second: object) -> object:
    if isinstance(first, str) and isinstance(second, str):
        return f"{first}\n\n{second}"
    return [*_parts(first), *_parts(second)]


def _parts(content: object) -> list[object]:
    return content if isinstance(content, list) else [{"type": "text", "text": content}]
