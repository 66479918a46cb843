"""Hyper-connections against their twins."""

import pytest
import torch

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.mhc import mix
from deepinfer_kernels_cuda.mhc.collapse import (
    mhc_collapse,
    mhc_collapse_norm,
    mhc_collapse_norm_fp8,
)
from deepinfer_kernels_cuda.mhc.merge import mhc_merge
from deepinfer_kernels_cuda.mhc.merge_norm import mhc_merge_norm, mhc_merge_norm_fp8
from deepinfer_kernels_cuda.mhc.mix import mhc_mix
from deepinfer_kernels_cuda.norm.rms_norm import rms_norm, rms_norm_fp8
from deepinfer_kernels_cuda.reference import mhc as twins
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

BF16_ERROR = 2.0**-8
SETTINGS = {"norm_eps": 1e-20, "eps": 1e-6, "iterations": 20 if ON_GPU else 3}
ROWS = [1, 7, 64, 129, 1000] if ON_GPU else [1, 7, 19]


def _random(*shape, seed=0, dtype=torch.bfloat16, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(*shape, generator=generator) * scale).to(dtype).to(DEVICE)


def _mixer(count, size, seed=3):
    """fn, scale and base of a mix whose logits are of the order of one."""
    out = count * (2 + count)
    fn = _random(out, count * size, seed=seed, dtype=torch.float32, scale=(count * size) ** -0.5)
    base = _random(out, seed=seed + 1, dtype=torch.float32)
    return fn, torch.tensor([0.7, -1.3, 1.1], device=DEVICE), base


MIX_SHAPES = [(1, 4, 64), (3, 4, 32), (5, 2, 100), (65, 4, 80), (2, 3, 24), (2, 4, 672)]
MIX_SHAPES += [(1, 4, 5120), (129, 4, 5120), (1000, 4, 5120), (4100, 4, 5120)] * ON_GPU


@pytest.mark.parametrize(("rows", "count", "size"), MIX_SHAPES)
def test_mix_has_the_coefficients_of_float64(rows, count, size):
    streams, mixer = _random(rows, count, size, seed=rows), _mixer(count, size)
    truth = twins.mhc_mix(streams.double(), *mixer, **SETTINGS)
    for name, result, expected in zip(
        ("pre", "post", "comb"), mhc_mix(streams, *mixer, **SETTINGS), truth, strict=True
    ):
        assert (result.double() - expected).abs().max() < 3e-6, name
    twin = twins.mhc_mix(streams, *mixer, **SETTINGS)
    assert max(relative_error(a, b) for a, b in zip(twin, truth, strict=True)) < 2e-6


def test_mix_keeps_all_24_bits_of_fn():
    fn, scale, base = _mixer(4, 64)
    streams = _random(3, 4, 64)
    streams[:] = 0
    streams[0, 1, 5] = streams[1, 1, 5] = streams[2, 0, 0] = 1.0
    fn[:, 64 + 5] = 1 / 3
    pre, _, _ = mhc_mix(streams, fn, scale, base * 0, **SETTINGS)
    # rms of one 1 among 256 channels: the logit is fn * 16.
    expected = torch.sigmoid(fn[:4, 69].double() * 16 * scale[0]) + 1e-6
    assert (pre[0].double() - expected).abs().max() < 2e-7
    assert_same_bits(pre[0], pre[1])


def test_columns_and_rows_of_comb_sum_to_one():
    settings = SETTINGS | {"iterations": 20}
    _, _, comb = mhc_mix(_random(3, 4, 64), *_mixer(4, 64), **settings)
    assert (comb.sum(1) - 1).abs().max() < 1e-5
    assert (comb.sum(2) - 1).abs().max() < 1e-4


@pytest.mark.parametrize("iterations", [1, 2, 20])
def test_mix_does_the_column_passes_it_is_told(iterations):
    streams, mixer = _random(2, 4, 64), _mixer(4, 64)
    settings = {"norm_eps": 1e-6, "eps": 1e-2, "iterations": iterations}
    truth = twins.mhc_mix(streams.double(), *mixer, **settings)
    for result, expected in zip(mhc_mix(streams, *mixer, **settings), truth, strict=True):
        assert (result.double() - expected).abs().max() < 2e-6


