"""Counting hits: what counts, pieces, windows, and numbers that are too large."""

import numpy as np
import pytest

from deepinfer_eplb.errors import PlanInputError, SettingError
from deepinfer_eplb.load import ExpertStats, sum_of_ranks

LARGEST = 2**63 - 1


def small(window_steps: int = 4, num_pieces: int = 2, num_windows: int = 2) -> ExpertStats:
    return ExpertStats(
        1, 3, window_steps=window_steps, num_pieces=num_pieces, num_windows=num_windows
    )


def run_steps(stats: ExpertStats, *hits: int) -> None:
    """One step for each number: so many hits of expert 1."""
    for count in hits:
        stats.add(np.array([[0, count, 0]]))
        stats.end_step()


def of_expert_1(pieces: np.ndarray) -> list[int]:
    return pieces[:, 0, 1].tolist()


# ---- what counts --------------------------------------------------------------------------------


def test_recorded_ids_are_counted_by_layer_and_expert() -> None:
    stats = ExpertStats(2, 4, window_steps=1, num_pieces=1)
    stats.record(0, [[0, 1], [1, 3]])
    stats.record(1, np.array([[2, 3]], np.int32))
    stats.record(1, np.array([[2, 0]], np.uint16))
    stats.end_step()
    window = stats.window()
    assert window.loads.tolist() == [[1, 2, 0, 1], [1, 0, 2, 1]]
    assert window.loads.dtype == window.pieces.dtype == np.int64


def test_padding_counts_nowhere() -> None:
    stats = ExpertStats(1, 4, window_steps=1, num_pieces=1)
    ids = np.array([[0, 1], [99, -7], [-1, 3], [-1, -1]])
    stats.record(0, ids, np.array([True, False, True, True]))
    stats.record(0, np.zeros((0, 2), np.int64))
    stats.record(0, ids, np.zeros(4, bool))
    stats.end_step()
    assert stats.window().loads.tolist() == [[1, 1, 0, 1]]


def test_counts_of_a_device_are_the_same_as_recorded_ids() -> None:
    rng = np.random.default_rng(1)
    by_id, by_count = (ExpertStats(3, 8, window_steps=4, num_pieces=2) for _ in range(2))
    for _ in range(4):
        ids = rng.integers(0, 8, (3, 5, 2))
        counts = np.zeros((3, 8), np.int32)
        for layer in range(3):
            by_id.record(layer, ids[layer])
            np.add.at(counts[layer], ids[layer].ravel(), 1)
        by_count.add(counts)
        by_id.end_step()
        by_count.end_step()
    assert np.array_equal(by_id.window().pieces, by_count.window().pieces)


def test_an_empty_step_advances_the_window_and_adds_nothing() -> None:
    stats = small()
    run_steps(stats, 5)
    stats.end_step()
    assert of_expert_1(stats.window().pieces) == [5]
    stats.end_step(2)
    assert of_expert_1(stats.window().pieces) == [5, 0]
    assert stats.window().num_steps == 4


def test_a_step_that_is_not_ended_or_dropped_counts_nowhere() -> None:
    stats = small()
    run_steps(stats, 1)
    stats.record(0, [[1]])
    stats.add([[0, 7, 0]])
    assert stats.window().num_steps == 0
    stats.drop_step()
    assert stats.steps_left_in_piece == 1
    run_steps(stats, 2)
    assert of_expert_1(stats.window().pieces) == [3]


# ---- pieces and windows -------------------------------------------------------------------------


def test_the_window_is_the_last_complete_pieces() -> None:
    stats = small()
    assert stats.window().pieces.shape == (0, 1, 3)
    assert stats.window().loads.tolist() == [[0, 0, 0]]
    seen = []
    for count in (1, 2, 4, 8, 16, 32, 64):
        run_steps(stats, count)
        seen.append((of_expert_1(stats.window().pieces), stats.window().num_steps))
    assert seen == [
        ([], 0),
        ([3], 2),
        ([3], 2),
        ([3, 12], 4),
        ([3, 12], 4),
        ([12, 48], 4),
        ([12, 48], 4),
    ]
    assert stats.window().loads.tolist() == [[0, 60, 0]]


def test_several_steps_at_once_are_the_same_as_one_by_one() -> None:
    once, each = (small(window_steps=8, num_pieces=2) for _ in range(2))
    for part in ([1, 2, 3], [4], [5, 6, 7, 8]):
        run_steps(each, *part)
        once.add([[0, sum(part), 0]])
        once.end_step(len(part))
    assert of_expert_1(once.window().pieces) == of_expert_1(each.window().pieces) == [10, 26]


def test_hits_of_steps_over_the_end_of_a_piece_are_refused_and_kept() -> None:
    stats = small()
    run_steps(stats, 1)
    stats.add([[0, 2, 0]])
    with pytest.raises(PlanInputError, match=r"`num_steps` is 2, but the piece under way lacks 1"):
        stats.end_step(2)
    stats.end_step(1)
    assert of_expert_1(stats.window().pieces) == [3]


