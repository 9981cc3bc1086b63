"""How does a command talk to a running server? Its URL, its API key, its models, and its errors in plain words.

In: `--url`, `--key`, `--key-env`. Out: the server's answer, or an error that names the URL, what the server said and
what to do. A key is never printed, nor are control characters of a server. Where no flag names a key, the variable
SEGUE_KEY is sent; OPENAI_API_KEY only to a server that has just asked for a key.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from dataclasses import dataclass
from urllib.parse import urlsplit
from urllib.request import Request

import msgspec

from segue.errors import Misconfigured
from segue.printable import say
from segue.settings.checks import is_loopback, load_settings
from segue_cli.client.asking import answer_to, decoded, shown

URL = "http://127.0.0.1:8080"
# A server on the same machine answers at once; over a slow network it may take a while.
ASK_S_MAX = 5.0
NAMES_MAX = 20
NAME_CHARS_MAX = 512
# The prompt and the tools of a coding agent are about 9,000 tokens, before the conversation begins.
SMALL_TOKENS = 24_000
SEGUE_KEY, OPENAI_KEY = "SEGUE_KEY", "OPENAI_API_KEY"


class NotReachable(Misconfigured):
    """There is no answer at this URL, or none of a Responses API server."""


class ServerRefused(Misconfigured):
    """The server answered with an error."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class ServedModel(msgspec.Struct):
    """A model as the server lists it."""

    id: str
    context_window: int | None = None
    input_modalities: list[str] | None = None

    def checked(self) -> ServedModel:
        """The same, if its name can be printed, and given to a client: as a word that is no flag."""
        if not self.id.isprintable() or self.id.startswith("-") or len(self.id) > NAME_CHARS_MAX:
            raise Misconfigured(
                f"model: {shown(ascii(self.id))} begins with a dash, has characters that cannot be printed, or is too "
                "long for a name."
            )
        return self


class _Models(msgspec.Struct):
    data: list[ServedModel]


class _Problem(msgspec.Struct):
    message: str = ""


class _Answer(msgspec.Struct):
    error: _Problem | None = None


@dataclass(frozen=True, slots=True)
class ModelEndpoint:
    """A server and one of its models."""

    base_url: str
    model: str
    # The environment variable with the API key, if the server needs one.
    key_env: str | None = None
    # The context window, if the server reports it.
    context_tokens: int | None = None
    # Whether the model sees images, if the server reports it.
    sees_images: bool | None = None

    @property
    def root_url(self) -> str:
        """The URL without the version, as Anthropic's clients take it."""
        return self.base_url.removesuffix("/v1")

    @property
    def is_small(self) -> bool:
        """Whether the usual prompt and tools of an agent leave too little of the context window."""
        return self.context_tokens is not None and self.context_tokens < SMALL_TOKENS


@dataclass(slots=True)
class RunningServer:
    """A server and the key for it; `key_env` is the environment variable that the key is in."""

    base_url: str
    key: str | None = None
    key_env: str | None = None

    @property
    def url(self) -> str:
        """The URL without the version."""
        return self.base_url.removesuffix("/v1")

    @property
    def headers(self) -> dict[str, str]:
        """What a request carries."""
        return {"Authorization": f"Bearer {self.key}"} if self.key else {}

    def ask(
        self, path: str, *, method: str = "GET", body: object = None, wait_s: float = ASK_S_MAX
    ) -> bytes:
        """The body of an answer; an answer of 400 or more is `ServerRefused`."""
        try:
            return self._ask(path, method, body, wait_s)
        except ServerRefused as error:
            spare = client_variable(OPENAI_KEY)
            if error.status != 401 or self.key_env or self.key or not spare:
                raise
            self.key, self.key_env = spare, OPENAI_KEY
            return self._ask(path, method, body, wait_s)

    def _ask(self, path: str, method: str, body: object, wait_s: float) -> bytes:
        data = None if body is None else msgspec.json.encode(body)
        headers = {**self.headers, "Content-Type": "application/json"}
        # A proxy of the environment does not lead to this machine.
        is_near = is_loopback(urlsplit(self.url).hostname or "")
        try:
            request = Request(self.url + path, data, headers, method=method)
            status, answer = answer_to(request, wait_s, {} if is_near else None)
        except (OSError, ValueError) as error:
            raise self._silent(getattr(error, "reason", None) or error) from None
        if status >= 300:
            raise self._refused(path, status, message_of(answer))
        return answer

    def models(self) -> list[ServedModel]:
        """What the server serves."""
        text = self.ask("/v1/models")
        try:
            return decoded(text, _Models, "a list of models").data
        except Misconfigured:
            raise self._silent("the answer is no list of models") from None

    def model(self, name: str | None) -> ServedModel:
        """The model of this name, or the first; a name that is not served is an error that lists those that are."""
        served = self.models()
        if not served:
            raise Misconfigured(f"model: the server at {self.url} lists no model.")
        for one in served:
            if name in (None, one.id):
                return one.checked()
        names = shown(", ".join(one.id for one in served[:NAMES_MAX]))
        raise Misconfigured(f"model: '{name}' is not served at {self.url}. Served: {names}.")

    def _refused(self, path: str, status: int, message: str) -> ServerRefused:
        if status != 401:
            said = f": {message}" if message else ". Is this the URL of a Segue server?"
            return ServerRefused(f"{self.url}{path} answered {status}{said}", status)
        if self.key is None:
            unset = f" (the variable {self.key_env} is not set)" if self.key_env else ""
            text = f"the server at {self.url} needs an API key, and none was sent{unset}"
            return ServerRefused(
                f"key: {text}. Set the variable {SEGUE_KEY}, or use --key or --key-env NAME; "
                "`segue keys create --name NAME` creates a key.",
                status,
            )
        source = f"the variable {self.key_env}" if self.key_env else "--key"
        text = f"the server at {self.url} refused the API key from {source}"
        return ServerRefused(
            f"key: {text}: it is wrong, expired or revoked. See `segue keys list`.", status
        )

    def _silent(self, reason: object) -> NotReachable:
        # Without the number of the error.
        why = getattr(reason, "strerror", None) or reason
        return NotReachable(
            f"no answer from a server at {self.url}: {why}. "
            "Start one with `segue serve`, or name another with --url."
        )


