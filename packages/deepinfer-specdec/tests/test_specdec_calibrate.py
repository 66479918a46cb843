"""Calibration: temperatures are found, the file is kept and refused, confidences are scaled."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from deepinfer_specdec import (
    CalibrationError,
    DrafterCalibration,
    Temperatures,
    TrafficCalibration,
    VerifyInputError,
    auc,
    ece,
    fit,
)
from deepinfer_specdec.calibrate import predicted_survival

DISTORTION = np.array([0.5, 2.0, 1.0, 1.7, 0.7])


def traffic(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Logits that are too large by DISTORTION, and how many drafts were accepted."""
    rng = np.random.default_rng(seed)
    honest = rng.normal(1.5, 1.5, (count, len(DISTORTION)))
    passed = rng.random(honest.shape) < 1 / (1 + np.exp(-honest))
    return honest * DISTORTION, np.cumprod(passed, axis=1).sum(axis=1)


def test_fit_recovers_known_temperatures_and_makes_survival_honest() -> None:
    logits, accepted = traffic(60_000, 0)
    found = fit(logits, accepted)
    assert np.abs(np.array(found.temperatures) / DISTORTION - 1).max() < 0.10
    assert max(found.ece_after) < 0.015
    assert max(found.ece_before) > 0.03  # else there was nothing to find
    # On blocks it has not seen.
    fresh, happened = traffic(60_000, 1)
    predicted = predicted_survival(fresh, np.array(found.temperatures))
    for k in range(5):
        assert ece(predicted[:, k], happened > k) < 0.015


def test_calibration_error_of_honest_chances_is_small_and_of_others_is_not() -> None:
    rng = np.random.default_rng(1)
    chance = rng.random(100_000)
    happened = rng.random(100_000) < chance
    assert ece(chance, happened) < 0.01
    assert ece(np.full(100_000, 1.0), happened) == pytest.approx(0.5, abs=0.01)
    assert ece(chance**2, happened) > 0.1


def test_auc_counts_pairs_in_the_right_order() -> None:
    predicted = np.array([0.1, 0.4, 0.4, 0.8])
    assert auc(predicted, np.array([False, False, True, True])) == (1 + 1 + 1 + 0.5) / 4
    assert auc(predicted, np.array([True, True, False, False])) == 0.5 / 4
    assert np.isnan(auc(predicted, np.array([True] * 4)))
    rng = np.random.default_rng(2)
    score, happened = rng.integers(0, 20, 300), rng.random(300) < 0.3
    pairs = np.sign(score[happened][:, None] - score[~happened]) / 2 + 0.5
    assert auc(score, happened) == pytest.approx(pairs.mean())


def test_fit_refuses_what_it_cannot_use() -> None:
    with pytest.raises(VerifyInputError, match="at least one block"):
        fit(np.zeros((0, 5)), np.zeros(0, dtype=np.int64))
    with pytest.raises(VerifyInputError, match=r"\(3,\)"):
        fit(np.zeros((4, 5)), np.zeros(3, dtype=np.int64))
    with pytest.raises(VerifyInputError, match="not finite"):
        fit(np.array([[np.nan]]), np.array([1]))


# ---- the file -----------------------------------------------------------------------------------

EACH = (0.5, 2.0)


def measured(traffic: str = "greedy", acceptance: str = "target_noise") -> TrafficCalibration:
    return TrafficCalibration(traffic, acceptance, EACH, "texts", 20_000, (0.05, 0.1), (0.01, 0.0))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    DrafterCalibration(2, "sha256:1", (measured(), measured("sampled"))).save(tmp_path / "c.json")
    return tmp_path / "c.json"


def test_file_is_read_as_it_was_written(path: Path) -> None:
    found = DrafterCalibration.load(path, block_size=2, checkpoint="sha256:1")
    assert found == DrafterCalibration(2, "sha256:1", (measured(), measured("sampled")))


