"""The size of prefill chunks: by predicted time where the engine has a cost model, else by tokens.

Of one sequence, in positions:

    [0, computed)            in the cache; a prefix hit replays the last few of them for windows
    [computed, + size)       the chunk; unless it ends the prompt, it ends on a block boundary
    [.., computed + missing) what remains; never a short rest alone, if that can be helped

    rows at `tail_start` and above run the late layers too; before it, the early ones alone
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.chunk_work import ChunkWork
from deepinfer_core.scheduler.cost_model import CostModel

__all__ = ["ChunkBudget"]

TAIL_PERCENT = 110  # of the budget that a step may take so that no short rest is left


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a chunk begins, and what its rows cost beside their number."""

    computed: int
    replay_rows: int
    tail_start: int

    def tail_rows(self, size: int) -> int:
        """Return how many rows of a chunk of that size run the late layers, replayed ones too."""
        return max(0, self.computed + size - max(self.tail_start, self.computed - self.replay_rows))


class ChunkBudget:
    """What a prefill step may still take, in rows and, with a model and a budget, in time.

    For each sequence in turn: `chunk`, then `take` with that size or a smaller one, until `spent`
    or until a prompt stays unfinished, which only the step's last chunk may do.

    Attributes:
        timed: whether time decides; tokens do otherwise.
        predicted_ns: predicted time of the step so far; 0 where tokens decide.
        work: what the step computes so far, for predictions and for `OnlineCostModel.update`.
        overruns: smallest chunks taken though they exceed the budget, so that work goes on; 0 or 1.
        absorbed: chunks that exceed it by up to 10 percent so that no short rest is left; 0 or 1.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        model: CostModel | None = None,
        budget_ns: int | None = None,
    ) -> None:
        """Start with a whole step.

        Args:
            limits: rows of a step and of a chunk, the block size and the window.
            model: predicts times; None lets tokens decide.
            budget_ns: time of a step's forward pass in ns; None or 0 lets tokens decide.
        """
        self._rows = limits.max_step_tokens
        self._max_chunk = limits.max_chunk_tokens
        self._window = limits.window
        self._model = model if budget_ns else None
        self._budget_ns = budget_ns or 0
        # Blocks may be larger than a chunk can be; its end then falls anywhere inside them.
        self._unit = min(limits.block_size, limits.max_chunk_tokens, limits.max_step_tokens)
        self.timed = self._model is not None
        self.predicted_ns = 0
        self.work = ChunkWork()
        self.overruns = 0
        self.absorbed = 0

    @property
    def spent(self) -> bool:
        """Whether nothing is left."""
        return self._rows <= 0 or (self.timed and self.predicted_ns >= self._budget_ns)

    def chunk(
        self,
        computed: int,
        missing: int,
        prompt_len: int,
        *,
        replay_rows: int = 0,
        tail_start: int = 0,
        most: int | None = None,
    ) -> int:
        """Return the size of a sequence's next chunk in new tokens; 0 if none fits.

        Args:
            computed: tokens in the cache.
            missing: tokens to compute after them, at least 1.
            prompt_len: tokens of the prompt.
            replay_rows: rows before the new ones that only rebuild windows; they take rows and
                time.
            tail_start: rows below this position skip the late layers.
            most: tokens that it can have room for; None is any number.
        """
        limit = min(missing, self._max_chunk, self._rows - replay_rows)
        if most is not None:
            limit = min(limit, most)
        if self._model is None or limit <= 0:
            return max(0, limit)
        place = _Place(computed, replay_rows, tail_start)
        size = min(limit, self._affordable(self._model, place, limit))
        if size < missing:
            size = max(0, self._aligned(computed, size))
        if size == 0 and self._is_first:
            size = min(limit, self._to_boundary(computed))
        if size and 0 < missing - size < self._window:
            return self._without_short_rest(place, size, missing, prompt_len, limit)
        return size

    def take(self, size: int, computed: int, *, replay_rows: int = 0, tail_start: int = 0) -> None:
        """Use up what a chunk of `size` new tokens needs; the other arguments are `chunk`'s."""
        place = _Place(computed, replay_rows, tail_start)
        if self._model is not None:
            smallest = self._is_first and size <= self._to_boundary(computed)
            self.predicted_ns += self._time(self._model, place, size)
            if self.predicted_ns > self._budget_ns:
                self.overruns += smallest
                self.absorbed += not smallest
        self._rows -= size + replay_rows
        self.work += ChunkWork.of(
            computed, size, replay_rows=replay_rows, tail_rows=place.tail_rows(size)
        )

    @property
    def _is_first(self) -> bool:
        return not self.work.num_rows

    def _time(self, model: CostModel, place: _Place, size: int) -> int:
        return model.predict(
            place.computed,
            size,
            first=self._is_first,
            replay_rows=place.replay_rows,
            tail_rows=place.tail_rows(size),
        )

    def _affordable(self, model: CostModel, place: _Place, limit: int) -> int:
        """Return the most new tokens for the time that is left; beyond `limit` it may be wrong."""
        left = self._budget_ns - self.predicted_ns
        size = model.largest(
            left,
            place.computed,
            first=self._is_first,
            replay_rows=place.replay_rows,
            tail_rows=place.tail_rows(0),
        )
        early = max(0, place.tail_start - place.computed)
        if size <= early or limit <= early:
            return size
        # New rows from here on cost the late layers too.
        sizes = range(early, min(size, limit) + 1)
        return early + bisect_right(sizes, left, key=lambda n: self._time(model, place, n)) - 1

    def _to_boundary(self, computed: int) -> int:
        return self._unit - computed % self._unit

    def _aligned(self, computed: int, size: int) -> int:
        """Return the largest size up to this one that ends on a boundary; 0 or less if none."""
        return size - (computed + size) % self._unit

    def _without_short_rest(
        self, place: _Place, size: int, missing: int, prompt_len: int, limit: int
    ) -> int:
        """Take the rest too, or leave enough of it that the tail is in one chunk, if either can be.

        Neither can be where chunks are shorter than the tail. The result is the same then, at the
        price of a short chunk.
        """
        assert self._model is not None, "tokens decide"
        if missing <= limit:
            total = self.predicted_ns + self._time(self._model, place, missing)
            if total * 100 <= self._budget_ns * TAIL_PERCENT:
                return missing
        tail = min(self._window, prompt_len)
        shorter = self._aligned(place.computed, min(size, missing - tail))
        return shorter if shorter > 0 and tail <= self._max_chunk else size
