"""`deepinfer bench speculation`: what counts, what it compares, what it measures and refuses."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
import torch

from deepinfer_core import EngineConfig, SamplingParams
from deepinfer_core.bench import speculation, step_costs
from deepinfer_core.bench.make_checkpoint import demo_config, write_checkpoint
from deepinfer_core.bench.speculation import Asked, Cell, bench_speculation
from deepinfer_core.bench.speculation_prompts import prompts_of
from deepinfer_core.bench.speculation_run import DecodeMeter, opened
from deepinfer_core.bench.step_costs import StepCosts, measure_costs, sizes_of
from deepinfer_core.cli import main
from deepinfer_core.engine.records import StepRecord
from deepinfer_core.engine.step_ring import DeviceTimes
from deepinfer_core.errors import ConfigError, DeepInferError, OutputError
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.plans import StepKind


@dataclass(frozen=True)
class Budget:
    total: int
    rows: int


class Planner:
    """Verifies every draft; tells what it was asked."""

    def budget(self, survival: np.ndarray, known: np.ndarray, available: np.ndarray) -> Budget:
        return Budget(int(available.sum()), 0)

    def lengths(self, survival: torch.Tensor, available: torch.Tensor, total: int) -> torch.Tensor:
        """Fill the sequences in order."""
        before = available.cumsum(0) - available
        return (total - before).clamp(min=0).minimum(available).int()

    def observe(self, rows: int, seconds: float) -> None:
        pass


class Calibration:
    def apply(self, confidence: torch.Tensor, sampled: torch.Tensor) -> torch.Tensor:
        return torch.sigmoid(confidence)


class Verifier:
    """What `deepinfer-specdec` brings, as far as it is needed here."""

    error = ValueError
    planner, calibration, acceptor = Planner(), Calibration(), None
    made: ClassVar[list[Mapping[str, object]]] = []

    def __init__(self, **keywords: object) -> None:
        self.made.append(keywords)
        self.has_costs = keywords["costs"] is not None

    @staticmethod
    def write_costs(
        path: str | Path, samples: Mapping[int, Sequence[float]], *, fingerprint: Mapping
    ) -> None:
        Path(path).write_text(json.dumps([{str(k): list(v) for k, v in samples.items()}]))


@pytest.fixture
def verifier(monkeypatch: pytest.MonkeyPatch) -> type[Verifier]:
    monkeypatch.setattr(Verifier, "made", [])
    monkeypatch.setattr(speculation, "find_verifier", lambda: Verifier)
    return Verifier


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bench") / "model"
    write_checkpoint(path, demo_config(), seed=0)
    return path


def config_of(folder: Path, **options: object) -> EngineConfig:
    sizes = {"max_model_len": 128, "block_size": 16, "max_step_tokens": 128}
    return EngineConfig(model=str(folder), accelerator="cpu", **{**sizes, **options})


# what counts


def told(
    meter: DecodeMeter,
    seq: int,
    end_ns: int,
    *,
    num_sequences: int = 2,
    kind: StepKind = StepKind.DECODE,
    kept: Sequence[int] = (2, 3),
    tokens: Sequence[int] = (2, 3),
    survival: Sequence[Sequence[float]] | None = None,
    after_idle: bool = False,
    device_end: int | None = None,
) -> None:
    """Tell a meter of a step that verified 2 and 5 drafts."""
    device = None if device_end is None else DeviceTimes((0, 0), (0, device_end), (0, 0))
    record = StepRecord(
        seq,
        kind,
        num_sequences=num_sequences,
        num_rows=9,
        wait_end_ns=end_ns,
        after_idle=after_idle,
        device=device,
    )
    verified = np.array([2, 5])
    plan = SimpleNamespace(rows=SimpleNamespace(num_drafts=np.array([5, 5])), trims=False)
    known = None if survival is None else (np.array(survival, np.float32), np.ones(2, bool))
    result = SimpleNamespace(num_verified=verified, num_tokens=np.array(tokens))
    step = SimpleNamespace(plan=plan)
    meter(record, SimpleNamespace(kept=np.array(kept), result=result, survival=known, step=step))


def test_seconds_run_from_the_end_of_the_step_before() -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 1_000_000_000)
    told(meter, 2, 1_500_000_000)
    told(meter, 3, 1_600_000_000)
    assert (meter.steps, meter.tokens, meter.rows, meter.verified) == (2, 10, 4, 14)
    assert meter.seconds == pytest.approx(0.6)
    assert meter.step_seconds == {9: pytest.approx([0.5, 0.1])}


def test_the_device_clock_is_preferred() -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 77, device_end=1_000_000_000)
    told(meter, 2, 99, device_end=3_000_000_000)
    assert meter.seconds == pytest.approx(2)


@pytest.mark.parametrize(
    "other",
    [
        {"num_sequences": 1},
        {"kind": StepKind.PREFILL},
        {"after_idle": True},
    ],
)
def test_other_steps_do_not_count_but_end_what_came_before(other: dict[str, object]) -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 1_000_000_000)
    told(meter, 2, 2_000_000_000, **other)
    told(meter, 3, 2_250_000_000)
    assert (meter.steps, meter.tokens) == (1, 5)
    assert meter.seconds == pytest.approx(0.25)


def test_a_gap_in_the_steps_does_not_count() -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 1_000_000_000)
    told(meter, 3, 2_000_000_000)
    assert meter.steps == 0


def test_rows_of_ended_sequences_count_as_time_and_nothing_else() -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 1_000_000_000)
    told(meter, 2, 2_000_000_000, kept=(0, 3))
    assert (meter.rows, meter.tokens, meter.verified, meter.seconds) == (1, 3, 5, 1.0)


def test_calibration_leaves_out_what_was_cut_at_a_stop() -> None:
    # the second sequence was right about 2 of 5 drafts, and said 0.5 of each
    survival = [[1.0, 1.0, 0.0, 0.0, 0.0], [0.5] * 5]
    cut, whole = DecodeMeter(2), DecodeMeter(2)
    for meter, kept in ((cut, (3, 1)), (whole, (3, 3))):
        told(meter, 1, 1)
        told(meter, 2, 2, kept=kept, tokens=(3, 3), survival=survival)
    seen = cut.calibration()
    assert seen is not None
    assert seen.ece == (0.0, 0.0)
    assert (seen.predicted_accepted_ratio, seen.full_share) == (1.0, 1.0)
    seen = whole.calibration()
    assert seen is not None
    assert seen.ece == pytest.approx((0.25, 0.25, 0.5, 0.5, 0.5))
    assert seen.predicted_accepted_ratio == pytest.approx((2 + 2.5) / 4)


def test_without_drafts_there_is_no_calibration() -> None:
    meter = DecodeMeter(2)
    told(meter, 1, 1)
    told(meter, 2, 2)
    assert meter.calibration() is None


def test_a_meter_without_steps_makes_no_cell() -> None:
    with pytest.raises(ConfigError, match=r"policy 'fixed' had 2 sequences.*`prompts`"):
        Cell.of("fixed", "target_noise", DecodeMeter(2), [])


# traffic


def test_traffic_keeps_the_load_and_answers_in_order(folder: Path) -> None:
    config = config_of(folder, speculation="off", max_sequences=4)
    prompts = prompts_of(folder, ModelConfig.from_folder(folder), 5, 0)
    params = [SamplingParams(max_tokens=n, ignore_eos=True, seed=0) for n in (9, 4, 7, 5, 6)]
    seen = []
    with opened(config, None) as traffic:
        texts = traffic.run(
            zip(prompts, params, strict=True),
            2,
            watcher=lambda record, settlement: seen.append(record),
        )
        traffic.engine.audit()
    assert [len(text) for text in texts] == [9, 4, 7, 5, 6]
    assert [record.step_seq for record in seen] == list(range(1, len(seen) + 1))
    assert {record.num_sequences for record in seen} == {1, 2}


def test_traffic_stops_when_it_is_enough(folder: Path) -> None:
    config = config_of(folder, speculation="off", max_sequences=4)
    prompts = prompts_of(folder, ModelConfig.from_folder(folder), 2, 0)
    params = SamplingParams(max_tokens=50, ignore_eos=True, seed=0)
    meter = DecodeMeter(2)
    with opened(config, None) as traffic:
        texts = traffic.run(
            [(prompt, params) for prompt in prompts],
            2,
            watcher=meter,
            enough=lambda: meter.steps >= 3,
        )
        assert not traffic.engine.has_work
        traffic.engine.audit()
    assert all(3 <= len(text) < 10 for text in texts)


# costs


def test_sizes_go_from_no_draft_to_all() -> None:
    assert sizes_of(1, 5) == (0, 1, 2, 3, 4, 5)
    assert sizes_of(64, 5)[0] == 0
    assert sizes_of(64, 5)[-1] == 320
    assert len(sizes_of(64, 5)) == 13


def test_every_size_is_measured_at_every_load(
    folder: Path, verifier: type[Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "REPEATS", 2)
    monkeypatch.setattr(step_costs, "_WARM_UP", 1)
    config = config_of(folder, speculation="fixed", num_drafts=2, max_sequences=2)
    prompts = prompts_of(folder, ModelConfig.from_folder(folder), 3, 0)
    params = SamplingParams(max_tokens=30, ignore_eos=True, seed=0)
    costs = measure_costs(config, verifier, (1, 2), prompts, params)
    assert {load: list(sizes) for load, sizes in costs.seconds.items()} == {
        1: [1, 2, 3],
        2: [2, 3, 4, 5, 6],
    }
    times = [each for sizes in costs.seconds.values() for each in sizes.values()]
    assert all(len(each) >= 2 and min(each) > 0 for each in times)
    assert costs.fingerprint == verifier.made[0]["fingerprint"]
    assert costs.fingerprint["num_drafts"] == 2


# all of it


def test_policies_stand_side_by_side(
    folder: Path,
    verifier: type[Verifier],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(step_costs, "REPEATS", 1)
    monkeypatch.setattr(step_costs, "_WARM_UP", 0)
    stored, lines = tmp_path / "costs.json", tmp_path / "lines.jsonl"
    asked = Asked(loads=(2,), tokens=5, prompts=2, save=stored)
    config = config_of(folder, num_drafts=1, determinism="strict")
    cells = bench_speculation(config, asked, lines)
    assert [cell.policy for cell in cells] == ["off", "fixed", "threshold", "delayed"]
    plain, fixed, _, delayed = cells
    assert (plain.verified_per_row, plain.accepted_len, plain.calibration) == (0, 1, None)
    assert 0.5 < fixed.verified_per_row <= 1
    assert fixed.texts == plain.texts == delayed.texts
    assert [len(text) for text in plain.texts] == [5] * 2
    # the engine of `delayed` alone has costs
    files = {made["policy"]: made["costs"] for made in verifier.made[1:]}
    assert (files["fixed"], files["threshold"]) == (None, None)
    assert files["delayed"] is not None
    [sizes] = json.loads(stored.read_text())
    assert list(sizes) == ["2", "3", "4"]
    out = capfd.readouterr().out
    for what in ("drafts/row", "over off", "2/2", "costs of decode steps", str(stored)):
        assert what in out
    figures = json.loads(lines.read_text())
    assert figures["benchmark"] == "speculation"
    assert [cell["texts_as_off"] for cell in figures["cells"]] == [None, 2, 2, 2]
    ratio = fixed.tokens_per_second / plain.tokens_per_second
    assert figures["cells"][1]["over_off"] == pytest.approx(ratio)
    assert len(figures["costs"]) == 3


def test_another_text_in_strict_mode_is_an_error(
    folder: Path, verifier: type[Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    def cell(self: object, policy: str, rule: str | None, load: int, costs: object) -> Cell:
        text = (1, 2) if policy == "off" else (1, 3)
        return Cell(policy, rule, load, 1, 1.0, 1.0, 10.0, 1.0, None, (text,))

    monkeypatch.setattr(speculation._Bench, "_cell", cell)
    asked = Asked(loads=(1,), policies=("off", "fixed"))
    assert len(bench_speculation(config_of(folder), asked)) == 2
    with pytest.raises(DeepInferError, match="Only 0 of 1 texts of policy 'fixed' at load 1"):
        bench_speculation(config_of(folder, determinism="strict"), asked)


def test_each_rule_is_measured_with_costs_of_its_own(
    folder: Path, verifier: type[Verifier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table names its rule, and an engine of the other one refuses it."""
    used = []

    def measure(config: EngineConfig, *_: object) -> StepCosts:
        return StepCosts({1: {1: [0.1], 2: [0.2]}}, {"acceptance": config.acceptance})

    def cell(self: object, policy: str, rule: str | None, load: int, costs: StepCosts) -> Cell:
        used.append((policy, rule, costs and costs.fingerprint["acceptance"]))
        return Cell(policy, rule, load, 1, 1.0, 1.0, 10.0, 1.0, None, ())

    monkeypatch.setattr(speculation, "measure_costs", measure)
    monkeypatch.setattr(speculation._Bench, "_cell", cell)
    both = ("target_noise", "rejection")
    asked = Asked(loads=(1,), policies=("off", "delayed"), acceptances=both)
    bench_speculation(config_of(folder), asked)
    assert used == [("off", None, None), *(("delayed", rule, rule) for rule in both)]


