"""Models that Ollama or LM Studio have on this machine are served by their names."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from segue.errors import Misconfigured
from segue.settings.checks import load_settings
from segue_embedded.weights import find_weights, found_weights, remove_weights

MODEL = "application/vnd.ollama.image.model"


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def in_ollama(folder: Path, name: str, data: bytes = b"GGUF x", kind: str = MODEL) -> Path:
    """A model as Ollama keeps it: HOST/NAMESPACE/NAME/TAG."""
    digest = f"{sum(name.encode()):064x}"
    manifest = folder / "manifests" / name
    manifest.parent.mkdir(parents=True, exist_ok=True)
    layers = [
        {"mediaType": kind, "digest": f"sha256:{digest}", "size": len(data)},
        {"mediaType": "application/vnd.ollama.image.license", "digest": f"sha256:{'f' * 64}"},
    ]
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(exist_ok=True)
    blob.write_bytes(data)
    return blob


def in_lmstudio(folder: Path, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"GGUF y")
    return path


def listed() -> dict[str, Path | None]:
    return {row.name: row.path for row in found_weights()}


def test_ollamas_models_by_the_names_that_ollama_shows(home: Path) -> None:
    folder = home / ".ollama" / "models"
    blobs = {
        name: in_ollama(folder, place)
        for name, place in {
            "qwen3:latest": "registry.ollama.ai/library/qwen3/latest",
            "qwen3:4b": "registry.ollama.ai/library/qwen3/4b",
            "anna/small:latest": "registry.ollama.ai/anna/small/latest",
            "hf.co/anna/small:Q4_K_M": "hf.co/anna/small/Q4_K_M",
        }.items()
    }
    assert listed() == {f"ollama:{name}": path for name, path in blobs.items()}
    for name, path in blobs.items():
        assert find_weights(f"ollama:{name}") == path
    assert find_weights("ollama:qwen3") == blobs["qwen3:latest"]
    with pytest.raises(
        Misconfigured, match=r"'ollama:llama3' is not in Ollama's models.*ollama:qwen3:4b, ollama:"
    ):
        find_weights("ollama:llama3")
    with pytest.raises(Misconfigured, match="is not in Ollama's models"):
        find_weights("ollama:../../../x")
    with pytest.raises(Misconfigured, match="remove it with the program that has it"):
        remove_weights("ollama:qwen3")


def test_other_folder_of_ollama(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_ollama(home / ".ollama" / "models", "registry.ollama.ai/library/near/latest")
    far = in_ollama(home / "far", "registry.ollama.ai/library/far/latest")
    monkeypatch.setenv("OLLAMA_MODELS", str(home / "far"))
    assert listed() == {"ollama:far:latest": far}


@pytest.mark.parametrize(
    "data, kind", [(b"PK", MODEL), (b"GGUF", "application/vnd.ollama.image.tensor")]
)
def test_ollamas_model_that_is_no_gguf_file(home: Path, data: bytes, kind: str) -> None:
    in_ollama(home / ".ollama/models", "registry.ollama.ai/library/odd/latest", data, kind)
    assert listed() == {}
    with pytest.raises(Misconfigured, match="'odd' has no GGUF file"):
        find_weights("ollama:odd")


def test_lmstudios_models_by_every_name_that_fits_one_file(home: Path) -> None:
    old, new = home / ".cache/lm-studio/models", home / ".lmstudio/models"
    small = in_lmstudio(new, "anna/Small-1B-GGUF/Small-1B-Q4_K_M.gguf")
    in_lmstudio(new, "anna/Small-1B-GGUF/mmproj-Small-1B.gguf")
    big = in_lmstudio(old, "ben/Big-GGUF/Big-Q8_0-00001-of-00002.gguf")
    in_lmstudio(old, "ben/Big-GGUF/Big-Q8_0-00002-of-00002.gguf")
    for name in ("small-1b", "Small-1B-GGUF", "anna/small-1b", "small-1b-q4_k_m", "Small-1B-Q4_K_M.gguf",
                 "anna/Small-1B-GGUF/Small-1B-Q4_K_M.gguf"):  # fmt: skip
        assert find_weights(f"lmstudio:{name}") == small
    assert find_weights("lmstudio:big-q8_0") == big
    assert set(listed().values()) == {small, big}
    in_lmstudio(new, "anna/Small-1B-GGUF/Small-1B-Q8_0.gguf")
    with pytest.raises(
        Misconfigured, match=r"fits several files.*Q4_K_M.gguf, lmstudio:anna/.*Q8_0.gguf"
    ):
        find_weights("lmstudio:small-1b")
    assert find_weights("lmstudio:anna/Small-1B-GGUF/Small-1B-Q4_K_M.gguf") == small
    with pytest.raises(
        Misconfigured, match=r"is not in the folders of LM Studio.*There are: lmstudio:"
    ):
        find_weights("lmstudio:other")


def test_machine_with_neither(home: Path) -> None:
    for name in ("ollama:x", "lmstudio:x"):
        with pytest.raises(Misconfigured, match="There is no model"):
            find_weights(name)
    assert listed() == {}


@pytest.mark.parametrize(
    "flags, name, weights",
    [
        ({"model": ["ollama:qwen3:4b"]}, "qwen3:4b", "ollama:qwen3:4b"),
        ({"model": ["lmstudio:anna/Small/S.Q4.gguf"]}, "S.Q4", "lmstudio:anna/Small/S.Q4.gguf"),
        ({"model": ["hf:anna/Small-1.5B-GGUF"]}, "Small-1.5B-GGUF", "hf:anna/Small-1.5B-GGUF"),
        # Another engine's own name.
        ({"model": ["ollama:x"], "engine": "chat", "engine_url": ["http://127.0.0.1:1"]}, "ollama:x", ""),
    ],
)  # fmt: skip
def test_clients_ask_for_the_name_that_the_other_program_has(
    flags: dict[str, object], name: str, weights: str
) -> None:
    (model,) = load_settings(flags, environment={}).named_models()
    assert (model.name, model.weights) == (name, weights)
