#!/usr/bin/env bash
# Two turns on one socket with websocat, by hand: every line that goes in is a frame, every line that comes out an event.
#
#     bash examples/websocat.sh
#
# OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. Nothing is stored: the socket remembers.
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}
model=${EXAMPLE_MODEL:-$(curl -sf "$url/models" | grep -o '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4)}

coproc SOCKET { websocat "ws${url#http}/responses"; }
trap 'kill "$SOCKET_PID" 2>/dev/null || true' EXIT

# Sends a frame, shows every event up to the last one of the turn, and keeps the response's id.
turn() {
  echo "{\"type\": \"response.create\", \"model\": \"$model\", \"store\": false, $1}" >&"${SOCKET[1]}"
  local event
  while IFS= read -r -t 120 event <&"${SOCKET[0]}"; do
    echo "$event"
    case $event in
      *'"type":"response.completed"'*)
        parent=$(grep -o '"id":"resp_[^"]*"' <<<"$event" | head -n 1 | cut -d '"' -f 4)
        return 0 ;;
      *'"type":"response.failed"'* | *'"type":"response.incomplete"'* | *'"type":"error"'*) return 1 ;;
    esac
  done
  echo "the socket ended before the response" >&2
  return 1
}

turn '"input": "Name a fruit."'
turn "\"previous_response_id\": \"$parent\", \"input\": \"And a vegetable.\""
