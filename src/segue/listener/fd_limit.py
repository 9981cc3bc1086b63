"""How many connections can this process hold open? Each takes a file descriptor.

In: how many connections are wanted. Out: how many of them fit, after the limit of open files was raised as far as
possible. At the limit itself the kernel drops a connection without an answer; below it we can still answer 503.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

# For plain HTTP beside the sockets, files of the store, pipes, listeners and engines.
RESERVED = 256


def fit_connections(wanted: int) -> int:
    """Raise the limit of open files for this many connections; returns how many fit."""
    # A connection whose turn runs may have a second one, to its engine.
    limit = _raise_limit(2 * wanted + RESERVED)
    fitting = max(1, limit - RESERVED)
    if fitting >= wanted:
        return wanted
    log.warning(
        "this process may open %d files: it accepts %d connections, not connections_max = %d. Raise the limit "
        "of open files (ulimit -n, LimitNOFILE=, nofile) for more.",
        *(limit, fitting, wanted),
    )
    return fitting


def _raise_limit(wanted: int) -> int:
    """The limit of open files, raised as close to this as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return wanted
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft < most:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        except (OSError, ValueError):  # some kernels enforce a limit below the one that they report
            return soft
        return most
    return soft
