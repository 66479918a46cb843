"""Honest confidences: sequential temperature scaling of a drafter, and the file that keeps it.

    P(the first k drafts pass) = sigmoid(z_1 / t_1) * .. * sigmoid(z_k / t_k)

From the first position to the last, each temperature is the one of a grid under which this product
is nearest to what happened, those before it being fixed. Temperatures belong to one drafter, one
checkpoint and one class of traffic, and are refused for any other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from deepinfer_specdec.errors import CalibrationError, VerifyInputError

__all__ = [
    "NUM_BINS",
    "DrafterCalibration",
    "Fit",
    "Temperatures",
    "TrafficCalibration",
    "auc",
    "ece",
    "fit",
    "predicted_survival",
]

NUM_BINS = 15
# 0.1 to 10 in steps of 2.3 %.
_GRID = np.logspace(-1, 1, 201)

# Of greedy requests confidences mean another thing than of sampled ones, and of sampled ones
# another under each rule of acceptance. Greedy acceptance is the same under both rules.
_TRAFFIC = ("greedy", "sampled")
_ACCEPTANCE = ("target_noise", "rejection")
_TEMPERATURES = (0.01, 100.0)


@dataclass(frozen=True)
class Fit:
    """Temperatures and what they gain; g of each.

    Attributes:
        temperatures: of the confidence at each position.
        ece_before, ece_after: expected calibration error of "the first k pass", as a share of 1.
    """

    temperatures: tuple[float, ...]
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


def fit(logits: NDArray[np.floating], accepted: NDArray[np.integer]) -> Fit:
    """Choose the temperatures.

    Args:
        logits: [n, g] confidences before the sigmoid, of blocks that were verified in full and
            behind which the text goes on for g tokens, so that no count is cut short. 20000 blocks
            of held-out traffic or more.
        accepted: [n] drafts accepted, 0 to g.
    Raises:
        VerifyInputError: shapes do not fit, there are no blocks, or a logit is not finite.
    """
    if logits.ndim != 2 or not len(logits) or accepted.shape != logits.shape[:1]:
        raise VerifyInputError(
            f"`logits` {logits.shape!r} and `accepted` {accepted.shape!r} do not fit; they must be "
            f"[blocks, drafts] and [blocks], with at least one block."
        )
    if not np.isfinite(logits).all():
        raise VerifyInputError("`logits` has values that are not finite. Leave those blocks out.")
    count, size = logits.shape
    logits = logits.astype(np.float64)
    passed = accepted[:, None] >= np.arange(1, size + 1)
    before = predicted_survival(logits, np.ones(size))
    chosen: list[float] = []
    after: list[float] = []
    prefix = np.ones(count)
    for k in range(size):
        errors = [ece(prefix * _sigmoid(logits[:, k] / t), passed[:, k]) for t in _GRID]
        best = int(np.argmin(errors))
        chosen.append(float(_GRID[best]))
        after.append(errors[best])
        prefix = prefix * _sigmoid(logits[:, k] / _GRID[best])
    return Fit(
        temperatures=tuple(chosen),
        ece_before=tuple(ece(before[:, k], passed[:, k]) for k in range(size)),
        ece_after=tuple(after),
    )


def predicted_survival(
    logits: NDArray[np.floating], temperatures: NDArray[np.floating]
) -> NDArray[np.float64]:
    """Return the predicted chance that the first k drafts pass, [n, g] float64.

    Args:
        logits: [n, g], before the sigmoid.
        temperatures: [g].
    """
    product: NDArray[np.float64] = _sigmoid(logits / temperatures).cumprod(1)
    return product


def ece(predicted: NDArray[np.floating], happened: NDArray[np.bool_]) -> float:
    """Return the expected calibration error with 15 bins of equal width, as a share of 1.

    Args:
        predicted: [n] chances, at least one.
        happened: [n] bool.
    """
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=predicted - happened, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def auc(predicted: NDArray[np.floating], happened: NDArray[np.bool_]) -> float:
    """Return the chance that what happened was predicted higher than what did not; ties count half.

    Args:
        predicted: [n] chances, or any score.
        happened: [n] bool.
    Returns:
        0 to 1; NaN where all happened or nothing did.
    """
    positive = int(happened.sum())
    negative = len(happened) - positive
    if not positive or not negative:
        return float("nan")
    _, value, count = np.unique(predicted, return_inverse=True, return_counts=True)
    # Mean rank of each value, from 1: equal ones share theirs.
    rank = (count.cumsum() - (count - 1) / 2)[value]
    above = float(rank[happened].sum()) - positive * (positive + 1) / 2
    return above / (positive * negative)


@dataclass(frozen=True)
class TrafficCalibration:
    """What was measured on one class of traffic.

    Attributes:
        traffic: `greedy` or `sampled`.
        acceptance: `target_noise` or `rejection`: the rule while measuring.
        temperatures: one for each draft of a block; the k-th confidence is
            `sigmoid(logit / temperatures[k])`.
        data_set: what the texts were.
        num_blocks: blocks with full-length verification.
        ece_before: expected calibration error of "the first k pass", for each k, as a share of 1,
            with all temperatures 1.
        ece_after: the same with the temperatures.
    """

    traffic: str
    acceptance: str
    temperatures: tuple[float, ...]
    data_set: str
    num_blocks: int
    ece_before: tuple[float, ...]
    ece_after: tuple[float, ...]


@dataclass(frozen=True)
class DrafterCalibration:
    """Content of the file, `calibration.json` in a model folder.

    Attributes:
        block_size: drafts of a block, g.
        checkpoint: hash of the weights it was measured with.
        classes: at most one of each class of traffic.
    """

    block_size: int
    checkpoint: str
    classes: tuple[TrafficCalibration, ...]

    def save(self, path: str | Path) -> None:
        """Write the file."""
        Path(path).write_text(json.dumps(asdict(self), indent=2) + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path, *, block_size: int, checkpoint: str) -> DrafterCalibration:
        """Read the file and check that it is meant for this model.

        Args:
            path: the file.
            block_size: drafts of a block of the model in use.
            checkpoint: hash of the weights in use.
        Raises:
            CalibrationError: it cannot be read, is no calibration, or was measured with another
                block size or other weights.
        """
        path = Path(path)
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CalibrationError(f"`{path}` cannot be read: {error.strerror}.") from error
        except (ValueError, RecursionError) as error:
            raise _fault(path, f"is not JSON: {error}") from error
        found = cls(**_fields(path, cls, content))
        if not isinstance(found.classes, list):
            raise _fault(path, "has `classes` that are no list")
        classes = tuple(_class(path, each, found.block_size) for each in found.classes)
        if len({(each.traffic, each.acceptance) for each in classes}) < len(classes):
            raise _fault(path, "has two entries of one class of traffic")
        if found.block_size != block_size or type(found.block_size) is not int:
            raise CalibrationError(
                f"`{path}` was measured with blocks of {found.block_size} drafts, but the model "
                f"drafts {block_size}. Calibrate again, or remove the file."
            )
        if found.checkpoint != checkpoint:
            raise CalibrationError(
                f"`{path}` was measured with the weights {found.checkpoint!r}, but these are "
                f"{checkpoint!r}. Calibrate again, or remove the file."
            )
        return cls(block_size, checkpoint, classes)

    def temperatures_of(self, traffic: str, acceptance: str) -> tuple[float, ...] | None:
        """Return the temperatures of a class of traffic under a rule, None if none were measured.

        Args:
            traffic: `greedy` or `sampled`.
            acceptance: `target_noise` or `rejection`; of greedy traffic both mean the same.
        Raises:
            CalibrationError: sampled traffic was measured, but under the other rule.
        """
        measured = {each.acceptance: each for each in self.classes if each.traffic == traffic}
        if acceptance in measured:
            return measured[acceptance].temperatures
        if not measured:
            return None
        (other,) = measured.values()
        if traffic == "greedy":
            return other.temperatures
        raise CalibrationError(
            f"The calibration of {traffic} traffic was measured with `acceptance` "
            f"{other.acceptance!r}, but the engine uses {acceptance!r}. Calibrate with that, or "
            f"remove the file."
        )


class Temperatures:
    """Makes confidences of logits, by the temperatures of each request's class of traffic."""

    def __init__(
        self,
        calibration: DrafterCalibration | None = None,
        *,
        num_drafts: int,
        acceptance: str = "target_noise",
    ) -> None:
        """Take the temperatures of a rule.

        Args:
            calibration: what was measured; a class of traffic without temperatures, and all of them
                if it is None, keep the confidences that the drafter gives.
            num_drafts: g, at most the drafts of a block that was measured.
            acceptance: the rule in use, `target_noise` or `rejection`.
        Raises:
            CalibrationError: sampled traffic was measured, but under the other rule, or the
                calibration is of blocks of another size.
        """
        if calibration is not None and calibration.block_size < num_drafts:
            raise CalibrationError(
                f"The calibration is of blocks of {calibration.block_size} drafts, but there are "
                f"{num_drafts}. Calibrate again, or leave it out."
            )
        found = [
            None if calibration is None else calibration.temperatures_of(traffic, acceptance)
            for traffic in _TRAFFIC
        ]
        # Each was fitted with those before it fixed: the first ones hold without the rest.
        ones = (1.0,) * num_drafts
        self._rows = [ones if each is None else each[:num_drafts] for each in found]
        self._on_device: dict[torch.device, Tensor] = {}

    def apply(self, logits: Tensor, sampled: Tensor) -> Tensor:
        """Return calibrated confidences.

        The first call on a device copies the temperatures there; later ones wait for nothing.

        Args:
            logits: [R, g] float32, before the sigmoid.
            sampled: [R] bool, False where the request is greedy.
        Returns:
            [R, g] float32, from 0 to 1.
        Raises:
            VerifyInputError: shapes do not fit.
        """
        if logits.shape != (len(sampled), len(self._rows[0])):
            raise VerifyInputError(
                f"`logits` {tuple(logits.shape)!r} and `sampled` {tuple(sampled.shape)!r} do not "
                f"fit; they must be [R, {len(self._rows[0])}] and [R]."
            )
        if logits.device not in self._on_device:
            self._on_device[logits.device] = torch.tensor(self._rows, device=logits.device)
        greedy, drawn = self._on_device[logits.device].unbind(0)
        return torch.sigmoid(logits / torch.where(sampled[:, None], drawn, greedy))