@pytest.mark.parametrize(("count", "size"), [(4, 96)] + [(4, 5120)] * ON_GPU)
def test_a_row_of_a_mix_does_not_depend_on_the_others(count, size):
    streams, mixer = _random(ROWS[-1], count, size), _mixer(count, size)
    full = mhc_mix(streams, *mixer, **SETTINGS)
    for rows in ROWS:
        for part, whole in zip(mhc_mix(streams[-rows:], *mixer, **SETTINGS), full, strict=True):
            assert_same_bits(part, whole[-rows:], f"{rows} rows")


@pytest.mark.parametrize("size", [40, 725, 2700] + [5120] * ON_GPU)
def test_the_forms_for_many_rows_have_the_bits_of_the_form_for_few(size, monkeypatch):
    # 725: two groups of chunks, 2700: two parts; the last is short, and so its last chunk.
    streams, mixer = _random(67, 2, size), _mixer(2, size)
    few = mhc_mix(streams[:3], *mixer, **SETTINGS)
    monkeypatch.setattr(mix, "FEW_ROWS", 0)
    for most in (1 << 20, 0):
        monkeypatch.setattr(mix, "MANY_ROWS", most)
        many = mhc_mix(streams, *mixer, **SETTINGS)
        for part, whole in zip(few, many, strict=True):
            assert_same_bits(part, whole[:3])


def test_a_nan_row_stays_in_its_row():
    streams, mixer = _random(5, 4, 64), _mixer(4, 64)
    clean = mhc_mix(streams, *mixer, **SETTINGS)
    streams[2, 1, 7] = float("nan")
    for result, expected in zip(mhc_mix(streams, *mixer, **SETTINGS), clean, strict=True):
        assert result[2].isnan().all()
        assert_same_bits(result[[0, 1, 3, 4]], expected[[0, 1, 3, 4]])


@pytest.mark.parametrize(
    ("rows", "count", "size"), [(3, 4, 64), (5, 2, 33), (2, 3, 1030)] + [(129, 4, 5120)] * ON_GPU
)
def test_collapse_and_merge_are_the_exact_value_rounded_once(rows, count, size):
    streams, y = _random(rows, count, size), _random(rows, size, seed=1)
    coefficient = _random(rows, count, seed=2, dtype=torch.float32)
    comb = _random(rows, count, count, seed=3, dtype=torch.float32)
    truth = twins.mhc_collapse(coefficient, streams.double())
    error = (mhc_collapse(coefficient, streams).double() - truth).abs()
    assert (error <= truth.abs() * BF16_ERROR + 1e-5).all()
    truth = twins.mhc_merge(y.double(), coefficient, comb, streams.double())
    error = (mhc_merge(y, coefficient, comb, streams).double() - truth).abs()
    assert (error <= truth.abs() * BF16_ERROR + 1e-5).all()


def test_merge_sums_over_the_source_of_comb():
    streams = torch.zeros(1, 2, 16, dtype=torch.bfloat16, device=DEVICE)
    streams[0, 0], streams[0, 1] = 1.0, 10.0
    comb = torch.tensor([[[1.0, 2.0], [0.0, 0.5]]], device=DEVICE)
    post = torch.tensor([[0.0, 100.0]], device=DEVICE)
    merged = mhc_merge(torch.ones(1, 16).bfloat16().to(DEVICE), post, comb, streams)
    assert merged[0, :, 0].tolist() == [1.0, 107.0]


@pytest.mark.parametrize("size", [64, 512] + [5120] * ON_GPU)
@pytest.mark.parametrize("weighted", [False, True])
def test_collapse_with_norm_has_the_bits_of_collapse_then_norm(size, weighted):
    streams, weight = _random(7, 4, size), _random(size, seed=1) if weighted else None
    coefficient = _random(7, 4, seed=2, dtype=torch.float32)
    collapsed = mhc_collapse(coefficient, streams)
    expected = rms_norm_fp8(collapsed, weight, 1e-20)
    for result, want in zip(
        mhc_collapse_norm_fp8(coefficient, streams, weight, 1e-20), expected, strict=True
    ):
        assert_same_bits(result, want)
    assert_same_bits(
        mhc_collapse_norm(coefficient, streams, weight, 1e-20), rms_norm(collapsed, weight, 1e-20)
    )
    twin = twins.mhc_collapse_norm(coefficient, streams.double(), weight, 1e-20)
    assert relative_error(expected[0], twin) < 0.005


