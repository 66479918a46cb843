"""The drafter's training loss: blocks behind many anchors of packed rows, the target frozen."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

from deepinfer_core.interfaces import KernelBackend, Rows
from deepinfer_core.model.batch import RowBatch
from deepinfer_core.model.dspark import Drafted, Drafter
from nano.training.backend import TrainingBackend
from nano.training.fused import fused
from nano.training.parameters import drafter_weights_of
from nano.training.target import Pass, Target

__all__ = ["Blocks", "DrafterTrainer"]

# Weights of the three losses (dspark.md 1), and how much less each later draft counts.
CROSS_ENTROPY, TOTAL_VARIATION, CONFIDENCE = 0.1, 0.9, 1.0
DECAY = 0.8


@dataclass
class _Ring:
    """Keys of all positions: [N * T, d], written by `feed`, read by the blocks behind anchors."""

    keys: Tensor | None = None


@dataclass(frozen=True)
class _DraftState:
    draft_windows: tuple[_Ring, ...]


@dataclass(frozen=True)
class _AnchorRows:
    """Rows of blocks: satisfies what a draft stage reads of `interfaces.Rows`.

    Attributes:
        context: [R, W] int64, places in the packed rows that a block sees; -1 for none.
    """

    positions: Tensor
    sequence: Tensor
    context: Tensor
    is_image: None = None


class _DraftBackend(TrainingBackend):
    """The training backend, with a window that is gathered for each anchor."""

    def write_window(self, store: Any, keys: Tensor, rows: Any) -> None:
        """Keep the keys of all positions."""
        store.keys = keys

    def attend(
        self,
        queries: Tensor,
        keys: Tensor,
        window: Any,
        rows: Any,
        sink: Tensor,
        *,
        scale: float,
        entries: Any = None,
        picks: Any = None,
    ) -> Tensor:
        """See `KernelBackend.attend`: a block sees its context and all of itself."""
        return _attend_block(queries * scale, keys, window.keys, rows.context, sink)


@fused
def _attend_block(
    queries: Tensor, keys: Tensor, ring: Tensor, context: Tensor, sink: Tensor
) -> Tensor:
    """Attend from blocks [R * g, H, d], scaled: to `ring` at `context` [R, W] and to themselves."""
    count, (_, heads, _) = context.shape[0], queries.shape
    own = keys.unflatten(0, (count, -1))
    size = own.shape[1]
    values = torch.cat((ring[context.clamp(min=0)], own), 1)
    scores = queries.unflatten(0, (count, size)).flatten(1, 2) @ values.transpose(1, 2)
    seen = torch.cat((context >= 0, torch.ones_like(context[:, :size], dtype=torch.bool)), 1)
    scores = scores.float().masked_fill(~seen.unsqueeze(1), -torch.inf)
    total = torch.logaddexp(scores.logsumexp(-1), sink.repeat(size))
    weight = torch.exp(scores - total.unsqueeze(-1)).to(values.dtype)
    out: Tensor = (weight @ values).unflatten(1, (size, heads))
    return out.flatten(0, 1)


class _PackedDrafter(Drafter):
    """A drafter whose blocks stand behind anchors of packed rows."""

    def __init__(self, drafter: Drafter, rows: _AnchorRows):
        super().__init__(
            drafter.config, drafter.weights, drafter.stages, drafter.embed, drafter.head
        )
        self._anchor_rows = rows

    def _rows(
        self,
        backend: KernelBackend,
        positions: Sequence[int] | Tensor,
        slots: Sequence[int] | Tensor,
        window_floor: Tensor | None,
    ) -> RowBatch:
        return cast(RowBatch, self._anchor_rows)


@dataclass(frozen=True)
class Blocks:
    """Drafts behind R anchors.

    Attributes:
        drafted: logits and confidences. wanted: [R, g] true tokens.
        truth: [R, g, V] float32, the target's logits for them.
        load: [stages, experts], tokens an expert got.
    """

    drafted: Drafted
    wanted: Tensor
    truth: Tensor
    load: Tensor


@dataclass(frozen=True)
class DrafterTrainer:
    """Trains the draft stages and heads on what the frozen target computes.

    Args:
        target: the target, whose parameters get no gradient.
        anchors: blocks behind which drafts are made, for each packed row.
    """

    target: Target
    anchors: int = 64

    def loss(
        self,
        parameters: dict[str, Tensor],
        frozen: dict[str, Tensor],
        tokens: Tensor,
        documents: Tensor,
        weights: Tensor,
        strength: Tensor,
        jitter: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what to watch.

        Args:
            parameters: the drafter's. frozen: the target's, as trained; used rounded.
            tokens, documents: [N, T] int64. weights: [N, T] float32.
            strength: [] float32, how far the drafter's matrices are rounded.
            jitter: [N, T] float32 in [0, 1), chooses the anchors.
        Returns:
            loss []; `accepted` [] (drafts that a greedy target accepts, of the block), `overlap`
            and `right` [g] (1 - total variation; argmax equal), `confidence` [] (its loss), `load`.
        """
        config = self.target.config
        places, counts = _anchors(
            documents, weights, jitter, self.anchors, config.dspark_block_size
        )
        blocks = self.draft(
            parameters, frozen, tokens, documents, places, strength, torch.ones_like(strength)
        )
        loss, metrics = _losses(
            blocks.drafted.logits, blocks.drafted.confidence, blocks.truth, blocks.wanted, counts
        )
        return loss, {**metrics, "load": blocks.load}

    def draft(
        self,
        parameters: dict[str, Tensor],
        frozen: dict[str, Tensor],
        tokens: Tensor,
        documents: Tensor,
        places: Tensor,
        strength: Tensor,
        target_strength: Tensor,
    ) -> Blocks:
        """Draft behind anchors at flat `places` [R] of the packed rows.

        Each draft is made behind the true tokens before it.
        """
        config = self.target.config
        size, window = config.dspark_block_size, config.sliding_window
        sparse = torch.ones_like(strength) > 0
        with torch.no_grad():
            done = self.target.run(frozen, tokens, documents, target_strength, sparse)
            hidden = done.result.hidden.detach()
            features = done.result.features
            assert features is not None, "a drafter has targets"
            features = features.detach()
        backend = self.target.backend(_DraftBackend, strength, sparse)
        typed = cast(Any, backend)
        own = drafter_weights_of(parameters, strength, config, typed)
        drafter = done.model.with_weights(replace(done.model.weights, drafter=own)).drafter
        assert drafter is not None, "weights of a drafter make one"
        packed = _PackedDrafter(drafter, _block_rows(done, places, size, window))
        state = cast(Any, _DraftState(tuple(_Ring() for _ in drafter.stages)))
        packed.feed(typed, features, cast(Rows, done.rows), state)

        flat = tokens.flatten()
        # the place whose prediction a draft stands for; beyond a document's end none counts
        ahead = places.unsqueeze(1) + torch.arange(size, device=places.device)
        ahead = ahead.clamp(max=flat.shape[0] - 2)
        wanted = flat[ahead + 1]
        drafted = packed.draft(
            typed,
            flat[places],
            cast(Any, places),
            (),
            state,
            pick=lambda logits, drafts: wanted[:, drafts.shape[1]],
        )
        with torch.no_grad():
            truth = done.model.logits(cast(Any, done.backend), hidden[ahead.flatten()])
        truth = truth.unflatten(0, ahead.shape)
        return Blocks(drafted, wanted, truth, torch.stack(backend.load))


