"""Step plumbing. All of it is a launch each: what counts is microseconds, not the bound."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from deepinfer_kernels_cuda.reference import step as twins
from deepinfer_kernels_cuda.step.apply_deltas import apply_deltas
from deepinfer_kernels_cuda.step.carry import write_carry
from deepinfer_kernels_cuda.step.correct_inputs import correct_inputs
from deepinfer_kernels_cuda.step.expand_rows import expand_rows
from deepinfer_kernels_cuda.testing.bench import Case, main
from deepinfer_kernels_cuda.values import Carry

DRAFTS = 5


def _ints(*shape: int, high: int = 1000) -> Tensor:
    return torch.randint(0, high, shape, device="cuda")


def cases() -> Iterator[Case]:
    """Yield the cases: sequences of a decode step with drafts, and a prompt of 8192 tokens."""
    for count, each in ((1, 1), (60, 1 + DRAFTS), (512, 1 + DRAFTS), (2, 4096)):
        num_rows = torch.full((count,), each, device="cuda")
        start, total = _ints(count), count * each
        yield Case(
            "expand_rows",
            f"{count} sequences, {total} rows",
            lambda a=num_rows, b=start, n=total: expand_rows(a, b, n),
            16.0 * (count + total),
            plain=lambda a=num_rows, b=start, n=total: twins.expand_rows(a, b, n),
        )
    for count in (1, 60, 512):
        carry = Carry(_ints(512, 1 + DRAFTS), _ints(512), torch.arange(512, device="cuda"))
        tokens, start = torch.full((count, 1 + DRAFTS), -1, device="cuda"), _ints(count)
        tag = torch.arange(count, device="cuda")
        arguments = (tokens, start, tag, tag.clone(), carry)
        yield Case(
            "correct_inputs",
            f"{count} sequences",
            lambda a=arguments: correct_inputs(*a),
            8.0 * count * (3 * (1 + DRAFTS) + 6),
            plain=lambda a=arguments: twins.correct_inputs(*a),
        )
        left = (_ints(count, 1 + DRAFTS), start, tag, carry)
        yield Case(
            "write_carry",
            f"{count} sequences",
            lambda a=left: write_carry(*a),
            8.0 * (count * 2 * (3 + DRAFTS) + 512),
            plain=lambda a=left: twins.write_carry(*a),
        )
        table = torch.zeros(513, 8192, dtype=torch.int32, device="cuda")
        deltas = (table, tag, _ints(count), _ints(count))
        yield Case(
            "apply_deltas",
            f"{count} blocks",
            lambda a=deltas: apply_deltas(*a),
            28.0 * count,
            plain=lambda a=deltas: twins.apply_deltas(*a),
        )


if __name__ == "__main__":
    main(cases)
