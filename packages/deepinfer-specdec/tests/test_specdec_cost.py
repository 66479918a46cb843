"""Cost tables: staircase and line, repair, file, refusal; and their correction while running."""

import json
import warnings
from pathlib import Path

import numpy as np
import pytest

from deepinfer_specdec import CostTable, CostTableError, OnlineCosts
from deepinfer_specdec.cost import monotone

TABLE = CostTable((4, 8, 16, 32), (1.0, 2.0, 3.0, 7.0), (4, 8, 16))
MARK = {"model": "flash", "device": "H200", "num_drafts": 5}


def test_time_is_a_staircase_up_to_the_largest_graph() -> None:
    assert [TABLE.seconds_at(rows) for rows in (1, 4, 5, 8, 9, 16)] == [1, 1, 2, 2, 3, 3]


def test_time_above_the_graphs_is_a_line_and_goes_on_by_the_last_slope() -> None:
    assert [TABLE.seconds_at(rows) for rows in (20, 24, 32, 40, 48)] == [4, 5, 7, 9, 11]


def test_without_graphs_time_is_a_line_everywhere() -> None:
    table = CostTable((4, 8), (1.0, 2.0))
    assert [table.seconds_at(rows) for rows in (0, 4, 6, 8, 12)] == [1, 1, 1.5, 2, 3]
    assert table.tier(5) == 5


def test_array_of_rows_gives_what_single_rows_give() -> None:
    rows = np.arange(60)
    for table in (
        TABLE,
        CostTable((3, 7, 20), (1.0, 1.7, 4.0)),
        CostTable((2, 9), (0.1, 0.3), (9,)),
    ):
        singly = [table.seconds_at(int(each)) for each in rows]
        assert table.seconds_at(rows) == pytest.approx(singly, rel=1e-14)
        assert table.seconds_at(rows.reshape(6, 10)).shape == (6, 10)


def test_tier_is_the_next_captured_size() -> None:
    assert [TABLE.tier(rows) for rows in (0, 1, 4, 5, 16, 17)] == [4, 4, 4, 8, 16, 17]


def test_repair_averages_neighbours_that_fall_by_their_weights() -> None:
    assert monotone([1, 3, 2, 4], [1, 1, 1, 1]) == (1, 2.5, 2.5, 4)
    assert monotone([1, 3, 2, 4], [1, 1, 3, 1]) == (1, 2.25, 2.25, 4)
    assert monotone([4, 3, 2, 1], [1, 1, 1, 1]) == (2.5,) * 4
    assert monotone([], []) == ()


def test_repair_is_the_nearest_sequence_that_never_falls() -> None:
    rng = np.random.default_rng(0)
    for _ in range(50):
        values, weights = rng.random(6), rng.integers(1, 5, 6)
        repaired = np.array(monotone(values.tolist(), weights.tolist()))
        assert (np.diff(repaired) >= 0).all()
        distance = (weights * (repaired - values) ** 2).sum()
        for _ in range(200):
            other = np.sort(repaired + rng.normal(0, 0.05, 6))
            assert (weights * (other - values) ** 2).sum() >= distance - 1e-12


def test_table_of_samples_takes_medians_and_repairs_them() -> None:
    samples = {16: [2.0], 4: [1.0, 9.0, 1.2], 8: [3.0, 3.0, 3.0]}
    table = CostTable.of(samples, graph_rows=(8, 4), fingerprint=MARK)
    assert table.rows == (4, 8, 16) and table.graph_rows == (4, 8)
    assert table.seconds == (1.2, 2.75, 2.75)  # three samples against one


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (dict(rows=(4, 4), seconds=(1.0, 2.0)), "`rows` is .4, 4.; it must ascend"),
        (dict(rows=(0, 4), seconds=(1.0, 2.0)), "ascend from 1"),
        (dict(rows=(4,), seconds=(1.0,)), "at least 2"),
        (dict(rows=(4, 8), seconds=(1.0,)), "1 times"),
        (dict(rows=(4, 8), seconds=(1.0, 0.5)), "never fall"),
        (dict(rows=(4, 8), seconds=(0.0, 0.5)), "above 0"),
        (dict(rows=(4, 8), seconds=(1.0, float("inf"))), "finite"),
        (dict(rows=(4, 8), seconds=(1.0, 2.0), graph_rows=(6,)), r"\[6\], which are not in"),
    ],
)
def test_what_is_no_table_is_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(CostTableError, match=message):
        CostTable(**fields)


def test_size_without_a_sample_is_refused() -> None:
    with pytest.raises(CostTableError, match=r"\[8\] have no sample"):
        CostTable.of({4: [1.0], 8: []})


def test_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    table = CostTable((4, 8), (1.0, 2.5), (4,), MARK)
    table.save(tmp_path / "costs.json")
    assert CostTable.load(tmp_path / "costs.json", MARK) == table


