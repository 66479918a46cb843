"""What names the weights of a model folder, so that what was measured with others is refused."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from pathlib import Path

from deepinfer_core.errors import CheckpointError

__all__ = ["checkpoint_hash"]

_PIECE = 2**20
_STRIDE = 64 * _PIECE  # of a larger file every so many bytes are read: hours would pass over all


def checkpoint_hash(folder: Path) -> str:
    """Return `sha256:...` of all weight files of a folder, in the order of names.

    Files of up to 64 MiB count in full; of larger ones their sizes and a MiB of every 64, with the
    first one, which holds names and shapes, and the last.

    Raises:
        CheckpointError: there are none, or one cannot be read.
    """
    digest = hashlib.sha256()
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise CheckpointError(f"`{folder}` has no *.safetensors, so there are no weights to hash.")
    for file in files:
        try:
            for piece in _pieces(file):
                digest.update(piece)
        except OSError as error:
            raise CheckpointError(f"`{file}` cannot be read: {error.strerror}.") from error
    return f"sha256:{digest.hexdigest()}"


def _pieces(file: Path) -> Iterator[bytes]:
    size = file.stat().st_size
    step = _PIECE
    if size > _STRIDE:
        step = _STRIDE
        yield str(size).encode()
    with file.open("rb") as stream:
        for place in (*range(0, size, step), *([size - _PIECE] if step == _STRIDE else [])):
            stream.seek(place)
            yield stream.read(_PIECE)
