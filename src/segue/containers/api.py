"""What is the Containers API at the edge? Its paths and routes; the handlers are loaded by its first request."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING

from segue.listener.api import Api, Route
from segue.listener.auth import bearer_key
from segue.listener.exchange import Exchange, plain_error
from segue.listener.services import Services
from segue.sandbox.client import KeeperClient

if TYPE_CHECKING:
    from segue.containers.routes import ContainerRoutes
    from segue.sandbox.tool import ReadUpload

# Either tool makes containers and files in them.
SCOPE = "shell|code"


def containers_api(client: KeeperClient, read_upload: ReadUpload) -> Api:
    """The API over the containers of a keeper."""

    def routes(services: Services) -> Sequence[Route]:
        @cache
        def handlers() -> ContainerRoutes:
            from segue.containers.routes import ContainerRoutes

            return ContainerRoutes(services, client, read_upload)

        def late(name: str) -> Callable[[Exchange], Awaitable[None]]:
            async def call(exchange: Exchange) -> None:
                await getattr(handlers(), name)(exchange)

            return call

        container, files = "/v1/containers/{id}", "/v1/containers/{id}/files"
        return (
            Route("POST", "/v1/containers", late("create"), SCOPE),
            Route("GET", "/v1/containers", late("list"), SCOPE),
            Route("GET", container, late("retrieve"), SCOPE),
            Route("DELETE", container, late("delete"), SCOPE),
            Route("POST", files, late("add_file"), SCOPE),
            Route("GET", files, late("list_files"), SCOPE),
            Route("GET", files + "/{file_id}", late("retrieve_file"), SCOPE),
            Route("DELETE", files + "/{file_id}", late("delete_file"), SCOPE),
            Route("GET", files + "/{file_id}/content", late("content"), SCOPE),
        )

    return Api(
        name="containers",
        paths={"/v1/containers": ("/containers",)},
        routes=routes,
        error_answer=plain_error,
        find_secret=bearer_key,
        label="containers_",
    )
