"""A real llama-server for tests: the one inside the xllamacpp wheel, with SmolLM2, as a process of its own.

Run as a program it serves until its standard input ends: `llama_listener.py MODEL PORT KEY CONTEXT_TOKENS SLOTS`.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Serve, say so in one line, and end with the parent."""
    import xllamacpp

    path, port, key, context_tokens, slots = sys.argv[1:]
    params = xllamacpp.CommonParams()
    params.model.path = path
    params.n_ctx = int(context_tokens)
    params.n_parallel = int(slots)
    params.kv_unified = True
    params.fit_params = False
    params.verbosity = -1
    params.cpuparams.n_threads = 2
    params.cpuparams_batch.n_threads = 2
    params.hostnames = ["127.0.0.1"]
    params.port = int(port)
    params.api_keys = [key]
    server = xllamacpp.Server(params)
    print("ready", flush=True)
    sys.stdin.read()
    del server


if __name__ == "__main__":
    main()
