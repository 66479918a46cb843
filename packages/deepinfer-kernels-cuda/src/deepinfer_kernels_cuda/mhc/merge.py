"""Merge of a layer's output into the residual streams."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.kernel_math import as_bf16

__all__ = ["mhc_merge"]


@triton.jit
def _merge(
    y_ptr,
    post_ptr,
    comb_ptr,
    stream_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    STREAMS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < SIZE
    y = tl.load(y_ptr + row * SIZE + channel, mask=inside, other=0.0).to(tl.float32)
    start = row * STREAMS * SIZE + channel
    # All are read before the first store, which the compiler may not pass.
    streams = ()
    for source in tl.static_range(STREAMS):
        stream = tl.load(stream_ptr + start + source * SIZE, mask=inside, other=0.0)
        streams = streams + (stream.to(tl.float32),)  # type: ignore[assignment]  # noqa: RUF005
    for destination in tl.static_range(STREAMS):
        total = tl.load(post_ptr + row * STREAMS + destination) * y
        for source in tl.static_range(STREAMS):
            part = tl.load(comb_ptr + (row * STREAMS + source) * STREAMS + destination)
            total += part * streams[source]
        tl.store(out_ptr + start + destination * SIZE, as_bf16(total), mask=inside)


def mhc_merge(y: Tensor, post: Tensor, comb: Tensor, streams: Tensor) -> Tensor:
    """Return new streams `[o] = post[o] * y + sum_i comb[i, o] * streams[i]`.

    Added in this order in float32, rounded once.

    Args:
        y: [B, D] bfloat16, contiguous.
        post: [B, S] float32. comb: [B, source, destination] float32.
        streams: [B, S, D] bfloat16, contiguous.
    Returns:
        [B, S, D] bfloat16, a new tensor. Deterministic; a row depends on itself alone. S and D are
        compile-time sizes.
    Raises:
        KernelInputError: a shape, dtype, stride or device is not as above.
    Source: reference.mhc.mhc_merge.
    """
    check_tensor("streams", streams, shape=(None, None, None), dtype=torch.bfloat16)
    (rows, count, size), device = streams.shape, streams.device
    check_tensor("y", y, shape=(rows, size), dtype=torch.bfloat16, device=device)
    check_tensor("post", post, shape=(rows, count), dtype=torch.float32, device=device)
    check_tensor("comb", comb, shape=(rows, count, count), dtype=torch.float32, device=device)
    out = torch.empty_like(streams)
    if rows and size:
        block = min(1024, triton.next_power_of_2(size))
        _merge[(rows, triton.cdiv(size, block))](
            y, post, comb, streams, out, SIZE=size, STREAMS=count, BLOCK=block, num_warps=4
        )
    return out
