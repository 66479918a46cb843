"""The safetensors files of a model folder: which there are, and what their headers say.

A file is: 8 bytes header length (little-endian), a JSON header, then the data. The header gives
each tensor's dtype, shape and byte range, so nothing but headers is read here.
"""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TypeGuard

from deepinfer_core.errors import CheckpointError

__all__ = ["INDEX_NAME", "Folder", "StoredTensor", "read_folder"]

INDEX_NAME = "model.safetensors.index.json"

_LENGTH_BYTES = 8
# The format's own limit: a longer header means that this is some other kind of file.
_MAX_HEADER_BYTES = 100_000_000

_ITEM_BITS = {
    "BOOL": 8, "I8": 8, "U8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32,
    "I64": 64, "U64": 64, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies: `num_bytes` at `offset` of the file, its dtype name and shape."""

    path: Path
    offset: int
    num_bytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Folder:
    """What the safetensors files of a folder hold.

    Attributes:
        tensors: the tensors by name, from every file that could be read.
        faults: what is wrong with files, one sentence each.
        lost: names that the index places in files that are absent or unreadable.
        complete: False if a file could not be read and nothing says what it would have held.
    """

    tensors: dict[str, StoredTensor]
    faults: list[str]
    lost: frozenset[str]
    complete: bool


def read_folder(folder: Path) -> Folder:
    """Read the headers of a folder's safetensors files: those of its index, else all.

    Raises:
        CheckpointError: it is not a folder, holds no safetensors files, or its index cannot be
            read. Faults of single files are returned.
    """
    if not folder.is_dir():
        state = "is a file" if folder.exists() else "does not exist"
        raise CheckpointError(f"Model folder `{folder}` {state}; give the path of a folder.")
    index = _read_index(folder / INDEX_NAME) if (folder / INDEX_NAME).exists() else None
    names = sorted(set(index.values()) if index else {p.name for p in folder.glob("*.safetensors")})
    if not names:
        raise CheckpointError(
            f"Model folder `{folder}` holds no *.safetensors file. Finish the download, or make "
            f"a random model with `deepinfer bench make-checkpoint`."
        )
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    bad_files: set[str] = set()
    for name in names:
        try:
            found, fault = _read_header(folder / name)
        except CheckpointError as error:
            faults.append(str(error))
            bad_files.add(name)
            continue
        faults += fault
        for key in sorted(found.keys() & tensors.keys()):
            faults.append(f"`{key}` is in both `{tensors[key].path.name}` and `{name}`.")
        tensors.update(found)
    lost = frozenset(key for key, name in (index or {}).items() if name in bad_files)
    return Folder(tensors, faults, lost, complete=index is not None or not bad_files)


def _read_index(path: Path) -> dict[str, str]:
    """Return the index's map of tensor names to files."""
    problem = "has no `weight_map` of tensor names to file names"
    try:
        weight_map = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
    except OSError as error:
        raise CheckpointError(f"`{path}` cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(
            f"`{path}` is not valid JSON ({error}). It may be half written; fetch it again."
        ) from error
    except (KeyError, TypeError) as error:
        raise CheckpointError(f"`{path}` {problem}.") from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"`{path}` {problem}.")
    for name in weight_map.values():
        if not isinstance(name, str) or Path(name).name != name:
            raise CheckpointError(
                f"`{path}` names the file {name!r}; files must lie beside the index."
            )
    return weight_map


def _read_header(path: Path) -> tuple[dict[str, StoredTensor], list[str]]:
    """Return what one file says it holds, and its fault if its data are not all there.

    Raises:
        CheckpointError: there is no header to go by; one sentence that names the file.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            start = _LENGTH_BYTES + length
            if size < _LENGTH_BYTES:
                raise CheckpointError(f"`{path.name}` is truncated: it has {size} bytes.")
            if length > _MAX_HEADER_BYTES:
                raise CheckpointError(f"`{path.name}` is not a safetensors file.")
            if size < start:
                raise CheckpointError(
                    f"`{path.name}` is truncated: its header alone has {start} bytes, "
                    f"the file {size}."
                )
            header = json.loads(file.read(length))
    except FileNotFoundError as error:
        raise CheckpointError(f"`{path.name}` is absent, but `{INDEX_NAME}` names it.") from error
    except OSError as error:
        raise CheckpointError(f"`{path.name}` cannot be read: {error.strerror}.") from error
    except ValueError as error:
        raise CheckpointError(f"`{path.name}` has a header that is not JSON.") from error
    if not isinstance(header, dict):
        raise CheckpointError(f"`{path.name}` has a header that is not a JSON object.")
    header.pop("__metadata__", None)
    tensors = {name: _read_entry(path, start, name, entry) for name, entry in header.items()}
    end = max((t.offset + t.num_bytes for t in tensors.values()), default=start)
    if size == end:
        return tensors, []
    state = "is truncated" if size < end else "has bytes after its last tensor"
    fault = f"`{path.name}` {state}: its header describes {end} bytes, the file has {size}."
    return tensors, [fault]


def _read_entry(path: Path, start: int, name: str, entry: object) -> StoredTensor:
    broken = CheckpointError(f"`{path.name}` has a broken header: entry `{name}` is {entry!r}.")
    if not isinstance(entry, dict) or str(entry.get("dtype")) not in _ITEM_BITS:
        raise broken
    dtype, shape, offsets = str(entry["dtype"]), entry.get("shape"), entry.get("data_offsets")
    if not _are_sizes(shape) or not _are_sizes(offsets) or len(offsets) != 2:
        raise broken
    num_bytes = math.prod(shape) * _ITEM_BITS[dtype] // 8
    if offsets[1] - offsets[0] != num_bytes:
        raise broken
    return StoredTensor(path, start + offsets[0], num_bytes, dtype, tuple(shape))


def _are_sizes(value: object) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(isinstance(n, int) and n >= 0 for n in value)