def test_rejection_is_compared_with_target_noise(capfd: pytest.CaptureFixture[str]) -> None:
    one = Cell("fixed", "target_noise", 4, 9, 5.0, 3.0, 100.0, 1.0, None, ((1,),))
    other = replace(one, acceptance="rejection", accepted_len=3.3, tokens_per_second=110.0)
    speculation._print_rejection([one, other, replace(one, load=8)])
    assert capfd.readouterr().out.splitlines() == [
        "rejection over target noise, fixed, load 4: tokens/row +10.0%, tokens/s +10.0%"
    ]


# what it refuses


def test_costs_are_given_or_measured() -> None:
    with pytest.raises(ConfigError, match="`costs` names measured costs"):
        Asked(loads=(1,), costs="file", profile=True)
    with pytest.raises(ConfigError, match="`save` stores the costs of one load, but there are 2"):
        Asked(loads=(1, 4), save=Path("file"))
    with pytest.raises(ConfigError, match="`save` stores the costs under one rule"):
        Asked(loads=(1,), acceptances=("target_noise", "rejection"), save=Path("file"))
    assert Asked(loads=(1,)).measures
    assert not Asked(loads=(1,), costs="file").measures
    assert not Asked(loads=(1,), policies=("off", "fixed")).measures
    assert Asked(loads=(1,), policies=("off",), profile=True).measures