def message_of(body: bytes) -> str:
    """The words of an error answer."""
    try:
        error = decoded(body, _Answer, "an error").error
    except Misconfigured:
        return ""
    return shown(error.message) if error else ""


def client_variable(name: str) -> str | None:
    """What the environment says; None if it is unset or empty."""
    return os.environ.get(name) or None


def add_server(parser: argparse.ArgumentParser, *, has_config: bool = True) -> None:
    """The flags that say which running server, and with which key."""
    if has_config:
        about = "settings file of the server, for its host and port"
        parser.add_argument("--config", metavar="FILE", help=about)
    url = f"URL of the server (default: SEGUE_URL, else host and port of the settings, else {URL})"
    parser.add_argument("--url", help=url)
    keys = parser.add_mutually_exclusive_group()
    keys.add_argument("--key", help=f"API key (default: from the variable {SEGUE_KEY})")
    keys.add_argument("--key-env", metavar="NAME", help="environment variable with the API key")


def server_of(options: argparse.Namespace) -> RunningServer:
    """The server that the flags of `add_server` name."""
    base_url = base_url_of(options.url or _url_of_settings(options.config))
    if options.key:
        return RunningServer(base_url, options.key)
    if options.key_env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", options.key_env):
            raise Misconfigured(f"key-env: '{options.key_env}' is no name of a variable.")
        return RunningServer(base_url, client_variable(options.key_env), options.key_env)
    key = client_variable(SEGUE_KEY)
    return RunningServer(base_url, key, SEGUE_KEY if key else None)


def add_model(parser: argparse.ArgumentParser) -> None:
    """The flag that says which model, of `segue chat` too."""
    model = "name of the model (default: the first that the server lists)"
    parser.add_argument("--model", help=model)


def add_api(parser: argparse.ArgumentParser) -> None:
    """The flag that says which API a client is set up for."""
    about = "API that the client uses, where it can use several (default: the first that its page names)"
    parser.add_argument("--api", choices=("responses", "chat", "messages"), help=about)


def find_endpoint(
    server: RunningServer, model: str | None, *, otherwise: str = ""
) -> ModelEndpoint:
    """The named model, or the first that the running server lists. A named model needs no running server.

    `otherwise` is what helps where there is none and no model is named.
    """
    try:
        card = server.model(model)
    except NotReachable as error:
        if model is None:
            raise Misconfigured(f"{error}{otherwise}") from None
        say(f"segue: not checked, {error}", file=sys.stderr)
        card = ServedModel(model).checked()
    sees_images = None if card.input_modalities is None else "image" in card.input_modalities
    key_env = server.key_env or (SEGUE_KEY if server.key else None)
    return ModelEndpoint(server.base_url, card.id, key_env, card.context_window, sees_images)


def base_url_of(url: str) -> str:
    """The base URL for clients: with the version, without a slash at the end."""
    if not re.fullmatch(r"https?://[^/\s]\S*", url) or not url.isprintable():
        raise Misconfigured(f"url: '{url}' is not a URL such as {URL}.")
    url = url.rstrip("/")
    return url if url.endswith("/v1") else f"{url}/v1"


def _url_of_settings(config: str | None) -> str:
    """What SEGUE_URL names, or where a server with these settings, else those of this folder, listens."""
    if config is None and (url := client_variable("SEGUE_URL")):
        return url
    settings = load_settings({"config": config})
    scheme = "https" if settings.tls_cert else "http"
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{settings.port}"
