"""Step plumbing against its twins; all of it is integers, so all of it is exact."""

from dataclasses import fields

import pytest
import torch
from torch import Tensor

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.reference import step as twins
from deepinfer_kernels_cuda.step.apply_deltas import apply_deltas
from deepinfer_kernels_cuda.step.carry import write_carry
from deepinfer_kernels_cuda.step.correct_inputs import correct_inputs
from deepinfer_kernels_cuda.step.expand_rows import expand_rows
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU
from deepinfer_kernels_cuda.values import Carry


def poisoned(room: int, wide: int) -> Carry:
    shapes = (room, wide), (room,), (room,)
    return Carry(*(torch.full(shape, -77, device=DEVICE) for shape in shapes))


def ints(*values, high=None, shape=None) -> Tensor:
    if shape is not None:
        return torch.randint(0, high, shape, device=DEVICE)
    return torch.tensor(values, dtype=torch.int64, device=DEVICE)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(17)


# expand_rows

COUNTS = [(), (0,), (1,), (3, 0, 2), (0, 0, 5, 0), (513, 1, 0, 512), (7,) * 37]
COUNTS += [(2,) * 1100, (8000, 0, 192)] if ON_GPU else []


@pytest.mark.parametrize("counts", COUNTS, ids=lambda counts: f"{len(counts)}x{sum(counts)}")
@pytest.mark.parametrize("padding", [0, 5])
def test_rows_of_sequences_lie_end_to_end(counts, padding):
    num_rows, start = ints(*counts), ints(high=10**12, shape=(len(counts),))
    total = sum(counts) + padding
    sequence, positions = expand_rows(num_rows, start, total)
    owners = [s for s, count in enumerate(counts) for _ in range(count)] + [-1] * padding
    assert sequence.tolist() == owners
    first = start.tolist()
    expected = [first[s] + i for s, count in enumerate(counts) for i in range(count)]
    assert positions.tolist() == expected + [0] * padding
    twin = twins.expand_rows(num_rows, start, total)
    assert torch.equal(twin[0], sequence) and torch.equal(twin[1], positions)


def test_rows_beyond_the_total_are_left_out():
    sequence, positions = expand_rows(ints(2, 4, 3), ints(10, 20, 30), 4)
    assert (sequence.tolist(), positions.tolist()) == ([0, 0, 1, 1], [10, 11, 20, 21])


@pytest.mark.parametrize("counts", [(-5, 4, 3), (3, -2, 2), (-(10**9), 10**9 + 1)])
def test_counts_below_zero_are_no_rows_and_write_nowhere(counts):
    num_rows, start = ints(*counts), ints(*range(len(counts)))
    for found, wanted in zip(
        expand_rows(num_rows, start, 6), twins.expand_rows(num_rows, start, 6), strict=True
    ):
        assert torch.equal(found, wanted)


def test_expand_rows_names_what_is_wrong():
    with pytest.raises(KernelInputError, match="`start`"):
        expand_rows(ints(1, 2), ints(1), 3)
    with pytest.raises(KernelInputError, match="`total` is -1"):
        expand_rows(ints(1), ints(1), -1)
    with pytest.raises(KernelInputError, match="`total` is a tensor"):
        expand_rows(ints(1), ints(1), torch.tensor(3))


# correct_inputs


def test_linked_sequences_take_tokens_and_start_of_the_carry():
    carry = Carry(ints(high=99, shape=(3, 4)), ints(7, 8, 9), ints(50, 51, 52))
    tokens = ints(-1, -1, 5, 6, -1, -1).view(3, 2)
    fed, start, status = correct_inputs(
        tokens, ints(1, 2, 3), ints(52, 60, 50), ints(2, -1, 0), carry
    )
    assert torch.equal(fed, torch.stack((carry.tokens[2, :2], tokens[1], carry.tokens[0, :2])))
    assert (start.tolist(), status.tolist()) == ([9, 2, 7], [0, 0, 0])


