"""What is the Files API at the edge? Its paths and routes; everything behind them is loaded by its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from segue.listener.api import Api, Route, late
from segue.listener.auth import bearer_key
from segue.listener.exchange import plain_error
from segue.listener.services import Services

if TYPE_CHECKING:
    from segue.files.depot import Depot
    from segue.files.routes import FileRoutes

# Every key of the API may use files.
SCOPE = "responses"


def files_api(load: Callable[[], Depot]) -> Api:
    """The API over this depot; `load` raises an error where the operator has given it no place."""

    def routes(services: Services) -> Sequence[Route]:
        def handlers() -> FileRoutes:
            from segue.files.routes import FileRoutes

            return FileRoutes(services, load)

        to = late(handlers)
        file = "/v1/files/{id}"
        return (
            Route("POST", "/v1/files", to("upload"), SCOPE),
            Route("GET", "/v1/files", to("list"), SCOPE),
            Route("GET", file, to("retrieve"), SCOPE),
            Route("DELETE", file, to("delete"), SCOPE),
            Route("GET", file + "/content", to("content"), SCOPE),
        )

    return Api(
        name="files",
        paths={"/v1/files": ("/files",)},
        routes=routes,
        error_answer=plain_error,
        find_secret=bearer_key,
        label="files_",
    )
