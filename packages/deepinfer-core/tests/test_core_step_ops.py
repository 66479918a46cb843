"""Rows of ragged sequences laid end to end, and corrections from the carry of the step before."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_core.cpu.ops.step import correct_inputs, expand_rows
from deepinfer_core.errors import KernelInputError


@dataclass(frozen=True)
class Left:
    """A carry."""

    tokens: Tensor
    start: Tensor
    tag: Tensor


def integers(values: object) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)


@pytest.mark.parametrize(
    ("num_rows", "start", "total", "sequence", "positions"),
    [
        ([], [], 0, [], []),
        ([], [], 2, [-1, -1], [0, 0]),
        ([1], [9], 1, [0], [9]),
        ([3, 1, 2], [5, 0, 70], 6, [0, 0, 0, 1, 2, 2], [5, 6, 7, 0, 70, 71]),
        ([2, 0, 1], [1, 8, 4], 5, [0, 0, 2, -1, -1], [1, 2, 4, 0, 0]),
        ([0, 0], [3, 4], 1, [-1], [0]),
    ],
)
def test_expand_rows(
    num_rows: list[int], start: list[int], total: int, sequence: list[int], positions: list[int]
) -> None:
    result = expand_rows(integers(num_rows), integers(start), total)
    assert [t.tolist() for t in result] == [sequence, positions]
    assert [t.dtype for t in result] == [torch.int64, torch.int64]


def test_expand_rows_equals_loops() -> None:
    random.seed("test_expand_rows_equals_loops")
    for _ in range(50):
        num_rows = [random.randrange(5) for _ in range(random.randrange(9))]
        start = [random.randrange(100) for _ in num_rows]
        padding = random.randrange(4)
        rows = [(s, start[s] + i) for s, n in enumerate(num_rows) for i in range(n)]
        rows += [(-1, 0)] * padding
        sequence, positions = expand_rows(integers(num_rows), integers(start), len(rows))
        assert list(zip(sequence.tolist(), positions.tolist(), strict=True)) == rows


def test_expand_rows_refuses_more_rows_than_the_step_has() -> None:
    with pytest.raises(KernelInputError, match="`num_rows` sums to 4"):
        expand_rows(integers([3, 1]), integers([0, 0]), 3)
    with pytest.raises(KernelInputError, match="`start`"):
        expand_rows(integers([3, 1]), integers([0]), 4)


CARRY = Left(
    tokens=integers([[11, 12, 13], [21, 22, 23], [31, 32, 33]]),
    start=integers([101, 201, 301]),
    tag=integers([1, 2, 3]),
)


def correct(
    tokens: list[list[int]], start: list[int], tag: list[int], remap: list[int], carry: Left | None
) -> list[list[object]]:
    given = [integers(value) for value in (tokens, start, tag, remap)]
    before = [tensor.clone() for tensor in given]
    result = correct_inputs(*given, carry)
    assert all(torch.equal(a, b) for a, b in zip(given, before, strict=True))
    assert [t.dtype for t in result] == [torch.int64, torch.int64, torch.int32]
    return [t.tolist() for t in result]


def test_rows_follow_their_sequence_wherever_it_stood() -> None:
    tokens = [[-1, -1, -1], [5, 6, 7], [-1, -1, -1]]
    result = correct(tokens, [310, 40, 110], [3, 8, 1], [2, -1, 0], CARRY)
    assert result == [[[31, 32, 33], [5, 6, 7], [11, 12, 13]], [301, 40, 101], [0, 0, 0]]


def test_fewer_columns_take_the_first_of_the_carry() -> None:
    assert correct([[-1]], [0], [2], [1], CARRY) == [[[21]], [201], [0]]


def test_columns_beyond_the_carry_keep_host_values() -> None:
    result = correct([[-1, -1, -1, 44, -1]], [0], [2], [1], CARRY)
    assert result == [[[21, 22, 23, 44, 0]], [201], [0]]


@pytest.mark.parametrize("remap", [1, 3, 1000])
def test_a_wrong_or_missing_carry_row_fails_alone(remap: int) -> None:
    result = correct([[-1, -1], [-1, -1]], [50, 60], [3, 1], [remap, 0], CARRY)
    assert result == [[[0, 0], [11, 12]], [50, 101], [2, 0]]


def test_a_row_that_needs_a_carry_fails_without_one() -> None:
    empty = Left(integers([[0, 0]])[:0], integers([0])[:0], integers([0])[:0])
    for carry in (None, empty):
        result = correct([[-1, 9], [4, 5]], [50, 60], [3, 1], [0, -1], carry)
        assert result == [[[0, 0], [4, 5]], [50, 60], [2, 0]]


def test_a_placeholder_that_survives_is_a_bad_source() -> None:
    result = correct([[-1, 7], [4, -1]], [50, 60], [3, 1], [-1, -1], CARRY)
    assert result == [[[0, 0], [4, 0]], [50, 60], [2, 0]]


def test_no_sequences() -> None:
    result = correct_inputs(
        torch.zeros(0, 3).long(), integers([]), integers([]), integers([]), CARRY
    )
    assert [tuple(t.shape) for t in result] == [(0, 3), (0,), (0,)]
