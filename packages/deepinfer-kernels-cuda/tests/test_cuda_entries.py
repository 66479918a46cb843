"""Packed cache entries against their twins: every bit."""

import pytest
import torch

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.quant import entries as op
from deepinfer_kernels_cuda.reference import entries as twin
from deepinfer_kernels_cuda.testing.compare import assert_same_bits
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

KINDS = ["window", "compressed", "index"]


def _vectors(num: int, channels: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num, channels, generator=generator)
    # Groups of very different sizes in one vector, ties among them, and zeros.
    x = x * torch.exp2(torch.randint(-20, 12, (num, channels // 16), generator=generator)).repeat(
        1, 16
    )
    x[:, ::7] = torch.round(x[:, ::7] * 4) / 4
    x[:, : channels // 2] *= (torch.rand(num, 1, generator=generator) > 0.2).float()
    return x.to(DEVICE)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [32, 96, 128, 512])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packing_has_the_bits_of_the_twin(kind, channels, dtype):
    for num in (1, 5, 33):
        x = _vectors(num, channels).to(dtype)
        packed = op.encode_entry(kind, x)
        assert packed.shape == (num, op.entry_width(kind, channels))
        assert_same_bits(packed, twin.encode_entry(kind, x), f"{num} entries")


@pytest.mark.parametrize("kind", KINDS)
def test_ties_and_saturation_have_the_bits_of_the_twin(kind):
    # Every bfloat16 pattern that is finite, beside a fixed largest value of each group.
    bits = torch.arange(0, 65536, 3 if ON_GPU else 37, dtype=torch.int32)
    values = bits.to(torch.int16).view(torch.bfloat16).float()
    values = values[values.isfinite()]
    for largest in (6.0, 448.0, 5.5, 2688.0 * 1.5):
        few = values[values.abs() <= largest]
        x = torch.nn.functional.pad(few, (0, -len(few) % 15)).reshape(-1, 15)
        x = torch.cat((torch.full((len(x), 1), largest), x), 1)
        x = torch.nn.functional.pad(x.flatten(), (0, -x.numel() % 128)).reshape(-1, 128).to(DEVICE)
        assert_same_bits(op.encode_entry(kind, x), twin.encode_entry(kind, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("channels", [32, 96, 512])
def test_unpacking_has_the_bits_of_the_twin(kind, channels):
    generator = torch.Generator().manual_seed(3)
    width = op.entry_width(kind, channels)
    entry = torch.randint(0, 256, (19, width), generator=generator, dtype=torch.uint8).to(DEVICE)
    expected = twin.decode_entry(kind, entry, channels)
    result = op.decode_entry(kind, entry, channels)
    assert torch.equal(result.isnan(), expected.isnan())
    assert_same_bits(result.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(1, 512), (7, 128), (3, 32, 128), (65, 32)])
def test_rounding_is_packing_and_unpacking(kind, shape):
    x = _vectors(shape[0] * (shape[1] if len(shape) == 3 else 1), shape[-1]).bfloat16()
    x = x.reshape(shape)
    back = op.decode_entry(kind, op.encode_entry(kind, x), shape[-1])
    assert torch.equal(back, back.bfloat16().float()), "bfloat16 holds every value"
    assert_same_bits(op.round_entry(kind, x), back.bfloat16())
    assert_same_bits(op.round_entry(kind, x), twin.round_entry(kind, x))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_bad_number_stays_in_its_group(kind, bad):
    x = _vectors(4, 128).bfloat16()
    clean = op.round_entry(kind, x)
    x[2, 37] = bad
    result = op.round_entry(kind, x)
    expected = twin.round_entry(kind, x)
    group = op.GROUP[kind]
    first = 37 // group * group
    touched = torch.zeros_like(result, dtype=torch.bool)
    touched[2, first : first + group] = True
    assert torch.equal(result[~touched], clean[~touched])
    assert torch.equal(result.isnan(), expected.isnan())
    if bad != bad or kind != "compressed":
        assert result[touched].isnan().all()


@pytest.mark.parametrize("kind", KINDS)
def test_no_vectors_give_no_entries(kind):
    empty = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    packed = op.encode_entry(kind, empty)
    assert packed.shape == (0, op.entry_width(kind, 64))
    assert op.decode_entry(kind, packed, 64).shape == (0, 64)
    assert op.round_entry(kind, empty).shape == (0, 64)


def test_released_widths():
    assert [op.entry_width("window", 512), op.entry_width("compressed", 512)] == [528, 288]
    assert op.entry_width("index", 128) == 68
    assert [twin.entry_width(kind, 96) for kind in KINDS] == [op.entry_width(k, 96) for k in KINDS]


def test_wrong_arguments_are_named():
    x = torch.zeros(2, 48, device=DEVICE)
    with pytest.raises(KernelInputError, match=r"`channels` is 48.*multiple of 32"):
        op.encode_entry("window", x)
    with pytest.raises(KernelInputError, match=r"`kind` is 'block'"):
        op.entry_width("block", 64)
    with pytest.raises(KernelInputError, match=r"`x` is torch.float32"):
        op.round_entry("compressed", x)
    with pytest.raises(KernelInputError, match=r"last dimension"):
        op.decode_entry("index", torch.zeros(2, 60, dtype=torch.uint8, device=DEVICE), 128)
