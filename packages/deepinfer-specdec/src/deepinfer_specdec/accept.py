"""Which drafts stand, and the token after them.

    drafts   x1 x2 x3 x4 x5      lengths 3: the first three were verified
    target   t1 t2 t3 t4 -- --   the target's own token at each row
    outcome  x1 x2 t3 -1 -1 -1   two accepted, then the target's token

`TargetNoise` compares with the token that plain decoding would have made, with the noise that
belongs to its position: the text is that of plain decoding, whatever the drafter and the lengths.
`Rejection` keeps more drafts and promises less: the distribution of the text is the target's, and
the same seed, lengths and drafter give the same text, but it differs from plain decoding and from
one choice of lengths to another.

Both are made of operations with fixed shapes that wait for nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_specdec.errors import VerifyInputError
from deepinfer_specdec.noise import ACCEPT, RESIDUAL, TARGET, chances, gumbel

__all__ = ["Acceptance", "Rejection", "TargetNoise", "committed_lengths"]


@dataclass(frozen=True)
class Acceptance:
    """Outcome of verification.

    Attributes:
        token_ids: [R, g + 1] int64, accepted drafts, the token after them, then -1.
        num_accepted: [R] int32, accepted drafts, the token after them not counted.
    """

    token_ids: Tensor
    num_accepted: Tensor


class TargetNoise:
    """A draft stands if it is the token that the target would have produced in its place.

    Greedy requests are the case without noise. Every token that comes out is the target's own, so
    the only thing a draft can change is how many tokens a step makes.
    """

    def accept(
        self,
        drafts: Tensor,
        lengths: Tensor,
        target: Tensor,
        *,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        probabilities: tuple[Tensor, Tensor] | None = None,
    ) -> Acceptance:
        """Compare drafts with the target's tokens.

        Args:
            drafts: [R, g] int64; what stands behind the verified ones does not matter.
            lengths: [R] int32, drafts that were verified, 0 to g.
            target: [R, g + 1] int64, the target's own token at each row, noise included; what
                stands behind the first `lengths + 1` does not matter.
            seeds, positions, probabilities: not needed, since the noise is in `target`.
        Raises:
            VerifyInputError: shapes do not fit.
        """
        _check(drafts, lengths, target)
        num_accepted = _prefix(drafts == target[:, :-1], lengths)
        return _outcome(target, target, num_accepted)


class Rejection:
    """A draft stands with the chance min(1, target probability / draft probability).

    The first that falls is replaced by a token of the residual max(pt - pd, 0); if all stand, one
    more token is drawn from the target, by a distribution in which drafts have no part. Drafts of
    one certain token (greedy drafting) are the case of a draft distribution with a single 1, greedy
    requests that of a target distribution with a single 1.
    """

    def accept(
        self,
        drafts: Tensor,
        lengths: Tensor,
        target: Tensor,
        *,
        seeds: Tensor | None = None,
        positions: Tensor | None = None,
        probabilities: tuple[Tensor, Tensor] | None = None,
    ) -> Acceptance:
        """Draw which drafts stand.

        The noise: stream 2 of each draft's position decides about it, stream 3 draws from the
        residual, stream 0 the token after drafts that all stand.

        Args:
            drafts: [R, g] int64, drawn from the draft distribution with noise of stream 1, whose
                cycle is the position of the anchor.
            lengths: [R] int32, drafts that were verified, 0 to g.
            target: [R, g + 1] int64, not looked at.
            seeds: [R, 2] int64, low and high 32 bits.
            positions: [R] int64, position of the first draft.
            probabilities: of draft [R, g, V] and target [R, g + 1, V], float32, after the filters
                of the request. The draft's are those that drafts were really drawn from. What
                stands behind the verified drafts does not matter, as long as it is finite.
        Raises:
            VerifyInputError: one of the three is missing, or shapes do not fit.
        """
        _check(drafts, lengths, target)
        if seeds is None or positions is None or probabilities is None:
            missing = [
                f"`{name}`"
                for name, value in (
                    ("seeds", seeds),
                    ("positions", positions),
                    ("probabilities", probabilities),
                )
                if value is None
            ]
            raise VerifyInputError(
                f"Rejection sampling needs {', '.join(missing)}, which is None. Give it, or accept "
                f"by target noise."
            )
        draft_chance, target_chance = probabilities
        num_drafts = drafts.shape[1]
        _check_chances(drafts, draft_chance, target_chance)

        at_drafts = drafts.clamp(min=0)[:, :, None]
        of_target = target_chance[:, :num_drafts].gather(2, at_drafts)[:, :, 0]
        of_draft = draft_chance.gather(2, at_drafts)[:, :, 0]
        places = torch.arange(num_drafts, device=drafts.device)
        u = chances(seeds, positions[:, None] + places, ACCEPT)
        # The same as u < pt / pd, without a division by 0. What is certain always stands; a draft
        # that its own distribution excludes was not drawn from it and says nothing.
        num_accepted = _prefix((u * of_draft < of_target) & (of_draft > 0), lengths)

        all_stand = num_accepted == lengths
        full = _row(target_chance, num_accepted)
        if num_drafts:
            minus = _row(draft_chance, num_accepted.clamp(max=num_drafts - 1))
            residual = (full - minus).clamp(min=0)
            # Without mass, by rounding: any token of the target will do.
            use_full = all_stand | (residual.amax(dim=1) <= 0)
            weights = torch.where(use_full[:, None], full, residual)
        else:
            weights = full
        stream = torch.where(all_stand, TARGET, RESIDUAL)
        noise = gumbel(seeds, positions + num_accepted, weights.shape[1], stream)
        last = (weights.log() + noise).argmax(dim=1, keepdim=True)
        padded = torch.cat([drafts, last], dim=1)
        return _outcome(padded, last, num_accepted)


def committed_lengths(
    acceptance: Acceptance, stop_ids: Tensor, remaining: Tensor | None = None
) -> Tensor:
    """Return how many of the tokens are kept: to the first stop, and to the request's cap.

    Args:
        acceptance: of a step.
        stop_ids: [S] int64, ids that end a request; the first one in the order of positions is kept
            and nothing behind it.
        remaining: [R], tokens that each request may still produce.
    Returns:
        [R] int32, from 1 (0 where nothing remains) to the accepted drafts and one.
    """
    token_ids = acceptance.token_ids
    stops = (token_ids[:, :, None] == stop_ids).any(dim=2)
    places = torch.arange(token_ids.shape[1], device=token_ids.device)
    first = torch.where(stops, places, token_ids.shape[1]).amin(dim=1)
    kept = torch.minimum(first, acceptance.num_accepted) + 1
    if remaining is not None:
        kept = torch.minimum(kept, remaining)
    return kept.to(torch.int32)


def _prefix(good: Tensor, lengths: Tensor) -> Tensor:
    """Return how many verified drafts are good before the first that is not, [R] int64."""
    places = torch.arange(good.shape[1], device=good.device)
    bad = ~good | (places >= lengths[:, None])
    # The running sum is 0 before the first bad one.
    return (bad.cumsum(dim=1) == 0).sum(dim=1)


def _outcome(kept: Tensor, last: Tensor, num_accepted: Tensor) -> Acceptance:
    """Put `kept` before place n, `last` in it, -1 behind it."""
    places = torch.arange(kept.shape[1], device=kept.device)
    count = num_accepted[:, None]
    after = torch.where(places == count, last, -1)
    return Acceptance(torch.where(places < count, kept, after), num_accepted.to(torch.int32))


def _row(values: Tensor, index: Tensor) -> Tensor:
    """Return values[r, index[r]]: [R, n, V], [R] -> [R, V]."""
    return values.gather(1, index[:, None, None].expand(-1, 1, values.shape[2]))[:, 0]


def _check(drafts: Tensor, lengths: Tensor, target: Tensor) -> None:
    num_requests, num_drafts = drafts.shape if drafts.dim() == 2 else (-1, -1)
    if lengths.shape != (num_requests,) or target.shape != (num_requests, num_drafts + 1):
        raise VerifyInputError(
            f"`drafts` {tuple(drafts.shape)!r}, `lengths` {tuple(lengths.shape)!r} and `target` "
            f"{tuple(target.shape)!r} do not fit; they must be [R, g], [R] and [R, g + 1]."
        )
    if drafts.dtype != torch.int64 or target.dtype != torch.int64:
        raise VerifyInputError(
            f"`drafts` is {drafts.dtype} and `target` {target.dtype}; both must be int64."
        )


def _check_chances(drafts: Tensor, draft: Tensor, target: Tensor) -> None:
    num_requests, num_drafts = drafts.shape
    vocab_size = target.shape[-1]
    if draft.shape != (num_requests, num_drafts, vocab_size) or target.shape != (
        num_requests,
        num_drafts + 1,
        vocab_size,
    ):
        raise VerifyInputError(
            f"`probabilities` are {tuple(draft.shape)!r} of the draft and {tuple(target.shape)!r} "
            f"of the target; they must be [R, g, V] and [R, g + 1, V] with R {num_requests} and "
            f"g {num_drafts}."
        )
    if draft.dtype != torch.float32 or target.dtype != torch.float32:
        raise VerifyInputError(
            f"`probabilities` are {draft.dtype} and {target.dtype}; both must be float32."
        )
