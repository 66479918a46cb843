"""The small model that comes with the package: what is used where nobody names another."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from deepinfer_core.errors import CheckpointError

__all__ = ["NAME", "folder"]

NAME = "deepinfer-nano"

_FOLDER = "nano_model"
_WEIGHTS = "model.safetensors"


def folder() -> Path:
    """Return the model's folder, which is data of this package.

    Raises:
        CheckpointError: the package was installed, or checked out, without the weights.
    """
    path = Path(str(files("deepinfer_core") / _FOLDER))
    if not (path / _WEIGHTS).is_file():
        raise CheckpointError(
            f"No model was named, and `{NAME}`, which comes with deepinfer-core, is not at "
            f"`{path}`: its weights were left out here. Name a model folder or a hub id, or "
            "install deepinfer-core from its wheel."
        )
    return path