def test_file_of_another_drafter_or_checkpoint_is_refused(path: Path) -> None:
    with pytest.raises(CalibrationError, match="blocks of 2 drafts, but the model drafts 5"):
        DrafterCalibration.load(path, block_size=5, checkpoint="sha256:1")
    with pytest.raises(CalibrationError, match="'sha256:1', but these are 'sha256:9'"):
        DrafterCalibration.load(path, block_size=2, checkpoint="sha256:9")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"traffic": "both"}, "`traffic` 'both'"),
        ({"acceptance": "none"}, "`acceptance` 'none'"),
        ({"temperatures": [1.0]}, "there must be 2 numbers"),
        ({"temperatures": [1.0, 0.0]}, r"in 0\.01 \.\. 100\.0"),
        ({"temperatures": [1.0, True]}, "each must be in"),
        ({"ece_after": [0.1, 1.5]}, "`ece_after`"),
        ({"data_set": 3}, "`data_set` 3"),
        ({"num_blocks": 0}, "`num_blocks` 0"),
        ({"more": 0}, "exactly these fields"),
    ],
)
def test_file_with_a_wrong_class_is_refused(
    path: Path, change: dict[str, object], message: str
) -> None:
    content = json.loads(path.read_text())
    content["classes"][1] |= change
    path.write_text(json.dumps(content))
    with pytest.raises(CalibrationError, match=message):
        DrafterCalibration.load(path, block_size=2, checkpoint="sha256:1")


def test_file_that_is_no_calibration_is_refused(path: Path) -> None:
    content = json.loads(path.read_text())
    for text, message in (
        ("{", "is not JSON"),
        ("[]", "exactly these fields"),
        (json.dumps(content | {"classes": 1}), "no list"),
        (json.dumps(content | {"classes": content["classes"][:1] * 2}), "two entries"),
        (json.dumps(content | {"block_size": True, "classes": []}), "blocks of True"),
    ):
        path.write_text(text)
        with pytest.raises(CalibrationError, match=message):
            DrafterCalibration.load(path, block_size=2, checkpoint="sha256:1")
    with pytest.raises(CalibrationError, match="cannot be read"):
        DrafterCalibration.load(path.parent / "none", block_size=2, checkpoint="sha256:1")


# ---- confidences --------------------------------------------------------------------------------

LOGITS = torch.tensor([[1.0, -2.0], [1.0, -2.0]])
SAMPLED = torch.tensor([False, True])


def test_each_class_of_traffic_has_its_own_temperatures() -> None:
    calibration = DrafterCalibration(
        2, "", (measured(), TrafficCalibration("sampled", "rejection", (4.0, 1.0), "", 1, (), ()))
    )
    found = Temperatures(calibration, num_drafts=2, acceptance="rejection").apply(LOGITS, SAMPLED)
    assert found.equal(torch.sigmoid(torch.tensor([[2.0, -1.0], [0.25, -2.0]])))
    assert found.dtype == torch.float32


def test_without_a_calibration_the_drafter_is_believed() -> None:
    assert Temperatures(num_drafts=2).apply(LOGITS, SAMPLED).equal(torch.sigmoid(LOGITS))


def test_class_that_was_not_measured_is_believed_too() -> None:
    greedy_alone = DrafterCalibration(2, "", (measured(),))
    for acceptance in ("target_noise", "rejection"):
        found = Temperatures(greedy_alone, num_drafts=2, acceptance=acceptance)
        expected = torch.sigmoid(torch.tensor([[2.0, -1.0], [1.0, -2.0]]))
        assert found.apply(LOGITS, SAMPLED).equal(expected)


def test_sampled_traffic_of_the_other_rule_is_refused() -> None:
    other = DrafterCalibration(2, "", (measured("sampled", "rejection"),))
    with pytest.raises(CalibrationError, match="'rejection', but the engine uses 'target_noise'"):
        Temperatures(other, num_drafts=2)


def test_blocks_of_another_size_are_refused() -> None:
    with pytest.raises(CalibrationError, match="blocks of 2 drafts, but there are 5"):
        Temperatures(DrafterCalibration(2, "", ()), num_drafts=5)
    with pytest.raises(VerifyInputError, match=r"\[R, 5\]"):
        Temperatures(num_drafts=5).apply(LOGITS, SAMPLED)