def test_empty_steps_may_pass_any_number_of_pieces() -> None:
    stats = small()
    run_steps(stats, 1, 2, 4)
    stats.end_step(2)
    assert of_expert_1(stats.window().pieces) == [3, 4]
    assert stats.steps_left_in_piece == 1
    stats.end_step(10**15)
    assert of_expert_1(stats.window().pieces) == [0, 0]
    assert stats.steps_left_in_piece == 1
    run_steps(stats, 8)
    assert of_expert_1(stats.window().pieces) == [0, 8]
    run_steps(stats, 16)
    stats.end_step(5)
    assert of_expert_1(stats.window().pieces) == [0, 0]


def test_closed_windows_are_kept_oldest_first_and_no_hit_twice() -> None:
    stats = small(num_windows=2)
    assert stats.history().shape == (0, 1, 3)
    run_steps(stats, 1, 2, 4, 8, 16)
    closed = stats.close_window()
    assert of_expert_1(closed.pieces) == of_expert_1(stats.history()) == [3, 12]
    assert stats.window().num_steps == 0
    run_steps(stats, 32)  # completes the piece that was under way
    assert of_expert_1(stats.close_window().pieces) == [48]
    assert of_expert_1(stats.history()) == [3, 12, 48]
    run_steps(stats, *range(100, 106))
    stats.close_window()
    assert of_expert_1(stats.history()) == [48, 205, 209]


def test_steps_between_windows_are_in_none() -> None:
    stats = small(window_steps=2, num_pieces=2)
    for start in (0, 10):
        run_steps(stats, *range(start, start + 10))
        stats.close_window()
    assert of_expert_1(stats.history()) == [8, 9, 18, 19]


def test_a_window_does_not_change_by_what_is_counted_later() -> None:
    stats = small()
    run_steps(stats, 1, 2)
    window, closed = stats.window(), stats.close_window()
    run_steps(stats, 4, 8, 16, 32)
    assert of_expert_1(window.pieces) == of_expert_1(closed.pieces) == [3]
    with pytest.raises(ValueError, match="read-only"):
        window.pieces[0, 0, 1] = 9
    stats.history()[0] = 9
    assert of_expert_1(stats.history()) == [3]


def test_closing_before_a_piece_is_complete_is_refused() -> None:
    stats = small()
    run_steps(stats, 1)
    with pytest.raises(PlanInputError, match="1 of 2 steps were counted"):
        stats.close_window()


def test_random_steps_match_a_replay_from_a_list() -> None:
    rng = np.random.default_rng(2)
    stats = ExpertStats(2, 5, window_steps=12, num_pieces=3, num_windows=2)
    pieces: list[np.ndarray] = []
    open_pieces, kept, steps, now = 0, [], 0, np.zeros((2, 5), np.int64)
    for _ in range(400):
        hits = rng.integers(0, 9, (2, 5)) * rng.integers(0, 2)
        stats.add(hits.astype(np.int32))
        if rng.random() < 0.2:
            stats.drop_step()
            continue
        stats.end_step()
        now, steps = now + hits, steps + 1
        if steps % 4 == 0:
            pieces.append(now)
            open_pieces, now = open_pieces + 1, np.zeros((2, 5), np.int64)
        if open_pieces and rng.random() < 0.05:
            kept = [*kept, pieces[-min(open_pieces, 3) :]][-2:]
            open_pieces = 0
            stats.close_window()
        last = pieces[-min(open_pieces, 3) :] if open_pieces else []
        assert [*map(np.ndarray.tolist, stats.window().pieces)] == [*map(np.ndarray.tolist, last)]
        assert stats.window().num_steps == 4 * len(last)
    assert np.array_equal(stats.history(), [piece for window in kept for piece in window])


# ---- large numbers ------------------------------------------------------------------------------


def test_hits_pass_the_range_of_a_device_counter() -> None:
    stats = small(window_steps=4, num_pieces=2)
    run_steps(stats, *[2**31 - 1] * 4)
    assert stats.window().loads[0, 1] == 4 * (2**31 - 1)


def test_a_device_counter_that_wrapped_is_refused() -> None:
    stats = small(window_steps=1, num_pieces=1)
    wrapped = np.array([[0, 2**31 - 1, 0]], np.int32) + np.int32(1)
    with pytest.raises(PlanInputError, match=r"`counts`\[0, 1\] is -2147483648.*32 bits has wrap"):
        stats.add(wrapped)
    stats.end_step()
    assert not stats.window().loads.any()


def test_sums_beyond_int64_are_refused_and_leave_counts_as_they_were() -> None:
    stats = small(window_steps=2, num_pieces=1)
    run_steps(stats, LARGEST - 5)
    stats.add([[0, 5, 0]])
    with pytest.raises(PlanInputError, match=r"pass 2\^63 - 1"):
        stats.add([[0, LARGEST, 0]])
    stats.end_step()
    assert stats.window().loads[0, 1] == LARGEST
    with pytest.raises(PlanInputError, match=r"passes 2\^63 - 1"):
        stats.add(np.array([[0, 2**63, 0]], np.uint64))


