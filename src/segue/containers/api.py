"""What is the Containers API at the edge? Its paths and routes; the handlers are loaded by its first request."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from segue.listener.api import Api, Route, late
from segue.listener.auth import bearer_key
from segue.listener.exchange import plain_error
from segue.listener.services import Services
from segue.sandbox.client import KeeperClient

if TYPE_CHECKING:
    from segue.containers.routes import ContainerRoutes
    from segue.sandbox.skills import Supplies

# Either tool makes containers and files in them.
SCOPE = "shell|code"


def containers_api(client: KeeperClient, supplies: Supplies) -> Api:
    """The API over the containers of a keeper."""

    def routes(services: Services) -> Sequence[Route]:
        def handlers() -> ContainerRoutes:
            from segue.containers.routes import ContainerRoutes

            return ContainerRoutes(services, client, supplies)

        to = late(handlers)
        container, files = "/v1/containers/{id}", "/v1/containers/{id}/files"
        return (
            Route("POST", "/v1/containers", to("create"), SCOPE),
            Route("GET", "/v1/containers", to("list"), SCOPE),
            Route("GET", container, to("retrieve"), SCOPE),
            Route("DELETE", container, to("delete"), SCOPE),
            Route("POST", files, to("add_file"), SCOPE),
            Route("GET", files, to("list_files"), SCOPE),
            Route("GET", files + "/{file_id}", to("retrieve_file"), SCOPE),
            Route("DELETE", files + "/{file_id}", to("delete_file"), SCOPE),
            Route("GET", files + "/{file_id}/content", to("content"), SCOPE),
        )

    return Api(
        name="containers",
        paths={"/v1/containers": ("/containers",)},
        routes=routes,
        error_answer=plain_error,
        find_secret=bearer_key,
        label="containers_",
    )
