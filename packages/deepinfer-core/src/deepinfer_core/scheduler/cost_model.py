"""How long a prefill chunk takes: predicted, inverted, fitted to measurements, and kept up to date.

A chunk of x new tokens behind c tokens of context takes, in nanoseconds,

    k0 + k1 * (x + replayed rows) + k2 * (2 * c * x + x * x) + k3 * c + kt * (rows of the tail)

`k0` is paid once a step, whatever the number of chunks. Rows of the tail are those that run the
late layers too, from the prompt's last window on.
"""

from __future__ import annotations

import json
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from deepinfer_core.errors import ConfigError, OutputError, shown
from deepinfer_core.scheduler.chunk_work import (
    ChunkWork,
    Sample,
    least_squares,
    non_negative,
    to_columns,
)

__all__ = ["MAX_RESIDUAL", "CostModel", "OnlineCostModel", "Origin"]

MAX_RESIDUAL = 0.10  # p95 of |predicted / measured - 1| above which a fit is of no use
MAX_CHUNK = 1 << 40  # tokens; more than any chunk, so that an inversion always ends

_NAMES = ("k0", "k1", "k2", "k3", "kt")
_PAIRS = _NAMES.index("k2")
_FORMAT = "deepinfer prefill cost model"
_VERSION = 1
_ORIGIN = {"device", "versions", "command"}
_LARGEST = 1e18  # ns; 30 years
_AGAIN = "Make the file with `deepinfer bench startup --save FILE`, or leave `cost_model` out."


@dataclass(frozen=True, slots=True)
class Origin:
    """Where and how a model was measured: for people, and to tell a file of another machine."""

    device: str
    versions: Mapping[str, str] = field(hash=False)
    command: str


