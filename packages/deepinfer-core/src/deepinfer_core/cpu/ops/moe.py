"""Router, routed experts and the shared expert."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.formats import round_fp8
from deepinfer_core.cpu.ops.linear import Part, linear_float32, product, widen
from deepinfer_core.cpu.ops.streams import sigmoid
from deepinfer_core.interfaces import ExpertWeights, Matrix

__all__ = ["clamped_product", "experts", "route", "shared_expert"]


def route(
    x: Tensor,
    gate: Matrix,
    bias: Tensor,
    *,
    top_k: int,
    temperature: float,
    scale: float,
    strict: bool,
) -> tuple[Tensor, Tensor]:
    """See `KernelBackend.route`."""
    logits = linear_float32(x, gate, strict) / temperature
    softplus = logits.clamp(min=0) + torch.log1p(torch.exp(-logits.abs()))
    score = softplus.sqrt()
    order = torch.sort(score + bias, dim=-1, descending=True, stable=True).indices[:, :top_k]
    chosen = score.gather(1, order)
    return order.to(torch.int32), chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale


def clamped_product(gate: Tensor, up: Tensor, limit: float) -> Tensor:
    """Return `silu(min(gate, limit)) * clip(up, -limit, limit)`, float32."""
    gate = gate.clamp(max=limit)
    return gate * sigmoid(gate) * up.clamp(-limit, limit)


@dataclass(frozen=True)
class _Widened:
    """Some experts of a layer as float32, and which of them are stored in a quantised format."""

    w1: Tensor
    w3: Tensor
    w2: Tensor
    quantised: bool


def _widen_chosen(experts: ExpertWeights, chosen: Tensor) -> _Widened:
    def part(matrix: Matrix) -> Tensor:
        return widen(Part.of(matrix, lambda stack: stack[chosen]))

    return _Widened(
        part(experts.w1), part(experts.w3), part(experts.w2), experts.w1.scale is not None
    )


def _expert(
    x: Tensor,
    w1: Tensor,
    w3: Tensor,
    w2: Tensor,
    weight: Tensor | None,
    limit: float,
    strict: bool,
    round_input: bool,
) -> Tensor:
    """Return one expert's output [n, D] in the dtype of x.

    `round_input` rounds the inputs of both layers to fp8.
    """
    operand = round_fp8(x) if round_input else x.float()
    gate = product(operand, w1, strict).to(x.dtype).float()
    up = product(operand, w3, strict).to(x.dtype).float()
    inner = clamped_product(gate, up, limit)
    if weight is not None:
        inner = inner * weight.unsqueeze(-1)
    inner = inner.to(x.dtype)
    inner = round_fp8(inner) if round_input else inner.float()
    return product(inner, w2, strict).to(x.dtype)


def experts(
    x: Tensor,
    ids: Tensor,
    weights: Tensor,
    experts: ExpertWeights,
    *,
    limit: float,
    strict: bool,
    release: bool,
) -> Tensor:
    """See `KernelBackend.experts`."""
    parts = torch.zeros(x.shape[0], ids.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    chosen = torch.unique(ids[ids >= 0]).long()
    if chosen.numel():
        wide = _widen_chosen(experts, chosen)
        for place, slot in enumerate(chosen.tolist()):
            row, k = (ids == slot).nonzero(as_tuple=True)
            y = _expert(
                x[row],
                wide.w1[place],
                wide.w3[place],
                wide.w2[place],
                weights[row, k],
                limit,
                strict,
                release and wide.quantised,
            )
            parts[row, k] = y.float()
    total = parts[:, 0]
    for k in range(1, ids.shape[1]):  # top-k order, whichever slot served a row
        total = total + parts[:, k]
    return total


def shared_expert(
    x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float, strict: bool, release: bool
) -> Tensor:
    """See `KernelBackend.shared_expert`."""
    rounded = release and w1.scale is not None
    return _expert(x, widen(w1), widen(w3), widen(w2), None, limit, strict, rounded)
