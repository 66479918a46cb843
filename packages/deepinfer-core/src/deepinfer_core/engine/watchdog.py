"""Deadlines of steps, near misses, host stalls, and whether the engine gets anywhere.

A wait for the device has a deadline: 50 times what such a step usually takes, 5 s at least. A step
that misses it is stuck: its records are written to a file, and the engine stops with an error.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import numpy as np

from deepinfer_core.engine.records import StepRecords
from deepinfer_core.errors import StuckStep
from deepinfer_core.plans import PHASES, Phase, RowStatus, StepPlan, StepResult

__all__ = ["DUMPED_STEPS", "Watchdog"]

DUMPED_STEPS = 64
# Start values, all of them; none was tuned.
SLACK = 50.0
FLOOR_S = 5.0
FIRST_S = 600.0  # before anything is known: kernels may be compiled, graphs captured
MEAN_WEIGHT = 1 / 16  # of the newest step in the moving means
STALL_S = 0.1
PROGRESS_STEPS = 10_000
_REMEMBERED = 4096  # prompts whose progress is followed

_CHUNK = PHASES.index(Phase.CHUNK)
_OK = RowStatus.OK.value


class Watchdog:
    """Watches one rank's loop. It never acts; the loop asks and obeys.

    Attributes:
        near_misses: steps that took more than half their deadline.
        stalls: iterations in which the host alone took more than 100 ms.
        violations: how often `PROGRESS_STEPS` steps in a row brought nothing new.
    """

    def __init__(self, folder: Path | None = None, *, progress_steps: int = PROGRESS_STEPS) -> None:
        """Know nothing yet.

        Args:
            folder: where records of a stuck step go; None is the folder for temporary files.
            progress_steps: settled steps within which some request must get further, at least 1.
        """
        assert progress_steps >= 1, f"progress within {progress_steps} steps"
        self.near_misses = self.stalls = self.violations = 0
        self._folder = folder
        self._progress_steps = progress_steps
        self._mean_s: float | None = None  # of steps
        self._mean_row_s = 0.0  # of one row
        self._waiting_s = FIRST_S  # the deadline that was given last
        self._stale_steps = 0  # settled since something new was there
        self._reached: dict[int, int] = {}  # uid -> longest prompt part computed so far

    def timeout_s(self, num_rows: int = 0) -> float:
        """Return the longest wait for a step: `max(5 s, 50 x moving mean)`.

        The mean is that of steps, or of `num_rows` rows when that is more: a long chunk behind many
        short decode steps is no fault. Before the first step it is 10 minutes.
        """
        self._waiting_s = self._deadline_s(num_rows)
        return self._waiting_s

    def observed(self, seconds: float, num_rows: int = 0) -> None:
        """Take the time of a step of `num_rows` rows that has finished."""
        if self._mean_s is not None and seconds > self._deadline_s(num_rows) / 2:
            self.near_misses += 1
        row_s = seconds / max(num_rows, 1)
        if self._mean_s is None:
            self._mean_s, self._mean_row_s = seconds, row_s
        else:
            self._mean_s += (seconds - self._mean_s) * MEAN_WEIGHT
            self._mean_row_s += (row_s - self._mean_row_s) * MEAN_WEIGHT

    def host_ran(self, seconds: float) -> None:
        """Take the host's own time in one iteration, its wait for the device left out."""
        if seconds > STALL_S:
            self.stalls += 1

    def stuck(self, plan: StepPlan, records: StepRecords) -> StuckStep:
        """Return the error of a step that missed its deadline, and write the last records.

        Args:
            plan: the step's.
            records: the loop's; the newest 64 go into a new file.
        """
        output = plan.output
        dump, where = self._dump(output.step_seq, records)
        usual = "none finished yet"
        if self._mean_s is not None:
            usual = f"a step usually takes {self._mean_s * 1e3:.3g} ms"
        return StuckStep(
            f"Step {output.step_seq} ({output.kind.value}, {output.num_rows} rows of "
            f"{len(plan.rows)} sequences) was not done after {self._waiting_s:.1f} s on the device "
            f"({usual}). {where} The engine cannot go on. Start it again; if the step was only "
            "slow, lower `max_step_tokens`.",
            step_seq=output.step_seq,
            dump=dump,
        )

    def settled(self, plan: StepPlan, result: StepResult) -> str | None:
        """Take a settled step; return a sentence when the engine has not got anywhere for long.

        A step gets somewhere when it yields a token, or when a prompt's computed part becomes
        longer than it ever was; recomputing after a preemption does not count.
        """
        if self._brings_something(plan, result):
            self._stale_steps = 0
            return None
        self._stale_steps += 1
        if self._stale_steps < self._progress_steps:
            return None
        self._stale_steps = 0
        self.violations += 1
        return (
            f"No request got any further in {self._progress_steps} steps, up to step "
            f"{plan.output.step_seq}. Requests may be preempting one another: raise `num_blocks`, "
            "or lower `max_sequences`."
        )

    def _deadline_s(self, num_rows: int) -> float:
        if self._mean_s is None:
            return FIRST_S
        return max(FLOOR_S, SLACK * max(self._mean_s, self._mean_row_s * num_rows))

    def _brings_something(self, plan: StepPlan, result: StepResult) -> bool:
        rows = plan.rows
        fine = result.status == _OK
        if ((result.num_tokens > 0) & fine).any():
            return True
        news = False
        for row in np.flatnonzero((rows.phase == _CHUNK) & fine).tolist():
            uid, reached = int(rows.uid[row]), int(rows.start[row] + rows.num_rows[row])
            if reached > self._reached.get(uid, 0):
                self._reached.pop(uid, None)  # so that the newest stand at the end
                self._reached[uid] = reached
                news = True
        while len(self._reached) > _REMEMBERED:
            del self._reached[next(iter(self._reached))]
        return news

    def _dump(self, step_seq: int, records: StepRecords) -> tuple[Path | None, str]:
        """Write the file; return its path and a sentence about it."""
        try:
            handle, name = tempfile.mkstemp(
                prefix=f"deepinfer-step-{step_seq}-", suffix=".jsonl", dir=self._folder
            )
            os.close(handle)
            num = records.dump(name, DUMPED_STEPS)
        except OSError as error:  # the disk must not hide the fault
            return None, f"Records of the last steps could not be written ({error})."
        return Path(name), f"Records of the last {num} steps are in {name!r}."