@dataclass(frozen=True, slots=True)
class CostModel:
    """Coefficients in ns, each >= 0; `k2` > 0.

    Args:
        k0: of a step.
        k1: of a row: projections, experts.
        k2: of a pair, counted twice: indexer and attention.
        k3: of a token of context.
        kt: of a row of the tail, on top of `k1`.
        origin: None for a model that was made up.

    Raises:
        ConfigError: a coefficient is out of range.
    """

    k0: float
    k1: float
    k2: float
    k3: float
    kt: float
    origin: Origin | None = field(default=None, compare=False, kw_only=True)

    def __post_init__(self) -> None:
        """Check every coefficient."""
        for name, value in zip(_NAMES, self.coefficients(), strict=True):
            low = "> 0" if name == "k2" else ">= 0"
            if not 0 <= value <= _LARGEST or (name == "k2" and not value):
                raise ConfigError(
                    f"Coefficient `{name}` of the cost model is {value!r} ns; it must be {low} and "
                    f"at most {_LARGEST:g}. {_AGAIN}"
                )

    def coefficients(self) -> tuple[float, float, float, float, float]:
        """Return k0, k1, k2, k3, kt in ns."""
        return (self.k0, self.k1, self.k2, self.k3, self.kt)

    def predict(
        self,
        context: int,
        num_tokens: int,
        *,
        first: bool,
        replay_rows: int = 0,
        tail_rows: int = 0,
    ) -> int:
        """Return the time of a chunk in ns.

        Args:
            context: tokens of the sequence that are computed.
            num_tokens: new tokens, at least 0.
            first: whether it is the step's first chunk, which pays for the step.
            replay_rows: rows before the new ones that only rebuild windows.
            tail_rows: of all its rows, those that run the late layers.
        """
        time = self.k1 * (num_tokens + replay_rows)
        time += self.k2 * ((2 * context + num_tokens) * num_tokens)
        time += self.k3 * context + self.kt * tail_rows
        return int(time + (self.k0 if first else 0.0) + 0.5)

    def predict_step(self, work: ChunkWork) -> int:
        """Return the time in ns of a step whose chunks do this work together."""
        pairs = zip(self.coefficients(), work.columns(), strict=True)
        return int(sum(each * count for each, count in pairs) + 0.5)

    def largest(
        self,
        budget_ns: int,
        context: int,
        *,
        first: bool,
        replay_rows: int = 0,
        tail_rows: int = 0,
    ) -> int:
        """Return the most new tokens whose predicted time is within the budget; 0 if none is.

        Args:
            budget_ns: time that the chunk may take.
            context, first, replay_rows, tail_rows: as for `predict`.
        """

        def time(num_tokens: int) -> int:
            return self.predict(
                context, num_tokens, first=first, replay_rows=replay_rows, tail_rows=tail_rows
            )

        fixed = self.k3 * context + self.k1 * replay_rows + self.kt * tail_rows
        left = budget_ns + 0.5 - fixed - (self.k0 if first else 0.0)  # predictions are rounded
        if left <= 0:
            return 0
        # The root of k2 x^2 + (2 k2 c + k1) x = left in the form that stays exact when k2 is tiny:
        # the usual one takes the difference of two numbers that are nearly equal then.
        slope = self.k1 + 2 * self.k2 * context
        root = 2 * left / (slope + math.hypot(slope, 2 * math.sqrt(self.k2) * math.sqrt(left)))
        near = int(min(root, MAX_CHUNK))
        # Floats may put the root beside an integer; they are never off by more, except where the
        # fixed part dwarfs everything else.
        low, high = max(0, near - 1), near + 2
        if time(low) > budget_ns or time(high) <= budget_ns:
            low, high = 0, MAX_CHUNK
        return max(0, low + bisect_right(range(low, high), budget_ns, key=time) - 1)

    def residuals(self, samples: Sequence[Sample]) -> np.ndarray:
        """Return |predicted / measured - 1| of each sample, [n] float64."""
        columns, times = to_columns(samples)
        found: np.ndarray = np.abs(columns @ np.array(self.coefficients()) / times - 1)
        return found

    def residual_p95(self, samples: Sequence[Sample]) -> float:
        """Return the 95th percentile of `residuals`."""
        return float(np.percentile(self.residuals(samples), 95))

    @classmethod
    def fit(cls, samples: Sequence[Sample], origin: Origin | None = None) -> CostModel:
        """Return the non-negative model with the smallest sum of squared relative errors.

        Relative, because chunks differ in time by orders of magnitude and are all planned with.

        Args:
            samples: measured steps, without those that warm up.
            origin: kept with the model.

        Raises:
            ConfigError: there are too few samples, a time is not positive, `k2` would not be, or
                the residual's p95 is above `MAX_RESIDUAL`.
        """
        if len(samples) <= len(_NAMES):
            raise ConfigError(
                f"The cost model has {len(_NAMES)} coefficients, but there are {len(samples)} "
                f"measurements; give at least {len(_NAMES) + 1}."
            )
        bad = next((sample for sample in samples if sample.time_ns <= 0), None)
        if bad is not None:
            raise ConfigError(
                f"A measured time is {bad.time_ns} ns; it must be positive. Measure again."
            )
        columns, times = to_columns(samples)
        found = non_negative(columns / times[:, None])
        if found[_PAIRS] <= 0:
            free = least_squares(columns / times[:, None], range(len(_NAMES)))[_PAIRS]
            raise ConfigError(
                f"The fit is rejected: `k2`, the time of a pair, would be {free:.3g} ns, and must "
                "be positive. Measure longer contexts or larger chunks, on a machine that does "
                "nothing else."
            )
        model = cls(*map(float, found), origin=origin)
        residual = model.residual_p95(samples)
        if residual > MAX_RESIDUAL:
            raise ConfigError(
                f"The fit is rejected: 95 percent of the measurements are within {residual:.1%} of "
                f"it, and {MAX_RESIDUAL:.0%} is asked for. Measure again, with more repetitions or "
                "on a machine that does nothing else."
            )
        return model

    def save(self, path: str | Path) -> None:
        """Write the model and where it came from as JSON.

        Raises:
            OutputError: the file cannot be written.
        """
        content: dict[str, Any] = {
            "format": _FORMAT,
            "version": _VERSION,
            "coefficients_ns": dict(zip(_NAMES, self.coefficients(), strict=True)),
        }
        if self.origin is not None:
            content["device"] = self.origin.device
            content["versions"] = dict(self.origin.versions)
            content["command"] = self.origin.command
        try:
            Path(path).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            raise OutputError(
                f"The cost model cannot be written to {str(path)!r}: {error.strerror}. Choose "
                "another file."
            ) from error

    @classmethod
    def load(cls, path: str | Path) -> CostModel:
        """Read what `save` wrote.

        Raises:
            ConfigError: the file cannot be read or is something else.
        """
        return _parse(_read(path), f"The cost model {str(path)!r}")


