"""What a step leaves on the device for the next one."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.values import Carry

__all__ = ["write_carry"]


def write_carry(tokens: Tensor, start: Tensor, tag: Tensor, out: Carry) -> None:
    """Write the carry of a step: a row for each of its sequences, the others empty.

    Args:
        tokens: [R, n] int64, contiguous in the last dimension: the token to feed next, and what was
            drafted behind it.
        start: [R] int64, contiguous, committed length.
        tag: [R] int64, contiguous, -1 where a sequence leaves nothing.
        out: contiguous tensors of at least R rows and n columns, written: columns behind n become
            0, tags of rows behind R become -1.
    Raises:
        KernelInputError: a shape, dtype or device is not as above, or `out` is too small.
    Source: reference.step.write_carry.
    """
    check_tensor("tokens", tokens, shape=(None, None), dtype=torch.int64, contiguous=False)
    (count, width), device = tokens.shape, tokens.device
    for name, column in (("start", start), ("tag", tag)):
        check_tensor(name, column, shape=(count,), dtype=torch.int64, device=device)
    check_tensor("out.tokens", out.tokens, shape=(None, None), dtype=torch.int64, device=device)
    room, wide = out.tokens.shape
    for name, column in (("out.start", out.start), ("out.tag", out.tag)):
        check_tensor(name, column, shape=(room,), dtype=torch.int64, device=device)
    if count > room or width > wide:
        raise KernelInputError(
            f"`out` has room for {room} sequences of {wide} tokens; "
            f"the step has {count} of {width}."
        )
    if room:
        _write_carry[(room,)](
            tokens,
            start,
            tag,
            out.tokens,
            out.start,
            out.tag,
            count,
            width,
            wide,
            tokens.stride(0),
            triton.next_power_of_2(max(wide, 1)),
            num_warps=1,
        )


@triton.jit
def _write_carry(
    tokens_ptr,
    start_ptr,
    tag_ptr,
    out_tokens_ptr,
    out_start_ptr,
    out_tag_ptr,
    count,
    width,
    wide,
    stride,
    WIDE: tl.constexpr,
):
    s = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, WIDE)
    used = s < count
    mine = used & (column < width)
    tokens = tl.load(tokens_ptr + s * stride + column, mask=mine, other=0)
    tl.store(out_tokens_ptr + s * wide + column, tokens, mask=used & (column < wide))
    tl.store(out_start_ptr + s, tl.load(start_ptr + s, mask=used, other=0), mask=used)
    tl.store(out_tag_ptr + s, tl.load(tag_ptr + s, mask=used, other=-1))
