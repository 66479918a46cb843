"""A step whose times were measured, in place of an operating point that is stated by shares."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path

from deepinfer_specdec.cost import CostTable
from deepinfer_specdec.errors import CostTableError, SettingError

__all__ = ["MeasuredPoint"]

_FIELDS = {"rows", "seconds", "requests", "num_drafts", "draft_seconds"}


@dataclass(frozen=True)
class MeasuredPoint:
    """Times of steps of some requests, drafting included.

    They hold for that many requests: what a step drafts, and how many contexts it reads, depends on
    them.

    Attributes:
        table: seconds of a step by its rows.
        requests, num_drafts: of the steps that were measured.
        draft_seconds: what a step without drafts saves.
    """

    table: CostTable
    requests: int
    num_drafts: int
    draft_seconds: float

    @classmethod
    def load(cls, path: Path) -> MeasuredPoint:
        """Read a JSON object with the fields `rows`, `seconds`, `requests`, `num_drafts` and
        `draft_seconds`; others are ignored.

        Raises:
            CostTableError: it cannot be read, or is not that.
        """
        try:
            content = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CostTableError(f"`{path}` cannot be read: {error.strerror}.") from error
        except ValueError as error:
            raise CostTableError(f"`{path}` is not JSON: {error}.") from error
        if not isinstance(content, dict) or not content.keys() >= _FIELDS:
            names = ", ".join(f"`{name}`" for name in sorted(_FIELDS))
            raise CostTableError(f"`{path}` must have the fields {names}. Measure again.")
        numbers = (content["requests"], content["num_drafts"], content["draft_seconds"])
        if not all(isinstance(n, int | float) and math.isfinite(n) and n >= 0 for n in numbers):
            raise CostTableError(
                f"`{path}` has `requests`, `num_drafts` and `draft_seconds` {numbers}; they must "
                "be numbers of at least 0. Measure again."
            )
        try:
            pairs = zip(content["rows"], content["seconds"], strict=True)
            samples = {int(rows): [float(seconds)] for rows, seconds in pairs}
            table = CostTable.of(samples, graph_rows=tuple(sorted(samples)))
        except (TypeError, ValueError, OverflowError) as error:
            raise CostTableError(f"`{path}` has no times by rows: {error}.") from error
        return cls(table, int(content["requests"]), int(content["num_drafts"]), float(numbers[2]))

    def seconds(self, rows: int, *, drafting: bool = True) -> float:
        """Return the time of a step of so many rows."""
        seconds = float(self.table.seconds_at(rows))
        return seconds if drafting else seconds - self.draft_seconds

    def costs(self, max_rows: int) -> CostTable:
        """Return the table: the sizes that were measured are those that are captured."""
        return self.table

    def check_load(self, requests: int) -> None:
        """Raise `SettingError` for another number of requests than was measured."""
        if requests != self.requests:
            raise SettingError(
                f"The times were measured with {self.requests} requests, but {requests} are asked "
                f"for. Simulate {self.requests}, or measure again."
            )

    def describe(self) -> str:
        """Return one sentence about the times."""
        full = self.seconds(self.requests * (1 + self.num_drafts))
        return (
            f"Steps: measured, {self.seconds(self.requests, drafting=False) * 1e3:.2f} ms for "
            f"{self.requests} requests without drafts, {full * 1e3:.2f} ms with all; drafting "
            f"{self.draft_seconds / full:.0%}."
        )
