"""Sequential temperature scaling of the drafter's confidences.

    P(the first k drafts pass) = sigmoid(z_1 / t_1) * .. * sigmoid(z_k / t_k)

From the first position to the last, each temperature is the one of a grid under which this product
is nearest to what happened, those before it being fixed.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["NUM_BINS", "Fit", "ece", "fit", "survival"]

NUM_BINS = 15
# 0.1 to 10 in steps of 2.3 %.
_GRID = np.logspace(-1, 1, 201)


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


def survival(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Return the predicted chance that the first k drafts pass, [n, g] float64.

    Args:
        logits: [n, g], before the sigmoid.
        temperatures: [g].
    """
    product: np.ndarray = _sigmoid(logits / temperatures).cumprod(1)
    return product


def ece(predicted: np.ndarray, happened: np.ndarray) -> float:
    """Return the expected calibration error with bins of equal width.

    Args:
        predicted: [n] chances.
        happened: [n] bool.
    """
    bins = np.minimum((predicted * NUM_BINS).astype(np.int64), NUM_BINS - 1)
    gaps = np.bincount(bins, weights=predicted - happened, minlength=NUM_BINS)
    return float(np.abs(gaps).sum() / len(predicted))


def fit(logits: np.ndarray, accepted: np.ndarray) -> Fit:
    """Choose the temperatures.

    Args:
        logits: [n, g] confidences before the sigmoid, of blocks that were verified in full and
            behind which the text goes on for g tokens, so that no count is cut short.
        accepted: [n] drafts accepted, 0..g.
    """
    count, size = logits.shape
    if not count or accepted.shape != (count,):
        raise ValueError(f"logits {logits.shape} and accepted {accepted.shape} do not fit")
    logits = logits.astype(np.float64)
    passed = accepted[:, None] >= np.arange(1, size + 1)
    before = survival(logits, np.ones(size))
    chosen, after = [], []
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


def _sigmoid(x: np.ndarray) -> np.ndarray:
    value: np.ndarray = 0.5 * (1 + np.tanh(0.5 * x))  # no overflow, whatever x
    return value
