"""What ops of this family take and return, and the checks of it."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch
import triton
from torch import Tensor

from deepinfer_kernels_cuda.checks import check_number, check_tensor, check_value
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.values import SampleInputs

__all__ = ["MAX_VOCABULARY", "Sampled", "Tiles", "check_inputs", "check_logits"]

# Sums of probabilities are integers in units of 2^-44 and stay below 2^62.
MAX_VOCABULARY = 1 << 18

_COLUMNS = {
    "positions": torch.int64,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "cycle": torch.int64,
}


@dataclass(frozen=True, slots=True)
class Sampled:
    """Result of `sample`: token_ids [N] int64; status [N] int32, 1 where no logit is usable."""

    token_ids: Tensor
    status: Tensor


@dataclass(frozen=True, slots=True)
class Tiles:
    """How a row of the vocabulary is cut: by V alone, so that a row's bits do not depend on N.

    One tile of 4096 tokens a program reads V = 129280 at 89 % of an H200's copy rate for 128 rows,
    which are five waves of programs.

    Attributes:
        size: tokens of a tile, the work of one program; also the most tokens of a row's head.
        count: tiles of a row. padded: the next power of two.
        wanted: groups, 64 of a tile, whose best tokens shall be in the head.
    """

    size: int
    count: int
    padded: int
    wanted: int

    @property
    def num_warps(self) -> int:
        """Warps of a program that works on one tile."""
        return 8 if self.size >= 2048 else 4

    @classmethod
    def of(cls, vocab_size: int) -> Tiles:
        """Cut a vocabulary into up to 32 tiles of at most 4096 tokens, or more of these."""
        size = min(max(triton.next_power_of_2(-(-vocab_size // 32)), 256), 4096)
        count = -(-vocab_size // size)
        return cls(size, count, triton.next_power_of_2(count), size * 11 // 32)


def check_logits(logits: Tensor) -> tuple[int, int]:
    """Raise `KernelInputError` unless logits are [N, V] float32; returns N and V."""
    check_tensor("logits", logits, shape=(None, None), dtype=torch.float32, contiguous=False)
    num_rows, vocab_size = logits.shape
    allowed = 1 <= vocab_size <= MAX_VOCABULARY
    check_value("logits.shape[1]", vocab_size, allowed, f"1 to {MAX_VOCABULARY} tokens")
    return num_rows, vocab_size


def check_inputs(logits: Tensor, inputs: SampleInputs) -> tuple[Tensor, SampleInputs]:
    """Raise `KernelInputError` unless logits and settings fit together; returns both for kernels.

    Settings of one number a row may have any stride: an engine's are columns of a table. Rows of
    others may lie apart; those of V numbers are copied then, as kernels have no stride for them.
    """
    num_rows, vocab_size = check_logits(logits)
    device, per_token = logits.device, (num_rows, vocab_size)
    for name in ("seeds", "positions", "temperature"):
        value = getattr(inputs, name, None)
        check_value(name, value, isinstance(value, Tensor), "a tensor")
    check_number("stream", inputs.stream, 0, 3)
    for name, dtype in _COLUMNS.items():
        column: Tensor | None = getattr(inputs, name)
        if column is not None and (
            column.shape != (num_rows,) or column.dtype != dtype or column.device != device
        ):
            raise KernelInputError(
                f"`{name}` is {column.dtype} {list(column.shape)} on {column.device}; "
                f"the op needs {dtype} [{num_rows}] on {device}."
            )
    wide = {
        "seeds": (torch.int64, (num_rows, 2)),
        "penalties": (torch.float32, (num_rows, 3)),
        "prompt_seen": (torch.bool, per_token),
        "output_counts": (torch.int32, per_token),
        "bias": (torch.float32, per_token),
        "mask": (torch.int32, (num_rows, -(-vocab_size // 32))),
    }
    for name, (dtype, shape) in wide.items():
        tensor: Tensor | None = getattr(inputs, name)
        if tensor is not None:
            check_tensor(
                name,
                tensor,
                shape=shape,
                dtype=dtype,
                device=device,
                contiguous=False,
            )
    for name in ("prompt_seen", "output_counts"):
        if inputs.penalties is not None and getattr(inputs, name) is None:
            raise KernelInputError(f"`{name}` is None, but `penalties` is set and needs it.")
    apart = {}
    for name in ("prompt_seen", "output_counts", "bias"):
        tensor = getattr(inputs, name)
        if tensor is not None and not tensor.is_contiguous():
            apart[name] = tensor.contiguous()
    if apart:  # what came may be of any class
        given = {each.name: getattr(inputs, each.name) for each in fields(SampleInputs)}
        inputs = SampleInputs(**(given | apart))
    return logits.contiguous(), inputs
