"""Index scores and selection against their twins."""

from dataclasses import dataclass, replace

import pytest
import torch

from deepinfer_kernels_cuda.attention import index_scores as scoring
from deepinfer_kernels_cuda.attention import index_select as selecting
from deepinfer_kernels_cuda.attention import select as choosing
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.reference import indexer as twin
from deepinfer_kernels_cuda.reference.entries import decode_entry, encode_entry
from deepinfer_kernels_cuda.testing.compare import assert_same_bits
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU
from deepinfer_kernels_cuda.values import BlockStore


@dataclass(frozen=True)
class Step:
    positions: torch.Tensor
    sequence: torch.Tensor
    slots: torch.Tensor
    sequence_slots: torch.Tensor


@dataclass(frozen=True)
class Inputs:
    queries: torch.Tensor
    weights: torch.Tensor
    keys: BlockStore
    rows: Step

    def part(self, chosen):
        chosen = torch.tensor(chosen, dtype=torch.int64, device=DEVICE)
        rows = self.rows
        step = Step(
            rows.positions[chosen],
            rows.sequence[chosen],
            rows.slots[chosen],
            rows.sequence_slots,
        )
        return Inputs(self.queries[chosen], self.weights[chosen], self.keys, step)


def _inputs(
    seed,
    last,
    num_rows,
    ratio=1,
    heads=32,
    channels=128,
    per_block=16,
    max_blocks=None,
    spread=3,
    padding=0,
):
    """Sequence s ends at position last[s] with num_rows[s] rows; keys beyond it are NaN.

    Scales differ by few powers of two and weights are powers of two, so that sums over channels and
    heads are exact in any order.
    """
    gen = torch.Generator().manual_seed(seed)
    counts = [(p + 1) // ratio for p in last]
    blocks = max_blocks or max(1, max(-(-c // per_block) for c in counts))
    slots = len(last) + 1
    table = torch.randperm(slots * blocks, generator=gen).reshape(slots, blocks).int()

    def values(*shape):
        power = torch.randint(-spread, 1, (*shape[:-1], shape[-1] // 32, 1), generator=gen)
        x = torch.randn(*shape[:-1], shape[-1] // 32, 32, generator=gen) * torch.exp2(power.float())
        return x.flatten(-2)

    data = torch.full((slots * blocks + 1, per_block, channels // 2 + channels // 32), 255)
    data = data.to(torch.uint8)
    for s, count in enumerate(counts):
        packed = encode_entry("index", values(count, channels))
        place = torch.arange(count)
        data[table[s, place // per_block].long(), place % per_block] = packed
    total = sum(num_rows)
    queries = values(total, heads, channels)
    queries = decode_entry("index", encode_entry("index", queries), channels).bfloat16()
    weights = torch.exp2(torch.randint(-2, 2, (total, heads), generator=gen).float())
    weights = weights * (torch.randint(0, 2, (total, heads), generator=gen) * 2 - 1)
    positions = torch.cat(
        [torch.arange(p + 1 - n, p + 1) for p, n in zip(last, num_rows, strict=True)]
    )
    sequence = torch.repeat_interleave(torch.arange(len(last)), torch.tensor(num_rows))
    if padding:
        positions = torch.cat([positions, torch.zeros(padding, dtype=torch.int64)])
        sequence = torch.cat([sequence, torch.full((padding,), -1)])
        queries = torch.cat([queries, torch.full((padding, heads, channels), torch.nan).bfloat16()])
        weights = torch.cat([weights, torch.ones(padding, heads)])
    slots_of = torch.where(sequence < 0, slots - 1, sequence)
    step = Step(positions, sequence, slots_of, torch.arange(len(last)))
    step = Step(*(t.to(DEVICE) for t in vars(step).values()))
    store = BlockStore(data.to(DEVICE), table.to(DEVICE), ratio)
    return Inputs(queries.to(DEVICE), weights.bfloat16().to(DEVICE), store, step)


def _select(module, inputs, top_k, candidates=None, block=8, publish=0):
    return module.index_select(
        inputs.queries,
        inputs.weights,
        inputs.keys,
        inputs.rows,
        top_k=top_k,
        candidates=candidates,
        candidate_block=block,
        publish=publish,
    )


def _same(inputs, top_k, **options):
    found = _select(selecting, inputs, top_k, **options)
    expected = _select(twin, inputs, top_k, **options)
    assert_same_bits(found.picks, expected.picks, "picks")
    if expected.candidates is None:
        assert found.candidates is None
    else:
        assert_same_bits(found.candidates, expected.candidates, "candidates")
    return found


SHAPES = [
    # last positions, rows of each, ratio, options of _inputs, top_k, block, publish
    ([0, 1, 200], [1, 1, 1], 1, {}, 16, 8, 0),
    ([63, 64, 127, 128], [1, 1, 1, 1], 1, {"per_block": 64}, 24, 8, 4),
    ([300], [5], 2, {"per_block": 128, "padding": 2}, 16, 8, 0),
    ([90, 40], [6, 3], 1, {"heads": 4, "channels": 32, "per_block": 4}, 6, 4, 3),
    ([150, 31, 260], [5, 2, 3], 1, {"per_block": 128, "max_blocks": 9}, 13, 8, 5),
    ([70], [3], 2, {"heads": 5, "channels": 64, "per_block": 8}, 7, 2, 3),
    # More units than are kept, the last one half scored: a tile is of 64 keys.
    ([313], [1], 1, {"heads": 2, "channels": 32, "per_block": 64}, 2, 8, 2),
    ([191], [8], 1, {"heads": 2, "channels": 32, "per_block": 128}, 1, 8, 0),
]
if ON_GPU:
    SHAPES += [
        ([4095], [1], 1, {"per_block": 128}, 512, 8, 2048),
        ([70000, 3, 1500], [1, 1, 1], 1, {"per_block": 128}, 512, 8, 2048),
        ([70000, 3, 1500], [1, 1, 1], 2, {"per_block": 64}, 512, 8, 0),
        ([20000, 16383, 16384, 530], [6, 2, 4, 3], 1, {"per_block": 64}, 512, 8, 2048),
        ([9000], [131], 1, {"per_block": 128, "padding": 5}, 512, 8, 2048),
        ([262143], [2], 1, {"per_block": 128}, 512, 8, 2048),
        ([300000], [1], 1, {"per_block": 256, "max_blocks": 4096}, 512, 8, 2048),
    ]


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}r{s[2]}")
def test_selection_equals_the_twin(shape):
    last, num_rows, ratio, options, top_k, block, publish = shape
    inputs = _inputs(len(last), last, num_rows, ratio, **options)
    _same(inputs, top_k, block=block, publish=publish)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"{s[0]}x{s[1]}r{s[2]}")
def test_only_candidate_blocks_compete(shape):
    last, num_rows, ratio, options, top_k, block, publish = shape
    inputs = _inputs(7, last, num_rows, ratio, **options)
    other = _inputs(8, last, num_rows, ratio, **options)
    candidates = _select(twin, other, top_k, block=block, publish=publish or 3).candidates
    found = _same(inputs, top_k, candidates=candidates, block=block)
    inside = (found.picks.unsqueeze(2) // block == candidates.unsqueeze(1)).any(2)
    assert bool((inside | (found.picks < 0)).all())


def test_twin_scores_in_the_three_steps_of_release():
    queries = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [-1.0, 0.0]]]).bfloat16()
    weights = torch.tensor([[1.0, 3.0, 5.0]]).bfloat16()
    keys = torch.tensor([[257.0, 1.25], [-1.0, 0.0]])
    # 257 rounds to 256 before its weight; 256 + 3.75 rounds to 260 at the end.
    assert twin.index_scores(queries, weights, keys).tolist() == [[260.0, 5.0]]
    assert twin.index_scores(queries.float(), weights.float(), keys).tolist() == [[260.75, 5.0]]


def _ordered(scores):
    """Keys of finite bfloat16 scores, as the kernels order them."""
    bits = (scores + 0.0).view(torch.int16).int() & 0xFFFF
    return torch.where(bits >= 0x8000, 0xFFFF - bits, bits | 0x8000)


def _unsigned(keys):
    return keys.int() & 0xFFFF


def test_scores_are_those_of_the_twin_within_a_rounding():
    inputs = _inputs(1, [331], [5], per_block=128, spread=6)
    rows, count = inputs.rows, 332
    weights = torch.randn(5, 32, generator=torch.Generator().manual_seed(5)).bfloat16().to(DEVICE)
    plan = scoring.score_plan(5, 1, 128, False, DEVICE)
    found = scoring.index_scores(
        inputs.queries, weights, inputs.keys, rows, None, 8, plan, slice(0, 5)
    )
    known = twin.read_index_keys(inputs.keys, rows.slots[0], count, 128)
    expected = _ordered(twin.index_scores(inputs.queries, weights, known))
    exact = twin.index_scores(inputs.queries.double(), weights.double(), known.double())
    for row in range(5):
        seen = int(rows.positions[row]) + 1
        keys = _unsigned(found.entry[row, :seen])
        # Sums of 32 terms in two orders: rounding may fall to either side.
        different = (keys != expected[row, :seen]).float().mean()
        assert float(different) < 0.02
        bits = torch.where(keys >= 0x8000, keys - 0x8000, 0xFFFF - keys).short()
        value = bits.view(torch.bfloat16).double()
        size = (exact[row].abs().mean()).item()
        assert float((value - exact[row, :seen]).abs().max()) < 0.05 * size + 2**-7 * float(
            exact[row].abs().max()
        )
        assert not bool(_unsigned(found.entry[row, seen:count]).any())
        blocks = torch.nn.functional.pad(keys, (0, -seen % 8)).unflatten(0, (-1, 8)).amax(1)
        assert torch.equal(_unsigned(found.block[row, : len(blocks)]), blocks)


PLANS = [
    scoring.ScorePlan(1, 128, 4, registers=128),
    scoring.ScorePlan(1, 64, 4, rounds=1),
    scoring.ScorePlan(2, 128, 4, rounds=2),
    scoring.ScorePlan(4, 64, 4, resident=1),
    scoring.ScorePlan(8, 128, 8, resident=1, rounds=1),
    scoring.ScorePlan(2, 64, 4, joined=True),
]


@pytest.mark.parametrize("plan", PLANS[1:] if ON_GPU else PLANS[3::2], ids=str)
def test_keys_do_not_depend_on_the_plan(plan):
    last, num_rows = ([150, 700], [3, 11]) if ON_GPU else ([40, 270], [1, 3])
    inputs = _inputs(2, last, num_rows, per_block=128, spread=9)
    count = inputs.queries.shape[0]
    gen = torch.Generator().manual_seed(6)
    weights = torch.randn(count, 32, generator=gen).bfloat16().to(DEVICE)
    args = (inputs.queries, weights, inputs.keys, inputs.rows, None, 8)
    # One device joins channels or does not; the two sum them in different orders.
    first = replace(PLANS[0], joined=plan.joined)
    one = scoring.index_scores(*args, first, slice(0, count))
    other = scoring.index_scores(*args, plan, slice(0, count))
    for row in range(count):
        seen = int(inputs.rows.positions[row]) + 1
        assert torch.equal(one.entry[row, :seen], other.entry[row, :seen])
        assert torch.equal(one.block[row, : seen // 8], other.block[row, : seen // 8])


@pytest.mark.parametrize("publish", [0, 5] if ON_GPU else [5])
def test_a_row_alone_picks_what_it_picks_among_others(publish):
    last, num_rows = ([5000, 40, 2000], [7, 1, 140]) if ON_GPU else ([70, 20, 40], [3, 1, 2])
    top_k = 64 if ON_GPU else 9
    inputs = _inputs(3, last, num_rows, per_block=32, padding=1)
    together = _select(selecting, inputs, top_k, publish=publish)
    total = sum(num_rows)
    for chosen in ([0], [total - 1], [0, 1, 2], list(range(num_rows[0] - 1, total))):
        alone = _select(selecting, inputs.part(chosen), top_k, publish=publish)
        assert_same_bits(alone.picks, together.picks[chosen], f"picks of {chosen}")
        if publish:
            assert_same_bits(alone.candidates, together.candidates[chosen], f"blocks of {chosen}")


@pytest.mark.parametrize("listed", [False, True])
def test_chunks_of_rows_pick_what_one_launch_picks(monkeypatch, listed):
    inputs = _inputs(4, [140, 44], [3, 1], per_block=32)
    candidates = None
    if listed:
        candidates = _select(twin, _inputs(5, [140, 44], [3, 1], per_block=32), 9, publish=4)
        candidates = candidates.candidates
    together = _select(selecting, inputs, 9, candidates=candidates, publish=0 if listed else 3)
    monkeypatch.setattr(selecting, "WORKSPACE_BYTES", 1)
    apart = _select(selecting, inputs, 9, candidates=candidates, publish=0 if listed else 3)
    assert_same_bits(apart.picks, together.picks)
    if not listed:
        assert_same_bits(apart.candidates, together.candidates)


def test_equal_scores_keep_the_lowest_entries():
    inputs = _inputs(5, [220, 30], [2, 1], per_block=16)
    nothing = Inputs(inputs.queries, torch.zeros_like(inputs.weights), inputs.keys, inputs.rows)
    found = _same(nothing, 20, publish=4)
    assert found.picks[1].tolist() == list(range(20))
    # three lowest blocks and the newest
    assert found.candidates[1].tolist() == [0, 1, 2, 27]
    negative = Inputs(inputs.queries, -inputs.weights.abs(), inputs.keys, inputs.rows)
    _same(negative, 20, publish=4)


def test_nan_and_infinity_stay_in_their_row():
    inputs = _inputs(6, [70], [4], per_block=16)
    queries, weights = inputs.queries.clone(), inputs.weights.clone()
    clean = _select(selecting, inputs, 16, publish=3)
    queries[1] = torch.nan
    queries[2, 3] = torch.inf
    weights[2, 0] = -torch.inf
    weights[2, 1] = torch.nan
    found = _select(selecting, Inputs(queries, weights, inputs.keys, inputs.rows), 16, publish=3)
    assert_same_bits(found.picks[[0, 3]], clean.picks[[0, 3]])
    assert_same_bits(found.candidates[[0, 3]], clean.candidates[[0, 3]])
    assert found.picks[1].tolist() == list(range(16)), "NaN counts as 0"
    assert bool(((found.picks[2] >= 0) & (found.picks[2] < 70)).all())


def test_few_visible_entries_are_all_picked_and_padding_picks_none():
    inputs = _inputs(7, [0, 12, 5], [1, 3, 1], ratio=2, per_block=8, padding=3)
    found = _same(inputs, 6, publish=2)
    assert found.picks[0].tolist() == [-1] * 6
    assert found.picks[3].tolist() == [0, 1, 2, 3, 4, 5]
    assert found.picks[4].tolist() == [0, 1, 2, -1, -1, -1]
    assert found.picks[5:].eq(-1).all() and found.candidates[5:].eq(-1).all()


def test_unused_table_columns_and_slots_are_not_read_past_the_store():
    inputs = _inputs(8, [100], [2], per_block=16)
    table = torch.nn.functional.pad(inputs.keys.table, (0, 5), value=1 << 30)
    table[1] = 1 << 30
    keys = BlockStore(inputs.keys.data, table, 1)
    wide = Inputs(inputs.queries, inputs.weights, keys, inputs.rows)
    expected = _select(selecting, inputs, 12, publish=3)
    found = _select(selecting, wide, 12, publish=3)
    assert_same_bits(found.picks, expected.picks)
    assert_same_bits(found.candidates, expected.candidates)


def test_no_rows_give_empty_results():
    inputs = _inputs(9, [20], [1]).part([])
    found = _select(selecting, inputs, 8, publish=4)
    assert found.picks.shape == (0, 8) and found.candidates.shape == (0, 4)


@pytest.mark.parametrize("count", [1, 3, 5])
def test_a_step_of_padding_only_picks_nothing(count):
    inputs = _inputs(9, [20], [1], padding=count).part(range(1, count + 1))
    step = Step(**(vars(inputs.rows) | {"sequence_slots": inputs.rows.sequence_slots[:0]}))
    inputs = Inputs(inputs.queries, inputs.weights, inputs.keys, step)
    found = _same(inputs, 8, publish=4)
    assert found.picks.eq(-1).all() and found.candidates.eq(-1).all()
    listed = torch.zeros(count, 3, dtype=torch.int32, device=DEVICE)
    assert _same(inputs, 8, candidates=listed).picks.eq(-1).all()


def test_no_candidate_blocks_leave_nothing_to_pick():
    inputs = _inputs(9, [20], [2])
    none = torch.zeros(2, 0, dtype=torch.int32, device=DEVICE)
    assert _same(inputs, 8, candidates=none).picks.eq(-1).all()


def test_as_many_equal_keys_as_are_ranked_at_a_time():
    places, block, top_k = choosing.MOST_RANKED, 64, 512
    assert max(choosing.select_sizes(places, top_k, block, False)) == places
    same = torch.full((1, places), 0x4000, dtype=torch.int16, device=DEVICE)
    same[0, 7::5] = 0x4001
    best = same.unflatten(1, (-1, block)).amax(2)
    newest = torch.tensor([places - 1], device=DEVICE)
    out = torch.empty(1, top_k, dtype=torch.int32, device=DEVICE)
    for keys, first in ((same, range(7, 7 + 5 * top_k, 5)), (same * 0 + 0x4000, range(top_k))):
        choosing.select(
            scoring.Scores(keys, best), newest * 0, newest, ratio=1, top_k=top_k, candidates=None,
            candidate_block=block, blocks=False, out=out,
        )  # fmt: skip
        assert out[0].tolist() == list(first)


def test_programs_are_shared_out_as_by_trying_every_number():
    def tried(num_tiles, most, slots, rounds):
        numbers = range(1, max(1, min(most, rounds * slots // num_tiles)) + 1)
        shares = [n * num_tiles / (-(-n * num_tiles // slots) * slots) for n in numbers]
        return max(
            n for n, share in zip(numbers, shares, strict=True) if share > max(shares) - 0.02
        )

    for num_tiles in (1, 2, 7, 60, 131, 132, 133, 400, 4000):
        for most in (1, 5, 64, 1024):
            for slots, rounds in ((3, 1), (396, 4), (528, 1), (528, 4), (396, 6)):
                args = (num_tiles, most, slots, rounds)
                assert scoring._splits(*args) == tried(*args), args


def test_blackwell_gets_the_joined_product(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    for rows in (1, 4, 30):
        for listed in (False, True):
            plan = scoring.score_plan(rows, 2, 128, listed, torch.device("cuda"))
            assert plan.joined, plan


def _long(keys, columns):
    return BlockStore(keys.data, keys.table[:, :1].repeat(1, columns), keys.ratio)


def _shifted(keys):
    moved = torch.nn.functional.pad(keys.data.flatten(), (1, 0))[1:].view(keys.data.shape)
    return BlockStore(moved, keys.table, keys.ratio)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        ({"queries": lambda x: x.float()}, {}, "`queries` is torch.float32"),
        ({"weights": lambda x: x[:, :3]}, {}, "`weights` is"),
        ({"queries": lambda x: x[..., :30].contiguous()}, {}, "a multiple of 32"),
        ({}, {"block": 6}, "a power of two up to 64"),
        ({}, {"top_k": 0}, "`top_k` is 0"),
        ({}, {"publish": -1}, "`publish` is -1"),
        ({}, {"top_k": 8192}, "`top_k` is 8192.*32768 keys"),
        ({"keys": lambda x: _long(x, 1 << 17)}, {"publish": 8192}, "`publish` is 8192.*32768 keys"),
        ({"keys": lambda x: _long(x, 1 << 18)}, {}, "`keys.table` is 4194304"),
        ({}, {"candidates": torch.zeros(2, 1 << 19).int().to(DEVICE)}, "`candidates` is 4194304"),
        ({"keys": lambda x: _shifted(x)}, {}, "aligned to 4 bytes"),
    ],
)
def test_wrong_arguments_are_named(change, options, message):
    inputs = _inputs(10, [20], [2])
    changed = {name: turn(getattr(inputs, name)) for name, turn in change.items()}
    inputs = Inputs(**(vars(inputs) | changed))
    with pytest.raises(KernelInputError, match=message):
        _select(selecting, inputs, **({"top_k": 8} | options))


def test_float_inputs_belong_to_the_twin():
    """Numerics `ideal` and `cache`: float32 queries, over packed or plain entries."""
    inputs = _inputs(11, [77], [3], per_block=16)
    plain = decode_entry("index", inputs.keys.data, 128)
    wide = Inputs(inputs.queries.float(), inputs.weights.float(), inputs.keys, inputs.rows)
    apart = Inputs(wide.queries, wide.weights, BlockStore(plain, inputs.keys.table, 1), inputs.rows)
    packed = _select(twin, wide, 9, publish=3)
    assert_same_bits(_select(twin, apart, 9, publish=3).picks, packed.picks)
    assert packed.picks.dtype == torch.int32
