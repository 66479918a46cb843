"""Survival: the same bits on host and device, in a stated order."""

import numpy as np
import pytest
import torch

from deepinfer_specdec import VerifyInputError, survival, survival_of


def test_survival_is_the_running_product_from_left_to_right() -> None:
    confidence = np.random.default_rng(1).random((500, 7), dtype=np.float32)
    expected = confidence.copy()
    for r in range(500):
        for j in range(1, 7):
            expected[r, j] = np.float32(expected[r, j - 1] * confidence[r, j])
    assert survival(confidence).tobytes() == expected.tobytes()


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (3, 0), (301, 5)])
def test_array_and_tensor_give_the_same_bits(shape: tuple[int, int]) -> None:
    confidence = np.random.default_rng(2).random(shape, dtype=np.float32) ** 0.2
    confidence[confidence > 0.99] = np.nan
    on_host, on_device = survival(confidence), survival_of(torch.tensor(confidence))
    assert on_host.dtype == np.float32 and on_device.dtype == torch.float32
    assert on_host.tobytes() == on_device.numpy().tobytes()


def test_survival_never_rises_in_a_row() -> None:
    confidence = np.random.default_rng(3).random((2000, 6), dtype=np.float32) ** 0.01
    assert (np.diff(survival(confidence), axis=1) <= 0).all()


def test_bfloat16_confidences_are_multiplied_in_float32() -> None:
    # 0.99609375 ** 2 has more bits than bfloat16 keeps.
    confidence = torch.full((1, 2), 0.99609375, dtype=torch.bfloat16)
    assert survival_of(confidence)[0, 1].item() == 0.99609375**2


def test_nan_counts_as_zero_and_ends_the_row() -> None:
    confidence = np.array([[0.5, np.nan, 1.0], [np.nan, 1.0, 1.0]], dtype=np.float32)
    expected = [[0.5, 0.0, 0.0], [0.0, 0.0, 0.0]]
    assert survival(confidence).tolist() == expected
    assert survival_of(torch.tensor(confidence)).tolist() == expected


def test_input_is_left_as_it_is() -> None:
    confidence = np.array([[0.5, np.nan]], dtype=np.float32)
    before = confidence.tobytes()
    survival(confidence)
    assert confidence.tobytes() == before


def test_a_single_row_without_a_request_dimension_is_refused() -> None:
    with pytest.raises(VerifyInputError, match=r"shape \(5,\).*\[requests, drafts\]"):
        survival(np.ones(5))
    with pytest.raises(VerifyInputError, match=r"shape \(5,\)"):
        survival_of(torch.ones(5))
