"""The two phases of training: the target, then its drafter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from nano.training.drafter import DrafterTrainer
from nano.training.loader import Batch
from nano.training.parameters import is_trained, muon_names
from nano.training.target import Target

__all__ = ["DrafterPhase", "Ramp", "TargetPhase"]

# How far a router's bias moves against the load of its expert in one step.
_BIAS_STEP = 1e-3


@dataclass(frozen=True)
class Ramp:
    """A value that rises from 0 at step `start` to 1 at step `stop`."""

    start: int
    stop: int

    def at(self, step: int) -> float:
        """Return the value at a step."""
        return min(1.0, max(0.0, (step - self.start) / max(1, self.stop - self.start)))


class _Trained:
    """What both phases share: which tensors move, and the balance of the experts."""

    def __init__(self, values: Mapping[str, Tensor], device: torch.device):
        moved = {name: value.to(device) for name, value in values.items()}
        self.parameters = {n: v.requires_grad_() for n, v in moved.items() if is_trained(n)}
        self.buffers = {n: v for n, v in moved.items() if not is_trained(n)}
        self.muon = muon_names(self.parameters)

    def values(self) -> dict[str, Tensor]:
        """Return all tensors, without gradients."""
        return {n: v.detach() for n, v in (self.parameters | self.buffers).items()}

    def after_step(self, metrics: Mapping[str, Tensor]) -> None:
        """Make busy experts less likely and idle ones more (auxiliary-loss-free balancing)."""
        load = metrics["load"].float()
        direction = torch.sign(load.mean(1, keepdim=True) - load) * _BIAS_STEP
        for bias, change in zip(self.buffers.values(), direction.unbind(), strict=True):
            bias.add_(change)


class TargetPhase(_Trained):
    """Trains the target.

    Args:
        values: its parameters and buffers by name.
        rounding: when weights, caches and inputs go over to their stored formats.
        sparse_from: step from which attention sees only what the indexers choose; before, they
            learn from attention to everything.
    """

    def __init__(
        self,
        target: Target,
        values: Mapping[str, Tensor],
        device: torch.device,
        rounding: Ramp,
        sparse_from: int,
    ):
        """See the class."""
        super().__init__(values, device)
        self._rounding, self._sparse_from = rounding, sparse_from
        self._target = target

    def schedule(self, step: int) -> dict[str, float | bool]:
        """See `Phase.schedule`."""
        return {"rounding": self._rounding.at(step), "sparse": step >= self._sparse_from}

    def loss(
        self, parameters: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `Phase.loss`."""
        return self._target.loss(
            {**parameters, **self.buffers},
            batch.tokens.long(),
            batch.documents.long(),
            batch.weights,
            inputs["rounding"],
            inputs["sparse"],
        )


def _one_entry_a_place(metrics: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the metrics with those of each place of a block as numbers of their own."""
    flat = dict(metrics)
    for name in ("right", "overlap"):
        places = flat.pop(name).unbind()
        flat |= {f"{name}_{place}": value for place, value in enumerate(places, start=1)}
    return flat


class DrafterPhase(_Trained):
    """Trains the drafter behind a frozen target.

    Args:
        frozen: the target's parameters and buffers, as trained.
    """

    def __init__(
        self,
        trainer: DrafterTrainer,
        values: Mapping[str, Tensor],
        frozen: Mapping[str, Tensor],
        device: torch.device,
        rounding: Ramp,
    ):
        """See the class."""
        super().__init__(values, device)
        self._frozen = {name: value.detach().to(device) for name, value in frozen.items()}
        self._rounding = rounding
        self._trainer = trainer

    def schedule(self, step: int) -> dict[str, float | bool]:
        """See `Phase.schedule`."""
        return {"rounding": self._rounding.at(step)}

    def loss(
        self, parameters: Mapping[str, Tensor], batch: Batch, inputs: Mapping[str, Tensor]
    ) -> tuple[Tensor, Mapping[str, Tensor]]:
        """See `Phase.loss`."""
        tokens = batch.tokens.long()
        loss, metrics = self._trainer.loss(
            {**parameters, **self.buffers},
            self._frozen,
            tokens,
            batch.documents.long(),
            batch.weights,
            inputs["rounding"],
            _scattered(tokens),
        )
        return loss, _one_entry_a_place(metrics)


def _scattered(tokens: Tensor) -> Tensor:
    """Return a number in [0, 1) for each place; of the tokens alone, so that a run resumes."""
    place = torch.arange(tokens.shape[1], device=tokens.device)
    mixed = (tokens.cumsum(1) * 40503 + place * 30323) % 65537
    return mixed.float() / 65537
