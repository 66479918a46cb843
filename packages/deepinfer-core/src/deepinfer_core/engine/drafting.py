"""What the worker asks of a drafter: the tokens that may come next, for the target to verify."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Rows
from deepinfer_core.model.batch import RowBatch

__all__ = ["DraftInputs", "Drafter", "Entering", "PickDraft", "Proposed"]

# logits [R, V] float32, drafts so far [R, k] -> the next ones [R] int64
PickDraft = Callable[[Tensor, Tensor], Tensor]


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
        samples: whether any sequence of the step yields a token, which drafts would follow.
        pick: chooses the next draft of each sequence by logits, as its request samples: with its
            filters, temperature and noise.
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
    hidden_rows: RowBatch
    samples: bool
    pick: PickDraft


@dataclass(frozen=True)
class Proposed:
    """Drafts.

    Attributes:
        token_ids: [R, num_drafts] int64. Any id where there is no idea; one outside the vocabulary
            becomes 0.
        confidence: [R, num_drafts] float32 before the sigmoid: the chance that a draft passes if
            those before it do; None where the drafter tells none.
    """

    token_ids: Tensor
    confidence: Tensor | None = None


class Drafter(Protocol):
    """Proposes what follows. Its state lives on the device; calls come on the forward queue."""

    @property
    def num_drafts(self) -> int:
        """Drafts proposed for a sequence; at most those the state has room for."""

    def admit(self, entering: Entering) -> None:
        """Forget the last owners of these slots, and learn what is known of the new ones."""

    def propose(self, backend: KernelBackend, inputs: DraftInputs) -> Proposed:
        """Return what may follow the tokens yielded. Called once a step, prompt steps included."""
