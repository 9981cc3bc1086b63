"""Do OpenAI's own examples of shells, skills and the code interpreter run against this server, unchanged?

`make test-official-examples`. The Python examples come out of the source archive of the Agents SDK that the clients'
environment has; those in TypeScript are in no package, so SEGUE_TEST_AGENTS_JS names a checkout of their repository
(SEGUE_TEST_AGENTS_PYTHON does the same for Python). What is not there is said and not run. Each example gets a
server of its own with real sandboxes and a scripted engine, whose model has the name that the example asks for; the
requests of the guides are made with curl. Prints a line for each, and fails if one of them fails.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from tests.clients.agents import NPM_AGENTS
from tests.clients.outside import NODE, PYTHON, ROOT
from tests.support import ServedProcess, served_process

S_MAX = 120
TYPESCRIPT = ROOT / ".cache" / "npm" / "node_modules" / "typescript"
MODELS = ("gpt-5.6-sol", "gpt-5.4", "gpt-5.4-mini", "gpt-4.1")
DONE = {"text": "Done: [orders.csv](sandbox:/mnt/data/orders.csv)."}
WORK = (
    "cat /home/user/skills/*/SKILL.md | head -3",
    "printf 'id,region,amount,status\\n1,north,5,ok\\n' > /mnt/data/orders.csv; ls -la /mnt/data",
)
SHELL = [{"calls": [{"name": "shell", "arguments": {"commands": WORK}}]}, DONE]
CODE = [
    {"calls": [{"name": "python", "arguments": {"code": "(273 * 312821 + 1782) ** 0.5"}}]},
    DONE,
]


class Example(NamedTuple):
    """A file, what the model does in it, and what it must print."""

    name: str
    turns: list[Any]
    prints: str
    needs_skill: bool = False


PYTHON_EXAMPLES = (
    Example("container_shell_inline_skill.py", SHELL, "Agent (container reuse): Done"),
    Example("container_shell_skill_reference.py", SHELL, "Agent (container reuse): Done", True),
    Example("code_interpreter.py", CODE, "Final output: Done"),
)
JS_EXAMPLES = (
    Example("container-shell-inline-skill.ts", SHELL, "Agent (container reuse): Done"),
    Example("container-shell-skill-ref.ts", SHELL, "Agent (container reuse): Done", True),
    Example("code-interpreter.ts", CODE, "Final output: Done"),
)


@contextmanager
def serving(turns: list[Any], folder: Path) -> Iterator[ServedProcess]:
    """A server whose models all play these turns."""
    script = folder / "script.json"
    script.write_text(json.dumps({"turns": turns}))
    flags = ["--engine", "scripted", "--script", str(script), "--environment", "bwrap"]
    flags += ["--store", f"sqlite:///{folder}/turns.db"]
    for model in MODELS:
        flags += ["--model", model]
    with served_process(*flags, cwd=folder) as served:
        yield served


# --- where the examples are ---------------------------------------------------------------------------


def python_source(folder: Path) -> Path | str:
    """The folder of the Python examples, or why there is none."""
    if named := os.environ.get("SEGUE_TEST_AGENTS_PYTHON"):
        return Path(named)
    asked = "import importlib.metadata as m; print(m.version('openai-agents'))"
    version = subprocess.run([PYTHON, "-c", asked], capture_output=True, text=True, check=True)
    wanted = f"openai-agents=={version.stdout.strip()}"
    command = [PYTHON, "-m", "pip", "download", "--no-deps", "--no-binary", "openai-agents"]
    got = subprocess.run(
        [*command, "-d", folder, wanted], capture_output=True, text=True, check=False
    )
    archives = [*folder.glob("openai_agents-*.tar.gz")]
    if not archives:
        return f"the source archive of {wanted} cannot be had: {got.stderr.strip()[-300:]}"
    with tarfile.open(archives[0]) as archive:
        archive.extractall(folder, filter="data")
    return archives[0].with_name(archives[0].name.removesuffix(".tar.gz"))


def js_source(folder: Path) -> Path | str:
    """The folder of the examples in TypeScript with their packages beside it, or why there is none."""
    named = os.environ.get("SEGUE_TEST_AGENTS_JS")
    if not named:
        return "they are in no package: SEGUE_TEST_AGENTS_JS names a checkout of openai-agents-js"
    if not NPM_AGENTS.is_dir() or not TYPESCRIPT.is_dir():
        return "the JavaScript clients are not installed: run `make test-setup`"
    copied = folder / "js"
    shutil.copytree(Path(named, "examples", "tools"), copied / "examples" / "tools")
    (copied / "package.json").write_text('{"type": "module"}')
    (copied / "node_modules").symlink_to(NPM_AGENTS)
    # As every runner of TypeScript does first: without its types, which are not checked.
    flags = ["--noCheck", "--skipLibCheck", "--module", "esnext", "--target", "esnext"]
    places = [str(copied / "examples" / "tools" / example.name) for example in JS_EXAMPLES]
    command = [str(NODE), str(TYPESCRIPT / "bin" / "tsc"), *flags, *places]
    done = subprocess.run(
        command, cwd=copied, capture_output=True, text=True, timeout=S_MAX, check=False
    )
    if not Path(places[0]).with_suffix(".js").is_file():
        return f"they cannot be compiled: {done.stdout[-500:]}"
    return copied


# --- running them -------------------------------------------------------------------------------------


def environment_for(served: ServedProcess) -> dict[str, str]:
    return {
        **{key: os.environ[key] for key in ("PATH", "HOME") if key in os.environ},
        "OPENAI_BASE_URL": f"http://127.0.0.1:{served.port}/v1",
        "OPENAI_API_KEY": "none",
        "OPENAI_AGENTS_DISABLE_TRACING": "1",
        "OPENAI_DEFAULT_MODEL": MODELS[0],
    }


def skill_of(source: Path, served: ServedProcess) -> str | None:
    """The id of the examples' skill, put on the server; None where it keeps no skills."""
    skill = source / "examples" / "tools" / "skills" / "csv-workbench"
    packed = shutil.make_archive(str(source / "packed"), "zip", skill.parent, skill.name)
    made = curl(served, "/skills", "-F", f"files=@{packed};type=application/zip")
    found: str | None = made.get("id")
    return found


