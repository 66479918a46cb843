"""Twins of the sampling ops: whole rows, whole sorts, and no wait for the device.

Sums along the vocabulary are running sums in float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer_kernels_cuda.sampling.inputs import Sampled
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["gumbel_noise", "logprobs", "philox_words", "probabilities", "sample"]

_NO_LOGIT = float("-inf")
_WORD = 0xFFFFFFFF


def sample(logits: Tensor, inputs: SampleInputs) -> Sampled:
    """See `sampling.sample`."""
    values, token_ids, broken = _filtered(logits, inputs)
    kept = _kept(values, inputs)
    drawn = (kept + _noise(kept, inputs)).argmax(-1)
    token_ids = torch.where(inputs.temperature > 0, drawn, token_ids)
    return Sampled(token_ids.masked_fill(broken, 0), broken.int())


def probabilities(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """See `sampling.probabilities`."""
    values, token_ids, broken = _filtered(logits, inputs)
    weight = _kept(values, inputs).exp().double()
    spread = (weight / weight.cumsum(-1)[:, -1:]).float()
    sure = torch.zeros_like(spread).scatter_(1, token_ids.unsqueeze(1), 1.0)
    chosen = torch.where(inputs.temperature.unsqueeze(1) > 0, spread, sure)
    return chosen.masked_fill(broken.unsqueeze(1), 0.0)


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """See `sampling.logprobs`."""
    broken = ~logits.amax(-1, keepdim=True).isfinite()
    values = logits.masked_fill(broken, 0.0)
    peak = values.amax(-1, keepdim=True)
    total = (values - peak).exp().double().cumsum(-1)[:, -1:].log()
    best = values.sort(dim=-1, descending=True, stable=True).indices[:, :num_top]

    def value(ids: Tensor) -> Tensor:
        found = values.gather(1, ids).double() - peak.double() - total
        return found.float().masked_fill(broken, float("nan"))

    return value(token_ids.unsqueeze(1)).squeeze(1), best, value(best)


def _filtered(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Return logits after mask, bias and penalties, the lowest id of each maximum, and faults."""
    raw = logits.amax(-1)
    values = logits
    if inputs.mask is not None:
        shifts = torch.arange(32, dtype=torch.int32, device=logits.device)
        allowed = (inputs.mask.unsqueeze(-1) >> shifts & 1).flatten(1)[:, : logits.shape[1]]
        values = values.masked_fill(allowed == 0, _NO_LOGIT)
    if inputs.bias is not None:
        values = values + inputs.bias
    if inputs.penalties is not None:
        assert inputs.output_counts is not None and inputs.prompt_seen is not None
        repetition, frequency, presence = inputs.penalties.unsqueeze(-1).unbind(1)
        produced = inputs.output_counts > 0
        repeated = torch.where(values > 0, values / repetition, values * repetition)
        values = torch.where(produced | inputs.prompt_seen, repeated, values)
        values = values - frequency * inputs.output_counts - presence * produced
    peak = values.amax(-1)
    return values, values.argmax(-1), ~(raw.isfinite() & peak.isfinite())


def _kept(values: Tensor, inputs: SampleInputs) -> Tensor:
    """Return (value - peak) / temperature, -inf where top-k, top-p or min-p drop a token.

    Rows that are not sampled hold anything.
    """
    peak = values.amax(-1, keepdim=True)
    scaled = (values - peak) / inputs.temperature.unsqueeze(1)
    if inputs.top_k is None and inputs.top_p is None and inputs.min_p is None:
        return scaled
    ordered, ids = scaled.sort(dim=-1, descending=True, stable=True)
    size = ordered.shape[1]
    if inputs.top_k is not None:
        k = torch.where(inputs.top_k > 0, inputs.top_k, size).unsqueeze(1)
        ordered = ordered.masked_fill(torch.arange(size, device=k.device) >= k, _NO_LOGIT)
    if inputs.top_p is not None:
        p = inputs.top_p.unsqueeze(1)
        mass = ordered.exp().cumsum(-1, dtype=torch.float64)
        short = (mass / mass[:, -1:]).float() < p
        # dropped are those behind the one that reaches p; there is none if nothing is cut
        behind = torch.nn.functional.pad(~short[:, :-1], (1, 0)) & (p < 1)
        ordered = ordered.masked_fill(behind, _NO_LOGIT)
    if inputs.min_p is not None:
        low = inputs.min_p.clamp(max=1.0).unsqueeze(1)  # the best one stays
        ordered = ordered.masked_fill(ordered.exp() < low, _NO_LOGIT)
    return torch.empty_like(ordered).scatter_(1, ids, ordered)


def _noise(like: Tensor, inputs: SampleInputs) -> Tensor:
    cycle = torch.zeros_like(inputs.positions) if inputs.cycle is None else inputs.cycle
    return gumbel_noise(inputs.seeds, inputs.positions, like.shape[1], inputs.stream, cycle)


def gumbel_noise(
    seeds: Tensor, positions: Tensor, vocab_size: int, stream: int, cycle: Tensor
) -> Tensor:
    """Return -log(-log(u)) of each row and token id: [N, V] float32.

    seeds [N, 2], positions [N], cycle [N] int64; u = ((word >> 9) + 0.5) / 2^23, the word that of
    counter (id // 4, position, stream, cycle) at place id % 4.
    """
    groups = torch.arange(-(-vocab_size // 4), device=seeds.device)
    fixed = torch.stack((positions, torch.full_like(positions, stream), cycle), -1)
    count = len(groups)
    counter = torch.cat(
        (
            groups.view(1, -1, 1).expand(len(seeds), -1, -1),
            fixed.unsqueeze(1).expand(-1, count, -1),
        ),
        -1,
    )
    words = philox_words(counter, seeds.unsqueeze(1)).flatten(1)[:, :vocab_size]
    u = ((words >> 9).float() + 0.5) * 2.0**-23
    return -(-u.log()).log()


def philox_words(counter: Tensor, key: Tensor) -> Tensor:
    """Return the words of Philox4x32-10: counter [..., 4], key [..., 2] int64 -> [..., 4] int64.

    The low 32 bits of each item count.
    """
    c0, c1, c2, c3 = (counter & _WORD).unbind(-1)
    k0, k1 = (key & _WORD).unbind(-1)
    for _ in range(10):
        high0, low0 = _product(c0, 0xD2511F53)
        high1, low1 = _product(c2, 0xCD9E8D57)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return torch.stack((c0, c1, c2, c3), -1)


def _product(a: Tensor, b: int) -> tuple[Tensor, Tensor]:
    """Return high and low 32 bits of the products of 32-bit numbers, by halves of b."""
    upper, lower = a * (b >> 16), a * (b & 0xFFFF)  # 48 bits each
    total = upper + (lower >> 16)
    return total >> 16, ((total & 0xFFFF) << 16) | (lower & 0xFFFF)
