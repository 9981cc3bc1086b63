"""Which words of an error do clients of this API act on? Pure.

They compact their history where a prompt is too long, and repair it where a call has no result
(docs/apis/messages.md); so these sentences are the API's own, to the letter.
"""

from __future__ import annotations

import re

from segue.errors import ApiError

# How engines and we ourselves say that a prompt is too long: the first number is what was sent, or what fits.
_SENT_FIRST = re.compile(
    r"(\d{1,12}) (?:input |prompt )?tokens\b.{0,80}?(?:at most|>|maximum|limit|size|window|length)\D{0,40}(\d{1,12})",
    re.IGNORECASE | re.DOTALL,
)
_LIMIT_FIRST = re.compile(
    r"(?:maximum|context (?:length|size|window)|limit)\D{0,40}(\d{1,12}) tokens"
    r".{0,80}?(?:requested|has|have|contains?|resulted in|passed|prompt)\D{0,40}(\d{1,12})",
    re.IGNORECASE | re.DOTALL,
)
# Fields of a turn, by the names that they have in this API.
FIELD_NAMES = {
    "input": "messages",
    "max_output_tokens": "max_tokens",
    "text.format.schema": "output_config.format.schema",
    "text.format": "output_config.format",
}
_CALL_ID = re.compile(r"call_(\w{1,64})\.?\Z")


def words_of(error: ApiError) -> str:
    """What the error says, in the words that clients of this API know."""
    match error.code:
        case "context_length_exceeded":
            return _too_long(error.message)
        case "missing_function_call_output" if found := _CALL_ID.search(error.message):
            return without_results("messages.0", [f"toolu_{found[1]}"])
        case _:
            return _with_their_field(error)


def _with_their_field(error: ApiError) -> str:
    """The message, with the name that its field has in this API; items of the turn are no places of the client's."""
    ours = error.param or ""
    theirs = FIELD_NAMES.get("input" if ours.startswith("input[") else ours, ours)
    return error.message.replace(f"'{ours}'", f"'{theirs}'")


def _too_long(message: str) -> str:
    """`prompt is too long: N tokens > M maximum`, as far as both numbers are known; else the engine's own words."""
    if found := _LIMIT_FIRST.search(message):
        return f"prompt is too long: {found[2]} tokens > {found[1]} maximum"
    if found := _SENT_FIRST.search(message):
        return f"prompt is too long: {found[1]} tokens > {found[2]} maximum"
    return f"prompt is too long: {message}"


def without_results(place: str, ids: list[str]) -> str:
    """Calls were left open."""
    return (
        f"{place}: `tool_use` ids were found without `tool_result` blocks immediately after: {', '.join(ids)}. "
        "Each `tool_use` block must have a corresponding `tool_result` block in the next message."
    )
