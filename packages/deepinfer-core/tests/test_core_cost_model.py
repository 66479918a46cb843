"""The cost model of prefill chunks: inversion, fit, file, and following of measured steps."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.errors import ConfigError, OutputError
from deepinfer_core.scheduler.chunk_work import ChunkWork, Sample
from deepinfer_core.scheduler.cost_model import CostModel, OnlineCostModel, Origin

MODEL = CostModel(k0=50_000, k1=900, k2=0.25, k3=3, kt=400)
GRID = [(c, x) for c in (0, 512, 1024, 4096) for x in (64, 128, 256, 512)]

costs = st.one_of(st.just(0.0), st.floats(1e-3, 1e4))
models = st.builds(
    CostModel,
    k0=costs,
    k1=costs,
    k2=st.one_of(st.floats(1e-12, 1e-6), st.floats(1e-3, 10)),
    k3=costs,
    kt=costs,
)


def measured(model: CostModel, noise: float = 0.0, seed: int = 0) -> list[Sample]:
    """Every chunk of the grid, without and with rows of the tail, off by up to `noise`."""
    rng = np.random.default_rng(seed)
    works = [
        ChunkWork.of(context, size, tail_rows=tail) for context, size in GRID for tail in (0, size)
    ]
    factors = rng.uniform(1 - noise, 1 + noise, len(works))
    return [
        Sample(work, round(model.predict_step(work) * factor))
        for work, factor in zip(works, factors, strict=True)
    ]


@given(models, st.integers(0, 10**6), st.booleans(), st.integers(0, 128), st.integers(0, 128))
def test_prediction_of_a_chunk_is_that_of_its_work(model, context, first, replay, tail) -> None:
    work = ChunkWork.of(context, 37, replay_rows=replay, tail_rows=tail)
    found = model.predict(context, 37, first=first, replay_rows=replay, tail_rows=tail)
    # both are rounded
    assert found + (0 if first else model.k0) == pytest.approx(model.predict_step(work), abs=1)


def test_work_of_a_step_is_the_sum_over_its_chunks() -> None:
    both = ChunkWork.of(10, 3, replay_rows=2, tail_rows=1) + ChunkWork.of(0, 5)
    assert both == ChunkWork(num_rows=10, num_pairs=69 + 25, context=10, num_tail=1)


@given(
    models,
    st.integers(0, 3000),
    st.integers(0, 300),
    st.booleans(),
    st.integers(0, 128),
    st.integers(0, 128),
    st.integers(-1, 1),
)
def test_inversion_finds_what_a_search_finds(
    model, context, size, first, replay, tail, shift
) -> None:
    options = {"first": first, "replay_rows": replay, "tail_rows": tail}
    # at, just below and just above the time of some chunk
    budget = model.predict(context, size, **options) + shift
    found = model.largest(budget, context, **options)
    assert found == 0 or model.predict(context, found, **options) <= budget
    assert model.predict(context, found + 1, **options) > budget


@pytest.mark.parametrize("tiny", [5e-324, 1e-300, 1e-30])
def test_inversion_is_exact_where_pairs_cost_nearly_nothing(tiny: float) -> None:
    model = CostModel(k0=0, k1=1, k2=tiny, k3=0, kt=0)
    assert model.largest(10**9, 10**6, first=True) == 10**9


def test_inversion_ends_where_nothing_costs_anything() -> None:
    model = CostModel(k0=0, k1=0, k2=5e-324, k3=0, kt=0)
    assert model.largest(1, 0, first=True) > 10**9


def test_inversion_is_exact_where_the_fixed_part_dwarfs_the_rest() -> None:
    model = CostModel(k0=1e17, k1=1, k2=1e-9, k3=0, kt=0)  # floats of that size are 16 apart
    budget = model.predict(0, 1000, first=True)
    found = model.largest(budget, 0, first=True)
    assert model.predict(0, found, first=True) == budget < model.predict(0, found + 1, first=True)


def test_nothing_fits_into_a_budget_that_the_fixed_part_exceeds() -> None:
    assert MODEL.largest(50_000, 0, first=True) == 0
    assert MODEL.largest(50_000, 0, first=False) > 0


@pytest.mark.parametrize(
    ("name", "value"), [("k0", -1.0), ("k1", float("nan")), ("k2", 0.0), ("k3", float("inf"))]
)
def test_a_coefficient_out_of_range_is_an_error_that_names_it(name: str, value: float) -> None:
    values = dict.fromkeys(("k0", "k1", "k2", "k3", "kt"), 1.0) | {name: value}
    with pytest.raises(ConfigError, match=f"`{name}`.*{value!r}"):
        CostModel(**values)


# Fit


def test_fit_recovers_what_the_times_were_made_of() -> None:
    found = CostModel.fit(measured(MODEL))
    assert found.coefficients() == pytest.approx(MODEL.coefficients(), rel=1e-2)


@given(st.integers(0, 2**32 - 1))
def test_fit_of_noisy_times_has_no_negative_coefficient_and_predicts_them(seed: int) -> None:
    without = CostModel(k0=0, k1=900, k2=0.25, k3=0, kt=0)
    samples = measured(without, noise=0.05, seed=seed)
    found = CostModel.fit(samples)
    assert min(found.coefficients()) >= 0
    assert found.residual_p95(samples) <= 0.06


def test_fit_is_the_best_of_all_that_are_not_negative() -> None:
    samples = measured(CostModel(k0=0, k1=900, k2=0.25, k3=0, kt=0), noise=0.08)
    found = CostModel.fit(samples)
    best = np.square(found.residuals(samples)).sum()
    rng = np.random.default_rng(0)
    for _ in range(300):
        other = found.coefficients() + rng.normal(0, 1, 5) * (1e3, 10, 0.01, 1, 10)
        near = CostModel(*np.maximum(other, (0, 0, 1e-9, 0, 0)))
        assert np.square(near.residuals(samples)).sum() >= best


def test_fit_without_a_quadratic_part_is_rejected_with_its_number() -> None:
    # a machine that gets faster with longer chunks: the quadratic part would be negative
    samples = [
        Sample(each.work, each.time_ns - each.work.num_pairs // 20)
        for each in measured(CostModel(k0=50_000, k1=9000, k2=1e-9, k3=3, kt=400))
    ]
    with pytest.raises(ConfigError, match=r"`k2`.* -0\.0[45]\d* ns"):
        CostModel.fit(samples)


def test_fit_that_misses_the_times_is_rejected_with_its_number() -> None:
    with pytest.raises(ConfigError, match=r"within [1-9]\d\.\d%.* 10% is asked for"):
        CostModel.fit(measured(MODEL, noise=0.4))


def test_fit_of_too_few_samples_is_an_error() -> None:
    with pytest.raises(ConfigError, match="there are 5 measurements; give at least 6"):
        CostModel.fit(measured(MODEL)[:5])


def test_fit_of_a_time_that_is_not_positive_is_an_error() -> None:
    with pytest.raises(ConfigError, match="is 0 ns"):
        CostModel.fit([*measured(MODEL), Sample(ChunkWork.of(0, 64), 0)])


# File


def test_saved_model_comes_back_with_its_origin(tmp_path: Path) -> None:
    origin = Origin("cpu of a test", {"python": "3", "torch": "2"}, "a command")
    model = CostModel(*MODEL.coefficients(), origin=origin)
    model.save(tmp_path / "model.json")
    back = CostModel.load(tmp_path / "model.json")
    assert back == model
    assert back.origin == origin


def test_saved_model_without_an_origin_comes_back_without(tmp_path: Path) -> None:
    MODEL.save(tmp_path / "model.json")
    assert CostModel.load(tmp_path / "model.json").origin is None


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"format": "else"}, "another kind of file"),
        ({"version": 99}, "format version 99, and this one reads 1"),
        ({"coefficients_ns": {"k0": 1}}, "`k4`|`kt`"),
        ({"coefficients_ns": dict.fromkeys(("k0", "k1", "k2", "k3", "kt"), "1")}, "'1'; it must"),
        ({"coefficients_ns": dict.fromkeys(("k0", "k1", "k2", "k3", "kt"), 0)}, "`k2`.* is 0 ns"),
        (
            {"coefficients_ns": dict.fromkeys(("k0", "k1", "k2", "k3", "kt"), 10**400)},
            "`k0`.*at most 1e\\+18",
        ),
        ({"device": 3}, "`device` and `command` as texts"),
    ],
)
def test_file_that_is_no_model_is_an_error_that_names_it(
    tmp_path: Path, change: dict[str, object], said: str
) -> None:
    file = tmp_path / "model.json"
    MODEL.save(file)
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(ConfigError, match=said) as error:
        CostModel.load(file)
    assert str(file) in str(error.value)
    assert "deepinfer bench startup --save" in str(error.value)


@pytest.mark.parametrize("content", [b"[", b"\xff\xfe", b"3"])
def test_file_of_other_content_is_an_error_that_names_it(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "model.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.json"):
        CostModel.load(tmp_path / "model.json")


def test_file_that_is_not_there_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.json.*No such file"):
        CostModel.load(tmp_path / "model.json")


def test_file_that_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="Is a directory"):
        MODEL.save(tmp_path)


# Following measured steps


def follow(online: OnlineCostModel, truth: CostModel, steps: int, noise: float = 0.0) -> None:
    """Feed measured steps of one or two chunks."""
    rng = np.random.default_rng(1)
    for _ in range(steps):
        work = ChunkWork()
        for _ in range(rng.integers(1, 3)):
            size = int(rng.integers(16, 512))
            tail = int(rng.integers(0, size))
            work += ChunkWork.of(int(rng.integers(0, 4096)), size, tail_rows=tail)
        factor = rng.uniform(1 - noise, 1 + noise)
        online.update(work, round(truth.predict_step(work) * factor), padded=False)


def test_online_model_starts_as_the_offline_one() -> None:
    assert OnlineCostModel(MODEL).model is MODEL


def test_online_model_comes_to_predict_a_machine_that_changed() -> None:
    truth = CostModel(50_000, 900 * 1.2, 0.25 * 0.8, 3, 400 * 1.1)
    online = OnlineCostModel(MODEL)
    follow(online, truth, 400, noise=0.05)
    samples = measured(truth)
    assert MODEL.residual_p95(samples) > 0.1
    assert online.model.residual_p95(samples) < 0.04


def test_online_model_stays_within_a_quarter_of_the_offline_one() -> None:
    online = OnlineCostModel(MODEL)
    follow(online, CostModel(*(3 * each for each in MODEL.coefficients())), 200)
    ratios = np.array(online.model.coefficients()) / MODEL.coefficients()
    assert ratios.max() <= 1.25 + 1e-9
    assert online.model.predict(0, 512, first=True) > 1.2 * MODEL.predict(0, 512, first=True)


def test_online_model_survives_any_number_of_steps_that_are_all_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(OnlineCostModel, "FORGETTING", 0.5)  # as many steps of 0.99 take long
    online = OnlineCostModel(MODEL)
    work = ChunkWork.of(1000, 64)
    for _ in range(3000):
        online.update(work, MODEL.predict_step(work), padded=False)
    follow(online, MODEL, 100)
    assert online.model.residual_p95(measured(MODEL)) < 0.02


def test_online_model_comes_back_from_one_step_that_hung() -> None:
    online = OnlineCostModel(MODEL)
    follow(online, MODEL, 50)
    work = ChunkWork.of(0, 512, tail_rows=512)
    online.update(work, 1000 * MODEL.predict_step(work), padded=False)
    assert online.model.residual_p95(measured(MODEL)) < 0.15
    follow(online, MODEL, 300)
    assert online.model.residual_p95(measured(MODEL)) < 0.02


def test_online_model_learns_nothing_of_padded_and_empty_steps() -> None:
    online = OnlineCostModel(MODEL)
    work = ChunkWork.of(0, 64)
    online.update(work, 2 * MODEL.predict_step(work), padded=True)
    online.update(ChunkWork(), 10**6, padded=False)
    assert online.model is MODEL
    assert online.num_updates == 0


def test_online_model_leaves_a_coefficient_of_zero_alone() -> None:
    offline = CostModel(k0=50_000, k1=900, k2=0.25, k3=0, kt=0)
    online = OnlineCostModel(offline)
    follow(online, MODEL, 100)
    assert online.model.k3 == online.model.kt == 0
    assert online.model.k1 != offline.k1
