"""Choosing tokens: filters, noise by token id, argmax; and log-probabilities.

Rows are independent: a row has the same bits alone and in any batch. So every sum along the
vocabulary is a running sum, which is made in order; a plain sum over a single long row may be split
among threads, and then rounds otherwise than in a batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from deepinfer_core.cpu.ops.philox import gumbel_noise
from deepinfer_core.errors import KernelInputError
from deepinfer_core.interfaces import SampleInputs

__all__ = ["Sampled", "logprobs", "probabilities", "sample"]

_NO_LOGIT = float("-inf")
_NEUTRAL_PENALTIES = (1.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of `sample`: token_ids [N] int64; status [N] int32, 1 where no logit is usable."""

    token_ids: Tensor
    status: Tensor


def sample(logits: Tensor, inputs: SampleInputs) -> Sampled:
    """Choose one token a row.

    Filters in order: mask, bias, repetition penalty, frequency and presence penalties; then, for
    rows with a temperature above 0, temperature, top-k, top-p and min-p. The token is the argmax of
    what is left plus the noise of stream 0; without noise where the temperature is 0. Among equal
    values the lower id wins, at the border of top-k and top-p too. Only rows that use a filter pay
    for it.

    Cost on two cores of a server CPU, for a row of V = 129280: 0.2 ms greedy, 3 ms sampled (2 ms of
    it noise), 2 ms more for top-k and 12 ms more for top-p, which sorts.

    Args:
        logits: [N, V] float32, not modified. -inf is a token that cannot be chosen.
        inputs: settings of each row.
    Returns:
        Status is 1 and the token 0 where a raw logit is NaN or +inf (masked or not), where no logit
        is finite, and where mask, bias or penalties leave no finite maximum. Other rows are not
        affected.
    Raises:
        KernelInputError: a shape, dtype or device is not as `SampleInputs` says.
    """
    _check_inputs(logits, inputs)
    values, token_ids, peak, broken = _usable(logits.detach(), inputs)
    rows = _rows((inputs.temperature > 0) & ~broken)
    if len(rows):
        kept = _truncate(values[rows], peak[rows], inputs, rows)
        cycle = 0 if inputs.cycle is None else inputs.cycle[rows]
        noise = gumbel_noise(
            inputs.seeds[rows], inputs.positions[rows], kept.shape[1], inputs.stream, cycle
        )
        token_ids[rows] = noise.add_(kept).argmax(dim=-1)
    return Sampled(token_ids.masked_fill(broken, 0), broken.to(torch.int32))


def probabilities(logits: Tensor, inputs: SampleInputs) -> Tensor:
    """Return the distribution that `sample` draws from.

    Args:
        logits: [N, V] float32, not modified.
        inputs: settings of each row.
    Returns:
        [N, V] float32; one token has it all where the temperature is 0, none has any where `sample`
        gives status 1.
    Raises:
        KernelInputError: as `sample`.
    """
    _check_inputs(logits, inputs)
    values, token_ids, peak, broken = _usable(logits.detach(), inputs)
    result = torch.zeros_like(values).scatter_(1, token_ids[:, None], 1.0)
    rows = _rows((inputs.temperature > 0) & ~broken)
    if len(rows):
        weight = _truncate(values[rows], peak[rows], inputs, rows).exp()
        result[rows] = (weight / _running_sum(weight)[:, -1:]).float()
    return result.masked_fill(broken[:, None], 0.0)


def _usable(values: Tensor, inputs: SampleInputs) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return adjusted logits, id and value of each row's maximum, and which rows have none."""
    token_ids, peak = _best(values)
    broken = ~peak.isfinite()
    if not (inputs.mask is None and inputs.bias is None and inputs.penalties is None):
        values = _adjust(values, inputs)
        token_ids, peak = _best(values)
        broken = broken | ~peak.isfinite()
    return values, token_ids, peak, broken


