"""Drafts on the device: how they are chosen, how many of each sequence are verified, which stand.

    step N      drafts behind its tokens, and how likely each is to pass       pick, remember
    step N + 1  as many of them as the step has rows for, the likeliest first  lengths
                those that the target would have said itself stand            accept

What is remembered lies by slot, so that a sequence finds it whichever step comes next.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_core.engine.carry import Corrected
from deepinfer_core.engine.sampler import (
    RowSettings,
    SampledRows,
    Sampler,
    num_accepted,
)
from deepinfer_core.engine.stage import StagedStep
from deepinfer_core.interfaces import KernelBackend, Verifier
from deepinfer_core.model.state import StateSizes

__all__ = ["Picks", "Verification"]

_DRAFT_STREAM = 1


class Picks:
    """Chooses the drafts of one step, as the requests of its sequences sample.

    By the target's own noise at the places of the drafts; for rejection sampling by noise of their
    own, with the chance of every token kept.

    Args:
        sampler: knows the requests' settings.
        step: whose sequences draft.
        last: [R] int64, the token that drafts follow. end: [R] int64, its position.
        wide: columns of `SampledRows.fed`.
        rejection: draft for rejection sampling.
    """

    def __init__(
        self,
        backend: KernelBackend,
        sampler: Sampler,
        step: StagedStep,
        last: Tensor,
        end: Tensor,
        *,
        wide: int,
        rejection: bool,
    ):
        """Start with no draft."""
        self._backend, self._sampler, self._needs = backend, sampler, step.needs
        self._slots, self._last, self._end = step.column("slot"), last, end
        self._wide, self._rejection = wide, rejection
        self._owner = torch.arange(len(last), device=last.device)
        self._chances: list[Tensor] = []

    @property
    def sampled(self) -> Tensor:
        """[R] bool: which sequences sample, and do not decode greedily."""
        return self._sampler.is_sampled(self._slots)

    def next(self, logits: Tensor, drafts: Tensor) -> Tensor:
        """Return the next draft [R] int64 by logits [R, V] float32, behind drafts [R, k]."""
        number = drafts.shape[1]
        fed = drafts.new_zeros(len(drafts), self._wide)
        fed[:, 0] = self._last
        fed[:, 1 : 1 + number] = drafts
        rows = SampledRows(
            owner=self._owner,
            offset=torch.full_like(self._owner, number),
            positions=self._end + 1 + number,
            slots=self._slots,
            fed=fed,
        )
        settings = self._sampler.settings(rows, self._needs)
        if self._rejection:
            settings = settings.of_stream(_DRAFT_STREAM, self._end)
        sampled = self._backend.sample(logits, settings)
        if self._rejection:
            chances = self._backend.probabilities(logits, settings)
            # Logits that are not finite have no distribution: the draft is a token for certain.
            place = sampled.token_ids.unsqueeze(1)
            own = torch.where(sampled.status.unsqueeze(1) != 0, 1.0, chances.gather(1, place))
            self._chances.append(chances.scatter(1, place, own))
        return sampled.token_ids

    def chances(self, drafts: Tensor, vocab_size: int, certain: Tensor | None) -> Tensor:
        """Return what drafts [R, g] were drawn from: [R, g, V] float32.

        certain: [R, g] bool, those that were not drawn; or None.
        """
        if self._chances and certain is None:
            return torch.stack(self._chances, 1)
        ones = torch.zeros(*drafts.shape, vocab_size, device=drafts.device)
        ones.scatter_(2, drafts.unsqueeze(2), 1.0)
        if not self._chances or certain is None:
            return ones
        return torch.where(certain.unsqueeze(2), ones, torch.stack(self._chances, 1))


class Verification:
    """What is known of drafts, by slot; written on the forward queue alone.

    Args:
        sizes: of the state.
        vocab_size: V.
        device: where it is.
        sampler: knows the requests' seeds.
        verifier: chooses lengths, calibrates and, with `rejection`, accepts; None verifies all.
        rejection: accept by rejection sampling instead of by the target's own token.
    """

    def __init__(
        self,
        sizes: StateSizes,
        vocab_size: int,
        device: torch.device,
        sampler: Sampler,
        verifier: Verifier | None = None,
        *,
        rejection: bool = False,
    ):
        """Remember nothing yet."""
        self.rejection = rejection
        self._sampler, self._verifier, self._vocab_size = sampler, verifier, vocab_size
        places = (sizes.scratch_slot + 1, sizes.max_drafts)
        self._survival = torch.ones(places, device=device)
        self._chances: Tensor | None = None
        if rejection:
            self._chances = torch.zeros(*places, vocab_size, device=device)

    def lengths(self, step: StagedStep) -> Tensor:
        """Return how many drafts of each sequence are verified: [R] int64."""
        available = step.column("num_drafts")
        if not step.plan.trims:
            return available
        assert self._verifier is not None, "a plan trims drafts, but nothing chooses among them"
        total = step.plan.output.num_rows - len(step.plan.rows)
        survival = self._survival[step.column("slot")]
        return self._verifier.planner.lengths(survival, available, total).long()

    def remember(
        self,
        slots: Tensor,
        drafts: Tensor,
        confidence: Tensor | None,
        picks: Picks,
        certain: Tensor | None = None,
    ) -> Tensor | None:
        """Keep what the next step must know of the drafts.

        Args:
            slots: [R] int64; the scratch slot where a sequence failed.
            drafts: [R, g] int64. confidence: [R, g] float32 before the sigmoid, or None.
            picks: how they were chosen.
            certain: [R, g] bool, the first ones of a row, which pass whatever the drafter thinks;
                None where there are none.
        Returns:
            Survival [R, g] float32, the chance that a draft and those before it pass; None where
            the drafter does not tell.
        """
        count = drafts.shape[1]
        if self._chances is not None:
            self._chances[slots, :count] = picks.chances(drafts, self._vocab_size, certain)
        if confidence is None:
            return None
        survival = torch.sigmoid(confidence)
        if self._verifier is not None:
            survival = self._verifier.calibration.apply(confidence, picks.sampled)
        survival = survival.nan_to_num(0.0)
        for number in range(1, count):  # in one order: equal chances must stay equal
            survival[:, number] *= survival[:, number - 1]
        if certain is not None:
            survival = survival.masked_fill(certain, 1.0)
        self._survival[slots, :count] = survival
        return survival

    def accept(
        self,
        step: StagedStep,
        backend: KernelBackend,
        logits: Tensor,
        rows: SampledRows,
        settings: RowSettings,
        targets: Tensor,
        broken: Tensor,
        inputs: Corrected,
        lengths: Tensor,
    ) -> tuple[Tensor, Tensor]:
        """Return (drafts that stand [R], the tokens yielded [R, 1 + drafts]), int64.

        Args:
            step: what ran.
            logits: [N, V] of the rows. rows, settings: how they were sampled.
            targets: [R, 1 + drafts] int64, what the target said. broken: [R, 1 + drafts] bool.
            inputs: what was fed. lengths: [R] int64, drafts verified.
        """
        drafts = inputs.fed[:, 1:]
        if self._chances is None or self._verifier is None or not step.num_draft_columns:
            return num_accepted(targets, broken, drafts, lengths), targets
        chances = torch.zeros(*targets.shape, self._vocab_size, device=targets.device)
        chances[rows.owner, rows.offset] = backend.probabilities(logits, settings)
        outcome = self._verifier.acceptor.accept(
            drafts,
            lengths.int(),
            targets,
            seeds=self._sampler.seeds(rows.slots),
            positions=inputs.start + 1,
            probabilities=(self._chances[rows.slots], chances),
        )
        # Without drafts there is nothing to reject: such a row says what it says undrafted.
        drafted = (lengths > 0).unsqueeze(1)
        token_ids = torch.where(drafted, outcome.token_ids.clamp(min=0), targets)
        return outcome.num_accepted.long(), token_ids
