"""The target model's training loss: next token, indexer, and the load of the experts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

from deepinfer_core.model.config import ModelConfig
from deepinfer_core.model.deepseek_v41 import DeepseekV41, Forwarded
from deepinfer_core.model.engram import EngramHash
from deepinfer_core.model.state import source_ratios
from deepinfer_core.model.weights import ModelWeights
from nano.training.backend import Chosen, PackedRows, PackedState, TrainingBackend
from nano.training.fused import fused
from nano.training.ops import LOWEST
from nano.training.parameters import weights_of

__all__ = ["INDEX_WEIGHT", "Pass", "Target", "index_loss"]

Backend = TypeVar("Backend", bound=TrainingBackend)

# Orthogonalised updates make the size of a gradient that only the indexer has irrelevant; small,
# so that the trunk, which it also reaches, is shaped by the next token.
INDEX_WEIGHT = 0.05


@dataclass(frozen=True)
class Pass:
    """A forward pass over packed rows: the model that ran, its result and its tools."""

    model: DeepseekV41
    backend: TrainingBackend
    rows: PackedRows
    result: Forwarded


@dataclass(frozen=True)
class Target:
    """The model to train.

    Args:
        config: the unquantised form.
        hashes: Engram's constants, on the device of training.
        dtype: of activations and products.
        round_inputs: see `TrainingBackend`.
    """

    config: ModelConfig
    hashes: EngramHash
    dtype: torch.dtype = torch.bfloat16
    round_inputs: bool = True
    _made: list[DeepseekV41] = field(default_factory=list, repr=False)

    def model(self, weights: ModelWeights) -> DeepseekV41:
        """Return a model with these weights; constants are brought to the device only once."""
        if not self._made:
            device = self.hashes.fold.device
            self._made.append(DeepseekV41(self.config, weights, self.hashes, device))
        return self._made[0].with_weights(weights)

    def backend(self, kind: type[Backend], strength: Tensor, sparse: Tensor) -> Backend:
        """Return the ops of one forward pass in this target's numerics."""
        return kind(
            strength,
            sparse,
            window=self.config.sliding_window,
            dtype=self.dtype,
            round_inputs=self.round_inputs,
        )

    def run(
        self,
        parameters: dict[str, Tensor],
        tokens: Tensor,
        documents: Tensor,
        strength: Tensor,
        sparse: Tensor,
    ) -> Pass:
        """Run all layers over tokens [N, T] of packed documents [N, T], both int64."""
        config = self.config
        backend = self.backend(TrainingBackend, strength, sparse)
        typed = cast(Any, backend)
        model = self.model(weights_of(parameters, strength, config, typed))
        rows = PackedRows(documents)
        state = PackedState(source_ratios(config), config.num_hidden_layers)
        result = model.forward(typed, tokens.flatten(), cast(Any, rows), cast(Any, state))
        return Pass(model, backend, rows, result)

    def loss(
        self,
        parameters: dict[str, Tensor],
        tokens: Tensor,
        documents: Tensor,
        weights: Tensor,
        strength: Tensor,
        sparse: Tensor,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and what to watch.

        Args:
            tokens, documents: [N, T] int64.
            weights: [N, T] float32, how much it counts to predict this token.
            strength, sparse: see `TrainingBackend`.
        Returns:
            loss [], and `next_token`, `index`, `accuracy` [] (of tokens that count fully) and
            `load` [layers, experts] (tokens an expert got).
        """
        done = self.run(parameters, tokens, documents, strength, sparse)
        model, backend = done.model, cast(Any, done.backend)
        normed = backend.rms_norm(done.result.hidden, model.weights.norm, self.config.rms_norm_eps)
        head = model.weights.head.payload.to(normed.dtype)
        next_token, accuracy = _next_token(normed @ head.T, tokens, documents, weights)
        index = index_loss(done.backend.choices)
        metrics = {
            "next_token": next_token.detach(),
            "index": index.detach(),
            "accuracy": accuracy,
            "load": torch.stack(done.backend.load),
        }
        return next_token + INDEX_WEIGHT * index, metrics


@fused
def _next_token(
    logits: Tensor, tokens: Tensor, documents: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the weighted mean loss, and the share of full-weight tokens that would be right."""
    wide = logits.float()
    wanted = tokens.roll(-1, 1)
    weight = weights.roll(-1, 1) * (documents.roll(-1, 1) == documents)
    weight = torch.cat((weight[:, :-1], torch.zeros_like(weight[:, :1])), 1).flatten()
    chosen = wide.gather(-1, wanted.flatten().unsqueeze(-1)).squeeze(-1)
    nll = wide.logsumexp(-1) - chosen
    full = weight >= 1.0
    right = (chosen.detach() >= wide.detach().amax(-1)) & full
    loss = (nll * weight).sum() / weight.sum().clamp(min=1.0)
    return loss, right.sum() / full.sum().clamp(min=1)


def index_loss(choices: list[Chosen]) -> Tensor:
    """Return the mean KL divergence from index scores to attention mass.

    The mass of an entry is what all heads of all layers that used the choice gave it; the selection
    itself has no gradient, so this is what the indexers learn from.
    """
    terms = [_divergence(torch.stack(each.mass), each.scores, each.seen) for each in choices]
    return torch.stack(terms).mean()


@fused
def _divergence(masses: Tensor, scores: Tensor, seen: Tensor) -> Tensor:
    mass = masses.sum(0)
    wanted = mass / mass.sum(-1, keepdim=True).clamp(min=1e-9)
    guess = scores.clamp(min=LOWEST)
    guess = guess - guess.logsumexp(-1, keepdim=True)
    each = torch.where(wanted > 0, wanted * (wanted.clamp(min=1e-9).log() - guess), 0.0).sum(-1)
    several = seen.sum(-1) > 1
    return (each * several).sum() / several.sum().clamp(min=1)
