"""What an engine constructs, by its options."""

from pathlib import Path

import pytest

from deepinfer_specdec import (
    CalibrationError,
    CostTable,
    CostTableError,
    DelayedPlanner,
    DrafterCalibration,
    Dspark,
    FixedPlanner,
    Rejection,
    SettingError,
    TargetNoise,
    ThresholdPlanner,
    TrafficCalibration,
)

MARK = {"device": "H200"}


@pytest.fixture
def costs(tmp_path: Path) -> Path:
    path = tmp_path / "costs.json"
    CostTable((1, 8), (1.0, 2.0), fingerprint=MARK).save(path)
    return path


@pytest.fixture
def calibration(tmp_path: Path) -> Path:
    path = tmp_path / "calibration.json"
    each = (1.0, 0.5)
    measured = TrafficCalibration("sampled", "target_noise", each, "texts", 9, each, each)
    DrafterCalibration(2, "sha256:1", (measured,)).save(path)
    return path


def make(**changes: object) -> Dspark:
    return Dspark(**(dict(policy="delayed", acceptance="target_noise", num_drafts=2) | changes))


def test_policies_name_planners(costs: Path) -> None:
    table = dict(costs=costs, fingerprint=MARK)
    for policy, kind in (
        ("fixed", FixedPlanner),
        ("threshold", ThresholdPlanner),
        ("delayed", DelayedPlanner),
    ):
        made = make(policy=policy, **table)
        assert isinstance(made.planner, kind) and made.has_costs
        assert made.planner.costs.base.rows == (1, 8)


def test_delayed_without_a_table_verifies_everything() -> None:
    made = make()
    assert isinstance(made.planner, FixedPlanner) and not made.has_costs
    assert isinstance(make(policy="threshold").planner, ThresholdPlanner)


def test_acceptances_name_acceptors() -> None:
    assert isinstance(make().acceptor, TargetNoise)
    assert isinstance(make(acceptance="rejection").acceptor, Rejection)


def test_threshold_and_full_length_steps_reach_the_planner() -> None:
    with pytest.raises(SettingError, match="`threshold` is 2"):
        make(policy="threshold", threshold=2.0)
    with pytest.raises(SettingError, match="`full_every` is -3"):
        make(policy="threshold", full_every=-3)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(policy="best"), "`policy` is 'best'; allowed: `fixed`, `threshold`, `delayed`"),
        (dict(acceptance="all"), "`acceptance` is 'all'; allowed: `target_noise`, `rejection`"),
        (dict(num_drafts=0), "`num_drafts` is 0"),
    ],
)
def test_unknown_options_are_refused(changes: dict[str, object], message: str) -> None:
    with pytest.raises(SettingError, match=message):
        make(**changes)


def test_table_of_another_engine_is_refused(costs: Path) -> None:
    with pytest.raises(CostTableError, match="`device` 'H200' there, 'B200' here"):
        make(costs=costs, fingerprint={"device": "B200"})
    with pytest.raises(CostTableError, match="`device` 'H200' there, absent here"):
        make(costs=costs)


def test_calibration_is_read_and_refused_for_others(calibration: Path) -> None:
    known = dict(calibration=calibration, checkpoint="sha256:1")
    make(**known)
    with pytest.raises(CalibrationError, match="blocks of 2 drafts, but the model drafts 3"):
        make(num_drafts=3, **known)
    with pytest.raises(CalibrationError, match="'sha256:2'"):
        make(calibration=calibration, checkpoint="sha256:2")
    with pytest.raises(CalibrationError, match=r"`acceptance` 'target_noise'.*'rejection'"):
        make(acceptance="rejection", **known)
    with pytest.raises(CalibrationError, match="`checkpoint` is None"):
        make(calibration=calibration)
