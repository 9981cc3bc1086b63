"""Who starts vLLM, where it is installed on this machine and no URL says that one runs already?

`segue serve --engine vllm --model NAME` without `--engine-url`: vLLM runs as a child with the flags that were measured
best, and with those of the operator (`engine_arg`), which win. What it prints goes to a log file; while it loads, its
last line is shown. If it ends by itself it is started again, three times in ten minutes at most; with the server it is
stopped. Nothing here is used where an URL is given.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from threading import Event, Lock, Thread
from urllib.error import URLError
from urllib.request import urlopen

from msgspec import structs

from segue.errors import Misconfigured
from segue.printable import printable, say
from segue.settings.values import Settings

log = logging.getLogger(__name__)

HOST, PORT = "127.0.0.1", 8000
# Less to hash of a long prompt; and how much of a prompt was cached is told.
BEST = ("--block-size", "128", "--enable-prompt-tokens-details")
# Since then the endpoint for ids must be asked for.
SCALE_OUT_SINCE = (0, 32)
# Asked in vLLM's own environment, which may be another than this one: its version, and its plugins by group.
ABOUT = """
import json
from importlib.metadata import entry_points, version
groups = [group for group in entry_points().groups if group.startswith("vllm.")]
print(json.dumps([version("vllm"), {group: sorted(entry_points(group=group).names) for group in groups}]))
"""
ABOUT_S = 30.0
OUR_PLUGIN, ROUTES = "segue", "vllm.endpoint_plugins"
RESTARTS_MAX, RESTARTS_S = 3, 600.0
ASK_S, SHOW_S = 0.5, 10.0
# So long it may take to end its own processes; then what is left of them is killed.
STOP_S = 30.0
ENDING = (signal.SIGINT, signal.SIGTERM)
TAIL_BYTES = 8_192
ADVICE_OF_ROOM = (
    "The card is too small for this model as it is asked for: take a smaller or a quantized one, a shorter context"
    " (--engine-arg=--max-model-len --engine-arg=32768), or end what else uses the card."
)
ENDINGS = {
    re.compile(
        r"out of memory|No available memory for the cache|larger than the (?:available|maximum)"
        r"|Free memory on device|KV cache is needed"
    ): ADVICE_OF_ROOM,
    re.compile(r"unrecognized arguments"): "It does not know one of its flags: see engine_arg.",
    re.compile(r"is not a (?:local folder|valid model)|Repository Not Found|RepositoryNotFound"): (
        "It does not find this model: name one of the Hugging Face hub, or a folder."
    ),
    re.compile(r"Failed to infer device type|no NVIDIA driver|No CUDA GPUs"): (
        "It finds no card that it can use."
    ),
}


def wants_child(settings: Settings) -> bool:
    """Whether vLLM is to be started here."""
    is_vllm = settings.engine == "vllm" and not settings.engine_url
    return is_vllm and not settings.models and settings.engine_discovery == "off"


@contextmanager
def with_engine(settings: Settings) -> Iterator[Settings]:
    """The settings with the URL of a vLLM that was started for them, if they ask for one; it is stopped at the end."""
    if not wants_child(settings):
        if settings.engine_arg:
            raise Misconfigured(
                "engine_arg: only an engine that Segue starts takes flags (no --engine-url)."
            )
        yield settings
        return
    child = EngineChild(settings)
    # Until the server listens for them itself, which is minutes from here. Ctrl-C counts as it does there: also where a
    # script has started this in the background.
    before = {number: signal.signal(number, _leave) for number in ENDING}
    try:
        child.start()
        yield child.settings()
    finally:
        child.stop()
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, _: object) -> None:
    """End in order: what was started is stopped."""
    raise SystemExit(128 + number)


class EngineChild:
    """A vLLM that this process has started."""

    def __init__(self, settings: Settings) -> None:
        if len(settings.model) != 1 or not settings.model[0]:
            raise Misconfigured("model: name the one that vLLM is to serve: --model Qwen/Qwen3-8B.")
        self._settings = settings
        self._model = settings.model[0]
        self._program = _program()
        port = _flag(settings.engine_arg, "--port") or str(PORT)
        if not port.isdecimal():
            raise Misconfigured(f"engine_arg: --port {port} is no number.")
        self._port = int(port)
        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        self.log_path = state / "segue" / f"vllm-{self._port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        # Held while it is started, so that none is behind a server that stops.
        self._starting = Lock()
        self._stopping = Event()
        self._watcher = Thread(target=self._watch, name="vllm", daemon=True)
        self._ended_at: deque[float] = deque(maxlen=RESTARTS_MAX)

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self._port}"

    def settings(self) -> Settings:
        """Those of the server in front of it: its URL, and the tokenizer that vLLM has loaded."""
        tokenizer = self._settings.tokenizer or _tokenizer(self._model)
        return structs.replace(self._settings, engine_url=(self.url,), tokenizer=tokenizer)

    def start(self) -> None:
        """Start it, and wait until it answers; what went wrong is said in words."""
        self._check_port()
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        self.log_path.write_bytes(b"")
        say(f"Starting vLLM with {self._model}; its log: {self.log_path}")
        self._spawn()
        began = shown = time.monotonic()
        assert self._process is not None
        while not self._is_healthy():
            if (status := self._process.poll()) is not None:
                raise Misconfigured(f"engine: vLLM ended with status {status}. {self._why()}")
            time.sleep(ASK_S)
            if time.monotonic() - shown >= SHOW_S:
                shown = time.monotonic()
                last = (self._tail().splitlines() or [""])[-1]
                say(f"  {shown - began:.0f} s: {printable(last)[-120:]}")
        say(f"vLLM answers after {time.monotonic() - began:.0f} s")
        self._watcher.start()

    def stop(self) -> None:
        """End it, with all that it has started."""
        self._stopping.set()
        with self._starting:
            process = self._process
        if process is None or process.poll() is not None:
            return
        process.send_signal(signal.SIGTERM)
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill_rest(process)
        process.wait()
        log.info("vLLM is stopped")

    def _watch(self) -> None:
        """Start it again when it has ended by itself."""
        while True:
            assert self._process is not None
            status = self._process.wait()
            if self._stopping.is_set():
                return
            _kill_rest(self._process)
            now = time.monotonic()
            if len(self._ended_at) == RESTARTS_MAX and now - self._ended_at[0] < RESTARTS_S:
                log.error(
                    "vLLM ended with status %d for the fourth time in ten minutes and is not started again. %s",
                    status, self._why(),
                )  # fmt: skip
                return
            self._ended_at.append(now)
            log.warning("vLLM ended with status %d; it is started again. %s", status, self._why())
            self._spawn()

    def _spawn(self) -> None:
        vllm, plugins = _installed(self._program)
        flags = [*BEST, *(("--enable-scale-out",) if vllm >= SCALE_OUT_SINCE else ())]
        environment = {"VLLM_PLUGINS": ",".join(plugins)} if plugins else {}
        environment |= os.environ
        command = [
            *(*self._program, "serve", self._model, "--served-model-name", self._model),
            *("--host", HOST, "--port", str(self._port)),
            *flags,
            *self._settings.engine_arg,
        ]
        with self._starting, self.log_path.open("ab") as out:
            if self._stopping.is_set():
                return
            self._process = subprocess.Popen(
                command,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                # Ctrl-C in the terminal is for Segue, which drains and then stops it.
                start_new_session=True,
            )

    def _is_healthy(self) -> bool:
        try:
            with urlopen(f"{self.url}/health", timeout=2) as answer:
                return int(answer.status) == 200
        except (URLError, OSError):
            return False

    def _check_port(self) -> None:
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, self._port))
            except OSError:
                raise Misconfigured(
                    f"engine: port {self._port}, which vLLM would take, is in use. If a vLLM runs there:"
                    f" --engine-url {self.url}. Else choose another: --engine-arg=--port --engine-arg={self._port + 1}."
                ) from None

    def _tail(self) -> str:
        with suppress(FileNotFoundError), self.log_path.open("rb") as file:
            file.seek(max(0, self.log_path.stat().st_size - TAIL_BYTES))
            return file.read().decode(errors="replace")
        # Somebody has removed it.
        return ""

    def _why(self) -> str:
        """What its log says of its end."""
        tail = self._tail()
        advice = next((words for pattern, words in ENDINGS.items() if pattern.search(tail)), "")
        errors = [line for line in tail.splitlines() if re.search(r"\bError\b|Error:", line)]
        last = printable(errors[-1].strip())[-300:] if errors else ""
        return " ".join(
            filter(None, (advice, last and f"It said: {last}", f"See {self.log_path}."))
        )


def _kill_rest(process: subprocess.Popen[bytes]) -> None:
    """What it has started and left: an engine core whose API server was killed keeps the card."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _program() -> Sequence[str]:
    """How vLLM is run: the one beside this Python, or the command of that name."""
    if find_spec("vllm") is not None:
        return (sys.executable, "-m", "vllm.entrypoints.cli.main")
    if found := shutil.which("vllm"):
        return (found,)
    raise Misconfigured(
        "engine: vLLM is not installed here, and no --engine-url says where one runs. Install it"
        " (https://docs.vllm.ai/en/latest/getting_started/installation), or give the URL of a server."
    )