def _merged(rows, count, size):
    """Arguments of a merge, and the coefficient of the collapse after it."""
    return (
        _random(rows, size, seed=1),
        _random(rows, count, seed=2, dtype=torch.float32),
        _random(rows, count, count, seed=3, dtype=torch.float32),
        _random(rows, count, size, seed=4),
    ), _random(rows, count, seed=5, dtype=torch.float32)


@pytest.mark.parametrize(
    ("rows", "count", "size"), [(3, 4, 64), (5, 2, 512)] + [(129, 4, 5120)] * ON_GPU
)
@pytest.mark.parametrize("weighted", [False, True])
def test_merge_with_norm_has_the_bits_of_the_ops_one_by_one(rows, count, size, weighted):
    inputs, coefficient = _merged(rows, count, size)
    weight = _random(size, seed=6) if weighted else None
    merged = mhc_merge(*inputs)
    expected = (merged, *mhc_collapse_norm_fp8(coefficient, merged, weight, 1e-20))
    results = mhc_merge_norm_fp8(*inputs, coefficient, weight, 1e-20)
    for result, want in zip(results, expected, strict=True):
        assert_same_bits(result, want)
    for result, want in zip(
        mhc_merge_norm(*inputs, coefficient, weight, 1e-20), expected[:2], strict=True
    ):
        assert_same_bits(result, want)
    inputs = tuple(t.double() for t in inputs)
    truth = twins.mhc_merge_norm(*inputs, coefficient, weight, 1e-20)
    for result, want in zip(results, truth, strict=False):
        assert relative_error(result, want) < 0.005


def test_rows_of_collapse_and_merge_do_not_depend_on_the_others():
    streams, y = _random(ROWS[-1], 4, 64), _random(ROWS[-1], 64, seed=1)
    post = _random(ROWS[-1], 4, seed=2, dtype=torch.float32)
    comb = _random(ROWS[-1], 4, 4, seed=3, dtype=torch.float32)
    merged, normed = mhc_merge(y, post, comb, streams), mhc_collapse_norm(post, streams, None, 1e-6)
    for n in ROWS:
        assert_same_bits(mhc_merge(y[-n:], post[-n:], comb[-n:], streams[-n:]), merged[-n:])
        assert_same_bits(mhc_collapse_norm(post[-n:], streams[-n:], None, 1e-6), normed[-n:])


def test_no_rows_give_empty_results():
    streams, mixer = _random(0, 4, 64), _mixer(4, 64)
    assert [t.shape for t in mhc_mix(streams, *mixer, **SETTINGS)] == [(0, 4), (0, 4), (0, 4, 4)]
    none = torch.empty(0, 4, device=DEVICE)
    assert mhc_collapse(none, streams).shape == (0, 64)
    assert mhc_collapse_norm_fp8(none, streams, None, 1e-6)[2].shape == (0, 2)
    comb = torch.empty(0, 4, 4, device=DEVICE)
    assert mhc_merge(_random(0, 64), none, comb, streams).shape == (0, 4, 64)


def test_hyper_connections_refuse_what_they_cannot_take():
    streams, (fn, scale, base) = _random(2, 4, 64), _mixer(4, 64)
    with pytest.raises(KernelInputError, match=r"`streams` is torch\.float32"):
        mhc_mix(streams.float(), fn, scale, base, **SETTINGS)
    with pytest.raises(KernelInputError, match=r"`fn` is .* \[24, 128\]"):
        mhc_mix(streams, fn[:, :128].contiguous(), scale, base, **SETTINGS)
    with pytest.raises(KernelInputError, match="`iterations` is 0"):
        mhc_mix(streams, fn, scale, base, norm_eps=0, eps=0, iterations=0)
    with pytest.raises(KernelInputError, match="`coefficient`"):
        mhc_collapse(torch.zeros(2, 3, device=DEVICE), streams)
    with pytest.raises(KernelInputError, match="`y`"):
        post, comb = torch.zeros(2, 4, device=DEVICE), torch.zeros(2, 4, 4, device=DEVICE)
        mhc_merge(_random(2, 32), post, comb, streams)
