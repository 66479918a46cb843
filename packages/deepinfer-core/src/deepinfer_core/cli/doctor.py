"""`deepinfer doctor`: versions, devices, backends, and what runs here."""

from __future__ import annotations

import os
import platform
import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from deepinfer_core.cli.options import print_table, reports_errors
from deepinfer_core.config import ENV_PREFIX, EngineConfig
from deepinfer_core.errors import DeepInferError

if TYPE_CHECKING:
    from deepinfer_core.loader import BackendState

__all__ = ["below", "doctor"]

CUDA_FLOOR = (13, 0)
CANN_FLOOR = (9, 2)

_LIBRARIES = ("torch", "triton", "torch_npu", "numpy", "safetensors", "tokenizers", "pydantic")
_PACKAGES = (  # beside core
    "deepinfer-kernels-cuda",
    "deepinfer-kernels-ascend",
    "deepseek-recipe",
    "deepinfer-eplb",
    "deepinfer-specdec",
)
_CANN_FILES = ("version.cfg", "version.info", "ascend_toolkit_install.info")
_NUMERICS = ("ideal", "cache", "release")
_ABSENT = "not installed"


class Line(NamedTuple):
    """One line of the report; `note` is a warning or a reason."""

    what: str
    found: str
    note: str = ""


@reports_errors
def doctor() -> None:
    """Show versions, devices and backends found, what runs here, and why the rest does not."""
    from deepinfer_core.loader import backend_states

    states = backend_states()
    print_table("Versions", _versions())
    print_table("Devices", _devices())
    print_table("Kernel backends", [_backend(state) for state in states])
    runs = [state.accelerator for state in states if state.why_not is None]
    asked = EngineConfig.load(None, os.environ, {}).accelerator
    if asked is not None:
        print(f"`{ENV_PREFIX}ACCELERATOR` asks for {asked!r}; `--accelerator` wins over it.")
    else:
        print(f"Chosen without `--accelerator`: {runs[0] if runs else 'none runs here'}.")


def below(found: str, floor: tuple[int, ...]) -> bool:
    """Whether a version such as `12.8` or `8.2.RC1` is older than the floor."""
    numbers = tuple(int(part) for part in re.findall(r"\d+", found)[: len(floor)])
    return numbers < floor


def _versions() -> list[Line]:
    import torch

    from deepinfer_core import __version__

    lines = [
        Line("Python", platform.python_version(), platform.platform()),
        Line("deepinfer-core", __version__),
    ]
    lines.append(_shipped_model())
    packages = {name: _version(name) for name in _PACKAGES}
    lines += [Line(name, found) for name, found in packages.items() if found != _ABSENT]
    absent = ", ".join(name for name, found in packages.items() if found == _ABSENT)
    if absent:
        lines.append(Line("other packages", _ABSENT, absent))
    lines += [Line(name, _version(name)) for name in _LIBRARIES]
    cuda = torch.version.cuda
    lines.append(_with_floor("CUDA", cuda or "not in this build of torch", CUDA_FLOOR, bool(cuda)))
    cann = _cann_version()
    lines.append(_with_floor("CANN", cann or "not found", CANN_FLOOR, bool(cann)))
    return lines


def _shipped_model() -> Line:
    from deepinfer_core.model import nano

    try:
        size = sum(file.stat().st_size for file in nano.folder().iterdir())
    except DeepInferError:
        return Line(nano.NAME, "left out", "verbs need `--model`")
    return Line(nano.NAME, f"{size / 2**20:.1f} MiB", "the model of verbs without `--model`")


def _with_floor(name: str, found: str, floor: tuple[int, ...], present: bool) -> Line:
    wanted = ".".join(map(str, floor))
    old = present and below(found, floor)
    return Line(name, found, f"older than {wanted}, which is asked for" if old else "")


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return _ABSENT


def _cann_version() -> str | None:
    """Return the version of Ascend's toolkit, from the files that its installer leaves."""
    homes = [os.environ.get("ASCEND_TOOLKIT_HOME"), os.environ.get("ASCEND_HOME_PATH")]
    for home in (*homes, "/usr/local/Ascend/ascend-toolkit/latest", "/usr/local/Ascend/latest"):
        for file in (Path(home) / name for name in _CANN_FILES) if home else ():
            if file.is_file():
                found = re.search(r"(?i)version\s*=\s*\[?[^\d\n]*(\d+\.[\w.]+)", file.read_text())
                if found:
                    return found[1]
    return None


def _devices() -> list[Line]:
    import torch

    gib = 2**30
    pages = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    lines = [Line("CPU", f"{os.cpu_count()} cores, {pages / gib:.1f} GiB", platform.machine())]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            shape = torch.cuda.get_device_properties(index)
            major, minor = shape.major, shape.minor
            found = f"{shape.name}, {shape.total_memory / gib:.1f} GiB"
            lines.append(Line(f"CUDA {index}", found, f"compute capability {major}.{minor}"))
    npu = getattr(torch, "npu", None)
    if npu is not None and npu.is_available():
        lines += [Line(f"NPU {i}", npu.get_device_name(i)) for i in range(npu.device_count())]
    return lines


def _backend(state: BackendState) -> Line:
    if state.why_not is not None:
        return Line(state.accelerator, "does not run", state.why_not)
    from deepinfer_core.loader import find_backend

    try:
        backend = find_backend(state.accelerator, "release")
    except DeepInferError as error:
        return Line(state.accelerator, "does not run", str(error))
    numerics = ", ".join(mode for mode in _NUMERICS if backend.supports(mode))
    strict = "strict and normal" if backend.supports("strict") else "normal only"
    return Line(state.accelerator, "runs", f"numerics {numerics}; determinism {strict}")