def _installed(program: Sequence[str]) -> tuple[tuple[int, ...], list[str]]:
    """vLLM's version, and what to name in VLLM_PLUGINS so that ours is loaded, with all that is loaded without it."""
    python = program[0]
    try:
        if len(program) == 1:
            with open(python, "rb") as file:
                python = file.readline().removeprefix(b"#!").strip().decode(errors="replace")
        if "python" not in Path(python).name:
            # A command of another kind.
            return (), []
        asked = subprocess.run([python, "-c", ABOUT], capture_output=True, timeout=ABOUT_S)
        number, groups = json.loads(asked.stdout)
        version = tuple(map(int, number.split(".")[:2]))
    except (OSError, ValueError, subprocess.SubprocessError):
        return (), []
    # Routes are loaded only where they are named, all others where nothing is.
    others = [name for group, names in groups.items() if group != ROUTES for name in names]
    is_ours = OUR_PLUGIN in groups.get(ROUTES, ())
    return version, [OUR_PLUGIN, *sorted(set(others))] if is_ours else []


def _flag(words: Sequence[str], name: str) -> str | None:
    """The value of a flag among these words, as `--port 9000` or `--port=9000`."""
    for place, word in enumerate(words):
        if word == name and place + 1 < len(words):
            return words[place + 1]
        if word.startswith(f"{name}="):
            return word.partition("=")[2]
    return None


def _tokenizer(model: str) -> str:
    """The folder with the model's tokenizer: its own, or where the Hugging Face hub's files are kept."""
    if Path(model).is_dir():
        return model
    home = Path(os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface")
    hub = Path(os.environ.get("HF_HUB_CACHE") or home / "hub")
    kept = hub / f"models--{model.replace('/', '--')}" / "snapshots"
    found = sorted(kept.glob("*/tokenizer.json"), key=lambda path: path.stat().st_mtime)
    return str(found[-1].parent) if found else ""
