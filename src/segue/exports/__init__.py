"""How do access lines, audit lines and traces leave the server? Each is loaded where the operator asks for it."""
