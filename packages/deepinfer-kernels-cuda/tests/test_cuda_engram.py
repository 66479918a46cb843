"""Engram against its twins."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from deepinfer_kernels_cuda.engram.gate import engram_gate
from deepinfer_kernels_cuda.engram.read import engram_read
from deepinfer_kernels_cuda.engram.rows import engram_rows
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.quant.matrix import PreparedMatrix
from deepinfer_kernels_cuda.reference import engram as twins
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

PAD = 3
ROWS = [1, 7, 64, 129, 1000] if ON_GPU else [1, 7, 19]


def _random(*shape, seed=0, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(dtype).to(DEVICE)


@dataclass
class StepRows:
    positions: Tensor
    sequence: Tensor
    slots: Tensor
    row_start: Tensor
    first_position: Tensor


def _stored(payload, scale, kind="fp8_row"):
    return PreparedMatrix(payload, scale, kind, tuple(payload.shape))


def _rows(lengths, starts, padding=0, scratch=None):
    """Rows of sequences from some positions on, in slots 1, 3, 5 ..., then padding."""
    index = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths).long())
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    first = torch.tensor(starts).long()
    positions = torch.arange(len(index)) - bounds[index] + first[index]
    spare = torch.zeros(padding).long()
    slots = 2 * index + 1
    scratch = 2 * len(lengths) + 1 if scratch is None else scratch
    rows = StepRows(
        torch.cat([positions, spare]),
        torch.cat([index, spare - 1]),
        torch.cat([slots, spare + scratch]),
        bounds,
        first,
    )
    return StepRows(*(t.to(DEVICE) for t in vars(rows).values()))


# Released: multipliers of layer 1, primes near 16 million.
MULTIPLIERS = torch.tensor(
    [
        [76632096046245, 4839876093313, 35959672319349, 73987337458391],
        [67716810739261, 51510806800915, 30921347202721, 82619226485591],
    ],
    device=DEVICE,
)


def _primes(layers, gram, heads):
    generator = torch.Generator().manual_seed(5)
    return torch.randint(15_990_000, 16_010_000, (layers, gram - 1, heads), generator=generator).to(
        DEVICE
    )


def _folded(count, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 99092, (count,), generator=generator)
    ids[torch.rand(count, generator=generator) < 0.1] = -1
    return ids.to(DEVICE)


def _plain_rows(texts, pad, multipliers, primes):
    """Row ids of whole sequences in Python integers."""
    out = []
    for text in texts:
        for p in range(len(text)):
            row, alive, ids = [], True, []
            for back in range(multipliers.shape[1]):
                alive = alive and p - back >= 0 and text[p - back] >= 0
                ids.append(text[p - back] if alive else pad)
            for layer, (factors, sizes) in enumerate(
                zip(multipliers.tolist(), primes.tolist(), strict=True)
            ):
                hashed, offset = ids[0] * factors[0], 0
                for back in range(1, len(ids)):
                    hashed ^= ids[back] * factors[back]
                    for size in sizes[back - 1]:
                        row.append((layer, hashed % size + offset))
                        offset += size
            out.append(row)
    return out


def test_rows_are_those_of_whole_sequences_however_they_are_cut():
    lengths, cuts = [13, 1, 6], ([5, 1, 0], [1, 0, 1], [7, 0, 5])
    texts = [_folded(n, seed=n).tolist() for n in lengths]
    primes = _primes(2, 4, 8)
    history = torch.full((8, 3), 77, device=DEVICE)
    seen, got = [0, 0, 0], [[], [], []]
    for cut in cuts:
        rows = _rows(cut, seen, padding=2)
        step = [texts[s][seen[s] : seen[s] + n] for s, n in enumerate(cut)]
        folded = torch.tensor([*(i for ids in step for i in ids), -1, 5], device=DEVICE)
        result = engram_rows(folded, history, rows, PAD, MULTIPLIERS, primes)
        at = 0
        for s, n in enumerate(cut):
            got[s] += result[:, at : at + n].transpose(0, 1).flatten(1).tolist()
            seen[s] += n
            at += n
    expected = [[r for _, r in row] for row in _plain_rows(texts, PAD, MULTIPLIERS, primes)]
    assert [row for lines in got for row in lines] == expected


@pytest.mark.parametrize(
    ("lengths", "starts", "padding", "depth", "gram", "heads"),
    [
        ([1, 1, 1], [9, 0, 1], 0, 3, 4, 8),
        ([6, 1, 3], [0, 40, 2], 5, 8, 4, 8),
        ([2, 17], [5, 1], 1, 4, 3, 5),
        ([33], [1000], 0, 11, 2, 3),
        ([], [], 4, 3, 4, 8),
    ]
    + [([129, 1000, 1, 7], [7, 0, 1 << 20, 3], 63, 11, 4, 8)] * ON_GPU,
)
def test_rows_and_history_are_those_of_the_twin(lengths, starts, padding, depth, gram, heads):
    rows, primes = _rows(lengths, starts, padding), _primes(2, gram, heads)
    folded = _folded(len(rows.positions), seed=len(lengths))
    generator = torch.Generator().manual_seed(8)
    slots = 2 * len(lengths) + 3
    history = torch.randint(-1, 99092, (slots, depth), generator=generator).to(DEVICE)
    expected_history = history.clone()
    multipliers = MULTIPLIERS[:, :gram].contiguous()
    expected = twins.engram_rows(folded, expected_history, rows, PAD, multipliers, primes)
    assert_same_bits(engram_rows(folded, history, rows, PAD, multipliers, primes), expected)
    assert_same_bits(history, expected_history, "history")
    assert (expected >= 0).all() and (expected < primes.flatten(1).sum(1)[:, None, None]).all()


def test_rows_do_not_depend_on_the_others():
    lengths = [1, 5, 2]
    history = torch.randint(-1, 99092, (8, 5), device=DEVICE)
    rows, primes, folded = _rows(lengths, [4, 9, 0], 3), _primes(2, 4, 8), _folded(11)
    full = engram_rows(folded, history.clone(), rows, PAD, MULTIPLIERS, primes)
    alone = _rows([5], [9])
    alone.slots = alone.slots + 2
    part = engram_rows(folded[1:6].contiguous(), history, alone, PAD, MULTIPLIERS, primes)
    assert_same_bits(part, full[:, 1:6])


def _table(rows, width, pinned=False):
    generator = torch.Generator().manual_seed(4)
    payload = torch.randn(rows, width, generator=generator).to(torch.float8_e4m3fn)
    scale = torch.randint(110, 135, (rows, width // 32), generator=generator, dtype=torch.uint8)
    if pinned:
        return _stored(payload.pin_memory(), scale.pin_memory())
    return _stored(payload.to(DEVICE), scale.to(DEVICE))


@pytest.mark.parametrize(
    ("batch", "columns", "width", "limit"),
    [(1, 1, 32, 0), (7, 3, 64, 0), (5, 24, 96, 2), (3, 2, 256, 0)]
    + [(1000, 24, 256, 0), (1000, 24, 256, 33)] * ON_GPU,
)
@pytest.mark.parametrize("pinned", [False] + [True] * ON_GPU)
def test_read_rows_are_exact(batch, columns, width, limit, pinned):
    table = _table(517, width, pinned)
    ids = torch.randint(0, 517, (batch, columns), device=DEVICE)
    result = engram_read(table, ids, max_programs=limit)
    assert_same_bits(result, twins.engram_read(table, ids))
    wide = twins.engram_read(table, ids, dtype=torch.float64)
    assert torch.equal(result.double(), wide)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_plain_tables_are_read_too(dtype):
    table = _stored(_random(40, 24, dtype=dtype), None, "plain")
    ids = torch.randint(0, 40, (5, 3), device=DEVICE)
    assert_same_bits(engram_read(table, ids), table.payload[ids].bfloat16().view(5, 72))


def test_a_nan_scale_makes_nan():
    table = _table(9, 64)
    table.scale[4, 1] = 255
    result = engram_read(table, torch.tensor([[3, 4]], device=DEVICE))
    assert result[0, 96:].isnan().all() and not result[0, :96].isnan().any()


@pytest.mark.skipif(not ON_GPU, reason="needs 4 GB of device memory")
def test_rows_past_four_gigabytes_are_read():
    rows = 17_000_000
    payload = torch.zeros(rows, 256, dtype=torch.uint8, device=DEVICE)
    payload[-1] = torch.arange(256, device=DEVICE) & 0x77
    scale = torch.full((rows, 8), 127, dtype=torch.uint8, device=DEVICE)
    table = _stored(payload.view(torch.float8_e4m3fn), scale)
    result = engram_read(table, torch.tensor([[rows - 1, 0]], device=DEVICE))
    assert torch.equal(result[0, :256].float(), payload[-1].view(torch.float8_e4m3fn).float())
    assert (result[0, 256:] == 0).all()


def _gate_inputs(rows, count, size, seed=0):
    return (
        _random(rows, count, size, seed=seed),
        _random(rows, (count + 1) * size, seed=seed + 1),
        _random(count, size, seed=seed + 2),
        _random(count, size, seed=seed + 3),
    )


@pytest.mark.parametrize(
    ("rows", "count", "size"), [(5, 4, 64), (3, 2, 33), (2, 4, 1030)] + [(129, 4, 5120)] * ON_GPU
)
@pytest.mark.parametrize("images", [False, True])
def test_gate_adds_the_value_within_one_rounding(rows, count, size, images):
    inputs = _gate_inputs(rows, count, size)
    is_image = torch.arange(rows, device=DEVICE) % 3 == 1 if images else None
    result = engram_gate(*inputs, 1e-20, is_image)
    truth = twins.engram_gate(*(t.double() for t in inputs), 1e-20, is_image)
    error = (result.double() - truth).abs()
    assert (error <= truth.abs() * 2.0**-8 + 1e-5).all()
    assert relative_error(twins.engram_gate(*inputs, 1e-20, is_image), truth) < 0.005
    if is_image is not None:
        assert_same_bits(result[is_image], inputs[0][is_image])


def test_the_sign_of_a_score_opens_or_closes_the_gate():
    ones = torch.ones(1, 2, 64, dtype=torch.bfloat16, device=DEVICE)
    kv = torch.ones(1, 192, dtype=torch.bfloat16, device=DEVICE)
    kv[0, 64:128] = -1
    weight = torch.ones(2, 64, dtype=torch.bfloat16, device=DEVICE)
    result = engram_gate(ones, kv, weight, weight, 1e-20, None)
    # The scores are 8 and -8.
    expected = 1 + torch.sigmoid(torch.tensor([8.0**0.5, -(8.0**0.5)], device=DEVICE))
    assert torch.equal(result[0, :, 0], expected.bfloat16())


def test_a_row_of_the_gate_does_not_depend_on_the_others():
    streams, kv, *weights = _gate_inputs(ROWS[-1], 4, 64)
    full = engram_gate(streams, kv, *weights, 1e-20, None)
    for n in ROWS:
        assert_same_bits(engram_gate(streams[-n:], kv[-n:], *weights, 1e-20, None), full[-n:])
    streams[1, 0, 3] = float("nan")
    result = engram_gate(streams, kv, *weights, 1e-20, None)
    assert result[1, 0].isnan().all()
    assert_same_bits(result[1, 1:], full[1, 1:])
    assert_same_bits(result[2:], full[2:])


def test_no_rows_give_empty_results():
    assert engram_gate(*_gate_inputs(0, 4, 64), 1e-20, None).shape == (0, 4, 64)
    none = torch.empty(0, 3, dtype=torch.int64, device=DEVICE)
    assert engram_read(_table(9, 64), none).shape == (0, 192)
    history = torch.full((2, 3), 7, device=DEVICE)
    rows = _rows([], [])
    out = engram_rows(none[:, 0], history, rows, PAD, MULTIPLIERS, _primes(2, 4, 8))
    assert out.shape == (2, 0, 24) and (history == 7).all()


def test_engram_refuses_what_it_cannot_take():
    table, ids = _table(9, 64), torch.zeros(1, 2, dtype=torch.int64, device=DEVICE)
    with pytest.raises(KernelInputError, match=r"`row_ids` is torch\.int32"):
        engram_read(table, ids.int())
    with pytest.raises(KernelInputError, match=r"table.format.*fp8_tile"):
        engram_read(_stored(table.payload, table.scale, "fp8_tile"), ids)
    streams, kv, *weights = _gate_inputs(2, 4, 64)
    with pytest.raises(KernelInputError, match="`kv`"):
        engram_gate(streams, kv[:, :256].contiguous(), *weights, 1e-20, None)
    shallow = torch.zeros(4, 2, dtype=torch.int64, device=DEVICE)
    deep, rows = torch.zeros(4, 3, dtype=torch.int64, device=DEVICE), _rows([2], [0])
    rows.slots = rows.slots.int()
    with pytest.raises(KernelInputError, match=r"`rows\.slots` is torch\.int32"):
        engram_rows(ids[0], deep, rows, PAD, MULTIPLIERS, _primes(2, 4, 8))
    with pytest.raises(KernelInputError, match="depth of 3 or more"):
        engram_rows(ids[0], shallow, _rows([2], [0]), PAD, MULTIPLIERS, _primes(2, 4, 8))
