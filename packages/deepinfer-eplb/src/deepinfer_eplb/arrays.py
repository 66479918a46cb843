"""Named arrays of numbers in files, NPZ or JSON as the name ends: read with care, written at once.

A file comes from anywhere: nothing in it is run, its size is bounded before it is read, and what is
not asked for is refused.
"""

from __future__ import annotations

import io
import json
import lzma
import math
import os
import secrets
import stat
import tokenize
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TypeAlias

import numpy as np
from numpy.typing import NDArray

from deepinfer_eplb.errors import FileError

__all__ = ["Field", "Numbers", "check_name", "fault", "read", "write"]

_MOST_VALUES = 1 << 27  # of an array: a trace of 6000 pieces of 58 layers x 384 experts
_MOST_TEXT = 1 << 26  # bytes of JSON
_MOST_ITEM_BYTES = 8  # of a number
_MOST_DIMS = 8

# What numpy raises at a header that it cannot make out; it reads it as Python's literals.
_BAD_HEADER = (ValueError, TypeError, SyntaxError, RecursionError, tokenize.TokenError)

Numbers: TypeAlias = NDArray[np.number]


@dataclass(frozen=True)
class Field:
    """What a file may hold.

    Attributes:
        num_dims: dimensions of the array; 0 is a number.
        may_lack: whether files are whole without it; then JSON may have null.
    """

    num_dims: int
    may_lack: bool = False


def check_name(path: Path) -> None:
    """Check that a file's name says how it is written.

    Raises:
        FileError: it does not.
    """
    if "\0" in str(path):
        raise FileError(f"{str(path)!r} is no name of a file: it has a zero byte.")
    if path.suffix not in (".json", ".npz"):
        raise FileError(
            f"`{path}` ends in {path.suffix!r}; allowed: .json and .npz. Choose such a name."
        )


def fault(path: Path, message: str) -> FileError:
    """Return the error of a file's content."""
    return FileError(f"`{path}`: {message}")


def write(path: Path, fields: Mapping[str, object]) -> None:
    """Write numbers and arrays; a file of that name is replaced at once, or stays as it is.

    Args:
        path: ends in .json or .npz.
        fields: by name; None is null in JSON and left out of NPZ.
    Raises:
        FileError: the name ends otherwise, or the file cannot be written.
    """
    check_name(path)
    if path.suffix == ".json":
        content = _as_text(fields).encode()
    else:
        stream = io.BytesIO()
        known = {name: np.asarray(each) for name, each in fields.items() if each is not None}
        np.savez_compressed(stream, allow_pickle=False, **known)
        content = stream.getvalue()
    # Written beside and put in place: a reader sees the old file or the new one. Not by `tempfile`,
    # whose files are for their owner alone and keep that in their new place.
    beside = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        try:
            with beside.open("xb") as file:
                file.write(content)
                file.flush()
                os.fsync(file.fileno())
            beside.replace(path)
        finally:
            beside.unlink(missing_ok=True)
    except OSError as error:
        raise FileError(
            f"`{path}` cannot be written: {error.strerror or error}. Choose another file."
        ) from error


def read(path: Path, wanted: Mapping[str, Field]) -> dict[str, Numbers]:
    """Return the fields of a file as arrays of numbers; those that may lack and do are left out.

    Args:
        path: ends in .json or .npz.
        wanted: what it may hold, by name.
    Raises:
        FileError: it cannot be read, is malformed or too large, or holds something else.
    """
    check_name(path)
    try:
        # A pipe or a device would never end.
        if not stat.S_ISREG(path.stat().st_mode):
            raise fault(path, "it is no regular file.")
        fields = (_read_json if path.suffix == ".json" else _read_npz)(path, wanted)
    except OSError as error:
        raise FileError(f"`{path}` cannot be read: {error.strerror or error}.") from error
    for name in wanted:
        if name not in fields and not wanted[name].may_lack:
            raise fault(path, f"`{name}` is missing; needed: {_names(wanted)}.")
    for name, array in fields.items():
        if array.ndim != wanted[name].num_dims:
            needed = wanted[name].num_dims
            raise fault(
                path, f"`{name}` has {array.ndim} dimensions; needed: {needed} (0: a number)."
            )
    return fields


def _check_known(path: Path, name: str, wanted: Mapping[str, Field]) -> None:
    if name not in wanted:
        raise fault(path, f"`{name[:80]}` is unknown; allowed: {_names(wanted)}.")


def _names(wanted: Mapping[str, Field]) -> str:
    return ", ".join(f"`{name}`" + " (optional)" * wanted[name].may_lack for name in wanted)


