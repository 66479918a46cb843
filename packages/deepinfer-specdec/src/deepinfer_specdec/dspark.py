"""Everything that an engine needs to verify drafts, put together by its options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar

from deepinfer_specdec.accept import Rejection, TargetNoise
from deepinfer_specdec.budget import DelayedPlanner, FixedPlanner, ThresholdPlanner
from deepinfer_specdec.calibrate import DrafterCalibration, Temperatures
from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import CalibrationError, SettingError, SpecdecError

__all__ = ["Dspark"]

_POLICIES = ("fixed", "threshold", "delayed")
_ACCEPTANCES: dict[str, type[TargetNoise] | type[Rejection]] = {
    "target_noise": TargetNoise,
    "rejection": Rejection,
}


class Dspark:
    """Planner, acceptor and calibration of one engine.

    Attributes:
        error: base of what the constructor raises.
    """

    error: ClassVar[type[Exception]] = SpecdecError

    def __init__(
        self,
        *,
        policy: str,
        acceptance: str,
        num_drafts: int,
        block_size: int | None = None,
        threshold: float = 0.15,
        costs: str | Path | None = None,
        fingerprint: Mapping[str, str | int] | None = None,
        calibration: str | Path | None = None,
        checkpoint: str | None = None,
        full_every: int = 100,
    ) -> None:
        """Read the files and put the parts together.

        Args:
            policy: `fixed` verifies all drafts; `threshold` as many as had a survival of at least
                `threshold`; `delayed` as many as promise the most tokens per second, which takes a
                cost table: without one it verifies all.
            acceptance: `target_noise` keeps the text of plain decoding, `rejection` keeps its
                distribution and accepts more.
            num_drafts: g, drafts of a request in a step.
            block_size: drafts of a block of the drafter, of which the first g are used; the
                calibration must be of such blocks. None is g.
            threshold: the least survival of the policy `threshold`, 0 to 1.
            costs: a file of `CostTable.save`.
            fingerprint: of this engine; the one in the file must be equal.
            calibration: a file of `DrafterCalibration.save`; without one confidences are taken as
                the drafter gives them.
            checkpoint: hash of the weights in use; the one in the calibration must be equal.
            full_every: `threshold` and `delayed` verify all drafts every so many steps, 0 for
                never, so that some records are uncensored.
        Raises:
            SettingError: an option has a value that is not allowed.
            CostTableError: the table cannot be read or belongs to another engine.
            CalibrationError: the calibration cannot be read, or belongs to another drafter,
                checkpoint or rule.
        """
        _allowed("policy", policy, _POLICIES)
        _allowed("acceptance", acceptance, tuple(_ACCEPTANCES))
        if num_drafts < 1:
            raise SettingError(f"`num_drafts` is {num_drafts}; allowed: 1 or more drafts a block.")
        table = None if costs is None else CostTable.load(costs, fingerprint or {})
        self._has_costs = table is not None
        self._planner: FixedPlanner | ThresholdPlanner | DelayedPlanner
        if policy == "threshold":
            self._planner = ThresholdPlanner(threshold, table, full_every=full_every)
        elif policy == "delayed" and table is not None:
            self._planner = DelayedPlanner(table, full_every=full_every)
        else:
            self._planner = FixedPlanner(table)
        self._acceptor = _ACCEPTANCES[acceptance]()
        measured = None
        if calibration is not None:
            if checkpoint is None:
                raise CalibrationError(
                    f"`calibration` is `{calibration}`, but `checkpoint` is None. Give the hash of "
                    f"the weights in use, so that temperatures of other weights are refused."
                )
            measured = DrafterCalibration.load(
                calibration, block_size=block_size or num_drafts, checkpoint=checkpoint
            )
        self._calibration = Temperatures(measured, num_drafts=num_drafts, acceptance=acceptance)

    @property
    def planner(self) -> FixedPlanner | ThresholdPlanner | DelayedPlanner:
        """Chooses how many drafts, and which."""
        return self._planner

    @property
    def acceptor(self) -> TargetNoise | Rejection:
        """Decides which drafts stand."""
        return self._acceptor

    @property
    def calibration(self) -> Temperatures:
        """Makes confidences honest."""
        return self._calibration

    @property
    def has_costs(self) -> bool:
        """Whether a cost table is in use; without one `delayed` verifies all drafts."""
        return self._has_costs

    @staticmethod
    def write_costs(
        path: str | Path,
        samples: Mapping[int, Sequence[float]],
        *,
        fingerprint: Mapping[str, str | int],
    ) -> None:
        """Store a table of measured steps, as the keyword `costs` takes it.

        Args:
            path: where it goes.
            samples: rows -> seconds of timed steps of that size; at least two sizes.
            fingerprint: of the engine that ran them.
        Raises:
            CostTableError: the samples make no table.
            OSError: the file cannot be written.
        """
        CostTable.of(samples, fingerprint=fingerprint).save(path)


def _allowed(name: str, value: str, values: tuple[str, ...]) -> None:
    if value not in values:
        names = ", ".join(f"`{each}`" for each in values)
        raise SettingError(f"`{name}` is {value!r}; allowed: {names}.")
