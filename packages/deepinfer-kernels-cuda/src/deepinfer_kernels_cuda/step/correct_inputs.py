"""First tokens and starts of a step, taken from what the step before left on the device."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.values import Carry

__all__ = ["correct_inputs"]

BAD_SOURCE = tl.constexpr(2)


def correct_inputs(
    tokens: Tensor, start: Tensor, tag: Tensor, remap: Tensor, carry: Carry | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Replace host values by the carry of the previous step where `remap[s] >= 0`.

    A sequence has a bad source when it names a carry row that does not exist or has another tag, or
    when its first token is still a placeholder (a negative id) afterwards. It gets tokens 0, keeps
    the host's start, and fails alone. Placeholders in other columns become 0 as well.

    Args:
        tokens: [R, n] int64, contiguous, host tokens, negative where the carry supplies them.
            Columns beyond those of the carry keep the host's.
        start: [R] int64 host start positions. tag: [R] int64. Contiguous.
        remap: [R] int64, contiguous, row of the carry, or -1 for host values.
        carry: what the previous step left, contiguous tensors, or None. Not modified.
    Returns:
        tokens [R, n] int64, start [R] int64 and status [R] int32 (0, or 2 for a bad source); they
        share no memory with the inputs.
    Raises:
        KernelInputError: a shape, dtype or device is not as above.
    Source: reference.step.correct_inputs.
    """
    check_tensor("tokens", tokens, shape=(None, None), dtype=torch.int64)
    (count, width), device = tokens.shape, tokens.device
    for name, column in (("start", start), ("tag", tag), ("remap", remap)):
        check_tensor(name, column, shape=(count,), dtype=torch.int64, device=device)
    num_carried = carried_width = 0
    if carry is not None:
        check_tensor("carry.tokens", carry.tokens, shape=(None, None), dtype=torch.int64)
        num_carried, carried_width = carry.tokens.shape
        for name, column in (("carry.start", carry.start), ("carry.tag", carry.tag)):
            check_tensor(name, column, shape=(num_carried,), dtype=torch.int64, device=device)
    fed, corrected = torch.empty_like(tokens), torch.empty_like(start)
    status = torch.empty(count, dtype=torch.int32, device=device)
    if count:
        _correct_inputs[(count,)](
            tokens,
            start,
            tag,
            remap,
            tokens if carry is None else carry.tokens,
            start if carry is None else carry.start,
            tag if carry is None else carry.tag,
            fed,
            corrected,
            status,
            width,
            num_carried,
            carried_width,
            triton.next_power_of_2(max(width, 1)),
            num_warps=1,
        )
    return fed, corrected, status


@triton.jit
def _correct_inputs(
    tokens_ptr,
    start_ptr,
    tag_ptr,
    remap_ptr,
    carry_tokens_ptr,
    carry_start_ptr,
    carry_tag_ptr,
    fed_ptr,
    corrected_ptr,
    status_ptr,
    width,
    num_carried,
    carried_width,
    WIDTH: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDTH)
    source = tl.load(remap_ptr + s)
    linked = source >= 0
    exists = linked & (source < num_carried)
    tag = tl.load(tag_ptr + s)
    good = exists & (tl.load(carry_tag_ptr + source, mask=exists, other=0) == tag)
    tokens = tl.load(tokens_ptr + s * width + column, mask=column < width, other=0)
    use = good & (column < width) & (column < carried_width)
    carried = tl.load(carry_tokens_ptr + source * carried_width + column, mask=use, other=0)
    tokens = tl.where(use, carried, tokens)
    first = tl.sum(tl.where(column == 0, tokens, 0))
    bad = (linked & (source >= num_carried)) | (exists & ~good) | (first < 0)
    tokens = tl.where(bad, 0, tl.maximum(tokens, 0))
    tl.store(fed_ptr + s * width + column, tokens, mask=column < width)
    start = tl.load(start_ptr + s)
    carried_start = tl.load(carry_start_ptr + source, mask=good, other=0)
    # A first token that is a placeholder in the carry itself fails the sequence, but not its start.
    tl.store(corrected_ptr + s, tl.where(good, carried_start, start))
    tl.store(status_ptr + s, tl.where(bad, BAD_SOURCE, 0))
