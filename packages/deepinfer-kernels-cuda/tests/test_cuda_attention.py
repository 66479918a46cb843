"""Window rings, compressor, block entries and sparse attention against their twins."""

from types import SimpleNamespace

import pytest
import torch

from deepinfer_kernels_cuda.attention import attend as attend_module
from deepinfer_kernels_cuda.attention.attend import PLANS, attend
from deepinfer_kernels_cuda.attention.compressor import pool_groups
from deepinfer_kernels_cuda.attention.entries import write_entries
from deepinfer_kernels_cuda.attention.prepare import prepare_keys
from deepinfer_kernels_cuda.attention.window import write_window
from deepinfer_kernels_cuda.checks import check_value
from deepinfer_kernels_cuda.errors import KernelInputError
from deepinfer_kernels_cuda.norm.rms_norm import rms_norm
from deepinfer_kernels_cuda.norm.rotate import rotate
from deepinfer_kernels_cuda.quant.entries import entry_width
from deepinfer_kernels_cuda.reference import attention as twin
from deepinfer_kernels_cuda.reference import compressor as compressor_twin
from deepinfer_kernels_cuda.reference.entries import decode_entry, encode_entry, round_entry
from deepinfer_kernels_cuda.testing.compare import assert_same_bits, relative_error
from deepinfer_kernels_cuda.testing.device import DEVICE, ON_GPU

POISON = 0xFF  # a NaN as payload of a window, as a scale of every kind


def make_rows(sequences, *, window=128, floor=0, padding=0, block=False, write_floor=0):
    """Rows of sequences (slot, first position, number of rows), as a step lays them out."""
    position, sequence, slot = [], [], []
    for index, (place, first, count) in enumerate(sequences):
        position += range(first, first + count)
        sequence += [index] * count
        slot += [place] * count
    total = len(position)
    counts = torch.tensor([count for _, _, count in sequences], dtype=torch.int64)
    position = torch.tensor(position + [0] * padding, dtype=torch.int64)
    sequence = torch.tensor(sequence + [-1] * padding, dtype=torch.int64)
    first = torch.tensor([first for _, first, _ in sequences], dtype=torch.int64)
    window_first, window_last, window_len = position - (window - 1), position.clone(), window
    if block:
        most = max(count for _, _, count in sequences)
        index = sequence.clamp(min=0)
        window_first, window_last = first[index] - window, first[index] + counts[index] - 1
        window_len = window + most
    fields = {
        "positions": position,
        "sequence": sequence,
        "slots": torch.tensor(slot + [0] * padding, dtype=torch.int64),
        "row_start": torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))),
        "first_position": first,
        "sequence_slots": torch.tensor([s for s, _, _ in sequences], dtype=torch.int64),
        "window_first": window_first,
        "window_last": window_last,
        "window_floor": torch.full((total + padding,), floor, dtype=torch.int64),
        "writes": (sequence >= 0) & (position >= write_floor),
    }
    on_device = {name: tensor.to(DEVICE) for name, tensor in fields.items()}
    return SimpleNamespace(**on_device, window_len=window_len)


def pick_rows(rows, keep):
    """Queries `keep` of rows, to the keys of all rows."""
    taken = ("positions", "sequence", "slots", "window_first", "window_last", "window_floor",
             "writes")  # fmt: skip
    fields = dict(vars(rows))
    fields.update({name: fields[name][keep] for name in taken})
    return SimpleNamespace(**fields)