class OnlineCostModel:
    """A model that follows measured steps: recursive least squares with old steps forgotten.

    Works on factors of the offline coefficients: all are near 1, whatever their units, and each
    stays within 25 percent of it. A coefficient that is 0 offline stays 0.
    """

    FORGETTING = 0.99  # weight of a step against that of the next: about 100 steps count
    LIMIT = 0.25
    # Variance of a factor at the start over that of a measured time: an offline coefficient is
    # trusted as much as a quarter of a step that shows nothing else.
    TRUST = 4.0

    def __init__(self, offline: CostModel) -> None:
        """Start with the offline model."""
        self._offline = offline
        self._coefficients = np.array(offline.coefficients())
        self._factors = np.ones(len(_NAMES))
        self._covariance = self.TRUST * np.eye(len(_NAMES))
        self.model = offline  # the current one
        self.num_updates = 0

    def update(self, work: ChunkWork, time_ns: int, *, padded: bool) -> None:
        """Learn from a prefill step.

        Args:
            work: of all its chunks.
            time_ns: measured time of its forward pass.
            padded: whether it ran at a larger size than its rows; then it tells nothing.
        """
        if padded or not work.num_rows:
            return
        parts = self._coefficients * np.array(work.columns(), dtype=np.float64)
        predicted = parts.sum()
        if predicted <= 0:
            return
        shares = parts / predicted
        # What no factors could explain is a hiccup: only its direction counts.
        measured = min(max(time_ns / predicted, 1 - self.LIMIT), 1 + self.LIMIT)
        spread = self._covariance @ shares
        gain = spread / (self.FORGETTING + shares @ spread)
        factors = self._factors + gain * (measured - shares @ self._factors)
        self._factors = np.clip(factors, 1 - self.LIMIT, 1 + self.LIMIT)
        covariance = (self._covariance - np.outer(gain, spread)) / self.FORGETTING
        # Steps that are all alike say nothing of some directions, in which forgetting alone would
        # let the variance grow for ever.
        excess = np.trace(covariance) / (self.TRUST * len(_NAMES))
        self._covariance = covariance / max(1.0, excess)
        self.model = CostModel(
            *map(float, self._coefficients * self._factors), origin=self._offline.origin
        )
        self.num_updates += 1


def _read(path: str | Path) -> object:
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"The cost model {str(path)!r} cannot be read: {error.strerror}. {_AGAIN}"
        ) from error
    except ValueError as error:  # no JSON, or no text
        raise ConfigError(f"The cost model {str(path)!r} is not JSON: {error}. {_AGAIN}") from error


def _parse(content: object, what: str) -> CostModel:
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ConfigError(f"{what} is another kind of file. {_AGAIN}")
    version = content.get("version")
    if version != _VERSION:
        raise ConfigError(
            f"{what} has format version {shown(version)}, and this one reads {_VERSION}. {_AGAIN}"
        )
    values = content.get("coefficients_ns")
    if not isinstance(values, dict) or values.keys() != set(_NAMES):
        raise ConfigError(
            f"{what} has `coefficients_ns` {shown(values)}; it must have "
            f"{', '.join(f'`{name}`' for name in _NAMES)}. {_AGAIN}"
        )
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{what} has `{name}` {shown(value)}; it must be a number. {_AGAIN}")
    try:
        return CostModel(*(values[name] for name in _NAMES), origin=_origin(content))
    except ConfigError as error:
        raise ConfigError(f"{what} cannot be used. {error}") from error


def _origin(content: dict[str, object]) -> Origin | None:
    if not _ORIGIN & content.keys():
        return None
    device, versions, command = (content.get(key) for key in ("device", "versions", "command"))
    if isinstance(device, str) and isinstance(versions, dict) and isinstance(command, str):
        return Origin(device, {str(key): str(value) for key, value in versions.items()}, command)
    raise ConfigError(
        f"It has {', '.join(f'`{key}`' for key in sorted(_ORIGIN & content.keys()))}; it must have "
        f"`device` and `command` as texts and `versions` as a table, or none of these. {_AGAIN}"
    )
