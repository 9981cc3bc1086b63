"""The sentences that clients act on: the same for all engines' words of an overflow."""

from __future__ import annotations

import re

import pytest

from segue.errors import InvalidRequest, context_overflow
from segue.messages.words import words_of

# The pattern by which Claude Code knows that it has to compact.
ACTED_ON = re.compile(r"^prompt is too long: \d+ tokens > \d+ maximum$")


def overflow(message: str) -> InvalidRequest:
    return InvalidRequest(message, code="context_length_exceeded")


@pytest.mark.parametrize(
    "message",
    [
        context_overflow(210_000, 131_072).message,
        "This model's maximum context length is 131072 tokens. However, you requested 210000 tokens "
        "(208000 in the messages, 2000 in the completion). Please reduce the length of the messages.",
        "This model's maximum context length is 131072 tokens. However, your request has 210000 input tokens.",
        "The input (210000 tokens) is longer than the model's context length (131072 tokens).",
        "Requested token count exceeds the model's maximum context length of 131072 tokens. "
        "You requested a total of 210000 tokens: 209000 from the input and 1000 for the completion.",
    ],
)
def test_overflow_says_both_numbers(message: str) -> None:
    words = words_of(overflow(message))
    assert ACTED_ON.match(words), words
    assert words == "prompt is too long: 210000 tokens > 131072 maximum"


def test_overflow_without_numbers_keeps_the_words_of_the_engine() -> None:
    said = "the request exceeds the available context size, try increasing it"
    assert words_of(overflow(said)) == f"prompt is too long: {said}"


def test_other_errors_are_said_as_they_are() -> None:
    assert words_of(InvalidRequest("No.")) == "No."


def test_error_names_the_field_that_the_client_has_sent() -> None:
    error = InvalidRequest("Missing required parameter: 'input'.", param="input")
    assert words_of(error) == "Missing required parameter: 'messages'."
    error = InvalidRequest("Invalid value for 'input[3].content': no.", param="input[3].content")
    assert words_of(error) == "Invalid value for 'messages': no."
    # A name of the client's stays as it is.
    error = InvalidRequest("No tool 'input' in 'tools'.", param="tools")
    assert words_of(error) == "No tool 'input' in 'tools'."


def test_call_of_a_thread_that_is_left_open_is_named_as_the_client_knows_it() -> None:
    error = InvalidRequest(
        "No tool output found for function call call_12ab.", code="missing_function_call_output"
    )
    assert "immediately after: toolu_12ab." in words_of(error)
