"""Steer a long answer while it is written, over WebSocket with the official SDK.

    python steer.py

The first answer is steered after a few words; the server ends it at a sentence and continues with a successor that has
the new input. Needs `pip install "openai[realtime]"`.
"""

from __future__ import annotations

import argparse

from server import client, model


def main() -> int:
    """Ask, steer, and listen to the end of the successor."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--ask", default="Tell me a very long story of a river and its town.")
    parser.add_argument("--steer", default="Stop the story. Say in one sentence how it ends.")
    parser.add_argument("--after", type=int, default=30, help="pieces of text before the steer")
    options = parser.parse_args()
    heard, ended, target = 0, [], ""
    with client.responses.connect() as connection:
        connection.response.create(
            model=model, input=options.ask, max_output_tokens=1_000, store=False
        )
        for event in connection:
            match event.type:
                case "response.created":
                    target = event.response.id
                    print(f"[{target} of {event.response.previous_response_id}]")
                case "response.output_text.delta":
                    print(event.delta, end="", flush=True)
                    heard += 1
                    if heard == options.after:
                        connection.response.steer(previous_response_id=target, input=options.steer)
                case "response.steer.accepted" | "response.steer.failed":
                    print(f"\n[{event.type}] ", end="")
                case "response.completed" | "response.incomplete" | "response.failed":
                    reason = event.response.incomplete_details
                    ended.append(event.response.status)
                    print(f"\n[{event.response.status}{f': {reason.reason}' if reason else ''}]")
                    if len(ended) == 2 or (len(ended) == 1 and heard < options.after):
                        break
                case "error":
                    print(f"[{event.error.message}]")
                    break
                case _:
                    pass
    return 0 if len(ended) == 2 else 1


if __name__ == "__main__":
    raise SystemExit(main())
