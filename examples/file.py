"""A question about a file: python examples/file.py report.pdf. PDF, text and Markdown are read by the server."""

from __future__ import annotations

import base64
import mimetypes
import sys
from pathlib import Path

from server import client, model

if len(sys.argv) < 2:
    raise SystemExit("python file.py FILE")
path = Path(sys.argv[1])
kind = mimetypes.guess_type(path.name)[0] or "text/plain"
data = base64.b64encode(path.read_bytes()).decode()
file = {"type": "input_file", "filename": path.name, "file_data": f"data:{kind};base64,{data}"}
question = {"type": "input_text", "text": "What is in this file?"}
response = client.responses.create(
    model=model, input=[{"role": "user", "content": [file, question]}]
)
print(response.output_text)
print("input tokens:", response.usage.input_tokens)
