"""Which handler answers a request, and in whose words is it refused? The table of all routes, as a value.

In: the server's own pages, the APIs that are on, those that are switched off. Out: the row of a request, or an error.
An API without one of its parts, a route that needs no key and two rows for the same requests are refused at the start.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from segue.accounts.scopes import SCOPES
from segue.errors import Misconfigured, NotFound, Refused
from segue.listener.api import Api, Route
from segue.listener.exchange import ReadHeader
from segue.listener.services import Services

# A part of a path in braces: its name, and its pattern if it has one.
PARAMETER = re.compile(r"\{(\w+)(?::([^}]*))?\}")
# How much of an unknown path an error repeats.
PATH_CHARS_MAX = 256


class Row(NamedTuple):
    """A route, and the API that it belongs to; the server's own pages belong to none."""

    route: Route
    # How its path is called in metrics and in the OpenAPI document: "/v1/responses/{id}".
    name: str
    api: Api | None


class FoundRoute(NamedTuple):
    """The row of a request, and what its path has in place of the braces."""

    row: Row
    arguments: dict[str, str]


def make_row(route: Route, api: Api | None = None) -> Row:
    """The row of a route."""
    return Row(route, PARAMETER.sub(r"{\1}", route.path), api)


def api_rows(apis: Sequence[Api], services: Services) -> list[Row]:
    """The rows of these APIs. An API that lacks a part is refused, and so is a route that would need no key."""
    rows: list[Row] = []
    for api in apis:
        for part in ("routes", "error_answer", "find_secret"):
            if not callable(getattr(api, part)):
                message = f"API '{api.name}': '{part}' is missing; it must be a function."
                raise Misconfigured(message)
        for route in api.routes(services):
            _check_scope(api, f"{route.verb} {route.path}", route.scope)
            rows.append(make_row(route, api))
        if api.upgrade is not None:
            _check_scope(api, f"the WebSocket at {api.upgrade.path}", api.upgrade.scope)
    return rows


def _check_scope(api: Api, what: str, scope: str | None) -> None:
    if scope not in SCOPES:
        known = ", ".join(SCOPES)
        raise Misconfigured(f"API '{api.name}': {what} has no scope; choose one of: {known}.")


class RouteTable:
    """All routes of a server."""

    def __init__(
        self, rows: Sequence[Row], off: Sequence[Api] = (), hints: Mapping[str, str] | None = None
    ) -> None:
        """`off`: APIs that are switched off. `hints`: a sentence for unknown paths, by how they end."""
        self._off = off
        self._hints = hints or {}
        self._apis = [*dict.fromkeys(row.api for row in rows if row.api is not None), *off]
        # The rows of each path: of a plain one by the path itself, of one with parameters in the order of the table.
        self._plain: dict[str, list[Row]] = {}
        self._patterns: dict[str, tuple[re.Pattern[str], list[Row]]] = {}
        for row in rows:
            path = row.route.path
            for spelling in [path] if row.api is None else row.api.spellings(path):
                self._add(spelling, row)

    def _add(self, path: str, row: Row) -> None:
        if PARAMETER.search(path):
            _, rows = self._patterns.setdefault(path, (_compile(path), []))
        else:
            rows = self._plain.setdefault(path, [])
        route = row.route
        for other in rows:
            if (other.route.verb, other.route.header) == (route.verb, route.header):
                names = f"{_owner(other)} and {_owner(row)}"
                raise Misconfigured(f"{route.verb} {path} is a route of both {names}.")
        rows.append(row)
        # A route for requests with a certain header goes before the one for all others.
        rows.sort(key=lambda row: not row.route.header)

    def find(self, verb: str, path: str, header: ReadHeader) -> FoundRoute:
        """The row of a request with these headers."""
        # One slash at the end makes no difference.
        trimmed = path[:-1] if path.endswith("/") and path != "/" else path
        rows, arguments = self._plain.get(trimmed, ()), {}
        # A plain path, such as /v1/responses/compact, is not an id.
        patterns = () if rows else self._patterns.values()
        for pattern, candidates in patterns:
            if match := pattern.fullmatch(trimmed):
                rows, arguments = candidates, match.groupdict()
                break
        allowed: set[str] = set()
        for row in rows:
            route = row.route
            if route.header and not header(route.header):
                continue
            if verb == route.verb or (verb == "HEAD" and route.verb == "GET"):
                return FoundRoute(row, arguments)
            allowed.add(route.verb)
        if allowed:
            message, names = f"{verb} is not allowed here.", ", ".join(sorted(allowed))
            raise Refused(message, status=405, code="method_not_allowed", allow=names)
        raise self._unknown(verb, path)

    def _unknown(self, verb: str, path: str) -> NotFound:
        message = f"Unknown request URL: {verb} {path[:PATH_CHARS_MAX]}."
        if (api := self.owner(path)) is not None and api in self._off:
            message += f" The API '{api.name}' is switched off on this server."
        for ending, hint in self._hints.items():
            message += f" {hint}" * path.endswith(ending)
        return NotFound(message, code="unknown_url")

    def owner(self, path: str) -> Api | None:
        """The API that a path belongs to, whether there is such a route or not."""
        return next((api for api in self._apis if api.owns(path)), None)


def _compile(path: str) -> re.Pattern[str]:
    pattern = ""
    start = 0
    for match in PARAMETER.finditer(path):
        pattern += re.escape(path[start : match.start()])
        pattern += f"(?P<{match[1]}>{match[2] or '[^/]+'})"
        start = match.end()
    return re.compile(pattern + re.escape(path[start:]))


def _owner(row: Row) -> str:
    return "the server's own pages" if row.api is None else f"the API '{row.api.name}'"