def _class(path: Path, content: object, block_size: object) -> TrafficCalibration:
    values = _fields(path, TrafficCalibration, content)
    for name, allowed in (("traffic", _TRAFFIC), ("acceptance", _ACCEPTANCE)):
        if values[name] not in allowed:
            raise _fault(path, f"has `{name}` {values[name]!r}; allowed: {allowed}")
    for name in ("temperatures", "ece_before", "ece_after"):
        numbers = values[name]
        if not isinstance(numbers, list) or len(numbers) != block_size:
            raise _fault(path, f"has `{name}` {numbers!r}; there must be {block_size} numbers")
        least, most = _TEMPERATURES if name == "temperatures" else (0.0, 1.0)
        if not all(type(each) in (int, float) and least <= each <= most for each in numbers):
            raise _fault(path, f"has `{name}` {numbers!r}; each must be in {least} .. {most}")
        values[name] = tuple(map(float, numbers))
    if not isinstance(values["data_set"], str):
        raise _fault(path, f"has `data_set` {values['data_set']!r}; it must be a text")
    if type(values["num_blocks"]) is not int or values["num_blocks"] < 1:
        raise _fault(path, f"has `num_blocks` {values['num_blocks']!r}; it must be 1 or more")
    return TrafficCalibration(**values)


def _fields(path: Path, kind: type, content: object) -> dict[str, Any]:
    wanted = {each.name for each in fields(kind)}
    if not isinstance(content, Mapping) or set(content) != wanted:
        names = ", ".join(f"`{name}`" for name in sorted(wanted))
        raise _fault(path, f"must have exactly these fields in one object: {names}")
    return dict(content)


def _fault(path: Path, sentence: str) -> CalibrationError:
    return CalibrationError(f"`{path}` {sentence}. Calibrate again, or remove the file.")


def _sigmoid(x: NDArray[np.floating]) -> NDArray[np.float64]:
    value: NDArray[np.float64] = 0.5 * (1 + np.tanh(0.5 * x))  # no overflow, whatever x
    return value
