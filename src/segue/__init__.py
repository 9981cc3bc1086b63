"""Segue: a Responses API server for people who run their own models."""

__version__ = "0.4.0.dev0"
