"""Which drafts are taken: the best, in a stated order."""

import numpy as np
import pytest
import torch

from deepinfer_specdec import VerifyInputError, best_lengths, survival, threshold_lengths


def by_hand(values: np.ndarray, available: np.ndarray, total: int) -> list[int]:
    """The order once more, with Python's sort."""
    drafts = [
        (-float(values[r, j]), j, r)
        for r in range(values.shape[0])
        for j in range(min(int(available[r]), values.shape[1]))
    ]
    taken = sorted(drafts)[:total]
    return [sum(each[2] == r for each in taken) for r in range(values.shape[0])]


def lengths(values: np.ndarray, available: list[int] | np.ndarray, total: int) -> list[int]:
    result = best_lengths(torch.tensor(values), torch.tensor(np.asarray(available)), total)
    assert result.dtype == torch.int32
    return result.tolist()


@pytest.mark.parametrize(("num_requests", "num_drafts"), [(1, 1), (1, 5), (3, 5), (17, 5), (61, 7)])
def test_lengths_equal_the_order_by_hand_for_every_total(
    num_requests: int, num_drafts: int
) -> None:
    rng = np.random.default_rng(num_requests)
    for coarse in (2, 4, 1000):  # few distinct values: many ties
        confidence = rng.integers(0, coarse + 1, (num_requests, num_drafts)) / coarse
        values = survival(confidence)
        available = rng.integers(0, num_drafts + 1, num_requests)
        most = int(available.sum())
        for total in {0, 1, most // 3, most // 2, most}:
            if total <= most:
                found = lengths(values, available, total)
                assert found == by_hand(values, available, total)
                assert sum(found) == total


def test_ties_go_to_the_smaller_draft_number_then_to_the_smaller_request() -> None:
    values = np.full((3, 2), 0.5, dtype=np.float32)
    found = [lengths(values, [2, 2, 2], total) for total in range(7)]
    assert found == [
        *([0, 0, 0], [1, 0, 0], [1, 1, 0], [1, 1, 1]),
        *([2, 1, 1], [2, 2, 1], [2, 2, 2]),
    ]


def test_survival_of_zero_is_taken_last_but_before_what_is_not_available() -> None:
    values = np.array([[0.0, 0.0], [0.9, 0.0]], dtype=np.float32)
    assert lengths(values, [1, 2], 3) == [1, 2]
    assert lengths(values, [1, 2], 2) == [1, 1]


def test_zero_and_minus_zero_tie() -> None:
    values = np.array([[-0.0], [0.0]], dtype=np.float32)
    assert lengths(values, [1, 1], 1) == [1, 0]


def test_nan_counts_as_zero() -> None:
    values = np.array([[np.nan, np.nan], [0.1, 0.0]], dtype=np.float32)
    assert lengths(values, [2, 2], 1) == [0, 1]
    assert threshold_lengths(torch.tensor(values), torch.tensor([2, 2]), 0.05).tolist() == [0, 1]


def test_more_than_is_available_takes_what_is_available() -> None:
    values = np.full((2, 3), 0.5, dtype=np.float32)
    assert lengths(values, [0, 2], 6) == [0, 2]
    assert lengths(values, [0, 0], 2) == [0, 0]


def test_no_requests_and_no_drafts_work() -> None:
    assert lengths(np.zeros((0, 5), dtype=np.float32), np.zeros(0, dtype=np.int64), 0) == []
    assert lengths(np.zeros((2, 0), dtype=np.float32), [0, 0], 0) == [0, 0]


def test_total_may_be_a_tensor() -> None:
    values, available = torch.tensor([[0.9, 0.8], [0.7, 0.1]]), torch.tensor([2, 2])
    for total in range(5):
        as_tensor = best_lengths(values, available, torch.tensor(total))
        assert as_tensor.equal(best_lengths(values, available, total))


def test_threshold_takes_every_draft_from_it_on() -> None:
    values = torch.tensor([[0.9, 0.5, 0.2], [0.4, 0.2, 0.1], [1.0, 1.0, 1.0]])
    available = torch.tensor([3, 3, 1])
    assert threshold_lengths(values, available, 0.5).tolist() == [2, 0, 1]
    assert threshold_lengths(values, available, 0.0).tolist() == [3, 3, 1]
    assert threshold_lengths(values[:0], available[:0], 0.5).tolist() == []


def test_other_dtypes_and_shapes_are_refused() -> None:
    with pytest.raises(VerifyInputError, match=r"float64.*float32"):
        best_lengths(torch.zeros(2, 3, dtype=torch.float64), torch.zeros(2), 0)
    with pytest.raises(VerifyInputError, match=r"\(3,\).*2 requests"):
        threshold_lengths(torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64), 0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_device_gives_the_same_lengths_and_can_be_captured() -> None:
    rng = np.random.default_rng(5)
    values = torch.tensor(survival(rng.integers(0, 5, (256, 5)) / 4))
    values[::2][values[::2] == 0] = -0.0
    available = torch.tensor(rng.integers(0, 6, 256))
    on_device, room = values.cuda(), available.cuda()
    total = torch.tensor(0, device="cuda")
    best_lengths(on_device, room, total)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = best_lengths(on_device, room, total)
    for each in (0, 1, 100, 400, int(available.sum())):
        expected = best_lengths(values, available, each)
        assert best_lengths(on_device, room, each).cpu().equal(expected)
        total.fill_(each)
        graph.replay()
        assert captured.cpu().equal(expected)
