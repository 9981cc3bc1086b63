#!/usr/bin/env bash
# Two turns with curl: an answer as JSON, then a continuation as a stream of events.
#
#     bash examples/curl.sh
#
# OPENAI_BASE_URL is the URL of the server, EXAMPLE_MODEL names a model. The second request sends only the new items.
set -euo pipefail
url=${OPENAI_BASE_URL:-http://127.0.0.1:8080/v1}
model=${EXAMPLE_MODEL:-$(curl -sf "$url/models" | grep -o '"id":"[^"]*"' | head -n 1 | cut -d '"' -f 4)}

answer=$(curl -sf "$url/responses" -d "{\"model\": \"$model\", \"input\": \"Name a fruit.\"}")
echo "$answer"

parent=$(grep -o '"id":"resp_[^"]*"' <<<"$answer" | head -n 1 | cut -d '"' -f 4)
curl -sfN "$url/responses" -d "{\"model\": \"$model\", \"previous_response_id\": \"$parent\", \
\"input\": \"And a vegetable.\", \"stream\": true}"