def _read_npz(path: Path, wanted: Mapping[str, Field]) -> dict[str, Numbers]:
    fields: dict[str, Numbers] = {}
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.removesuffix(".npy")
                _check_known(path, name, wanted)
                if name in fields:
                    raise fault(path, f"`{name}` is there twice.")
                with archive.open(entry) as stream:
                    fields[name] = _read_array(path, name, stream, entry.file_size)
    # RuntimeError: it is encrypted. NotImplementedError: packed in a way that Python has not.
    # UnicodeDecodeError: the name of a member.
    except (
        *(zipfile.BadZipFile, zlib.error, lzma.LZMAError, EOFError, RuntimeError),
        UnicodeDecodeError,
    ) as error:
        raise fault(path, f"it is no sound NPZ file: {error}. Write it anew.") from error
    return fields


def _read_array(path: Path, name: str, stream: IO[bytes], num_bytes: int) -> Numbers:
    """Read an array whose header describes plain numbers, as many as there are, and not too many.

    `numpy.load` would take the header's word for how much memory it needs.
    """
    try:
        version = np.lib.format.read_magic(stream)
        if version == (1, 0):
            shape, by_column, dtype = np.lib.format.read_array_header_1_0(stream)
        elif version == (2, 0):
            shape, by_column, dtype = np.lib.format.read_array_header_2_0(stream)
        else:
            raise ValueError(f"its header has version {version}")
    except _BAD_HEADER as error:
        raise fault(path, f"`{name}` is no array: {error}.") from error
    if dtype.kind not in "iuf" or dtype.itemsize > _MOST_ITEM_BYTES:
        raise fault(
            path, f"`{name}` has dtype {dtype}; needed: integers or floats of 8 bytes at most."
        )
    if not all(type(size) is int and 0 <= size <= _MOST_VALUES for size in shape):
        raise fault(path, f"`{name}` has shape {list(shape)}; allowed: sizes to {_MOST_VALUES}.")
    if len(shape) > _MOST_DIMS:
        raise fault(path, f"`{name}` has {len(shape)} dimensions; allowed: up to {_MOST_DIMS}.")
    count = math.prod(shape)
    if count > _MOST_VALUES:
        raise fault(path, f"`{name}` has {count} values; allowed: up to {_MOST_VALUES}.")
    if num_bytes - stream.tell() != count * dtype.itemsize:
        raise fault(path, f"`{name}` has not the bytes that its shape {list(shape)} needs.")
    values = np.frombuffer(stream.read(count * dtype.itemsize), dtype)
    return values.reshape(shape, order="F" if by_column else "C")


def _read_json(path: Path, wanted: Mapping[str, Field]) -> dict[str, Numbers]:
    if path.stat().st_size > _MOST_TEXT:
        raise fault(path, f"it has {path.stat().st_size} bytes; allowed: {_MOST_TEXT}. Use NPZ.")

    def once(pairs: list[tuple[str, object]]) -> dict[str, object]:
        if len(dict(pairs)) < len(pairs):
            names = [name for name, _ in pairs]
            twice = next(name for name in names if names.count(name) > 1)
            raise fault(path, f"`{twice[:80]}` is there twice.")
        return dict(pairs)

    def no_number(text: str) -> float:
        raise fault(path, f"it has {text}, which is no JSON; needed: finite numbers.")

    try:
        content = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=once, parse_constant=no_number
        )
    except (ValueError, RecursionError) as error:
        raise fault(path, f"it is not JSON: {error}.") from error
    if not isinstance(content, dict):
        raise fault(path, f"it must be one object with {_names(wanted)}.")
    fields: dict[str, Numbers] = {}
    for name, value in content.items():
        _check_known(path, name, wanted)
        if value is not None or not wanted[name].may_lack:
            fields[name] = _as_array(path, name, value, wanted[name].num_dims)
    return fields


def _as_array(path: Path, name: str, value: object, num_dims: int) -> Numbers:
    """Return nested lists of numbers as an array; true and false are none."""
    flat = [value]
    for depth in range(num_dims):
        for each in flat:
            if not isinstance(each, list):
                kind = type(each).__name__
                raise fault(
                    path, f"`{name}` holds a {kind} where a list is needed, {depth} lists deep."
                )
        flat = [item for each in flat for item in each]  # type: ignore[attr-defined]
    kinds = set(map(type, flat))
    if not kinds <= {int, float}:
        kind = min(each.__name__ for each in kinds - {int, float})
        raise fault(path, f"`{name}` holds a {kind} where a number is needed.")
    try:
        return np.array(value, np.float64 if float in kinds else np.int64)
    except (ValueError, OverflowError) as error:
        raise fault(
            path, f"`{name}` has lists of different lengths, or a number that passes 64 bits."
        ) from error


def _as_text(fields: Mapping[str, object]) -> str:
    """Return an object as JSON with a layer a line, so that people and `diff` can read it."""
    lines = []
    for name, value in fields.items():
        if isinstance(value, np.ndarray) and value.ndim == 2:
            rows = ",\n".join(f"    {json.dumps(row)}" for row in value.tolist())
            text = f"[\n{rows}\n  ]"
        else:
            text = json.dumps(value.tolist() if isinstance(value, np.ndarray) else value)
        lines.append(f"  {json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"