def logprobs(logits: Tensor, token_ids: Tensor, num_top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of raw logits: of given tokens, and of the most likely ones.

    Differentiable. Sums and logarithms are in float64, results rounded once.

    Args:
        logits: [N, V] float32.
        token_ids: [N] int64, from 0 to V - 1.
        num_top: from 0 to V.
    Returns:
        chosen [N] float32, ids [N, num_top] int64 and values [N, num_top] float32, by descending
        logit, the lower id first among equal ones. A row with a NaN or +inf, or without a finite
        logit, has NaN values and ids within the vocabulary.
    Raises:
        KernelInputError: a shape or dtype, a token id or `num_top` is out of range.
    """
    num_rows, vocab_size = _check_logits(logits)
    _check("token_ids", token_ids, torch.int64, (num_rows,), logits.device)
    if not 0 <= num_top <= vocab_size:
        raise KernelInputError(f"`num_top` is {num_top}; allowed: 0 to {vocab_size} (all tokens).")
    if num_rows and not bool(((token_ids >= 0) & (token_ids < vocab_size)).all()):
        raise KernelInputError(
            f"`token_ids` runs from {int(token_ids.min())} to {int(token_ids.max())}; "
            f"allowed: 0 to {vocab_size - 1}. Leave padding rows out."
        )
    peak = logits.detach().amax(dim=-1, keepdim=True)
    broken = ~peak.isfinite()
    peak = peak.masked_fill(broken, 0.0)
    safe = torch.where(broken, torch.zeros_like(logits), logits)
    total = _running_sum((safe - peak).exp())[:, -1:].log()

    def value(ids: Tensor) -> Tensor:
        of_ids = safe.gather(1, ids).double() - peak.double() - total
        return of_ids.float().masked_fill(broken, float("nan"))

    best = _top_ids(safe.detach(), num_top)
    return value(token_ids[:, None])[:, 0], best, value(best)


def _best(values: Tensor) -> tuple[Tensor, Tensor]:
    """Return id and value of each row's maximum: the lowest id on ties, NaN if there is one."""
    token_ids = values.argmax(dim=-1)
    return token_ids, values.gather(1, token_ids[:, None])[:, 0]


def _rows(used: Tensor) -> Tensor:
    return used.nonzero()[:, 0]


def _on_rows(values: Tensor, used: Tensor, change: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """Return values with `change(values[rows], rows)` in the rows where `used`."""
    rows = _rows(used)
    if not len(rows):
        return values
    return values.index_copy(0, rows, change(values[rows], rows))


def _adjust(values: Tensor, inputs: SampleInputs) -> Tensor:
    """Apply what acts on logits of greedy rows too: mask, bias and penalties."""
    mask, bias, penalties = inputs.mask, inputs.bias, inputs.penalties
    if mask is not None:
        allowed_words = mask
        values = _on_rows(
            values,
            (mask != -1).any(dim=-1),
            lambda part, rows: part.masked_fill(
                ~_unpack(allowed_words[rows], part.shape[1]), _NO_LOGIT
            ),
        )
    if bias is not None:
        values = values + bias
    if penalties is not None:
        neutral = torch.tensor(_NEUTRAL_PENALTIES, device=values.device)
        used = (penalties != neutral).any(dim=-1)
        values = _on_rows(values, used, lambda part, rows: _penalise(part, inputs, rows))
    return values


def _unpack(words: Tensor, vocab_size: int) -> Tensor:
    """Return the bits of a mask: [n, ceil(V / 32)] int32 -> [n, V] bool."""
    shifts = torch.arange(32, dtype=torch.int32, device=words.device)
    bits = (words[:, :, None] >> shifts) & 1
    return bits.flatten(1)[:, :vocab_size] != 0


def _penalise(values: Tensor, inputs: SampleInputs, rows: Tensor) -> Tensor:
    assert inputs.penalties is not None and inputs.output_counts is not None
    assert inputs.prompt_seen is not None
    repetition, frequency, presence = inputs.penalties[rows, :, None].unbind(1)
    counts = inputs.output_counts[rows]
    produced = counts > 0
    repeated = torch.where(values > 0, values / repetition, values * repetition)
    values = torch.where(produced | inputs.prompt_seen[rows], repeated, values)
    return values - frequency * counts - presence * produced


def _truncate(values: Tensor, peak: Tensor, inputs: SampleInputs, rows: Tensor) -> Tensor:
    """Apply temperature, top-k, top-p and min-p to sampled rows; dropped tokens become -inf.

    The maximum is subtracted first: it is 0 ever after, whatever the temperature, so nothing
    overflows upwards and `exp` gives the probability relative to the most likely token.
    """
    top_k, top_p, min_p = inputs.top_k, inputs.top_p, inputs.min_p
    values = (values - peak[:, None]) / inputs.temperature[rows, None]
    if top_k is not None:
        k = top_k[rows]
        used = (k > 0) & (k < values.shape[1])
        values = _on_rows(values, used, lambda part, chosen: _keep_top_k(part, k[chosen]))
    if top_p is not None:
        p = top_p[rows]
        values = _on_rows(values, p < 1, lambda part, chosen: _keep_top_p(part, p[chosen]))
    if min_p is not None:
        low = min_p[rows]
        values = _on_rows(
            values,
            low > 0,
            lambda part, chosen: part.masked_fill(part.exp() < low[chosen, None], _NO_LOGIT),
        )
    return values


def _keep_top_k(values: Tensor, k: Tensor) -> Tensor:
    largest = values.topk(int(k.max()), dim=-1).values
    return _keep_first(values, largest, k)


def _keep_top_p(values: Tensor, p: Tensor) -> Tensor:
    """Keep tokens in order until the probability, rounded to float32, reaches p."""
    ordered = values.sort(dim=-1, descending=True).values
    mass = _running_sum(ordered.exp())
    short = (mass / mass[:, -1:]).float() < p[:, None]
    # Besides those short of p comes the one that reaches it; the last one does, as 1 > p.
    return _keep_first(values, ordered, short.sum(dim=-1) + 1)


def _keep_first(values: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """Set to -inf all but the first `count` of each row by (value desc, id asc)."""
    return values.masked_fill(~_is_first(values, ordered, count), _NO_LOGIT)


def _is_first(values: Tensor, ordered: Tensor, count: Tensor) -> Tensor:
    """Mark the first `count` of each row by (value desc, id asc).

    values [n, V]; ordered [n, m], the m largest of a row, descending; count [n] int64, from 1 to m.
    """
    border = ordered.gather(1, count[:, None] - 1)
    above = values > border
    level = values == border
    room = count[:, None] - above.sum(dim=-1, keepdim=True)
    return above | (level & (level.cumsum(dim=-1) <= room))


def _top_ids(values: Tensor, num_top: int) -> Tensor:
    """Return the first `num_top` ids of each row by (value desc, id asc): [N, num_top] int64."""
    count = torch.full((len(values),), num_top, device=values.device)
    if not num_top or not len(values):
        return count.new_empty(len(values), num_top)
    kept = _is_first(values, values.topk(num_top, dim=-1).values, count)
    ids = kept.nonzero()[:, 1].view(len(values), num_top)  # ascending in each row
    order = values.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    return ids.gather(1, order)


def _running_sum(values: Tensor) -> Tensor:
    return values.cumsum(dim=-1, dtype=torch.float64)


def _check_inputs(logits: Tensor, inputs: SampleInputs) -> None:
    num_rows, vocab_size = _check_logits(logits)
    per_token = (num_rows, vocab_size)
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "seeds": (torch.int64, (num_rows, 2)),
        "positions": (torch.int64, (num_rows,)),
        "temperature": (torch.float32, (num_rows,)),
        "top_k": (torch.int64, (num_rows,)),
        "top_p": (torch.float32, (num_rows,)),
        "min_p": (torch.float32, (num_rows,)),
        "penalties": (torch.float32, (num_rows, 3)),
        "prompt_seen": (torch.bool, per_token),
        "output_counts": (torch.int32, per_token),
        "bias": (torch.float32, per_token),
        "mask": (torch.int32, (num_rows, -(-vocab_size // 32))),
    }
    for name, (dtype, shape) in expected.items():
        tensor = getattr(inputs, name)
        if tensor is not None:
            _check(name, tensor, dtype, shape, logits.device)
    for name in ("prompt_seen", "output_counts"):
        if inputs.penalties is not None and getattr(inputs, name) is None:
            raise KernelInputError(f"`{name}` is None, but `penalties` is set and needs it.")


def _check_logits(logits: Tensor) -> tuple[int, int]:
    if logits.dim() != 2 or logits.dtype != torch.float32 or not logits.shape[1]:
        raise KernelInputError(
            f"`logits` is {logits.dtype} {list(logits.shape)}; "
            "the sampler needs torch.float32 [N, V] with V of at least 1."
        )
    return logits.shape[0], logits.shape[1]


def _check(
    name: str, tensor: Tensor, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    if tensor.shape != shape or tensor.dtype != dtype or tensor.device != device:
        raise KernelInputError(
            f"`{name}` is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; "
            f"the sampler needs {dtype} {list(shape)} on {device}."
        )
