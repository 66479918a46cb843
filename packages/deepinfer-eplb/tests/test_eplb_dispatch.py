"""Which replica a row gets: shares, replay, the step's quotas over ranks, bad input."""

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import pytest
from scipy.stats import chi2

from deepinfer_eplb.balance import even_split
from deepinfer_eplb.dispatch import bounds_of, hash_of, step_quotas, to_physical
from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.lp import lp_split
from deepinfer_eplb.maps import Layout, check_map, lookup_of, num_replicas_of, rank_loads
from deepinfer_eplb.plan import Plan

WORD = 2**64


@dataclass(frozen=True)
class Placed:
    """The fields of a plan that dispatch reads."""

    layout: Layout
    physical_to_logical: np.ndarray
    logical_to_physical: np.ndarray
    num_replicas: np.ndarray
    split: np.ndarray | None = None


def placed(slots: object, num_experts: int, layout: Layout, split: object = None) -> Placed:
    checked = check_map(np.array(slots), num_experts, layout)
    return Placed(
        layout,
        checked,
        lookup_of(checked, num_experts),
        num_replicas_of(checked, num_experts),
        None if split is None else np.array(split),
    )


# Expert 0 on three ranks, expert 1 on two, expert 2 on one; layer 1 is another permutation.
LAYOUT = Layout(3, 1, 2)
MAPS = placed([[0, 1, 0, 1, 0, 2], [2, 1, 0, 1, 1, 0]], 3, LAYOUT)
SPLIT = [[0.5, 0.1, 0.2, 0.9, 0.3, 1.0], [1.0, 0.25, 1.0, 0.0, 0.75, 0.0]]


