"""Muon for weight matrices and AdamW for the rest, in few launches and without a host sync."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["Optimizer", "OptimizerSettings", "StepFacts", "orthogonalize"]

# Quintic a*x + b*x^3 + c*x^5: steep at 0, so that five rounds lift small singular values to
# about 1; in exchange they end anywhere in 0.7 .. 1.2.
_QUINTIC = (3.4445, -4.7750, 2.0315)


@dataclass(frozen=True)
class OptimizerSettings:
    """What both optimisers need besides the learning rate.

    Attributes:
        momentum: of Muon, Nesterov.
        iterations: Newton-Schulz rounds.
        muon_scale: a Muon update has the root mean square `muon_scale` times the learning rate,
            about that of an Adam update: one learning rate serves both.
        muon_decay: decoupled weight decay of the Muon weights.
        beta1: decay of Adam's first moment.
        beta2: decay of Adam's second moment; coarse enough to move in bfloat16 (1 - 2^-8).
        epsilon: of Adam.
        adam_decay: decoupled weight decay of the Adam weights.
        clip_norm: largest norm of all gradients together.
        compile: whether the whole step is one `torch.compile` graph instead of eager launches.
    """

    momentum: float = 0.95
    iterations: int = 5
    muon_scale: float = 0.2
    muon_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    epsilon: float = 1e-8
    adam_decay: float = 0.0
    clip_norm: float = 1.0
    compile: bool = False


@dataclass(frozen=True)
class StepFacts:
    """What a step did, still on the device.

    Attributes:
        grad_norm: [] float32, norm of all gradients before clipping.
        applied: [] bool; false when the gradients were not finite or the caller said no. Then
            weights and moments are as before.
    """

    grad_norm: Tensor
    applied: Tensor


def orthogonalize(matrices: Tensor, iterations: int = 5) -> Tensor:
    """Return the matrices with their singular values pulled to about 1, same singular vectors.

    Args:
        matrices: [N, rows, columns] float32, rows <= columns. A zero matrix stays zero.
        iterations: Newton-Schulz rounds; bfloat16 on CUDA, float32 elsewhere.
    """
    a, b, c = _QUINTIC
    norm = torch.linalg.vector_norm(matrices, dim=(-2, -1), keepdim=True)
    x: Tensor = matrices / (norm + 1e-7)
    if x.is_cuda:
        x = x.bfloat16()
    for _ in range(iterations):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.float()


class Optimizer:
    """Updates float32 master weights in place.

    Muon takes the matrices the caller lists, with one momentum in bfloat16; those of one shape
    (tall ones transposed, stacks [E, out, in] taken apart) are one batch. AdamW takes the others
    as one flat vector, with both moments in bfloat16.
    """

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        muon: frozenset[str],
        settings: OptimizerSettings | None = None,
    ) -> None:
        """Keep views of `parameters` and set the moments to zero.

        Args:
            parameters: name to float32 contiguous tensor, all on one device.
            muon: names of the 2-D and 3-D ones that Muon updates.
            settings: defaults if None.

        Raises:
            ValueError: a name in `muon` is unknown or no matrix, or a tensor is not as above.
        """
        self.settings = settings or OptimizerSettings()
        if unknown := sorted(muon - parameters.keys()):
            raise ValueError(f"`muon` names {unknown!r}, which are not among the parameters.")
        for name, weight in parameters.items():
            if weight.dtype != torch.float32 or not weight.is_contiguous():
                raise ValueError(f"{name!r} must be contiguous float32, not {weight.dtype}.")
            if name in muon and weight.dim() not in (2, 3):
                raise ValueError(f"Muon takes 2-D and 3-D weights; {name!r} is {weight.dim()}-D.")
        device = next(iter(parameters.values())).device

        self._groups: dict[tuple[int, ...], list[str]] = {}
        for name in parameters:
            if name in muon:
                self._groups.setdefault(tuple(_wide(parameters[name]).shape[1:]), []).append(name)
        # The views share storage with the master weights but not their autograd flag.
        self._matrices = [
            [_wide(parameters[name].detach()) for name in names] for names in self._groups.values()
        ]
        self._momenta = [
            torch.zeros(sum(map(len, views)), *shape, dtype=torch.bfloat16, device=device)
            for shape, views in zip(self._groups, self._matrices, strict=True)
        ]
        self._others = [name for name in parameters if name not in muon]
        self._vectors = [parameters[name].detach().view(-1) for name in self._others]
        size = sum(map(len, self._vectors))
        self._first = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self._second = torch.zeros(size, dtype=torch.bfloat16, device=device)
        self._count = torch.zeros((), dtype=torch.float32, device=device)
        self._shapes = {name: weight.shape for name, weight in parameters.items()}
        self._update = torch.compile(_update, dynamic=False) if self.settings.compile else _update

    @torch.no_grad()
    def step(
        self, grads: Mapping[str, Tensor], lr: Tensor, allowed: Tensor | None = None
    ) -> StepFacts:
        """Update all weights; nothing is read back to the host.

        Args:
            grads: name to float32 gradient, one for every parameter.
            lr: [] float32 on the device.
            allowed: [] bool on the device; false leaves everything as it is.
        """
        if allowed is None:
            allowed = torch.ones((), dtype=torch.bool, device=self._count.device)
        norm, applied = self._update(
            self._matrices,
            [[_wide(grads[name]) for name in names] for names in self._groups.values()],
            self._momenta,
            self._vectors,
            [grads[name].reshape(-1) for name in self._others],
            (self._first, self._second),
            self._count,
            lr,
            allowed,
            self.settings,
        )
        return StepFacts(norm, applied)

    def state(self) -> dict[str, Tensor]:
        """Return all moments by name, shaped like their weights; views, not copies."""
        tensors = {"count": self._count}
        for names, views, momenta in zip(
            self._groups.values(), self._matrices, self._momenta, strict=True
        ):
            for name, part in zip(names, momenta.split([len(view) for view in views]), strict=True):
                shape = self._shapes[name]
                turned = part if tuple(shape[-2:]) == tuple(part.shape[-2:]) else part.mT
                tensors[f"{name}.momentum"] = turned.squeeze(0) if len(shape) == 2 else turned
        sizes = [len(vector) for vector in self._vectors]
        for kind, flat in (("first", self._first), ("second", self._second)):
            for name, part in zip(self._others, flat.split(sizes), strict=True):
                tensors[f"{name}.{kind}"] = part.view(self._shapes[name])
        return tensors

    def load(self, state: Mapping[str, Tensor]) -> None:
        """Copy what `state` of an equal optimiser returned.

        Raises:
            ValueError: the names are not the same.
        """
        own = self.state()
        if own.keys() != state.keys():
            raise ValueError(f"Optimiser state differs in {sorted(own.keys() ^ state.keys())!r}.")
        for name, tensor in own.items():
            tensor.copy_(state[name])


def _wide(weight: Tensor) -> Tensor:
    """View a matrix or a stack as [N, rows, columns] with rows <= columns."""
    stack = weight if weight.dim() == 3 else weight.unsqueeze(0)
    return stack.mT if stack.shape[1] > stack.shape[2] else stack


def _update(
    matrices: list[list[Tensor]],
    matrix_grads: list[list[Tensor]],
    momenta: list[Tensor],
    vectors: list[Tensor],
    vector_grads: list[Tensor],
    moments: tuple[Tensor, Tensor],
    count: Tensor,
    lr: Tensor,
    allowed: Tensor,
    settings: OptimizerSettings,
) -> tuple[Tensor, Tensor]:
    """Run one step on tensors alone; return the norm of the gradients and whether it applied."""
    everything = [grad for grads in matrix_grads for grad in grads] + vector_grads
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(everything)))
    applied = allowed & torch.isfinite(norm)
    # A skipped step runs all the same, with a zero gradient, rate and mixing weight.
    clip = (settings.clip_norm / (norm + 1e-6)).clamp(max=1.0)
    went = applied.float()
    rate = lr * went
    count.add_(went)

    for weights, grads, momentum in zip(matrices, matrix_grads, momenta, strict=True):
        gradient = torch.where(applied, torch.cat(grads) * clip, 0.0)
        mixed = torch.lerp(momentum.float(), gradient, went * (1 - settings.momentum))
        momentum.copy_(mixed)
        ahead = torch.lerp(gradient, mixed, settings.momentum)
        size = settings.muon_scale * float(momentum.shape[-1]) ** 0.5
        change = orthogonalize(ahead, settings.iterations) * (-size * rate)
        _apply(weights, change, rate * settings.muon_decay)

    if vectors:
        gradient = torch.where(applied, torch.cat(vector_grads) * clip, 0.0)
        first = torch.lerp(moments[0].float(), gradient, went * (1 - settings.beta1))
        second = torch.lerp(moments[1].float(), gradient.square(), went * (1 - settings.beta2))
        moments[0].copy_(first)
        moments[1].copy_(second)
        taken = count.clamp(min=1)
        root = (second / (1 - settings.beta2**taken)).sqrt() + settings.epsilon
        change = first / (1 - settings.beta1**taken) / root * -rate
        _apply(vectors, change, rate * settings.adam_decay)
    return norm, applied


def _apply(weights: list[Tensor], change: Tensor, decay: Tensor) -> None:
    torch._foreach_mul_(weights, 1 - decay)
    torch._foreach_add_(weights, list(change.split([len(weight) for weight in weights])))