@pytest.mark.parametrize("fault", ["other tag", "no such row", "no carry", "placeholder", "empty"])
def test_a_bad_source_fails_alone(fault):
    carry = Carry(ints(3, 4, 5, 6).view(2, 2), ints(7, 8), ints(50, 51))
    tokens, tag, remap = ints(-1, -1, 4, -1).view(2, 2), ints(50, 60), ints(0, -1)
    if fault == "other tag":
        tag[0] = 51
    elif fault == "no such row":
        remap[0] = 2
    elif fault == "no carry":
        carry = None
    elif fault == "placeholder":
        carry.tokens[0, 0] = -1
    else:
        carry = Carry(ints(shape=(0, 2), high=9), ints(), ints())
    fed, start, status = correct_inputs(tokens, ints(1, 2), tag, remap, carry)
    assert (fed.tolist(), status.tolist()) == ([[0, 0], [4, 0]], [2, 0])
    assert start.tolist() == [7 if fault == "placeholder" else 1, 2]


@pytest.mark.parametrize("count", [0, 1, 3, 64] + [511] * ON_GPU)
@pytest.mark.parametrize(("width", "carried"), [(0, 3), (1, 1), (6, 6), (9, 5), (2, 7)])
def test_correction_equals_the_twin(count, width, carried):
    carry = Carry(
        ints(shape=(count + 1, carried), high=30) - 2,
        *(ints(shape=(count + 1,), high=9) for _ in "ab"),
    )
    tokens, start = ints(shape=(count, width), high=40) - 5, ints(shape=(count,), high=99)
    tag, remap = ints(shape=(count,), high=3), ints(shape=(count,), high=count + 4) - 2
    for given in (carry, None):
        found = correct_inputs(tokens, start, tag, remap, given)
        expected = twins.correct_inputs(tokens, start, tag, remap, given)
        for one, other in zip(found, expected, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other)


def test_correction_names_what_is_wrong():
    with pytest.raises(KernelInputError, match="`remap`"):
        correct_inputs(ints(1, 2).view(2, 1), ints(1, 2), ints(1, 2), ints(1), None)


# apply_deltas


@pytest.mark.parametrize("count", [0, 1, 255, 257])
def test_deltas_change_their_places_and_nothing_else(count):
    table = torch.full((9, 41), -5, dtype=torch.int32, device=DEVICE)
    expected = table.clone()
    flat = torch.randperm(9 * 41, device=DEVICE)[:count]
    slots, places, ids = flat // 41, flat % 41, ints(shape=(count,), high=2**31 - 1)
    apply_deltas(table, slots, places, ids)
    twins.apply_deltas(expected, slots, places, ids)
    assert torch.equal(table, expected)
    assert int((table != -5).sum()) == count


def test_deltas_outside_the_table_are_skipped():
    memory = torch.full((5, 4), -5, dtype=torch.int32, device=DEVICE)
    apply_deltas(memory[1:4], ints(-1, 3, 0, 0, 1), ints(0, 0, -1, 4, 2), ints(1, 2, 3, 4, 9))
    assert memory[2, 2] == 9 and int((memory != -5).sum()) == 1


def test_deltas_name_what_is_wrong():
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(KernelInputError, match="`places`"):
        apply_deltas(table, ints(1), ints(1, 2), ints(1))


# write_carry


@pytest.mark.parametrize(("count", "width"), [(0, 1), (1, 1), (5, 3), (8, 6)])
def test_a_carry_holds_the_step_and_nothing_of_the_one_before(count, width):
    found, expected = poisoned(8, 6), poisoned(8, 6)
    tokens = ints(shape=(count, width + 2), high=99)[:, :width]
    start, tag = ints(shape=(count,), high=99), ints(shape=(count,), high=9) - 1
    write_carry(tokens, start, tag, found)
    twins.write_carry(tokens, start, tag, expected)
    for each in fields(Carry):
        assert torch.equal(getattr(found, each.name), getattr(expected, each.name)), each.name
    assert found.tag[count:].tolist() == [-1] * (8 - count)
    assert not found.tokens[:count, width:].any()


def test_a_carry_that_is_too_small_is_refused():
    with pytest.raises(KernelInputError, match="room for 2 sequences of 3 tokens"):
        write_carry(ints(shape=(3, 3), high=9), ints(1, 2, 3), ints(1, 2, 3), poisoned(2, 3))
