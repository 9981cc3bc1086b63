"""How does a model write? Worked out from its chat template, printed, and written to a file: `segue models derive` and
`segue doctor --family`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from segue.dialects.descriptions import show_family
from segue.errors import Misconfigured
from segue.printable import say
from segue.server.models import SCRIPTED_VOCABULARY
from segue.settings.values import ModelSettings, Settings
from segue_embedded.weights import find_weights


def add_derive(parser: argparse.ArgumentParser) -> None:
    """The flags of `segue models derive`."""
    where = (
        "a GGUF file, a tokenizer.json or its folder, or the name of a model of the embedded engine"
    )
    parser.add_argument("name", metavar="MODEL", help=where)
    parser.add_argument("-o", "--output", metavar="FILE", help="the file to write, ending in .toml")
    template = "a chat template (Jinja file) instead of the model's own"
    parser.add_argument("--template", metavar="FILE", help=template)


def derive(options: argparse.Namespace) -> int:
    """Work it out, and write or print it; the exit status is 1 where calls are not read."""
    if options.output and not options.output.endswith(".toml"):
        raise Misconfigured(f"{options.output}: the name of the file has to end in .toml.")
    path = Path(options.name)
    found = show_family(
        path if path.exists() else find_weights(options.name), options.template or ""
    )
    if options.output:
        Path(options.output).write_text(found.text)
        say(f"{options.output} is written; use it with --dialect {options.output}")
    else:
        say(found.text)
    say("\n".join(found.notes))
    return 0 if found.are_calls_read else 1


def print_families(settings: Settings) -> int:
    """How every model of the settings writes; the exit status is 1 where calls of a model are not read."""
    models = settings.named_models() or (settings,)
    shown = [_print_family(model) for model in models]
    return 0 if all(shown) else 1


def _print_family(model: ModelSettings) -> bool:
    if model.name:
        say(f"# model {model.name}")
    if model.engine == "chat":
        say("# its engine writes and reads: Segue sends messages and runs no template.")
        return True
    path = Path(model.tokenizer or SCRIPTED_VOCABULARY)
    if model.engine == "embedded" and not model.tokenizer:
        path = find_weights(model.weights or model.name)
    found = show_family(path, model.template, model.template_values, model.dialect)
    say(found.text)
    say("\n".join(f"# {line}" for line in found.notes))
    return found.are_calls_read
