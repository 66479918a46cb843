"""The hash that names a folder's weights."""

from pathlib import Path

import pytest

from deepinfer_core.errors import CheckpointError
from deepinfer_core.model import fingerprint
from deepinfer_core.model.fingerprint import checkpoint_hash


def test_hash_is_of_all_weights_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        checkpoint_hash(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"1")
    first = checkpoint_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_hash(tmp_path) == first
    (tmp_path / "b.safetensors").write_bytes(b"2")
    assert checkpoint_hash(tmp_path) != first


@pytest.mark.parametrize("place", [0, 15, 64, 99])
def test_hash_of_a_large_file_is_of_its_size_its_ends_and_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    monkeypatch.setattr(fingerprint, "_PIECE", 16)
    monkeypatch.setattr(fingerprint, "_STRIDE", 64)
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(100))
    before = checkpoint_hash(tmp_path)
    changed = bytearray(100)
    changed[place] = 1
    file.write_bytes(changed)
    assert checkpoint_hash(tmp_path) != before
    file.write_bytes(bytes(101))
    assert checkpoint_hash(tmp_path) != before