def run_example(example: Example, source: Path, program: str) -> str:
    """What came of it: nothing, or what is wrong."""
    with tempfile.TemporaryDirectory() as name, serving(example.turns, Path(name)) as served:
        env = environment_for(served)
        if example.needs_skill:
            skill = skill_of(source, served)
            if skill is None:
                return "not run: this server has no Skills API"
            env |= {"OPENAI_SHELL_SKILL_ID": skill, "OPENAI_SHELL_SKILL_VERSION": "1"}
        place = source / "examples" / "tools" / example.name.replace(".ts", ".js")
        done = subprocess.run(
            [program, str(place)],
            env=env,
            cwd=place.parent,
            capture_output=True,
            text=True,
            timeout=S_MAX,
            check=False,
        )
    is_good = done.returncode == 0 and example.prints in done.stdout
    return "" if is_good else f"failed: {done.stdout[-1500:]}\n{done.stderr[-1500:]}"


# --- the requests of the guides -----------------------------------------------------------------------


def curl(served: ServedProcess, path: str, *more: str, body: object = None) -> dict[str, Any]:
    """One request as the guides make it; the JSON of its answer."""
    url = f"http://127.0.0.1:{served.port}/v1{path}"
    sent = [] if body is None else ["-H", "Content-Type: application/json", "-d", json.dumps(body)]
    command = ["curl", "-sS", url, "-H", "Authorization: Bearer none", *sent, *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=S_MAX, check=True)
    found: dict[str, Any] = json.loads(done.stdout or "{}")
    return found


def guide_of_the_shell(served: ServedProcess) -> None:
    """A container of the request; one made by name, with a file, used by reference; then deleted."""
    auto = {"type": "shell", "environment": {"type": "container_auto"}}
    body: dict[str, Any] = {"model": MODELS[0], "tools": [auto], "input": "List the files."}
    first = curl(served, "/responses", body=body)
    container = first["tools"][0]["environment"]["container_id"]
    reference = {"type": "container_reference", "container_id": container}
    body |= {"tools": [{"type": "shell", "environment": reference}]}
    again = curl(served, "/responses", body=body | {"previous_response_id": first["id"]})
    assert [item["type"] for item in again["output"]][:1] == ["message"], again
    made = curl(
        served,
        "/containers",
        body={
            "name": "mine",
            "memory_limit": "1g",
            "expires_after": {"anchor": "last_active_at", "minutes": 20},
        },
    )
    files = f"/containers/{made['id']}/files"
    put = curl(served, files, "-F", "file=@/etc/hostname;filename=in.txt")
    assert put["path"] == "/mnt/data/in.txt", put
    assert [each["id"] for each in curl(served, files)["data"]] == [put["id"]]
    curl(served, f"/containers/{made['id']}", "-X", "DELETE")
    assert "error" in curl(served, f"/containers/{made['id']}")


