"""Options of speculation, and drafts of the golden model's own stages in the engine."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from deepinfer_core.config import EngineConfig
from deepinfer_core.cpu.backend import CpuBackend
from deepinfer_core.engine.engine import Engine, build_engine
from deepinfer_core.engine.memory import plan_memory
from deepinfer_core.engine.requests import RequestReader
from deepinfer_core.engine.speculation import choose_drafts, fingerprint
from deepinfer_core.engine.tokenizer import TextCodec
from deepinfer_core.errors import ConfigError, RequestError
from deepinfer_core.metrics.speculation import SpeculationMetrics
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.plans import (
    PHASES,
    Phase,
    SchedulerOutput,
    StepKind,
    StepPlan,
    StepResult,
    StepRows,
)
from deepinfer_core.testing.planners import ChosenPlanner, RandomPlanner, ScriptedVerifier
from deepinfer_core.types import Request, SamplingParams

GOLDEN = Path(__file__).parents[3] / "tests" / "conformance" / "model"
FOLDER = GOLDEN / "tiny_a_fp"
MODEL = ModelConfig.from_folder(FOLDER)
BACKEND = CpuBackend("release")
NUM_TOKENS = 16
VERIFY = PHASES.index(Phase.VERIFY)


class Made(ScriptedVerifier):
    """A verifier that keeps what it was constructed with, and picks budgets at random."""

    given: dict[str, Any]

    def __init__(self, **given: Any):
        super().__init__(RandomPlanner(3))
        Made.given = given


class Wrong(Made):
    """One whose files do not fit."""

    error = ValueError

    def __init__(self, **given: Any):
        raise ValueError("`costs` is of another engine.")


class Half(Made):
    """One that always verifies half of the drafts."""

    def __init__(self, **given: Any):
        super().__init__(**given)
        self.planner = ChosenPlanner(lambda most: most // 2)


def engine(verifier: type[Any] | None = Made, **options: Any) -> Engine:
    small = {"block_size": 4, "max_model_len": 100, "determinism": "strict"}
    config = EngineConfig(model=str(FOLDER), **{**small, **options})
    return build_engine(config, BACKEND, FOLDER, TextCodec(FOLDER).tokenizer, verifier)


def texts(target: Engine, num: int = 3) -> dict[int, list[int]]:
    """Generate by requests of several temperatures and filters; uid -> token ids."""
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.9, "top_p": 0.95, "repetition_penalty": 1.1},
        {"temperature": 0.7, "top_k": 40, "frequency_penalty": 0.3, "logit_bias": {5: 2.0}},
    ]
    for uid in range(num):
        params = SamplingParams(max_tokens=NUM_TOKENS, **kinds[uid % 3])
        prompt = tuple(range(3 + uid, 12 + 3 * uid))
        target.submit(Request(uid, f"r{uid}", prompt, params, seed=uid, strict=True))
    found: dict[int, list[int]] = {uid: [] for uid in range(num)}
    while target.has_work:
        for update in target.step():
            found[update.uid] += update.token_ids
            assert update.error is None, update.error
    target.close()
    return found


@pytest.fixture(scope="module")
def plain() -> dict[int, list[int]]:
    return texts(engine(speculation="off"))


# Options


def test_drafts_are_off_without_a_verifier_and_delayed_with_one() -> None:
    config = EngineConfig()
    assert choose_drafts(config, MODEL, installed=False) == ("off", 0)
    assert choose_drafts(config, MODEL, installed=True) == ("delayed", MODEL.dspark_block_size)
    off = EngineConfig(speculation="off")
    assert choose_drafts(off, MODEL, installed=True) == ("off", 0)


@pytest.mark.parametrize(
    ("options", "installed", "words"),
    [
        ({"speculation": "fixed"}, False, "`deepinfer-specdec` is not installed"),
        ({"num_drafts": 99}, True, "`num_drafts` is 99, but the model drafts blocks of"),
    ],
)
def test_what_cannot_be_is_said(options: dict[str, Any], installed: bool, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        choose_drafts(EngineConfig(**options), MODEL, installed=installed)


@pytest.mark.parametrize("options", [{"num_drafts": 2}, {"speculation_costs": "x.json"}])
@pytest.mark.parametrize("installed", [True, False])
def test_options_of_drafts_are_refused_where_nothing_drafts(
    options: dict[str, Any], installed: bool
) -> None:
    off = {"speculation": "off"} if installed and "num_drafts" in options else {}
    if installed and not off:
        pytest.skip("costs without drafts are refused by the options themselves")
    with pytest.raises(ConfigError, match=f"`{next(iter(options))}` is .*nothing is drafted"):
        choose_drafts(EngineConfig(**options, **off), MODEL, installed=installed)


def test_costs_belong_to_the_policy_that_looks_at_them() -> None:
    with pytest.raises(
        ConfigError, match=r"`speculation_costs` is 'x\.json', but `speculation` is"
    ):
        EngineConfig(speculation="fixed", speculation_costs="x.json")


def test_the_verifier_gets_the_options_and_its_refusal_is_a_wrong_option() -> None:
    engine(speculation="threshold", speculation_threshold=0.4, num_drafts=2).close()
    given = Made.given
    assert (given["policy"], given["threshold"], given["num_drafts"]) == ("threshold", 0.4, 2)
    assert given["acceptance"] == "target_noise" and given["block_size"] == MODEL.dspark_block_size
    assert given["calibration"] is None and given["checkpoint"] is None and given["costs"] is None
    with pytest.raises(ConfigError, match="of another engine"):
        engine(Wrong)


def test_the_fingerprint_tells_engines_apart() -> None:
    first = fingerprint(EngineConfig(), BACKEND, FOLDER, 3)
    assert fingerprint(EngineConfig(), BACKEND, FOLDER, 3) == first
    assert fingerprint(EngineConfig(), BACKEND, FOLDER, 2) != first
    assert fingerprint(EngineConfig(), BACKEND, GOLDEN / "tiny_a", 3) != first
    assert fingerprint(EngineConfig(numerics="cache"), BACKEND, FOLDER, 3) != first


def test_drafts_take_memory() -> None:
    config = EngineConfig(max_sequences=2, max_model_len=100)
    off, on = (plan_memory(MODEL, config, BACKEND, num_drafts=n) for n in (0, 3))
    assert on.weights > off.weights and on.sizes.max_drafts == 3
    assert on.slot_bytes["window rings"] > off.slot_bytes["window rings"]
    kept = plan_memory(
        MODEL, EngineConfig(max_sequences=2, acceptance="rejection"), BACKEND, num_drafts=3
    )
    assert kept.slot_bytes["chances of drafts"] == 3 * MODEL.vocab_size * 4


def test_strict_requests_with_a_temperature_refuse_rejection_sampling() -> None:
    asked = EngineConfig(acceptance="rejection")
    off = engine(speculation="off")
    reader = RequestReader(asked, MODEL, limits=off.limits, encode=lambda text: [3])
    strict = SamplingParams(temperature=0.5, determinism="strict")
    assert reader.read([3, 4], strict, 0).strict  # nothing is drafted there
    target = engine(speculation="fixed")
    reader = RequestReader(asked, MODEL, limits=target.limits, encode=lambda text: [3])
    with pytest.raises(RequestError, match="`acceptance` is 'rejection'"):
        reader.read([3, 4], SamplingParams(temperature=0.5, determinism="strict"), 0)
    assert reader.read([3, 4], SamplingParams(temperature=0, determinism="strict"), 0).strict
    assert not reader.read([3, 4], SamplingParams(temperature=0.5), 0).strict


# Counters


def observed(trims: bool, verified: list[int], accepted: list[int]) -> dict[str, Any]:
    """Families after a step of sequences with 2 drafts that pass by 0.9 and 0.45."""
    count = len(verified)
    rows = StepRows.of(count, phase=VERIFY, num_rows=3, num_drafts=2)
    num_rows = count + sum(verified)
    plan = StepPlan(
        SchedulerOutput(1, StepKind.DECODE, num_rows, False), rows, np.zeros(3 * count, np.int64)
    )
    assert plan.trims == trims
    zeros = np.zeros(count, dtype=np.int64)
    result = StepResult(
        1, np.zeros((count, 3), np.int64), np.array(accepted) + 1, zeros, zeros, np.array(verified)
    )
    metrics = SpeculationMetrics()
    survival = np.tile(np.float32([0.9, 0.45]), (count, 1))
    metrics.observe(plan, result, survival, np.arange(count) > 0)
    return {name: family.values for name, family in metrics.families().items()}


def test_predictions_are_compared_with_what_stood() -> None:
    found = observed(False, [2] * 5, [2, 2, 1, 1, 0])
    assert found["verify_steps"] == {("full",): 1, ("trimmed",): 0}
    assert found["rows_without_survival"] == {(): 1}  # the first one
    # four known rows: 0.9 * 4 and 0.45 * 4 predicted, 3 and 1 stood
    assert found["predicted_accepted_ratio"][()] == pytest.approx((3.6 + 1.8) / 4)
    assert found["survival_ece"]["0",] == pytest.approx(0.15)
    assert found["survival_ece"]["1",] == pytest.approx(0.2)


def test_trimmed_steps_do_not_count_for_calibration() -> None:
    found = observed(True, [2, 1, 0], [2, 1, 0])
    assert found["verify_steps"] == {("full",): 0, ("trimmed",): 1}
    assert found["survival_ece"] == {}
    assert found["predicted_accepted_ratio"][()] == pytest.approx(0.9)
    assert SpeculationMetrics().families() == {}


# Texts


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("verifier", [Made, Half])
def test_texts_are_those_of_plain_decoding(
    plain: dict[int, list[int]], depth: int, verifier: type[Any]
) -> None:
    target = engine(verifier, depth=depth, speculation="delayed")
    assert texts(target) == plain
    totals = target._scheduler.totals
    assert 0 < totals.verified_tokens < totals.decode_rows * MODEL.dspark_block_size
    values = target.metrics()["verify_steps"].values
    assert values["trimmed",] > 0


def test_few_blocks_and_preemptions_change_no_text(plain: dict[int, list[int]]) -> None:
    target = engine(speculation="delayed", num_blocks=20)
    assert texts(target) == plain
    assert target.stats.preemptions > 0


def test_drafting_with_other_noise_is_accepted_less_often(
    plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Power of the tests above: drafts matter to what is accepted, and to nothing else."""
    from deepinfer_core.engine import verification

    def accepted() -> int:
        target = engine(Half, speculation="fixed")
        assert texts(target) == plain
        return target._scheduler.totals.yielded_tokens - target._scheduler.totals.decode_rows

    whole = accepted()

    def worst(self: verification.Picks, logits: Tensor, drafts: Tensor) -> Tensor:
        return logits.argmin(-1)

    monkeypatch.setattr(verification.Picks, "next", worst)
    assert accepted() < whole


def test_a_text_that_takes_all_drafts_is_another(
    plain: dict[int, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    from deepinfer_core.engine import verification

    def all_of_them(targets: Tensor, faults: Tensor, drafts: Tensor, counts: Tensor) -> Tensor:
        return counts

    monkeypatch.setattr(verification, "num_accepted", all_of_them)
    assert texts(engine(speculation="delayed")) != plain


def test_windows_of_drafts_begin_where_their_keys_do() -> None:
    """A prompt that is found in the cache leaves no keys for its beginning."""
    target = engine(Half, determinism="normal")
    prompt, params = tuple(range(3, 60)), SamplingParams(max_tokens=8, temperature=0)
    outputs = []
    for uid in (0, 1):
        target.submit(
            Request(
                uid, f"r{uid}", prompt, params, seed=0, replay_encoder=True, replay_decoder=True
            )
        )
        found: list[int] = []
        while target.has_work:
            for update in target.step():
                found += update.token_ids
                assert update.error is None
        outputs.append(found)
    assert len(outputs[0]) == len(outputs[1]) == 8
    assert torch.isfinite(target._loop.worker._forward._verification._survival).all()
