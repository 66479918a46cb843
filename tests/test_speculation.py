"""Drafts in the engine, end to end, with the small model: texts are those of plain decoding."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from deepinfer_core import LLM, ConfigError, EngineConfig, RequestError, SamplingParams
from deepinfer_core.bench.speculation_prompts import prompts_of
from deepinfer_core.engine import forward, verification
from deepinfer_core.model import nano
from deepinfer_core.model.config import ModelConfig
from deepinfer_core.testing.speculation_variants import (
    Mixed,
    answers,
    mixed_requests,
    variants,
    write_steep_costs,
)

pytestmark = pytest.mark.filterwarnings(
    "ignore:Steps take another time than the cost table says"  # the table is made up
)

OPTIONS = {"accelerator": "cpu", "determinism": "strict", "max_sequences": 8, "max_model_len": 640}
# as the model's block; a test compares
NUM_DRAFTS = 5
COSTS = Path("costs")  # stands for the file, which a fixture writes
VARIANTS = {each.name: each for each in variants(NUM_DRAFTS, COSTS)}
PLAIN = "off, depth 0"


def model(**options: object) -> LLM:
    return LLM(**{**OPTIONS, **options})


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("costs") / "costs.json"
    write_steep_costs(path, EngineConfig(**OPTIONS))
    return str(path)


@pytest.fixture(scope="module")
def mixed() -> Mixed:
    return mixed_requests(nano.folder(), count=8, tokens=16, longest=64)


@pytest.fixture(scope="module")
def plain(mixed: Mixed) -> list[object]:
    """What plain decoding answers, one thing at a time."""
    with model(speculation="off", depth=0) as llm:
        return list(answers(llm, mixed))


def verified(llm: LLM) -> tuple[float, float]:
    """Return decode steps that verified (all drafts, fewer)."""
    steps = llm.engine.metrics()["verify_steps"].values
    return float(steps["full",]), float(steps["trimmed",])


def counted(llm: LLM, name: str) -> float:
    [value] = llm.engine.metrics()[name].values.values()
    return float(value)


def test_variants_cover_every_length_of_a_block() -> None:
    assert ModelConfig.from_folder(nano.folder()).dspark_block_size == NUM_DRAFTS
    assert len(VARIANTS) == 2 * (1 + NUM_DRAFTS + 2)


def test_requests_end_in_every_way_and_are_greedy_and_sampled(
    mixed: Mixed, plain: list[tuple[tuple[int, ...], str, str, object]]
) -> None:
    assert {reason for _, _, reason, _ in plain} == {"stop", "length"}
    assert {params.temperature > 0 for params in mixed.params} == {True, False}
    assert sum(len(ids) for ids, *_ in plain) * (len(VARIANTS) - 1) >= 500
    assert sum(logprobs is not None for *_, logprobs in plain) == 2


def test_samples_are_not_the_most_likely_tokens(mixed: Mixed, plain: list[object]) -> None:
    greedy = [replace(params, temperature=0.0) for params in mixed.params]
    with model(speculation="off") as llm:
        likely = answers(llm, Mixed(mixed.prompts, greedy))
    differ = [one != other for one, other in zip(likely, plain, strict=True)]
    sampled = [params.temperature > 0 for params in mixed.params]
    assert 2 * sum(differ) >= sum(sampled) > 2


@pytest.mark.parametrize("name", [name for name in VARIANTS if name != PLAIN])
def test_answers_are_those_of_plain_decoding(
    name: str, mixed: Mixed, plain: list[object], costs: str
) -> None:
    options = dict(VARIANTS[name].options)
    if "speculation_costs" in options:
        options["speculation_costs"] = costs
    with model(**options) as llm:
        assert answers(llm, mixed) == plain
        llm.engine.audit()
        if "off" in name:
            return
        full, trimmed = verified(llm)
        assert counted(llm, "yielded_tokens") > 1.2 * counted(llm, "decode_rows")
    # fixed lengths verify all; the others leave drafts out
    assert (trimmed > 0) == ("fixed" not in name)
    assert full + trimmed > 0


def test_drafts_are_verified_without_an_option(mixed: Mixed, plain: list[object]) -> None:
    with model() as llm:
        assert answers(llm, mixed) == plain
        full, trimmed = verified(llm)
    assert full > 0
    assert trimmed == 0, "without a cost table nothing is left out"


# faults that must show


def accepts_one_more(*args: object) -> torch.Tensor:
    lengths = args[-1]
    assert isinstance(lengths, torch.Tensor)
    return torch.minimum(TRUE_ACCEPTED(*args) + 1, lengths)  # type: ignore[arg-type]


def noise_of_the_first_row(self: forward.Forward, *args: object) -> object:
    rows = TRUE_ROWS(self, *args)  # type: ignore[arg-type]
    rows.positions.sub_(rows.offset)
    return rows


TRUE_ACCEPTED: Callable[..., torch.Tensor] = verification.num_accepted
TRUE_ROWS = forward.Forward._sampled_rows


@pytest.mark.parametrize(
    ("place", "name", "fault"),
    [
        (verification, "num_accepted", accepts_one_more),
        (forward.Forward, "_sampled_rows", noise_of_the_first_row),
    ],
    ids=["a draft too many stands", "noise of one place in all rows"],
)
def test_a_fault_of_verification_shows_in_the_answers(
    place: object,
    name: str,
    fault: object,
    mixed: Mixed,
    plain: list[object],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(place, name, fault)
    with model(speculation="fixed") as llm:
        assert answers(llm, mixed) != plain


def test_drafts_of_a_faulty_drafter_do_no_harm(
    mixed: Mixed, plain: list[object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def shifted(self: verification.Picks, logits: torch.Tensor, drafts: torch.Tensor):
        return (true_next(self, logits, drafts) + 1) % logits.shape[1]

    true_next = verification.Picks.next
    monkeypatch.setattr(verification.Picks, "next", shifted)
    with model(speculation="fixed") as llm:
        assert answers(llm, Mixed(mixed.prompts[:4], mixed.params[:4])) == plain[:4]
        assert counted(llm, "yielded_tokens") < 1.1 * counted(llm, "decode_rows")


# memory, caches, ends

LONG = SamplingParams(max_tokens=16, temperature=4.0, seed=5, ignore_eos=True)


@pytest.fixture(scope="module")
def prompts() -> list[tuple[int, ...]]:
    drawn = prompts_of(nano.folder(), ModelConfig.from_folder(nano.folder()), 8, 3)
    return [each for each in drawn if len(each) < 64][:4]


@pytest.fixture(scope="module")
def plain_long(prompts: list[tuple[int, ...]]) -> list[tuple[int, ...]]:
    with model(speculation="off") as llm:
        outputs = llm.generate(prompts, LONG)
        assert llm.engine.stats.preemptions == 0
    return [output.token_ids for output in outputs]


def test_answers_survive_preemption(
    prompts: list[tuple[int, ...]], plain_long: list[tuple[int, ...]]
) -> None:
    blocks = sum(len(prompt) // 16 + 1 for prompt in prompts)  # room for all prompts, not more
    options = {"num_blocks": blocks, "block_size": 16, "max_model_len": 80, "prefix_cache": False}
    with model(speculation="fixed", **options) as llm:
        outputs = llm.generate(prompts, LONG)
        assert llm.engine.stats.preemptions > 0
        llm.engine.audit()
    assert [output.token_ids for output in outputs] == plain_long


def test_answers_behind_a_prefix_hit_are_the_same(
    prompts: list[tuple[int, ...]], plain_long: list[tuple[int, ...]]
) -> None:
    with model(speculation="fixed", stored_windows=4, block_size=16) as llm:
        [cold] = llm.generate(prompts[:1], LONG)
        [warm] = llm.generate(prompts[:1], LONG)
    assert (cold.num_cached_tokens, warm.num_cached_tokens > 0) == (0, True)
    assert cold.token_ids == warm.token_ids == plain_long[0]


def test_abort_leaves_the_others_alone(
    prompts: list[tuple[int, ...]], plain_long: list[tuple[int, ...]]
) -> None:
    given = [
        {"prompt_token_ids": prompt, "client_id": f"client {place}"}
        for place, prompt in enumerate(prompts[:3])
    ]
    with model(speculation="fixed") as llm:
        ended = {}
        for output in llm.stream(given, LONG):
            if output.index == 1 and len(output.token_ids) > 3:
                llm.abort("client 1")
            if output.finished:
                ended[output.index] = output
        llm.engine.audit()
    assert ended[1].finish_reason == "abort"
    assert ended[1].token_ids == plain_long[1][: len(ended[1].token_ids)]
    assert [ended[place].token_ids for place in (0, 2)] == [plain_long[0], plain_long[2]]


@pytest.mark.parametrize("acceptance", ["target_noise", "rejection"])
def test_values_that_are_not_finite_end_their_own_request_alone(
    acceptance: str, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(Path(__file__).parent / "conformance" / "model" / "tiny_a_fp", folder)
    weights = load_file(folder / "model.safetensors")
    weights["embed.weight"][77] = torch.nan
    save_file(weights, folder / "model.safetensors")
    greedy = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    options = {"accelerator": "cpu", "block_size": 4, "max_model_len": 100, "max_sequences": 2}
    with LLM(folder, speculation="fixed", acceptance=acceptance, **options) as llm:
        outputs = llm.generate([[5, 6, 7] * 9, [5, 77, 9] * 9, [9, 8, 7] * 9], greedy)
        llm.engine.audit()
    assert [str(output.finish_reason) for output in outputs] == ["length", "error", "length"]
    assert outputs[1].error_code == "non_finite"


def test_every_cap_inside_an_accepted_run_ends_there(prompts: list[tuple[int, ...]]) -> None:
    caps = list(range(2, 10))
    params = [SamplingParams(max_tokens=cap, temperature=0) for cap in caps]
    with model(speculation="fixed") as llm:
        outputs = llm.generate([prompts[0]] * len(caps), params)
        llm.engine.audit()
    texts = [output.token_ids for output in outputs]
    assert [len(ids) for ids in texts] == caps
    assert all(ids == texts[-1][: len(ids)] for ids in texts)
    assert {str(output.finish_reason) for output in outputs} == {"length"}


def test_every_stop_id_inside_an_accepted_run_ends_there(prompts: list[tuple[int, ...]]) -> None:
    greedy = SamplingParams(max_tokens=12, temperature=0)
    with model(speculation="fixed") as llm:
        [whole] = llm.generate([prompts[0]], greedy)
        firsts = {each: whole.token_ids.index(each) for each in whole.token_ids}
        params = [
            SamplingParams(max_tokens=12, temperature=0, stop_token_ids=(each,)) for each in firsts
        ]
        outputs = llm.generate([prompts[0]] * len(params), params)
    for output, place in zip(outputs, firsts.values(), strict=True):
        assert output.token_ids == whole.token_ids[: place + 1]
        assert output.finish_reason == "stop"


# the other rule


def test_rejection_keeps_greedy_answers_and_repeats_samples(
    prompts: list[tuple[int, ...]], plain_long: list[tuple[int, ...]]
) -> None:
    params = [replace(LONG, determinism="normal"), replace(LONG, temperature=0.0)]
    with model(speculation="off") as llm:
        [likely] = llm.generate(prompts[:1], params[1])
    with model(speculation="fixed", acceptance="rejection") as llm:
        runs = [llm.generate([prompts[0]] * 2, params) for _ in range(2)]
        with pytest.raises(RequestError, match="`acceptance` is 'rejection'"):
            llm.generate(prompts[:1], LONG)
    sampled, greedy = ([run[place].token_ids for run in runs] for place in (0, 1))
    assert sampled[0] == sampled[1] != plain_long[0]
    assert greedy == [likely.token_ids] * 2


def test_costs_of_another_engine_are_refused(costs: str) -> None:
    with pytest.raises(ConfigError, match="num_drafts"):
        model(speculation="delayed", speculation_costs=costs, num_drafts=3)