def test_table_of_another_engine_is_refused_naming_each_difference(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    CostTable((4, 8), (1.0, 2.5), fingerprint=MARK).save(path)
    with pytest.raises(CostTableError) as caught:
        CostTable.load(path, {"model": "flash", "device": "B200", "ranks": 4})
    message = str(caught.value)
    assert "`device` 'H200' there, 'B200' here" in message
    assert "`num_drafts` 5 there, absent here" in message
    assert "`ranks` absent there, 4 here" in message
    assert "`model`" not in message


def test_fingerprints_of_equal_look_but_other_type_differ(tmp_path: Path) -> None:
    path = tmp_path / "costs.json"
    CostTable((4, 8), (1.0, 2.5), fingerprint={"num_drafts": 5}).save(path)
    with pytest.raises(CostTableError, match="`num_drafts` 5 there, '5' here"):
        CostTable.load(path, {"num_drafts": "5"})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": "4"}, "`rows` '4'"),
        ({"rows": [4, True]}, "list of numbers"),
        ({"seconds": [1.0, None]}, "`seconds`"),
        ({"seconds": [2.0, 1.0]}, "holds no table"),
        ({"graph_rows": [5]}, "holds no table"),
        ({"fingerprint": 3}, "`fingerprint`"),
        ({"more": 1}, "exactly these fields"),
    ],
)
def test_file_that_is_no_table_is_refused(
    tmp_path: Path, change: dict[str, object], message: str
) -> None:
    path = tmp_path / "costs.json"
    CostTable((4, 8), (1.0, 2.5)).save(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(CostTableError, match=message):
        CostTable.load(path, {})


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_file_that_is_no_object_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    with pytest.raises(CostTableError, match=r"costs\.json"):
        CostTable.load(path, {})
    with pytest.raises(CostTableError, match="cannot be read"):
        CostTable.load(tmp_path / "none.json", {})


def test_measured_steps_pull_their_size_towards_them() -> None:
    online = OnlineCosts(TABLE)
    online.observe(8, 2.4)
    assert online.table.seconds_at(8) == pytest.approx(2.0 * (1 + 0.05 * 0.2))
    for _ in range(300):
        online.observe(7, 2.4)
        online.observe(3, 1.0)
    assert online.table.seconds_at(8) == pytest.approx(2.4, rel=1e-4)
    assert online.table.seconds_at(4) == pytest.approx(1.0, rel=1e-2)
    assert online.error < 0.01
    assert online.base is TABLE


@pytest.mark.filterwarnings("ignore:Steps take")
def test_sizes_that_were_not_measured_follow_what_all_others_do() -> None:
    online = OnlineCosts(TABLE)
    for _ in range(300):
        online.observe(4, 1.3)
    assert online.table.seconds == pytest.approx([1.3, 2.6, 3.9, 9.1], rel=1e-3)


@pytest.mark.filterwarnings("ignore:Steps take")
def test_corrected_table_never_falls() -> None:
    online = OnlineCosts(TABLE)
    for _ in range(300):
        online.observe(8, 3.6)
        online.observe(16, 3.0)
    times = online.table.seconds
    assert (np.diff(times) >= 0).all()
    assert times[1] == times[2] == pytest.approx(3.3, rel=1e-2)


@pytest.mark.filterwarnings("ignore:Steps take")
def test_outliers_correct_nothing() -> None:
    online = OnlineCosts(TABLE)
    for seconds in (9.0, 0.4, float("nan"), float("inf"), -1.0, 0.0):
        online.observe(8, seconds)
    assert online.table == TABLE
    online.observe(8, 7.9)  # 3.95 x
    assert online.table != TABLE


def test_rows_outside_the_table_correct_nothing() -> None:
    online = OnlineCosts(TABLE)
    online.observe(48, 22.0)  # predicted: 11
    assert online.table == TABLE
    bare = CostTable((4, 8), (1.0, 2.0))
    online = OnlineCosts(bare)
    online.observe(3, 2.0)  # no captured size serves it
    assert online.table == bare
    online.observe(4, 2.0)
    assert online.table != bare


def test_warning_names_size_and_times_and_comes_once_in_a_thousand_steps() -> None:
    online = OnlineCosts(TABLE)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2500):  # no table can follow this
            online.observe(7, 2.0 if step % 2 else 4.0)
    assert len(caught) == 3
    assert all(each.category is RuntimeWarning for each in caught)
    text = str(caught[1].message)
    assert "of 8 rows: predicted 2" in text and "measured" in text


def test_small_errors_do_not_warn() -> None:
    online = OnlineCosts(TABLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for step in range(2000):
            online.observe(7, 2.0 if step % 2 else 2.1)


def test_a_table_that_is_wrong_by_far_warns_too() -> None:
    online = OnlineCosts(TABLE)
    with pytest.warns(RuntimeWarning, match="Measure the table again"):
        for _ in range(5):
            online.observe(8, 20.0)
