"""Did an answer come back as the model wrote it?

In: what the model wrote, and what a client has sent after the history that it was asked with. APIs and clients spell an
answer in their own way: texts joined or divided, calls after all text, arguments as parsed JSON, thoughts as text, as
our seal, or not at all. So an answer is compared by kind: all its words, all its calls in order, all its thoughts. Then
the ids stay that the model sampled. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from segue.resent.canonical import digest_of
from segue.wire.items import InputText, Item, Message, OutputText, Reasoning, Refusal
from segue.wire.kinds import is_model_written

# How much longer a call may become in another spelling: every letter escaped, every value on a line of its own.
SPELLING_FACTOR, SPELLING_BYTES = 8, 4_096


def answer_length(wrote: Sequence[Item], later: Sequence[Item]) -> int:
    """How many of the later items are this answer; 0 if they do not begin with it."""
    returned = [*takewhile(lambda item: is_model_written(item.value), later)]
    if [item.raw for item in returned] == [item.raw for item in wrote]:
        return len(returned)
    return len(returned) if returned and _is_same(wrote, returned) else 0


def _is_same(wrote: Sequence[Item], returned: Sequence[Item]) -> bool:
    if any(getattr(item.value, "status", None) == "incomplete" for item in returned):
        return False
    words = _words(returned)
    return (
        words is not None
        and words == _words(wrote)
        and _has_calls(wrote, returned)
        and _phases(returned) <= _phases(wrote)
        and _has_thoughts(wrote, returned)
    )


def _words(items: Sequence[Item]) -> str | None:
    """All that is said, apart from white space around it; None if there is more than words."""
    texts: list[str] = []
    for message in (item.value for item in items if isinstance(item.value, Message)):
        for part in [message.content] if isinstance(message.content, str) else message.content:
            match part:
                case str():
                    texts.append(part)
                case InputText(text=text) | OutputText(text=text) | Refusal(refusal=text):
                    texts.append(text)
                case _:
                    return None
    return "".join(texts).strip()


def _has_calls(wrote: Sequence[Item], returned: Sequence[Item]) -> bool:
    calls, others = (
        [item for item in items if not isinstance(item.value, Message | Reasoning)]
        for items in (wrote, returned)
    )
    return len(calls) == len(others) and all(map(_is_same_call, calls, others))


def _is_same_call(wrote: Item, returned: Item) -> bool:
    """What is so much longer is not only spelt otherwise, and need not be read."""
    is_longer = len(returned.raw) > SPELLING_FACTOR * len(wrote.raw) + SPELLING_BYTES
    return not is_longer and digest_of(wrote) == digest_of(returned)


def _phases(items: Sequence[Item]) -> set[object]:
    messages = (item.value for item in items if isinstance(item.value, Message))
    return {message.phase for message in messages if message.phase}


def _has_thoughts(wrote: Sequence[Item], returned: Sequence[Item]) -> bool:
    """Whether the thoughts came back, as text or as our seal, or none did: most clients have no place for them."""
    forms = _thoughts(returned)
    return not forms or not forms.isdisjoint(_thoughts(wrote))


def _thoughts(items: Sequence[Item]) -> set[object]:
    """The thoughts of an answer in each form that they have, white space aside."""
    thoughts = [item.value for item in items if isinstance(item.value, Reasoning)]
    texts = ["".join(part.text for part in (value.content or value.summary)) for value in thoughts]
    seals = tuple(value.encrypted_content for value in thoughts if value.encrypted_content)
    return {form for form in ("".join("".join(texts).split()), seals) if form}
