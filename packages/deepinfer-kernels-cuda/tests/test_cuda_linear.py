"""Activation rounding and linear layers against their twins, on whatever device there is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.linear import fp8_linear as fp8_module
from deepinfer_kernels_cuda.linear import grouped_linear as grouped_module
from deepinfer_kernels_cuda.linear.blocks import block_product, expand_blocks
from deepinfer_kernels_cuda.linear.embed import embed
from deepinfer_kernels_cuda.linear.float32_linear import linear_float32
from deepinfer_kernels_cuda.linear.fp8_linear import fp8_linear
from deepinfer_kernels_cuda.linear.grouped_linear import grouped_linear
from deepinfer_kernels_cuda.linear.linear import linear
from deepinfer_kernels_cuda.linear.many_rows import many_rows_product
from deepinfer_kernels_cuda.linear.plain_linear import plain_linear
from deepinfer_kernels_cuda.linear.rows import row_product
from deepinfer_kernels_cuda.quant.activations import round_fp8, round_fp8_wide
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix, prepare_matrix
from deepinfer_kernels_cuda.reference import linear as twin
from deepinfer_kernels_cuda.reference import quant_activations as rounding
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

# One rounding to bfloat16 is off by 1.7e-3 of the norm on average; float32 sums add little.
BF16_ERROR = 2.5e-3
# Of the matrix unit's float32 sums, whose additions truncate.
SUM_ERROR = 2e-5


def draw(seed: int, *shape: int) -> Tensor:
    """Return bfloat16 rows whose sizes differ by powers of two between groups of channels."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(shape, generator=generator)
    powers = torch.randint(-6, 7, (*shape[:-1], -(-shape[-1] // 8)), generator=generator)
    spread = torch.exp2(powers.float()).repeat_interleave(8, -1)[..., : shape[-1]]
    return (values * spread).bfloat16().to(DEVICE)


def draw_fp8(seed: int, outputs: int, columns: int) -> SimpleNamespace:
    """Return a stored `fp8_tile` weight."""
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(outputs, columns, generator=generator) * 60
    tiles = (-(-outputs // 32), -(-columns // 32))
    return SimpleNamespace(
        payload=values.clamp(-448, 448).to(torch.float8_e4m3fn).to(DEVICE),
        scale=torch.randint(100, 130, tiles, generator=generator, dtype=torch.uint8).to(DEVICE),
        format="fp8_tile",
        shape=(outputs, columns),
    )


def draw_plain(seed: int, outputs: int, columns: int, dtype: torch.dtype) -> SimpleNamespace:
    generator = torch.Generator().manual_seed(seed)
    payload = torch.randn(outputs, columns, generator=generator).to(dtype).to(DEVICE)
    return SimpleNamespace(payload=payload, scale=None, format="plain", shape=(outputs, columns))


def draw_summable(seed: int, *shape: int) -> Tensor:
    """Return rows whose sums with any weight of `fp8_of_steps` are exact, whatever their order.

    The interpreter's product is NumPy's, whose order changes with a tile's shape; a GPU's does not.
    """
    if ON_GPU:
        return draw(seed, *shape)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-7, 8, shape, generator=generator).bfloat16().to(DEVICE)


def fp8_of_steps(seed: int, outputs: int, columns: int) -> SimpleNamespace:
    """Return a stored weight that is exact to sum with `draw_summable` rows."""
    weight = draw_fp8(seed, outputs, columns)
    if not ON_GPU:
        weight.payload = (weight.payload.float() / 64).round().to(torch.float8_e4m3fn)
        weight.scale = weight.scale % 3 + 126
    return weight


def truth(x: Tensor, weight: SimpleNamespace | PreparedMatrix) -> Tensor:
    return x.double() @ twin.widen(weight).double().T


# rounding


@pytest.mark.parametrize("shape", [(0, 64), (1, 32), (7, 64), (5, 40), (3, 1000), (129, 96)])
def test_rounding_to_fp8_has_the_bits_of_its_twin(shape):
    x = draw(1, *shape)
    if shape[0] >= 5:
        x[1, 3], x[2, 1], x[3], x[4, :8] = float("nan"), float("-inf"), 0.0, 3e38
    payload, scale = round_fp8(x)
    expected, expected_scale = rounding.round_fp8(x)
    assert_same_bits(scale, expected_scale, "scale")
    finite = ~expected.float().isnan()
    assert torch.equal(payload.float().isnan(), ~finite)
    assert torch.equal(payload.view(torch.uint8)[finite], expected.view(torch.uint8)[finite])
    wide, expected_wide = round_fp8_wide(x), rounding.round_fp8_wide(x)
    assert torch.equal(wide.isnan(), expected_wide.isnan())
    assert torch.equal(wide.nan_to_num(nan=7.0), expected_wide.nan_to_num(nan=7.0))


def test_every_bfloat16_rounds_as_in_the_twin():
    bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16)
    if not ON_GPU:
        bits = bits[::7]
    values = bits.view(torch.bfloat16).to(DEVICE)
    x = torch.zeros(len(values), 32, dtype=torch.bfloat16, device=DEVICE)
    x[:, 5] = values
    payload, scale = round_fp8(x)
    expected, expected_scale = rounding.round_fp8(x)
    assert_same_bits(scale, expected_scale)
    finite = scale[:, 0] != 255
    assert_same_bits(payload[finite], expected[finite])


def test_values_under_the_smallest_scale_keep_its_grid():
    x = torch.full((1, 32), 2.0**-30, dtype=torch.bfloat16, device=DEVICE)
    x[0, 0] = 9e-5
    payload, scale = round_fp8(x)
    assert scale.item() == 105  # 2^-22 >= 1e-4 / 448
    assert payload.float()[0, 0].item() == 384  # 9e-5 * 2^22 = 377, to 4 bits
    assert torch.equal(payload.float()[0, 1:], torch.full((31,), 2.0**-8, device=DEVICE))


# weights


@pytest.mark.parametrize("shape", [(1, 1), (64, 32), (48, 64), (33, 40), (130, 200)])
def test_prepared_weights_hold_the_same_values(shape):
    stored = draw_fp8(2, *shape)
    prepared = prepare_matrix(stored, DEVICE)
    assert torch.equal(twin.widen(prepared), twin.widen(stored))
    assert torch.equal(expand_blocks(prepared).float(), twin.widen(stored))
    again = prepare_matrix(prepared, DEVICE)
    assert torch.equal(twin.widen(again), twin.widen(stored))


def test_every_e4m3_value_widens_exactly():
    codes = torch.arange(256, dtype=torch.uint8)
    codes[(codes & 0x7F) == 0x7F] = 0  # NaN, which no weight is
    # The interpreter's own casts lose what is subnormal in bfloat16.
    for scale in (3 if ON_GPU else 20, 60, 127, 134):
        stored = SimpleNamespace(
            payload=codes.view(8, 32).view(torch.float8_e4m3fn).to(DEVICE),
            scale=torch.full((1, 1), scale, dtype=torch.uint8, device=DEVICE),
            format="fp8_tile",
            shape=(8, 32),
        )
        expanded = expand_blocks(prepare_matrix(stored, DEVICE))
        assert torch.equal(expanded.float(), twin.widen(stored))


def test_a_scale_too_large_to_widen_is_refused():
    stored = draw_fp8(3, 32, 32)
    stored.scale.fill_(135)
    with pytest.raises(KernelInputError, match=r"scale.max\(\).*135"):
        prepare_matrix(stored, DEVICE)


def test_a_weight_with_nan_is_refused():
    stored = draw_fp8(3, 32, 32)
    stored.payload.view(torch.uint8)[5, 7] = 0x7F
    with pytest.raises(KernelInputError, match=r"NaN in matrix.payload` is 1"):
        prepare_matrix(stored, DEVICE)


# products

SMALL = [
    (1, 64, 32),
    (7, 48, 64),
    (2, 130, 200),
    (17, 65, 129),
    (65, 32, 600),
    (3, 1, 1),
    (5, 70, 700),
]
# out, in of every fp8 weight of V4.1-Flash.
REAL = [
    (1280, 5120),
    (32768, 1280),
    (512, 5120),
    (5120, 8192),
    (4096, 1280),
    (2304, 5120),
    (5120, 2304),
    (25600, 6144),
    (5120, 15360),
]


@pytest.mark.parametrize("rows,outputs,columns", SMALL)
def test_fp8_linear_is_near_its_twin(rows, outputs, columns):
    x = draw(4, rows, columns)
    weight = prepare_matrix(draw_fp8(5, outputs, columns), DEVICE)
    expected = truth(rounding.round_fp8_wide(x), weight)
    for strict in (False, True):
        assert relative_error(fp8_linear(x, weight, strict=strict), expected) < BF16_ERROR
    assert relative_error(twin.fp8_linear(x, weight), expected) < BF16_ERROR


def test_sizes_of_one_are_no_special_case():
    x = draw(41, 1, 700).abs()
    prepared = prepare_matrix(draw_fp8(42, 1, 700), DEVICE)
    plain = draw_plain(43, 1, 700, torch.bfloat16)
    plain.payload.abs_()
    expected = truth(rounding.round_fp8_wide(x), prepared)
    assert relative_error(fp8_linear(x, prepared), expected) < 2 * BF16_ERROR
    assert relative_error(linear_float32(x, plain), truth(x, plain)) < SUM_ERROR


@pytest.mark.skipif(not ON_GPU, reason="real shapes need a GPU")
@pytest.mark.parametrize("outputs,columns", REAL)
def test_fp8_linear_of_real_shapes_is_near_the_truth_and_row_invariant(outputs, columns):
    weight = prepare_matrix(draw_fp8(6, outputs, columns), DEVICE)
    x = draw(7, 2000, columns)
    expected = rounding.round_fp8_wide(x).double() @ twin.widen(weight).double().T
    whole = fp8_linear(x, weight, strict=True)
    assert relative_error(whole, expected) < BF16_ERROR
    assert relative_error(fp8_linear(x, weight), expected) < BF16_ERROR
    for start, stop in [(0, 1), (1999, 2000), (5, 12), (100, 164), (100, 229), (1000, 2000)]:
        part = fp8_linear(x[start:stop].contiguous(), weight, strict=True)
        assert_same_bits(part, whole[start:stop], f"rows {start}..{stop}")


@pytest.mark.parametrize("sizes", [(1, 7, 17), (33, 20, 65, 2)])
def test_a_row_has_the_same_bits_alone_and_among_others(sizes):
    columns = 1100 if ON_GPU else 600
    x = draw_summable(8, sum(sizes), columns)
    prepared = prepare_matrix(fp8_of_steps(9, 70, columns), DEVICE)
    plain = prepare_matrix(
        SimpleNamespace(
            payload=expand_blocks(prepared), scale=None, format="plain", shape=prepared.shape
        ),
        DEVICE,
    )
    for run in (
        lambda part: fp8_linear(part, prepared, strict=True),
        lambda part: plain_linear(part, plain),
        lambda part: linear_float32(part, plain),
    ):
        whole = run(x)
        parts = [run(part.contiguous()) for part in x.split(sizes)]
        assert_same_bits(torch.cat(parts), whole)


def test_all_forms_of_a_product_give_the_same_bits():
    x = draw_summable(11, 9, 1100)
    weight = prepare_matrix(fp8_of_steps(12, 70, 1100), DEVICE)
    expanded = expand_blocks(weight)
    first = block_product(x, weight, whole=True)
    assert relative_error(first, truth(x, weight)) < BF16_ERROR
    assert_same_bits(block_product(x, weight, whole=False), first)
    for whole in (False, True):
        assert_same_bits(row_product(x, expanded, torch.bfloat16, whole=whole), first)
    padded = torch.zeros(72, 1104, dtype=torch.bfloat16, device=DEVICE)  # whole 16 bytes
    padded[:70, :1100] = expanded
    rows = torch.nn.functional.pad(x, (0, 4))
    assert_same_bits(many_rows_product(rows, padded, torch.bfloat16)[:, :70].contiguous(), first)
    wide = many_rows_product(rows, padded, torch.float32)
    assert_same_bits(wide, row_product(rows, padded, torch.float32))
    assert_same_bits(many_rows_product(x, expanded, torch.bfloat16), first)


def test_many_rows_go_through_the_expanded_weight(monkeypatch):
    monkeypatch.setattr(fp8_module, "EXPAND_ROWS", 3)
    monkeypatch.setattr(grouped_module, "EXPAND_ROWS", 3)
    x = draw_summable(13, 4, 600)
    weight = prepare_matrix(fp8_of_steps(14, 66, 600), DEVICE)
    few = fp8_linear(x[:2].contiguous(), weight)
    assert_same_bits(fp8_linear(x, weight, strict=True)[:2], few)
    assert relative_error(fp8_linear(x, weight)[:2], few) < BF16_ERROR
    grouped = x.view(4, 3, 200)
    weight = prepare_matrix(fp8_of_steps(15, 66, 200), DEVICE)
    few = grouped_linear(grouped[:2].contiguous(), weight)
    assert_same_bits(grouped_linear(grouped, weight, strict=True)[:2], few)
    assert relative_error(grouped_linear(grouped, weight)[:2], few) < BF16_ERROR


@pytest.mark.parametrize("rows,outputs,columns", SMALL)
@pytest.mark.parametrize("weight_dtype", [torch.bfloat16, torch.float32])
def test_plain_products_are_near_their_twins(rows, outputs, columns, weight_dtype):
    weight = draw_plain(16, outputs, columns, weight_dtype)
    x = draw(17, rows, columns)
    assert relative_error(plain_linear(x, weight), truth(x, weight)) < BF16_ERROR
    for operand in (x, x.float() * 1.001):
        result = linear_float32(operand, weight)
        assert result.dtype == torch.float32
        assert relative_error(result, truth(operand, weight)) < SUM_ERROR
        assert relative_error(twin.linear_float32(operand, weight), truth(operand, weight)) < 1e-6


@pytest.mark.skipif(not ON_GPU, reason="real shapes need a GPU")
@pytest.mark.parametrize(
    "outputs,columns", [(32, 5120), (128, 512), (512, 5120), (384, 5120), (1, 5376), (20000, 5120)]
)
def test_plain_products_of_real_shapes_are_near_the_truth_and_row_invariant(outputs, columns):
    weight = draw_plain(18, outputs, columns, torch.bfloat16)
    x = draw(19, 1300, columns)
    whole = linear_float32(x, weight)
    assert relative_error(whole, truth(x, weight)) < SUM_ERROR
    for start, stop in [(0, 1), (5, 12), (100, 164), (100, 229), (300, 1300)]:
        part = linear_float32(x[start:stop].contiguous(), weight)
        assert_same_bits(part, whole[start:stop], f"rows {start}..{stop}")


@pytest.mark.parametrize("rows,groups,outputs,columns", [(1, 2, 16, 32), (5, 3, 65, 160)])
def test_grouped_linear_is_near_its_twin(rows, groups, outputs, columns):
    x = draw(20, rows, groups, columns)
    stored = draw_fp8(21, groups * outputs, columns)
    blocks = twin.widen(stored).double().unflatten(0, (groups, -1))
    expected = torch.einsum("bgi,goi->bgo", x.double(), blocks).flatten(1)
    plain = SimpleNamespace(
        payload=twin.widen(stored).bfloat16(), scale=None, format="plain", shape=stored.shape
    )
    for weight in (prepare_matrix(stored, DEVICE), plain):
        assert relative_error(grouped_linear(x, weight), expected) < BF16_ERROR
        assert relative_error(twin.grouped_linear(x, weight), expected) < BF16_ERROR


@pytest.mark.skipif(not ON_GPU, reason="real shapes need a GPU")
def test_grouped_linear_of_the_real_shape_is_row_invariant():
    weight = prepare_matrix(draw_fp8(22, 8192, 4096), DEVICE)
    x = draw(23, 1300, 8, 4096)
    whole = grouped_linear(x, weight, strict=True)
    blocks = twin.widen(weight).double().unflatten(0, (8, -1))
    expected = torch.einsum("bgi,goi->bgo", x[:64].double(), blocks).flatten(1)
    assert relative_error(whole[:64], expected) < BF16_ERROR
    for start, stop in [(0, 1), (5, 12), (100, 164), (100, 229), (300, 1300)]:
        part = grouped_linear(x[start:stop].contiguous(), weight, strict=True)
        assert_same_bits(part, whole[start:stop], f"rows {start}..{stop}")


def test_no_rows_launch_nothing():
    weight = prepare_matrix(draw_fp8(24, 64, 64), DEVICE)
    plain = draw_plain(25, 64, 64, torch.bfloat16)
    none = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert fp8_linear(none, weight).shape == (0, 64)
    assert linear_float32(none, plain).shape == (0, 64)
    assert grouped_linear(none.view(0, 2, 32), draw_plain(26, 64, 32, torch.bfloat16)).shape == (
        0,
        64,
    )
    assert embed(torch.empty(0, dtype=torch.int64, device=DEVICE), plain).shape == (0, 64)


def test_nan_and_infinity_stay_in_their_row():
    x = draw(27, 5, 200)
    clean = x.clone()
    x[1, 7], x[3, 150] = float("nan"), float("inf")
    prepared = prepare_matrix(draw_fp8(28, 66, 200), DEVICE)
    plain = draw_plain(29, 66, 200, torch.bfloat16)
    for run in (lambda r: fp8_linear(r, prepared), lambda r: linear_float32(r, plain)):
        result, expected = run(x), run(clean)
        assert not result[[1, 3]].isfinite().any()
        assert_same_bits(result[[0, 2, 4]], expected[[0, 2, 4]])


def test_linear_takes_any_format():
    x = draw(30, 3, 64)
    plain = draw_plain(31, 40, 64, torch.bfloat16)
    prepared = prepare_matrix(draw_fp8(32, 40, 64), DEVICE)
    assert_same_bits(linear(x, plain), plain_linear(x, plain))
    assert_same_bits(linear(x, prepared), fp8_linear(x, prepared))
    assert relative_error(linear(x, plain), twin.linear(x, plain)) < BF16_ERROR


def test_twins_round_nothing_in_float32():
    x = draw(33, 3, 64).float()
    stored = draw_fp8(34, 40, 64)
    assert relative_error(twin.linear(x, stored), truth(x, stored)) < 1e-6
    assert twin.linear(x.double(), stored).dtype == torch.float64


def test_embed_gathers_rows():
    table = draw_plain(35, 50, 1030, torch.bfloat16)
    ids = torch.tensor([0, 49, 7, 7, -1, 50], device=DEVICE)
    rows = embed(ids, table)
    assert_same_bits(rows[:4], table.payload[ids[:4]])
    assert not rows[4:].any()
    assert_same_bits(rows, twin.embed(ids, table))
    wide = embed(ids, table, dtype=torch.float32)
    assert_same_bits(wide, twin.embed(ids, table, dtype=torch.float32))
    table.payload = table.payload.float() * 1.01
    assert_same_bits(embed(ids, table, dtype=torch.bfloat16), embed(ids, table).bfloat16())


def test_messages_name_the_argument():
    stored = draw_fp8(36, 64, 64)
    prepared = prepare_matrix(stored, DEVICE)
    x = draw(37, 2, 64)
    with pytest.raises(KernelInputError, match="prepare_matrix"):
        fp8_linear(x, stored)
    with pytest.raises(KernelInputError, match="`x` is"):
        fp8_linear(x.float(), prepared)
    with pytest.raises(KernelInputError, match=r"weight.shape\[1\]"):
        fp8_linear(draw(38, 2, 32), prepared)
    with pytest.raises(KernelInputError, match=r"weight\.payload"):
        plain_linear(x, draw_plain(39, 8, 32, torch.bfloat16))
    with pytest.raises(KernelInputError, match="groups"):
        grouped_linear(draw(40, 2, 3, 64), prepared)
    with pytest.raises(KernelInputError, match="format"):
        prepare_matrix(SimpleNamespace(format="fp4_row"), DEVICE)
