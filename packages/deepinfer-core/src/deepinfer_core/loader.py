"""Finds the packages around core by entry point, and constructs what was chosen.

Listing imports nothing. With the sources on the path but nothing installed there are no entry
points, so a short built-in table of the same names is tried as well.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepinfer_core.config import ACCELERATORS
from deepinfer_core.errors import ConfigError, Unsupported
from deepinfer_core.interfaces import KernelBackend, Recipe

__all__ = [
    "GROUPS",
    "BackendState",
    "backend_states",
    "find_backend",
    "find_recipe",
    "find_verifier",
    "load_class",
    "targets",
]

KERNELS = "deepinfer.kernels"
VERIFIERS = "deepinfer.verifier"
PLANNERS = "deepinfer.planner"
RECIPES = "deepinfer.recipe"
GROUPS = (KERNELS, VERIFIERS, PLANNERS, RECIPES)

# What entry points say once the packages are installed.
_BUILT_IN: dict[str, dict[str, str]] = {
    KERNELS: {
        "cpu": "deepinfer_core.cpu.backend:CpuBackend",
        "cuda": "deepinfer_kernels_cuda.backend:CudaBackend",
        "npu": "deepinfer_kernels_ascend.backend:AscendBackend",
    },
    VERIFIERS: {"dspark": "deepinfer_specdec.dspark:Dspark"},
    PLANNERS: {"eplb": "deepinfer_eplb.plan:Planner"},
    RECIPES: {
        "deepseek_v4": "deepseek_recipe.recipe:DeepseekV4",
        "deepseek_v41": "deepseek_recipe.recipe:DeepseekV41",
    },
}

# Backends from best to last resort.
_ORDER = ("npu", "cuda", "cpu")
_PACKAGES = {
    "cpu": "deepinfer-core",
    "cuda": "deepinfer-kernels-cuda",
    "npu": "deepinfer-kernels-ascend",
}
_WORDS = {"cpu": "cpu", "cuda": "nvidia", "npu": "ascend"}


@dataclass(frozen=True)
class BackendState:
    """Whether a kernel backend can run here.

    Attributes:
        accelerator: the user's word for it: `cpu`, `nvidia` or `ascend`.
        why_not: None when it runs, else one sentence.
    """

    accelerator: str
    why_not: str | None


def targets(group: str) -> dict[str, str]:
    """Return name -> "module:Class" of what an entry-point group offers. Imports none of it."""
    found = {
        name: target
        for name, target in _BUILT_IN.get(group, {}).items()
        if find_spec(target.partition(".")[0]) is not None
    }
    found.update({point.name: point.value for point in entry_points(group=group)})
    return found


def load_class(group: str, name: str) -> type[Any]:
    """Import the class that an entry point names.

    Raises:
        ConfigError: no package with that name is found, or it cannot be imported.
    """
    found = targets(group)
    if name not in found:
        names = ", ".join(f"`{each}`" for each in sorted(found)) or "nothing"
        raise ConfigError(f"No `{name}` is installed in the group `{group}`; found: {names}.")
    module, _, attribute = found[name].partition(":")
    try:
        loaded: type[Any] = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError, OSError) as error:
        raise ConfigError(
            f"`{name}` of the group `{group}` cannot be loaded from {found[name]!r}: {error}. "
            "Install the package again, in versions that fit together."
        ) from error
    return loaded


def backend_states() -> list[BackendState]:
    """Say for each kernel backend, best first, whether it can run here. Imports those found."""
    found = targets(KERNELS)
    names = [*_ORDER, *sorted(found.keys() - set(_ORDER))]
    return [BackendState(_WORDS.get(name, name), _why_not(name, found)) for name in names]


def find_backend(accelerator: str | None, numerics: str) -> KernelBackend:
    """Construct the chosen kernel backend, or the best one that can run here.

    Args:
        accelerator: `cpu`, `nvidia` (`cuda`), `ascend` (`npu`), or None for the best.
        numerics: `ideal`, `cache` or `release`.

    Raises:
        ConfigError: it is unknown, not installed, or cannot run here.
        Unsupported: it runs but lacks the numerics mode.
    """
    found = targets(KERNELS)
    if accelerator is not None:
        return _explicit(accelerator, numerics, found)
    reasons = []
    for name in _ORDER:
        why_not = _why_not(name, found)
        if why_not is None:
            backend = _construct(name, numerics)
            if backend.supports(numerics):
                return backend
            why_not = f"it lacks `numerics` {numerics!r}"
        reasons.append(f"`{_WORDS[name]}`: {why_not}")
    raise ConfigError("No kernel backend can run here. " + "; ".join(reasons) + ".")


def find_recipe(model_type: str, tokenizer_file: Path) -> Recipe:
    """Construct the conversation format of a checkpoint.

    Args:
        model_type: of its `config.json`.
        tokenizer_file: its `tokenizer.json`.

    Raises:
        ConfigError: no package with a recipe for it is installed, or the tokenizer is missing or
            lacks tokens of the format.
    """
    if model_type not in targets(RECIPES):
        raise ConfigError(
            f"No recipe for `model_type` {model_type!r} is installed, so there is no chat and no "
            "`constraint`; install the package `deepseek-recipe`, or give plain prompts."
        )
    chosen = load_class(RECIPES, model_type)
    try:
        recipe: Recipe = chosen(tokenizer_file)
    except chosen.tokenizer_error as error:
        raise ConfigError(f"The model has no chat format: {error}") from error
    return recipe


def find_verifier() -> type[Any] | None:
    """Return the class of the DSpark verifier, or None where no package brings one.

    Raises:
        ConfigError: there is one, and it cannot be imported.
    """
    return load_class(VERIFIERS, "dspark") if "dspark" in targets(VERIFIERS) else None


def _explicit(accelerator: str, numerics: str, found: dict[str, str]) -> KernelBackend:
    if accelerator not in ACCELERATORS and accelerator not in found:
        raise ConfigError(
            f"`accelerator` is {accelerator!r}; allowed: 'cpu', 'nvidia' or 'ascend'. "
            "Leave it out for the best that is found."
        )
    name = ACCELERATORS.get(accelerator, accelerator)
    why_not = _why_not(name, found)
    if why_not is not None:
        runs = [_WORDS.get(each, each) for each in found if _why_not(each, found) is None]
        raise ConfigError(
            f"`accelerator` is {accelerator!r}, but {why_not}. "
            f"Runs here: {', '.join(map(repr, runs)) or 'nothing'}. Choose that, or leave the "
            "option out; `deepinfer doctor` tells what each backend needs."
        )
    backend = _construct(name, numerics)
    if not backend.supports(numerics):
        can = [mode for mode in ("ideal", "cache", "release") if backend.supports(mode)]
        raise Unsupported(
            f"`accelerator` {accelerator!r} lacks `numerics` {numerics!r}; it has "
            f"{', '.join(map(repr, can))}. Choose one of these, or `accelerator` 'cpu'."
        )
    return backend


def _why_not(name: str, found: dict[str, str]) -> str | None:
    if name not in found:
        package = _PACKAGES.get(name, name)
        return f"it comes with the package `{package}`, which is not installed"
    try:
        reason: str | None = load_class(KERNELS, name).why_unavailable()
    except ConfigError as error:
        return str(error).removesuffix(".")
    return None if reason is None else reason.rstrip(".")


def _construct(name: str, numerics: str) -> KernelBackend:
    backend = load_class(KERNELS, name)(numerics=numerics)
    if not isinstance(backend, KernelBackend):
        names = [each for each in vars(KernelBackend) if not each.startswith("_")]
        missing = [each for each in names if not hasattr(backend, each)]
        raise ConfigError(
            f"Kernel backend `{_WORDS.get(name, name)}` lacks "
            f"{', '.join(f'`{each}`' for each in missing)}: its package "
            f"`{_PACKAGES.get(name, name)}` does not fit this version of deepinfer-core."
        )
    return backend