def test_ranks_are_summed() -> None:
    parts = [np.full((2, 1, 3), rank, np.int32) for rank in range(4)]
    found = sum_of_ranks(parts)
    assert found.dtype == np.int64 and found.tolist() == np.full((2, 1, 3), 6).tolist()
    assert sum_of_ranks([[2**31, 1]] * 2).tolist() == [2**32, 2]
    with pytest.raises(PlanInputError, match=r"in all ranks pass 2\^63 - 1"):
        sum_of_ranks([[2**62], [2**62]])


# ---- bad input ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("window_steps", "num_pieces", "hint"),
    [
        (1000, 7, "give `window_steps` 1001, or `num_pieces` 5"),
        (3, 10, "give `window_steps` 10, or `num_pieces` 3"),
        (97, 10, "give `window_steps` 100, or `num_pieces` 1"),
    ],
)
def test_uneven_pieces_name_numbers_that_work(
    window_steps: int, num_pieces: int, hint: str
) -> None:
    with pytest.raises(SettingError, match=hint):
        small(window_steps, num_pieces)
    works = [int(word) for word in hint.replace(",", "").split() if word.isdigit()]
    small(works[0], num_pieces)
    small(window_steps, works[1])


@pytest.mark.parametrize(
    "name", ["num_layers", "num_experts", "window_steps", "num_pieces", "num_windows"]
)
def test_sizes_beyond_memory_are_refused_at_once(name: str) -> None:
    sizes = dict(num_layers=1, num_experts=1, window_steps=4, num_pieces=2, num_windows=1)
    if name == "window_steps":  # takes none
        assert ExpertStats(**(sizes | {name: 10**30})).steps_left_in_piece == 10**30 // 2
        return
    with pytest.raises(SettingError, match=r"GiB of counts; allowed: 1 GiB"):
        ExpertStats(**(sizes | {name: 10**30}))


@pytest.mark.parametrize("value", [0, -1, 2.0, True, "4"])
@pytest.mark.parametrize(
    "name", ["num_layers", "num_experts", "window_steps", "num_pieces", "num_windows"]
)
def test_sizes_that_are_no_counts_are_refused(name: str, value: object) -> None:
    sizes = dict(num_layers=1, num_experts=1, window_steps=4, num_pieces=2, num_windows=1)
    with pytest.raises(SettingError, match=f"`{name}` is {value!r}"):
        ExpertStats(**(sizes | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("layer", "ids", "valid", "message"),
    [
        (1, [[0]], None, "`layer` is 1; allowed: 0 to 0"),
        (-1, [[0]], None, "`layer` is -1"),
        (0, [0, 1], None, r"`topk_ids` is \[2\] int64"),
        (0, [[0.0]], None, "float64; needed"),
        (0, [[True]], None, "bool; needed"),
        (0, [[3]], None, "id 3; allowed: 0 to 2, and -1"),
        (0, [[-2]], None, "id -2"),
        (0, [[0], [1]], np.array([1, 0]), r"`valid_rows` is \[2\] int64"),
        (0, [[0], [1]], np.array([True]), r"`valid_rows` is \[1\] bool; needed: \[2\]"),
    ],
)
def test_bad_ids_are_refused(
    layer: int, ids: list[object], valid: np.ndarray | None, message: str
) -> None:
    stats = small(window_steps=1, num_pieces=1)
    with pytest.raises(PlanInputError, match=message):
        stats.record(layer, np.array(ids), valid)
    stats.end_step()
    assert not stats.window().loads.any()


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ([[1.0, 0.0, 0.0]], r"`counts` is \[1, 3\] float64"),
        ([[1, 2]], r"\[1, 2\] int64; needed: \[1, 3\]"),
        ([1, 2, 3], r"\[3\] int64; needed: \[1, 3\]"),
        ([[True, False, True]], "bool; needed"),
    ],
)
def test_bad_counts_are_refused(counts: object, message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        small().add(np.array(counts))


@pytest.mark.parametrize("num_steps", [0, -1, 1.0, True])
def test_bad_numbers_of_steps_are_refused(num_steps: int) -> None:
    with pytest.raises(PlanInputError, match="`num_steps` is"):
        small().end_step(num_steps)


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ([], "`parts` is empty"),
        ([[1, 2], [1]], r"`parts\[1\]` is \[1\] int64; needed: \[2\]"),
        ([[1], [0.5]], r"`parts\[1\]` is \[1\] float64"),
        ([[1], [-1]], r"`parts\[1\]`\[0\] is -1"),
    ],
)
def test_bad_parts_are_refused(parts: list[list[float]], message: str) -> None:
    with pytest.raises(PlanInputError, match=message):
        sum_of_ranks(parts)
