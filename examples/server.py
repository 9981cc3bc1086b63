"""The client and the model of the examples, from OPENAI_BASE_URL, OPENAI_API_KEY and EXAMPLE_MODEL."""

from __future__ import annotations

import os

from openai import OpenAI

client = OpenAI(
    base_url=os.environ.get("OPENAI_BASE_URL", "http://127.0.0.1:8080/v1"),
    api_key=os.environ.get("SEGUE_KEY") or os.environ.get("OPENAI_API_KEY", "none"),
)
model = os.environ.get("EXAMPLE_MODEL") or client.models.list().data[0].id
