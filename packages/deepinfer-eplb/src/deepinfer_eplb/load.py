"""Where tokens went: hits of each logical expert, summed over pieces of a window of steps.

    steps    | 1000 of them, the window                        |
    pieces   | 0 | 1 | 2 | 3 | 4 | 5 | 6 | 7 | 8 | 9 | under way
               ^ leaves when the piece under way is complete

    close_window()      the complete pieces become a kept window, and the ring starts anew
    history()           pieces of the kept windows, oldest first: what a planner wants

What counts is a step of the group, with tokens of this rank or without, so that pieces of all ranks
cover the same steps and can be summed. Counts are those of one rank until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.maps import is_whole

__all__ = ["ExpertStats", "Window", "sum_of_ranks"]

Counts = NDArray[np.int64]

_LARGEST = np.iinfo(np.int64).max
_MOST_COUNTS = 1 << 27  # kept at once, 1 GiB: 140 times those of 58 layers x 384 experts


@dataclass(frozen=True, eq=False)
class Window:
    """The last complete pieces.

    Attributes:
        pieces: [H, L, E] int64, hits of each piece, oldest first; H is below the number of pieces
            of a window, and may be 0, until enough steps were counted. Not writable.
        num_steps: steps that they cover, empty ones included.
    """

    pieces: Counts
    num_steps: int

    @property
    def loads(self) -> Counts:
        """[L, E] int64, hits of the whole window.

        Raises:
            PlanInputError: a sum passes 2^63 - 1.
        """
        return _sum(self.pieces, self.pieces.shape[1:], "the window")


class ExpertStats:
    """Counts hits, step by step, of the MoE layers that are planned together.

    Prefill, decode and a draft model's layers have one each. Between two `end_step()`, hits come in
    by `record()` or `add()`, in any number of calls. What must not count:

        padding rows    leave them out by `valid_rows`, or give them ids of -1
        empty steps     `end_step()` alone; the window advances and nothing is added
        warm-up steps   neither record nor end them; if they were recorded, `drop_step()`

    Drafts that are rejected later do count: they cost the same work.
    """

    def __init__(
        self,
        num_layers: int,
        num_experts: int,
        *,
        window_steps: int,
        num_pieces: int = 10,
        num_windows: int = 3,
    ) -> None:
        """Start with nothing counted.

        Args:
            num_layers: L, MoE layers.
            num_experts: E, logical ones.
            window_steps: steps of a window, a multiple of `num_pieces`.
            num_pieces: pieces of a window.
            num_windows: how many closed windows `history()` looks back.
        Raises:
            SettingError: a number is below 1, `window_steps` cannot be divided evenly, or counts
                would take more than 1 GiB.
        """
        for name, value in (
            ("num_layers", num_layers),
            ("num_experts", num_experts),
            ("window_steps", window_steps),
            ("num_pieces", num_pieces),
            ("num_windows", num_windows),
        ):
            if not is_whole(value) or value < 1:
                raise SettingError(f"`{name}` is {value!r}; allowed: whole numbers from 1.")
        kept = num_layers * num_experts * num_pieces * (num_windows + 1)
        if kept > _MOST_COUNTS:
            raise SettingError(
                f"`num_layers` {num_layers} x `num_experts` {num_experts} x `num_pieces` "
                f"{num_pieces} x {num_windows + 1} windows are {kept * 8 / 2**30:.3g} GiB of "
                f"counts; allowed: 1 GiB. Give smaller numbers."
            )
        if window_steps % num_pieces:
            divisor = max(k for k in range(1, num_pieces + 1) if window_steps % k == 0)
            rounded = -(-window_steps // num_pieces) * num_pieces
            raise SettingError(
                f"`window_steps` {window_steps} cannot be divided into {num_pieces} pieces evenly; "
                f"give `window_steps` {rounded}, or `num_pieces` {divisor}."
            )
        self._shape = (num_layers, num_experts)
        self._piece_steps = window_steps // num_pieces
        self._ring: deque[Counts] = deque(maxlen=num_pieces)
        self._kept: deque[Counts] = deque(maxlen=num_windows)
        self._piece = np.zeros(self._shape, np.int64)
        self._steps_in_piece = 0
        self._step = np.zeros(self._shape, np.int64)

    @property
    def steps_left_in_piece(self) -> int:
        """Steps until the piece under way is complete, from 1."""
        return self._piece_steps - self._steps_in_piece

    def record(
        self, layer: int, topk_ids: ArrayLike, valid_rows: NDArray[np.bool_] | None = None
    ) -> None:
        """Count the choices of a layer's router in the step under way.

        Args:
            layer: 0 to L - 1.
            topk_ids: [rows, k] integers, logical experts; -1 counts nowhere.
            valid_rows: [rows] bool, False at padding rows, whose ids do not matter; all count if
                None.
        Raises:
            PlanInputError: shapes or dtypes are not as above, or an id or the layer is out of
                range. Nothing is counted then.
        """
        num_layers, num_experts = self._shape
        if not is_whole(layer) or not 0 <= layer < num_layers:
            raise PlanInputError(f"`layer` is {layer!r}; allowed: 0 to {num_layers - 1}.")
        ids = np.asarray(topk_ids)
        if ids.ndim != 2 or ids.dtype.kind not in "iu":
            raise PlanInputError(
                f"`topk_ids` is {list(ids.shape)} {ids.dtype}; needed: [rows, k] integers."
            )
        if valid_rows is not None:
            valid = np.asarray(valid_rows)
            if valid.dtype != np.bool_ or valid.shape != ids.shape[:1]:
                raise PlanInputError(
                    f"`valid_rows` is {list(valid.shape)} {valid.dtype}; needed: [{len(ids)}] "
                    f"bool, one for each row of `topk_ids`."
                )
            ids = ids[valid]
        wrong = (ids < -1) | (ids >= num_experts)
        if wrong.any():
            raise PlanInputError(
                f"`topk_ids` of layer {layer} has id {ids[wrong][0]}; allowed: 0 to "
                f"{num_experts - 1}, and -1 for padding."
            )
        hits = np.bincount(ids[ids >= 0].astype(np.int64), minlength=num_experts)
        self._step[layer] = _added(self._step[layer], hits, f"layer {layer}")

    def add(self, counts: ArrayLike) -> None:
        """Add hits that a device counted, of all layers, to the step under way.

        A device counts in int32, which wraps at 2^31: read it and set it to 0 before one expert can
        have had so many hits, which is 2^31 / rows of a step steps at the earliest.

        Args:
            counts: [L, E] integers, hits since the last call.
        Raises:
            PlanInputError: shape or dtype is not as above, or a count is negative. Nothing is
                counted then.
        """
        hits = _checked(counts, self._shape, "counts")
        self._step = _added(self._step, hits, "the step")

    def end_step(self, num_steps: int = 1) -> None:
        """End the step under way; what came in since the last call belongs to it.

        Args:
            num_steps: how many steps it was, where a device counted several before it was read, or
                where several empty ones are told at once.
        Raises:
            PlanInputError: it is below 1, or hits of several steps would reach over the end of the
                piece under way: nobody knows which piece they belong to.
        """
        if not is_whole(num_steps) or num_steps < 1:
            raise PlanInputError(f"`num_steps` is {num_steps!r}; allowed: whole numbers from 1.")
        left = self.steps_left_in_piece
        if num_steps > left and self._step.any():
            raise PlanInputError(
                f"`num_steps` is {num_steps}, but the piece under way lacks {left}; read the "
                f"device's counts after `steps_left_in_piece` steps or fewer."
            )
        self._piece = _added(self._piece, self._step, "the piece")
        self._step = np.zeros(self._shape, np.int64)
        self._steps_in_piece += num_steps
        num_complete, self._steps_in_piece = divmod(self._steps_in_piece, self._piece_steps)
        # More than fill the ring would push one another out.
        for _ in range(min(num_complete, (self._ring.maxlen or 0) + 1)):
            self._ring.append(self._piece)
            self._piece = np.zeros(self._shape, np.int64)

    def drop_step(self) -> None:
        """Forget what came in since the last `end_step()`: it was a warm-up step."""
        self._step = np.zeros(self._shape, np.int64)

    def window(self) -> Window:
        """Return the last complete pieces, of `window_steps` steps or of the few there are yet."""
        pieces = _read_only(self._stacked(self._ring))
        return Window(pieces, len(pieces) * self._piece_steps)

    def close_window(self) -> Window:
        """Keep the last complete pieces for `history()`, and start a new window.

        To be called when it is time to plan, in the same step by all ranks. No hit is in two
        windows; the piece under way goes on, as the first of the new one.

        Returns:
            The window that was closed.
        Raises:
            PlanInputError: no piece is complete yet.
        """
        if not self._ring:
            raise PlanInputError(
                f"No piece of the window is complete: {self._steps_in_piece} of "
                f"{self._piece_steps} steps were counted. Plan later, or use a smaller "
                f"`window_steps`."
            )
        window = self.window()
        self._kept.append(window.pieces)
        self._ring.clear()
        return window

    def history(self) -> Counts:
        """Return pieces of the last `num_windows` closed windows, [H, L, E] int64, oldest first.

        Pieces of the window that is open are not among them. H is 0 before the first was closed.
        """
        return self._stacked([piece for window in self._kept for piece in window])

    def _stacked(self, pieces: Sequence[Counts] | deque[Counts]) -> Counts:
        return np.stack([*pieces]) if pieces else np.zeros((0, *self._shape), np.int64)


def sum_of_ranks(parts: Sequence[ArrayLike]) -> Counts:
    """Return the sum of what ranks counted, int64 of their shape: for hosts that gather counts.

    Args:
        parts: of each rank the same shape, for instance [L, E] or [H, L, E], integers.
    Raises:
        PlanInputError: there are none, shapes differ, a dtype is no integer, a count is negative,
            or a sum passes 2^63 - 1.
    """
    if not len(parts):
        raise PlanInputError("`parts` is empty; give the counts of one rank at least.")
    shape = np.shape(parts[0])
    return _sum([_checked(part, shape, f"parts[{i}]") for i, part in enumerate(parts)], shape, "")


def _sum(parts: Sequence[Counts] | Counts, shape: tuple[int, ...], place: str) -> Counts:
    total = np.zeros(shape, np.int64)
    for part in parts:
        total = _added(total, part, place or "all ranks")
    return total


def _added(total: Counts, hits: Counts, place: str) -> Counts:
    """Return the sum of two that are not negative."""
    if (hits > _LARGEST - total).any():
        raise PlanInputError(
            f"Hits of an expert in {place} pass 2^63 - 1, the most that int64 holds; no traffic "
            f"has so many: look where the counts come from."
        )
    return total + hits


def _checked(counts: ArrayLike, shape: tuple[int, ...], name: str) -> Counts:
    array = np.asarray(counts)
    if array.shape != shape or array.dtype.kind not in "iu":
        raise PlanInputError(
            f"`{name}` is {list(array.shape)} {array.dtype}; needed: {list(shape)} integers."
        )
    if (array > _LARGEST).any():
        raise PlanInputError(
            f"`{name}` has {array.max()}, which passes 2^63 - 1; no traffic has so many hits: look "
            f"where the counts come from."
        )
    if (array < 0).any():
        place = [int(i) for i in np.argwhere(array < 0)[0]]
        raise PlanInputError(
            f"`{name}`{place} is {array[tuple(place)]}, and hits are not negative: a counter of "
            f"{array.dtype.itemsize * 8} bits has wrapped. Read it, and set it to 0, more often."
        )
    return array.astype(np.int64)


def _read_only(array: Counts) -> Counts:
    array.flags.writeable = False
    return array