def guide_of_the_interpreter(served: ServedProcess) -> None:
    """An interpreter of the request, and one in a container made by name."""
    auto = {"type": "code_interpreter", "container": {"type": "auto", "memory_limit": "1g"}}
    body: dict[str, Any] = {"model": MODELS[0], "tools": [auto], "input": "Solve 3x + 11 = 14."}
    body["instructions"] = "Write and run code."
    body["include"] = ["code_interpreter_call.outputs"]
    call, message = curl(served, "/responses", body=body)["output"]
    assert call["outputs"][0]["logs"].startswith("9241.3156"), call
    assert message["type"] == "message"
    made = curl(served, "/containers", body={"name": "My Container", "memory_limit": "1g"})
    body["tools"] = [{"type": "code_interpreter", "container": made["id"]}]
    body["tool_choice"] = "required"
    call = curl(served, "/responses", body=body)["output"][0]
    assert call["container_id"] == made["id"], call


def guide_of_skills(served: ServedProcess) -> None:
    """A skill from the files of a folder and from a zip, used by reference and inline, with versions, then deleted."""
    with tempfile.TemporaryDirectory() as folder:
        skill = Path(folder, "basic_math")
        skill.mkdir()
        words = "---\nname: basic-math\ndescription: Add or multiply numbers.\n---\nUse it.\n"
        (skill / "SKILL.md").write_text(words)
        (skill / "calculate.py").write_text("print(6 * 7)\n")
        packed = shutil.make_archive(str(skill), "zip", folder, skill.name)
        parts = []
        for name, kind in (("SKILL.md", "text/markdown"), ("calculate.py", "text/plain")):
            place = f"{skill.name}/{name}"
            parts += ["-F", f"files[]=@{folder}/{place};filename={place};type={kind}"]
        made = curl(served, "/skills", "-X", "POST", *parts)
        assert (made["name"], made["default_version"]) == ("basic-math", "1"), made
        zipped = ("-X", "POST", "-F", f"files=@{packed};type=application/zip")
        other = curl(served, "/skills", *zipped)
        version = curl(served, f"/skills/{made['id']}/versions", *zipped)
        inline = base64.b64encode(Path(packed).read_bytes()).decode()
    assert version["version"] == "2", version
    changed = curl(served, f"/skills/{made['id']}", body={"default_version": "2"})
    assert (changed["default_version"], changed["latest_version"]) == ("2", "2"), changed
    source = {"type": "base64", "media_type": "application/zip", "data": inline}
    skills: list[dict[str, Any]] = [
        {"type": "skill_reference", "skill_id": made["id"]},
        {"type": "skill_reference", "skill_id": made["id"], "version": 1},
        {"type": "skill_reference", "skill_id": other["id"], "version": "latest"},
        {"type": "inline", "name": "basic-math", "description": "Add.", "source": source},
    ]
    for each in skills:
        environment = {"type": "container_auto", "skills": [each]}
        body = {"model": MODELS[0], "tools": [{"type": "shell", "environment": environment}]}
        answer = curl(served, "/responses", body=body | {"input": "Use the skill to add."})
        ran = next(item for item in answer["output"] if item["type"] == "shell_call_output")
        assert "basic-math" in ran["output"][0]["stdout"], ran
    assert "deleted" in curl(served, f"/skills/{made['id']}/versions/1", "-X", "DELETE")
    for each in (made, other):
        curl(served, f"/skills/{each['id']}", "-X", "DELETE")
    assert curl(served, "/skills")["data"] == []


GUIDES = {
    "shell": (SHELL, guide_of_the_shell),
    "skills": (SHELL, guide_of_skills),
    "code": (CODE, guide_of_the_interpreter),
}


def run_guides() -> Iterator[tuple[str, str]]:
    for name, (turns, guide) in GUIDES.items():
        with tempfile.TemporaryDirectory() as folder, serving(turns, Path(folder)) as served:
            try:
                guide(served)
                yield f"curl, the guide of {name}", ""
            except (AssertionError, KeyError, ValueError, subprocess.SubprocessError) as error:
                yield f"curl, the guide of {name}", f"failed: {error!r}"


def run_all(folder: Path) -> Iterator[tuple[str, str]]:
    """Each example and guide, and what came of it."""
    kinds = ((PYTHON_EXAMPLES, python_source, PYTHON), (JS_EXAMPLES, js_source, NODE))
    for examples, find, program in kinds:
        source = find(folder)
        for example in examples:
            if isinstance(source, str):
                yield example.name, f"not run: {source}"
            else:
                yield example.name, run_example(example, source, str(program))
    yield from run_guides()


def main() -> int:
    has_failed = False
    with tempfile.TemporaryDirectory() as folder:
        for name, trouble in run_all(Path(folder)):
            has_failed = has_failed or trouble.startswith("failed")
            print(f"{name}: {trouble or 'as it should'}", flush=True)
    return 1 if has_failed else 0


if __name__ == "__main__":
    sys.exit(main())