def rows(count: int, seed: int = 0, k: int = 2) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids, tokens, positions: rows of one request after the other, no place twice."""
    rng = np.random.default_rng(seed)
    ids = np.argsort(rng.random((count, 3)), 1)[:, :k]
    return ids, rng.integers(0, 129280, count), np.arange(count)


def fits(found: np.ndarray, expected: np.ndarray) -> bool:
    """Chi-square at the level of one in 10^4; cells of chance 0 must be empty."""
    some = expected > 0
    if found[~some].any():
        return False
    statistic = ((found[some] - expected[some]) ** 2 / expected[some]).sum()
    return bool(statistic < chi2.isf(1e-4, max(1, some.sum() - 1)))


# ---- the hash -----------------------------------------------------------------------------------


def by_the_text(token_id: int, position: int, layer: int) -> int:
    x = token_id % 2**32 + position % 2**32 * 2**32
    x = (x + (layer + 1) * 0xA54FF53A5F1D36F1) % WORD
    x = (x ^ (x >> 32)) * 0x6A09E667F3BCC909 % WORD
    x = (x ^ (x >> 29)) * 0xBB67AE8584CAA73B % WORD
    return x ^ (x >> 32)


def test_the_hash_is_that_of_the_text() -> None:
    rng = np.random.default_rng(1)
    tokens = np.concatenate([[0, 1, 2**32 - 1, -1, 2**40 + 3], rng.integers(0, 2**31, 50)])
    positions = np.concatenate([[0, 2**32 - 1, 1, -1, 5], rng.integers(0, 2**31, 50)])
    for layer in (0, 1, 60, 10**6):
        want = [by_the_text(int(t), int(p), layer) for t, p in zip(tokens, positions, strict=True)]
        assert hash_of(tokens, positions, layer).tolist() == want
        assert hash_of(tokens.astype(np.int32), positions, layer).tolist()[5:] == want[5:]
    assert int(hash_of(7, 9, 3)) == by_the_text(7, 9, 3)


GOLDEN = {
    (0, 0, 0): "0xb1249e8b3b7c8570",
    (1, 0, 0): "0x737c25ee92f66487",
    (0, 1, 0): "0xf3d07218b1622bc8",
    (0, 0, 1): "0x6ac55b11eb9c1c4f",
    (128815, 1048575, 39): "0x8d0dc9ea1e6d0388",
}


def test_golden_hashes() -> None:
    found = [hex(int(hash_of(t, p, layer))) for t, p, layer in GOLDEN]
    assert found == list(GOLDEN.values())


def test_every_input_bit_turns_every_output_bit_half_the_time() -> None:
    _, tokens, positions = rows(4000)
    base = hash_of(tokens, positions, 3)
    for bit in range(0, 32, 3):
        for other in (
            hash_of(tokens ^ (1 << bit), positions, 3),
            hash_of(tokens, positions ^ (1 << bit), 3),
        ):
            turned = ((base ^ other)[:, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)
            assert np.abs(turned.mean(0) - 0.5).max() < 0.045  # 5.7 standard deviations


# ---- shares -------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("mode", ["even", "quota"])
@pytest.mark.parametrize("sequence", ["tokens at random", "one token again and again"])
def test_every_replica_gets_its_share(layer: int, mode: str, sequence: str) -> None:
    ids, tokens, positions = rows(20000)
    if sequence == "one token again and again":
        tokens = np.full_like(tokens, 11)
    maps = replace(MAPS, split=np.array(SPLIT)) if mode == "quota" else MAPS
    physical = to_physical(ids, layer, maps, mode, token_ids=tokens, positions=positions)
    assert physical.dtype == np.int32 and physical.shape == ids.shape
    slots = maps.physical_to_logical[layer]
    assert np.array_equal(slots[physical], ids)
    hits = np.bincount(ids.ravel(), minlength=3)
    split = even_split(slots[None], 3)[0] if mode == "even" else np.array(SPLIT[layer])
    for expert in range(3):
        own = slots == expert
        found = np.bincount(physical.ravel(), minlength=6)[own]
        assert fits(found, hits[expert] * split[own])


def test_layers_choose_independently() -> None:
    both = placed([[0, 1, 0, 1]] * 2, 2, Layout(2, 1, 2))
    ids, tokens, positions = np.zeros((20000, 1), int), *rows(20000)[1:]
    a, b = (
        to_physical(ids, layer, both, "even", token_ids=tokens, positions=positions)[:, 0] // 2
        for layer in (0, 1)
    )
    assert fits(np.bincount(a * 2 + b, minlength=4), np.full(4, 5000.0))


def test_a_quota_without_a_split_is_even() -> None:
    ids, tokens, positions = rows(20000)
    given = {"token_ids": tokens, "positions": positions}
    even = replace(MAPS, split=even_split(MAPS.physical_to_logical, 3))
    assert np.array_equal(
        to_physical(ids, 0, MAPS, "quota", **given), to_physical(ids, 0, even, "quota", **given)
    )


def test_bounds_are_running_sums_of_shares() -> None:
    assert bounds_of(MAPS, 0).tolist() == [
        [1431655765, 2863311531, 2**32],
        [2**31, 2**32, 2**32],
        [2**32, 2**32, 2**32],
    ]
    # Shares that rounding leaves short of 1 leave no hash without a replica.
    maps = placed([[0, 1, 0, 1, 0, 2]], 3, LAYOUT, [[0.5, 0.5, 0.25, 0.49, 0.24, 0.9]])
    assert bounds_of(maps, 0)[:, -1].tolist() == [2**32] * 3
    # a first, a middle and a last replica without a share
    maps = placed([[0, 1, 0, 1, 0, 2]], 3, LAYOUT, [[0.0, 1.0, 1.0, 0.0, 0.0, 1.0]])
    assert bounds_of(maps, 0).tolist() == [[0, 2**32, 2**32], [2**32] * 3, [2**32] * 3]
    physical = to_physical(
        np.zeros((5000, 1), int),
        0,
        maps,
        "quota",
        token_ids=np.arange(5000),
        positions=rows(5000)[2],
    )
    assert (physical == 2).all()


# ---- replay -------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["even", "quota"])
def test_a_row_gets_the_same_replica_in_every_batch(mode: str) -> None:
    ids, tokens, positions = rows(300)
    maps = replace(MAPS, split=np.array(SPLIT))
    whole = to_physical(ids, 1, maps, mode, token_ids=tokens, positions=positions)
    rng = np.random.default_rng(2)
    for size in (1, 7, 300):
        some = rng.permutation(300)[:size]
        again = to_physical(
            ids[some], 1, maps, mode, token_ids=tokens[some], positions=positions[some]
        )
        assert np.array_equal(again, whole[some])
    # a choice's place in its row does not matter either
    turned = to_physical(ids[:, ::-1], 1, maps, mode, token_ids=tokens, positions=positions)
    assert np.array_equal(turned[:, ::-1], whole)


@pytest.mark.parametrize("mode", ["even", "quota", "step"])
def test_padding_stays_padding(mode: str) -> None:
    ids, tokens, positions = rows(50)
    ids[::3] = -1
    ids[1, 0] = -1
    counts = np.bincount(ids[ids >= 0], minlength=3)
    step = {"counts": counts, "offsets": np.zeros(3, int)} if mode == "step" else {}
    given = {"token_ids": tokens, "positions": positions, **step}
    physical = to_physical(ids, 0, MAPS, mode, **given)
    assert np.array_equal(physical == -1, ids == -1)
    given["token_ids"] = np.where(ids[:, 0] < 0, 5, tokens)
    rest = ids[:, 0] >= 0
    assert np.array_equal(to_physical(ids, 0, MAPS, mode, **given)[rest], physical[rest])


@pytest.mark.parametrize("mode", ["even", "quota", "step"])
def test_no_rows_work(mode: str) -> None:
    step = {"counts": [5, 0, 1], "offsets": [5, 0, 0]} if mode == "step" else {}
    none = np.zeros(0, int)
    ids = np.zeros((0, 2), int)
    found = to_physical(ids, 0, MAPS, mode, token_ids=none, positions=none, **step)
    assert found.shape == (0, 2) and found.dtype == np.int32


def test_slots_of_excluded_ranks_are_not_used() -> None:
    maps = placed([[0, 1, -1, -1, 0, 2]], 3, Layout(3, 1, 2, (1,)))
    ids, tokens, positions = rows(1000)
    counts = np.bincount(ids.ravel(), minlength=3)
    for mode, step in (
        ("even", {}),
        ("quota", {}),
        ("step", {"counts": counts, "offsets": [0, 0, 0]}),
    ):
        found = to_physical(ids, 0, maps, mode, token_ids=tokens, positions=positions, **step)
        assert np.unique(found).tolist() == [0, 1, 4, 5]


def test_a_plan_is_accepted_as_it_is() -> None:
    ids, tokens, positions = rows(100)
    plan = Plan(
        physical_to_logical=MAPS.physical_to_logical,
        num_experts=3,
        layout=LAYOUT,
        split=np.array(SPLIT),
        previous=None,
        loads=np.ones((2, 3)),
    )
    maps = replace(MAPS, split=np.array(SPLIT))
    given = {"token_ids": tokens, "positions": positions}
    for mode in ("even", "quota"):
        assert np.array_equal(
            to_physical(ids, 1, plan, mode, **given), to_physical(ids, 1, maps, mode, **given)
        )


# ---- quotas of a step ---------------------------------------------------------------------------


def random_maps(rng: np.random.Generator, num_experts: int, layout: Layout) -> Placed:
    """Distinct experts on each rank at random, none lost."""
    while True:
        slots = np.concatenate(
            [rng.permutation(num_experts)[: layout.slots_per_rank] for _ in range(layout.num_ranks)]
        )
        if len(np.unique(slots)) == num_experts:
            return placed([slots], num_experts, layout)


def best(slots: np.ndarray, counts: np.ndarray, layout: Layout) -> float:
    """The lightest that the heaviest rank can be, with fractions of hits."""
    by_rank = slots.reshape(layout.num_ranks, -1)
    homes = [set(np.flatnonzero((by_rank == e).any(1))) for e in range(len(counts))]
    return max(
        sum(n for n, home in zip(counts, homes, strict=True) if home <= set(some)) / size
        for size in range(1, layout.num_ranks + 1)
        for some in combinations(range(layout.num_ranks), size)
    )


def test_the_slowest_rank_of_a_step_is_the_best_but_for_rounding() -> None:
    rng = np.random.default_rng(3)
    over = []
    for _ in range(60):
        layout = Layout(int(rng.integers(2, 5)), 1, int(rng.integers(2, 4)))
        most = layout.num_physical
        maps = random_maps(rng, int(rng.integers(layout.slots_per_rank, most // 2 + 2)), layout)
        counts = rng.poisson(rng.lognormal(4, 1, maps.num_replicas.shape[1]))
        quotas = step_quotas(maps, 0, counts)
        assert np.array_equal(quotas.sum(1), counts)
        ranks = np.zeros(layout.num_ranks, int)
        held = maps.logical_to_physical[0] >= 0
        assert not quotas[~held].any()
        np.add.at(ranks, maps.logical_to_physical[0][held] // layout.slots_per_rank, quotas[held])
        slots = maps.physical_to_logical
        lowest = best(slots[0], counts, layout)
        split = lp_split(slots, counts[None], layout)
        programme = rank_loads(slots, counts[None].astype(float), layout.num_ranks, split).max()
        assert programme == pytest.approx(lowest, rel=1e-6)
        assert ranks.max() >= lowest - 1e-9
        over.append((ranks.max() - layout.slots_per_rank) / lowest)
    # A few sweeps are not all of them: nearly all cases are within rounding, none is far off.
    assert np.mean(np.array(over) <= 1) > 0.9
    assert max(over) < 1.05


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_ranks_together_fill_the_quotas_to_the_last_hit(num_ranks: int) -> None:
    rng = np.random.default_rng(4)
    maps = random_maps(rng, 7, Layout(4, 1, 3))
    sizes = [0, 500, 1, 120][-num_ranks:]  # a rank without rows is one of four
    parts = [np.argsort(rng.random((n, 7)), 1)[:, :3] - (rng.random((n, 3)) < 0.1) for n in sizes]
    own = np.array([np.bincount(part[part >= 0], minlength=7) for part in parts])
    counts = own.sum(0)
    got = np.zeros(maps.layout.num_physical, int)
    for rank, part in enumerate(parts):
        found = to_physical(
            part,
            0,
            maps,
            "step",
            token_ids=np.zeros(len(part), int),
            positions=np.zeros(len(part), int),
            counts=counts.astype(np.int32),
            offsets=own[:rank].sum(0),
        )
        assert np.array_equal(found >= 0, part >= 0)
        assert np.array_equal(maps.physical_to_logical[0][found[found >= 0]], part[part >= 0])
        got += np.bincount(found[found >= 0], minlength=len(got))
    quotas = step_quotas(maps, 0, counts)
    held = maps.logical_to_physical[0] >= 0
    assert np.array_equal(got[maps.logical_to_physical[0][held]], quotas[held])


def test_hits_take_replicas_in_the_order_of_rows() -> None:
    maps = placed([[0, 1, 0, 2]], 3, Layout(2, 1, 2))
    # Of 6 hits of expert 0, rank 0 takes 2 (with 3 of expert 1: 5), rank 1 takes 4 (with 1: 5).
    ids = np.array([[0, 1], [-1, 0], [1, 0], [0, 2]])
    given = {"token_ids": np.zeros(4, int), "positions": np.zeros(4, int), "counts": [6, 3, 1]}
    assert step_quotas(maps, 0, [6, 3, 1]).tolist() == [[2, 4], [3, 0], [1, 0]]
    first = to_physical(ids, 0, maps, "step", offsets=[0, 0, 0], **given)
    assert first.tolist() == [[0, 1], [-1, 0], [1, 2], [2, 3]]
    later = to_physical(ids, 0, maps, "step", offsets=[1, 1, 0], **given)
    assert later.tolist() == [[0, 1], [-1, 2], [1, 2], [2, 3]]


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"mode": "random"}, SettingError, "`mode` is 'random'; allowed: 'even', 'quota', 'step'"),
        ({"layer": 2}, PlanInputError, "`layer` is 2; allowed: 0 to 1"),
        ({"layer": -1}, PlanInputError, "`layer` is -1"),
        ({"layer": True}, PlanInputError, "`layer` is True"),
        ({"topk_ids": [[3]]}, PlanInputError, r"`topk_ids` has 3 at \[0, 0\]; allowed: -1 to 2"),
        ({"topk_ids": [[-2]]}, PlanInputError, "`topk_ids` has -2"),
        ({"topk_ids": [[0.0]]}, PlanInputError, r"float64; needed: \[any, any\] integers"),
        ({"topk_ids": [0]}, PlanInputError, r"`topk_ids` is \[1\]"),
        ({"token_ids": [1, 2]}, PlanInputError, r"`token_ids` is \[2\] int64; needed: \[1\]"),
        ({"positions": [1.5]}, PlanInputError, r"`positions` is \[1\] float64"),
        ({"counts": [1, 1, 1]}, SettingError, "`counts` is given, but mode 'even' has no use"),
        ({"offsets": [1, 1, 1]}, SettingError, "`offsets` is given, but mode 'even' has no use"),
        ({"mode": "step"}, SettingError, "`counts` is None, but mode 'step' needs it"),
        ({"mode": "step", "counts": [1, 1, 1]}, SettingError, "`offsets` is None"),
    ],
)
def test_bad_input_is_refused(change: dict, error: type[Exception], message: str) -> None:
    given = {
        "topk_ids": [[0]],
        "layer": 0,
        "maps": MAPS,
        "mode": "even",
        "token_ids": [1],
        "positions": [1],
    }
    to_physical(**given)
    with pytest.raises(error, match=message):
        to_physical(**(given | change))


@pytest.mark.parametrize(
    ("counts", "offsets", "message"),
    [
        ([1, 1], [0, 0, 0], r"`counts` is \[2\] int64; needed: \[3\]"),
        ([1.0, 1, 1], [0, 0, 0], "float64"),
        ([1, -1, 1], [0, 0, 0], r"`counts` has -1 at \[1\]; allowed: 0 to"),
        ([1, 1, 1], [0, 0], r"`offsets` is \[2\]"),
        ([1, 1, 1], [0, -1, 0], r"`offsets` has -1 at \[1\]; allowed: 0 to 1099511627776"),
        ([1, 1, 1], np.array([0, 2**64 - 1, 0], np.uint64), r"`offsets` has 18446744073709551615"),
        ([1, 1, 1], [0, 0, 0], "Expert 0 of layer 0 has 2 hits on this rank and offset 0, but"),
        ([2, 1, 1], [1, 0, 0], "and offset 1, but `counts` says 2"),
        ([2, 1, 1], [0, 0, 2], "Expert 2 of layer 0 has 0 hits on this rank and offset 2"),
    ],
)
def test_counts_of_a_step_that_do_not_fit_are_refused(
    counts: list, offsets: object, message: str
) -> None:
    given = {"token_ids": [1, 1], "positions": [1, 2]}
    with pytest.raises(PlanInputError, match=message):
        to_physical([[0, 1], [0, -1]], 0, MAPS, "step", counts=counts, offsets=offsets, **given)


def test_bad_layers_and_words_of_the_parts_are_refused() -> None:
    for function in (lambda: bounds_of(MAPS, -1), lambda: step_quotas(MAPS, 2, [1, 1, 1])):
        with pytest.raises(PlanInputError, match="`layer` is"):
            function()
    for tokens, positions in (([1.0], [1]), ([1, 2], [1])):
        with pytest.raises(PlanInputError, match="needed: integers of one shape"):
            hash_of(tokens, positions, 0)
