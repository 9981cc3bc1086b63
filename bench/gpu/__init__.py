"""The agent loop in front of a real vLLM on a GPU: README.md says how."""
