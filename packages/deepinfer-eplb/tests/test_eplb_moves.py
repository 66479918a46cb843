"""The difference of two maps: complete, thrifty, balanced, and what it says of itself."""

from __future__ import annotations

from collections import Counter
from itertools import product

import numpy as np
import pytest
from numpy.typing import NDArray

from deepinfer_eplb import Planner
from deepinfer_eplb.errors import PlanInputError
from deepinfer_eplb.files import StoredMap
from deepinfer_eplb.maps import Layout, num_arrivals
from deepinfer_eplb.moves import Change, Moves, difference, reason_to_drop, rounds

Map = NDArray[np.int32]


def random_map(rng: np.random.Generator, layers: int, experts: int, layout: Layout) -> Map:
    """A whole map: every expert somewhere, no rank with one twice unless it is alone."""
    active, per_rank = layout.active, layout.slots_per_rank
    found = np.full((layers, layout.num_ranks, per_rank), -1, np.int32)
    for layer in range(layers):
        held: list[list[int]] = [[] for _ in active]
        for expert in rng.permutation(experts).tolist():
            free = [each for each in held if len(each) < per_rank]
            free[int(rng.integers(len(free)))].append(expert)
        for rank, each in zip(active, held, strict=True):
            rest = np.setdiff1d(np.arange(experts), each) if len(active) > 1 else experts
            each += rng.choice(rest, per_rank - len(each), replace=len(active) == 1).tolist()
            found[layer, rank] = rng.permutation(each)
    return found.reshape(layers, -1)


def cases(number: int, seed: int) -> list[tuple[Map, Map, Layout]]:
    """Pairs of maps; in some the new one, the old one or both leave ranks out."""
    rng = np.random.default_rng(seed)
    found = []
    while len(found) < number:
        ranks, per_rank = int(rng.choice([1, 2, 4, 8])), int(rng.integers(1, 7))
        nodes = int(rng.choice([each for each in (1, 2, 4) if ranks % each == 0]))
        layouts = []
        for _ in range(2):
            left_out = rng.random() < 0.4
            excluded = rng.permutation(ranks)[: int(rng.integers(ranks)) if left_out else 0]
            layouts.append(Layout(ranks, nodes, per_rank, tuple(excluded.tolist())))
        room = min(len(layout.active) for layout in layouts) * per_rank
        # More slots on a rank than experts are for a rank alone.
        alone = all(len(layout.active) == 1 for layout in layouts)
        least = 1 if alone else per_rank
        experts = int(rng.integers(least, room + 1))
        old, new = (random_map(rng, 2, experts, layout) for layout in layouts)
        found.append((old, new, layouts[1]))
    return found


CASES = cases(300, 8)


def ranks_of(slots: NDArray[np.integer], layout: Layout) -> NDArray[np.integer]:
    return slots // layout.slots_per_rank


def is_applied(old: Map, moves: Moves) -> bool:
    """Whether copying by the moves gives the new map, but for lost experts."""
    new = moves.physical_to_logical
    there = moves.source >= 0
    moved = np.take_along_axis(old, np.maximum(moves.source, 0), 1)
    lost = {tuple(pair) for pair in np.argwhere((new >= 0) & ~there).tolist()}
    named = {
        (layer, slot)
        for layer, expert in moves.lost
        for slot in np.flatnonzero(new[layer] == expert).tolist()
    }
    return bool((moved == new)[there].all()) and not there[new < 0].any() and lost == named


def test_copies_lead_from_the_old_map_to_the_new_one() -> None:
    for old, new, layout in CASES:
        assert is_applied(old, difference(old, new, layout))


def test_the_check_of_copies_sees_one_wrong_source() -> None:
    old, new, layout = next(each for each in CASES if each[1].shape[1] > 8)
    moves = difference(old, new, layout)
    layer, slot = np.argwhere(moves.source >= 0)[0]
    moves.source[layer, slot] = np.flatnonzero(old[layer] != new[layer, slot])[0]
    assert not is_applied(old, moves)


def test_no_difference_moves_nothing() -> None:
    for _, new, layout in CASES:
        moves = difference(new, new, layout)
        assert moves.is_empty
        assert not moves.lost
        assert moves.count(Change.KEPT).tolist() == (new >= 0).sum(1).tolist()
        assert [len(moves.transfers(layer)) for layer in range(2)] == [0, 0]


def test_changes_say_where_content_comes_from() -> None:
    for old, new, layout in CASES:
        moves = difference(old, new, layout)
        slots = np.broadcast_to(np.arange(new.shape[1]), new.shape)
        home = ranks_of(slots, layout)
        away = ranks_of(moves.source, layout)
        assert ((moves.change == Change.KEPT) == ((moves.source == slots) & (new >= 0))).all()
        assert ((moves.change == Change.EMPTY) == (new < 0)).all()
        assert (home != away)[moves.change == Change.RECEIVED].all()
        assert (moves.source < 0)[moves.change == Change.LOADED].all()
        # A local copy without a source on the rank copies what another slot of the rank gets.
        for layer, slot in np.argwhere((moves.change == Change.LOCAL) & (home != away)).tolist():
            same = (home[layer] == home[layer, slot]) & (new[layer] == new[layer, slot])
            assert (moves.change[layer][same] >= Change.RECEIVED).sum() == 1


