"""Saved state of a training phase: files of at most 15 MiB that a later run resumes from."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = ["SHARD_BYTES", "SavedState", "StateError", "load", "round_to_24_bits", "save"]

SHARD_BYTES = 15 * 2**20
_INDEX = "state.json"
_RAW = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}


class StateError(RuntimeError):
    """A saved state is damaged or belongs to other settings."""


@dataclass(frozen=True)
class SavedState:
    """All that a phase needs to go on.

    Attributes:
        step: steps done.
        seconds: wall time of all pieces so far.
        weights: name to float32 master weight; 24 bits of each value are kept.
        tensors: name to any other tensor (bfloat16, float32, int32, int64), kept whole.
        records: lines of the loss log.
    """

    step: int
    seconds: float
    weights: Mapping[str, Tensor]
    tensors: Mapping[str, Tensor]
    records: list[dict[str, Any]] = field(default_factory=list)


@torch.no_grad()
def round_to_24_bits(weights: Mapping[str, Tensor]) -> None:
    """Round float32 weights in place to what `save` keeps: sign, exponent and 15 mantissa bits.

    Both the run that saves and the one that resumes go on from the same values.
    """
    for weight in weights.values():
        bits = weight.detach().view(torch.int32)
        bits.add_(0x80).bitwise_and_(~0xFF)


def save(folder: Path, state: SavedState, settings: Mapping[str, Any]) -> int:
    """Write the state into `folder` and return its bytes, in files `state-N.bin`, `state.json`.

    All is written beside the old files before the first of them is replaced, so that what a
    kill can break takes no longer than some renames, and `load` notices it.

    Args:
        folder: made if missing.
        state: its weights were rounded by `round_to_24_bits`.
        settings: JSON values; `load` wants the same.
    """
    folder.mkdir(parents=True, exist_ok=True)
    entries: list[dict[str, Any]] = []
    parts: list[np.ndarray[Any, Any]] = []
    for group, members in (("weights", state.weights), ("tensors", state.tensors)):
        for name, tensor in members.items():
            kind = "float24" if group == "weights" else str(tensor.dtype).removeprefix("torch.")
            entries.append({"group": group, "name": name, "kind": kind, "shape": [*tensor.shape]})
            parts.append(_to_bytes(tensor, kind))
    stream = np.concatenate(parts)
    shards = []
    for number, start in enumerate(range(0, len(stream), SHARD_BYTES)):
        content = stream[start : start + SHARD_BYTES].tobytes()
        _part(folder, f"state-{number}.bin").write_bytes(content)
        shards.append(
            {"name": f"state-{number}.bin", "sha256": hashlib.sha256(content).hexdigest()}
        )
    index = {
        "step": state.step,
        "seconds": round(state.seconds, 1),
        "settings": dict(settings),
        "shards": shards,
        "tensors": entries,
        "records": state.records,
    }
    text = json.dumps(index, indent=None, separators=(",", ":"))
    _part(folder, _INDEX).write_text(text, encoding="utf-8")
    for name in (*(shard["name"] for shard in shards), _INDEX):
        os.replace(_part(folder, name), folder / name)
    for stale in folder.glob("state-*.bin"):
        if all(stale.name != shard["name"] for shard in shards):
            stale.unlink()
    return len(stream) + len(text)


def load(
    folder: Path, settings: Mapping[str, Any], device: str | torch.device = "cpu"
) -> SavedState | None:
    """Return the state in `folder`, or None if there is none.

    Raises:
        StateError: it was saved with other settings (the message names each), or a file is
            missing or not the one that was saved.
    """
    if not (folder / _INDEX).exists():
        return None
    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))
    # Through JSON, as the saved ones went: tuples become lists there.
    _check_settings(folder, index["settings"], json.loads(json.dumps(dict(settings))))
    contents = []
    for shard in index["shards"]:
        path = folder / shard["name"]
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest() != shard["sha256"]:
            raise StateError(
                f"`{path}` is not the file that `{_INDEX}` beside it names: a save was cut off. "
                f"Restore the folder from a copy, or delete it to start again."
            )
        contents.append(content)
    stream = np.frombuffer(bytearray(b"".join(contents)), dtype=np.uint8)
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "tensors": {}}
    start = 0
    for entry in index["tensors"]:
        tensor, start = _from_bytes(stream, start, entry["kind"], entry["shape"])
        groups[entry["group"]][entry["name"]] = tensor.to(device)
    return SavedState(
        index["step"], index["seconds"], groups["weights"], groups["tensors"], index["records"]
    )


def _part(folder: Path, name: str) -> Path:
    return folder / f"{name}.part"


def _to_bytes(tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    if kind != "float24" and kind not in _RAW:
        raise StateError(f"a tensor of {kind} cannot be saved; allowed are {sorted(_RAW)}.")
    # `reshape` first: a view of bytes needs at least one dimension.
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
    return flat.reshape(-1, 4)[:, 1:].reshape(-1) if kind == "float24" else flat


def _from_bytes(
    stream: np.ndarray[Any, Any], start: int, kind: str, shape: list[int]
) -> tuple[Tensor, int]:
    count = int(np.prod(shape, dtype=np.int64))
    if kind == "float24":
        end = start + 3 * count
        whole = np.zeros((count, 4), dtype=np.uint8)
        whole[:, 1:] = stream[start:end].reshape(-1, 3)
        return torch.from_numpy(whole.reshape(-1)).view(torch.float32).reshape(shape), end
    end = start + _RAW[kind].itemsize * count
    # A copy, since a view of a wider type must start at a multiple of its size.
    part = torch.from_numpy(stream[start:end].copy())
    return part.view(_RAW[kind]).reshape(shape), end


def _check_settings(folder: Path, saved: dict[str, Any], given: dict[str, Any]) -> None:
    differences = [
        f"`{key}` is {given.get(key)!r} now and was {saved.get(key)!r}"
        for key in sorted(saved.keys() | given.keys())
        if saved.get(key) != given.get(key) or (key in saved) != (key in given)
    ]
    if differences:
        raise StateError(
            f"`{folder}` was saved with other settings: {'; '.join(differences)}. "
            f"Use the same settings, or another folder."
        )
