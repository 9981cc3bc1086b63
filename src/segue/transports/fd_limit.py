"""How many connections can this process hold open? Each takes a file descriptor, and a process may have only so many.

In: how many connections are wanted. Out: how many of them fit, after the limit was raised as far as we may. At the
limit itself the kernel would take a connection and drop it without a word; below it we can still answer with a 503.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# For plain HTTP beside the sockets, files of the store, pipes, listeners and engines.
RESERVED = 256


def fit_connections(wanted: int) -> int:
    """Raise the limit of open files towards what so many connections need; as many of them as fit."""
    # A connection whose turn runs may have another one to its engine.
    limit = _raise_limit(2 * wanted + RESERVED)
    fitting = max(1, limit - RESERVED)
    if fitting >= wanted:
        return wanted
    log.warning(
        "this process may open %d files: it takes %d connections, not connections_max = %d. Raise the limit "
        "(ulimit -n, LimitNOFILE=, nofile) for more.",
        *(limit, fitting, wanted),
    )
    return fitting


def _raise_limit(wanted: int) -> int:
    """The limit of open files, as close to this as the operator lets us."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # some kernels have a limit below the one that they tell
            return soft
        return most
    return soft
