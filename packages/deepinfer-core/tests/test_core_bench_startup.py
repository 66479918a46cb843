"""`deepinfer bench startup`: the grid, what it stores, and what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer_core.bench import startup
from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.bench.startup import Case, Grid, cases_of, chunk_sizes
from deepinfer_core.cli import main
from deepinfer_core.config import EngineConfig
from deepinfer_core.errors import ConfigError
from deepinfer_core.model.deepseek_v41 import DeepseekV41
from deepinfer_core.scheduler.cost_model import CostModel

TRUTH = CostModel(k0=2e6, k1=30_000, k2=40, k3=100, kt=9000)
GRID = ["--contexts", "0,48,96", "--chunks", "8,16,32", "--repeats", "1"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("startup") / "model"
    write_checkpoint(path, demo_config(), seed=0)
    return path


def bench(folder: Path, *options: object) -> int:
    """Run the verb; returns its exit status."""
    fixed = ("--accelerator", "cpu", "--block-size", "8", "--max-step-tokens", "32")
    with pytest.raises(SystemExit) as left:
        main(["bench", "startup", "--model", str(folder), *fixed, *map(str, options)])
    return int(left.value.code or 0)


class Machine:
    """Takes times of its own for what it is given; the first run of a case is a cold one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, jitter: float = 0.0) -> None:
        self.cases: list[Case] = []
        self._jitter = jitter
        monkeypatch.setattr(startup._Bench, "_run", lambda _, case: self._time(case))

    def _time(self, case: Case) -> int:
        self.cases.append(case)
        cold = 5 if self.cases.count(case) == 1 else 1
        noise = 1 + self._jitter * (-1) ** (case.size // 8 + case.context // 48)
        return round(TRUTH.predict_step(case.work) * cold * noise)


def test_every_case_runs_its_rows_and_as_many_of_them_in_the_late_layers(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[tuple[int, int, int]] = []
    forward = DeepseekV41.forward

    def spy(model, backend, token_ids, rows, *args, **kwargs):
        done = forward(model, backend, token_ids, rows, *args, **kwargs)
        ran.append((int(rows.positions[0]), len(token_ids), len(done.hidden)))
        return done

    monkeypatch.setattr(DeepseekV41, "forward", spy)
    config = EngineConfig(model=str(folder), accelerator="cpu", max_step_tokens=64)
    parts: dict[str, int] = {}
    bench = startup._Bench.start(config, Grid((0, 50), (8, 40)), parts)
    assert [each[:2] for each in ran] == [(0, 40), (40, 40), (80, 10)]  # fills the cache
    assert list(parts) == ["weights", "state", "first step"]
    assert min(parts.values()) > 0
    ran.clear()
    times = bench.measure(1)
    window = 32
    expected = [(c, x, late) for c in (0, 50) for x in (8, 40) for late in (0, min(x, window))]
    assert ran == 2 * expected
    assert [(case.context, case.size, case.late) for case in times] == expected
    assert min(times.values()) > 0


def test_stored_model_predicts_the_measured_times(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch)
    file, lines = tmp_path / "cost.json", tmp_path / "lines.jsonl"
    assert bench(folder, *GRID, "--save", file, "--out", lines, "--budget-ms", "2.9") == 0
    out = capfd.readouterr().out
    for what in ("import", "weights", "state", "first step", "k2", "residual p95", str(file)):
        assert what in out
    model = CostModel.load(file)
    assert model.coefficients() == pytest.approx(TRUTH.coefficients(), rel=1e-3)
    assert model.origin is not None
    assert model.origin.command.startswith("python ")
    figures = json.loads(lines.read_text())
    assert figures["benchmark"] == "startup"
    assert figures["coefficients_ns"]["k1"] == model.k1
    assert len(figures["grid"]) == 3 * 3 * 2
    assert json.dumps(figures) == next(line for line in out.splitlines() if line.startswith("{"))
    # 2.9 ms: 0.9 ms are left for rows of 30 us and pairs
    assert figures["chunks"]["0"] == 24
    assert figures["chunks"]["1024"] == 8


def test_runs_that_warm_up_do_not_count(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(monkeypatch)
    config = EngineConfig(model=str(folder), accelerator="cpu", max_step_tokens=32)
    model = startup.bench_startup(config, Grid((0, 48, 96), (8, 16, 32), repeats=2))
    assert model.coefficients() == pytest.approx(TRUTH.coefficients(), rel=1e-3)
    # one that warms up and two that are measured; filling the cache may run a case besides
    assert {machine.cases.count(case) for case in set(machine.cases)} <= {1, 3, 4}


def test_fit_that_is_rejected_stores_nothing_and_fails(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch, jitter=0.4)
    file = tmp_path / "cost.json"
    assert bench(folder, *GRID, "--save", file) == 1
    told = capfd.readouterr()
    assert "The fit is rejected" in told.err
    assert "late rows" in told.out, "the times are shown, for what went wrong to be seen"
    assert not file.exists()


def test_model_that_cannot_be_stored_is_an_error(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    Machine(monkeypatch)
    assert bench(folder, *GRID, "--save", tmp_path / "none" / "cost.json") == 1
    assert "cannot be written" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contexts", "0,x"], "`--contexts` is '0,x'; it must be whole numbers of at least 0"),
        (["--chunks", "0"], "`--chunks` is '0'; it must be whole numbers of at least 1"),
        (["--chunks", ""], "`--chunks` is ''"),
        (["--budget-ms", "0"], "`--budget-ms` is 0"),
        (["--budget-ms", "nan"], "`--budget-ms` is nan"),
    ],
)
def test_option_that_is_wrong_is_an_error_that_names_it(
    folder: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, *options) == 2
    assert said in capfd.readouterr().err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--contexts", "4090", "--chunks", "8"], "context of 4090 and a chunk of 8 tokens, but"),
        (["--chunks", "33"], "33 tokens, but `max_step_tokens` is 32"),
        (["--max-model-len", "5000"], "the model's context is 4096 tokens"),
    ],
)
def test_grid_that_does_not_fit_is_an_error(
    folder: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert bench(folder, *options) == 1
    assert said in capfd.readouterr().err


@given(st.integers(1, 4096), st.integers(1, 4096), st.integers(1, 128))
def test_grid_without_options_fits_steps_and_contexts(step, max_len, window) -> None:
    cases = cases_of(EngineConfig(max_step_tokens=step), Grid(), max_len, window)
    assert max(case.size for case in cases) == min(step, max_len)
    assert max(case.context + case.size for case in cases) <= max_len
    assert {case.context for case in cases} >= {0}
    assert all(case.late in (0, min(window, case.size)) for case in cases)


def test_strict_mode_measures_all_rows_in_the_late_layers() -> None:
    grid = Grid((0,), (64, 512))
    strict = cases_of(EngineConfig(determinism="strict"), grid, 4096, 32)
    assert [case.late for case in strict] == [0, 64, 0, 512]
    normal = cases_of(EngineConfig(), grid, 4096, 32)
    assert [case.late for case in normal] == [0, 32, 0, 32]


def test_chunk_sizes_are_parts_of_a_step() -> None:
    assert chunk_sizes(512) == (64, 128, 512)
    assert chunk_sizes(1) == (1,)


def test_cases_out_of_the_options_of_an_engine_are_an_error() -> None:
    with pytest.raises(ConfigError, match="`max_step_tokens` is 100"):
        cases_of(EngineConfig(max_step_tokens=100), Grid((0,), (101,)), 4096, 32)
