"""Entry points and the choice of a kernel backend."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest

from deepinfer_core import loader
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.errors import ConfigError, Unsupported


class Accelerated(CpuBackend):
    """A CPU backend that passes for another one."""

    name = "cuda"


class Absent(Accelerated):
    @staticmethod
    def why_unavailable() -> str | None:
        return "There is no CUDA device."


class Rounded(Accelerated):
    def supports(self, capability: str) -> bool:
        return capability != "ideal" and super().supports(capability)


class Incomplete:
    def __init__(self, numerics: str) -> None:
        self.numerics = numerics

    @staticmethod
    def why_unavailable() -> str | None:
        return None


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch):
    """Make `install("cuda", Class)` look like an installed package."""
    found = {"cpu": "deepinfer_core.cpu.backend:CpuBackend"}
    monkeypatch.setattr(loader, "targets", lambda group: dict(found))
    module = types.ModuleType("pretended_kernels")
    monkeypatch.setitem(sys.modules, module.__name__, module)

    def put(name: str, kind: type) -> None:
        setattr(module, kind.__name__, kind)
        found[name] = f"{module.__name__}:{kind.__name__}"

    return put


def test_cpu_backend_is_found_from_source_without_installed_metadata() -> None:
    assert loader.targets("deepinfer.kernels")["cpu"] == "deepinfer_core.cpu.backend:CpuBackend"


def test_listing_imports_no_backend() -> None:
    code = (
        "import sys; from deepinfer_core import loader; "
        "[loader.targets(group) for group in loader.GROUPS]; "
        "assert not {'torch', 'triton', 'deepinfer_core.cpu'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_best_backend_that_runs_is_taken(install) -> None:
    install("cuda", Accelerated)
    assert isinstance(loader.find_backend(None, "ideal"), Accelerated)


def test_backend_that_cannot_run_is_passed_over(install) -> None:
    install("cuda", Absent)
    assert loader.find_backend(None, "ideal").name == "cpu"


def test_backend_without_the_numerics_is_passed_over(install) -> None:
    install("cuda", Rounded)
    assert loader.find_backend(None, "ideal").name == "cpu"
    assert loader.find_backend(None, "release").name == "cuda"


@pytest.mark.parametrize("word", ["nvidia", "cuda"])
def test_chosen_backend_is_constructed_with_its_numerics(install, word: str) -> None:
    install("cuda", Accelerated)
    backend = loader.find_backend(word, "cache")
    assert (backend.name, backend.numerics) == ("cuda", "cache")


def test_chosen_backend_that_cannot_run_is_an_error_with_the_reason(install) -> None:
    install("cuda", Absent)
    for word in ("nvidia", "cuda"):
        with pytest.raises(ConfigError, match=rf"'{word}'.*no CUDA device.*Runs here: 'cpu'"):
            loader.find_backend(word, "ideal")


def test_chosen_backend_without_the_numerics_names_what_it_has(install) -> None:
    install("cuda", Rounded)
    with pytest.raises(Unsupported, match="'nvidia' lacks `numerics` 'ideal'; it has 'cache'"):
        loader.find_backend("nvidia", "ideal")


@pytest.mark.parametrize(
    ("word", "package"),
    [("nvidia", "deepinfer-kernels-cuda"), ("ascend", "deepinfer-kernels-ascend")],
)
def test_absent_package_is_named_with_what_runs(install, word: str, package: str) -> None:
    message = f"'{word}', but it comes with the package `{package}`, which is not installed. Runs"
    with pytest.raises(ConfigError, match=message):
        loader.find_backend(word, "release")


def test_unknown_accelerator_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tpu'; allowed: 'cpu', 'nvidia' or 'ascend'"):
        loader.find_backend("tpu", "release")


def test_backend_that_lacks_ops_does_not_fit(install) -> None:
    install("cuda", Incomplete)
    with pytest.raises(ConfigError, match=r"lacks .*`attend`.*does not fit"):
        loader.find_backend("nvidia", "release")


def test_entry_point_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "targets", lambda group: {"eplb": "no_such_module:Planner"})
    with pytest.raises(ConfigError, match=r"cannot be loaded from 'no_such_module:Planner'"):
        loader.load_class("deepinfer.planner", "eplb")


def test_name_that_no_package_has_lists_those_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "targets", lambda group: {"eplb": "no_such_module:Planner"})
    with pytest.raises(ConfigError, match=r"No `other`.*found: `eplb`"):
        loader.load_class("deepinfer.planner", "other")


def test_states_tell_what_runs_and_why_the_rest_does_not(install) -> None:
    install("cuda", Absent)
    states = {state.accelerator: state.why_not for state in loader.backend_states()}
    assert states["cpu"] is None
    assert states["nvidia"] == "There is no CUDA device"
    assert "`deepinfer-kernels-ascend`, which is not installed" in str(states["ascend"])
