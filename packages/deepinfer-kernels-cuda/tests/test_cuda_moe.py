"""Router, grouping, routed experts and shared expert against their twins."""

from types import SimpleNamespace

import pytest
import torch

from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.moe.combine import combine
from deepinfer_kernels_cuda.moe.experts import experts
from deepinfer_kernels_cuda.moe.permute import permute
from deepinfer_kernels_cuda.moe.prepare import prepare_experts
from deepinfer_kernels_cuda.moe.route import route
from deepinfer_kernels_cuda.moe.shared_expert import shared_expert
from deepinfer_kernels_cuda.quant.matrix import prepare_matrix
from deepinfer_kernels_cuda.reference import moe as twins
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

LIMIT = 10.0


def _generator(seed):
    return torch.Generator().manual_seed(seed)


def _matrix(kind, *shape, seed=0, scales=(118, 124)):
    """Return a stored matrix [..., out, in] of small random values."""
    g = _generator(seed)
    *lead, out, width = shape
    if kind == "plain":
        payload = (torch.randn(*shape, generator=g) / width**0.5).bfloat16()
        scale = None
    elif kind == "fp8_tile":
        payload = torch.randn(*shape, generator=g).to(torch.float8_e4m3fn)
        tiles = (*lead, -(-out // 32), -(-width // 32))
        scale = torch.randint(*scales, tiles, generator=g, dtype=torch.uint8)
    else:
        payload = torch.randint(0, 256, (*lead, out, width // 2), generator=g, dtype=torch.uint8)
        groups = (*lead, out, width // 32)
        scale = torch.randint(*scales, groups, generator=g, dtype=torch.uint8)
    return SimpleNamespace(
        payload=payload.to(DEVICE),
        scale=None if scale is None else scale.to(DEVICE),
        format=kind,
        shape=(out, width),
    )


def _experts(kind, slots, width, inner, **options):
    """Return stacks as stored and as prepared."""
    shapes = {"w1": (inner, width), "w3": (inner, width), "w2": (width, inner)}
    stored = SimpleNamespace(
        **{
            name: _matrix(kind, slots, *shape, seed=seed, **options)
            for seed, (name, shape) in enumerate(shapes.items())
        }
    )
    prepared = SimpleNamespace(
        **{name: prepare_experts(getattr(stored, name), DEVICE) for name in shapes}
    )
    return stored, prepared


def _choices(rows, slots, top_k, seed=0, elsewhere=0.2):
    """Return ids without repeats in a row, some of them -1, and weights."""
    g = _generator(seed)
    ids = torch.rand(rows, slots, generator=g).topk(top_k).indices.int()
    ids[torch.rand(rows, top_k, generator=g) < elsewhere] = -1
    return ids.to(DEVICE), torch.rand(rows, top_k, generator=g).to(DEVICE)


def _rows(rows, width, seed=0):
    return torch.randn(rows, width, generator=_generator(seed)).bfloat16().to(DEVICE)


# prepare


@pytest.mark.parametrize(("out", "width"), [(32, 32), (96, 160), (129, 256)])
def test_prepared_experts_hold_the_stored_values(out, width):
    for kind in ("plain", "fp8_tile", "fp4_row"):
        stored = _matrix(kind, 3, out, width)
        wide = twins.widen(prepare_experts(stored, DEVICE))
        for slot in range(3):
            scale = None if stored.scale is None else stored.scale[slot]
            alone = SimpleNamespace(
                payload=stored.payload[slot], scale=scale, format=kind, shape=(out, width)
            )
            assert torch.equal(wide[slot], twins.widen(alone)), kind


def test_prepared_fp4_experts_take_no_second_copy():
    prepared = prepare_experts(_matrix("fp4_row", 2, 256, 256), DEVICE)
    assert prepared.payload.nbytes + prepared.scale.nbytes == 2 * 256 * 256 * (1 / 2 + 1 / 32)


def test_prepare_refuses_other_formats_and_shapes():
    with pytest.raises(KernelInputError, match="fp8_row"):
        prepare_experts(_matrix("plain", 2, 32, 32).__class__(format="fp8_row"), DEVICE)
    stored = _matrix("fp4_row", 2, 32, 64)
    stored.shape = (32, 96)
    with pytest.raises(KernelInputError, match="payload"):
        prepare_experts(stored, DEVICE)


# permute


def _same_permutation(ids, slots, tile_rows):
    made, expected = permute(ids, slots, tile_rows), twins.permute(ids, slots, tile_rows)
    assert torch.equal(made.counts, expected.counts)
    assert torch.equal(made.order, expected.order)
    assert torch.equal(made.tiles[made.tiles[:, 0] >= 0], expected.tiles)
    assert made.tiles[:, 0].min() >= -1


@pytest.mark.parametrize(
    ("rows", "top_k", "slots", "tile_rows"),
    [
        (1, 1, 1, 16),
        (1, 6, 48, 16),
        (21, 3, 5, 16),
        (32, 2, 70, 16),
        (13, 5, 9, 16),
        (300, 4, 33, 32),
    ]
    + ([(170, 6, 48, 16), (171, 6, 384, 16), (8192, 6, 384, 128)] if ON_GPU else []),
)
def test_pairs_are_grouped_by_slot_in_the_order_of_rows(rows, top_k, slots, tile_rows):
    ids = torch.randint(-1, slots, (rows, top_k), generator=_generator(rows)).int().to(DEVICE)
    _same_permutation(ids, slots, tile_rows)


@pytest.mark.parametrize("rows", [7, 100])
def test_one_hot_slot_and_empty_ones(rows):
    ids = torch.full((rows, 2), 4, dtype=torch.int32, device=DEVICE)
    _same_permutation(ids, 6, 16)
    _same_permutation(ids.fill_(-1), 6, 16)


def test_ids_beyond_the_slots_are_left_out():
    for rows in (2, 40):
        ids = torch.full((rows, 2), 9, dtype=torch.int32, device=DEVICE)
        ids[0, 1], ids[1, 0] = 0, 1
        made = permute(ids, 2, 16)
        assert made.counts.tolist() == [1, 1]
        assert made.order[:2].tolist() == [1, 2]


# route


def _gate(experts, width, dtype=torch.bfloat16):
    gate = _matrix("plain", experts, width, seed=5)
    gate.payload = gate.payload.to(dtype)
    return gate, prepare_matrix(gate, DEVICE)


@pytest.mark.parametrize(
    ("rows", "experts", "width", "top_k"),
    [(1, 4, 64, 2), (13, 6, 64, 6), (5, 130, 96, 3)]
    + ([(1, 384, 5120, 6), (129, 384, 5120, 6), (1021, 128, 5120, 3)] if ON_GPU else []),
)
@pytest.mark.parametrize("own_bias", [False, True])
def test_route_chooses_as_the_twin_in_float64(rows, experts, width, top_k, own_bias):
    x, (stored, gate) = 3 * _rows(rows, width), _gate(experts, width)
    shape = (rows, experts) if own_bias else (experts,)
    bias = (0.1 * torch.randn(shape, generator=_generator(3))).to(DEVICE)
    options = {"top_k": top_k, "temperature": 0.75, "scale": 1.5}
    ids, weights = route(x, gate, bias, **options)
    expected_ids, expected = twins.route(x.double(), stored, bias.double(), **options)
    # Where two scores are closer than float32 tells, either may come first.
    all_ids, _ = twins.route(
        x.double(), stored, bias.double(), top_k=experts, temperature=0.75, scale=1.0
    )
    logits = x.double() @ stored.payload.double().T / 0.75
    score = (-torch.nn.functional.logsigmoid(-logits)).sqrt() + bias
    ranked = score.gather(1, all_ids.long())
    gap = (ranked[:, :-1] - ranked[:, 1:])[:, :top_k].amin(1)
    clear = gap > 1e-5
    assert clear.float().mean() > 0.8
    assert torch.equal(ids[clear], expected_ids[clear])
    assert relative_error(weights[clear], expected[clear]) < 2e-6


def test_route_keeps_small_scores_apart():
    width = 64
    x = torch.ones(1, width, dtype=torch.bfloat16, device=DEVICE)
    gate, _ = _gate(8, width)
    gate.payload = (-torch.arange(8.0)[:, None] * 3 / width).expand(8, width).bfloat16().to(DEVICE)
    bias = torch.zeros(8, device=DEVICE)
    options = {"top_k": 8, "temperature": 1.0, "scale": 1.0}
    ids, weights = route(x, prepare_matrix(gate, DEVICE), bias, **options)
    _, expected = twins.route(x.double(), gate, bias.double(), **options)
    assert ids[0].tolist() == list(range(8))
    assert ((weights.double() - expected).abs() / expected).max() < 2e-6


def test_equal_scores_go_to_the_lower_id():
    x = torch.zeros(3, 64, dtype=torch.bfloat16, device=DEVICE)
    bias = torch.zeros(10, device=DEVICE)
    bias[7] = -0.0
    bias[4] = 1.0
    ids, weights = route(x, _gate(10, 64)[1], bias, top_k=4, temperature=1.0, scale=1.5)
    assert ids.tolist() == [[4, 0, 1, 2]] * 3
    assert torch.allclose(weights, torch.full_like(weights, 1.5 / 4), rtol=1e-6)


def test_route_of_a_row_depends_on_itself_alone():
    x, (stored, _) = _rows(rows := 150 if ON_GPU else 40, 96), _gate(40, 96)
    if not ON_GPU:  # the interpreter's products are a BLAS's: sums without rounding, then
        x, stored.payload = x.round(), (stored.payload * 64).round()
    gate = prepare_matrix(stored, DEVICE)
    bias = torch.randn(40, generator=_generator(1)).to(DEVICE)
    options = {"top_k": 6, "temperature": 1.0, "scale": 1.5}
    ids, weights = route(x, gate, bias, **options)
    for start, stop in ((0, 1), (20, 27), (1, rows - 1)):
        some_ids, some = route(x[start:stop], gate, bias, **options)
        assert torch.equal(some_ids, ids[start:stop])
        assert_same_bits(some, weights[start:stop])
    x[3, 5] = float("nan")
    x[9] = float("inf")
    hurt_ids, hurt = route(x, gate, bias, **options)
    whole = torch.tensor([row not in (3, 9) for row in range(rows)], device=DEVICE)
    assert torch.equal(hurt_ids[whole], ids[whole])
    assert_same_bits(hurt[whole], weights[whole])
    assert hurt[3].isnan().all()
    assert ((hurt_ids >= 0) & (hurt_ids < 40)).all()
    assert all(len(set(row)) == 6 for row in hurt_ids.tolist())


def test_route_of_no_rows_and_wrong_arguments():
    _, gate = _gate(6, 64)
    bias = torch.zeros(6, device=DEVICE)
    options = {"temperature": 1.0, "scale": 1.0}
    ids, weights = route(_rows(0, 64), gate, bias, top_k=2, **options)
    assert ids.shape == weights.shape == (0, 2)
    with pytest.raises(KernelInputError, match="`top_k` is 7"):
        route(_rows(2, 64), gate, bias, top_k=7, **options)
    with pytest.raises(KernelInputError, match="bias"):
        route(_rows(2, 64), gate, bias[:5], top_k=2, **options)


# combine


def test_parts_are_summed_in_the_order_of_choices():
    parts = _rows(5 * 3, 40).view(5, 3, 40) * 100
    ids = torch.tensor([[0, 1, 2], [-1, 4, 0], [2, -1, 5], [-1, -1, -1], [3, 3, -1]]).int()
    parts[(ids < 0) | (ids >= 5)] = float("nan")
    ids = ids.to(DEVICE)
    found = combine(parts, ids, 5)
    assert_same_bits(found, twins.combine(parts, ids, 5))
    assert found.isfinite().all()


# experts


def _check_experts(kind, rows, slots, top_k, width, inner, **options):
    stored, prepared = _experts(kind, slots, width, inner, **options)
    x = _rows(rows, width)
    ids, weights = _choices(rows, slots, top_k)
    out = experts(x, ids, weights, prepared, limit=LIMIT)
    assert out.dtype == torch.float32
    assert (out[(ids < 0).all(1)] == 0).all()
    return relative_error(out, twins.experts(x, ids, weights, stored, limit=LIMIT))


@pytest.mark.parametrize("kind", ["plain", "fp8_tile", "fp4_row"])
@pytest.mark.parametrize(
    ("rows", "slots", "top_k", "width", "inner"),
    [(1, 4, 2, 64, 32), (13, 6, 2, 64, 96), (17, 1, 1, 160, 64), (40, 2, 2, 128, 160)]
    + [(288, 1, 1, 64, 32)]  # the widest tiles
    + ([(1, 384, 6, 512, 256), (67, 48, 6, 1024, 512), (1009, 48, 6, 512, 288)] if ON_GPU else []),
)
def test_experts_agree_with_the_twin(kind, rows, slots, top_k, width, inner):
    assert _check_experts(kind, rows, slots, top_k, width, inner) < 3e-3


@pytest.mark.skipif(not ON_GPU, reason="V4.1-Flash shapes need the GPU")
@pytest.mark.parametrize(("rows", "slots", "top_k"), [(1, 48, 6), (61, 48, 6), (7, 128, 3)])
def test_experts_agree_with_the_twin_at_real_shapes(rows, slots, top_k):
    assert _check_experts("fp4_row", rows, slots, top_k, 5120, 2304) < 3e-3


def test_scales_of_any_size_are_applied():
    assert _check_experts("fp4_row", 5, 2, 1, 64, 64, scales=(130, 133)) < 3e-3
    assert _check_experts("fp4_row", 5, 2, 1, 64, 64, scales=(90, 93)) < 3e-3


def test_gate_and_up_may_differ_in_the_size_of_their_scales():
    stored, prepared = _experts("fp4_row", 2, 64, 64)
    stored_large, large = _experts("fp4_row", 2, 64, 64, scales=(128, 131))
    stored.w3, prepared.w3 = stored_large.w3, large.w3
    assert large.w3.wide_scales and not prepared.w1.wide_scales
    x = _rows(5, 64) / 64
    ids, weights = _choices(5, 2, 1, elsewhere=0)
    out = experts(x, ids, weights, prepared, limit=LIMIT)
    assert relative_error(out, twins.experts(x, ids, weights, stored, limit=LIMIT)) < 3e-3


def test_clamps_and_weights_enter_before_the_second_product():
    stored, prepared = _experts("fp4_row", 2, 64, 64, scales=(125, 128))
    x = 4 * _rows(9, 64)
    ids, weights = _choices(9, 2, 1, elsewhere=0)
    out = experts(x, ids, weights, prepared, limit=2.0)
    expected = twins.experts(x, ids, weights, stored, limit=2.0)
    assert relative_error(out, expected) < 3e-3
    assert relative_error(out, twins.experts(x, ids, weights, stored, limit=9.0)) > 0.1


def test_kernel_is_as_near_to_exact_factors_as_rounding_allows():
    # The truth in float64 from the same rounded rows shows the error of rounding alone.
    stored, prepared = _experts("fp4_row", 3, 128, 64)
    x = _rows(24, 128)
    ids, weights = _choices(24, 3, 2)
    out = experts(x, ids, weights, prepared, limit=LIMIT)
    exact = twins.experts(x.double(), ids, weights.double(), stored, limit=LIMIT)
    assert relative_error(out, exact) < 0.08


@pytest.mark.parametrize("kind", ["plain", "fp4_row"])
def test_an_expert_row_depends_on_itself_alone(kind):
    rows, sizes = (1000, (1, 7, 64, 129)) if ON_GPU else (70, (1, 7, 33))
    width, inner, slots = (5120, 2304, 12) if ON_GPU else (64, 32, 3)
    _, prepared = _experts(kind, slots, width, inner)
    x = _rows(rows, width)
    ids, weights = _choices(rows, slots, 2)
    whole = experts(x, ids, weights, prepared, limit=LIMIT)
    for size in sizes:
        for start in (0, rows - size):
            part = slice(start, start + size)
            alone = experts(x[part], ids[part], weights[part], prepared, limit=LIMIT)
            assert_same_bits(alone, whole[part], f"{size} rows from {start}")


def test_a_hot_expert_serves_every_row():
    _, prepared = _experts("fp4_row", 5, 64, 32)
    x = _rows(50, 64)
    ids = torch.full((50, 1), 3, dtype=torch.int32, device=DEVICE)
    weights = torch.ones(50, 1, device=DEVICE)
    out = experts(x, ids, weights, prepared, limit=LIMIT)
    alone = experts(x[49:], ids[49:], weights[49:], prepared, limit=LIMIT)
    assert_same_bits(out[49:], alone)
    assert (out != 0).any(1).all()


def test_any_replica_slot_gives_the_same_bits():
    stored, _ = _experts("fp4_row", 4, 64, 32)
    for stack in (stored.w1, stored.w3, stored.w2):
        stack.payload[3], stack.scale[3] = stack.payload[0], stack.scale[0]
    prepared = SimpleNamespace(
        **{name: prepare_experts(getattr(stored, name), DEVICE) for name in ("w1", "w3", "w2")}
    )
    x, weights = _rows(6, 64), torch.rand(6, 1).to(DEVICE)
    first = torch.zeros(6, 1, dtype=torch.int32, device=DEVICE)
    outs = [experts(x, ids, weights, prepared, limit=LIMIT) for ids in (first, first + 3)]
    assert_same_bits(*outs)


@pytest.mark.parametrize("kind", ["plain", "fp4_row"])
def test_nan_stays_in_its_row(kind):
    _, prepared = _experts(kind, 3, 64, 32)
    x = _rows(20, 64)
    ids, weights = _choices(20, 3, 2, elsewhere=0)
    before = experts(x, ids, weights, prepared, limit=LIMIT)
    x[4, 3], weights[11, 0] = float("nan"), float("inf")
    after = experts(x, ids, weights, prepared, limit=LIMIT)
    whole = torch.tensor([row not in (4, 11) for row in range(20)], device=DEVICE)
    assert_same_bits(after[whole], before[whole])
    assert after[4].isnan().all()
    assert not after[11].isfinite().all()


@pytest.mark.parametrize("kind", ["plain", "fp4_row"])
def test_nothing_unwritten_is_read(kind, monkeypatch):
    _, prepared = _experts(kind, 3, 64, 32)
    x = _rows(33, 64)
    ids, weights = _choices(33, 3, 2, elsewhere=0.5)
    before = experts(x, ids, weights, prepared, limit=LIMIT)

    def poisoned(*shape, dtype, device):
        value = float("nan") if dtype.is_floating_point else 7
        size = shape[0] if isinstance(shape[0], tuple | torch.Size) else shape
        return torch.full(size, value, dtype=dtype, device=device)

    monkeypatch.setattr(torch, "empty", poisoned)
    assert_same_bits(experts(x, ids, weights, prepared, limit=LIMIT), before)


def test_experts_of_no_rows_and_of_none_here():
    _, prepared = _experts("fp4_row", 2, 64, 32)
    ids, weights = _choices(3, 2, 2)
    empty = experts(_rows(0, 64), ids[:0], weights[:0], prepared, limit=LIMIT)
    assert empty.shape == (0, 64)
    assert empty.dtype == torch.float32
    out = experts(_rows(3, 64), ids.fill_(-1), weights, prepared, limit=LIMIT)
    assert (out == 0).all()
    _, none = _experts("fp4_row", 0, 64, 32)
    assert (experts(_rows(3, 64), ids, weights, none, limit=LIMIT) == 0).all()


def test_experts_name_wrong_arguments():
    stored, prepared = _experts("fp4_row", 2, 64, 32)
    ids, weights = _choices(3, 2, 2)
    x = _rows(3, 64)
    with pytest.raises(KernelInputError, match=r"`x` is torch\.float32"):
        experts(x.float(), ids, weights, prepared, limit=LIMIT)
    with pytest.raises(KernelInputError, match="`ids`"):
        experts(x, ids.long(), weights, prepared, limit=LIMIT)
    with pytest.raises(KernelInputError, match=r"experts\.w1"):
        experts(x, ids, weights, stored, limit=LIMIT)
    with pytest.raises(KernelInputError, match="shapes"):
        experts(_rows(3, 96), ids, weights, prepared, limit=LIMIT)
    _, more = _experts("fp4_row", 3, 64, 32)
    prepared.w3 = more.w3
    with pytest.raises(KernelInputError, match="number of slots"):
        experts(x, ids, weights, prepared, limit=LIMIT)


def test_a_number_that_is_no_slot_is_left_out():
    _, prepared = _experts("fp4_row", 2, 64, 32)
    ids, weights = _choices(6, 2, 2, elsewhere=0)
    ids[1, 0], ids[4, 1] = 2, 1 << 20
    known = torch.where(ids < 2, ids, -1)
    found = experts(_rows(6, 64), ids, weights, prepared, limit=LIMIT)
    assert_same_bits(found, experts(_rows(6, 64), known, weights, prepared, limit=LIMIT))


def test_twin_rounds_nothing_for_float32():
    stored, _ = _experts("fp4_row", 2, 64, 32)
    x = _rows(4, 64).float()
    ids, weights = _choices(4, 2, 2)
    single = twins.experts(x, ids, weights, stored, limit=LIMIT)
    exact = twins.experts(x.double(), ids, weights.double(), stored, limit=LIMIT)
    assert single.dtype == torch.float32
    assert relative_error(single, exact) < 1e-6


# shared expert


@pytest.mark.parametrize("kind", ["plain", "fp8_tile"])
@pytest.mark.parametrize(
    ("rows", "width", "inner"),
    [(1, 64, 32), (13, 96, 64), (3, 80, 48)]
    + ([(61, 5120, 2304), (1021, 5120, 2304)] if ON_GPU else []),
)
def test_shared_expert_agrees_with_the_twin(kind, rows, width, inner):
    shapes = (inner, width), (inner, width), (width, inner)
    stored = [_matrix(kind, *shape, seed=seed) for seed, shape in enumerate(shapes)]
    prepared = [prepare_matrix(matrix, DEVICE) for matrix in stored]
    x = _rows(rows, width)
    out = shared_expert(x, *prepared, limit=LIMIT, strict=True)
    assert out.dtype == torch.bfloat16
    assert relative_error(out, twins.shared_expert(x, *stored, limit=LIMIT)) < 4e-3
    assert_same_bits(
        shared_expert(x[:1], *prepared, limit=LIMIT, strict=True), out[:1], "a row alone"
    )
    assert shared_expert(x[:0], *prepared, limit=LIMIT).shape == (0, width)
