"""Norms and rotary embedding against their twins."""

import math

import pytest
import torch
import triton
import triton.language as tl

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.norm.rms_norm import rms_norm, rms_norm_fp8
from deepinfer_kernels_cuda.norm.rotate import cos_sin, rotate
from deepinfer_kernels_cuda.quant.activations import round_fp8
from deepinfer_kernels_cuda.reference import norm as twins
from deepinfer_kernels_cuda.reference import quant_activations
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

EPS = 1e-20
BF16_ERROR = 2.0**-8  # half a unit in the last place
SIZES = [1, 7, 32, 33, 64, 100, 512, 1280] + [5120, 6144, 8192] * ON_GPU
ROWS = [1, 7, 64, 129, 1000] if ON_GPU else [1, 7, 19]


def _random(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


def _assert_within_one_rounding(result, truth):
    """Half a unit of bfloat16 from the exact value, and a little for float32 arithmetic."""
    bound = truth.abs() * (BF16_ERROR * 1.001) + 1e-30
    assert ((result.double() - truth).abs() <= bound).all()


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("weighted", [False, True])
def test_rms_norm_is_the_exact_value_rounded_once(size, weighted):
    x = (
        _random(5, size, seed=size)
        * torch.tensor([1e-12, 1e-3, 1, 50, 1e15], device=DEVICE)[:, None]
    )
    x = x.bfloat16()
    weight = _random(size, seed=1) if weighted else None
    truth = twins.rms_norm(x.double(), weight, EPS)
    _assert_within_one_rounding(rms_norm(x, weight, EPS), truth)


def test_rms_norm_takes_leading_dimensions_and_float32_weights():
    x, weight = _random(3, 2, 48), _random(48, seed=1, dtype=torch.float32)
    result = rms_norm(x, weight, 1e-6)
    assert result.shape == x.shape
    _assert_within_one_rounding(result, twins.rms_norm(x.double(), weight, 1e-6))


@pytest.mark.parametrize("size", [32, 64, 96, 512] + [1280, 5120] * ON_GPU)
def test_rms_norm_fp8_is_the_norm_and_its_rounding(size):
    x, weight = _random(5, size, seed=size), _random(size, seed=1)
    x[1] *= 1e-3
    normed, payload, scale = rms_norm_fp8(x, weight, EPS)
    assert_same_bits(normed, rms_norm(x, weight, EPS))
    for expected in (round_fp8(normed), quant_activations.round_fp8(normed)):
        assert_same_bits(payload, expected[0])
        assert_same_bits(scale, expected[1])


@pytest.mark.parametrize("size", [64, 512] + [128, 1280, 5120] * ON_GPU)
def test_a_row_of_a_norm_does_not_depend_on_the_others(size):
    x, weight = _random(ROWS[-1], size), _random(size, seed=1)
    full = rms_norm_fp8(x, weight, EPS)
    for rows in ROWS:
        for part, whole in zip(rms_norm_fp8(x[-rows:], weight, EPS), full, strict=True):
            assert_same_bits(part, whole[-rows:])


def test_a_nan_or_a_zero_row_stays_in_its_row():
    x = _random(4, 64)
    clean = rms_norm(x, None, EPS)
    x[1, 3], x[2] = float("nan"), 0
    normed, payload, scale = rms_norm_fp8(x, None, EPS)
    assert normed[1].isnan().all() and (scale[1] == 255).all() and payload[1].float().isnan().all()
    assert (normed[2] == 0).all() and (payload[2].float() == 0).all()
    assert_same_bits(normed[[0, 3]], clean[[0, 3]])


def test_norms_of_no_rows_are_empty():
    assert rms_norm(_random(0, 64), None, EPS).shape == (0, 64)
    assert [t.shape for t in rms_norm_fp8(_random(0, 64), None, EPS)] == [(0, 64), (0, 64), (0, 2)]


def test_norm_refuses_what_it_cannot_take():
    with pytest.raises(KernelInputError, match=r"`x` is torch\.float32"):
        rms_norm(_random(2, 64).float(), None, EPS)
    with pytest.raises(KernelInputError, match=r"`weight` is .* \[32\]"):
        rms_norm(_random(2, 64), _random(32), EPS)
    with pytest.raises(KernelInputError, match="contiguous"):
        rms_norm(_random(64, 64).t(), None, EPS)
    with pytest.raises(KernelInputError, match="8192 channels"):
        rms_norm(_random(1, 8193), None, EPS)
    with pytest.raises(KernelInputError, match="multiple of 32"):
        rms_norm_fp8(_random(1, 40), None, EPS)


def _frequencies(pairs, base=10000.0):
    return (1.0 / base ** (torch.arange(pairs) * 2 / (2 * pairs))).to(DEVICE)


@pytest.mark.parametrize(
    ("shape", "pairs"),
    [((5, 32), 8), ((3, 4, 32), 4), ((2, 3, 2, 64), 32), ((7, 24), 3), ((1, 1, 512), 32)]
    + [((129, 64, 512), 32), ((60, 32, 128), 32), ((1000, 512), 32)] * ON_GPU,
)
@pytest.mark.parametrize("inverse", [False, True])
def test_rotate_turns_the_tail_and_copies_the_rest(shape, pairs, inverse):
    x = _random(*shape, seed=pairs)
    positions = torch.arange(shape[0], device=DEVICE) * 917
    result = rotate(x, positions, _frequencies(pairs), inverse=inverse)
    truth = twins.rotate(x.double(), positions, _frequencies(pairs), inverse=inverse)
    still = shape[-1] - 2 * pairs
    assert_same_bits(result[..., :still], x[..., :still])
    # The product of two terms of either sign: half a unit of the larger of them.
    bound = x.double().abs().amax() * 2 * BF16_ERROR
    assert (result.double() - truth).abs().max() <= bound
    assert relative_error(result, truth) < 0.003


def test_angles_at_a_million_have_the_cosine_and_sine_of_their_float32_value():
    count = 4096 if ON_GPU else 512
    positions = torch.arange(1_048_576 - count, 1_048_576, device=DEVICE)
    frequencies = torch.cat([_frequencies(8), _frequencies(8, 160000.0) * 0.7])
    x = torch.zeros(count, 32, dtype=torch.bfloat16, device=DEVICE)
    from_kernel = _cos_sin(torch.outer(positions.float(), frequencies))
    angle = torch.outer(positions.float(), frequencies).double()
    assert (from_kernel[0].double() - angle.cos()).abs().max() < 2e-7
    assert (from_kernel[1].double() - angle.sin()).abs().max() < 2e-7
    x[:, 0::2] = 1.0
    result = rotate(x, positions, frequencies)
    assert (result[:, 0::2].double() - angle.cos()).abs().max() <= BF16_ERROR
    assert (result[:, 1::2].double() - angle.sin()).abs().max() <= BF16_ERROR


def test_small_and_negative_angles_have_their_cosine_and_sine():
    angle = torch.linspace(-50, 50, 2001, device=DEVICE)
    angle = torch.cat([angle, torch.tensor([0.0, math.pi / 4, math.pi / 2, 2.0**29]).to(DEVICE)])
    cos, sin = _cos_sin(angle)
    assert (cos.double() - angle.double().cos()).abs().max() < 2e-7
    assert (sin.double() - angle.double().sin()).abs().max() < 2e-7


@triton.jit
def _store_cos_sin(angle_ptr, out_ptr, count, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    cos, sin = cos_sin(tl.load(angle_ptr + i, mask=i < count, other=0.0))
    tl.store(out_ptr + i, cos, mask=i < count)
    tl.store(out_ptr + count + i, sin, mask=i < count)


def _cos_sin(angle):
    out = torch.full((2, *angle.shape), float("nan"), device=DEVICE)
    _store_cos_sin[(-(-angle.numel() // 256),)](angle, out, angle.numel(), BLOCK=256)
    return out
