"""Forks: two answers to different questions, each with the same response before it. Nothing is sent twice."""

from __future__ import annotations

from server import client, model

root = client.responses.create(model=model, input="Name a fruit.")
print("root:", root.output_text)
for question in ("What colour is it?", "How does it taste?"):
    fork = client.responses.create(model=model, input=question, previous_response_id=root.id)
    before = fork.usage.input_tokens_details.cached_tokens
    print(
        f"fork: {fork.output_text} ({before} of {fork.usage.input_tokens} tokens cached by the engine)"
    )
