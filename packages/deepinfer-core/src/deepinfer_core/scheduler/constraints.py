"""Grammars of constrained requests: what they allow next, and advancing them by committed tokens.

A matcher advances with committed tokens only, once and in order. What it allows behind drafts is
found by walking them and rolling back.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np

from deepinfer_core.scheduler.sequence import Sequence

__all__ = ["ConstraintFailed", "advance", "masks_of"]

ALL = np.int32(-1)  # every bit set: any token


class ConstraintFailed(Exception):
    """A grammar refused what it had allowed, or raised; the request ends with this sentence."""


def masks_of(sequence: Sequence, drafts: Seq[int], vocab_size: int) -> np.ndarray:
    """Return the tokens allowed at the sequence's next position and behind each of its drafts.

    Behind the first draft that is not allowed any token is: that draft is refused by its own mask,
    and nothing behind it counts.

    Args:
        sequence: constrained; all its steps before the one to be masked are settled.
        drafts: what the step verifies.
        vocab_size: V.
    Returns:
        [1 + len(drafts), ceil(V / 32)] int32, bit v % 32 of word v // 32 for token v.

    Raises:
        ConstraintFailed: the grammar raised an error.
    """
    constraint = sequence.constraint
    assert constraint is not None, f"request {sequence.uid} has no grammar"
    masks = np.empty((1 + len(drafts), -(-vocab_size // 32)), dtype=np.int32)
    walked = place = 0
    try:
        for place, mask in enumerate(masks):
            constraint.fill(mask)
            if place == len(drafts) or not _allows(mask, drafts[place]):
                break
            walked += constraint.accept([drafts[place]])
            if walked <= place or constraint.done:
                break
        if walked:
            constraint.rollback(walked)
    except Exception as error:
        raise ConstraintFailed(f"The grammar failed ({type(error).__name__}: {error}).") from error
    masks[place + 1 :] = ALL
    return masks


def _allows(mask: np.ndarray, token_id: int) -> bool:
    return token_id >= 0 and bool(int(mask[token_id // 32]) >> (token_id % 32) & 1)


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
            f"The grammar refused token {token_ids[taken]}, which its mask had allowed."
        )
    return taken, done
