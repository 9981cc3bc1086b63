"""What was set, and where: by a flag, by an environment variable, or on which line of the file?

In: the flags of a command, the environment, a TOML file. Out: the values by name, and the place of each, so that an
error names what the operator has to change. Nothing is checked here.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from msgspec import Struct, structs

from segue.settings.validation import Misfit, SettingPath, nearest
from segue.settings.values import NAMES, REPEATED, RETIRED

# Read from the working folder where no other file is named.
FILE_NAME = "segue.toml"
# Variables that are no settings: of clients, examples and tests, and what Kubernetes sets for a service called segue.
OTHER_VARIABLES = re.compile(
    r"SEGUE_(CONFIG|(API_)?KEY|(BASE_)?URL|(TEST|SERVICE|PORT_\d+)_.*|SERVICE|PORT_\d+)\Z"
)
# What people call an engine -> its name here, and the URL that its server has as a rule.
SERVERS = {
    "ollama": "http://127.0.0.1:11434",
    "lmstudio": "http://127.0.0.1:1234",
    "litellm": "http://127.0.0.1:4000",
    "openai": "",
}
HEADER = re.compile(r"\s*(\[\[?)\s*([^\[\]]+?)\s*\]\]?\s*(#.*)?\Z")
KEY = re.compile(r"""\s*([\w.\-"']+)\s*=""")


class Problem(Struct, frozen=True):
    """What the operator must change, and where it is written."""

    setting: str
    message: str
    # The flag, the variable, or the file and its line.
    place: str = ""
    file: str | None = None
    line: int | None = None
    level: Literal["error", "warning"] = "error"

    def __str__(self) -> str:
        # A flag or a variable already names its setting.
        name = self.setting if self.file or not self.place else ""
        return ": ".join(filter(None, (self.place, name, self.message)))


@dataclass(frozen=True, slots=True)
class SettingSources:
    """What was set, and where."""

    values: dict[str, object]
    # Setting -> the flag or variable that set it; the other values are from the file.
    origins: dict[str, str]
    file: Path | None = None
    text: str = ""
    # Why the file could not be read.
    broken: Problem | None = None
    # Variables that look like settings and are none.
    unknown: tuple[str, ...] = ()

    def origin(self, name: str) -> str:
        """Where a setting was set: a flag, a variable, a line of the file, or nowhere: "default"."""
        if name not in self.values:
            return "default"
        return self.origins.get(name) or self._place(line_of(self.text, (name,)))

    def problem(self, misfit: Misfit) -> Problem:
        """A misfit with the place where the operator finds it."""
        name = str(misfit.path[0])
        if name in self.origins:
            return Problem(misfit.setting, misfit.sentence, self.origins[name])
        if name in self.values:
            return self._in_file(misfit)
        return Problem(misfit.setting, misfit.sentence)

    def located(self, message: str) -> str:
        """The message "SETTING: …" of a later error, with the place where the setting was set."""
        name, _, rest = message.partition(": ")
        is_table = any(name in table for table in _tables(self.values))
        if name not in self.values or is_table:
            return message
        return str(self.problem(Misfit((name,), rest)))

    def warnings(self) -> list[Problem]:
        """What is odd, but no reason to refuse a start."""
        names = list(map(variable_of, NAMES))
        ignored = "the environment variable is not a setting and is ignored."
        unknown = [
            Problem("", ignored + nearest(variable, names), variable, level="warning")
            for variable in self.unknown
        ]
        return [*unknown, *self._retired()]

    def _retired(self) -> Iterator[Problem]:
        """Settings that the next version refuses."""
        for name, rule in RETIRED.items():
            sentence = f"no longer needed: {rule}. Remove it: the next version refuses it."
            for path in self._paths_of(name):
                yield structs.replace(self.problem(Misfit(path, sentence)), level="warning")

    def _paths_of(self, name: str) -> Iterator[SettingPath]:
        """Where a setting is set: at the top, and in the tables of models."""
        if name in self.values:
            yield (name,)
        for index, table in enumerate(_tables(self.values)):
            if name in table:
                yield ("models", index, name)

    def _in_file(self, misfit: Misfit) -> Problem:
        line = line_of(self.text, misfit.path)
        place = self._place(line)
        return Problem(misfit.setting, misfit.sentence, place, str(self.file), line)

    def _place(self, line: int | None) -> str:
        return f"{self.file}, line {line}" if line else str(self.file)


def flag_of(name: str) -> str:
    """The flag of a setting."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """The environment variable of a setting."""
    return f"SEGUE_{name.upper()}"


def read_sources(
    flags: Mapping[str, object], environment: Mapping[str, str] | None = None
) -> SettingSources:
    """What flags, environment and file set. `segue.toml` is looked for only in the process's own environment."""
    is_own = environment is None
    environment = os.environ if environment is None else environment
    file = _file_of(flags, environment, is_own=is_own)
    text, values, broken = _read_file(file) if file else ("", {}, None)
    if file:
        values["config"] = str(file)
    origins: dict[str, str] = {}
    for name in NAMES:
        written = environment.get(variable_of(name))
        # Kubernetes sets SEGUE_PORT=tcp://… where a service is called segue.
        if written is not None and not (name == "port" and written.startswith("tcp://")):
            values[name] = _listed(written) if name in REPEATED else written
            origins[name] = variable_of(name)
        if flags.get(name) is not None:
            values[name] = flags[name]
            origins[name] = flag_of(name)
    values |= {name: "" for name in ("access_log", "audit_log") if values.get(name) == "off"}
    has_url = "engine_url" in values
    if _translate_server(values) and "engine" in origins:
        origins["engine_url"] = origins["engine"]
    for table in _tables(values):
        _translate_server(table, has_url=has_url)
    others = {name for name in environment if name.startswith("SEGUE_")}
    others -= set(map(variable_of, NAMES))
    unknown = sorted(name for name in others if not OTHER_VARIABLES.match(name))
    return SettingSources(values, origins, file, text, broken, tuple(unknown))


def _tables(values: Mapping[str, object]) -> list[dict[str, object]]:
    """The [[models]] of the file."""
    tables = values.get("models")
    return (
        [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    )


def _translate_server(values: dict[str, object], *, has_url: bool = False) -> bool:
    """Where the engine is a server that speaks chat completions: `chat`, and True if its usual URL was put in."""
    name = values.get("engine")
    if not isinstance(name, str) or name not in SERVERS:
        return False
    values["engine"] = "chat"
    if has_url or values.get("engine_url") or not SERVERS[name]:
        return False
    values["engine_url"] = [SERVERS[name]]
    return True


def _listed(text: str) -> list[str]:
    return [word.strip() for word in text.split(",") if word.strip()]


def _file_of(
    flags: Mapping[str, object], environment: Mapping[str, str], *, is_own: bool
) -> Path | None:
    """The settings file: the named one, or segue.toml in the working folder; "none" is none."""
    named = flags.get("config") or environment.get("SEGUE_CONFIG")
    if named:
        return None if named == "none" else Path(str(named))
    return Path(FILE_NAME) if is_own and Path(FILE_NAME).is_file() else None


def _read_file(path: Path) -> tuple[str, dict[str, object], Problem | None]:
    """The text of a file, what it sets, and what is wrong with it."""
    file = str(path)
    try:
        text = path.read_text("utf-8")
        values = tomllib.loads(text)
    except OSError as error:
        return "", {}, Problem("config", f"{file} cannot be read: {error.strerror}.")
    except UnicodeDecodeError:
        return "", {}, Problem("", "this is not TOML: it is not text in UTF-8.", file, file)
    except tomllib.TOMLDecodeError as error:
        why, _, at = str(error).rstrip(")").partition(" (at ")
        line = int(found[1]) if (found := re.match(r"line (\d+)", at)) else text.count("\n") + 1
        sentence = f"this is not TOML: {why}."
        return "", {}, Problem("", sentence, f"{file}, line {line}", file, line)
    if "config" in values:
        sentence = "a settings file cannot name another one."
        return text, values, Problem("config", sentence, file, file)
    return text, values, None


def line_of(text: str, path: SettingPath) -> int | None:
    """The line of a TOML text on which a path stands; None if it is written in an unusual way."""
    table: SettingPath = ()
    counts: dict[str, int] = {}
    best: tuple[int, int | None] = (0, None)
    for number, line in enumerate(text.splitlines(), 1):
        here: SettingPath = ()
        if header := HEADER.match(line):
            table = here = _header_path(header[1] == "[[", header[2], counts)
        elif key := KEY.match(line):
            here = (*table, *_steps(key[1]))
        shared = min(len(here), len(path))
        if shared > best[0] and here[:shared] == path[:shared]:
            best = (shared, number)
    return best[1]


def _header_path(is_array: bool, name: str, counts: dict[str, int]) -> SettingPath:
    first, *rest = _steps(name)
    if is_array and not rest:
        counts[first] = counts.get(first, -1) + 1
    return (first, counts[first], *rest) if first in counts else (first, *rest)


def _steps(name: str) -> list[str]:
    return [step.strip(" \"'") for step in name.split(".")]