def test_costs_that_cannot_be_stored_are_an_error(
    folder: Path, verifier: type[Verifier], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(step_costs, "REPEATS", 1)
    monkeypatch.setattr(step_costs, "_WARM_UP", 0)
    asked = Asked(loads=(1,), policies=("off",), save=tmp_path / "none" / "costs.json")
    with pytest.raises(OutputError, match="cannot be written"):
        bench_speculation(config_of(folder, num_drafts=1), asked)


def test_drafts_without_a_verifier_are_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(speculation, "find_verifier", lambda: None)
    for policies in (("off", "fixed"), ("delayed",)):
        with pytest.raises(ConfigError, match="`deepinfer-specdec` is not installed"):
            bench_speculation(config_of(folder), Asked(loads=(1,), policies=policies, prompts=1))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--load", "0"], "`--load` is '0'; it must be whole numbers of at least 1"),
        (["--policies", "of"], "`--policies` is 'of'; it must be of off, fixed, threshold"),
        (["--acceptance", "all"], "`--acceptance` is 'all'; it must be of target_noise, rej"),
    ],
)
def test_option_that_is_wrong_is_an_error_that_names_it(
    folder: Path, options: list[str], said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    given = ["bench", "speculation", "--model", str(folder), "--accelerator", "cpu", *options]
    with pytest.raises(SystemExit) as ended:
        main(given)
    assert ended.value.code == 2
    assert said in capfd.readouterr().err


def test_the_verb_measures(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = ["--load", "1", "--policies", "off", "--tokens", "4", "--prompts", "2"]
    given = ["bench", "speculation", "--model", str(folder), "--accelerator", "cpu", *options]
    with pytest.raises(SystemExit) as ended:
        main([*given, "--max-model-len", "128"])
    assert ended.value.code in (0, None)
    assert "tokens/s" in capfd.readouterr().out
