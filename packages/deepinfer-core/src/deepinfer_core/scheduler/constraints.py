"""Grammars of constrained requests: what they allow next, and advancing them by committed tokens.

A matcher advances with committed tokens only, once and in order; it says itself what it allows
behind drafts.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from deepinfer_core.plans import Masks
from deepinfer_core.scheduler.budget import SchedulerLimits
from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["ConstraintFailed", "advance", "masks_of"]

ALL = np.int32(-1)  # every bit set: any token


class ConstraintFailed(Exception):
    """A grammar refused what it had allowed, or raised; the request ends with this sentence."""


def masks_of(sequence: Sequence, drafts: Seq[int], limits: SchedulerLimits) -> Masks:
    """Return what a step may yield of a sequence, and, where drafts are in use, what must follow.

    Behind the first draft that is not allowed, and behind the grammar's end, any token is: nothing
    there counts, but a row without a token would be a fault of the sampler.

    Args:
        sequence: constrained; all its steps before the one to be masked are settled.
        drafts: what the step verifies.
        limits: the vocabulary's size, and most drafts of a sequence.

    Raises:
        ConstraintFailed: the grammar allows no token, or raised an error.
    """
    constraint = sequence.constraint
    assert constraint is not None, f"request {sequence.uid} has no grammar"
    masks = np.empty((1 + len(drafts), -(-limits.vocab_size // 32)), dtype=np.int32)
    forced: Seq[int] = ()
    try:
        if limits.max_drafts:
            forced = constraint.forced()
        constraint.fill_window(masks, drafts)
    except Exception as error:
        raise ConstraintFailed(f"The grammar failed ({type(error).__name__}: {error}).") from error
    barren: np.ndarray = (masks == 0).all(axis=1)
    if barren[0]:
        raise ConstraintFailed(
            "The grammar allows no token here, not even the end: its text cannot be written with "
            "this model's tokens. Change the constraint."
        )
    masks[barren] = ALL
    # a step yields 1 + drafts tokens at most, and as many drafts follow them
    return Masks(masks, tuple(forced[: 1 + 2 * limits.max_drafts]))


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
        raise ConstraintFailed(f"The grammar failed ({type(error).__name__}: {error}).") from error
    if taken < len(token_ids) and not done:
        raise ConstraintFailed(
            f"The grammar refused token {token_ids[taken]}, although its mask had allowed it, or "
            "no token in its place."
        )
    return taken, done