@fused
def _losses(
    logits: Tensor, confidence: Tensor, truth: Tensor, wanted: Tensor, counts: Tensor
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of drafts [R, g] and metrics; `counts` [R, g] tells which are in a reply."""
    place = torch.arange(logits.shape[1], device=logits.device)
    weight = counts * DECAY**place
    total = weight.sum().clamp(min=1.0)
    log_drafted = torch.log_softmax(logits, -1)
    known = torch.softmax(truth, -1)
    cross = -log_drafted.gather(-1, wanted.unsqueeze(-1)).squeeze(-1)
    variation = 0.5 * (log_drafted.exp() - known).abs().sum(-1)
    passes = (1 - variation).detach()
    doubt = torch.nn.functional.binary_cross_entropy_with_logits(
        confidence, passes, reduction="none"
    )
    each = CROSS_ENTROPY * cross + TOTAL_VARIATION * variation + CONFIDENCE * doubt
    right = (logits.argmax(-1) == truth.argmax(-1)) & (counts > 0)
    whole = counts.amin(1) > 0
    chain = right.float().cumprod(1).sum(1) * whole
    per_place = counts.sum(0).clamp(min=1.0)
    metrics = {
        "accepted": chain.sum() / whole.sum().clamp(min=1),
        "right": right.sum(0) / per_place,
        "overlap": ((passes * counts).sum(0) / per_place).detach(),
        "confidence": ((doubt * weight).sum() / total).detach(),
    }
    return (each * weight).sum() / total, metrics


@fused
def _anchors(
    documents: Tensor, weights: Tensor, jitter: Tensor, count: int, size: int
) -> tuple[Tensor, Tensor]:
    """Return flat places [N * count] and which drafts behind them lie in a reply [N * count, size].

    An anchor is a token before one that counts fully; places without one are chosen last and their
    drafts do not count.
    """
    num, length = documents.shape
    reply = torch.nn.functional.pad((weights >= 1.0).float(), (0, size + 1))
    document = torch.nn.functional.pad(documents, (0, size + 1), value=-1)
    place = torch.arange(length, device=documents.device)
    ahead = place.unsqueeze(1) + torch.arange(1, size + 1, device=documents.device)
    same = document[:, ahead] == documents.unsqueeze(2)
    counts = (reply[:, ahead] * same).cumprod(-1)  # [N, T, size]
    rank = jitter + counts[:, :, 0]
    chosen = rank.topk(count, dim=1).indices  # [N, count]
    row = torch.arange(num, device=documents.device).unsqueeze(1)
    return (chosen + row * length).flatten(), counts[row, chosen].flatten(0, 1)


def _block_rows(done: Pass, places: Tensor, size: int, window: int) -> _AnchorRows:
    """Return the rows of the blocks behind anchors at flat `places` [R]."""
    first = done.rows.positions[places]  # position of the anchor in its document
    step = torch.arange(size, device=places.device)
    back = torch.arange(window, 0, -1, device=places.device)
    context = torch.where(back <= first.unsqueeze(1), places.unsqueeze(1) - back, -1)
    positions = (first.unsqueeze(1) + step).flatten()
    return _AnchorRows(positions, torch.zeros_like(positions), context)