def test_rank_receives_an_expert_once_and_only_what_it_lacks() -> None:
    for old, new, layout in CASES:
        moves = difference(old, new, layout)
        arrivals = moves.count(Change.RECEIVED) + moves.count(Change.LOADED)
        assert arrivals.tolist() == num_arrivals(new, old, layout.num_ranks).tolist()
        for layer in range(2):
            slots = moves.transfers(layer)[:, 1]
            pairs = list(zip(ranks_of(slots, layout), new[layer, slots], strict=True))
            assert len(pairs) == len(set(pairs))


def test_sources_share_an_expert_evenly_and_excluded_ranks_send_nothing() -> None:
    for old, new, layout in CASES:
        moves = difference(old, new, layout)
        for layer in range(2):
            received = moves.change[layer] == Change.RECEIVED
            for expert in set(new[layer][received].tolist()):
                senders = ranks_of(moves.source[layer][received & (new[layer] == expert)], layout)
                having = set(ranks_of(np.flatnonzero(old[layer] == expert), layout).tolist())
                able = having - set(layout.excluded)
                assert set(senders.tolist()) <= able
                assert max(Counter(senders.tolist()).values()) <= -(-len(senders) // len(able))


def test_values_with_a_map_are_taken_for_their_maps() -> None:
    loads = np.arange(1.0, 13.0)[None]
    first = Planner().plan(loads, ranks=3, nodes=1, slots_per_rank=5)
    live = StoredMap(first.physical_to_logical, 12, first.layout)
    second = Planner().plan(
        loads[:, ::-1], ranks=3, nodes=1, slots_per_rank=5, prev=first.physical_to_logical
    )
    want = difference(first.physical_to_logical, second.physical_to_logical, first.layout)
    found = difference(live, second, first.layout)
    assert not want.is_empty
    assert found.source.tolist() == want.source.tolist()
    assert found.physical_to_logical.tolist() == want.physical_to_logical.tolist()


def test_own_node_is_asked_first() -> None:
    # Expert 0 is on ranks 0 and 2, one of each node, and rank 3 needs it.
    old = np.array([[0, 1, 1, 2, 0, 3, 3, 2]])
    new = np.array([[0, 1, 1, 2, 0, 3, 3, 0]])
    assert difference(old, new, Layout(4, 2, 2)).transfers(0).tolist() == [[4, 7]]
    assert difference(old, new, Layout(4, 1, 2)).transfers(0).tolist() == [[0, 7]]


def test_receiver_of_another_node_does_not_take_a_neighbours_place() -> None:
    # Ranks 2 and 4 of nodes 1 and 2 have expert 0. Rank 0 comes first and may ask either; rank 3 is
    # of node 1.
    old = np.array([[1, 2, 3, 4, 0, 1, 2, 3, 0, 4, 5, 1]])
    new = np.array([[0, 2, 3, 4, 0, 1, 0, 3, 0, 4, 5, 1]])
    assert difference(old, new, Layout(6, 3, 2)).transfers(0).tolist() == [[8, 0], [4, 6]]


def test_sends_are_levelled_over_the_layer() -> None:
    # Ranks 0 and 1 both hold experts 0 and 1; ranks 2, 3 each need one of them.
    layout = Layout(4, 1, 3)
    old = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 5, 3, 4, 5]])
    new = np.array([[0, 1, 2, 0, 1, 2, 3, 4, 0, 3, 5, 1]])
    assert difference(old, new, layout).num_sent.tolist() == [[1, 1, 0, 0]]


def test_experts_with_one_holder_are_given_out_before_others() -> None:
    # Only rank 0 has expert 8; expert 0 is on ranks 0 and 1, so rank 1 is left to send it.
    layout = Layout(4, 1, 3)
    old = np.array([[0, 8, 2, 0, 1, 3, 4, 5, 6, 7, 6, 5]])
    new = np.array([[0, 8, 2, 0, 1, 3, 4, 0, 6, 7, 8, 5]])
    assert difference(old, new, layout).transfers(0).tolist() == [[3, 7], [1, 10]]


def test_second_slot_of_a_rank_copies_what_the_first_one_receives() -> None:
    layout = Layout(2, 1, 2, excluded=(1,))
    moves = difference(np.array([[-1, -1, 0, -1]]), np.array([[0, 0, -1, -1]]), layout, 7, ())
    assert moves.source.tolist() == [[2, 2, -1, -1]]
    assert moves.change.tolist() == [[Change.RECEIVED, Change.LOCAL, 0, 0]]


