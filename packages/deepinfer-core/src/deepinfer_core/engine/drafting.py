"""What the worker asks of a drafter: the tokens that may come next, for the target to verify."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Rows

__all__ = ["DraftInputs", "Drafter", "Entering"]


@dataclass(frozen=True)
class Entering:
    """Sequences that enter a slot, on the device.

    Attributes:
        slots, uids, generations, starts: [m] int64; the start is the first computed position.
        history: [3, n] int64: slot, position and token id of what lies before the starts, as far as
            it is known.
    """

    slots: Tensor
    uids: Tensor
    generations: Tensor
    starts: Tensor
    history: Tensor


@dataclass(frozen=True)
class DraftInputs:
    """What a step has made known; item i of [R] belongs to sequence i of the plan.

    Attributes:
        uids, generations: [R] int64.
        slots: [R] int64; the scratch slot where a sequence failed.
        token_ids: [R, 1 + drafts] int64: the tokens yielded; what stands behind is unspecified.
        num_tokens: [R] int64: how many; 0 where nothing was sampled. The last of them is not
            computed yet: drafts follow it.
        end: [R] int64: committed length, the position of that last token. Rows of the step at or
            above it were refused.
        fed: [B] int64: tokens of all rows of the step. rows: those rows.
        hidden: [B', D] act, collapsed streams of rows that ran every layer.
        features: [B', n * D] of the same rows, or None. hidden_rows: those rows.
    """

    uids: Tensor
    generations: Tensor
    slots: Tensor
    token_ids: Tensor
    num_tokens: Tensor
    end: Tensor
    fed: Tensor
    rows: Rows
    hidden: Tensor
    features: Tensor | None
    hidden_rows: Rows


class Drafter(Protocol):
    """Proposes what follows. Its state lives on the device; calls come on the forward queue."""

    @property
    def num_drafts(self) -> int:
        """Drafts proposed for a sequence; at most those the state has room for."""

    def admit(self, entering: Entering) -> None:
        """Forget the last owners of these slots, and learn what is known of the new ones."""

    def propose(self, backend: KernelBackend, inputs: DraftInputs) -> Tensor:
        """Return [R, num_drafts] int64 token ids that may follow the tokens yielded.

        Called once a step, prompt steps included. Any id where there is no idea; one outside the
        vocabulary becomes 0.
        """
