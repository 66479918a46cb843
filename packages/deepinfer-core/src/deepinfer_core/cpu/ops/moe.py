"""Router, routed experts and the shared expert."""

from __future__ import annotations

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


def _expert(
    operand: Tensor,
    w1: Matrix,
    w3: Matrix,
    w2: Matrix,
    weight: Tensor | None,
    dtype: torch.dtype,
    *,
    limit: float,
    strict: bool,
    rounded: bool,
) -> Tensor:
    """Return one expert's output [n, D] in `dtype` for inputs [n, D] of `_operand`.

    `rounded` rounds what goes into the second layer to fp8.
    """
    gate = product(operand, widen(w1), strict).to(dtype).float()
    up = product(operand, widen(w3), strict).to(dtype).float()
    inner = clamped_product(gate, up, limit)
    if weight is not None:
        inner = inner * weight.unsqueeze(-1)
    return product(_operand(inner.to(dtype), rounded), widen(w2), strict).to(dtype)


def _operand(x: Tensor, rounded: bool) -> Tensor:
    """Return the input of a product, float32; rounded to fp8 where the weight is quantised."""
    return round_fp8(x) if rounded else x.float()


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
    """See `KernelBackend.experts`. Widens one expert at a time: a layer of them fits no memory."""
    parts = torch.zeros(x.shape[0], ids.shape[1], x.shape[1], dtype=torch.float32, device=x.device)
    rounded = release and experts.w1.scale is not None
    operand = _operand(x, rounded)
    for slot in torch.unique(ids[ids >= 0]).tolist():
        row, k = (ids == slot).nonzero(as_tuple=True)
        y = _expert(
            operand[row],
            _one(experts.w1, slot),
            _one(experts.w3, slot),
            _one(experts.w2, slot),
            weights[row, k],
            x.dtype,
            limit=limit,
            strict=strict,
            rounded=rounded,
        )
        parts[row, k] = y.float()
    total = parts[:, 0]
    for k in range(1, ids.shape[1]):  # top-k order, whichever slot served a row
        total = total + parts[:, k]
    return total


def _one(stack: Matrix, slot: int) -> Matrix:
    return Part.of(stack, lambda stored: stored[slot])


def shared_expert(
    x: Tensor, w1: Matrix, w3: Matrix, w2: Matrix, *, limit: float, strict: bool, release: bool
) -> Tensor:
    """See `KernelBackend.shared_expert`."""
    rounded = release and w1.scale is not None
    operand = _operand(x, rounded)
    return _expert(operand, w1, w3, w2, None, x.dtype, limit=limit, strict=strict, rounded=rounded)
