"""Which handler answers a request, and in whose words is it refused? The table of all routes, as a value.

In: the server's own pages, the APIs that are on, those that are switched off. Out: the route of a request, or an error.
An API that lacks a part, a route that needs no key and two routes for the same requests are refused at the start.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace

from segue.accounts.scopes import SCOPES
from segue.errors import Misconfigured, NotFound, Refused
from segue.listener.api import PARAMETER, Api, Route
from segue.listener.exchange import ReadHeader
from segue.listener.services import Services

# How much of an unknown path an error repeats.
PATH_CHARS_MAX = 256


def routes_of(apis: Sequence[Api], services: Services) -> list[Route]:
    """The routes of these APIs. An API that lacks a part is refused, and so is a route that would need no key."""
    routes: list[Route] = []
    for api in apis:
        for part in ("routes", "error_answer", "find_secret"):
            if not callable(getattr(api, part)):
                message = f"API '{api.name}': '{part}' is missing; it must be a function."
                raise Misconfigured(message)
        for route in api.routes(services):
            _check_scope(api, f"{route.verb} {route.path}", route.scope)
            routes.append(replace(route, api=api))
        if api.upgrade is not None:
            _check_scope(api, f"the WebSocket at {api.upgrade.path}", api.upgrade.scope)
    return routes


def _check_scope(api: Api, what: str, scope: str | None) -> None:
    if scope is None or not {*scope.split("|")} <= {*SCOPES}:
        known = ", ".join(SCOPES)
        raise Misconfigured(f"API '{api.name}': {what} has no scope; choose one of: {known}.")


class RouteTable:
    """All routes of a server."""

    def __init__(self, routes: Sequence[Route], off: Sequence[Api] = ()) -> None:
        """`off`: APIs that are switched off."""
        self.routes = routes
        self._off = off
        self._apis = [*dict.fromkeys(route.api for route in routes if route.api), *off]
        # The routes of each path: a plain one by itself, those with parameters in the order of the table.
        self._plain: dict[str, list[Route]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], list[Route]]] = {}
        for route in routes:
            for path in route.spellings:
                self._add(path, route)

    def _add(self, path: str, route: Route) -> None:
        if PARAMETER.search(path):
            _, routes = self._patterns.setdefault(path, (_compile(path), []))
        else:
            routes = self._plain.setdefault(path, [])
        for other in routes:
            if (other.verb, other.header) == (route.verb, route.header):
                names = f"{_owner(other)} and {_owner(route)}"
                raise Misconfigured(f"{route.verb} {path} is a route of both {names}.")
        routes.append(route)
        # A route for requests with a certain header goes before the one for all others.
        routes.sort(key=lambda route: not route.header)

    def find(self, verb: str, path: str, header: ReadHeader) -> tuple[Route, dict[str, str]]:
        """The route of a request, and what its path has in place of the braces."""
        # One slash at the end makes no difference.
        trimmed = path[:-1] if path.endswith("/") and path != "/" else path
        for routes, arguments in self._matches(trimmed):
            fitting = [route for route in routes if not route.header or header(route.header)]
            for route in fitting:
                if verb == route.verb or (verb == "HEAD" and route.verb == "GET"):
                    return route, arguments
            if fitting:
                message = f"The method {verb} is not allowed for this URL."
                allowed = ", ".join(sorted({route.verb for route in fitting}))
                raise Refused(message, status=405, code="method_not_allowed", allow=allowed)
        raise unknown_url(verb, path, self._off)

    def _matches(self, path: str) -> Iterator[tuple[list[Route], dict[str, str]]]:
        """The routes of each path of the table that this one fits, and what it has in place of the braces."""
        if path in self._plain:
            # A plain path, such as /v1/responses/compact, is not an id.
            yield self._plain[path], {}
            return
        for pattern, routes in self._patterns.values():
            if match := pattern.fullmatch(path):
                yield routes, match.groupdict()

    def owner(self, path: str) -> Api | None:
        """The API that a path belongs to, whether there is such a route or not."""
        return next((api for api in self._apis if api.owns(path)), None)


def unknown_url(verb: str, path: str, off: Sequence[Api]) -> NotFound:
    """The error of a path that has no route, with the reason if it belongs to an API that is switched off."""
    message = f"Unknown request URL: {verb} {path[:PATH_CHARS_MAX]}."
    for api in off:
        if api.owns(path):
            message += (
                f" The API '{api.name}' is switched off: --apis of this server does not name it."
            )
    return NotFound(message, code="unknown_url")


def _compile(path: str) -> re.Pattern[str]:
    pattern = ""
    start = 0
    for match in PARAMETER.finditer(path):
        pattern += re.escape(path[start : match.start()])
        pattern += f"(?P<{match[1]}>{match[2] or '[^/]+'})"
        start = match.end()
    return re.compile(pattern + re.escape(path[start:]))


def _owner(route: Route) -> str:
    return "the server's own pages" if route.api is None else f"the API '{route.api.name}'"
