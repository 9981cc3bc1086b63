"""How does a person start it? The `segue` command: one table of verbs, and what to do with the words after it.

Each verb is a module with `add_arguments(parser)` and `run(options)`, which returns the exit status. It is imported
only when it is asked for, so that a server starts sooner. Where only `segue-server` is installed, the command has that
name, and a verb that needs more says what to install.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple, NoReturn

from segue import __version__
from segue.errors import ApiError, Misconfigured, MissingPackage
from segue.printable import printable, say
from segue.settings.validation import nearest
from segue_cli.terminal import WideHelp


class Verb(NamedTuple):
    """A command: its module, what it does, and a package without which it does nothing."""

    module: str
    about: str
    needs: str = "segue_cli"


GROUPS: dict[str, dict[str, Verb]] = {
    "run a server": {
        "serve": Verb("segue_cli.commands.serve", "serve models over HTTP and WebSocket"),
        "status": Verb(
            "segue_cli.client.operate",
            "show whether a server is running and ready, and what it does",
        ),
        "stop": Verb(
            "segue_cli.client.operate", "stop a server when its running responses have ended"
        ),
        "reload": Verb(
            "segue_cli.client.operate", "have a server read its settings again, without a restart"
        ),
        "engines": Verb(
            "segue_cli.client.engines",
            "list the engines of a server, take one out of service (drain) and return it",
        ),
        "doctor": Verb(
            "segue_cli.commands.doctor",
            "check engine, tokenizer, store and port, with advice for each problem",
        ),
        "config": Verb(
            "segue_cli.commands.config", "check the settings, or show where each of them was set"
        ),
        "deploy": Verb(
            "segue_cli.commands.deploy",
            "write a file for systemd, Compose, Kubernetes, a proxy, Prometheus or Grafana",
        ),
    },
    "back up and upgrade": {
        "backup": Verb(
            "segue_cli.commands.backup",
            "write the database and its seal keys to one file, while servers run",
        ),
        "restore": Verb("segue_cli.commands.backup", "make a store from a backup"),
        "erase": Verb("segue_cli.commands.erase", "erase everything of one owner"),
    },
    "models and documents": {
        "models": Verb(
            "segue_cli.commands.models",
            "download, list and remove models of the embedded engine",
            needs="segue_embedded",
        ),
        "index": Verb(
            "segue_cli.commands.index",
            "make local text, Markdown, HTML and PDF files searchable for the web search tool",
        ),
    },
    "keys and usage": {
        "keys": Verb("segue_cli.commands.keys", "create, list, change and revoke API keys"),
        "usage": Verb(
            "segue_cli.commands.usage", "print token usage by day or month, key, owner and model"
        ),
        "seals": Verb(
            "segue_cli.commands.seals",
            "manage the keys that encrypt compactions and reasoning and hash API keys",
        ),
    },
    "use a running server": {
        "ask": Verb(
            "segue_cli.client.ask",
            "ask a model one question and print the answer; reads a pipe too",
        ),
        "chat": Verb(
            "segue_cli.client.chat",
            "chat with a model in the terminal, over WebSocket",
            needs="rich",
        ),
        "run": Verb(
            "segue_cli.client.run",
            "start Codex, Claude Code or another agent on a server, with its key and model",
        ),
        "connect": Verb(
            "segue_cli.client.connect",
            "print the configuration of a client, or edit Codex's config.toml",
        ),
        "explain": Verb(
            "segue_cli.client.explain", "say why the prompt of a response was not reused, and where"
        ),
        "bench": Verb(
            "segue_bench.command", "measure agent loops over each transport", needs="segue_bench"
        ),
        "conform": Verb(
            "segue_conform.command",
            "test any server of the Responses API, Messages or Chat against their contracts",
            needs="segue_conform",
        ),
        "fleet": Verb(
            "segue_fleet.command",
            "run PostgreSQL, two servers, HAProxy and four replicas without a model, to try a fleet",
            needs="segue_fleet",
        ),
    },
    "shell": {
        "completion": Verb(
            "segue_cli.commands.completion", "print a completion script for bash, zsh or fish"
        ),
    },
}
# What argparse says of a wrong command line.
UNKNOWN = re.compile(r"unrecognized arguments: ([^\s=]+)")
NO_CHOICE = re.compile(r"argument (.+?): invalid choice: '(.*)' \(choose from (.*)\)")
MISSING = re.compile(r"the following arguments are required: (.*)")
VERBS = {name: verb for group in GROUPS.values() for name, verb in group.items()}
# What comes with the distribution `segue`, and not with `segue-server`.
COMFORTS = {"rich", "tomlkit", "segue_bench", "segue_conform", "segue_embedded", "segue_fleet"}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    try:
        if arguments[:1] == ["help"]:
            arguments = [*arguments[1:2], "--help"]
        if not arguments or arguments[0] in ("-h", "--help"):
            say(help_text())
            return 0
        if arguments[0] == "--version":
            say(f"segue {__version__}")
            return 0
        return run_verb(arguments)
    except (Misconfigured, ApiError) as error:
        lines = printable(str(error)).splitlines()
        say("\n".join(f"segue: {line}" for line in lines), file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader of a pipe has left, as `head` does: what is left to print goes nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (KeyboardInterrupt, EOFError):
        # Ctrl-C or Ctrl-D at a question, or while something is fetched.
        say(file=sys.stderr)
        return 130


def run_verb(arguments: Sequence[str]) -> int:
    """Run the command that the first word names; returns the exit status."""
    try:
        options = parse(arguments)
        status: int = import_module(VERBS[options.verb].module).run(options)
        return status
    except ModuleNotFoundError as error:
        package = (error.name or "").partition(".")[0]
        if package not in COMFORTS:
            raise
        raise MissingPackage(arguments[0], package, "segue") from None


def program() -> str:
    """The name by which this command is installed."""
    return "segue-server" if Path(sys.argv[0]).name == "segue-server" else "segue"


def is_installed(name: str) -> bool:
    """Whether the package that a command needs is there."""
    return find_spec(VERBS[name].needs) is not None


def help_text() -> str:
    """What `segue --help` prints."""
    segue = program()
    width = max(map(len, VERBS)) + 2
    lines = [
        f"usage: {segue} COMMAND [FLAGS]",
        "",
        "A Responses API server for people who run their own models.",
    ]
    for title, verbs in GROUPS.items():
        rows = (
            f"  {name:{width}}{verb.about}" for name, verb in verbs.items() if is_installed(name)
        )
        lines += ["", f"{title}:", *rows]
    lines += [
        "",
        f"`{segue} COMMAND --help` prints the flags of a command, `{segue} --version` the version.",
        f"Every flag of `{segue} serve` is also a key in segue.toml and an environment variable SEGUE_….",
    ]
    return "\n".join(lines)


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """The options of the command that the first word names."""
    name, *rest = arguments
    if name not in VERBS:
        raise Misconfigured(
            f"'{name}' is not a command.{nearest(name, VERBS)} See `{program()} --help`."
        )
    options = parser_of(name).parse_args(rest)
    options.verb = name
    # As typed, for a report that says how to repeat it; and the flags of all commands, for completion.
    options.arguments = rest
    options.parsers = lambda: {name: parser_of(name) for name in VERBS if is_installed(name)}
    return options


def parser_of(name: str) -> argparse.ArgumentParser:
    """The flags of a command."""
    verb = VERBS[name]
    parser = Parser(
        prog=f"{program()} {name}",
        description=verb.about,
        allow_abbrev=False,
        formatter_class=WideHelp,
    )
    import_module(verb.module).add_arguments(parser)
    return parser


class Parser(argparse.ArgumentParser):
    """Has a short usage line, and reports a wrong flag in one sentence, without the list of all flags."""

    def format_help(self) -> str:
        """The help, with the words that are needed in its first line."""
        self.usage = self.usage or " ".join((self.prog, *self._needed(), "[FLAGS]"))
        return super().format_help()

    def _needed(self) -> Iterator[str]:
        for action in self._actions:
            name = str(action.metavar or action.dest.upper())
            if action.option_strings and action.required:
                yield f"{action.option_strings[-1]} {name}"
            elif not action.option_strings:
                yield f"[{name}]" if action.nargs in ("?", "*") else name

    def error(self, message: str) -> NoReturn:
        """Raise it: `main` prints it."""
        raise Misconfigured(f"{self._sentence(message)} See `{self.prog} --help`.")

    def _offered(self, name: str) -> str:
        """The words that may stand for a missing one, if there is a list of them."""
        named = (one.choices for one in self._actions if name in (one.metavar, one.dest))
        choices = next(filter(None, named), ())
        return f": {', '.join(choices)}" if choices else ""

    def _sentence(self, message: str) -> str:
        """What argparse says, in the words of all other errors."""
        if found := UNKNOWN.match(message):
            word = found[1]
            if word[0] == "-":
                hint = nearest(word, self._option_string_actions)
                return f"'{word}' is not a flag of `{self.prog}`.{hint}"
            hint = (
                f" To ask one question: {program()} ask '{word} …'." if "chat" in self.prog else ""
            )
            return f"`{self.prog}` takes no '{word}'.{hint}"
        if found := NO_CHOICE.match(message):
            choices = [word.strip("' ") for word in found[3].split(",")]
            listed = f"'{found[2]}' is not one of: {', '.join(choices)}."
            return f"{found[1]}: {listed}{nearest(found[2], choices)}"
        if found := MISSING.match(message):
            return f"{found[1]} is missing{self._offered(found[1])}."
        return f"{message.removeprefix('argument ')}."


if __name__ == "__main__":
    sys.exit(main())
