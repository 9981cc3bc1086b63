"""A response in the background: start it, poll it, and cancel another."""

from __future__ import annotations

import time

from server import client, model

response = client.responses.create(model=model, input="Name a fruit.", background=True)
print("started:", response.status)
for _ in range(600):
    if response.status not in ("queued", "in_progress"):
        break
    time.sleep(0.1)
    response = client.responses.retrieve(response.id)
print(f"{response.status}: {response.output_text}")

other = client.responses.create(model=model, input="Tell a long story.", background=True)
print("cancelled:", client.responses.cancel(other.id).status in ("cancelled", "completed"))
