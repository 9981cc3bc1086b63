"""Do these events fit the types of the official Python client? Runs in the client's environment.

    python_types.py < EVENTS     a JSON list of events and responses

Prints a JSON list of what does not fit. The client itself reads leniently; here its types are taken at their word.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter, ValidationError

EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
RESPONSE: TypeAdapter[Any] = TypeAdapter(Response)


def problems(values: list[dict[str, Any]]) -> list[str]:
    """One line for each value that does not fit."""
    found = []
    for value in values:
        adapter = RESPONSE if value.get("object") == "response" else EVENT
        try:
            adapter.validate_python(value)
        except ValidationError as error:
            about = [(one["loc"], one["msg"]) for one in error.errors()[:3]]
            found.append(f"{value.get('type', 'response')}: {about}")
    return found


if __name__ == "__main__":
    print(json.dumps(problems(json.load(sys.stdin))))
