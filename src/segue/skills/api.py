"""What is the Skills API at the edge? Its paths and routes; everything behind them is loaded by its first request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from segue.listener.api import Api, Route, late
from segue.listener.auth import bearer_key
from segue.listener.exchange import plain_error
from segue.listener.services import Services

if TYPE_CHECKING:
    from segue.skills.routes import SkillRoutes
    from segue.skills.shelf import Shelf

SCOPE = "skills"


def skills_api(load: Callable[[], Shelf]) -> Api:
    """The API over these skills; `load` raises an error where the operator has given them no place."""

    def routes(services: Services) -> Sequence[Route]:
        def handlers() -> SkillRoutes:
            from segue.skills.routes import SkillRoutes

            return SkillRoutes(services, load)

        to = late(handlers)
        skill, versions = "/v1/skills/{id}", "/v1/skills/{id}/versions"
        version = versions + "/{version}"
        return (
            Route("POST", "/v1/skills", to("create"), SCOPE),
            Route("GET", "/v1/skills", to("list"), SCOPE),
            Route("GET", skill, to("retrieve"), SCOPE),
            Route("POST", skill, to("update"), SCOPE),
            Route("DELETE", skill, to("delete"), SCOPE),
            Route("GET", skill + "/content", to("content"), SCOPE),
            Route("POST", versions, to("create_version"), SCOPE),
            Route("GET", versions, to("list_versions"), SCOPE),
            Route("GET", version, to("retrieve_version"), SCOPE),
            Route("DELETE", version, to("delete_version"), SCOPE),
            Route("GET", version + "/content", to("version_content"), SCOPE),
        )

    return Api(
        name="skills",
        paths={"/v1/skills": ("/skills",)},
        routes=routes,
        error_answer=plain_error,
        find_secret=bearer_key,
        label="skills_",
    )
