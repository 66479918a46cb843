"""What full verification of DSpark drafts would have accepted of texts that are finished.

Under greedy decoding a draft passes exactly if it is the text's next token, whatever the drafts
are. So accepted lengths can be counted afterwards, for all anchors at once:

    position    | prompt .. p-1 |  p = anchor  | p+1 .. p+g            |
    the drafter | sees          |  is given    | proposes; the text tells how many pass
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from deepinfer_core.bench.whole_texts import TextBatch, forward_texts
from deepinfer_core.errors import ConfigError
from deepinfer_core.interfaces import KernelBackend
from deepinfer_core.model.deepseek_v41 import DeepseekV41

__all__ = ["FinishedText", "Verified", "verify_texts"]

# Blocks drafted at a time; their logits are [blocks, g, vocabulary] float32.
MAX_BLOCKS = 512
_NO_TOKEN = -1  # behind the end of a text


@dataclass(frozen=True)
class FinishedText:
    """A prompt and what greedy decoding made of it, the end-of-sequence id included."""

    prompt_token_ids: Sequence[int]
    token_ids: Sequence[int]


@dataclass(frozen=True)
class Verified:
    """A draft block at every anchor of some texts: each output token but the last of its text.

    Rows are ordered by text, then by anchor.

    Attributes:
        text: [n] int64, place of the text in the list that was given.
        anchor: [n] int64, place of the anchor among the output tokens of its text.
        remaining: [n] int64, output tokens behind the anchor, at least 1.
        accepted: [n] int64, drafts that full verification accepts; at most `remaining`.
        confidence: [n, g] float32 before the sigmoid.
    """

    text: np.ndarray
    anchor: np.ndarray
    remaining: np.ndarray
    accepted: np.ndarray
    confidence: np.ndarray

    @classmethod
    def joined(cls, parts: Sequence[Verified], block_size: int) -> Verified:
        """Return the rows of all parts, one part after the other; there may be none."""
        none = np.zeros(0, dtype=np.int64)
        start = cls(none, none, none, none, np.zeros((0, block_size), dtype=np.float32))
        columns = [part._columns() for part in (start, *parts)]
        return cls(*(np.concatenate(column) for column in zip(*columns, strict=True)))

    def rows(self, chosen: np.ndarray) -> Verified:
        """Return some of the rows; `chosen` is a mask [n] or places [m]."""
        return Verified(*(column[chosen] for column in self._columns()))

    def _columns(self) -> tuple[np.ndarray, ...]:
        return (self.text, self.anchor, self.remaining, self.accepted, self.confidence)

    @property
    def block_size(self) -> int:
        """Drafts of a block, g."""
        return int(self.confidence.shape[1])

    @property
    def complete(self) -> np.ndarray:
        """[n] bool: the text goes on for g tokens at least, so that `accepted` is not cut short."""
        return self.remaining >= self.block_size

    def acceptance(self) -> np.ndarray:
        """Return for each k = 1..g the share of blocks with k drafts accepted, [g] float64.

        Of blocks behind which the text has k tokens; NaN if there are none.
        """
        shares = []
        for k in range(1, self.block_size + 1):
            able = self.remaining >= k
            shares.append((self.accepted[able] >= k).mean() if able.any() else np.nan)
        return np.array(shares, dtype=np.float64)

    def cycles(self) -> np.ndarray:
        """Return the rows [m] int64 that decoding with full verification would have drafted.

        Of each text: from its first output token on, over what each step commits.
        """
        rows: list[int] = []
        row = 0
        while row < len(self.text):
            rows.append(row)
            # accepted drafts and the bonus token; behind the last one the next text begins
            row += int(min(self.accepted[row] + 1, self.remaining[row]))
        return np.array(rows, dtype=np.int64)

    def accepted_len(self) -> float:
        """Return tokens committed by a step on average, the bonus token included.

        What a text's end cuts off counts nowhere, so its last step may commit no bonus token.
        """
        rows = self.cycles()
        if not len(rows):
            return float("nan")
        return float(np.minimum(self.accepted[rows] + 1, self.remaining[rows]).mean())


@torch.no_grad()
def verify_texts(
    model: DeepseekV41, backend: KernelBackend, texts: Sequence[FinishedText]
) -> Verified:
    """Draft a block at every anchor of the texts and compare it with how the text goes on.

    Args:
        model: target and drafter.
        backend: ops.
        texts: with a prompt of at least one token.

    Raises:
        ConfigError: the model was loaded without a drafter.
    """
    if model.drafter is None:
        raise ConfigError("The model has no drafter, so nothing can be drafted; load it with one.")
    # the last token is no anchor, and no row is needed for it
    known = [[*text.prompt_token_ids, *text.token_ids[:-1]] for text in texts]
    parts = [
        part
        for batch in forward_texts(model, backend, known)
        for part in _blocks(model, backend, texts, batch)
    ]
    return Verified.joined(parts, model.config.dspark_block_size)


def _blocks(
    model: DeepseekV41, backend: KernelBackend, texts: Sequence[FinishedText], batch: TextBatch
) -> Iterator[Verified]:
    """Draft at all anchors of a batch, some of them at a time."""
    anchors = [
        (slot, place, anchor)
        for slot, place in enumerate(batch.texts)
        for anchor in range(len(texts[place].token_ids) - 1)
    ]
    for begin in range(0, len(anchors), MAX_BLOCKS):
        yield _draft(model, backend, texts, batch, anchors[begin : begin + MAX_BLOCKS])


def _draft(
    model: DeepseekV41,
    backend: KernelBackend,
    texts: Sequence[FinishedText],
    batch: TextBatch,
    anchors: Sequence[tuple[int, int, int]],
) -> Verified:
    """Draft one block for each (slot, text, anchor)."""
    assert model.drafter is not None, "checked by the caller"
    size = model.config.dspark_block_size
    given, positions, following = [], [], []
    for _, place, anchor in anchors:
        output = texts[place].token_ids
        given.append(output[anchor])
        positions.append(len(texts[place].prompt_token_ids) + anchor)
        behind = list(output[anchor + 1 : anchor + 1 + size])
        following.append(behind + [_NO_TOKEN] * (size - len(behind)))
    device = backend.runtime.device
    drafted = model.drafter.draft(
        backend,
        torch.tensor(given, device=device),
        positions,
        [slot for slot, _, _ in anchors],
        batch.state,
    )
    passes = drafted.token_ids == torch.tensor(following, device=device)
    accepted = passes.long().cumprod(1).sum(1)
    return Verified(
        text=np.array([place for _, place, _ in anchors]),
        anchor=np.array([anchor for _, _, anchor in anchors]),
        remaining=np.array([len(texts[place].token_ids) - 1 - a for _, place, a in anchors]),
        accepted=accepted.cpu().numpy(),
        confidence=drafted.confidence.float().cpu().numpy(),
    )
