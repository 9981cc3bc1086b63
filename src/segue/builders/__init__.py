"""How is each part of a server built from the settings? Every builder returns a value; `app.py` wires them together."""
