"""A conversation that the server keeps: two questions, its items, and its end."""

from __future__ import annotations

from server import client, model

conversation = client.conversations.create(metadata={"topic": "fruit"})
for question in ("Name a fruit.", "And a vegetable."):
    response = client.responses.create(model=model, input=question, conversation=conversation.id)
    print(response.output_text)
items = client.conversations.items.list(conversation.id, order="asc")
print("items:", *(item.type for item in items))
client.conversations.delete(conversation.id)
