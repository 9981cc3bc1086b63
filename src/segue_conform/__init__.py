"""Does a server speak the Responses API, Messages and Chat Completions as their clients expect?

A suite that knows a server only by its URL. It installs without Segue (`segue-conform`) and imports nothing of it.
"""
