"""Checks of an op's arguments, before anything is launched."""

from __future__ import annotations

import math

import torch
import triton
from torch import Tensor

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.values import BlockStore, Rows

__all__ = [
    "check_alignment",
    "check_blocks",
    "check_number",
    "check_rows",
    "check_tensor",
    "check_together",
    "check_value",
]

# Fields of `Rows` that have an element for each sequence, and how many more.
_OF_SEQUENCES = {"row_start": 1, "first_position": 0, "sequence_slots": 0}


def check_tensor(
    name: str,
    tensor: Tensor,
    *,
    shape: tuple[int | None, ...] | None = None,
    dtype: torch.dtype | tuple[torch.dtype, ...] | None = None,
    device: torch.device | None = None,
    contiguous: bool = True,
    anywhere: bool = False,
) -> None:
    """Raise `KernelInputError` unless a tensor is as an op needs it.

    Args:
        shape: None stands for any size; None altogether for any shape.
        dtype: the one allowed, or all that are.
        contiguous: the whole tensor is; otherwise its last dimension alone.
        anywhere: it may be in host memory.
    """
    if not isinstance(tensor, Tensor):
        raise KernelInputError(f"`{name}` is {_shown(tensor)}; the op needs a tensor.")
    if not anywhere and tensor.device.type == "cpu" and not triton.knobs.runtime.interpret:
        raise KernelInputError(
            f"`{name}` is on the CPU; kernels need an NVIDIA GPU. Move it there, or call the op's "
            "twin in `deepinfer_kernels_cuda.reference.ops`, which works anywhere."
        )
    dtypes = (dtype,) if isinstance(dtype, torch.dtype) else dtype
    wrong_shape = shape is not None and (
        tensor.dim() != len(shape)
        or any(
            want is not None and want != size
            for want, size in zip(shape, tensor.shape, strict=True)
        )
    )
    wrong_device = device is not None and tensor.device != device
    if wrong_shape or wrong_device or (dtypes is not None and tensor.dtype not in dtypes):
        want_shape = "" if shape is None else f" {['any' if n is None else n for n in shape]}"
        want_dtype = "" if dtypes is None else " or ".join(map(str, dtypes))
        raise KernelInputError(
            f"`{name}` is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; the op needs "
            f"{want_dtype}{want_shape}{'' if device is None else f' on {device}'}.".replace(
                "  ", " "
            )
        )
    packed = tensor.is_contiguous() if contiguous else tensor.dim() == 0 or tensor.stride(-1) == 1
    if not packed and tensor.numel():
        raise KernelInputError(
            f"`{name}` has strides {tensor.stride()} for shape {list(tensor.shape)}; the op needs "
            f"{'a contiguous tensor' if contiguous else 'a contiguous last dimension'}. "
            "Call `.contiguous()` first."
        )


def check_value(name: str, value: object, allowed: bool, needs: str) -> None:
    """Raise `KernelInputError` unless `allowed`; `needs` says what the op takes."""
    if not allowed:
        raise KernelInputError(f"`{name}` is {_shown(value)}; the op needs {needs}.")


def check_number(
    name: str, value: object, low: float, high: float = math.inf, *, whole: bool = True
) -> None:
    """Raise `KernelInputError` unless an int, or a float if not `whole`, is in `low` .. `high`."""
    kinds = (int,) if whole else (int, float)
    fits = isinstance(value, kinds) and not isinstance(value, bool) and low <= value <= high
    most = "" if high == math.inf else f" and at most {high:g}"
    needs = f"{'an integer' if whole else 'a number'} of at least {low:g}{most}"
    check_value(name, value, fits, needs)


def _shown(value: object) -> str:
    # Printing a tensor's numbers would wait for the device.
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)


def check_together(**values: object) -> None:
    """Raise `KernelInputError` where some of the values are None and others are not."""
    given = [name for name, value in values.items() if value is not None]
    if given and len(given) < len(values):
        raise KernelInputError(
            f"`{'`, `'.join(values)}` belong together, but `{'`, `'.join(given)}` alone is given. "
            "Pass all of them or none."
        )


def check_rows(rows: Rows, num_rows: int, device: torch.device, names: tuple[str, ...]) -> None:
    """Raise `KernelInputError` unless fields `names` of rows are as `Rows` tells.

    Shapes and types alone are looked at: nothing is read from the device.
    """
    if not hasattr(rows, "first_position"):
        raise KernelInputError(f"`rows` is {_shown(rows)}; the op needs `values.Rows`.")
    for name in names:
        more = _OF_SEQUENCES.get(name)
        size = num_rows if more is None else rows.first_position.shape[0] + more
        dtype = torch.bool if name == "writes" else torch.int64
        tensor = getattr(rows, name)
        fits = tensor.dtype == dtype and tensor.shape == (size,) and tensor.device == device
        if not fits or not tensor.is_contiguous():  # far quicker than what follows
            check_tensor(f"rows.{name}", tensor, shape=(size,), dtype=dtype, device=device)


def check_blocks(name: str, store: BlockStore) -> None:
    """Raise `KernelInputError` unless a block store has room for an entry in every slot."""
    check_number(f"{name}.ratio", store.ratio, 1)
    size = (store.data.shape[1], store.table.shape[1])
    needs = "at least one entry a block and one block a slot"
    check_value(f"(entries a block, blocks a slot) of {name}", size, min(size) > 0, needs)


def check_alignment(name: str, tensor: Tensor, multiple: int) -> None:
    """Raise `KernelInputError` unless a tensor begins at a multiple of so many bytes."""
    rest = tensor.data_ptr() % multiple
    if rest:
        raise KernelInputError(
            f"`{name}` begins {rest} bytes behind a multiple of {multiple}, which the op needs. "
            f"Allocate it by itself, or cut it from a larger tensor at a multiple of {multiple}."
        )