def test_drained_rank_sends_and_a_dead_one_does_not() -> None:
    layout = Layout(3, 1, 2, excluded=(2,))
    old = np.array([[0, 1, 1, 2, 2, 3]])
    new = np.array([[0, 3, 1, 2, -1, -1]])
    dead = difference(old, new, layout)
    assert dead.lost == ((0, 3),)
    assert dead.change[0].tolist() == [1, 4, 1, 1, 0, 0]
    assert dead.transfers(0).tolist() == [[-1, 1]]
    drained = difference(old, new, layout, cannot_send=())
    assert drained.lost == ()
    assert drained.transfers(0).tolist() == [[5, 1]]
    assert drained.num_sent.tolist() == [[0, 0, 1]]


def test_same_maps_give_the_same_moves() -> None:
    for old, new, layout in CASES[:30]:
        first, second = (difference(old.astype(np.int64), new, layout) for _ in range(2))
        assert first.source.tolist() == second.source.tolist()
        assert first.lost == second.lost


@pytest.mark.parametrize("most", [1, 2, 5])
def test_rounds_keep_to_the_limit_and_lose_nothing(most: int) -> None:
    for old, new, layout in CASES:
        transfers = difference(old, new, layout).transfers(0)
        found = rounds(transfers, layout, most)
        together = sorted(map(tuple, (row for part in found for row in part.tolist())))
        assert together == sorted(map(tuple, transfers.tolist()))
        busiest = 0
        for side, part in product((0, 1), found):
            used = part[:, side]
            number = Counter(ranks_of(used[used >= 0], layout).tolist())
            assert max(number.values(), default=0) <= most
        for side in (0, 1):
            used = transfers[:, side]
            number = Counter(ranks_of(used[used >= 0], layout).tolist())
            busiest = max(busiest, *number.values(), 0)
        assert -(-busiest // most) <= len(found) <= max(2 * -(-busiest // most) - 1, 0)


def test_report_adds_up() -> None:
    layout = Layout(3, 1, 2, excluded=(2,))
    old = np.array([[0, 1, 1, 2, 2, 3], [0, 1, 2, 3, 0, 1]])
    new = np.array([[1, 3, 0, 2, -1, -1], [0, 1, 2, 3, -1, -1]])
    lines = difference(old, new, layout, expert_bytes=3 * 2**20).report().splitlines()
    assert [line.split() for line in lines[1:4]] == [
        ["0", "1", "1", "1", "1", "1", "3.0", "MiB", "1", "3.0", "MiB"],
        ["1", "4", "0", "0", "0", "0", "-", "0", "-"],
        ["all", "5", "1", "1", "1", "1", "3.0", "MiB", "1", "3.0", "MiB"],
    ]
    assert lines[4] == "To be read from the checkpoint: expert 3 of layer 0."


def test_a_plan_is_dropped_for_a_reason() -> None:
    assert reason_to_drop(1.2, 1.05, 1000, 0.02, 1.0) is None
    assert "below `min_ratio` 1.03" in (reason_to_drop(1.029, 1.0, 1000, 0.02, 0.0) or "")
    assert reason_to_drop(1.029, 1.0, 1000, 0.02, 0.0, min_ratio=1.02) is None
    assert "would be 1.250 and is 1.200" in (reason_to_drop(1.2, 1.25, 1000, 0.02, 0.0) or "")
    # 1000 steps of 20 ms, an eighth saved: 2.5 s.
    assert reason_to_drop(1.2, 1.05, 1000, 0.02, 2.49) is None
    assert "would gain 2.5 s" in (reason_to_drop(1.2, 1.05, 1000, 0.02, 2.51) or "")
    assert reason_to_drop(float("nan"), 1.3, 1000, 0.02, 1e9) is None


def test_bad_input_is_named() -> None:
    layout = Layout(2, 1, 2)
    good = np.array([[0, 1, 1, 2]])
    with pytest.raises(PlanInputError, match=r"`new`\[0, 1\] is -1"):
        difference(good, np.array([[0, -1, 1, 2]]), layout)
    with pytest.raises(PlanInputError, match="`new` loses expert 1 of layer 0"):
        difference(good, np.array([[0, 2, 0, 2]]), layout)
    with pytest.raises(PlanInputError, match=r"`old` is int64 of shape \[1, 3\]; needed"):
        difference(good[:, :3], good, layout)
    with pytest.raises(PlanInputError, match=r"`old`\[0, 2\] is 3; allowed: 0 to 2"):
        difference(np.array([[0, 1, 3, 2]]), good, layout)
    with pytest.raises(PlanInputError, match=r"`cannot_send` names rank 2; allowed: 0 to 1"):
        difference(good, good, layout, cannot_send=(2,))
    with pytest.raises(PlanInputError, match="`expert_bytes` is -1"):
        difference(good, good, layout, expert_bytes=-1)
    with pytest.raises(PlanInputError, match="`experts_per_round` is 0"):
        rounds(np.zeros((0, 2), np.int64), layout, 0)
