"""Has every call its result, and every result its call, over all messages? Pure."""

from __future__ import annotations

from collections.abc import Sequence

from segue.errors import NAME_CHARS_MAX, NAMES_MAX, InvalidRequest, cut_name
from segue.messages.history import TranslatedMessage
from segue.messages.words import without_results


def check_pairs(messages: Sequence[TranslatedMessage], *, is_continued: bool = False) -> None:
    """Every call has its result in the next message, and every result its call; clients repair their history by these
    words. `is_continued`: the first results may answer calls that came before."""
    seen: set[str] = set()
    open_calls: dict[str, None] = {}
    answered: set[str] = set()
    called_at = 0
    was_model = False
    for index, message in enumerate(messages):
        is_model = message.role == "assistant"
        if is_model and not was_model:
            _check_answered(open_calls, called_at)
            answered.clear()
            is_continued = False
        was_model = is_model
        for call in message.calls:
            if call in seen:
                raise _unpaired(f"messages.{index}: `tool_use` ids must be unique", call)
            seen.add(call)
            open_calls[call] = None
            called_at = index
        for result in message.results:
            if result in answered:
                place = f"messages.{index}: each tool_use must have a single result. Found multiple"
                raise _unpaired(f"{place} `tool_result` blocks with id", result)
            if result not in open_calls and not is_continued:
                raise _unpaired(
                    f"messages.{index}: unexpected `tool_use_id` found in `tool_result` blocks",
                    f"{cut_name(result)}. Each `tool_result` block must have a corresponding "
                    "`tool_use` block in the previous message.",
                )
            open_calls.pop(result, None)
            answered.add(result)
    _check_answered(open_calls, called_at)


def _check_answered(open_calls: dict[str, None], called_at: int) -> None:
    if open_calls:
        names = [name[:NAME_CHARS_MAX] for name in [*open_calls][:NAMES_MAX]]
        message = without_results(f"messages.{called_at}", names)
        raise InvalidRequest(
            message, code="missing_function_call_output", param=f"messages.{called_at}"
        )


def _unpaired(what: str, about: str) -> InvalidRequest:
    return InvalidRequest(
        f"{what}: {about[:512]}", code="invalid_function_call_output", param="messages"
    )