class Scene:
    """Caches of some slots with a history, and everything not in use poisoned."""

    def __init__(self, *, channels=64, heads=4, window=128, drafts=5, slots=4, history=300,
                 ratio=2, per_block=8, picks=96, seed=0):  # fmt: skip
        self.generator = torch.Generator().manual_seed(seed)
        self.channels, self.heads, self.window_size, self.num_picks = channels, heads, window, picks
        self.slots, self.history = slots, history
        ring_len = window + drafts
        self.past = self.normal(slots, history + 64, channels).bfloat16()
        self.past = round_entry("window", self.past)
        ring = torch.full((slots + 1, ring_len, entry_width("window", channels)), POISON)
        self.ring = ring.to(torch.uint8).to(DEVICE)
        blocks = slots * (history // ratio // per_block + 2)
        width = entry_width("compressed", channels)
        pool = torch.full((blocks + 1, per_block, width), POISON)
        self.pool = pool.to(torch.uint8).to(DEVICE)
        table = torch.randperm(blocks, generator=self.generator).reshape(slots, -1)
        table = torch.cat((table, torch.full((1, table.shape[1]), blocks)))
        self.table = table.to(torch.int32).to(DEVICE)
        self.ratio, self.per_block = ratio, per_block
        self.sink = self.normal(heads)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.generator).to(DEVICE)

    def fill(self, slot, length):
        """Leave a slot as after `length` positions."""
        ring_len = self.ring.shape[1]
        positions = torch.arange(max(0, length - ring_len), length, device=DEVICE)
        self.ring[slot, positions % ring_len] = encode_entry("window", self.past[slot, positions])
        entry = torch.arange(length // self.ratio, device=DEVICE)
        block = self.table[slot, entry // self.per_block].long()
        values = 3 * self.normal(len(entry), self.channels)
        self.pool[block, entry % self.per_block] = encode_entry("compressed", values)

    @property
    def window(self):
        return SimpleNamespace(data=self.ring)

    @property
    def entries(self):
        return SimpleNamespace(data=self.pool, table=self.table, ratio=self.ratio)

    def picks(self, rows):
        """Ascending picks of each row among the entries it may see, -1 behind them."""
        picks = torch.full((len(rows.positions), self.num_picks), -1, dtype=torch.int32)
        known = {}
        for i, (sequence, position) in enumerate(zip(rows.sequence, rows.positions, strict=True)):
            if sequence >= 0:
                key = int(rows.first_position[sequence])
                visible = min(int(position) + 1, key) // self.ratio
                chosen = torch.randperm(visible, generator=self.generator)[: self.num_picks]
                known[i] = chosen.sort().values.to(torch.int32)
                picks[i, : len(chosen)] = known[i]
        return picks.to(DEVICE)

    def step(self, rows):
        """(queries, keys) of rows."""
        count = len(rows.positions)
        queries = self.normal(count, self.heads, self.channels).bfloat16()
        keys = torch.full((count, self.channels), float("nan")).bfloat16().to(DEVICE)
        real = rows.sequence >= 0
        keys[real] = self.past[rows.slots[real], rows.positions[real]]
        return queries, keys


def attend_both(scene, rows, queries, keys, picks=None, key_rows=None):
    more = {} if picks is None else {"entries": scene.entries, "picks": picks}
    arguments = (queries, keys, scene.window, rows, scene.sink)
    scale = scene.channels**-0.5
    result = attend(*arguments, scale=scale, **more)
    expected = twin.attend(*arguments, scale=scale, **more)
    wide = (queries.double(), keys.double(), *arguments[2:])
    truth = twin.attend(*wide, scale=scale, **more)
    return result, expected, truth


def check(scene, rows, picks=None, queries=None, keys=None):
    if queries is None:
        queries, keys = scene.step(rows)
    result, expected, truth = attend_both(scene, rows, queries, keys, picks)
    assert result.isfinite().all()
    real = rows.sequence >= 0
    # Rounding the output to bfloat16 alone is 1.1e-3 of it; weights add about as much.
    assert relative_error(result[real], truth[real]) < 2.5e-3
    assert relative_error(result[real], expected[real]) < 1.5e-3
    return result


def test_window_alone_at_the_start_and_behind_a_full_ring():
    scene = Scene()
    for slot, length in enumerate((0, 5, 200, 300)):
        scene.fill(slot, length)
    rows = make_rows([(0, 0, 2), (1, 5, 1), (2, 200, 2), (3, 300, 1)], padding=2)
    result = check(scene, rows)
    assert (result[-2:] == 0).all()


@pytest.mark.parametrize("picks", [1, 64, 65])
def test_window_and_picks(picks):
    scene = Scene(picks=picks)
    for slot, length in enumerate((0, 7, 200, 300)):
        scene.fill(slot, length)
    rows = make_rows([(1, 7, 1), (2, 200, 2)], padding=1)
    check(scene, rows, scene.picks(rows))


@pytest.mark.parametrize("channels,heads,window", [(32, 4, 16), (96, 17, 16), (64, 65, 40)])
def test_sizes_that_are_no_powers_of_two(channels, heads, window):
    scene = Scene(channels=channels, heads=heads, window=window, picks=20)
    scene.fill(2, 130)
    scene.fill(1, 9)
    rows = make_rows([(2, 130, 2), (1, 9, 1)], window=window, padding=1)
    check(scene, rows, scene.picks(rows))
    check(scene, rows)


def test_draft_block_sees_all_of_itself():
    scene = Scene(window=128)
    scene.fill(0, 100)
    scene.fill(3, 280)
    rows = make_rows([(0, 100, 5), (3, 280, 2)], block=True)
    result = check(scene, rows)
    assert not torch.equal(result[0], result[4])


def test_nothing_below_the_floor_is_seen():
    scene = Scene(window=32)
    scene.fill(1, 150)
    rows = make_rows([(1, 150, 3)], window=32, floor=145)
    scene.ring[1, torch.arange(113, 145, device=DEVICE) % scene.ring.shape[1]] = POISON
    check(scene, rows)


def test_a_row_that_sees_nothing_yields_zero():
    scene = Scene(picks=8)
    rows = make_rows([(1, 40, 2)], floor=100)
    picks = torch.full((2, 8), -1, dtype=torch.int32, device=DEVICE)
    queries, keys = scene.step(rows)
    keys[:] = float("nan")
    result, expected, _ = attend_both(scene, rows, queries, keys, picks)
    assert (result == 0).all() and (expected == 0).all()


def test_chunk_rows_equal_the_same_rows_in_decode():
    # A chunk reads its own keys from the step, decode reads them back from the ring.
    scene = Scene(picks=64, window=32, drafts=5, channels=64)
    scene.fill(2, 120)
    count = 7 if ON_GPU else 3
    rows = make_rows([(2, 120, count)], window=32)
    picks = scene.picks(rows)
    queries, keys = scene.step(rows)
    scale = scene.channels**-0.5
    whole = attend(queries, keys, scene.window, rows, scene.sink, scale=scale,
                   entries=scene.entries, picks=picks)  # fmt: skip
    for i in range(count):
        one = make_rows([(2, 120 + i, 1)], window=32)
        part = (queries[i : i + 1], keys[i : i + 1], scene.window, one, scene.sink)
        alone = attend(*part, scale=scale, entries=scene.entries, picks=picks[i : i + 1])
        assert_same_bits(alone, whole[i : i + 1], f"row {i}")
        write_window(scene.window, keys[i : i + 1], one)


def test_bits_of_a_row_do_not_depend_on_other_rows(monkeypatch):
    scene = Scene(picks=64, window=64, slots=4, history=200)
    for slot in range(4):
        scene.fill(slot, 100 + 10 * slot)
    more = [(3, 130, 2), (1, 110, 60)] if ON_GPU else []
    rows = make_rows([(0, 100, 1), (2, 120, 2), *more], window=64, padding=2)
    picks = scene.picks(rows)
    queries, keys = scene.step(rows)

    def run(keep):
        return attend(
            queries[keep], keys, scene.window, pick_rows(rows, keep), scene.sink, scale=0.125,
            entries=scene.entries, picks=picks[keep],
        )  # fmt: skip

    everything = torch.arange(len(queries), device=DEVICE)
    monkeypatch.setattr(attend_module, "PLANS", attend_module.PLANS[-1:])
    whole = run(everything)
    if ON_GPU:
        assert_same_bits(run(everything.repeat(17)[:1000])[: len(queries)], whole, "many rows")
    monkeypatch.setattr(attend_module, "SLICE_ROWS", 3)
    assert_same_bits(run(everything), whole, "slices of 3")
    for plan in PLANS[:-1]:
        monkeypatch.setattr(attend_module, "PLANS", (plan,))
        assert_same_bits(run(everything), whole, str(plan))
    for i in everything.tolist()[:-2]:
        assert_same_bits(run(torch.tensor([i], device=DEVICE)), whole[i : i + 1], f"row {i} alone")


def test_a_bad_query_or_key_stays_in_the_rows_that_see_it():
    scene = Scene(picks=16, window=16)
    for slot in range(2):
        scene.fill(slot, 60)
    rows = make_rows([(0, 60, 2), (1, 60, 2)], window=16)
    picks = scene.picks(rows)
    queries, keys = scene.step(rows)
    arguments = {"scale": 0.1, "entries": scene.entries, "picks": picks}
    clean = attend(queries, keys, scene.window, rows, scene.sink, **arguments)
    queries[0, 1, 3] = float("nan")
    keys[3, 5] = float("inf")
    result = attend(queries, keys, scene.window, rows, scene.sink, **arguments)
    assert result[0, 1].isnan().all()
    assert torch.equal(result[0, [0, 2, 3]], clean[0, [0, 2, 3]])
    assert torch.equal(result[1:3], clean[1:3])
    assert result[3].isnan().any()


def test_queries_of_some_rows_see_keys_of_all():
    scene = Scene(window=32)
    scene.fill(1, 90)
    rows = make_rows([(1, 90, 9)], window=32)
    queries, keys = scene.step(rows)
    keep = torch.tensor([4, 8], device=DEVICE)
    whole = attend(queries, keys, scene.window, rows, scene.sink, scale=0.1)
    part = attend(queries[keep], keys, scene.window, pick_rows(rows, keep), scene.sink, scale=0.1)
    assert_same_bits(part, whole[keep])


@pytest.mark.parametrize("plan", PLANS[1:])
def test_rotating_back_inside_has_the_bits_of_rotating_behind(plan, monkeypatch):
    monkeypatch.setattr(attend_module, "PLANS", (plan,))
    for channels, pairs in ((96, 16), (512, 32)) if ON_GPU else ((96, 16),):
        scene = Scene(window=32, picks=40, channels=channels, heads=3)
        scene.fill(1, 90)
        rows = make_rows([(1, 90, 3)], window=32, padding=1)
        queries, keys = scene.step(rows)
        arguments = (queries, keys, scene.window, rows, scene.sink)
        more = {"scale": 0.1, "entries": scene.entries, "picks": scene.picks(rows)}
        far = rows.positions + 1_000_000
        inv_freq = (160000.0 ** -(torch.arange(pairs) / pairs)).to(DEVICE)
        inside = attend(*arguments, **more, inverse_rotary=(far, inv_freq))
        behind = rotate(attend(*arguments, **more), far, inv_freq, inverse=True)
        assert_same_bits(inside, behind)
        expected = twin.attend(*arguments, **more, inverse_rotary=(far, inv_freq))
        assert relative_error(inside, expected) < 2e-3


def test_attending_with_no_rows_launches_nothing():
    scene = Scene()
    rows = make_rows([])
    queries = torch.empty(0, 4, 64, dtype=torch.bfloat16, device=DEVICE)
    keys = torch.empty(0, 64, dtype=torch.bfloat16, device=DEVICE)
    assert attend(queries, keys, scene.window, rows, scene.sink, scale=1.0).shape == (0, 4, 64)


def test_wrong_arguments_are_named():
    scene = Scene()
    rows = make_rows([(0, 0, 1)])
    queries, keys = scene.step(rows)
    with pytest.raises(KernelInputError, match=r"`queries` is torch.float32"):
        attend(queries.float(), keys, scene.window, rows, scene.sink, scale=1.0)
    with pytest.raises(KernelInputError, match=r"`window.data`"):
        wrong = SimpleNamespace(data=scene.ring.float())
        attend(queries, keys, wrong, rows, scene.sink, scale=1.0)
    with pytest.raises(KernelInputError, match=r"`store.data` is torch.float32"):
        write_window(SimpleNamespace(data=scene.ring.float()), keys, rows)


def test_a_step_of_padding_alone_sees_and_writes_nothing():
    scene = Scene(picks=8, window=16, history=20)
    rows = make_rows([], window=16, padding=3)
    queries, keys = scene.step(rows)
    result, expected, _ = attend_both(scene, rows, queries, keys, scene.picks(rows))
    assert (result == 0).all() and (expected == 0).all()
    values = scene.normal(3, 64)
    frequencies = torch.ones(8, device=DEVICE)
    state = torch.full((5, 2, 2, 64), 7.0, device=DEVICE)
    before = scene.ring.clone(), scene.pool.clone()
    for write in (write_window, twin.write_window):
        write(scene.window, keys, rows)
    for prepare in (prepare_keys, twin.prepare_keys):
        weight = values[0].bfloat16()
        prepare(keys, weight, 1e-20, rows.positions, frequencies, window=scene.window, rows=rows)
    for write in (write_entries, twin.write_entries):
        write(scene.entries, keys, rows, "compressed")
    for pool in (pool_groups, compressor_twin.pool_groups):
        assert (pool(values, values, SimpleNamespace(data=state), rows) == 0).all()
    assert torch.equal(scene.ring, before[0]) and torch.equal(scene.pool, before[1])
    assert (state == 7).all()


def test_lines_of_a_block_table_may_lie_apart():
    scene = Scene(picks=8, window=16, history=40)
    scene.fill(1, 30)
    rows = make_rows([(1, 31, 1)], window=16)
    queries, keys = scene.step(rows)
    picks = scene.picks(rows)
    whole = attend_both(scene, rows, queries, keys, picks)[0]
    table, pool = scene.table, scene.pool.clone()
    write_entries(scene.entries, keys, rows, "compressed")
    written, scene.pool = scene.pool, pool.clone()
    scene.table = torch.nn.functional.pad(table, (0, 3), value=1 << 30)[:, : table.shape[1]]
    assert not scene.table.is_contiguous()
    assert_same_bits(attend_both(scene, rows, queries, keys, picks)[0], whole)
    write_entries(scene.entries, keys, rows, "compressed")
    assert_same_bits(scene.pool, written)
    assert not torch.equal(scene.pool, pool)


def _ops_of_rows(scene, rows):
    """Name -> (op of rows, fields it reads)."""
    queries, keys = scene.step(rows)
    values, weight = keys.float(), keys[0]
    state = SimpleNamespace(data=torch.zeros(5, 2, 2, scene.channels, device=DEVICE))
    frequencies = torch.ones(4, device=DEVICE)
    laid = ["sequence", "slots", "row_start", "first_position"]
    sight = ["window_first", "window_last", "window_floor"]
    return {
        "attend": (
            lambda r: attend(queries, keys, scene.window, r, scene.sink, scale=1.0),
            [*laid, *sight, "positions"],
        ),
        "write_window": (lambda r: write_window(scene.window, keys, r), [*laid, "positions"]),
        "pool_groups": (
            lambda r: pool_groups(values, values, state, r),
            [*laid, "positions", "writes"],
        ),
        "write_entries": (
            lambda r: write_entries(scene.entries, keys, r, "compressed"),
            ["sequence", "slots", "positions", "writes"],
        ),
        "prepare_keys": (
            lambda r: prepare_keys(
                keys, weight, 1e-6, rows.positions, frequencies, window=scene.window, rows=r
            ),
            laid,
        ),
    }


@pytest.mark.parametrize(
    "op", ["attend", "write_window", "pool_groups", "write_entries", "prepare_keys"]
)
def test_fields_of_rows_that_do_not_fit_are_named(op):
    scene = Scene(window=16, history=20)
    rows = make_rows([(1, 5, 2), (0, 3, 1)], window=16)
    run, fields = _ops_of_rows(scene, rows)[op]
    for name in fields:
        tensor = getattr(rows, name)
        for wrong in (torch.cat((tensor, tensor[:1])), tensor.int(), tensor.to("meta")):
            others = {**vars(rows), name: wrong}
            if name == "first_position" and len(wrong) != len(tensor):
                # the number of sequences is told by this one
                with pytest.raises(KernelInputError, match=r"`rows\.row_start` is .* \[3\]"):
                    run(SimpleNamespace(**others))
                continue
            with pytest.raises(KernelInputError, match=rf"`rows\.{name}` is .*needs .* on "):
                run(SimpleNamespace(**others))


def test_messages_say_what_to_do_and_print_no_tensor():
    scene = Scene(window=16, history=20)
    rows = make_rows([(1, 5, 1)], window=16)
    queries, keys = scene.step(rows)
    picks = scene.picks(rows)
    with pytest.raises(KernelInputError, match=r"`picks` alone is given\. Pass all of them"):
        attend(queries, keys, scene.window, rows, scene.sink, scale=1.0, picks=picks)
    with pytest.raises(KernelInputError, match=r"`rows` alone is given"):
        prepare_keys(keys, keys[0], 1e-6, rows.positions, torch.ones(4, device=DEVICE), rows=rows)
    with pytest.raises(KernelInputError, match=r"^`x` is a tensor \[3\]; the op needs y\.$"):
        check_value("x", torch.zeros(3, device=DEVICE), False, "y")


def test_stores_that_begin_at_an_odd_place_are_refused():
    scene = Scene(channels=512, heads=1, window=16, history=20, picks=8, slots=1)
    rows = make_rows([(0, 5, 1)], window=16)
    queries, keys = scene.step(rows)
    picks = scene.picks(rows)

    def moved(data):
        room = torch.zeros(data.numel() + 8, dtype=torch.uint8, device=DEVICE)
        return room[8:].view(data.shape)

    more = {"scale": 1.0, "entries": scene.entries, "picks": picks}
    odd = SimpleNamespace(data=moved(scene.ring))
    with pytest.raises(KernelInputError, match=r"`window.data` begins 8 bytes behind .* of 16"):
        attend(queries, keys, odd, rows, scene.sink, **more)
    more["entries"] = SimpleNamespace(data=moved(scene.pool), table=scene.table, ratio=2)
    with pytest.raises(KernelInputError, match=r"`entries.data` begins 8 bytes behind .* of 16"):
        attend(queries, keys, scene.window, rows, scene.sink, **more)
    room = torch.zeros(queries.numel() + 1, dtype=torch.bfloat16, device=DEVICE)
    with pytest.raises(KernelInputError, match=r"`queries` begins 2 bytes behind"):
        attend(room[1:].view(queries.shape), keys, scene.window, rows, scene.sink, scale=1.0)


@pytest.mark.parametrize("counts", [[1], [0, 3], [37], [4, 1, 64]])
def test_window_writes_have_the_bits_of_the_twin_and_touch_nothing_else(counts):
    for channels in (32, 96, 512) if len(counts) < 3 else (64,):
        ring_len = 21
        sequences = [(2 * i, 15 + i, count) for i, count in enumerate(counts)]
        rows = make_rows(sequences, padding=2)
        keys = torch.randn(len(rows.positions), channels).to(DEVICE).bfloat16()
        data = torch.full((6, ring_len, entry_width("window", channels)), 0xA5, device=DEVICE)
        mine, other = (SimpleNamespace(data=data.to(torch.uint8)) for _ in range(2))
        write_window(mine, keys, rows)
        twin.write_window(other, keys, rows)
        assert_same_bits(mine.data, other.data)
        assert (mine.data != 0xA5).any()


@pytest.mark.parametrize("channels,pairs", [(32, 8), (96, 16), (512, 32)])
def test_prepared_keys_are_normed_rotated_rounded_and_written(channels, pairs):
    rows = make_rows([(0, 15, 1), (2, 1_000_000, 4), (4, 3, 0), (3, 7, 30)], padding=2)
    generator = torch.Generator().manual_seed(channels)
    latent = 3 * torch.randn(len(rows.positions), channels, generator=generator)
    latent, weight = latent.bfloat16().to(DEVICE), torch.rand(channels).bfloat16().to(DEVICE)
    inv_freq = (10000.0 ** -(torch.arange(pairs) / pairs)).to(DEVICE)
    arguments = (latent, weight, 1e-20, rows.positions, inv_freq)
    data = torch.full((6, 21, entry_width("window", channels)), 0xA5).to(torch.uint8).to(DEVICE)
    mine, other = SimpleNamespace(data=data.clone()), SimpleNamespace(data=data.clone())
    keys = prepare_keys(*arguments, window=mine, rows=rows)
    alone = rotate(rms_norm(latent, weight, 1e-20), rows.positions, inv_freq)
    if channels == 512 or not ON_GPU:  # the norm of other sizes sums in another order
        assert_same_bits(keys, round_entry("window", alone))
        write_window(other, keys, rows)
        rings = (decode_entry("window", ring.data, channels) for ring in (mine, other))
        assert_same_bits(*rings)  # a rounded key may be packed with a smaller scale
    assert relative_error(keys, twin.prepare_keys(*arguments)) < 5e-3
    assert_same_bits(keys, prepare_keys(*arguments))
    one = [t[3:4] if t is latent or t is rows.positions else t for t in arguments]
    assert_same_bits(prepare_keys(*one), keys[3:4])


@pytest.mark.parametrize("kind,ratio", [("compressed", 1), ("compressed", 2), ("index", 2)])
def test_entry_writes_have_the_bits_of_the_twin_and_touch_nothing_else(kind, ratio):
    for channels, counts in ((64, [1, 5, 2]), (512 if kind == "compressed" else 128, [33])):
        sequences = [(i, 10 + i, count) for i, count in enumerate(counts)]
        rows = make_rows(sequences, padding=2, write_floor=12)
        entries = torch.randn(len(rows.positions), channels).to(DEVICE).bfloat16()
        table = torch.randperm(4 * 12).reshape(4, 12).to(torch.int32).to(DEVICE)
        width = entry_width(kind, channels)
        data = torch.full((4 * 12 + 1, 4, width), 0xA5, device=DEVICE).to(torch.uint8)
        mine, other = (
            SimpleNamespace(data=data.clone(), table=table, ratio=ratio) for _ in range(2)
        )
        write_entries(mine, entries, rows, kind)
        twin.write_entries(other, entries, rows, kind)
        assert_same_bits(mine.data, other.data)
        written = int((mine.data != 0xA5).any(-1).sum())
        assert written == int((rows.writes & ((rows.positions + 1) % ratio == 0)).sum())


@pytest.mark.parametrize("depth", [2, 7])
@pytest.mark.parametrize("counts", [[1], [2, 1, 3], [9, 0, 16], [40]])
def test_pooled_groups_and_their_carry(depth, counts):
    for channels, offset in ((32, 0), (48, 1), (512, 3)):
        sequences = [(i, i + offset, count) for i, count in enumerate(counts)]
        rows = make_rows(sequences, padding=2, write_floor=3)
        shape = (len(rows.positions), channels)
        values, gates = torch.randn(shape).to(DEVICE), 4 * torch.randn(shape).to(DEVICE)
        data = torch.randn(5, depth, 2, channels).to(DEVICE)
        data[:, :, :, 0] = float("nan")  # read by complete groups alone
        mine, other = SimpleNamespace(data=data.clone()), SimpleNamespace(data=data.clone())
        pooled = pool_groups(values, gates, mine, rows)
        expected = compressor_twin.pool_groups(values.double(), gates.double(), other, rows)
        assert relative_error(pooled, expected) < 1e-6
        assert torch.equal(mine.data.nan_to_num(9.0), other.data.nan_to_num(9.0))


def test_pooling_in_pieces_has_the_bits_of_pooling_at_once():
    channels, depth = 64, 7
    values, gates = torch.randn(13, channels).to(DEVICE), torch.randn(13, channels).to(DEVICE)
    zeros = torch.zeros(2, depth, 2, channels, device=DEVICE)
    whole = pool_groups(values, gates, SimpleNamespace(data=zeros.clone()),
                        make_rows([(0, 0, 13)]))  # fmt: skip
    for cut in (1, 2, 5, 8, 12):
        state = SimpleNamespace(data=zeros.clone())
        head = pool_groups(values[:cut], gates[:cut], state, make_rows([(0, 0, cut)]))
        tail = pool_groups(values[cut:], gates[cut:], state, make_rows([(0, cut, 13 - cut)]))
        assert_same_bits(torch.cat((head, tail)), whole, f"cut at {cut}")


def test_twin_of_plain_stores_rounds_nothing():
    scene = Scene(picks=8, window=16)
    scene.fill(0, 50)
    rows = make_rows([(0, 50, 2)], window=16)
    picks = scene.picks(rows)
    queries, keys = scene.step(rows)
    plain_ring = SimpleNamespace(data=decode_entry("window", scene.ring, scene.channels))
    plain_pool = SimpleNamespace(
        data=decode_entry("compressed", scene.pool, scene.channels), table=scene.table, ratio=2
    )
    wide = (queries.float(), keys.float(), plain_ring, rows, scene.sink)
    result = twin.attend(*wide, scale=0.1, entries=plain_pool, picks=picks)
    packed = twin.attend(queries.float(), keys.float(), scene.window, rows, scene.sink, scale=0.1,
                         entries=scene.entries, picks=picks)  # fmt: skip
    assert result.dtype == torch.float32 and relative_error(result, packed) < 1e-6
