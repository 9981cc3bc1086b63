"""Runs in the clients' own environment: skills and lists of containers by the OpenAI SDK, sync and async.

Arguments: the base URL and the model. Prints one JSON object with what came of it.
"""

from __future__ import annotations

import asyncio
import json
import sys

from openai import AsyncOpenAI, NotFoundError, OpenAI

FRONT = b"---\nname: csv-insights\ndescription: Sums.\n---\n"
FILES = [("csv/SKILL.md", FRONT + b"Read."), ("csv/a.txt", b"a")]


def in_step(client: OpenAI, model: str) -> dict[str, object]:
    """A skill with two versions, used by a shell and by a container, and deleted."""
    skill = client.skills.create(files=FILES)
    second = client.skills.versions.create(
        skill.id, files=[("csv/SKILL.md", FRONT + b"Second.")], default=True
    )
    place = {
        "type": "container_auto",
        "skills": [{"type": "skill_reference", "skill_id": skill.id, "version": 1}],
    }
    response = client.responses.create(
        model=model, input="Go", tools=[{"type": "shell", "environment": place}]
    )
    made = [client.containers.create(name=name, skills=place["skills"]).id for name in ("a", "b")]
    content = client.skills.content.retrieve(skill.id).read()
    found = {
        "versions": [each.version for each in client.skills.versions.list(skill.id, limit=1)],
        "default": client.skills.retrieve(skill.id).default_version,
        "chosen": client.skills.update(skill.id, default_version="1").default_version,
        "listed": [each.id for each in client.skills.list(limit=1)] == [skill.id],
        "zip": content[:2].decode(),
        "output": response.output[1].output[0].stdout,
        # Page by page.
        "pages": len([*client.containers.list(limit=1)]),
        "oldest": [each.id for each in client.containers.list(order="asc", limit=1)][1:] == made,
        "named": [each.id for each in client.containers.list(name="b")] == made[1:],
        "gone": client.skills.versions.delete(second.version, skill_id=skill.id).deleted,
        "deleted": client.skills.delete(skill.id).object,
    }
    try:
        client.skills.retrieve(skill.id)
    except NotFoundError as error:
        found["missing"] = error.code
    return found


async def beside(base_url: str) -> dict[str, object]:
    """The same lists by the other client, and the files of a container."""
    async with AsyncOpenAI(base_url=base_url, api_key="none") as client:
        skill = await client.skills.create(files=FILES)
        made = await client.containers.create(name="c")
        for name in ("1", "2", "3"):
            await client.containers.files.create(made.id, file=(name, b"words"))
        files = [each async for each in client.containers.files.list(made.id, limit=2)]
        content = await client.containers.files.content.retrieve(files[0].id, container_id=made.id)
        return {
            "skills": [each.id async for each in client.skills.list()] == [skill.id],
            "files": sorted(each.path for each in files),
            "content": content.read().decode(),
        }


def main() -> None:
    base_url, model = sys.argv[1:3]
    with OpenAI(base_url=base_url, api_key="none") as client:
        found = {"sync": in_step(client, model), "async": asyncio.run(beside(base_url))}
    print(json.dumps(found))


if __name__ == "__main__":
    main()
