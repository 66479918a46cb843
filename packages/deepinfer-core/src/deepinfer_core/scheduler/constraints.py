"""Grammars of constrained requests: what they allow next, and advancing them by committed tokens.

A matcher advances with committed tokens only, once and in order; it says itself what it allows
behind drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass

import numpy as np

from deepinfer_core.interfaces import TokenConstraint
from deepinfer_core.plans import Masks
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["ConstraintFailed", "Window", "advance", "masks_of"]

ALL = np.int32(-1)  # every bit set: any token


_NO_TOKEN = (
    "The grammar allows no token here, not even the end: its text cannot be written with this "
    "model's tokens. Change the constraint."
)


@dataclass(frozen=True, slots=True)
class Window:
    """The state of one constrained row, and the drafts that the step verifies."""

    constraint: TokenConstraint
    drafts: Seq[int]


class ConstraintFailed(Exception):
    """A grammar refused what it had allowed, or raised; the request ends with this sentence."""


def masks_of(
    windows: Mapping[int, Window], limits: SchedulerLimits
) -> tuple[dict[int, Masks], dict[int, str]]:
    """Return what a step may yield of its constrained rows, and what went wrong, by place.

    All are asked at once, since a grammar may answer for many in threads of its own. Behind the
    first draft that is not allowed, and behind the grammar's end, any token is: nothing there
    counts, but a row without a token would be a fault of the sampler.

    Args:
        windows: by place in the plan; all steps before the one to be masked are settled.
        limits: the vocabulary's size, and most drafts of a sequence.
    """
    found: dict[int, Masks] = {}
    faults: dict[int, str] = {}
    groups: dict[Callable[..., Seq[int | Exception]], list[int]] = {}
    for place, window in windows.items():
        groups.setdefault(window.constraint.fill_windows, []).append(place)
    for fill, places in groups.items():
        asked = [windows[place] for place in places]
        ends = np.cumsum([1 + len(window.drafts) for window in asked])
        masks = np.empty((ends[-1], -(-limits.vocab_size // 32)), dtype=np.int32)
        try:
            # what must follow is asked first: the masks then know it
            forced = [_forced(window, limits) for window in asked]
            taken = fill([w.constraint for w in asked], [w.drafts for w in asked], masks)
        except Exception as error:
            faults |= dict.fromkeys(places, _failed(error))
            continue
        barren: np.ndarray = (masks == 0).all(axis=1)
        for place, window, end, run, count in zip(places, asked, ends, forced, taken, strict=True):
            first = end - len(window.drafts) - 1
            if isinstance(run, Exception) or isinstance(count, Exception):
                faults[place] = _failed(run if isinstance(run, Exception) else count)
            elif barren[first]:
                faults[place] = _NO_TOKEN
            else:
                found[place] = Masks(masks[first:end], run)
        masks[barren] = ALL
    return found, faults


def _forced(window: Window, limits: SchedulerLimits) -> tuple[int, ...] | Exception:
    """Return what must follow, as much as is of use: a step yields 1 + g, and g drafts follow."""
    if not limits.max_drafts:
        return ()
    try:
        return tuple(window.constraint.forced()[: 1 + 2 * limits.max_drafts])
    except Exception as error:
        return error


def _failed(error: object) -> str:
    return f"The grammar failed ({type(error).__name__}: {error})."


def advance(sequence: Sequence, token_ids: Seq[int]) -> tuple[int, bool]:
    """Advance a sequence's grammar by committed tokens.

    Returns:
        How many of them it took, fewer only if it ended before, and whether it allows no more.

    Raises:
        ConstraintFailed: it refused one of them, or raised an error.
    """
    constraint = sequence.constraint
    assert constraint is not None, f"request {sequence.uid} has no grammar"
    try:
        taken = constraint.accept(token_ids) if token_ids else 0
        done = constraint.done
    except Exception as error:
        raise ConstraintFailed(_failed(error)) from error
    if taken < len(token_ids) and not done:
        raise ConstraintFailed(
            f"The grammar refused token {token_ids[taken]}, although its mask had allowed it, or "
            "no token in its place."
        )
    return taken, done
