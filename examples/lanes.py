"""Many lanes on one WebSocket: requests with different `stream_id` run side by side, those with the same in order.

Needs `pip install "openai[realtime]"`.
"""

from __future__ import annotations

from server import client, model

QUESTIONS = {"fruit": "Name a fruit.", "vegetable": "Name a vegetable.", "tree": "Name a tree."}
answers = dict.fromkeys(QUESTIONS, "")
open_lanes = set(QUESTIONS)
with client.responses.connect() as connection:
    for lane, question in QUESTIONS.items():
        connection.send(
            {
                "type": "response.create",
                "stream_id": lane,
                "model": model,
                "input": question,
                "store": False,
            }
        )
    for event in connection:
        lane = getattr(event, "stream_id", None)
        if event.type == "error":
            raise SystemExit(event.error.message)
        if event.type == "response.output_text.delta":
            answers[lane] += event.delta
        if event.type in ("response.completed", "response.failed", "response.incomplete"):
            open_lanes.discard(lane)
            if not open_lanes:
                break
for lane, answer in answers.items():
    print(f"{lane}: {answer}")
