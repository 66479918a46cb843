"""Messages of checks that every op shares."""

import pytest
import torch
import triton

from deepinfer_kernels_cuda import ops
from deepinfer_kernels_cuda.checks import check_tensor
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.testing.device import DEVICE


def test_a_tensor_on_the_cpu_is_refused_with_what_works_there(monkeypatch):
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    with pytest.raises(KernelInputError, match=r"`x` is on the CPU.*reference\.ops"):
        ops.rms_norm(torch.ones(2, 32, dtype=torch.bfloat16), None, 1e-20)


@pytest.mark.parametrize("value", [None, [1.0], 3])
def test_what_is_no_tensor_is_named(value):
    with pytest.raises(KernelInputError, match=r"`x` is .*needs a tensor"):
        ops.rms_norm(value, None, 1e-20)


@pytest.mark.parametrize("eps", [None, "a", -1.0, float("nan"), True])
def test_a_number_that_is_none_is_named(eps):
    x = torch.ones(2, 32, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(KernelInputError, match=r"`eps` is .*a number of at least 0"):
        ops.rms_norm(x, None, eps)


def test_the_message_tells_what_it_is_and_what_is_needed():
    x = torch.zeros(2, 3)
    with pytest.raises(KernelInputError, match=r"`x` is torch\.float32 \[2, 3\].*bfloat16 .*4"):
        check_tensor("x", x, shape=(None, 4), dtype=torch.bfloat16, anywhere=True)
    with pytest.raises(KernelInputError, match=r"strides \(1, 2\).*contiguous"):
        check_tensor("x", x.T.contiguous().T, anywhere=True)
