"""Saved state of a training phase: files of at most 15 MiB that a later run resumes from."""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

__all__ = ["SHARD_BYTES", "SavedState", "StateError", "load", "round_to_24_bits", "save"]

SHARD_BYTES = 15 * 2**20
_INDEX = "state.json"
_SHARDS = "state-*.bin"
_SHARD_NAME = re.compile(r"state-[0-9]+-[0-9]+\.bin")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_RAW = {
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "int32": torch.int32,
    "int64": torch.int64,
}
# Bytes of a value.
_WIDTHS = {"float24": 3} | {kind: dtype.itemsize for kind, dtype in _RAW.items()}


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
    """Write the state into `folder` and return its bytes.

    The files are the shards `state-STEP-N.bin` and the index `state.json`, which names them. No
    shard is ever overwritten and the index is replaced in one go, after the new shards were
    written and before the old ones are deleted, so at any moment a kill leaves a whole state.

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
    # Shards of this step may exist, even be those in use, if the step is saved again.
    names = (f"state-{state.step}-{number}.bin" for number in itertools.count())
    for start in range(0, len(stream), SHARD_BYTES):
        content = stream[start : start + SHARD_BYTES].tobytes()
        name = next(name for name in names if not (folder / name).exists())
        _write(folder / name, content)
        shards.append({"name": name, "sha256": hashlib.sha256(content).hexdigest()})
    index = {
        "step": state.step,
        "seconds": round(state.seconds, 1),
        "settings": dict(settings),
        "shards": shards,
        "tensors": entries,
        "records": state.records,
    }
    text = json.dumps(index | {"sha256": _checksum(index)}, separators=(",", ":")).encode()
    part = folder / f"{_INDEX}.part"
    _write(part, text)
    os.replace(part, folder / _INDEX)
    used = {shard["name"] for shard in shards}
    for stale in folder.glob(_SHARDS):
        if stale.name not in used:
            stale.unlink()
    return len(stream) + len(text)


def load(
    folder: Path, settings: Mapping[str, Any], device: str | torch.device = "cpu"
) -> SavedState | None:
    """Return the state in `folder`, or None if there is none.

    Raises:
        StateError: it was saved with other settings (the message names each), or a file is
            missing, damaged or not the one that was saved.
    """
    path = folder / _INDEX
    if not path.exists():
        if any(folder.glob(_SHARDS)):
            _refuse(path, "is missing, but shards of a state lie beside it")
        return None
    index = _read_index(path)
    # Through JSON, as the saved ones went: tuples become lists there.
    _check_settings(folder, index["settings"], json.loads(json.dumps(dict(settings))))
    contents = []
    for shard in index["shards"]:
        file = folder / shard["name"]
        content = file.read_bytes() if file.exists() else b""
        if hashlib.sha256(content).hexdigest() != shard["sha256"]:
            _refuse(file, f"is not the file that `{_INDEX}` names: missing, cut off or changed")
        contents.append(content)
    stream = np.frombuffer(bytearray(b"".join(contents)), dtype=np.uint8)
    entries = index["tensors"]
    if len(stream) != sum(_WIDTHS[entry["kind"]] * math.prod(entry["shape"]) for entry in entries):
        _refuse(path, "names tensors that do not fill its shards")
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "tensors": {}}
    start = 0
    for entry in entries:
        tensor, start = _from_bytes(stream, start, entry["kind"], entry["shape"])
        groups[entry["group"]][entry["name"]] = tensor.to(device)
    return SavedState(
        index["step"], index["seconds"], groups["weights"], groups["tensors"], index["records"]
    )


def _read_index(path: Path) -> dict[str, Any]:
    """Return the index without its checksum; its fields have the types that `save` wrote."""
    try:
        index = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        _refuse(path, "is not JSON: cut off or overwritten")
    if not isinstance(index, dict) or "sha256" not in index:
        _refuse(path, "is not an index with a checksum")
    if index.pop("sha256") != _checksum(index):
        _refuse(path, "does not match its checksum")
    if not _is_well_formed(index):
        _refuse(path, "does not have the fields of an index")
    return index


def _is_well_formed(index: dict[str, Any]) -> bool:
    kinds: dict[str, type | tuple[type, ...]] = {
        "step": int,
        "seconds": (int, float),
        "settings": dict,
        "shards": list,
        "tensors": list,
        "records": list,
    }
    return (
        index.keys() == kinds.keys()
        and all(isinstance(index[key], kind) for key, kind in kinds.items())
        and all(isinstance(record, dict) for record in index["records"])
        and all(
            isinstance(shard, dict)
            and shard.keys() == {"name", "sha256"}
            # Nothing outside the folder is read.
            and _SHARD_NAME.fullmatch(str(shard["name"]))
            and _SHA256.fullmatch(str(shard["sha256"]))
            for shard in index["shards"]
        )
        and all(
            isinstance(entry, dict)
            and entry.keys() == {"group", "name", "kind", "shape"}
            and entry["group"] in ("weights", "tensors")
            and isinstance(entry["name"], str)
            and entry["kind"] in [*_WIDTHS]
            and isinstance(entry["shape"], list)
            and all(isinstance(size, int) and size >= 0 for size in entry["shape"])
            for entry in index["tensors"]
        )
    )


def _checksum(index: Mapping[str, Any]) -> str:
    # Through JSON first: keys that become strings there must sort as strings.
    plain = json.loads(json.dumps(index))
    canonical = json.dumps(plain, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()


def _write(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())  # before a file that names it can be on the disk


def _refuse(path: Path, why: str) -> NoReturn:
    raise StateError(
        f"`{path}` {why}. Restore the folder from a copy, or delete the folder to start again."
    )


def _to_bytes(tensor: Tensor, kind: str) -> np.ndarray[Any, Any]:
    if kind != "float24" and kind not in _RAW:
        raise StateError(f"a tensor of {kind} cannot be saved; allowed are {sorted(_RAW)}.")
    # `reshape` first: a view of bytes needs at least one dimension.
    flat = tensor.detach().reshape(-1).contiguous().cpu().view(torch.uint8).numpy()
    return flat.reshape(-1, 4)[:, 1:].reshape(-1) if kind == "float24" else flat


def _from_bytes(
    stream: np.ndarray[Any, Any], start: int, kind: str, shape: list[int]
) -> tuple[Tensor, int]:
    count = math.prod(shape)
    end = start + _WIDTHS[kind] * count
    if kind == "float24":
        whole = np.zeros((count, 4), dtype=np.uint8)
        whole[:, 1:] = stream[start:end].reshape(-1, 3)
        return torch.from_numpy(whole.reshape(-1)).view(torch.float32).reshape(shape), end
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
