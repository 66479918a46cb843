"""What a scheduler has counted since it started."""

from __future__ import annotations

from dataclasses import dataclass, field

from deepinfer_core.plans import RowStatus

__all__ = ["Totals"]


@dataclass(slots=True)
class Totals:
    """Counts since the start; only grow.

    Args:
        preemptions: times a sequence was taken off the device.
        recomputed_tokens: settled positions given up by preemptions.
        aborts: requests ended by their clients.
        rollback_tokens: rows of decode steps whose tokens did not count: refused drafts, overruns.
        overrun_tokens: rows in flight of requests that had ended.
        decode_rows: sequences in settled decode steps.
        verified_tokens: drafts in those.
        yielded_tokens: tokens those gave, what came behind a request's end included.
        prompt_tokens: prompt positions of admitted sequences, hits included.
        hit_tokens: those found in the prefix index.
        replayed_tokens: rows computed again to rebuild windows.
        chunk_tokens: rows of settled prefill steps, replayed ones included.
        chunk_overruns: prefill steps planned over their time budget.
        predicted_ns, measured_ns: of the forward passes of settled prefill steps whose chunks were
            sized by time; their ratio is the error of the cost model.
        failed_builds: steps given up because something failed while they were built.
        row_status: status -> rows of settled steps that had it, but `OK`.
    """

    preemptions: int = 0
    recomputed_tokens: int = 0
    aborts: int = 0
    rollback_tokens: int = 0
    overrun_tokens: int = 0
    decode_rows: int = 0
    verified_tokens: int = 0
    yielded_tokens: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    replayed_tokens: int = 0
    chunk_tokens: int = 0
    chunk_overruns: int = 0
    predicted_ns: int = 0
    measured_ns: int = 0
    failed_builds: int = 0
    row_status: dict[RowStatus, int] = field(default_factory=dict)

    def count_status(self, status: RowStatus) -> None:
        """Count a row that went wrong."""
        self.row_status[status] = self.row_status.get(status, 0) + 1
