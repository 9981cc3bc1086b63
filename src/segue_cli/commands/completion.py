"""How does a shell complete the command? `segue completion` prints a script, made from the flags of every command.

The script has a list of words for each command and action, and knows after which flags a file or a choice follows.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from segue.printable import say

# Placeholders of flags that take a file or folder.
FILES = ("FILE", "PATH", "DIR")
BASH_FILES = 'compopt -o filenames 2> /dev/null; COMPREPLY=($(compgen -f -- "$cur"))'
HINT = {
    "bash": "segue completion bash > ~/.local/share/bash-completion/completions/segue",
    "zsh": 'segue completion zsh > "${fpath[1]}/_segue"',
    "fish": "segue completion fish > ~/.config/fish/completions/segue.fish",
}


class Flag(NamedTuple):
    """A flag: what may follow it."""

    name: str
    about: str
    takes_value: bool = False
    is_file: bool = False
    choices: tuple[str, ...] = ()


class CommandWords(NamedTuple):
    """A command or one of its actions: what may follow it."""

    path: str
    about: str
    actions: tuple[str, ...]
    words: tuple[str, ...]
    flags: tuple[Flag, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The shell."""
    parser.add_argument("shell", choices=tuple(HINT), metavar="SHELL", help="bash, zsh or fish")
    lines = "\n".join(f"  {line}" for line in HINT.values())
    parser.epilog = f"To install it for your user, and then start a new shell:\n\n{lines}"
    parser.formatter_class = argparse.RawDescriptionHelpFormatter


def run(options: argparse.Namespace) -> int:
    """Print the script; returns the exit status."""
    places = [
        place for name, parser in options.parsers().items() for place in places_of(name, parser)
    ]
    write = {"bash": bash, "zsh": zsh, "fish": fish}[options.shell]
    say(write(places))
    return 0


def places_of(path: str, parser: argparse.ArgumentParser) -> Iterator[CommandWords]:
    """A command, and each of its actions."""
    flags: list[Flag] = []
    words: tuple[str, ...] = ()
    actions: Mapping[str, argparse.ArgumentParser] = {}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            actions = action.choices
        elif action.option_strings:
            flags += (_flag(name, action) for name in action.option_strings if name[:2] == "--")
        else:
            words += tuple(action.choices or ())
    yield CommandWords(path, parser.description or "", tuple(actions), words, tuple(flags))
    for name, child in actions.items():
        yield from places_of(f"{path} {name}", child)


def _flag(name: str, action: argparse.Action) -> Flag:
    about = "" if action.help in (None, argparse.SUPPRESS) else str(action.help)
    metavar = str(action.metavar or "")
    choices = tuple(action.choices or (metavar.split("|") if "|" in metavar else ()))
    return Flag(name, about, action.nargs not in (0, "?"), metavar in FILES, choices)


# --- bash and zsh ------------------------------------------------------------------------------------


def bash(places: list[CommandWords]) -> str:
    """The script for bash."""
    return f"""\
# bash completion of segue
_segue() {{
    local cur="${{COMP_WORDS[COMP_CWORD]}}" prev="${{COMP_WORDS[COMP_CWORD-1]}}" at="" word words=""
    for word in "${{COMP_WORDS[@]:1:COMP_CWORD-1}}"; do
        case "$at/$word" in
{_steps(places)}
        esac
    done
    case "$at:$prev" in
{_values(places, 'COMPREPLY=($(compgen -W "{}" -- "$cur"))', BASH_FILES)}
    esac
    case "$at" in
{_words(places, 'words="{}"')}
    esac
    COMPREPLY=($(compgen -W "$words" -- "$cur"))
}}
complete -F _segue segue"""


def zsh(places: list[CommandWords]) -> str:
    """The script for zsh."""
    return f"""\
#compdef segue
_segue() {{
    local prev="${{words[CURRENT-1]}}" at="" word
    for word in "${{(@)words[2,CURRENT-1]}}"; do
        case "$at/$word" in
{_steps(places)}
        esac
    done
    case "$at:$prev" in
{_values(places, "compadd -- {}", "_files")}
    esac
    case "$at" in
{_words(places, "compadd -- {}")}
    esac
}}
if [ "$funcstack[1]" = "_segue" ]; then _segue "$@"; else compdef _segue segue; fi"""


def _steps(places: list[CommandWords]) -> str:
    """The words that lead from a command to its action."""
    steps = (place.path.rpartition(" ") for place in places)
    names = "|".join(f'"{before}/{word}"' for before, _, word in steps)
    return f'            {names}) at="${{at:+$at }}$word" ;;'


def _values(places: list[CommandWords], offer: str, files: str) -> str:
    """What follows a flag that takes a value."""
    arms = []
    for place in places:
        for flag in place.flags:
            known = offer.format(" ".join(flag.choices)) if flag.choices else ""
            found = files if flag.is_file else known
            if flag.takes_value:
                arms.append(f'        "{place.path}:{flag.name}") {found or ":"}; return ;;')
    return "\n".join(arms)


def _words(places: list[CommandWords], offer: str) -> str:
    """What follows a command."""
    verbs = [place.path for place in places if " " not in place.path]
    arms = [f'        "") {offer.format(" ".join((*verbs, "--help", "--version")))} ;;']
    for place in places:
        flags = (flag.name for flag in place.flags)
        arms.append(
            f'        "{place.path}") {offer.format(" ".join((*place.actions, *place.words, *flags)))} ;;'
        )
    return "\n".join(arms)


# --- fish --------------------------------------------------------------------------------------------


def fish(places: list[CommandWords]) -> str:
    """The script for fish, with what each word means."""
    lines = ["# fish completion of segue", "complete -c segue -f"]
    for place in places:
        before, _, word = place.path.rpartition(" ")
        when = _seen(before) if before else "__fish_use_subcommand"
        siblings = next((one.actions for one in places if one.path == before), ())
        if siblings:
            when += f"; and not __fish_seen_subcommand_from {' '.join(siblings)}"
        lines.append(f"complete -c segue -n '{when}' -a {word} -d {_quoted(place.about)}")
        for choice in place.words:
            lines.append(f"complete -c segue -n '{_seen(place.path)}' -a {choice}")
        lines += (_fish_flag(place, flag) for flag in place.flags)
    return "\n".join(lines)


def _fish_flag(place: CommandWords, flag: Flag) -> str:
    value = " -r -F" if flag.is_file else " -x" * flag.takes_value
    choices = f" -a {_quoted(' '.join(flag.choices))}" if flag.choices else ""
    about = f" -d {_quoted(flag.about)}" if flag.about else ""
    return f"complete -c segue -n '{_seen(place.path)}' -l {flag.name[2:]}{value}{choices}{about}"


def _seen(path: str) -> str:
    return "; and ".join(f"__fish_seen_subcommand_from {word}" for word in path.split())


def _quoted(text: str) -> str:
    escaped = text.replace("%%", "%").replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
