from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from nano.calibrate import ece, fit, survival

from deepinfer_core.errors import CheckpointError
from deepinfer_core.model.calibration import (
    DrafterCalibration,
    TrafficCalibration,
    checkpoint_hash,
)

TRUE = np.array([0.5, 1.6, 2.5, 0.8, 1.2])


def synthetic(seed: int, count: int = 40_000) -> tuple[np.ndarray, np.ndarray]:
    """Logits whose honest chance is sigmoid(logit / TRUE), and how many drafts passed."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(1.5, 1.5, size=(count, 5))
    passes = rng.random((count, 5)) < 1 / (1 + np.exp(-honest))
    return honest * TRUE, passes.cumprod(1).sum(1)


def test_known_temperatures_are_recovered() -> None:
    logits, accepted = synthetic(seed=0)
    found = fit(logits, accepted)
    assert np.allclose(found.temperatures, TRUE, rtol=0.1)
    assert max(found.ece_after) < 0.015 < max(found.ece_before)


def test_error_stays_low_on_blocks_that_were_not_seen() -> None:
    found = fit(*synthetic(seed=1))
    logits, accepted = synthetic(seed=2)
    predicted = survival(logits, np.array(found.temperatures))
    for k in range(5):
        assert ece(predicted[:, k], accepted > k) < 0.015


def test_error_of_a_sure_prophet_is_how_often_he_is_wrong() -> None:
    assert ece(np.ones(10), np.arange(10) < 7) == pytest.approx(0.3)
    assert ece(np.zeros(10), np.zeros(10, dtype=bool)) == 0
    # two bins: 0.2 too low in one half, 0.1 too high in the other
    predicted = np.repeat([0.3, 0.8], 10)
    happened = np.array([True] * 5 + [False] * 5 + [True] * 7 + [False] * 3)
    assert ece(predicted, happened) == pytest.approx(0.15)


@pytest.mark.parametrize("count", [0, 3])
def test_counts_must_fit_the_logits(count: int) -> None:
    with pytest.raises(ValueError, match="do not fit"):
        fit(np.zeros((count, 5)), np.zeros(count + 1))


# ---- the file -------------------------------------------------------------------------------


@pytest.fixture
def calibration() -> DrafterCalibration:
    five, errors = (0.5, 1.0, 1.0, 2.0, 3.0), (0.1, 0.2, 0.05, 0.0, 1.0)
    measured = TrafficCalibration("greedy", "target_noise", five, "tasks", 20_000, errors, errors)
    return DrafterCalibration(5, "sha256:12", (measured,))


def test_file_is_read_as_it_was_written(tmp_path: Path, calibration: DrafterCalibration) -> None:
    path = tmp_path / "calibration.json"
    calibration.save(path)
    assert DrafterCalibration.load(path, block_size=5, checkpoint="sha256:12") == calibration


@pytest.mark.parametrize(
    ("block_size", "checkpoint", "message"),
    [(4, "sha256:12", "drafts 4"), (5, "sha256:34", "sha256:34")],
)
def test_file_of_another_model_is_refused(
    tmp_path: Path,
    calibration: DrafterCalibration,
    block_size: int,
    checkpoint: str,
    message: str,
) -> None:
    calibration.save(tmp_path / "calibration.json")
    with pytest.raises(CheckpointError, match=message):
        DrafterCalibration.load(
            tmp_path / "calibration.json", block_size=block_size, checkpoint=checkpoint
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"temperatures": [1.0] * 4}, "5 numbers"),
        ({"temperatures": [1.0] * 4 + [0.0]}, r"0\.01 \.\. 100"),
        ({"temperatures": [1.0] * 4 + ["1"]}, r"0\.01 \.\. 100"),
        ({"temperatures": [1.0] * 4 + [10**400]}, r"0\.01 \.\. 100"),
        ({"ece_after": [0.1] * 4 + [7.0]}, r"0\.0 \.\. 1\.0"),
        ({"num_blocks": "many"}, "`num_blocks` 'many'"),
        ({"num_blocks": -1}, "`num_blocks` -1"),
        ({"data_set": None}, "`data_set` None"),
        ({"ece_after": None}, "5 numbers"),
        ({"traffic": "both"}, "`traffic` 'both'"),
        ({"acceptance": "luck"}, "`acceptance` 'luck'"),
        ({"colour": 1}, "exactly these fields"),
    ],
)
def test_malformed_class_is_refused(
    tmp_path: Path, calibration: DrafterCalibration, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "calibration.json"
    calibration.save(path)
    content = json.loads(path.read_text(encoding="utf-8"))
    content["classes"][0] |= change
    path.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(CheckpointError, match=message):
        DrafterCalibration.load(path, block_size=5, checkpoint="sha256:12")


def test_class_may_not_come_twice(tmp_path: Path, calibration: DrafterCalibration) -> None:
    path = tmp_path / "calibration.json"
    replace(calibration, classes=calibration.classes * 2).save(path)
    with pytest.raises(CheckpointError, match="two entries"):
        DrafterCalibration.load(path, block_size=5, checkpoint="sha256:12")


@pytest.mark.parametrize("text", [None, "{", "[]", "{}", "[" * 100_000])
def test_unreadable_file_is_refused(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "calibration.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(CheckpointError, match=r"calibration\.json"):
        DrafterCalibration.load(path, block_size=5, checkpoint="sha256:12")


def test_hash_is_of_all_weights_and_nothing_else(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no weights"):
        checkpoint_hash(tmp_path)
    (tmp_path / "a.safetensors").write_bytes(b"1")
    first = checkpoint_hash(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert checkpoint_hash(tmp_path) == first
    (tmp_path / "b.safetensors").write_bytes(b"2")
    assert checkpoint_hash(tmp_path) != first
