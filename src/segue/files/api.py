"""What is the Files API at the edge? Its paths and routes; everything behind them is loaded by its first request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from segue.listener.api import Api, Route
from segue.listener.auth import bearer_key
from segue.listener.exchange import Exchange, plain_error
from segue.listener.services import Services

if TYPE_CHECKING:
    from segue.files.depot import Depot
    from segue.files.routes import FileRoutes

# Every key of the API may use files.
SCOPE = "responses"


def files_api(load: Callable[[], Depot]) -> Api:
    """The API over this depot; `load` raises an error where the operator has given it no place."""

    def routes(services: Services) -> Sequence[Route]:
        @cache
        def handlers() -> FileRoutes:
            from segue.files.routes import FileRoutes

            return FileRoutes(services, load)

        def late(name: str) -> Callable[[Exchange], Awaitable[None]]:
            async def call(exchange: Exchange) -> None:
                await getattr(handlers(), name)(exchange)

            return call

        file = "/v1/files/{id}"
        return (
            Route("POST", "/v1/files", late("upload"), SCOPE),
            Route("GET", "/v1/files", late("list"), SCOPE),
            Route("GET", file, late("retrieve"), SCOPE),
            Route("DELETE", file, late("delete"), SCOPE),
            Route("GET", file + "/content", late("content"), SCOPE),
        )

    return Api(
        name="files",
        paths={"/v1/files": ("/files",)},
        routes=routes,
        error_answer=plain_error,
        find_secret=bearer_key,
        label="files_",
    )
